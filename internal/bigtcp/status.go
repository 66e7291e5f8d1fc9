// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/config"
	"sockeye/internal/fault"
)

// Interfaces returns the status of the interfaces that rules match, optionally only those
// of a namespace or with a name.
func (d *Domain) Interfaces(netns, name string) (*api.BigTCPStatus, error) {
	status := &api.BigTCPStatus{Interfaces: []api.BigTCPInterface{}}
	var known []string
	for _, s := range d.allReconcilers() {
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
		return nil, fault.Usage(fmt.Errorf("no bigtcp rule matches interface %q", name), hint)
	}
	return status, nil
}

// maxProblems bounds the interfaces in BigTCPNetwork.Problems.
const maxProblems = 20

// Status adds the network namespaces that have rules.
func (d *Domain) Status(status *api.Status) error {
	status.BigTCP = []api.BigTCPNetwork{}
	for _, s := range d.allReconcilers() {
		status.BigTCP = append(status.BigTCP, s.summary())
	}
	return nil
}

func (s *reconciler) summary() api.BigTCPNetwork {
	all := s.status()
	s.mu.Lock()
	defer s.mu.Unlock()
	n := api.BigTCPNetwork{Netns: s.netns, Rules: len(s.rules), Problems: []api.BigTCPInterface{}}
	if s.problem != nil {
		n.Problem, n.Hint = fault.Message(s.problem), fault.Hint(s.problem)
	}
	for _, i := range all {
		if i.Index == 0 {
			n.Waiting++
			continue
		}
		switch i.State {
		case api.SizesApplied:
			n.Applied++
			continue
		case api.SizesChanged:
			n.Changed++
		case api.SizesImpossible:
			n.Impossible++
		case api.SizesConflict:
			n.Conflict++
		case api.SizesWaiting:
			n.Waiting++
		}
		if len(n.Problems) < maxProblems {
			n.Problems = append(n.Problems, i)
		}
	}
	return n
}

// status returns the interfaces sorted by index, and then the rules that match no
// interface.
func (s *reconciler) status() []api.BigTCPInterface {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := []api.BigTCPInterface{}
	waiting := func(rule config.BigTCPRule, err error, since time.Time) {
		list = append(list, api.BigTCPInterface{Netns: s.netns, Interface: rule.Interface, Rule: rule.String(), Requested: wantOf(rule),
			State: api.SizesWaiting, Problem: fault.Message(err), Hint: fault.Hint(err), Since: since})
	}
	if s.problem != nil && len(s.interfaces) == 0 {
		for _, rule := range s.rules {
			waiting(rule, s.problem, s.since)
		}
		return list
	}
	for _, i := range sortedByIndex(s.interfaces) {
		status := api.BigTCPInterface{Netns: s.netns, Interface: i.name, Index: i.index, UpperInterface: i.upper, Requested: i.want, Sizes: i.from,
			State: i.state, Notes: i.notes, Since: i.since}
		if i.rule != nil {
			status.Rule = i.rule.String()
		}
		if i.err != nil {
			status.Problem, status.Hint = fault.Message(i.err), fault.Hint(i.err)
		}
		list = append(list, status)
	}
	for _, rule := range s.rules {
		if since, ok := s.unmatched[rule]; ok {
			waiting(rule, errNoInterface, since)
		}
	}
	return list
}

var errNoInterface = fault.WithHint(errors.New("there is no such interface"), "its sizes are set when it appears")

func wantOf(rule config.BigTCPRule) sizing.Want {
	return sizing.Want{IPv6: rule.IPv6, IPv4: rule.IPv4}
}

// allReconcilers returns the reconcilers of all network namespaces that have rules, sorted
// by path.
func (d *Domain) allReconcilers() []*reconciler {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []*reconciler
	for _, netns := range slices.Sorted(maps.Keys(d.reconcilers)) {
		all = append(all, d.reconcilers[netns])
	}
	return all
}
