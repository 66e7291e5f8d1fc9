// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"testing"

	"sockeye/internal/config"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/node"
	"sockeye/internal/fleet/store"
	"sockeye/internal/fleet/table"
)

// snapshot returns a fleet of hosts a, b and c of weight 100 with a table of an epoch, and what the store says about the hosts.
func snapshot(epoch uint64) *store.Snapshot {
	t := &table.Table{Epoch: epoch, Nonce: 7}
	s := &store.Snapshot{Table: t, Connected: true}
	var r table.Ranking
	for _, name := range []string{"a", "b", "c"} {
		h := table.Host{Name: name, Weight: 100}
		t.Hosts = append(t.Hosts, h)
		s.Hosts = append(s.Hosts, lead.Host{Host: h, State: lead.Ready, Alive: true, Healthy: true, Applied: epoch})
		r.Set(name, h.Weight)
	}
	t.Owner = *r.Column(t.Index)
	for b := range table.Buckets {
		t.Previous[b], t.Next[b] = table.None, table.None
	}
	return s
}

// TestBehind is that a host is behind while it is alive and has not applied the newest table, whether this host has it or only
// the store.
func TestBehind(t *testing.T) {
	s := snapshot(7)
	s.Hosts[1].Applied, s.Hosts[2].Applied, s.Hosts[2].Alive = 6, 5, false
	older := *s.Table
	older.Epoch = 6
	for name, c := range map[string]struct {
		store, applied *table.Table
	}{"this host has the newest table": {s.Table, s.Table}, "the store has it": {s.Table, &older}, "only this host has it": {nil, s.Table}} {
		s.Table = c.store
		p := &participation{settings: &settings{Fleet: config.Fleet{Name: "main"}, host: "a"}, table: c.applied, state: node.State{Snapshot: s}}
		for i, behind := range []bool{false, true, false} {
			if got := p.hostsStatus()[i]; got.Behind != behind {
				t.Errorf("%s: %+v", name, got)
			}
		}
	}
}
