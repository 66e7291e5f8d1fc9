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

// assessment compares the interfaces of a network namespace with the rules.
type assessment struct {
	interfaces map[int]*interfaceState // by interface index
	unmatched  []config.BigTCPRule     // rules that no interface matches
	groups     []*interfaceGroup       // with pending changes
	unwanted   []sizing.Record         // records of the policy for interfaces that no rule matches any more
	gone       []sizing.Record         // records of the policy for interfaces that have vanished
}

// interfaceGroup has interfaces that share lower interfaces. Their sizes are set together:
// all of them or none.
type interfaceGroup struct {
	targets  []sizing.Target
	members  []int // interface indexes
	override bool  // overwrite sizes that another program has set
}

// assess compares the interfaces of a namespace with the rules and decides what to change.
// explicit is set for a change that a user requested: sizes that another program has set
// are then set again.
func (s *reconciler) assess(n *netif.Namespace, rules []config.BigTCPRule, explicit bool) (*assessment, error) {
	all, err := n.Interfaces()
	if err != nil {
		return nil, err
	}
	records, err := s.records(n)
	if err != nil {
		return nil, err
	}
	a := &assessment{interfaces: make(map[int]*interfaceState)}
	groups := a.match(all, rules)
	if err := s.plan(a, n, all); err != nil {
		return nil, err
	}
	for index, i := range a.interfaces {
		s.setState(i, records[index], explicit)
	}
	for _, p := range groups {
		a.addGroup(p)
	}
	for _, index := range slices.Sorted(maps.Keys(records)) {
		r := records[index]
		at := slices.IndexFunc(all, func(i netif.Interface) bool { return i.Index == index })
		switch {
		case r.Owner != sizing.ByPolicy || a.interfaces[index] != nil || a.isNeeded(r):
		case at < 0:
			a.gone = append(a.gone, r)
		case changedByOthers(r, all[at].Sizes) && all[at].Sizes != r.Before:
			a.interfaces[index] = &interfaceState{name: all[at].Name, index: index, want: r.Want, from: all[at].Sizes, to: r.Before, state: api.SizesChanged,
				err: fault.WithHint(errors.New("no rule matches the interface any more; its sizes were changed externally and are kept"),
					revertCommand(r.Netns, "--force "+all[at].Name)+" restores its previous sizes")}
		default:
			a.unwanted = append(a.unwanted, r)
		}
	}
	return a, nil
}

// records returns the records of a namespace by interface index, of all owners.
func (s *reconciler) records(n *netif.Namespace) (map[int]sizing.Record, error) {
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

// match adds the interfaces that rules match and their lower interfaces. It returns groups
// of interfaces, as indexes, that share an interface.
func (a *assessment) match(all []netif.Interface, rules []config.BigTCPRule) [][]int {
	used := make([]bool, len(rules))
	var groups [][]int
	for _, i := range all {
		at := slices.IndexFunc(rules, func(r config.BigTCPRule) bool { return r.Matches(i.Name) })
		if at < 0 {
			continue
		}
		used[at] = true
		a.interfaces[i.Index] = &interfaceState{name: i.Name, index: i.Index, rule: &rules[at], target: true,
			want: sizing.Want{IPv6: rules[at].IPv6, IPv4: rules[at].IPv4}, from: i.Sizes, to: i.Sizes}
	}
	for _, i := range all {
		target := a.interfaces[i.Index]
		if target == nil || !target.target {
			continue
		}
		group := []int{i.Index}
		for _, r := range i.Related {
			if r.Relation != netif.Lower || r.Netns != "" {
				continue
			}
			group = append(group, r.Index)
			if a.interfaces[r.Index] == nil {
				a.interfaces[r.Index] = &interfaceState{name: r.Name, index: r.Index, rule: target.rule, upper: i.Name, want: target.want, from: r.Sizes, to: r.Sizes}
			}
		}
		// Groups that share an interface are merged.
		groups = slices.DeleteFunc(groups, func(other []int) bool {
			shared := slices.ContainsFunc(other, func(index int) bool { return slices.Contains(group, index) })
			if shared {
				group = append(group, other...)
			}
			return shared
		})
		groups = append(groups, group)
	}
	for at, rule := range rules {
		if !used[at] {
			a.unmatched = append(a.unmatched, rule)
		}
	}
	return groups
}

// plan plans the sizes that the rules request, and records the interfaces that do not
// support them.
func (s *reconciler) plan(a *assessment, n *netif.Namespace, all []netif.Interface) error {
	support := n.Support()
	var targets []sizing.Target
	for index := range all {
		i := a.interfaces[all[index].Index]
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
		// An interface does not support its sizes, or has vanished. Planning each target
		// alone finds it.
		supported := targets[:0]
		for _, t := range targets {
			_, err := s.store.Plan(n, sizing.ByPolicy, []sizing.Target{t}, true)
			if err != nil && !errors.As(err, &refused) {
				return err
			}
			if err == nil {
				supported = append(supported, t)
				continue
			}
			for _, i := range a.interfaces {
				if i.target && i.name == t.Interface {
					i.err = err
				}
			}
		}
		if changes, err = s.store.Plan(n, sizing.ByPolicy, supported, true); err != nil {
			return err
		}
	}
	for _, c := range changes {
		if i := a.interfaces[c.Index]; i != nil {
			i.from, i.to, i.notes, i.planned = c.From, c.To, c.Notes, true
		}
	}
	// The lower interfaces of an impossible interface do not change.
	maps.DeleteFunc(a.interfaces, func(_ int, i *interfaceState) bool { return !i.planned && !i.target })
	return nil
}

// setState sets the state of an interface. An interface whose sizes are to be set is
// waiting.
func (s *reconciler) setState(i *interfaceState, r sizing.Record, explicit bool) {
	previous := s.interfaces[i.index]
	recorded := r.Owner == sizing.ByPolicy
	changed := false
	switch {
	case recorded:
		changed = changedByOthers(r, i.from)
	case previous != nil:
		// The interface had the requested sizes before, or its record was removed.
		changed = previous.state == api.SizesChanged || previous.state == api.SizesApplied && i.from != previous.from
	}
	switch {
	case fault.Code(i.err) == fault.CodeUsage:
		i.state, i.err = api.SizesWaiting, errors.New("the interface has vanished")
	case i.err != nil:
		i.state = api.SizesImpossible
	case r.Owner != "" && !recorded:
		i.state, i.err = api.SizesConflict, heldByCommand(i.name, r)
	case i.from == i.to && r.From == (netif.Sizes{}) && (!explicit || !recorded || r.Applied == i.to):
		i.state = api.SizesApplied
	case changed && !explicit:
		i.state = api.SizesChanged
		i.err = fault.WithHint(errors.New("its sizes were changed externally and are kept"), "sockeye apply sets the sizes of the policy again")
	default:
		i.state, i.pending, i.override = api.SizesWaiting, true, changed
	}
}

// heldByCommand returns the error for an interface that a rule matches and whose record
// belongs to a command.
func heldByCommand(name string, r sizing.Record) error {
	return fault.Conflict(errors.New("its sizes were set by sockeye bigtcp apply"), revertCommand(r.Netns, name)+" hands it over to the policy")
}

// revertCommand returns the command that reverts sizes in a network namespace.
func revertCommand(netns, what string) string {
	if netns != "" {
		what = "--netns " + netns + " " + what
	}
	return "sockeye bigtcp revert " + what
}

// addGroup adds a group with pending changes. If the sizes of a member may not be set, the
// pending members become conflicts.
func (a *assessment) addGroup(members []int) {
	p := &interfaceGroup{}
	var obstacle *interfaceState
	pending := false
	for _, index := range members {
		i := a.interfaces[index]
		if i == nil || slices.Contains(p.members, index) {
			continue
		}
		p.members = append(p.members, index)
		if i.target && i.planned {
			p.targets = append(p.targets, sizing.Target{Interface: i.name, Want: i.want})
		}
		p.override = p.override || i.override
		pending = pending || i.pending
		if obstacle == nil && (i.state == api.SizesConflict || i.state == api.SizesChanged) {
			obstacle = i
		}
	}
	if !pending {
		return
	}
	if obstacle == nil {
		a.groups = append(a.groups, p)
		return
	}
	for _, index := range p.members {
		if i := a.interfaces[index]; i.pending {
			i.state, i.pending = api.SizesConflict, false
			i.err = &fault.Error{Err: fmt.Errorf("not set, because of interface %s: %w", obstacle.name, obstacle.err), Hint: fault.Hint(obstacle.err), Code: fault.CodeConflict}
		}
	}
}

// isNeeded reports whether an upper interface that a rule matches still needs the sizes of
// a recorded interface.
func (a *assessment) isNeeded(r sizing.Record) bool {
	return slices.ContainsFunc(r.For, func(index int) bool { return a.interfaces[index] != nil && a.interfaces[index].target })
}

// changedByOthers reports whether another program has set sizes after the record was
// written. A killed agent may have written a record whose sizes it had not set yet.
func changedByOthers(r sizing.Record, now netif.Sizes) bool {
	unfinished := r.From != (netif.Sizes{}) && (now == r.From || now == r.Before)
	return now != r.Applied && !unfinished
}
