// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/steer/placement"
)

// pin assigns a device to a slot: a device of the device map by name, or sources by prefix.
type pin struct {
	Device string       `json:"device,omitempty"`
	Prefix netip.Prefix `json:"prefix,omitzero"`
	Slot   int          `json:"slot"`
	Until  *time.Time   `json:"until,omitempty"` // nil: without end
	// InForce is set once the device has moved. Until then the slot had no member, or the device waits for its turn.
	InForce bool `json:"in_force"`
}

// name returns the device as the operator writes it: a name, an address or a prefix.
func (p *pin) name() string {
	switch {
	case p.Device != "":
		return p.Device
	case p.Prefix.IsSingleIP():
		return p.Prefix.Addr().String()
	}
	return p.Prefix.String()
}

func (p *pin) sameDevice(o *pin) bool { return p.Device == o.Device && p.Prefix == o.Prefix }

// maxPins is the maximum number of pins of a service.
const maxPins = 65536

// parsePin parses a device as the operator writes it. A name of the device map comes first.
func parsePin(text string, devices *placement.DeviceMap) (pin, error) {
	if slices.Contains(devices.Devices(), text) {
		return pin{Device: text}, nil
	}
	var p netip.Prefix
	if addr, err := netip.ParseAddr(text); err == nil {
		addr = addr.Unmap().WithZone("")
		p = netip.PrefixFrom(addr, addr.BitLen())
	} else if p, err = netip.ParsePrefix(text); err != nil {
		hint := "give an address, a prefix, or a name of the device map"
		if near := config.Nearest(text, devices.Devices()); near != "" {
			hint = "did you mean " + near + "?"
		}
		return pin{}, fault.Usage(fmt.Errorf("there is no device %q", text), hint)
	}
	if p.Addr().Is4In6() {
		return pin{}, fault.Usage(fmt.Errorf("%s is an IPv4-mapped prefix", text), "write the IPv4 prefix")
	}
	if masked := p.Masked(); masked != p {
		return pin{}, fault.Usage(fmt.Errorf("%s has bits set after its length", text), "write "+masked.String())
	}
	if id, ok := devices.Covers(p); ok {
		name := devices.Devices()[id]
		return pin{}, fault.Conflict(fmt.Errorf("%s belongs to device %s of the device map", text, strconv.Quote(name)), "move that device by its name: all its addresses have one slot")
	}
	return pin{Prefix: p}, nil
}

// pinsFor returns the pins for a mapping with a number of slots: those that are in force, and those that wanted returns
// true for; nil wants all. Pins of slots that drain are not applied.
func (s *state) pinsFor(slots int, wanted func(*pin) bool) placement.Pins {
	p := placement.Pins{Names: make(map[string]int), Prefixes: make(map[netip.Prefix]int)}
	for _, a := range s.Adopted {
		if s.setting(a.Slot).State == drainState || a.Slot >= slots {
			continue
		}
		if a.Device != "" {
			p.Names[a.Device] = a.Slot
		} else {
			p.Prefixes[netip.PrefixFrom(a.Address, a.Address.BitLen())] = a.Slot
		}
	}
	for i := range s.Pins {
		one := &s.Pins[i]
		if one.Slot >= slots || s.setting(one.Slot).State == drainState || !one.InForce && wanted != nil && !wanted(one) {
			continue
		}
		if one.Device != "" {
			p.Names[one.Device] = one.Slot
		} else {
			p.Prefixes[one.Prefix] = one.Slot
		}
	}
	return p
}

// pinsInForce returns the pins of the mapping in force.
func (s *service) pinsInForce() placement.Pins {
	return s.state.pinsFor(s.config.Slots, func(*pin) bool { return false })
}

// movePin pins a device to a slot, or with slot -1 removes its pin, and returns the change. With dryRun, nothing is
// changed.
func (s *service) movePin(text string, slot int, until *time.Time, dryRun bool) (what, effect string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slot >= s.config.Slots || slot < -1 {
		return "", "", s.slotRange(slot)
	}
	one, err := parsePin(text, s.mapping.Devices)
	if slot < 0 && err != nil {
		// A pin of an earlier device map can be removed.
		for i := range s.state.Pins {
			if s.state.Pins[i].name() == text {
				one, err = s.state.Pins[i], nil
			}
		}
	}
	if err != nil {
		return "", "", err
	}
	if slot >= 0 && s.slotState(slot).State != readyState {
		return "", "", fault.Conflict(fmt.Errorf("slot %d is in %s", slot, s.slotState(slot).State), fmt.Sprintf("name another slot, or sockeye slot set %d ready", slot))
	}
	next := s.state
	next.Pins = slices.Clone(s.state.Pins)
	i := slices.IndexFunc(next.Pins, func(o pin) bool { return o.sameDevice(&one) })
	switch {
	case slot < 0 && i < 0:
		return "", "", nil
	case slot < 0:
		what = fmt.Sprintf("%s: pin to slot %d removed", one.name(), next.Pins[i].Slot)
		next.Pins = slices.Delete(next.Pins, i, i+1)
	case i >= 0 && next.Pins[i].Slot == slot && equalTimes(next.Pins[i].Until, until):
		return "", "", nil
	default:
		one.Slot, one.Until = slot, until
		one.InForce = i >= 0 && next.Pins[i].Slot == slot && next.Pins[i].InForce
		what = fmt.Sprintf("%s: pinned to slot %d", one.name(), slot)
		if until != nil {
			what += " until " + until.Local().Format(time.DateTime)
		}
		if i >= 0 {
			next.Pins = slices.Delete(next.Pins, i, i+1)
		} else if len(next.Pins) >= maxPins {
			return "", "", tooManyPins()
		}
		next.Pins = append(next.Pins, one)
	}
	of := "device " + one.name()
	if err := s.checkNoMoves(of); err != nil && !dryRun {
		return "", "", err
	}
	effect = s.movesEffect(s.mapping, s.mapping.WithPins(next.pinsFor(s.config.Slots, nil)))
	if slot >= 0 && s.seats[slot] == nil {
		effect = fmt.Sprintf("waits until slot %d has a member; then %s", slot, effect)
	}
	if dryRun {
		return what, effect, nil
	}
	return what, effect, s.replaceState(next, s.target, what, of)
}

// removePins removes all pins, and returns the change.
func (s *service) removePins(dryRun bool) (what, effect string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.state.Pins) == 0 {
		return "", "", nil
	}
	const of = "pins"
	if err := s.checkNoMoves(of); err != nil && !dryRun {
		return "", "", err
	}
	next := s.state
	next.Pins = nil
	what = format.Count(len(s.state.Pins), "pin removed", "pins removed")
	effect = s.movesEffect(s.mapping, s.mapping.WithPins(next.pinsFor(s.config.Slots, nil)))
	if dryRun {
		return what, effect, nil
	}
	return what, effect, s.replaceState(next, s.target, what, of)
}

func tooManyPins() error {
	return fault.Conflict(fmt.Errorf("a service has at most %d pins", maxPins), "use a device map for so many devices")
}

func equalTimes(a, b *time.Time) bool {
	return a == nil && b == nil || a != nil && b != nil && a.Equal(*b)
}

// expirePins removes the pins whose time is over, and schedules the next end.
func (s *service) expirePins() {
	now := time.Now()
	var next time.Time
	kept := slices.DeleteFunc(slices.Clone(s.state.Pins), func(p pin) bool {
		if p.Until == nil {
			return false
		}
		if !p.Until.After(now) {
			s.log.Info("pin has ended", "device", p.name(), "slot", p.Slot)
			return true
		}
		if next.IsZero() || p.Until.Before(next) {
			next = *p.Until
		}
		return false
	})
	if s.pinTimer != nil {
		s.pinTimer.Stop()
		s.pinTimer = nil
	}
	if !next.IsZero() {
		s.pinTimer = time.AfterFunc(next.Sub(now), func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.events != nil {
				s.expirePins()
			}
		})
	}
	if len(kept) == len(s.state.Pins) {
		return
	}
	s.state.Pins = kept
	if err := errors.Join(s.state.save(s.statePath()), s.place()); err != nil {
		s.log.Error("pins not removed", "error", err)
	}
}

// pinsOf returns the pins of a slot, sorted by name.
func (s *service) pinsOf(slot int) (list []pin) {
	for _, p := range s.state.Pins {
		if p.Slot == slot {
			list = append(list, p)
		}
	}
	slices.SortFunc(list, func(a, b pin) int { return cmp.Compare(a.name(), b.name()) })
	return list
}
