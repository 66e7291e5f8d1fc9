// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"fmt"
	"iter"
	"maps"
	"net/netip"

	"sockeye/internal/bpf"
)

// Mapping maps addresses to slots. A mapping consists of the nonce, the bucket table and the device map of a service.
type Mapping struct {
	Table   bpf.Table
	Devices *DeviceMap

	// Buckets of the exceptions.
	names     map[string]uint32
	addresses map[netip.Addr]uint32
}

// Exceptions are devices with another slot than that of their hash: by name if the device map has a name, otherwise by
// address. An IPv4 address is never IPv4-mapped.
type Exceptions struct {
	Names     map[string]int
	Addresses map[netip.Addr]int
}

// Except replaces the exceptions of the mapping. Exceptions with a slot that has no bucket are ignored. An exception for
// an address overrides the device map.
func (m *Mapping) Except(e Exceptions) {
	first := make(map[int]uint32)
	if len(e.Names)+len(e.Addresses) > 0 {
		for bucket, slot := range m.Table.Bucket {
			if _, ok := first[int(slot)]; !ok {
				first[int(slot)] = uint32(bucket)
			}
		}
	}
	m.names, m.addresses = make(map[string]uint32), make(map[netip.Addr]uint32)
	for name, slot := range e.Names {
		if bucket, ok := first[slot]; ok {
			m.names[name] = bucket
		}
	}
	for addr, slot := range e.Addresses {
		if bucket, ok := first[slot]; ok {
			m.addresses[addr] = bucket
		}
	}
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

// Entries are the contents of the LPM trie that represents the device map and the exceptions in the kernel. Entries are
// immutable.
type Entries struct {
	devices   *DeviceMap
	nonce     uint64
	names     map[string]uint32
	addresses map[netip.Addr]uint32
}

// Entries returns the current trie entries of the mapping.
func (m *Mapping) Entries() *Entries {
	return &Entries{m.Devices, m.Table.Nonce, m.names, m.addresses} // Except makes new maps
}

// Size returns the maximum number of entries; 0 without a device map and without exceptions for addresses.
func (e *Entries) Size() int {
	if n := e.devices.Len() + len(e.addresses); n > 0 {
		return n + 1
	}
	return 0
}

// Equal reports whether the tries of both entries are the same.
func (e *Entries) Equal(o *Entries) bool {
	return e.nonce == o.nonce && maps.Equal(e.names, o.names) && maps.Equal(e.addresses, o.addresses) && e.devices.Equal(o.devices)
}

// All yields the entries.
func (e *Entries) All() iter.Seq2[bpf.Prefix, bpf.DeviceID] {
	return func(yield func(bpf.Prefix, bpf.DeviceID) bool) {
		if e.Size() == 0 {
			return
		}
		// One trie has both families; ::/0 must not match IPv4.
		if !yield(trieKey(netip.PrefixFrom(netip.IPv4Unspecified(), 0)), bpf.DeviceID{Device: bpf.NoDevice}) {
			return
		}
		hashes := make([]uint32, len(e.devices.Devices()))
		for i, name := range e.devices.Devices() {
			hashes[i] = deviceHash(e.names, name, e.nonce)
		}
		for prefix, device := range e.devices.All() {
			if !yield(trieKey(prefix), bpf.DeviceID{Hash: hashes[device], Device: device}) {
				return
			}
		}
		for addr, bucket := range e.addresses {
			if !yield(trieKey(netip.PrefixFrom(addr, addr.BitLen())), bpf.DeviceID{Hash: bucket, Device: unnamed}) {
				return
			}
		}
	}
}

// unnamed is the device id of an exception for an address, which has no name in the device map.
const unnamed = bpf.NoDevice - 1

// deviceHash returns a hash in the bucket of a device: that of the exception, or the hash of the name.
func deviceHash(exceptions map[string]uint32, name string, nonce uint64) uint32 {
	if bucket, ok := exceptions[name]; ok {
		return bucket
	}
	return DeviceHash(name, nonce)
}

func trieKey(prefix netip.Prefix) bpf.Prefix {
	bits := prefix.Bits()
	if prefix.Addr().Is4() {
		bits += 96
	}
	return bpf.Prefix{Prefixlen: uint32(bits), Address: Address(prefix.Addr())}
}

// Slot returns the slot of an address, and the name of the device, or "" if the device map has none.
func (m *Mapping) Slot(addr netip.Addr) (slot int, device string) {
	bucket, device := m.locate(addr)
	return int(m.Table.Bucket[bucket]), device
}

// Bucket returns the bucket of an address.
func (m *Mapping) Bucket(addr netip.Addr) int {
	bucket, _ := m.locate(addr)
	return bucket
}

func (m *Mapping) locate(addr netip.Addr) (bucket int, device string) {
	hash := Hash(Address(addr), m.Table.Nonce)
	if id, ok := m.Devices.Lookup(addr); ok {
		device = m.Devices.Devices()[id]
		hash = deviceHash(m.names, device, m.Table.Nonce)
	}
	if bucket, ok := m.addresses[addr.Unmap().WithZone("")]; ok {
		hash = bucket
	}
	return int(hash % uint32(bpf.Buckets)), device
}
