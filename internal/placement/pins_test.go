// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"maps"
	"net/netip"
	"testing"

	"sockeye/internal/bpf"
)

// kernelSlot returns the slot that the steering programs give an address.
func kernelSlot(m *Mapping, trie map[bpf.Prefix]bpf.DeviceID, addr netip.Addr) int {
	hash := Hash(Address(addr), m.Table.Nonce)
	if id, found := longest(trie, addr); found && id.Device != bpf.NoDevice {
		if id.Device&bpf.Pinned != 0 {
			return int(id.Hash)
		}
		hash = id.Hash
	}
	return int(m.Table.Bucket[hash%uint32(bpf.Buckets)])
}

// TestPins checks that pinned devices have their slots, in user space and in the entries for the kernel, also slots
// without a bucket, and that other devices keep their slots.
func TestPins(t *testing.T) {
	addr, prefix := netip.MustParseAddr, netip.MustParsePrefix
	for name, devices := range map[string]*DeviceMap{
		"no device map": nil,
		"a device map":  parseMap(t, "10.0.0.0/8,edge\n2001:db8::/32,edge\n203.0.113.0/24,rest\n::/0,rest\n"),
	} {
		plain := testMapping(t, 5, 7, devices)
		all := []string{"10.1.2.3", "192.0.2.1", "192.0.2.2", "192.0.2.77", "198.51.100.1", "203.0.113.1", "2001:db8::1", "2001:db9::1", "2001:db9::2"}
		for _, slot := range []int{0, 4, 5, bpf.MaxSlots - 1} {
			m := plain.WithPins(Pins{
				Names: map[string]int{"edge": slot, "none": 1},
				Prefixes: map[netip.Prefix]int{
					prefix("192.0.2.1/32"): slot, prefix("192.0.2.0/26"): 3, prefix("2001:db9::1/128"): slot,
					prefix("203.0.113.1/32"): slot, prefix("198.51.100.1/32"): slot,
				},
			})
			trie := maps.Collect(m.Entries().All())
			for _, text := range all {
				want, device := plain.Slot(addr(text))
				switch {
				case device == "edge", text == "192.0.2.1", text == "198.51.100.1", text == "2001:db9::1" && device == "", text == "203.0.113.1" && device == "":
					want = slot
				case text == "192.0.2.2":
					want = 3
				}
				got, inKernel := m.Locate(addr(text)), kernelSlot(m, trie, addr(text))
				if got.Slot != want || inKernel != want {
					t.Errorf("%s, slot %d: %s has %d, in the kernel %d, want %d", name, slot, text, got.Slot, inKernel, want)
				}
			}
		}
		m := plain.WithPins(Pins{Prefixes: map[netip.Prefix]int{prefix("192.0.2.0/24"): 9}}).WithPins(Pins{})
		for _, text := range all {
			got, _ := m.Slot(addr(text))
			if want, _ := plain.Slot(addr(text)); got != want || m.Table != plain.Table {
				t.Errorf("%s: %s has %d without pins, want %d", name, text, got, want)
			}
		}
		if n := m.Entries().Size(); (n > 0) != (devices != nil) {
			t.Errorf("%s: %d entries", name, n)
		}
	}
}

// TestPinOfEverything checks pins of the shortest prefixes: each applies to its family only.
func TestPinOfEverything(t *testing.T) {
	for text, family4 := range map[string]bool{"0.0.0.0/0": true, "::/0": false} {
		m := testMapping(t, 4, 7, nil).WithPins(Pins{Prefixes: map[netip.Prefix]int{netip.MustParsePrefix(text): 900}})
		trie := maps.Collect(m.Entries().All())
		for _, address := range []string{"192.0.2.1", "2001:db8::1"} {
			a := netip.MustParseAddr(address)
			got, _ := m.Slot(a)
			if pinned := got == 900; pinned != (a.Is4() == family4) || kernelSlot(m, trie, a) != got {
				t.Errorf("pin of %s: %s has %d, in the kernel %d", text, address, got, kernelSlot(m, trie, a))
			}
		}
	}
}

// TestCovers checks which prefixes are inside a prefix of the device map.
func TestCovers(t *testing.T) {
	m := parseMap(t, "10.0.0.0/8,a\n10.1.0.0/16,b\n2001:db8::/32,c\n::/0,d\n")
	for text, want := range map[string]string{
		"10.1.2.0/24": "b", "10.1.0.0/16": "b", "10.0.0.0/15": "a", "10.2.0.1/32": "a", "0.0.0.0/0": "", "11.0.0.0/8": "",
		"2001:db8:1::/48": "c", "2001::/16": "d", "::/0": "d",
	} {
		id, ok := m.Covers(netip.MustParsePrefix(text))
		if got := ""; ok {
			if got = m.Devices()[id]; got != want {
				t.Errorf("%s belongs to %s, want %q", text, got, want)
			}
		} else if want != "" {
			t.Errorf("%s belongs to no device, want %s", text, want)
		}
	}
}
