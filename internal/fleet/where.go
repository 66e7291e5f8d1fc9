// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/fault"
	"sockeye/internal/fleet/store"
)

const (
	// mostWhere is the number of addresses in one request.
	mostWhere = 1000
	// mostAskedAddresses is the number of addresses in one question: it fits into a value of the store.
	mostAskedAddresses = 50
	// mostAskedHosts is the number of hosts that are asked at the same time.
	mostAskedHosts = 16
	// A host asks askBurst questions at once, and then one in askPause, but for root. Each one adds some kilobytes to the history of etcd.
	askBurst, askPause = 50, 100 * time.Millisecond
	// whereTime is the longest time for all hosts to answer.
	whereTime = 10 * time.Second
)

// question asks another host for the slots of devices.
type question struct {
	Where []netip.Addr `json:"where"`
}

// slotAnswer is one entry of an answer: the slot of a device of the host that answers.
type slotAnswer struct {
	Service string     `json:"service"`
	Address netip.Addr `json:"address"`
	Bucket  int        `json:"bucket"`
	Slot    int        `json:"slot"`
	Pinned  bool       `json:"pinned,omitempty"`
	Ready   bool       `json:"ready,omitempty"`
}

// asking limits the questions of this host.
type asking struct {
	hosts chan struct{} // a semaphore

	mu   sync.Mutex
	free time.Time // the questions before this time are used up
}

func newAsking() asking { return asking{hosts: make(chan struct{}, mostAskedHosts)} }

// pace waits until this host may ask.
func (a *asking) pace(ctx context.Context) error {
	a.mu.Lock()
	now := time.Now()
	if earliest := now.Add(-askBurst * askPause); a.free.Before(earliest) {
		a.free = earliest
	}
	a.free = a.free.Add(askPause)
	wait := a.free.Sub(now)
	a.mu.Unlock()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(max(0, wait)):
		return nil
	}
}

// where asks the other hosts for the slots of their devices among the addresses. The result has the slots, and the hosts that did not
// answer, with the reasons. A request of root does not wait for requests of other users.
func (p *participation) where(ctx context.Context, addresses []netip.Addr, root bool) (*api.FleetWhere, error) {
	if len(addresses) > mostWhere {
		return nil, fault.Usage(fmt.Errorf("%d addresses, at most %d are possible", len(addresses), mostWhere), "ask for fewer at once")
	}
	answer := &api.FleetWhere{Slots: []api.WhereStatus{}, Silent: make(map[string]string), Asks: p.settings.Etcd != nil}
	byHost, dead, connected := p.addressesOfOthers(addresses)
	answer.Host = p.settings.host
	ctx, cancel := context.WithTimeout(ctx, whereTime)
	defer cancel()
	var (
		mu   sync.Mutex
		wait sync.WaitGroup
	)
	for _, host := range slices.Sorted(maps.Keys(byHost)) {
		switch {
		case !answer.Asks:
			continue
		case !connected:
			answer.Silent[host] = "etcd does not answer: the slot is known on host " + host
			continue
		case dead[host]:
			answer.Silent[host] = "host " + host + " is dead"
			continue
		}
		wait.Go(func() {
			slots, err := p.askAll(ctx, host, byHost[host], root)
			mu.Lock()
			defer mu.Unlock()
			answer.Slots = append(answer.Slots, slots...)
			if err != nil {
				answer.Silent[host] = err.Error()
			}
		})
	}
	wait.Wait()
	return answer, nil
}

// addressesOfOthers returns, by host, the addresses whose devices other hosts serve, with the dead hosts, and whether the store answers.
func (p *participation) addressesOfOthers(addresses []netip.Addr) (byHost map[string][]netip.Addr, dead map[string]bool, connected bool) {
	p.mu.Lock()
	t, mapping, self := p.table, p.mapping, p.self()
	dead = make(map[string]bool)
	if p.state.Snapshot != nil {
		connected = p.state.Connected
		for i := range p.state.Hosts {
			h := &p.state.Hosts[i]
			dead[h.Name] = !h.Alive && !h.Unknown
		}
	}
	p.mu.Unlock()
	byHost = make(map[string][]netip.Addr)
	if t == nil {
		return byHost, dead, connected
	}
	host, seen := hostOf(t, mapping, self), make(map[netip.Addr]bool)
	for _, a := range addresses {
		a = a.Unmap().WithZone("")
		if name, _, _ := host(a); name != "" && name != self && !seen[a] {
			seen[a] = true
			byHost[name] = append(byHost[name], a)
		}
	}
	return byHost, dead, connected
}

// askAll asks a host for the slots of addresses, some at a time. With an error, slots has the answers until then.
func (p *participation) askAll(ctx context.Context, host string, addresses []netip.Addr, root bool) (slots []api.WhereStatus, err error) {
	if !root {
		select {
		case p.asking.hosts <- struct{}{}:
			defer func() { <-p.asking.hosts }()
		case <-ctx.Done():
			return nil, fmt.Errorf("host %s was not asked within %v", host, whereTime)
		}
	}
	for some := range slices.Chunk(addresses, mostAskedAddresses) {
		if root {
			err = ctx.Err()
		} else {
			err = p.asking.pace(ctx)
		}
		if err != nil {
			return slots, fmt.Errorf("host %s was not asked for all addresses within %v", host, whereTime)
		}
		more, err := p.ask(ctx, host, some)
		if err != nil {
			return slots, err
		}
		slots = append(slots, more...)
	}
	return slots, nil
}

// ask asks a host for the slots of addresses.
func (p *participation) ask(ctx context.Context, host string, addresses []netip.Addr) (slots []api.WhereStatus, err error) {
	text, err := json.Marshal(question{Where: addresses})
	if err != nil {
		return nil, err
	}
	answer, err := p.store.Ask(ctx, host, text)
	if err != nil {
		return nil, err
	}
	var list []slotAnswer
	if json.Unmarshal(answer, &list) != nil {
		return nil, errors.New("host " + host + " returned an invalid answer")
	}
	for _, l := range list {
		if slices.Contains(addresses, l.Address) && l.Slot >= 0 && l.Slot < bpf.MaxSlots && l.Bucket >= 0 && l.Bucket < bpf.Buckets {
			slots = append(slots, api.WhereStatus{Host: host, Service: l.Service, Address: l.Address, Bucket: l.Bucket, Slot: l.Slot, Pinned: l.Pinned, Ready: &l.Ready})
		}
	}
	return slots, nil
}

// answer answers the question of another host with the slots of those devices that this host serves.
func (p *participation) answer(text json.RawMessage) json.RawMessage {
	var q question
	if json.Unmarshal(text, &q) != nil || len(q.Where) > mostAskedAddresses || slices.ContainsFunc(q.Where, func(a netip.Addr) bool { return !a.IsValid() }) {
		return nil
	}
	list := []slotAnswer{}
	for _, w := range p.services.Where(q.Where) {
		if w.Host == p.settings.host && w.Ready != nil {
			list = append(list, slotAnswer{w.Service, w.Address, w.Bucket, w.Slot, w.Pinned, *w.Ready})
		}
	}
	for {
		answer, err := json.Marshal(list)
		if err != nil {
			return nil
		}
		if len(answer) <= store.MostAnswer {
			return answer
		}
		list = list[:len(list)/2] // the other host says that it does not know the rest
	}
}
