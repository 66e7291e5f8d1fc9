// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"

	"sockeye/internal/bpf"
)

// Mapping maps addresses to slots. A mapping consists of the nonce, the bucket table, the device map and the pins of a
// service. A Mapping is immutable.
type Mapping struct {
	Table   bpf.Table
	Devices *DeviceMap
	pins    Pins
	lengths []int // lengths of the prefixes of pins as bits of 128, the longest first
}

// Pins are the devices that have another slot than that of the bucket table: devices of the device map by name, and
// other sources by prefix. The longest prefix applies. A pin of a prefix does not apply to addresses of the device map:
// all addresses of a device have the same slot. IPv4 prefixes are never IPv4-mapped, and prefixes have no bits set after
// their length.
type Pins struct {
	Names    map[string]int
	Prefixes map[netip.Prefix]int
}

// WithPins returns a copy of the mapping with other pins. The caller must not change the pins afterwards.
func (m *Mapping) WithPins(p Pins) *Mapping {
	c := *m
	c.pins, c.lengths = p, nil
	for prefix := range p.Prefixes {
		c.lengths = append(c.lengths, mappedBits(prefix))
	}
	slices.SortFunc(c.lengths, func(a, b int) int { return b - a })
	c.lengths = slices.Compact(c.lengths)
	return &c
}

// WithBuckets returns a copy of the mapping with another bucket table.
func (m *Mapping) WithBuckets(table *[bpf.Buckets]uint16) *Mapping {
	c := *m
	c.Table.Bucket = *table
	return &c
}

// SamePins reports whether two mappings have the same pins.
func (m *Mapping) SamePins(o *Mapping) bool { return m.pins.equal(o.pins) }

func (p Pins) equal(o Pins) bool {
	return maps.Equal(p.Names, o.Names) && maps.Equal(p.Prefixes, o.Prefixes)
}

// NewMapping returns the mapping of a service with 1 to bpf.MaxSlots slots. standby is the slot that serves the devices
// of empty slots, or bpf.NoSlot.
func NewMapping(slots, standby int, nonce uint64, devices *DeviceMap) (*Mapping, error) {
	if slots < 1 || slots > bpf.MaxSlots {
		return nil, fmt.Errorf("make bucket table: %d slots, want 1 to %d", slots, bpf.MaxSlots)
	}
	m := &Mapping{
		Table: bpf.Table{
			Nonce:   nonce,
			Slots:   uint16(slots),
			Standby: uint16(standby),
			Bucket:  buckets(slots),
		},
		Devices: devices,
	}
	return m, nil
}

// buckets distributes the buckets evenly: the numbers of buckets of two slots differ by at most 1. The result depends on
// the number of slots only. A change by one slot moves the minimum number of buckets: the table for n slots is the table
// for n-1 slots, from which the new slot gets its share.
func buckets(slots int) [bpf.Buckets]uint16 {
	var table [bpf.Buckets]uint16
	var count [bpf.MaxSlots]int
	count[0] = bpf.Buckets
	for n := 2; n <= slots; n++ {
		share, extra := bpf.Buckets/n, bpf.Buckets%n
		added := uint16(n - 1)
		for b, slot := range table {
			want := share
			if int(slot) < extra {
				want++
			}
			if count[slot] > want {
				count[slot]--
				count[added]++
				table[b] = added
			}
		}
	}
	return table
}

// Entries are the contents of the LPM trie that represents the device map and the pins in the kernel. Entries are
// immutable.
type Entries struct {
	devices *DeviceMap
	nonce   uint64
	pins    Pins
}

// Entries returns the trie entries of the mapping.
func (m *Mapping) Entries() *Entries { return &Entries{m.Devices, m.Table.Nonce, m.pins} }

// Equal reports whether the tries of both entries are the same.
func (e *Entries) Equal(o *Entries) bool {
	return e.nonce == o.nonce && e.pins.equal(o.pins) && e.devices.Equal(o.devices)
}

// unnamed is the device id of a pin of a prefix, which has no name in the device map.
const unnamed = bpf.NoDevice - 1

// All yields the entries.
func (e *Entries) All() iter.Seq2[bpf.Prefix, bpf.DeviceID] {
	return func(yield func(bpf.Prefix, bpf.DeviceID) bool) {
		if e.Size() == 0 {
			return
		}
		// One trie has both families; ::/0 must not match IPv4.
		if _, all := e.pins.Prefixes[netip.PrefixFrom(netip.IPv4Unspecified(), 0)]; !all {
			if !yield(trieKey(netip.PrefixFrom(netip.IPv4Unspecified(), 0)), bpf.DeviceID{Device: bpf.NoDevice}) {
				return
			}
		}
		ids := make([]bpf.DeviceID, len(e.devices.Devices()))
		for i, name := range e.devices.Devices() {
			ids[i] = bpf.DeviceID{Hash: DeviceHash(name, e.nonce), Device: uint32(i)}
			if slot, pinned := e.pins.Names[name]; pinned {
				ids[i] = bpf.DeviceID{Hash: uint32(slot), Device: uint32(i) | bpf.Pinned}
			}
		}
		for prefix, device := range e.devices.All() {
			if !yield(trieKey(prefix), ids[device]) {
				return
			}
		}
		for prefix, slot := range e.pins.Prefixes {
			if _, named := e.devices.Covers(prefix); named {
				continue
			}
			if !yield(trieKey(prefix), bpf.DeviceID{Hash: uint32(slot), Device: unnamed | bpf.Pinned}) {
				return
			}
		}
	}
}

// Size returns the maximum number of entries; 0 without a device map and without pins of prefixes.
func (e *Entries) Size() int {
	if n := e.devices.Len() + len(e.pins.Prefixes); n > 0 {
		return n + 1
	}
	return 0
}

func trieKey(prefix netip.Prefix) bpf.Prefix {
	return bpf.Prefix{Prefixlen: uint32(mappedBits(prefix)), Address: Address(prefix.Addr())}
}

// mappedBits returns the length of a prefix with IPv4 as IPv4-mapped IPv6.
func mappedBits(prefix netip.Prefix) int {
	if prefix.Addr().Is4() {
		return prefix.Bits() + 96
	}
	return prefix.Bits()
}

// Slot returns the slot of an address, and the name of the device, or "" if the device map has none.
func (m *Mapping) Slot(addr netip.Addr) (slot int, device string) {
	l := m.Locate(addr)
	return l.Slot, l.Device
}

// Location is the place of an address in a mapping.
type Location struct {
	Slot   int
	Bucket int    // bucket of the hash, also for a pinned device
	Device string // name in the device map, or ""
	Pinned bool
}

// Locate returns the place of an address.
func (m *Mapping) Locate(addr netip.Addr) Location {
	var l Location
	if id, ok := m.Devices.Lookup(addr); ok {
		return m.LocateName(m.Devices.Devices()[id])
	}
	l.Bucket = int(Hash(Address(addr), m.Table.Nonce) % uint32(bpf.Buckets))
	l.Slot, l.Pinned = m.prefixPin(addr.Unmap().WithZone(""))
	if !l.Pinned {
		l.Slot = int(m.Table.Bucket[l.Bucket])
	}
	return l
}

// Hash returns the hash of the device with an address.
func (m *Mapping) Hash(addr netip.Addr) uint32 {
	if id, ok := m.Devices.Lookup(addr); ok {
		return DeviceHash(m.Devices.Devices()[id], m.Table.Nonce)
	}
	return Hash(Address(addr), m.Table.Nonce)
}

// LocateName returns the place of a device of the device map.
func (m *Mapping) LocateName(name string) Location {
	l := Location{Device: name, Bucket: int(DeviceHash(name, m.Table.Nonce) % uint32(bpf.Buckets))}
	if l.Slot, l.Pinned = m.pins.Names[name]; !l.Pinned {
		l.Slot = int(m.Table.Bucket[l.Bucket])
	}
	return l
}

// prefixPin returns the slot of the longest pinned prefix that contains an address.
func (m *Mapping) prefixPin(addr netip.Addr) (slot int, pinned bool) {
	for _, bits := range m.lengths {
		if addr.Is4() {
			bits -= 96
		}
		prefix, err := addr.Prefix(bits)
		if err != nil {
			continue // the length of prefixes of the other family
		}
		if slot, pinned := m.pins.Prefixes[prefix]; pinned {
			return slot, true
		}
	}
	return 0, false
}
