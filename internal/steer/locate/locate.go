// SPDX-License-Identifier: Apache-2.0

// Package locate finds the slots of addresses in the mapping of a service, in force or planned.
package locate

import (
	"net/netip"
	"slices"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/placement"
	"sockeye/internal/steer/stored"
)

// Planned returns the mapping that a service would have with a configuration and a device map, and with the states,
// weights and pins of its slots.
func Planned(c config.Service, nonce uint64, devices *placement.DeviceMap, slots []api.SlotStatus) (*placement.Mapping, error) {
	st := stored.State{Slots: make(map[int]stored.Setting)}
	for _, slot := range slots {
		if slices.Contains(stored.States, slot.State) {
			st.Slots[slot.Slot] = stored.Setting{State: stored.SlotState(slot.State), Weight: slot.Weight}
		}
		for _, p := range slot.Pins {
			one, err := stored.ParsePin(p.Device, devices)
			if err != nil {
				continue // the device map does not have the device, or names the address
			}
			one.Slot = slot.Slot
			st.Pins = append(st.Pins, one)
		}
	}
	m, err := stored.NewMapping(c, &st, nonce, devices)
	if err != nil {
		return nil, err
	}
	return m.WithPins(st.PinsFor(c.Slots, nil)), nil
}

// Where returns the slots of addresses in a mapping.
func Where(service string, mapping *placement.Mapping, addresses []netip.Addr) []api.WhereStatus {
	list := make([]api.WhereStatus, len(addresses))
	for i, addr := range addresses {
		list[i] = api.WhereStatus{Service: service, Address: addr.Unmap().WithZone("")}
		at := mapping.Locate(addr)
		list[i].Slot, list[i].Device, list[i].Bucket, list[i].Pinned = at.Slot, at.Device, at.Bucket, at.Pinned
	}
	return list
}
