// SPDX-License-Identifier: Apache-2.0

package moves

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"sockeye/internal/config"
	"sockeye/internal/format"
	"sockeye/internal/placement"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/session"
)

// Settled returns the mapping to which the present moves lead with the members that are registered now.
func (m *Moves) Settled() *placement.Mapping {
	settled := m.Target
	if !m.movesAtOnce() {
		ready, table := m.ReadySlots(), m.Target.Table.Bucket
		for bucket, want := range table {
			if is := m.Mapping.Table.Bucket[bucket]; is != want && m.isBlocked(is, ready[want]) {
				table[bucket] = is
			}
		}
		settled = m.Target.WithBuckets(&table)
	}
	return settled.WithPins(m.State.PinsFor(m.Config.Slots, nil))
}

// Effect describes how many devices get another slot by a change of the mapping, and what becomes of their
// sessions.
func (m *Moves) Effect(from, target *placement.Mapping) string {
	// A device is one address, or all addresses of one name in the device map in force.
	moves, moved := make(map[string]bool), 0
	note := func(addr netip.Addr) bool {
		before, after := from.Locate(addr), target.Locate(addr)
		key, away := session.Key(before.Device, addr), before.Slot != after.Slot
		if away && !moves[key] {
			moved++
		}
		moves[key] = moves[key] || away
		return away
	}
	for address := range m.Path.Devices() {
		note(placement.Addr(address))
	}
	sessions := 0
	list, err := m.ReadSessions()
	for _, one := range list {
		if one.State == sockdiag.Established && one.Owned && note(one.Address) {
			sessions++
		}
	}
	if m.Config.TrackDevices == 0 && sessions == 0 {
		return "devices are not tracked, so it is not known how many move"
	}
	effect := fmt.Sprintf("%d of %s seen move", moved, format.Count(len(moves), "device", "devices"))
	if err != nil {
		return effect + "; the number of their sessions is not known"
	}
	return effect + m.sessionsEffect(sessions)
}

// sessionsEffect describes what becomes of the sessions of devices that move.
func (m *Moves) sessionsEffect(sessions int) string {
	if sessions == 0 {
		return ""
	}
	text := "; " + format.Count(sessions, "session", "sessions")
	stay, closed := " stay open, so that the devices are split", " are closed"
	if sessions == 1 {
		stay, closed = " stays open, so that the device is split", " is closed"
	}
	switch err := m.CanClose(); {
	case m.Config.OnMove == config.KeepMoved:
		return text + stay + " (on_move: keep)"
	case err != nil:
		return text + stay + ": " + err.Error()
	case m.Paced():
		closed += fmt.Sprintf(", %d at a time per member; sockeye moves shows the progress", m.Config.Pace.Devices)
	}
	return text + closed
}

// SlotNames formats a list of slots.
func SlotNames(slots []int) string {
	if len(slots) == 1 {
		return fmt.Sprintf("slot %d", slots[0])
	}
	var names []string
	for _, slot := range slots {
		names = append(names, strconv.Itoa(slot))
	}
	return "slots " + strings.Join(names, ", ")
}
