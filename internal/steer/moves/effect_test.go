// SPDX-License-Identifier: Apache-2.0

package moves

import (
	"testing"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/placement"
	"sockeye/internal/steer/core"
)

// noActions are the actions of a service without waiting rooms.
type noActions struct{ core.Actions }

func (noActions) IsFilling(int) bool { return false }

// TestSettled checks that devices of a new slot without a member do not count as moved to it: they have stayed.
func TestSettled(t *testing.T) {
	mapping := func(slots int) *placement.Mapping {
		m, err := placement.NewMapping(slots, bpf.NoSlot, 7, nil)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	before, target := mapping(4), mapping(5)
	m := New(&core.Service{
		Config: config.Service{Slots: 5}, Actions: noActions{}, Mapping: before, Target: target,
		Seats: map[int]*core.Seat{0: {}, 1: {}, 2: {}, 3: {}},
	}, nil)
	if m.Settled().Table.Bucket != before.Table.Bucket {
		t.Error("devices move to a slot without a member")
	}
	m.Seats[4] = &core.Seat{}
	if m.Settled().Table.Bucket != target.Table.Bucket {
		t.Error("devices do not move to a slot with a member")
	}
	m.Seats[4], m.Config.SharesSlots = nil, true
	if m.Settled().Table.Bucket != target.Table.Bucket {
		t.Error("devices of services that share slots do not move at once")
	}
}
