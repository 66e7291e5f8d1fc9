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

// maxRows bounds the interfaces with the same change that have rows of their own.
const maxRows = 8

// Plan compares the rules of a policy with the current ones, and rejects sizes that the
// kernel or a named interface does not support.
func (d *Domain) Plan(policy *config.Policy) ([]domain.Step, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	requested := rulesByNamespace(policy)
	for _, netns := range slices.Sorted(maps.Keys(d.reconcilers)) {
		if !slices.ContainsFunc(requested, func(c namespaceRules) bool { return c.netns == netns }) {
			requested = append(requested, namespaceRules{netns: netns})
		}
	}
	var steps []domain.Step
	for _, c := range requested {
		changes, err := d.planNamespace(c)
		if err != nil {
			return nil, inNamespace(c.netns, err)
		}
		if len(changes) > 0 {
			steps = append(steps, domain.Step{Changes: changes, Apply: func() (func() error, error) { return d.apply(c) }})
		}
	}
	return steps, nil
}

// planNamespace returns the changes in one network namespace.
func (d *Domain) planNamespace(c namespaceRules) ([]api.Change, error) {
	s := d.reconcilers[c.netns]
	if s == nil {
		s = &reconciler{store: d.records, log: d.log, netns: c.netns}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	rules := compareRules(c.netns, s.rules, c.rules)
	network := s.network
	if network == nil {
		if c.rules == nil {
			return rules, nil
		}
		if c.netns != "" && !rights.Has(unix.CAP_SYS_ADMIN) {
			return nil, errMayNotEnter()
		}
		if _, err := statFile(c.netns); errors.Is(err, fs.ErrNotExist) {
			for i := range rules {
				rules[i].Effect = "when the network namespace appears"
			}
			return rules, nil
		}
		var err error
		if network, err = netif.OpenNamespace(c.netns); err != nil {
			return nil, err
		}
		defer network.Close()
	}
	a, err := s.assess(network, c.rules, true)
	if err != nil {
		return nil, err
	}
	if err := a.checkPossible(); err != nil {
		return nil, err
	}
	for i, row := range rules {
		rules[i].Effect = a.effect(c.rules, row)
		if row.Action == "remove" {
			rules[i].Effect += s.exceptions(row.Interface)
		}
	}
	return append(rules, a.rows(c.netns)...), nil
}

// checkPossible returns an error if a rule names an interface that does not support its
// sizes.
func (a *assessment) checkPossible() error {
	for _, i := range sortedByIndex(a.interfaces) {
		if i.state == api.SizesImpossible && i.target && i.rule.Named() {
			return fmt.Errorf("interface %s: %w", i.name, i.err)
		}
	}
	return nil
}

func sortedByIndex(interfaces map[int]*interfaceState) []*interfaceState {
	return slices.SortedFunc(maps.Values(interfaces), func(a, b *interfaceState) int { return cmp.Compare(a.index, b.index) })
}

// compareRules returns the differences of two lists of rules, which it matches by their
// interface pattern.
func compareRules(netns string, from, to []config.BigTCPRule) []api.Change {
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

// effect describes the effect of a change of a rule.
func (a *assessment) effect(rules []config.BigTCPRule, row api.Change) string {
	at := slices.IndexFunc(rules, func(r config.BigTCPRule) bool { return r.Interface == row.Interface })
	if at < 0 {
		return "its interfaces get their previous sizes"
	}
	matched := 0
	var excluded []string
	for _, i := range sortedByIndex(a.interfaces) {
		if !i.target || i.rule.Interface != row.Interface {
			continue
		}
		matched++
		if i.state == api.SizesImpossible || i.state == api.SizesConflict {
			excluded = append(excluded, fmt.Sprintf("%s (%s)", i.name, fault.Message(i.err)))
		}
	}
	effect := "for " + format.Count(matched, "existing interface", "existing interfaces") + ", and for those that appear"
	if rules[at].Named() {
		effect = "for new connections"
	}
	if matched == 0 {
		effect = "when such an interface appears"
	}
	if len(excluded) > maxRows {
		excluded = append(excluded[:maxRows-1], fmt.Sprintf("%d more", len(excluded)-maxRows+1))
	}
	if len(excluded) > 0 {
		effect += "; not for " + strings.Join(excluded, ", ")
	}
	return effect
}

// exceptions lists the interfaces that keep their sizes when a rule is removed.
func (s *reconciler) exceptions(rule string) string {
	var names []string
	for _, i := range sortedByIndex(s.interfaces) {
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
	return "; except " + strings.Join(names, ", ") + ", changed externally"
}

// rows returns the changes of interfaces.
func (a *assessment) rows(netns string) []api.Change {
	var rows []api.Change
	for _, i := range sortedByIndex(a.interfaces) {
		if !i.pending || i.from == i.to {
			continue
		}
		effect := "for new connections"
		if i.override {
			effect = "overwrites sizes that were set externally"
		}
		if i.upper != "" {
			effect += "; lower interface of " + i.upper
		}
		for _, note := range i.notes {
			effect += "; " + note
		}
		rows = append(rows, api.Change{Netns: netns, Interface: i.name, Action: "change", What: "sizes " + describeSizes(i.from, i.to), Effect: effect})
	}
	for _, r := range a.unwanted {
		if r.Applied != r.Before {
			rows = append(rows, api.Change{Netns: netns, Interface: r.Interface, Action: "change", What: "sizes " + describeSizes(r.Applied, r.Before),
				Effect: "previous sizes"})
		}
	}
	return mergeSimilar(rows)
}

// mergeSimilar merges more than maxRows changes that differ only in the interface.
func mergeSimilar(rows []api.Change) []api.Change {
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

// describeSizes describes a change of sizes, in bytes. Send and receive sizes that are
// equal are one figure.
func describeSizes(from, to netif.Sizes) string {
	var parts []string
	family := func(name string, sendFrom, sendTo, receiveFrom, receiveTo uint32) {
		switch {
		case sendFrom == sendTo && receiveFrom == receiveTo:
		case sendFrom == receiveFrom && sendTo == receiveTo:
			parts = append(parts, fmt.Sprintf("%s %d -> %d", name, sendFrom, sendTo))
		default:
			if sendFrom != sendTo {
				parts = append(parts, fmt.Sprintf("%s send %d -> %d", name, sendFrom, sendTo))
			}
			if receiveFrom != receiveTo {
				parts = append(parts, fmt.Sprintf("%s receive %d -> %d", name, receiveFrom, receiveTo))
			}
		}
	}
	family("ipv6", from.GSO, to.GSO, from.GRO, to.GRO)
	family("ipv4", from.GSOIPv4, to.GSOIPv4, from.GROIPv4, to.GROIPv4)
	return strings.Join(parts, ", ")
}
