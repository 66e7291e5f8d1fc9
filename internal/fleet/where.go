// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"sockeye/internal/api"
	"sockeye/internal/fleet/store"
)

const (
	// mostAskedAddresses is the number of addresses in one question: the largest one fits into a value of the store.
	mostAskedAddresses = 50
	// mostAskedHosts is the number of questions that wait for their answers at the same time.
	mostAskedHosts = 16
)

// question is what a host asks another one: the slots of devices.
type question struct {
	Where []netip.Addr `json:"where"`
}

// where returns the slots of those addresses whose devices other hosts serve, as these hosts tell them, and the hosts that did not tell
// them, with the reasons.
func (p *participation) where(ctx context.Context, addresses []netip.Addr) *api.FleetWhere {
	answer := &api.FleetWhere{Slots: []api.WhereStatus{}, Silent: make(map[string]string)}
	var (
		mu   sync.Mutex
		wait sync.WaitGroup
	)
	places := make(chan struct{}, mostAskedHosts)
	byHost := p.elsewhere(addresses)
	for _, host := range slices.Sorted(maps.Keys(byHost)) {
		for some := range slices.Chunk(byHost[host], mostAskedAddresses) {
			wait.Go(func() {
				places <- struct{}{}
				defer func() { <-places }()
				slots, err := p.ask(ctx, host, some)
				mu.Lock()
				defer mu.Unlock()
				if err != nil && !errors.Is(err, store.ErrNoAnswers) {
					answer.Silent[host] = err.Error()
				}
				answer.Slots = append(answer.Slots, slots...)
			})
		}
	}
	wait.Wait()
	return answer
}

// elsewhere returns the addresses whose devices other hosts serve, by host.
func (p *participation) elsewhere(addresses []netip.Addr) map[string][]netip.Addr {
	p.mu.Lock()
	defer p.mu.Unlock()
	byHost := make(map[string][]netip.Addr)
	if p.table == nil {
		return byHost
	}
	host := hostOf(p.table, p.mapping, p.self())
	for _, a := range addresses {
		a = a.Unmap().WithZone("")
		if name, _, here := host(a); name != "" && !here && !slices.Contains(byHost[name], a) {
			byHost[name] = append(byHost[name], a)
		}
	}
	return byHost
}

// ask asks a host for the slots of addresses.
func (p *participation) ask(ctx context.Context, host string, addresses []netip.Addr) ([]api.WhereStatus, error) {
	asked, err := json.Marshal(question{Where: addresses})
	if err != nil {
		return nil, err
	}
	answer, err := p.store.Ask(ctx, host, asked)
	if err != nil {
		return nil, err
	}
	var slots []api.WhereStatus
	if json.Unmarshal(answer, &slots) != nil {
		return nil, errors.New("host " + host + " has answered something else")
	}
	return slices.DeleteFunc(slots, func(w api.WhereStatus) bool {
		return w.Host != host || w.Ready == nil || !slices.Contains(addresses, w.Address)
	}), nil
}

// answer answers the question of another host with the slots of those devices that this host serves.
func (p *participation) answer(asked json.RawMessage) json.RawMessage {
	var q question
	if json.Unmarshal(asked, &q) != nil || len(q.Where) > mostAskedAddresses || slices.ContainsFunc(q.Where, func(a netip.Addr) bool { return !a.IsValid() }) {
		return nil
	}
	slots := slices.DeleteFunc(p.services.Where(q.Where), func(w api.WhereStatus) bool { return w.Host != p.settings.host || w.Ready == nil })
	answer, err := json.Marshal(slots)
	if err != nil {
		return nil
	}
	return answer
}
