// SPDX-License-Identifier: Apache-2.0

package moves

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strings"

	"sockeye/internal/config"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/placement"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/session"
	"sockeye/internal/steer/stored"
)

// ChangeSlot sets the state or the weight of a slot, or both, and returns the change. With dryRun, nothing is changed.
func (m *Moves) ChangeSlot(slot int, to stored.Setting, dryRun bool) (changes []string, effect string, err error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if err := m.CheckOpen(); err != nil {
		return nil, "", err
	}
	from := m.SlotState(slot)
	if slot < 0 || slot >= m.Config.Slots {
		return nil, "", m.SlotRange(slot)
	}
	if to.State == "" {
		to.State = from.State
	}
	if to.Weight < 0 {
		to.Weight = from.Weight
	}
	if from.State != to.State {
		changes = append(changes, fmt.Sprintf("%s -> %s", from.State, to.State))
	}
	if from.Weight != to.Weight {
		changes = append(changes, fmt.Sprintf("weight %d -> %d", from.Weight, to.Weight))
	}
	if len(changes) == 0 && !m.State.MovesStopped {
		return nil, "", nil
	}
	if len(changes) == 0 {
		changes = []string{"moves continue"}
	}
	next := m.State
	next.Slots = maps.Clone(m.State.Slots)
	if next.Slots == nil {
		next.Slots = make(map[int]stored.Setting)
	}
	if next.Slots[slot] = to; to == stored.DefaultSetting {
		delete(next.Slots, slot)
	}
	drained := from.State != stored.Drain && to.State == stored.Drain || from.State == stored.Ready && from.Weight > 0 && to.Weight == 0
	if drained && !next.AnyTakes(m.Config.Slots) {
		return nil, "", fault.Conflict(fmt.Errorf("no other slot takes the devices of slot %d", slot), "set another slot ready, with a weight, first")
	}
	target, err := stored.NewMapping(m.Config, &next, m.State.Nonce, m.Mapping.Devices)
	if err != nil {
		return nil, "", err
	}
	of := fmt.Sprintf("slot %d", slot)
	undo := to.State == stored.Ready && from.State == stored.Drain
	if err := m.checkNoMoves(of); err != nil && !dryRun && !undo && to.State != stored.Maint && from.State != stored.Maint {
		return nil, "", err
	}
	effect = m.Effect(m.Settled(), target.WithPins(next.PinsFor(m.Config.Slots, nil)))
	switch {
	case to.State == stored.Maint && from.State != stored.Maint:
		effect = m.maintEffect(slot)
	case from.State == stored.Maint && to.State == stored.Ready && from.Weight == to.Weight:
		if effect = "its devices are accepted"; m.Seats[slot] == nil {
			effect = "it has no member"
		}
	}
	if dryRun {
		return changes, effect, nil
	}
	return changes, effect, m.replaceState(next, target, fmt.Sprintf("%s: %s", of, strings.Join(changes, ", ")), of, "slot", slot)
}

// replaceState saves a new state, and applies its settings and pins. cause describes the change of a slot or device, and
// attrs are the attributes of its event.
func (m *Moves) replaceState(next stored.State, target *placement.Mapping, cause, of string, attrs ...any) error {
	next.MovesStopped = false
	before, mapping := m.State, m.Target
	if err := next.Save(m.StatePath()); err != nil {
		return err
	}
	m.State, m.Target = next, target
	m.Log.Info("changed by command", append([]any{events.SlotChanged, "change", cause}, attrs...)...)
	m.Begin(cause, of)
	if err := m.ApplySettings(); err != nil {
		m.State, m.Target = before, mapping
		return fault.Join(err, before.Save(m.StatePath()), m.ApplySettings())
	}
	return nil
}

// ApplySettings opens and closes slots for maint, and moves devices.
func (m *Moves) ApplySettings() error {
	errs := []error{m.rooms.WriteWaits()}
	for slot, seat := range m.Seats {
		value, err := m.Path.Slot(slot)
		if err == nil && (value.Ready > 0) != m.IsReady(slot) {
			// A member that has exited in this instant is not a reason to fail: its slot is cleared when the event arrives.
			if err = m.SetReady(seat); errors.Is(err, core.ErrSocketClosed) {
				err = nil
			}
		}
		errs = append(errs, err)
	}
	errs = append(errs, m.Advance())
	m.Actions.CheckSoon()
	return fault.Join(errs...)
}

// maintEffect describes the devices that a slot in maint refuses.
func (m *Moves) maintEffect(slot int) string {
	list, err := m.ReadSessions()
	if err != nil {
		return ""
	}
	seen, here, sessions := make(map[string]bool), 0, 0
	note := func(addr netip.Addr) bool {
		at := m.Mapping.Locate(addr)
		key := session.Key(at.Device, addr)
		if at.Slot == slot && !seen[key] {
			here++
		}
		seen[key] = true
		return at.Slot == slot
	}
	for address := range m.Path.Devices() {
		note(placement.Addr(address))
	}
	for _, one := range list {
		if one.State == sockdiag.Established && one.Owned && note(one.Address) {
			sessions++
		}
	}
	what := "refused"
	if m.Config.WhenEmpty.Standby != nil && *m.Config.WhenEmpty.Standby != slot {
		what = fmt.Sprintf("steered to standby slot %d", *m.Config.WhenEmpty.Standby)
	}
	effect := fmt.Sprintf("its devices are %s: %d of %s seen", what, here, format.Count(len(seen), "device", "devices"))
	switch err := m.CanClose(); {
	case sessions == 0:
	case m.Config.OnMove == config.KeepMoved || err != nil:
		effect += "; " + format.Count(sessions, "session stays open", "sessions stay open")
	default:
		effect += "; " + format.Count(sessions, "session is closed", "sessions are closed")
	}
	return effect
}
