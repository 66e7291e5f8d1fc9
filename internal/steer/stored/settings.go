// SPDX-License-Identifier: Apache-2.0

package stored

import (
	"fmt"
	"slices"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/placement"
)

// SlotState is the state that the operator gives a slot, in HAProxy's words.
type SlotState string

const (
	// Ready is the default: the slot serves its devices while it has a member.
	Ready SlotState = "ready"
	// Drain moves the devices of the slot to other slots.
	Drain SlotState = "drain"
	// Maint refuses the devices of the slot, or steers them to the standby slot, although the slot has a member.
	Maint SlotState = "maint"
)

// States contains the states in the order of help texts.
var States = []string{string(Ready), string(Drain), string(Maint)}

// Setting is the state and the weight of a slot.
type Setting struct {
	State  SlotState `json:"state"`
	Weight int       `json:"weight"`
}

// DefaultSetting is the setting of a slot that no command has changed.
var DefaultSetting = Setting{Ready, placement.DefaultWeight}

// AnyTakes reports whether a slot takes devices of slots that drain.
func (s *State) AnyTakes(slots int) bool {
	for slot := range slots {
		if set := s.Setting(slot); set.State == Ready && set.Weight > 0 {
			return true
		}
	}
	return false
}

// ParseState returns the state with a name.
func ParseState(name string) (SlotState, error) {
	if name == "" || slices.Contains(States, name) {
		return SlotState(name), nil
	}
	hint := "ready, drain or maint"
	if near := config.Nearest(name, States); near != "" {
		hint = "did you mean " + near + "?"
	}
	return "", fault.Usage(fmt.Errorf("there is no state %q", name), hint)
}

// NewMapping returns the mapping of a service with a configuration, settings of slots and pins, in which each device is at its
// target slot.
func NewMapping(c config.Service, st *State, nonce uint64, devices *placement.DeviceMap) (*placement.Mapping, error) {
	standby := bpf.NoSlot
	if c.WhenEmpty.Standby != nil {
		standby = *c.WhenEmpty.Standby
	}
	m, err := placement.NewMapping(c.Slots, standby, nonce, devices)
	if err != nil {
		return nil, err
	}
	table, err := st.buckets(c.Slots)
	if err != nil {
		return nil, fault.Conflict(err, "set a slot ready by sockeye slot set, with a weight above 0")
	}
	return m.WithBuckets(&table), nil
}

// buckets returns the bucket table for the settings of the slots. A slot in maint keeps its devices and receives none of
// those of slots that drain.
func (s *State) buckets(slots int) ([bpf.Buckets]uint16, error) {
	weights := s.Weights(slots)
	table, err := weighted(weights)
	if err != nil {
		return table, err
	}
	full, ready := make([]int, slots), slices.Clone(weights)
	drains, maint := false, false
	for slot := range slots {
		set := s.Setting(slot)
		full[slot] = set.Weight
		drains = drains || set.State == Drain
		if set.State == Maint {
			ready[slot], maint = 0, true
		}
	}
	if !drains || !maint {
		return table, nil
	}
	own, err := weighted(full)
	if err != nil {
		return table, err
	}
	others, err := weighted(ready)
	if err != nil {
		return table, nil // no other slot takes devices
	}
	for bucket, slot := range table {
		if s.Setting(int(slot)).State == Maint && own[bucket] != slot {
			table[bucket] = others[bucket]
		}
	}
	return table, nil
}

// Weights returns the weights for the bucket table: 0 for a slot that drains.
func (s *State) Weights(slots int) []int {
	weights := make([]int, slots)
	for slot := range weights {
		if set := s.Setting(slot); set.State != Drain {
			weights[slot] = set.Weight
		}
	}
	return weights
}

// Setting returns the setting of a slot.
func (s *State) Setting(slot int) Setting {
	if set, ok := s.Slots[slot]; ok {
		return set
	}
	return DefaultSetting
}

// weighted is placement.WeightedBuckets, without the last slots that have no weight: a policy without these slots has the
// same table.
func weighted(weights []int) ([bpf.Buckets]uint16, error) {
	last := len(weights)
	for last > 1 && weights[last-1] == 0 {
		last--
	}
	return placement.WeightedBuckets(weights[:last])
}
