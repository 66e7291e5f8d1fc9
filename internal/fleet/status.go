// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"maps"
	"slices"

	"sockeye/internal/api"
	"sockeye/internal/fault"
	"sockeye/internal/fleet/forward"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/table"
)

// errNoFleet is the error of requests about a fleet without one.
var errNoFleet = fault.Usage(errors.New("the policy has no fleet"), "docs/fleet.md describes the key fleet of the policy")

// Status adds the state of the fleet.
func (d *Domain) Status(status *api.Status) error {
	p, err := d.current()
	if err != nil {
		return nil
	}
	status.Fleet, err = p.statusIfAny()
	return err
}

// Frame adds the state of the fleet.
func (d *Domain) Frame(frame *api.Frame) error {
	p, err := d.current()
	if err != nil {
		return nil
	}
	frame.Fleet, err = p.statusIfAny()
	return err
}

// current returns the participation, or errNoFleet.
func (d *Domain) current() (*participation, error) {
	if p := d.part.Load(); p != nil {
		return p, nil
	}
	return nil, errNoFleet
}

// statusIfAny is status, or nil if an apply has just ended the participation.
func (p *participation) statusIfAny() (*api.FleetStatus, error) {
	s, err := p.status()
	if errors.Is(err, errNoFleet) {
		return nil, nil
	}
	return s, err
}

// status returns the state of the fleet, as this host knows it.
func (p *participation) status() (*api.FleetStatus, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return nil, errNoFleet
	}
	s := &api.FleetStatus{Fleet: p.settings.Name, Host: p.settings.host, Store: "etcd", Hosts: []api.FleetHost{}, Packets: make(map[string]uint64), Problems: p.allProblems()}
	if p.settings.Etcd == nil {
		s.Store = "file"
	}
	if s.Problems == nil {
		s.Problems = []string{}
	}
	s.Healthy, s.Reason = p.health()
	counts, err := p.path.Counts()
	if err != nil {
		return nil, err
	}
	for outcome, packets := range counts {
		s.Packets[forward.Outcome(outcome).String()] = packets
	}
	s.Copies = p.copies.devices
	if p.table != nil {
		s.Epoch, s.Moving = p.table.Epoch, p.table.Moving()
	}
	if p.state.Snapshot == nil || !p.state.Connected && len(p.state.Hosts) == 0 {
		s.Hosts = append(s.Hosts, p.hostsOfTable()...)
		return s, nil
	}
	s.Connected, s.Leader = p.state.Connected, p.state.Leader
	if p.state.Table != nil {
		s.StoreEpoch = p.state.Table.Epoch
	}
	s.Hosts = append(s.Hosts, p.hostsStatus()...)
	return s, nil
}

// hostsStatus returns the states of the hosts. The caller holds mu.
func (p *participation) hostsStatus() (list []api.FleetHost) {
	var shares []int
	newest := uint64(0)
	if p.table != nil {
		shares, newest = p.table.Shares(), p.table.Epoch
	}
	if p.state.Table != nil {
		newest = max(newest, p.state.Table.Epoch)
	}
	for i := range p.state.Hosts {
		list = append(list, p.hostStatus(&p.state.Hosts[i], shares, newest))
	}
	for _, name := range slices.Sorted(maps.Keys(p.gone)) {
		h := p.gone[name]
		if slices.ContainsFunc(p.state.Hosts, func(known lead.Host) bool { return known.Name == name }) {
			continue
		}
		h.Alive = false
		list = append(list, p.hostStatus(&h, shares, newest))
	}
	return list
}

// hostsOfTable returns the hosts of the table in force, before the store has told their states. The caller holds mu.
func (p *participation) hostsOfTable() (list []api.FleetHost) {
	if p.table == nil {
		return nil
	}
	shares := p.table.Shares()
	for i := range p.table.Hosts {
		h := &lead.Host{Host: p.table.Hosts[i], State: "unknown"}
		if p.settings.Etcd == nil { // with a file, no host is ever dead
			h.Alive, h.Healthy, h.Applied = true, true, p.table.Epoch
		}
		list = append(list, p.hostStatus(h, shares, p.table.Epoch))
	}
	return list
}

// hostStatus returns the state of a host. newest is the epoch of the newest table. The caller holds mu.
func (p *participation) hostStatus(h *lead.Host, shares []int, newest uint64) api.FleetHost {
	one := api.FleetHost{Name: h.Name, Addresses: []string{}, State: string(h.State), Alive: h.Alive, Healthy: h.Healthy, Weight: h.Weight,
		Epoch: h.Applied, Behind: h.Alive && h.Applied < newest, Path: p.paths[h.Name].kind}
	for _, a := range h.Addresses {
		one.Addresses = append(one.Addresses, a.String())
	}
	if one.Path == "" {
		one.Path = "none"
	}
	if h.Name == p.self() {
		one.Path = "self"
		if p.settings.Etcd == nil { // a file does not tell it of any host, and this host knows it of itself
			one.Healthy = p.healthy == nil
		}
	}
	if p.table != nil {
		if at := p.table.Index(h.Name); at != table.None {
			one.Buckets = shares[at]
			one.Share = float64(shares[at]) / table.Buckets
		}
	}
	return one
}

// leads reports whether this host writes the table.
func (p *participation) leads() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state.Snapshot != nil && p.state.Leads
}

// owns returns the number of buckets of this host, with those that move to it, and those that other hosts may still take for its own. The
// caller holds mu.
func (p *participation) owns() (n int) {
	if p.table == nil {
		return 0
	}
	self := p.table.Index(p.self())
	for b := range table.Buckets {
		if self != table.None && (p.table.Owner[b] == self || p.table.Next[b] == self || p.table.Previous[b] == self) {
			n++
		}
	}
	return n
}
