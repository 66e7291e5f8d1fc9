// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/config"
)

// maxProblems bounds the interfaces of a status that are not applied.
const maxProblems = 20

// allSizers are those of all network namespaces that have rules, by path.
func (a *Agent) allSizers() []*sizer {
	a.mu.Lock()
	defer a.mu.Unlock()
	var all []*sizer
	for _, netns := range slices.Sorted(maps.Keys(a.sizers)) {
		all = append(all, a.sizers[netns])
	}
	return all
}

// BigTCPStatus is all interfaces that rules are for, or those of a namespace or with a
// name.
func (a *Agent) BigTCPStatus(netns, name string) (*BigTCPStatus, error) {
	status := &BigTCPStatus{Interfaces: []BigTCPInterface{}}
	var known []string
	for _, s := range a.allSizers() {
		for _, i := range s.status() {
			if (netns == "" || netns == i.Netns) && (name == "" || name == i.Interface) {
				status.Interfaces = append(status.Interfaces, i)
			}
			known = append(known, i.Interface)
		}
	}
	if name != "" && len(status.Interfaces) == 0 {
		hint := ""
		if near := config.Nearest(name, known); near != "" {
			hint = "did you mean " + near + "?"
		}
		return nil, Usage(fmt.Errorf("the policy sets no interface %q", name), hint)
	}
	return status, nil
}

// status is the interfaces, by index, and then the rules that wait for one.
func (s *sizer) status() []BigTCPInterface {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := []BigTCPInterface{}
	waiting := func(rule config.BigTCPRule, err error, since time.Time) {
		list = append(list, BigTCPInterface{Netns: s.netns, Interface: rule.Interface, Rule: rule.String(), Want: wanted(rule),
			State: SizesWaiting, Problem: Message(err), Hint: Hint(err), Since: since})
	}
	if s.problem != nil && len(s.interfaces) == 0 {
		for _, rule := range s.rules {
			waiting(rule, s.problem, s.since)
		}
		return list
	}
	for _, i := range inOrder(s.interfaces) {
		status := BigTCPInterface{Netns: s.netns, Interface: i.name, Index: i.index, Because: i.because, Want: i.want, Sizes: i.from,
			State: i.state, Notes: i.notes, Since: i.since}
		if i.rule != nil {
			status.Rule = i.rule.String()
		}
		if i.err != nil {
			status.Problem, status.Hint = Message(i.err), Hint(i.err)
		}
		list = append(list, status)
	}
	for _, rule := range s.rules {
		if since, ok := s.unmatched[rule]; ok {
			waiting(rule, errNoneYet, since)
		}
	}
	return list
}

var errNoneYet = withHint(errors.New("there is no such interface"), "one that appears is set")

func wanted(rule config.BigTCPRule) sizing.Want {
	return sizing.Want{IPv6: rule.IPv6, IPv4: rule.IPv4}
}

func (s *sizer) summary() BigTCPNetwork {
	all := s.status()
	s.mu.Lock()
	defer s.mu.Unlock()
	n := BigTCPNetwork{Netns: s.netns, Rules: len(s.rules), Problems: []BigTCPInterface{}}
	if s.problem != nil {
		n.Problem, n.Hint = Message(s.problem), Hint(s.problem)
	}
	for _, i := range all {
		if i.Index == 0 {
			n.Waiting++
			continue
		}
		switch i.State {
		case SizesApplied:
			n.Applied++
			continue
		case SizesChanged:
			n.Changed++
		case SizesImpossible:
			n.Impossible++
		case SizesConflict:
			n.Conflict++
		case SizesWaiting:
			n.Waiting++
		}
		if len(n.Problems) < maxProblems {
			n.Problems = append(n.Problems, i)
		}
	}
	return n
}
