// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"maps"
	"net/netip"
	"testing"

	"sockeye/internal/bpf"
)

// Exceptions have the given slots, in user space and in the entries for the kernel; other devices keep their slots.
func TestExcept(t *testing.T) {
	addr := netip.MustParseAddr
	for name, devices := range map[string]*DeviceMap{
		"no device map": nil,
		"a device map":  parseMap(t, "10.0.0.0/8,edge\n2001:db8::/32,edge\n::/0,rest\n"),
	} {
		plain, m := testMapping(t, 5, 7, devices), testMapping(t, 5, 7, devices)
		all := []string{"10.1.2.3", "192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db9::1", "2001:db9::2"}
		for slot := range 5 {
			m.Except(Exceptions{
				Names:     map[string]int{"edge": slot, "none": 1},
				Addresses: map[netip.Addr]int{addr("192.0.2.1"): slot, addr("2001:db9::1"): slot, addr("192.0.2.3"): 77},
			})
			trie := maps.Collect(m.Entries().All())
			for _, text := range all {
				want, device := plain.Slot(addr(text))
				if device == "edge" || text == "192.0.2.1" || text == "2001:db9::1" {
					want = slot
				}
				got, _ := m.Slot(addr(text))
				id, found := longest(trie, addr(text))
				hash := Hash(Address(addr(text)), 7)
				if found && id.Device != bpf.NoDevice {
					hash = id.Hash
				}
				if inKernel := int(m.Table.Bucket[hash%uint32(bpf.Buckets)]); got != want || inKernel != want {
					t.Errorf("%s, slot %d: %s has %d, in the kernel %d, want %d", name, slot, text, got, inKernel, want)
				}
			}
		}
		m.Except(Exceptions{})
		for _, text := range all {
			got, _ := m.Slot(addr(text))
			if want, _ := plain.Slot(addr(text)); got != want || m.Table != plain.Table {
				t.Errorf("%s: %s has %d without exceptions, want %d", name, text, got, want)
			}
		}
		if n := m.Entries().Size(); (n > 0) != (devices != nil) {
			t.Errorf("%s: %d entries", name, n)
		}
	}
}
