// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"sockeye/internal/api"
	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/config"
	"sockeye/internal/fault"
)

// outlook is what rules make of a network namespace as it is.
type outlook struct {
	interfaces map[int]*sized      // by index
	unmatched  []config.BigTCPRule // rules that no interface matches
	paths      []*sizedPath        // with something to do
	// unwanted are records of the policy on interfaces that no rule is for any more,
	// gone those of interfaces that there are no more.
	unwanted, gone []sizing.Record
}

// sizedPath are interfaces that are bound to one another: all of them are set, or
// none.
type sizedPath struct {
	targets []sizing.Target
	members []int // indexes
	force   bool  // somebody else's sizes are overwritten
}

// outlook looks at what the rules ask for, and at what can be done about it. If that
// is explicit, what somebody else has set is to be set again.
func (s *sizer) outlook(n *netif.Namespace, rules []config.BigTCPRule, explicit bool) (*outlook, error) {
	all, err := n.Interfaces()
	if err != nil {
		return nil, err
	}
	records, err := s.records(n)
	if err != nil {
		return nil, err
	}
	o := &outlook{interfaces: make(map[int]*sized)}
	paths := o.match(all, rules)
	if err := s.plan(o, n, all); err != nil {
		return nil, err
	}
	for index, i := range o.interfaces {
		s.decide(i, records[index], explicit)
	}
	for _, p := range paths {
		o.gather(p)
	}
	for _, index := range slices.Sorted(maps.Keys(records)) {
		r := records[index]
		at := slices.IndexFunc(all, func(i netif.Interface) bool { return i.Index == index })
		switch {
		case r.Owner != sizing.ByPolicy || o.interfaces[index] != nil || o.needs(r):
		case at < 0:
			o.gone = append(o.gone, r)
		case touched(r, all[at].Sizes) && all[at].Sizes != r.Before:
			o.interfaces[index] = &sized{name: all[at].Name, index: index, want: r.Want, from: all[at].Sizes, to: r.Before, state: api.SizesChanged,
				err: fault.WithHint(errors.New("no rule is for it any more, but somebody else has set its sizes, which are left alone"),
					revertCommand(r.Netns, "--force "+all[at].Name)+" gives it what it had before")}
		default:
			o.unwanted = append(o.unwanted, r)
		}
	}
	return o, nil
}

// records are those of a namespace, by index, whoever had them made.
func (s *sizer) records(n *netif.Namespace) (map[int]sizing.Record, error) {
	all, err := s.store.Records()
	if err != nil {
		return nil, err
	}
	here := make(map[int]sizing.Record)
	for _, r := range all {
		if r.NetnsID == n.ID() {
			here[r.Index] = r
		}
	}
	return here, nil
}

// match finds the interfaces that rules are for and those below them, and puts those
// together that are bound to one another.
func (o *outlook) match(all []netif.Interface, rules []config.BigTCPRule) [][]int {
	used := make([]bool, len(rules))
	var paths [][]int
	for _, i := range all {
		at := slices.IndexFunc(rules, func(r config.BigTCPRule) bool { return r.Matches(i.Name) })
		if at < 0 {
			continue
		}
		used[at] = true
		o.interfaces[i.Index] = &sized{name: i.Name, index: i.Index, rule: &rules[at], target: true,
			want: sizing.Want{IPv6: rules[at].IPv6, IPv4: rules[at].IPv4}, from: i.Sizes, to: i.Sizes}
	}
	for _, i := range all {
		target := o.interfaces[i.Index]
		if target == nil || !target.target {
			continue
		}
		path := []int{i.Index}
		for _, r := range i.Related {
			if r.Relation != netif.Lower || r.Netns != "" {
				continue
			}
			path = append(path, r.Index)
			if o.interfaces[r.Index] == nil {
				o.interfaces[r.Index] = &sized{name: r.Name, index: r.Index, rule: target.rule, because: i.Name, want: target.want, from: r.Sizes, to: r.Sizes}
			}
		}
		// What shares a device with another path is one with it.
		paths = slices.DeleteFunc(paths, func(other []int) bool {
			shared := slices.ContainsFunc(other, func(index int) bool { return slices.Contains(path, index) })
			if shared {
				path = append(path, other...)
			}
			return shared
		})
		paths = append(paths, path)
	}
	for at, rule := range rules {
		if !used[at] {
			o.unmatched = append(o.unmatched, rule)
		}
	}
	return paths
}

// plan finds what is to be changed so that all have what the rules say, and what is
// impossible.
func (s *sizer) plan(o *outlook, n *netif.Namespace, all []netif.Interface) error {
	support := n.Support()
	var targets []sizing.Target
	for index := range all {
		i := o.interfaces[all[index].Index]
		if i == nil || !i.target {
			continue
		}
		if i.want.IPv6 > netif.Legacy || i.want.IPv4 > netif.Legacy {
			if verdict := all[index].Verdict(support); verdict.State == netif.Impossible {
				i.err = fault.Unsupported(errors.New(strings.TrimPrefix(verdict.Text, "impossible: ")), "")
				continue
			}
		}
		targets = append(targets, sizing.Target{Interface: i.name, Want: i.want})
	}
	changes, err := s.store.Plan(n, sizing.ByPolicy, targets, true)
	var refused *fault.Error
	if err != nil && !errors.As(err, &refused) {
		return err
	}
	if err != nil {
		// One cannot, or has vanished: which one is found by asking for each.
		able := targets[:0]
		for _, t := range targets {
			_, err := s.store.Plan(n, sizing.ByPolicy, []sizing.Target{t}, true)
			if err != nil && !errors.As(err, &refused) {
				return err
			}
			if err == nil {
				able = append(able, t)
				continue
			}
			for _, i := range o.interfaces {
				if i.target && i.name == t.Interface {
					i.err = err
				}
			}
		}
		if changes, err = s.store.Plan(n, sizing.ByPolicy, able, true); err != nil {
			return err
		}
	}
	for _, c := range changes {
		if i := o.interfaces[c.Index]; i != nil {
			i.from, i.to, i.notes, i.planned = c.From, c.To, c.Notes, true
		}
	}
	// What is below one that is impossible is left as it is.
	maps.DeleteFunc(o.interfaces, func(_ int, i *sized) bool { return !i.planned && !i.target })
	return nil
}

// decide finds the state of an interface. One that is to be set is waiting.
func (s *sizer) decide(i *sized, r sizing.Record, explicit bool) {
	before := s.interfaces[i.index]
	recorded := r.Owner == sizing.ByPolicy
	changed := false
	switch {
	case recorded:
		changed = touched(r, i.from)
	case before != nil:
		// It had what the rule asks for, or its record was taken away.
		changed = before.state == api.SizesChanged || before.state == api.SizesApplied && i.from != before.from
	}
	switch {
	case fault.Code(i.err) == fault.CodeUsage:
		i.state, i.err = api.SizesWaiting, errors.New("it has vanished")
	case i.err != nil:
		i.state = api.SizesImpossible
	case r.Owner != "" && !recorded:
		i.state, i.err = api.SizesConflict, held(i.name, r)
	case i.from == i.to && r.From == (netif.Sizes{}) && (!explicit || !recorded || r.Applied == i.to):
		i.state = api.SizesApplied
	case changed && !explicit:
		i.state = api.SizesChanged
		i.err = fault.WithHint(errors.New("somebody else has set its sizes since, which are left alone"), "sockeye apply sets them as the policy says")
	default:
		i.state, i.todo, i.force = api.SizesWaiting, true, changed
	}
}

// held says who has the record of an interface that the policy wants.
func held(name string, r sizing.Record) error {
	return fault.Conflict(errors.New("sockeye bigtcp apply has set its sizes"), revertCommand(r.Netns, name)+" leaves it to the policy")
}

// revertCommand is the command that takes back what is in a network namespace.
func revertCommand(netns, what string) string {
	if netns != "" {
		what = "--netns " + netns + " " + what
	}
	return "sockeye bigtcp revert " + what
}

// gather notes what is to be done about interfaces that are bound to one another,
// unless one of them is not to be touched.
func (o *outlook) gather(members []int) {
	p := &sizedPath{}
	var obstacle *sized
	todo := false
	for _, index := range members {
		i := o.interfaces[index]
		if i == nil || slices.Contains(p.members, index) {
			continue
		}
		p.members = append(p.members, index)
		if i.target && i.planned {
			p.targets = append(p.targets, sizing.Target{Interface: i.name, Want: i.want})
		}
		p.force = p.force || i.force
		todo = todo || i.todo
		if obstacle == nil && (i.state == api.SizesConflict || i.state == api.SizesChanged) {
			obstacle = i
		}
	}
	if !todo {
		return
	}
	if obstacle == nil {
		o.paths = append(o.paths, p)
		return
	}
	for _, index := range p.members {
		if i := o.interfaces[index]; i.todo {
			i.state, i.todo = api.SizesConflict, false
			i.err = &fault.Error{Err: fmt.Errorf("%s is on its path: %w", obstacle.name, obstacle.err), Hint: fault.Hint(obstacle.err), Code: fault.CodeConflict}
		}
	}
}

// needs tells whether a record of a device is for the sake of an interface above it
// that a rule is for.
func (o *outlook) needs(r sizing.Record) bool {
	return slices.ContainsFunc(r.For, func(index int) bool { return o.interfaces[index] != nil && o.interfaces[index].target })
}

// touched tells whether somebody else has set sizes since the policy's record was
// made. An agent that was killed may have left one of what it had not set yet.
func touched(r sizing.Record, now netif.Sizes) bool {
	unfinished := r.From != (netif.Sizes{}) && (now == r.From || now == r.Before)
	return now != r.Applied && !unfinished
}
