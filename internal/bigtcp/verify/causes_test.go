// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"fmt"
	"math"
	"net/netip"
	"strings"
	"testing"
	"time"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/netif/netiftest"
	"sockeye/internal/bigtcp/programs"
)

const big = 196608

// TestCause determines the cause for each kind of connection from plain structs.
func TestCause(t *testing.T) {
	on := netif.Interface{Name: "eth0", Driver: "mlx5_core", TSOMaxSize: netif.MaxSize, Sizes: netiftest.Sizes(big, big, big, big), Offloads: netif.Offloads{GSO: true, TSO: true, GRO: true}}
	changed := func(f func(*netif.Interface)) netif.Interface {
		i := on
		f(&i)
		return i
	}
	off := changed(func(i *netif.Interface) {
		i.Sizes = netiftest.Sizes(netif.Legacy, netif.Legacy, netif.Legacy, netif.Legacy)
	})
	only6 := changed(func(i *netif.Interface) { i.Sizes.GSOIPv4, i.Sizes.GROIPv4 = netif.Legacy, netif.Legacy })
	virtio := changed(func(i *netif.Interface) {
		i.Driver, i.TSOMaxSize, i.Sizes = "virtio_net", netif.Legacy, netiftest.Sizes(netif.Legacy, netif.Legacy, netif.Legacy, netif.Legacy)
	})
	veth := changed(func(i *netif.Interface) {
		i.Kind = "veth"
		i.Related = []netif.Related{{Relation: netif.Peer, Name: "veth1", Netns: "/run/netns/x", Sizes: netiftest.Sizes(netif.Legacy, netif.Legacy, netif.Legacy, netif.Legacy)}}
	})
	bothOn := changed(func(i *netif.Interface) {
		i.Kind = "veth"
		i.Related = []netif.Related{{Relation: netif.Peer, Name: "veth1", Sizes: netiftest.Sizes(big, big, big, big)}}
	})
	vxlan := changed(func(i *netif.Interface) {
		i.Kind, i.Sizes = "vxlan", netiftest.Sizes(netif.Legacy, netif.Legacy, netif.Legacy, netif.Legacy)
	})
	noGRO := changed(func(i *netif.Interface) { i.Offloads.GRO = false })

	// A connection with packets of one size, and the state of its socket.
	wide := socketHistory{window: 4 << 20, ownWindow: 4 << 20, congestion: 4 << 20, pacing: math.MaxUint64, busy: time.Second}
	with := func(f func(*socketHistory)) *socketHistory {
		k := wide
		f(&k)
		return &k
	}
	sends := func(family Family, largest uint32, mean uint64, k *socketHistory) flow {
		f := flow{sent: true, family: family, socket: k}
		f.Largest, f.Packets, f.Bytes, f.Mss = largest, 1000, 1000*mean, 1448
		if mean > uint64(programs.Nearly) {
			f.NearlyBytes = f.Bytes
		}
		return f
	}
	receives := func(family Family, largest uint32, k *socketHistory) flow {
		f := sends(family, largest, uint64(largest), k)
		f.sent = false
		return f
	}
	away := func(f flow) flow {
		f.source, f.destination = f.destination, f.source
		return f
	}
	unsegmented := sends(TCP6, 1492, 1400, with(func(k *socketHistory) { k.unsent = 1 << 20 }))
	unsegmented.Mss = 0

	for _, test := range []struct {
		name string
		i    netif.Interface
		flow flow
		want string
		text string // in its detail
	}{
		{"full packets, on", on, sends(TCP6, 65232, 64000, &wide), "old_connection", "65232 bytes, although 196608"},
		{"full packets, off", off, sends(TCP6, 65232, 64000, &wide), "off", "IPv6 packets that eth0 sends"},
		{"full packets of IPv4, on for IPv6", only6, sends(TCP4, 65232, 64000, &wide), "off", "IPv4"},
		{"full packets, device cannot", virtio, sends(TCP6, 65232, 64000, &wide), "driver", "virtio_net"},
		{"full packets, tunnel", vxlan, sends(TCP6, 65232, 64000, &wide), "tunnel", "vxlan"},
		{"small window", on, sends(TCP6, 32000, 30000, with(func(k *socketHistory) { k.window = 64000 })), "receive_window", "64000"},
		{"slow reader", on, sends(TCP6, 2000, 900, with(func(k *socketHistory) { k.window, k.byWindow = 20000, 900*time.Millisecond })), "receive_window", "20000"},
		{"wide window that is full", on, sends(TCP6, 65232, 64000, with(func(k *socketHistory) { k.byWindow = time.Second })), "old_connection", ""},
		{"small congestion window", on, sends(TCP4, 14480, 12000, with(func(k *socketHistory) { k.congestion = 28960 })), "congestion_window", "28960"},
		{"pacing", on, sends(TCP4, 30000, 28000, with(func(k *socketHistory) { k.pacing = 31000 })), "pacing", "31000"},
		{"the least of several", on, sends(TCP4, 20000, 18000, with(func(k *socketHistory) { k.pacing, k.congestion, k.window = 31000, 50000, 100000 })), "congestion_window", ""},
		{"small writes", on, sends(TCP6, 2000, 900, &wide), "small_writes", "900 bytes on average"},
		{"small writes, off", off, sends(TCP6, 2000, 900, &wide), "small_writes", ""},
		{"mostly small writes", on, sends(TCP6, 65232, 900, &wide), "small_writes", ""},
		{"small writes, small windows", on, sends(TCP6, 2000, 900, with(func(k *socketHistory) { k.congestion, k.window = 14480, 60000 })), "small_writes", ""},
		{"large ones too", on, sends(TCP6, big, 50000, &wide), "varied", "196608"},
		{"large ones too, with loss", on, sends(TCP6, big, 50000, with(func(k *socketHistory) { k.resent = true })), "loss", ""},
		{"two segments of a large MTU, off", off, sends(TCP4, 131018, 90000, with(func(k *socketHistory) { k.resent = true })), "off", ""},
		{"large ones as wide as the window", on, sends(TCP6, 65587, 37000, with(func(k *socketHistory) { k.window = 65535 })), "receive_window", ""},
		{"gone, full packets, off", off, sends(TCP6, 65232, 64000, nil), "off", ""},
		{"gone", on, sends(TCP6, 30000, 20000, nil), "ended", ""},
		{"forwarded", on, away(sends(TCP6, 65232, 64000, nil)), "forwarded", "at most 65232"},
		{"a window that is not known", on, sends(TCP6, 65232, 64000, with(func(k *socketHistory) { k.window = 0 })), "old_connection", ""},

		{"received, off", off, receives(TCP6, 65000, &wide), "off", "IPv6 packets that eth0 receives"},
		{"received, no GRO", noGRO, receives(TCP6, 1500, &wide), "offload_off", "GRO"},
		{"received, on", on, receives(TCP6, 30000, &wide), "sender", "30000"},
		{"received, large ones too", on, receives(TCP6, big, &wide), "varied", "196608"},
		{"received, own window", on, receives(TCP6, 30000, with(func(k *socketHistory) { k.ownWindow = 60000 })), "receive_window", "60000"},
		{"received by lo, off", changed(func(i *netif.Interface) { i.Name, i.Sizes = "lo", off.Sizes }), receives(TCP6, 65000, &wide), "off", "to itself"},
		{"received of a peer that is off", veth, receives(TCP6, 65000, &wide), "off", "veth1 in /run/netns/x"},
		{"received of a peer that is on", bothOn, receives(TCP6, 65000, &wide), "sender", "65000"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := evidence{
				Interface: &test.i, support: netif.Support{IPv6: true, IPv4: true},
				locals: map[netip.Addr]bool{netip.MustParseAddr("10.0.0.1"): true},
			}
			s.verdict = s.Verdict(s.support)
			f := test.flow
			if !f.source.IsValid() && test.want != "forwarded" {
				f.source, f.destination = netip.MustParseAddrPort("10.0.0.1:1790"), netip.MustParseAddrPort("192.0.2.7:40000")
			}
			c := s.cause(&f)
			if c.Name != test.want || !strings.Contains(c.Detail, test.text) || c.Detail == "" || c.Hint == "" {
				t.Errorf("%+v, want %s with %q", c, test.want, test.text)
			}
		})
	}

	s := evidence{Interface: &on, queued: true, support: netif.Support{IPv6: true, IPv4: true}}
	if c := s.cause(&unsegmented); c.Name != "nfqueue" {
		t.Errorf("segments, with a queue: %+v", c)
	}
	s = evidence{Interface: &on, support: netif.Support{IPv6: true}}
	full := sends(TCP4, 65232, 64000, &wide)
	if c := s.cause(&full); c.Name != "kernel" {
		t.Errorf("IPv4 before Linux 6.3: %+v", c)
	}
}

// TestWhy checks that the causes with most bytes are reported, each with its share and its busiest connection.
func TestWhy(t *testing.T) {
	i := netif.Interface{Name: "va", Kind: "veth", Sizes: netiftest.Sizes(big, big, big, big), TSOMaxSize: netif.MaxSize, Offloads: netif.Offloads{GSO: true, TSO: true, GRO: true}}
	s := evidence{Interface: &i, support: netif.Support{IPv6: true, IPv4: true}}
	var flows []*flow
	connection := func(n int, bytes, large uint64, k socketHistory, largest uint32) {
		f := &flow{sent: true, family: TCP6, socket: &k}
		f.source = netip.AddrPortFrom(netip.MustParseAddr("fd09::1"), uint16(n))
		f.destination = netip.MustParseAddrPort("[fd09::2]:1790")
		f.Bytes, f.LargeBytes, f.Largest, f.Packets = bytes, large, largest, bytes/uint64(largest)
		flows = append(flows, f)
	}
	wide := socketHistory{window: 4 << 20, congestion: 4 << 20, pacing: math.MaxUint64}
	window, congestion, pacing := wide, wide, wide
	window.window, congestion.congestion, pacing.pacing = 60000, 20000, 20000
	connection(1, 1e9, 0, wide, 65232)
	connection(2, 3e9, 0, wide, 65232)
	connection(3, 2e9, 0, window, 30000)
	connection(4, 9e8, 0, congestion, 10000)
	connection(5, 8e8, 0, pacing, 20000)
	connection(6, 9e9, 9e9, wide, big)
	connection(7, 1e6, 0, wide, 1000) // too little to be told of
	p := &Report{TCPBytes: 20e9, Cut: 0.5, Counts: []Count{{Point: Driver, Family: TCP6, Bytes: 10e9}}}
	var got []string
	for _, c := range s.causes(flows, p) {
		got = append(got, fmt.Sprintf("%s %.3f %d %s", c.Name, c.Share, c.Connections, c.Example))
	}
	want := []string{
		"cut 0.250 0 ",
		"old_connection 0.200 2 [fd09::1]:2 to [fd09::2]:1790",
		"receive_window 0.100 1 [fd09::1]:3 to [fd09::2]:1790",
		"congestion_window 0.045 1 [fd09::1]:4 to [fd09::2]:1790",
		"pacing 0.040 1 [fd09::1]:5 to [fd09::2]:1790",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("causes\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	i.Offloads.TSO = false
	if c := s.cut(); !strings.Contains(c.Detail, "TSO") {
		t.Errorf("cut without TSO: %+v", c)
	}
}

// TestPacedSize checks the formula of tcp_tso_autosize.
func TestPacedSize(t *testing.T) {
	for _, test := range []struct {
		rate    uint64
		minRTT  uint32
		rttLog  uint
		want    uint64
		because string
	}{
		{math.MaxUint64, 100, 9, math.MaxUint64, "not paced"},
		{1 << 30, 100, 9, 1<<20 + big, "near: the whole size on top"},
		{1 << 30, 600, 9, 1<<20 + big/2, "half of it"},
		{1 << 24, 20000, 9, 1 << 14, "far: what goes in a millisecond"},
		{1 << 24, 100, 0, 1 << 14, "before Linux 5.18, or turned off"},
		{1 << 24, math.MaxUint32, 9, 1 << 14, "no round trip yet"},
	} {
		if got := pacedSize(test.rate, test.minRTT, big, test.rttLog); got != test.want {
			t.Errorf("%s: %d, want %d", test.because, got, test.want)
		}
	}
}
