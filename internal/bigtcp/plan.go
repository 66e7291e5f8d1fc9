// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/rights"
)

// maxRows bounds the rows of a plan that differ in the interface only.
const maxRows = 8

// Plan compares the rules of a policy with those in force, and checks that the kernel and the interfaces
// can have the sizes.
func (d *Domain) Plan(policy *config.Policy) ([]domain.Step, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	wanted := sizings(policy)
	for _, netns := range slices.Sorted(maps.Keys(d.sizers)) {
		if !slices.ContainsFunc(wanted, func(c bigTCPChange) bool { return c.netns == netns }) {
			wanted = append(wanted, bigTCPChange{netns: netns})
		}
	}
	var steps []domain.Step
	for _, c := range wanted {
		changes, err := d.planSizes(c)
		if err != nil {
			return nil, ofNetwork(c.netns, err)
		}
		if len(changes) > 0 {
			steps = append(steps, domain.Step{Changes: changes, Apply: func() (func() error, error) { return d.apply(c) }})
		}
	}
	return steps, nil
}

// planSizes says what a change does in one network namespace.
func (d *Domain) planSizes(c bigTCPChange) ([]api.Change, error) {
	s := d.sizers[c.netns]
	if s == nil {
		s = &sizer{store: d.records, log: d.log, netns: c.netns}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	rules := changedSizes(c.netns, s.rules, c.rules)
	network := s.network
	if network == nil {
		if c.rules == nil {
			return rules, nil
		}
		if c.netns != "" && !rights.Has(unix.CAP_SYS_ADMIN) {
			return nil, noEntry()
		}
		if _, err := placeOf(c.netns); errors.Is(err, fs.ErrNotExist) {
			for i := range rules {
				rules[i].Effect = "there is no such network namespace now: when it appears"
			}
			return rules, nil
		}
		var err error
		if network, err = netif.OpenNamespace(c.netns); err != nil {
			return nil, err
		}
		defer network.Close()
	}
	o, err := s.outlook(network, c.rules, true)
	if err != nil {
		return nil, err
	}
	if err := o.possible(); err != nil {
		return nil, err
	}
	for i, row := range rules {
		rules[i].Effect = o.effect(c.rules, row)
		if row.Action == "remove" {
			rules[i].Effect += s.except(row.Interface)
		}
	}
	return append(rules, o.rows(c.netns)...), nil
}

// possible refuses a rule that names an interface which cannot have what it says.
func (o *outlook) possible() error {
	for _, i := range inOrder(o.interfaces) {
		if i.state == api.SizesImpossible && i.target && i.rule.Named() {
			return fmt.Errorf("interface %s: %w", i.name, i.err)
		}
	}
	return nil
}

func inOrder(interfaces map[int]*sized) []*sized {
	return slices.SortedFunc(maps.Values(interfaces), func(a, b *sized) int { return cmp.Compare(a.index, b.index) })
}

// changedSizes compares lists of rules, by what they are for.
func changedSizes(netns string, from, to []config.BigTCPRule) []api.Change {
	var changes []api.Change
	add := func(action string, rule config.BigTCPRule, what string) {
		changes = append(changes, api.Change{Netns: netns, Interface: rule.Interface, Action: action, What: what})
	}
	find := func(rules []config.BigTCPRule, name string) int {
		return slices.IndexFunc(rules, func(r config.BigTCPRule) bool { return r.Interface == name })
	}
	for _, rule := range from {
		if find(to, rule.Interface) < 0 {
			add("remove", rule, "rule "+rule.String())
		}
	}
	for _, rule := range to {
		switch i := find(from, rule.Interface); {
		case i < 0:
			add("add", rule, "rule "+rule.String())
		case from[i] != rule:
			add("change", rule, fmt.Sprintf("rule %s -> %s", from[i], rule))
		}
	}
	if len(changes) == 0 && !slices.Equal(from, to) {
		changes = append(changes, api.Change{Netns: netns, Interface: to[0].Interface, Action: "change", What: "order of rules"})
	}
	return changes
}

// effect says what a rule does now.
func (o *outlook) effect(rules []config.BigTCPRule, row api.Change) string {
	at := slices.IndexFunc(rules, func(r config.BigTCPRule) bool { return r.Interface == row.Interface })
	if at < 0 {
		return "its interfaces get the sizes that they had before"
	}
	matched := 0
	var not []string
	for _, i := range inOrder(o.interfaces) {
		if !i.target || i.rule.Interface != row.Interface {
			continue
		}
		matched++
		if i.state == api.SizesImpossible || i.state == api.SizesConflict {
			not = append(not, fmt.Sprintf("%s (%s)", i.name, fault.Message(i.err)))
		}
	}
	effect := "for " + format.Count(matched, "interface", "interfaces") + " now, and those that appear"
	if rules[at].Named() {
		effect = "for new connections"
	}
	if matched == 0 {
		effect = "there is none now: one that appears is set"
	}
	if len(not) > maxRows {
		not = append(not[:maxRows-1], fmt.Sprintf("%d more", len(not)-maxRows+1))
	}
	if len(not) > 0 {
		effect += "; not for " + strings.Join(not, ", ")
	}
	return effect
}

// except names the interfaces that the end of a rule leaves as they are.
func (s *sizer) except(rule string) string {
	var names []string
	for _, i := range inOrder(s.interfaces) {
		if i.rule != nil && i.rule.Interface == rule && i.state == api.SizesChanged {
			names = append(names, i.name)
		}
	}
	if len(names) > maxRows {
		names = append(names[:maxRows-1], fmt.Sprintf("%d more", len(names)-maxRows+1))
	}
	if len(names) == 0 {
		return ""
	}
	return "; not " + strings.Join(names, ", ") + ", which somebody else has set since"
}

// rows say which interfaces change. Many that change alike are one row.
func (o *outlook) rows(netns string) []api.Change {
	var rows []api.Change
	for _, i := range inOrder(o.interfaces) {
		if !i.todo || i.from == i.to {
			continue
		}
		effect := "for new connections"
		if i.force {
			effect = "somebody else has set them since, which is lost"
		}
		if i.because != "" {
			effect += "; it is below " + i.because
		}
		for _, note := range i.notes {
			effect += "; " + note
		}
		rows = append(rows, api.Change{Netns: netns, Interface: i.name, Action: "change", What: "sizes " + describeSizes(i.from, i.to), Effect: effect})
	}
	for _, r := range o.unwanted {
		if r.Applied != r.Before {
			rows = append(rows, api.Change{Netns: netns, Interface: r.Interface, Action: "change", What: "sizes " + describeSizes(r.Applied, r.Before),
				Effect: "as they were before"})
		}
	}
	return shortened(rows)
}

// shortened makes one row of many that differ in the interface only.
func shortened(rows []api.Change) []api.Change {
	alike := make(map[api.Change][]string)
	same := func(row api.Change) api.Change {
		row.Interface = ""
		return row
	}
	for _, row := range rows {
		alike[same(row)] = append(alike[same(row)], row.Interface)
	}
	var short []api.Change
	for _, row := range rows {
		names := alike[same(row)]
		switch {
		case len(names) <= maxRows:
			short = append(short, row)
		case names[0] == row.Interface:
			row.Interface = fmt.Sprintf("%s and %d more", names[0], len(names)-1)
			short = append(short, row)
		}
	}
	return short
}

// describeSizes says what becomes of sizes, in bytes: those of sending and receiving
// together where they are the same.
func describeSizes(from, to netif.Sizes) string {
	var parts []string
	family := func(name string, sendFrom, sendTo, receiveFrom, receiveTo uint32) {
		switch {
		case sendFrom == sendTo && receiveFrom == receiveTo:
		case sendFrom == receiveFrom && sendTo == receiveTo:
			parts = append(parts, fmt.Sprintf("%s %d -> %d", name, sendFrom, sendTo))
		default:
			if sendFrom != sendTo {
				parts = append(parts, fmt.Sprintf("%s sent %d -> %d", name, sendFrom, sendTo))
			}
			if receiveFrom != receiveTo {
				parts = append(parts, fmt.Sprintf("%s received %d -> %d", name, receiveFrom, receiveTo))
			}
		}
	}
	family("ipv6", from.GSO, to.GSO, from.GRO, to.GRO)
	family("ipv4", from.GSOIPv4, to.GSOIPv4, from.GROIPv4, to.GROIPv4)
	return strings.Join(parts, ", ")
}
