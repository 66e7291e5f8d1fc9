// SPDX-License-Identifier: Apache-2.0

package packets_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/load"
	"sockeye/internal/testenv"
	"sockeye/internal/trace/capture"
	"sockeye/internal/trace/packets"
	"sockeye/lab"
)

// socket opens a UDP socket in a namespace.
func (w *world) socket(t testing.TB, n *lab.Namespace, at netip.Addr) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	check(t, n.Do(func() (err error) {
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, 0)))
		return err
	}))
	t.Cleanup(func() { c.Close() })
	return c
}

// arrive waits until the link has delivered the packets that f sends in a direction: a process moves them, which may not run for
// a while. The counters of the link do not tell: the link counts a packet after it has delivered it.
func (w *world) arrive(t testing.TB, d lab.Direction, f func()) {
	t.Helper()
	source, sink := w.socket(t, w.a, linkA[0].Addr()), w.socket(t, w.b, linkB[0].Addr())
	if d == lab.BToA {
		source, sink = w.socket(t, w.b, linkB[0].Addr()), w.socket(t, w.a, linkA[0].Addr())
	}
	f()
	_, err := source.WriteToUDPAddrPort([]byte("last"), end(sink)) // the link keeps the order
	check(t, err)
	check(t, sink.SetReadDeadline(time.Now().Add(time.Minute)))
	_, _, err = sink.ReadFromUDPAddrPort(make([]byte, 4))
	check(t, err)
}

func option(t testing.TB, c syscall.Conn, level, name, value int) {
	t.Helper()
	raw, err := c.SyscallConn()
	check(t, err)
	check(t, raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, name, value) }))
	check(t, err)
}

func end(c *net.UDPConn) netip.AddrPort { return c.LocalAddr().(*net.UDPAddr).AddrPort() }

// datagrams captures a socket while f runs, and afterwards until no further event is expected.
func datagrams(t testing.TB, c *net.UDPConn, f func()) (all []*packets.Packet, summary *packets.Summary) {
	t.Helper()
	p, err := capture.OpenUDP(testenv.Cookie(t, c), testenv.Cgroup(), 8<<20)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	defer p.Close()
	reasons, err := capture.DropReasons()
	check(t, err)
	f()
	time.Sleep(20 * time.Millisecond) // for drivers
	check(t, p.Stop())
	a := packets.NewDatagramAssembler(0, 0, reasons, func(p *packets.Packet) error { all = append(all, p); return nil })
	for {
		var e capture.Event
		err := p.Read(time.Now().Add(time.Minute), &e)
		if errors.Is(err, io.EOF) {
			break
		}
		check(t, err)
		check(t, a.Add(&e))
	}
	summary, err = a.Close()
	check(t, err)
	if lost, err := p.Lost(); err != nil || lost != 0 || summary.Strays != 0 || summary.Unreadable != 0 && summary.Fates[packets.Dropped] == 0 || summary.Unfinished != 0 {
		t.Errorf("the capture is incomplete: %d lost, %v, %+v", lost, err, summary)
	}
	for i, p := range all {
		if p.Number != i+1 || i > 0 && p.Time.Before(all[i-1].Time) {
			t.Errorf("packet %d: number %d, at %v", i+1, p.Number, p.Time)
		}
	}
	return all, summary
}

// families runs a test between the ends of a link, for both families.
func families(t *testing.T, o lab.LinkOptions, f func(t *testing.T, w *world, from, to netip.Addr)) {
	for i, name := range []string{"IPv4", "IPv6"} {
		t.Run(name, func(t *testing.T) { f(t, newWorld(t, o), linkA[i].Addr(), linkB[i].Addr()) })
	}
}

func TestDatagrams(t *testing.T) {
	families(t, lab.LinkOptions{MTU: 1500}, func(t *testing.T, w *world, from, to netip.Addr) {
		a, b := w.socket(t, w.a, from), w.socket(t, w.b, to)
		other := w.socket(t, w.b, to)
		sizes := []int{0, 1, 100, 1000, 1400, 100, 100}
		var exchanged []byte
		send := func(c *net.UDPConn, to *net.UDPConn, n int) {
			_, err := c.WriteToUDPAddrPort(make([]byte, n), end(to))
			check(t, err)
		}
		buffer := make([]byte, 65536)
		receive := func(c *net.UDPConn, want int) {
			check(t, c.SetReadDeadline(time.Now().Add(time.Minute)))
			n, _, err := c.ReadFromUDPAddrPort(buffer)
			check(t, err)
			if n != want {
				t.Errorf("%d bytes, want %d", n, want)
			}
			exchanged = append(exchanged, buffer[:n]...)
		}
		sent, summary := datagrams(t, a, func() {
			for _, n := range sizes {
				send(a, b, n)
			}
			send(a, other, 7)
			w.arrive(t, lab.BToA, func() { send(b, a, 9) }) // of another socket
		})
		receive(a, 9)
		for _, n := range sizes {
			receive(b, n)
		}
		receive(other, 7)
		if summary.Sent != len(sizes)+1 || summary.Received != 1 || summary.Unread != 1 || len(sent) != len(sizes)+2 {
			t.Errorf("%d packets: %+v", len(sent), summary)
		}
		for i, n := range append(slices.Clone(sizes), 7) {
			p, peer := sent[i], end(b)
			if n == 7 {
				peer = end(other)
			}
			if p.Sent == nil || p.Length != n || p.Peer != peer || p.Sent.Fate != "" || p.Sent.Driver.Before(p.Time) || len(p.Sent.Hops) != 1 || p.Sent.Split != nil || p.Fragment != nil ||
				!strings.HasPrefix(p.Comment(), "qdisc ") {
				t.Errorf("datagram of %d bytes: %+v, %+v, %s", n, p, p.Sent, p.Comment())
			}
		}

		// Read at once, and after a wait; a part of a datagram is a datagram.
		const wait = 50 * time.Millisecond
		var waited time.Duration
		got, summary := datagrams(t, b, func() {
			for _, n := range sizes {
				send(a, b, n)
				receive(b, n)
			}
			begin := time.Now()
			w.arrive(t, lab.AToB, func() {
				for _, n := range sizes {
					send(a, b, n)
				}
			})
			time.Sleep(wait)
			for _, n := range sizes {
				receive(b, n)
			}
			waited = time.Since(begin)
			send(a, b, 1200)
			short := buffer
			buffer = buffer[:10]
			receive(b, 10)
			buffer = short
		})
		if summary.Received != 2*len(sizes)+1 || summary.Read != summary.Received || summary.Sent != 0 || summary.EarlierReads != 0 {
			t.Errorf("%+v", summary)
		}
		for i, p := range got {
			r := p.Received
			n := append(append(slices.Clone(sizes), sizes...), 1200)[i]
			if r == nil || p.Length != n || p.Peer != end(a) || p.Interface != "link0" || r.Read.Before(p.Time) || r.Waited != r.Read.Sub(p.Time) || r.Dropped {
				t.Errorf("datagram of %d bytes: %+v, %+v", n, p, r)
			} else if long := i >= len(sizes) && i < 2*len(sizes); long && (r.Waited < wait || r.Waited > waited) {
				t.Errorf("datagram %d waited %v, of %v to %v", i, r.Waited, wait, waited)
			}
		}
	})
}

// TestDatagramSegments sends datagrams that the kernel segments, before the driver or in the driver.
func TestDatagramSegments(t *testing.T) {
	families(t, lab.LinkOptions{MTU: 1500}, func(t *testing.T, w *world, from, to netip.Addr) {
		a := w.socket(t, w.a, from)
		option(t, a, unix.IPPROTO_UDP, unix.UDP_SEGMENT, 1000)
		reasons, err := capture.DropReasons()
		check(t, err)
		for _, test := range []struct {
			by packets.Divider
			to *net.UDPConn
		}{
			{packets.ByHost, w.socket(t, w.b, to)},     // by the TUN interface of the link
			{packets.ByDevice, w.socket(t, w.a, from)}, // by lo
		} {
			sent, summary := datagrams(t, a, func() {
				for _, n := range []int{10_000, 3500, 900} {
					_, err := a.WriteToUDPAddrPort(make([]byte, n), end(test.to))
					check(t, err)
				}
			})
			if len(sent) != 3 || summary.Segments != 15 || summary.SentBytes != 14_400 {
				t.Fatalf("%s: %d packets, %+v", test.by, len(sent), summary)
			}
			for i, segments := range []int{10, 4, 0} {
				var want *packets.Split
				s := sent[i].Sent
				if segments > 0 {
					want = &packets.Split{Segments: segments, Size: 1000, By: test.by}
					if s.Split != nil && s.Split.By == packets.ByHost && len(reasons) == 0 {
						want.By = packets.ByHost // lo of older kernels
					}
				}
				if !reflect.DeepEqual(s.Split, want) || s.Driver.IsZero() || s.Fate != "" {
					t.Errorf("%s: packet %d: %+v, want split as %+v", test.by, i, s, want)
				}
			}
		}
	})
}

// TestDatagramsOnTwoInterfaces sends through two interfaces in turns. The kernel uses the memory of a packet again for the next.
func TestDatagramsOnTwoInterfaces(t *testing.T) {
	families(t, lab.LinkOptions{MTU: 1500}, func(t *testing.T, w *world, from, to netip.Addr) {
		a, b, c := w.socket(t, w.a, from), w.socket(t, w.b, to), w.socket(t, w.a, from)
		const n = 20
		sent, _ := datagrams(t, a, func() {
			for range n {
				for size, peer := range map[int]*net.UDPConn{1000: b, 30: c} {
					_, err := a.WriteToUDPAddrPort(make([]byte, size), end(peer))
					check(t, err)
				}
			}
		})
		counts := map[string]int{}
		for _, p := range sent {
			if len(p.Sent.Hops) != 1 || p.Sent.Fate != "" {
				t.Errorf("%d bytes: %+v", p.Length, p.Sent)
				continue
			}
			counts[fmt.Sprint(p.Length, p.Sent.Hops[0].Interface)]++
		}
		if counts["1000link0"] != n || counts["30lo"] != n || len(sent) != 2*n {
			t.Errorf("%v of %d packets", counts, len(sent))
		}
	})
}

// TestDropsAtTheOtherEnd sends through a veth whose other end, in the same namespace, drops the frames because they are for
// another host. Such a drop is not a drop of the sender.
func TestDropsAtTheOtherEnd(t *testing.T) {
	w := newWorld(t, lab.LinkOptions{})
	nl := w.a.Netlink()
	check(t, nl.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "near"}, PeerName: "far"}))
	var near netlink.Link
	for _, name := range []string{"far", "near"} {
		var err error
		near, err = nl.LinkByName(name)
		check(t, err)
		check(t, nl.LinkSetUp(near))
	}
	from, to := netip.MustParsePrefix("10.92.0.1/24"), netip.MustParseAddrPort("10.92.0.2:4739")
	check(t, w.a.AddAddress("near", from))
	check(t, nl.NeighSet(&netlink.Neigh{LinkIndex: near.Attrs().Index, State: netlink.NUD_PERMANENT, IP: to.Addr().AsSlice(), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9}}))
	a := w.socket(t, w.a, from.Addr())
	const n = 5
	sent, summary := datagrams(t, a, func() {
		for range n {
			_, err := a.WriteToUDPAddrPort(make([]byte, 50), to)
			check(t, err)
		}
	})
	if len(sent) != n || len(summary.Fates) != 0 {
		t.Errorf("%d packets, %+v", len(sent), summary)
	}
}

// TestDatagramFragments sends datagrams that exceed the MTU.
func TestDatagramFragments(t *testing.T) {
	families(t, lab.LinkOptions{MTU: 1500}, func(t *testing.T, w *world, from, to netip.Addr) {
		a, b := w.socket(t, w.a, from), w.socket(t, w.b, to)
		const size = 4000
		send := func() {
			for range 2 {
				_, err := a.WriteToUDPAddrPort(make([]byte, size), end(b))
				check(t, err)
			}
		}
		sent, _ := datagrams(t, a, send)
		if len(sent) != 6 {
			t.Fatalf("%d packets", len(sent))
		}
		for i, p := range sent {
			first := sent[i/3*3]
			offset := 0
			if i%3 > 0 {
				offset = i % 3 * (first.Length + 8)
			}
			if p.Fragment == nil || p.Fragment.Of != first.Number || p.Fragment.Offset != offset || p.Peer.Addr() != to || p.Sent.Driver.IsZero() {
				t.Errorf("packet %d: %+v, %+v, %+v", i, p, p.Fragment, p.Sent)
			}
		}
		if total := sent[0].Length + sent[1].Length + sent[2].Length; total != size {
			t.Errorf("fragments of %d bytes", total)
		}
		buffer := make([]byte, 65536)
		got, summary := datagrams(t, b, func() {
			send()
			for range 4 { // two of them arrived before
				check(t, b.SetReadDeadline(time.Now().Add(time.Minute)))
				if n, _, err := b.ReadFromUDPAddrPort(buffer); err != nil || n != size {
					t.Errorf("%d bytes, %v", n, err)
				}
			}
		})
		earlier := 2
		if bySocket, err := load.HaveTracepoint("sock_recv_length"); err != nil || !bySocket {
			check(t, err)
			earlier = 0 // consume_skb shows the reads of known packets only
		}
		if len(got) != 2 || summary.Read != 2 || summary.EarlierReads != earlier || got[0].Length != size || got[0].Peer != end(a) {
			t.Errorf("%d datagrams, %+v", len(got), summary)
		}
	})
}

// TestDatagramDrops drops datagrams in the receive buffer, in a queueing discipline and before it.
func TestDatagramDrops(t *testing.T) {
	families(t, lab.LinkOptions{MTU: 1500}, func(t *testing.T, w *world, from, to netip.Addr) {
		reasons, err := capture.DropReasons()
		check(t, err)
		reason := func(name string) string {
			if len(reasons) == 0 {
				return ""
			}
			return name
		}
		a, b := w.socket(t, w.a, from), w.socket(t, w.b, to)
		send := func(n int) {
			for range n {
				_, err := a.WriteToUDPAddrPort(make([]byte, 1000), end(b))
				if err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EPERM) {
					check(t, err)
				}
			}
		}
		option(t, b, unix.SOL_SOCKET, unix.SO_RCVBUF, 10_000)
		const n = 100
		got, summary := datagrams(t, b, func() { w.arrive(t, lab.AToB, func() { send(n) }) })
		if len(got) != n || summary.Unread == 0 || summary.ReceivedDropped == 0 || summary.Unread+summary.ReceivedDropped != n {
			t.Errorf("%d datagrams, %+v", len(got), summary)
		}
		for _, p := range got {
			if p.Received.Dropped && (p.Received.Reason != reason("socket_rcvbuff") && p.Received.Reason != reason("proto_mem")) {
				t.Errorf("dropped because of %q", p.Received.Reason)
			}
		}

		nl := w.a.Netlink()
		device, err := nl.LinkByName("link0")
		check(t, err)
		// 1600 bytes at once and 3000 in the queue, with 1 kB in a second.
		limited := &netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: device.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}, Rate: 1000, Buffer: netlink.Xmittime(1000, 1600), Limit: 3000}
		check(t, nl.QdiscReplace(limited))
		sent, summary := datagrams(t, a, func() { send(10) })
		if len(sent) != 10 || summary.Fates[packets.Dropped] < 5 {
			t.Errorf("%d packets, %+v", len(sent), summary)
		}
		for _, p := range sent {
			if p.Sent.Fate == packets.Dropped && (p.Sent.Reason != reason("qdisc_drop") && p.Sent.Reason != reason("qdisc_overlimit") || !p.Sent.Driver.IsZero()) {
				t.Errorf("%+v: %s", p.Sent, p.Comment())
			}
		}

		// The kernel frees the fragments behind one that was dropped, some before they have a header: their memory has the headers of
		// others.
		foreign := w.socket(t, w.a, from)
		elsewhere := netip.AddrPortFrom(to.Next(), 9)
		sent, summary = datagrams(t, a, func() {
			for range 5 {
				for range 20 {
					if _, err := foreign.WriteToUDPAddrPort(make([]byte, 6000), elsewhere); err != nil && !errors.Is(err, unix.ENOBUFS) {
						check(t, err)
					}
				}
				if _, err := a.WriteToUDPAddrPort(make([]byte, 6000), end(b)); err != nil && !errors.Is(err, unix.ENOBUFS) {
					check(t, err)
				}
			}
		})
		if summary.Fates[packets.Dropped] < 5 || summary.Unreadable < 5 {
			t.Errorf("%+v", summary)
		}
		for _, p := range sent {
			if p.Peer.Addr() != to || p.Fragment == nil || p.Length > 1480 {
				t.Errorf("%+v, %+v", p, p.Fragment)
			}
		}
		check(t, nl.QdiscDel(limited))
		drops, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
			asm.Mov.Imm(asm.R0, int32(netlink.TC_ACT_SHOT)), asm.Return(),
		}})
		check(t, err)
		defer drops.Close()
		check(t, nl.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: device.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}))
		check(t, nl.FilterAdd(&netlink.BpfFilter{FilterAttrs: netlink.FilterAttrs{LinkIndex: device.Attrs().Index, Parent: netlink.HANDLE_MIN_EGRESS, Handle: 1, Protocol: unix.ETH_P_ALL, Priority: 1},
			Fd: drops.FD(), Name: "drop", DirectAction: true}))
		sent, summary = datagrams(t, a, func() { send(3) })
		if len(sent) != 3 || summary.Fates[packets.Dropped] != 3 || sent[0].Sent.Reason != reason("tc_egress") && sent[0].Sent.Reason != reason("qdisc_egress") || sent[0].Peer != end(b) || sent[0].Length != 1000 {
			t.Errorf("%d packets, %+v, %+v", len(sent), summary, sent)
		}
	})
}
