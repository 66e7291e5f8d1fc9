// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"iter"
	"net/netip"

	"sockeye/internal/bpf"
)

// Mapping says which slot an address has: the nonce, the bucket table and the
// device map that a service works with.
type Mapping struct {
	Table   bpf.Table
	Devices *DeviceMap
}

// NewMapping makes the mapping of a service with the given number of slots, 1
// to bpf.MaxSlots. standby is the slot that serves in place of an empty one,
// or bpf.NoSlot.
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
	if devices.Len() > 0 {
		m.Table.Named = 1
	}
	return m, nil
}

// buckets spreads the buckets evenly: every slot has as many as any other, or
// one more. The result depends on the number of slots alone, and a slot more
// or less moves only the buckets that must move: the table for n slots is the
// one for n-1, from which the new slot takes its share.
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

// Entries are the contents of the LPM trie that stands for the device map in
// the kernel, and how many there are. It is empty without a device map.
func (m *Mapping) Entries() (int, iter.Seq2[bpf.Prefix, bpf.DeviceID]) {
	if m.Devices.Len() == 0 {
		return 0, nil
	}
	return m.Devices.Len() + 1, func(yield func(bpf.Prefix, bpf.DeviceID) bool) {
		// The trie is one for both families; ::/0 must not cover IPv4.
		if !yield(trieKey(netip.PrefixFrom(netip.IPv4Unspecified(), 0)), bpf.DeviceID{Device: bpf.NoDevice}) {
			return
		}
		hashes := make([]uint32, len(m.Devices.Devices()))
		for i, name := range m.Devices.Devices() {
			hashes[i] = DeviceHash(name, m.Table.Nonce)
		}
		for prefix, device := range m.Devices.All() {
			if !yield(trieKey(prefix), bpf.DeviceID{Hash: hashes[device], Device: device}) {
				return
			}
		}
	}
}

func trieKey(prefix netip.Prefix) bpf.Prefix {
	bits := prefix.Bits()
	if prefix.Addr().Is4() {
		bits += 96
	}
	return bpf.Prefix{Prefixlen: uint32(bits), Address: Address(prefix.Addr())}
}

// Slot returns the slot of an address, and the device's name if the device
// map has one.
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
		hash = DeviceHash(device, m.Table.Nonce)
	}
	return int(hash % uint32(bpf.Buckets)), device
}
