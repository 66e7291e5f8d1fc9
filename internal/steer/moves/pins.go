// SPDX-License-Identifier: Apache-2.0

package moves

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/steer/stored"
)

// MovePin pins a device to a slot, or with slot -1 removes its pin, and returns the change. With dryRun, nothing is
// changed.
func (m *Moves) MovePin(text string, slot int, until *time.Time, dryRun bool) (what, effect string, err error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if err := m.CheckOpen(); err != nil {
		return "", "", err
	}
	if slot >= m.Config.Slots || slot < -1 {
		return "", "", m.SlotRange(slot)
	}
	one, err := stored.ParsePin(text, m.Mapping.Devices)
	if slot < 0 && err != nil {
		// A pin of an earlier device map can be removed.
		for i := range m.State.Pins {
			if m.State.Pins[i].Name() == text {
				one, err = m.State.Pins[i], nil
			}
		}
	}
	if err != nil {
		return "", "", err
	}
	if slot >= 0 && m.SlotState(slot).State != stored.Ready {
		return "", "", fault.Conflict(fmt.Errorf("slot %d is in %s", slot, m.SlotState(slot).State), fmt.Sprintf("name another slot, or sockeye slot set %d ready", slot))
	}
	next := m.State
	next.Pins = slices.Clone(m.State.Pins)
	i := slices.IndexFunc(next.Pins, func(o stored.Pin) bool { return o.SameDevice(&one) })
	switch {
	case slot < 0 && i < 0:
		return "", "", nil
	case slot < 0:
		what = fmt.Sprintf("%s: pin to slot %d removed", one.Name(), next.Pins[i].Slot)
		next.Pins = slices.Delete(next.Pins, i, i+1)
	case i >= 0 && next.Pins[i].Slot == slot && equalTimes(next.Pins[i].Until, until):
		return "", "", nil
	default:
		one.Slot, one.Until = slot, until
		one.InForce = i >= 0 && next.Pins[i].Slot == slot && next.Pins[i].InForce
		what = fmt.Sprintf("%s: pinned to slot %d", one.Name(), slot)
		if until != nil {
			what += " until " + until.Local().Format(time.DateTime)
		}
		if i >= 0 {
			next.Pins = slices.Delete(next.Pins, i, i+1)
		} else if len(next.Pins) >= stored.MaxPins {
			return "", "", stored.TooManyPins()
		}
		next.Pins = append(next.Pins, one)
	}
	of := "device " + one.Name()
	if err := m.checkNoMoves(of); err != nil && !dryRun {
		return "", "", err
	}
	effect = m.Effect(m.Mapping, m.Mapping.WithPins(next.PinsFor(m.Config.Slots, nil)))
	if slot >= 0 && m.Seats[slot] == nil {
		effect = fmt.Sprintf("waits until slot %d has a member; then %s", slot, effect)
	}
	if dryRun {
		return what, effect, nil
	}
	attrs := []any{"device", one.Name()}
	if slot >= 0 {
		attrs = append(attrs, "slot", slot)
	}
	return what, effect, m.replaceState(next, m.Target, what, of, attrs...)
}

// RemovePins removes all pins, and returns the change.
func (m *Moves) RemovePins(dryRun bool) (what, effect string, err error) {
	m.Mu.Lock()
	defer m.Mu.Unlock()
	if err := m.CheckOpen(); err != nil {
		return "", "", err
	}
	if len(m.State.Pins) == 0 {
		return "", "", nil
	}
	const of = "pins"
	if err := m.checkNoMoves(of); err != nil && !dryRun {
		return "", "", err
	}
	next := m.State
	next.Pins = nil
	what = format.Count(len(m.State.Pins), "pin removed", "pins removed")
	effect = m.Effect(m.Mapping, m.Mapping.WithPins(next.PinsFor(m.Config.Slots, nil)))
	if dryRun {
		return what, effect, nil
	}
	return what, effect, m.replaceState(next, m.Target, what, of)
}

func equalTimes(a, b *time.Time) bool {
	return a == nil && b == nil || a != nil && b != nil && a.Equal(*b)
}

// ExpirePins removes the pins whose time is over, and schedules the next end.
func (m *Moves) ExpirePins() {
	now := time.Now()
	var next time.Time
	kept := slices.DeleteFunc(slices.Clone(m.State.Pins), func(p stored.Pin) bool {
		if p.Until == nil {
			return false
		}
		if !p.Until.After(now) {
			m.Log.Info("pin has ended", events.PinEnded, "device", p.Name(), "slot", p.Slot)
			return true
		}
		if next.IsZero() || p.Until.Before(next) {
			next = *p.Until
		}
		return false
	})
	if m.pinTimer != nil {
		m.pinTimer.Stop()
		m.pinTimer = nil
	}
	if !next.IsZero() {
		m.pinTimer = time.AfterFunc(next.Sub(now), func() {
			m.Mu.Lock()
			defer m.Mu.Unlock()
			if m.Events != nil {
				m.ExpirePins()
			}
		})
	}
	if len(kept) == len(m.State.Pins) {
		return
	}
	m.State.Pins = kept
	if err := fault.Join(m.State.Save(m.StatePath()), m.Advance()); err != nil {
		m.Log.Error("pins not removed", "error", err)
	}
}

// PinsOf returns the pins of a slot, sorted by name.
func (m *Moves) PinsOf(slot int) (list []stored.Pin) {
	for _, p := range m.State.Pins {
		if p.Slot == slot {
			list = append(list, p)
		}
	}
	slices.SortFunc(list, func(a, b stored.Pin) int { return cmp.Compare(a.Name(), b.Name()) })
	return list
}
