// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	"sockeye/internal/bpf"
)

// hashword implements hashword of Bob Jenkins' lookup3.c for any number of words, as does jhash2 of the kernel.
func hashword(k []uint32, initval uint32) uint32 {
	mix := func(x, y, z *uint32, n int) {
		*x -= *z
		*x ^= bits.RotateLeft32(*z, n)
		*z += *y
	}
	final := func(x, y *uint32, n int) {
		*x ^= *y
		*x -= bits.RotateLeft32(*y, n)
	}
	a := 0xdeadbeef + uint32(len(k))<<2 + initval
	b, c := a, a
	for ; len(k) > 3; k = k[3:] {
		a, b, c = a+k[0], b+k[1], c+k[2]
		mix(&a, &b, &c, 4)
		mix(&b, &c, &a, 6)
		mix(&c, &a, &b, 8)
		mix(&a, &b, &c, 16)
		mix(&b, &c, &a, 19)
		mix(&c, &a, &b, 4)
	}
	switch len(k) {
	case 3:
		c += k[2]
		fallthrough
	case 2:
		b += k[1]
		fallthrough
	case 1:
		a += k[0]
		final(&c, &b, 14)
		final(&a, &c, 11)
		final(&b, &a, 25)
		final(&c, &b, 16)
		final(&a, &c, 4)
		final(&b, &a, 14)
		final(&c, &b, 24)
	}
	return c
}

func TestHash(t *testing.T) {
	// From a C program with jhash2 of the kernel's include/linux/jhash.h over
	// the address, the nonce's low word and its high word, initval 0.
	for _, test := range []struct {
		addr  string
		nonce uint64
		want  uint32
	}{
		{"::", 0, 0x3bc1a626},
		{"::", 1, 0x1a2a334b},
		{"::", 1 << 32, 0xb11e16ad},
		{"::1", 0, 0x34f28892},
		{"192.0.2.1", 0, 0x677e12b1},
		{"192.0.2.1", 0x0123456789abcdef, 0xe1d7119a},
		{"255.255.255.255", 1<<64 - 1, 0xd8511fe7},
		{"2001:db8::1", 0x0123456789abcdef, 0xf21f0539},
		{"ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 1<<64 - 1, 0x088527c4},
	} {
		if got := Hash(Address(netip.MustParseAddr(test.addr)), test.nonce); got != test.want {
			t.Errorf("%s with nonce %#x: %#x, want %#x", test.addr, test.nonce, got, test.want)
		}
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 100_000 {
		a, nonce := fromBytes(randomAddr(rnd).As16()), rnd.Uint64()
		words := append(a.Word[:], uint32(nonce), uint32(nonce>>32))
		if got, want := Hash(a, nonce), hashword(words, 0); got != want {
			t.Fatalf("%v with nonce %#x: %#x, want %#x", a, nonce, got, want)
		}
	}
}

func randomAddr(rnd *rand.Rand) netip.Addr {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], rnd.Uint64())
	binary.LittleEndian.PutUint64(b[8:], rnd.Uint64())
	return netip.AddrFrom16(b)
}

func TestAddress(t *testing.T) {
	for _, test := range []struct{ in, out string }{
		{"192.0.2.1", "192.0.2.1"}, {"::ffff:192.0.2.1", "192.0.2.1"}, {"::", "::"}, {"fe80::1%eth0", "fe80::1"}, {"2001:db8::1", "2001:db8::1"},
	} {
		if got := Addr(Address(netip.MustParseAddr(test.in))).String(); got != test.out {
			t.Errorf("%s comes back as %s, want %s", test.in, got, test.out)
		}
	}
	// Network byte order, as in a packet, in the memory of a little-endian machine.
	if got, want := Address(netip.MustParseAddr("192.0.2.1")).Word, [4]uint32{0, 0, 0xffff0000, 0x010200c0}; got != want {
		t.Errorf("words %#x, want %#x", got, want)
	}
}

func testMapping(t testing.TB, slots int, nonce uint64, devices *DeviceMap) *Mapping {
	t.Helper()
	m, err := NewMapping(slots, bpf.NoSlot, nonce, devices)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestNewMapping(t *testing.T) {
	for _, slots := range []int{-1, 0, bpf.MaxSlots + 1} {
		if m, err := NewMapping(slots, bpf.NoSlot, 0, nil); err == nil {
			t.Errorf("%d slots: %d", slots, m.Table.Slots)
		}
	}
	m, err := NewMapping(7, 3, 5, nil)
	if err != nil || m.Table.Slots != 7 || m.Table.Standby != 3 || m.Table.Nonce != 5 {
		t.Errorf("%d slots, standby %d, nonce %d, %v", m.Table.Slots, m.Table.Standby, m.Table.Nonce, err)
	}
	if m := testMapping(t, 7, 0, nil); int(m.Table.Standby) != bpf.NoSlot {
		t.Errorf("standby %d", m.Table.Standby)
	}
}

// TestBuckets checks for every number of slots that the table is even, and that an additional slot gets its share of the
// buckets without moving others.
func TestBuckets(t *testing.T) {
	before := buckets(1)
	for n := 1; n <= bpf.MaxSlots; n++ {
		if n > 20 && n < bpf.MaxSlots && n%101 != 0 {
			continue
		}
		table := buckets(n)
		var count [bpf.MaxSlots]int
		for _, slot := range table {
			count[slot]++
		}
		for slot, c := range count {
			low, high := bpf.Buckets/n, (bpf.Buckets+n-1)/n
			if slot >= n {
				low, high = 0, 0
			}
			if c < low || c > high {
				t.Fatalf("%d slots: slot %d has %d buckets, want %d to %d", n, slot, c, low, high)
			}
		}
		if n > 1 {
			before = buckets(n - 1)
		}
		moved := 0
		for b, slot := range table {
			if slot == before[b] {
				continue
			}
			moved++
			if int(slot) != n-1 {
				t.Fatalf("%d slots: bucket %d moves from slot %d to %d", n, b, before[b], slot)
			}
		}
		if n > 1 && moved != count[n-1] {
			t.Fatalf("%d slots: %d buckets move, the new slot has %d", n, moved, count[n-1])
		}
	}
}

// TestBucketsStay compares tables with those of earlier versions: a different table would move devices at an upgrade of
// the agent.
func TestBucketsStay(t *testing.T) {
	for n, want := range map[int]string{
		1: "c35020473aed1b46", 2: "eff398a48ebfa2aa", 5: "9bd558152cd1257e", 100: "d6a341fe09b731a7",
	} {
		table := buckets(n)
		var b []byte
		for _, slot := range table {
			b = binary.BigEndian.AppendUint16(b, slot)
		}
		if got := fmt.Sprintf("%x", sha256.Sum256(b))[:16]; got != want {
			t.Errorf("%d slots: checksum %s, was %s", n, got, want)
		}
	}
}

// TestSlotsAreEven checks that random addresses are distributed evenly over the slots.
func TestSlotsAreEven(t *testing.T) {
	const slots, addresses = 8, 80_000
	m := testMapping(t, slots, 0xfeed, nil)
	rnd := rand.New(rand.NewPCG(1, 2))
	var count [slots]int
	for i := range addresses {
		a := randomAddr(rnd)
		if i%2 == 0 { // routers of one network, as they are numbered
			a = netip.AddrFrom4([4]byte{10, byte(i >> 17), byte(i >> 9), byte(i >> 1)})
		}
		slot, _ := m.Slot(a)
		count[slot]++
		if b := m.Locate(a).Bucket; int(m.Table.Bucket[b]) != slot {
			t.Fatalf("%s: slot %d, but bucket %d has slot %d", a, slot, b, m.Table.Bucket[b])
		}
	}
	for slot, n := range count {
		if n < addresses/slots*9/10 || n > addresses/slots*11/10 {
			t.Errorf("slot %d has %d of %d addresses", slot, n, addresses)
		}
	}
}

func TestMappedAddressIsIPv4(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, devices := range []*DeviceMap{nil, parseMap(t, "10.0.0.0/8,a\n::ffff:128.0.0.0/97,b\n::/0,c")} {
		m := testMapping(t, 512, 7, devices)
		for range 1000 {
			b := randomAddr(rnd).As16()
			v4 := netip.AddrFrom4([4]byte(b[:4]))
			slot, device := m.Slot(v4)
			if mapped, also := m.Slot(netip.AddrFrom16(v4.As16())); mapped != slot || also != device {
				t.Fatalf("%s has slot %d of %q, mapped %d of %q", v4, slot, device, mapped, also)
			}
		}
	}
}

// TestDevicesOfAMapping checks that all addresses of a device have the slot of its name, and that other addresses keep
// theirs.
func TestDevicesOfAMapping(t *testing.T) {
	devices := parseMap(t, "192.0.2.1,r1\n198.51.100.0/24,r1\n2001:db8::/64,r1\n10.0.0.0/8,r2\n::/0,six\n")
	const slots = 1024
	m, plain := testMapping(t, slots, 7, devices), testMapping(t, slots, 7, nil)
	slotOf := make(map[string]int)
	for _, test := range []struct{ addr, device string }{
		{"192.0.2.1", "r1"}, {"198.51.100.0", "r1"}, {"198.51.100.255", "r1"}, {"2001:db8::", "r1"}, {"2001:db8::ffff", "r1"}, {"::ffff:192.0.2.1", "r1"},
		{"10.0.0.1", "r2"}, {"10.255.255.255", "r2"}, {"::1", "six"}, {"2001:db8:0:1::", "six"},
		{"192.0.2.2", ""}, {"11.0.0.0", ""}, {"::ffff:11.0.0.0", ""},
	} {
		addr := netip.MustParseAddr(test.addr)
		slot, device := m.Slot(addr)
		if device != test.device {
			t.Errorf("%s is %q, want %q", addr, device, test.device)
		}
		if test.device == "" {
			if want, _ := plain.Slot(addr); slot != want {
				t.Errorf("%s of no device: slot %d, want %d", addr, slot, want)
			}
			continue
		}
		if first, ok := slotOf[device]; ok && slot != first {
			t.Errorf("%s of %s: slot %d, its other addresses have %d", addr, device, slot, first)
		}
		slotOf[device] = slot
	}
	renumbered := testMapping(t, slots, 7, parseMap(t, "203.0.113.9,r1\n"))
	if slot, _ := renumbered.Slot(netip.MustParseAddr("203.0.113.9")); slot != slotOf["r1"] {
		t.Errorf("r1 with another address: slot %d, was %d", slot, slotOf["r1"])
	}
	if slotOf["r1"] == slotOf["r2"] && slotOf["r2"] == slotOf["six"] {
		t.Error("all devices have one slot")
	}
}

// TestEntries looks up addresses in the entries like an LPM trie, and compares the hash with that of the mapping.
func TestEntries(t *testing.T) {
	none := testMapping(t, 4, 7, nil).Entries()
	if n := len(maps.Collect(none.All())); n != 0 || none.Size() != 0 {
		t.Errorf("%d entries without a device map, room for %d", n, none.Size())
	}
	for name, test := range map[string]struct {
		text string
		size int
	}{
		"both families":   {"192.0.2.1,r1\n198.51.100.0/24,r1\n2001:db8::/64,r1\n10.0.0.0/8,r2\n10.1.0.0/16,r3\n::/0,six\n::fffe:0:0/95,r4", 8},
		"IPv4 by default": {"0.0.0.0/0,all\n10.0.0.0/8,ten\n::/8,six", 4},
		"IPv6 only":       {"::/0,six", 2},
	} {
		t.Run(name, func(t *testing.T) {
			m := testMapping(t, 1024, 7, parseMap(t, test.text))
			size, all := m.Entries().Size(), m.Entries().All()
			if size != test.size {
				t.Errorf("room for %d entries, want %d", size, test.size)
			}
			trie := maps.Collect(all) // a later entry replaces an earlier one with its key, as in the kernel
			if len(trie) > size {
				t.Errorf("%d entries in room for %d", len(trie), size)
			}
			rnd := rand.New(rand.NewPCG(1, 2))
			inside := 0
			for i := range 2000 {
				addr := randomAddr(rnd)
				if i%2 == 0 {
					b := addr.As16()
					addr = netip.AddrFrom4([4]byte{[]byte{10, 192, 198, b[0]}[b[1]%4], b[2] % 4, b[3], b[4]})
				}
				hash := Hash(Address(addr), m.Table.Nonce)
				if id, found := longest(trie, addr); found && id.Device != bpf.NoDevice {
					hash = id.Hash
					inside++
					if _, device := m.Slot(addr); device != m.Devices.Devices()[id.Device] {
						t.Fatalf("%s is of %q, by the entries of %q", addr, device, m.Devices.Devices()[id.Device])
					}
				}
				if got, want := m.Locate(addr).Bucket, int(hash%uint32(bpf.Buckets)); got != want {
					t.Fatalf("%s: bucket %d, by the entries %d", addr, got, want)
				}
			}
			if inside < 20 {
				t.Errorf("only %d addresses are of a device", inside)
			}
		})
	}
	// The loop over the entries may break.
	for range testMapping(t, 4, 7, parseMap(t, "10.0.0.0/8,a\n11.0.0.0/8,b")).Entries().All() {
		break
	}
}

// TestEntriesEqual checks that entries differ exactly if their tries differ.
func TestEntriesEqual(t *testing.T) {
	const text = "10.0.0.0/8,a\n11.0.0.0/8,b\n"
	m := testMapping(t, 4, 7, parseMap(t, text))
	same := testMapping(t, 5, 7, parseMap(t, "\n# a comment\n"+text))
	if !m.Entries().Equal(same.Entries()) {
		t.Error("another number of slots makes another trie")
	}
	before := m.Entries()
	pinned := m.WithPins(Pins{Names: map[string]int{"a": 3}})
	for name, other := range map[string]*Entries{
		"nonce":  testMapping(t, 4, 8, parseMap(t, text)).Entries(),
		"prefix": testMapping(t, 4, 7, parseMap(t, "10.0.0.0/8,a\n11.0.0.0/9,b\n")).Entries(),
		"names":  testMapping(t, 4, 7, parseMap(t, "10.0.0.0/8,a\n11.0.0.0/8,c\n")).Entries(),
		"device": testMapping(t, 4, 7, parseMap(t, "10.0.0.0/8,a\n11.0.0.0/8,b\n11.0.0.0/9,a\n")).Entries(),
		"no map": testMapping(t, 4, 7, nil).Entries(),
		"pins":   pinned.Entries(),
	} {
		if before.Equal(other) || other.Equal(before) {
			t.Errorf("%s: the entries are equal", name)
		}
	}
}

// longest looks up an address like an LPM trie.
func longest(trie map[bpf.Prefix]bpf.DeviceID, addr netip.Addr) (id bpf.DeviceID, found bool) {
	text := func(a bpf.Address) string {
		var b strings.Builder
		for _, word := range a.Word {
			for i := range 32 { // bits of a packet, first to last
				b.WriteByte('0' + byte(word>>(i/8*8+7-i%8)&1))
			}
		}
		return b.String()
	}
	want, length := text(Address(addr)), uint32(0)
	for p, d := range trie {
		if (!found || p.Prefixlen > length) && strings.HasPrefix(want, text(p.Address)[:p.Prefixlen]) {
			id, length, found = d, p.Prefixlen, true
		}
	}
	return id, found
}
