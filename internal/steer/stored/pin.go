// SPDX-License-Identifier: Apache-2.0

package stored

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/placement"
)

// Pin assigns a device to a slot: a device of the device map by name, or sources by prefix.
type Pin struct {
	Device string       `json:"device,omitempty"`
	Prefix netip.Prefix `json:"prefix,omitzero"`
	Slot   int          `json:"slot"`
	Until  *time.Time   `json:"until,omitempty"` // nil: without end
	// InForce is set once the device has moved. Until then the slot had no member, or the device waits for its turn.
	InForce bool `json:"in_force"`
}

// Name returns the device as the operator writes it: a name, an address or a prefix.
func (p *Pin) Name() string {
	switch {
	case p.Device != "":
		return p.Device
	case p.Prefix.IsSingleIP():
		return p.Prefix.Addr().String()
	}
	return p.Prefix.String()
}

// SameDevice reports whether two pins are of the same device.
func (p *Pin) SameDevice(o *Pin) bool { return p.Device == o.Device && p.Prefix == o.Prefix }

// DescribeBeyond describes the pins to slots that a policy with a number of slots does not have: no other answer lists them. The result
// is "" for none.
func (s *State) DescribeBeyond(slots int) string {
	const mostNamed = 8
	var names []string
	for i := range s.Pins {
		if one := &s.Pins[i]; one.Slot >= slots {
			names = append(names, fmt.Sprintf("%s (slot %d)", one.Name(), one.Slot))
		}
	}
	if len(names) == 0 {
		return ""
	}
	text := format.Count(len(names), "pin is to a slot", "pins are to slots") + " that the policy does not have: " + strings.Join(names[:min(len(names), mostNamed)], ", ")
	if more := len(names) - mostNamed; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// MaxPins is the maximum number of pins of a service.
const MaxPins = 65536

// Overridden returns, by name, the pins that have no effect with a device map, and the reason. ParsePin refuses such pins, but a pin can
// lose its effect when the device map changes later.
func (s *State) Overridden(devices *placement.DeviceMap) map[string]string {
	why, names := make(map[string]string), make(map[string]bool)
	for i := range s.Pins {
		if one := &s.Pins[i]; one.Device != "" {
			names[one.Device] = true
		} else if id, named := devices.Covers(one.Prefix); named {
			why[one.Name()] = "the device map names it " + devices.Devices()[id]
		}
	}
	if len(names) > 0 {
		for _, name := range devices.Devices() {
			delete(names, name)
		}
	}
	for name := range names {
		why[name] = "the device map has no such device"
	}
	return why
}

// ParsePin parses a device as the operator writes it. A name of the device map comes first.
func ParsePin(text string, devices *placement.DeviceMap) (Pin, error) {
	if slices.Contains(devices.Devices(), text) {
		return Pin{Device: text}, nil
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
		return Pin{}, fault.Usage(fmt.Errorf("there is no device %q", text), hint)
	}
	if p.Addr().Is4In6() {
		return Pin{}, fault.Usage(fmt.Errorf("%s is an IPv4-mapped prefix", text), "write the IPv4 prefix")
	}
	if masked := p.Masked(); masked != p {
		return Pin{}, fault.Usage(fmt.Errorf("%s has bits set after its length", text), "write "+masked.String())
	}
	if id, ok := devices.Covers(p); ok {
		name := devices.Devices()[id]
		return Pin{}, fault.Conflict(fmt.Errorf("%s belongs to device %s of the device map", text, strconv.Quote(name)), "move that device by its name: all its addresses have one slot")
	}
	return Pin{Prefix: p}, nil
}

// PinsFor returns the pins for a mapping with a number of slots: those that are in force, and those that wanted returns
// true for; nil wants all. Pins of slots that drain are not applied.
func (s *State) PinsFor(slots int, wanted func(*Pin) bool) placement.Pins {
	p := placement.Pins{Names: make(map[string]int), Prefixes: make(map[netip.Prefix]int)}
	for _, a := range s.Adopted {
		if s.Setting(a.Slot).State == Drain || a.Slot >= slots {
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
		if one.Slot >= slots || s.Setting(one.Slot).State == Drain || !one.InForce && wanted != nil && !wanted(one) {
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

// TooManyPins returns the error for more than MaxPins pins.
func TooManyPins() error {
	return fault.Conflict(fmt.Errorf("a service has at most %d pins", MaxPins), "use a device map for so many devices")
}
