// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"sockeye/internal/events"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/table"
)

// report logs problems that begin and end. The caller holds mu.
func (p *participation) report() {
	now := p.allProblems()
	if !p.told {
		for _, problem := range p.problems {
			if !slices.Contains(now, problem) {
				now = append(now, problem)
			}
		}
	}
	for _, problem := range now {
		if !slices.Contains(p.problems, problem) {
			p.log.Warn("problem of the fleet", events.FleetProblem, "problem", problem)
		}
	}
	if len(now) == 0 && len(p.problems) > 0 {
		p.log.Info("the fleet has no problem any more", events.FleetSolved)
	}
	p.problems = now
}

// mostProblems is the largest number of problems that are reported: anybody who can write to the store can cause any number.
const mostProblems = 50

// allProblems returns what is wrong now. The caller holds mu.
func (p *participation) allProblems() []string {
	list := slices.Clone(p.local)
	if p.state.Snapshot != nil {
		list = append(list, p.state.Problems...)
	}
	if p.state.Problem != "" {
		list = append(list, p.state.Problem)
	}
	if p.state.Snapshot != nil {
		list = append(list, p.settings.differences(p.state.Hosts)...)
	}
	list = append(list, p.deadHostProblems()...)
	if problem := cmp.Or(p.misnamed(), p.misaddressed()); problem != "" {
		list = append(list, problem)
	}
	if p.copies.problem != "" {
		list = append(list, p.copies.problem)
	}
	if p.late.problem != "" {
		list = append(list, p.late.problem)
	}
	for _, name := range slices.Sorted(maps.Keys(p.paths)) {
		if problem := p.paths[name].problem; problem != "" {
			list = append(list, problem)
		}
	}
	if more := len(list) - mostProblems; more > 0 {
		list = append(list[:mostProblems], fmt.Sprintf("and %d further problems", more))
	}
	return list
}

// deadHostProblems names the hosts that have died, which the operator has not taken out of the fleet. The caller holds mu.
func (p *participation) deadHostProblems() (list []string) {
	if p.state.Snapshot == nil || !p.state.Connected {
		return nil
	}
	without := func(name string) {
		list = append(list, fmt.Sprintf("host %s is dead, and the others have its devices: start it, or sockeye host set %s removed", name, name))
	}
	few := lead.Living(p.state.Hosts) < p.settings.MinHosts
	for i := range p.state.Hosts {
		switch h := &p.state.Hosts[i]; {
		case h.Alive || h.Unknown && p.known[h.Name] != "dead" || h.State != lead.Ready && h.State != lead.Maint || p.table == nil:
		case p.table.Index(h.Name) == table.None:
			without(h.Name)
		case few:
			list = append(list, fmt.Sprintf("host %s is dead, and has devices: start it (no device moves: min_hosts)", h.Name))
		default:
			list = append(list, fmt.Sprintf("host %s is dead, and has devices: start it, or move them by sockeye host set %s removed", h.Name, h.Name))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(p.gone)) {
		without(name)
	}
	return list
}

// misnamed returns why this host is not the one that a file of hosts gives its name to, or "". Hosts with etcd say themselves which addresses
// they have. The caller holds mu.
func (p *participation) misnamed() string {
	if p.settings.Etcd != nil || p.table == nil {
		return ""
	}
	self := p.table.Index(p.settings.host)
	own := ownAddresses(p.nics, p.settings.Addresses)
	if self == table.None || len(own) == 0 || len(p.table.Hosts[self].Addresses) == 0 {
		return ""
	}
	if slices.ContainsFunc(p.table.Hosts[self].Addresses, func(a netip.Addr) bool { return slices.Contains(own, a) }) {
		return ""
	}
	return fmt.Sprintf("%s says that host %s has the addresses %v, and this host has %v: set host in the policy, or correct the file", p.settings.File, p.settings.host, p.table.Hosts[self].Addresses, own)
}

// misaddressed returns why the other hosts drop packets to this host on the link, or "": a file of hosts gives it MAC addresses that its interfaces
// do not have. The caller holds mu.
func (p *participation) misaddressed() string {
	if p.settings.Etcd != nil || p.table == nil || len(p.table.Hosts) < 2 {
		return ""
	}
	self, own := p.table.Index(p.settings.host), ownMACs(p.nics)
	if self == table.None || len(own) == 0 || len(p.table.Hosts[self].MACs) == 0 ||
		slices.ContainsFunc(p.table.Hosts[self].MACs, func(mac string) bool { return slices.Contains(own, mac) }) {
		return ""
	}
	return fmt.Sprintf("%s says that host %s has the MAC addresses %v, and this host has %v: correct the file, or the other hosts drop packets to this host", p.settings.File, p.settings.host, p.table.Hosts[self].MACs, own)
}

// mostSeen is the largest number of hosts that the agent remembers.
const mostSeen = 10_000

// reportHosts logs hosts that have come, gone or changed. The caller holds mu.
func (p *participation) reportHosts() {
	if p.state.Snapshot == nil || !p.state.Connected {
		return
	}
	now, hosts := make(map[string]string), make(map[string]lead.Host)
	for i := range p.state.Hosts {
		h := &p.state.Hosts[i]
		now[h.Name], hosts[h.Name] = describeHost(h), *h
		if h.Unknown {
			now[h.Name] = cmp.Or(p.known[h.Name], "unknown")
		}
	}
	names := slices.Sorted(maps.Keys(now))
	for _, name := range names {
		if len(p.seen) < mostSeen {
			p.seen[name] = true
		}
		delete(p.gone, name)
	}
	for name, state := range p.known {
		switch {
		case now[name] != "":
		case p.settings.Etcd == nil || state == string(lead.Removed) || state == string(lead.Drain) || state != "dead" && !p.served[name] || len(p.gone) >= mostProblems:
			names = append(names, name)
		default: // it has died, whether this host has seen this or not
			p.gone[name] = p.before[name]
			if state != "dead" {
				p.log.Info("host of the fleet", events.FleetHost, "host", name, "state", "dead")
			}
		}
	}
	for _, name := range names {
		if state := cmp.Or(now[name], "removed"); p.known[name] != state {
			p.log.Info("host of the fleet", events.FleetHost, "host", name, "state", state)
		}
	}
	p.known, p.before, p.told = now, hosts, true
	p.served = make(map[string]bool)
	for name := range hosts {
		p.served[name] = p.table != nil && p.table.Index(name) != table.None
	}
}

// describeHost returns the state of a host in one word.
func describeHost(h *lead.Host) string {
	switch {
	case !h.Alive && h.State != lead.Removed:
		return "dead"
	case h.State == lead.Ready && !h.Healthy:
		return "unhealthy"
	}
	return string(h.State)
}
