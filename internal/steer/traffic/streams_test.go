// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"maps"
	"net/netip"
	"testing"
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/placement"
)

// TestStreams checks which devices count as devices with one stream as time passes.
func TestStreams(t *testing.T) {
	boot := time.Unix(1_700_000_000, 0)
	now := boot.Add(time.Hour)
	address := func(text string) bpf.Address { return placement.Address(netip.MustParseAddr(text)) }
	both, quiet, gone, udp := address("192.0.2.1"), address("192.0.2.2"), address("192.0.2.3"), address("192.0.2.4")
	table := map[bpf.Address]bpf.Seen{
		both:  {Datagrams: 7, Connections: 1, LastSeen: uint64(time.Hour)},
		quiet: {Connections: 1, LastSeen: uint64(time.Hour)},
		gone:  {Datagrams: 9, LastSeen: uint64(30 * time.Minute)}, // before the silence
		udp:   {Datagrams: 1<<32 + 5, LastSeen: uint64(time.Hour)},
	}
	names := map[bpf.Address]string{}
	key := func(a netip.Addr) deviceKey {
		if name := names[placement.Address(a)]; name != "" {
			return deviceKey{name: name}
		}
		return deviceKey{address: a}
	}
	connected := map[deviceKey]bool{key(placement.Addr(both)): true, key(placement.Addr(quiet)): true}
	var s streams
	expect := func(when string, tcp, udp int) {
		t.Helper()
		s.update(now, boot, maps.All(table), key, connected)
		if s.tcp != tcp || s.udp != udp {
			t.Errorf("%s: %d with TCP alone, %d with UDP alone, want %d and %d", when, s.tcp, s.udp, tcp, udp)
		}
	}
	sends := func(a bpf.Address) {
		seen := table[a]
		seen.Datagrams++
		table[a] = seen
	}
	expect("at first", 1, 1)

	now = now.Add(silence - time.Second)
	expect("just before the silence", 1, 1)
	sends(udp)
	expect("after a datagram of one device", 1, 1)
	now = now.Add(2 * time.Second)
	expect("after the silence of the other one", 2, 1)
	sends(both)
	expect("when it sends again", 1, 1)

	// Two addresses of one device, one for each stream.
	delete(connected, key(placement.Addr(quiet)))
	names[udp], names[quiet] = "router", "router"
	connected[deviceKey{name: "router"}] = true
	expect("with a device map", 0, 0)
	delete(connected, key(placement.Addr(both)))
	expect("without a connection", 0, 1)
	delete(table, both)
	expect("without an entry in the table", 0, 0)
	if len(s.last) != 2 {
		t.Errorf("%d entries, want those of the two other addresses with datagrams", len(s.last))
	}
}
