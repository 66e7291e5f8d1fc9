// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/sockaddr"
)

// wire is a device whose other end drops everything.
type wire struct {
	t    testing.TB
	link netlink.Link
	tun  int // of a TUN device
}

// far is the peer behind a wire.
var far = netip.MustParseAddrPort("10.9.0.2:9")

func newWire(t testing.TB) *wire {
	t.Helper()
	check(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "near"}, PeerName: "far"}))
	near, err := netlink.LinkByName("near")
	check(t, err)
	t.Cleanup(func() { check(t, netlink.LinkDel(near)) })
	other, err := netlink.LinkByName("far")
	check(t, err)
	w := &wire{t: t, link: near}
	w.address()
	check(t, netlink.LinkSetUp(other))
	// Until the kernel's link watch has run, the queueing discipline drops everything.
	until(t, "the link is up", func() bool {
		now, err := netlink.LinkByName("near")
		return err == nil && now.Attrs().OperState == netlink.OperUp
	})
	check(t, netlink.NeighSet(&netlink.Neigh{
		LinkIndex: near.Attrs().Index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT,
		IP: far.Addr().AsSlice(), HardwareAddr: other.Attrs().HardwareAddr,
	}))
	return w
}

func (w *wire) address() {
	w.t.Helper()
	// No packet is sent except those of the test.
	name := w.link.Attrs().Name
	check(w.t, os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/disable_ipv6", []byte("1"), 0))
	check(w.t, netlink.AddrAdd(w.link, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 9, 0, 1), Mask: net.CIDRMask(24, 32)}}))
	check(w.t, netlink.LinkSetUp(w.link))
}

// limit gives the wire a rate in bytes per second and a queue in bytes.
func (w *wire) limit(rate uint64, room uint32) {
	w.t.Helper()
	check(w.t, netlink.QdiscReplace(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: w.link.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		// Buffer is the time of the burst in ticks of 64 ns.
		Rate: rate, Limit: room, Buffer: uint32(2000 * 1e9 / rate / 64),
	}))
}

// packets returns the number of transmitted packets.
func (w *wire) packets() uint64 {
	w.t.Helper()
	if w.tun != 0 {
		// Reading transmits them.
		for buf := make([]byte, 1<<16); ; {
			if _, err := unix.Read(w.tun, buf); err != nil {
				break
			}
		}
	}
	link, err := netlink.LinkByName(w.link.Attrs().Name)
	check(w.t, err)
	return link.Attrs().Statistics.TxPackets
}

// socket opens a connected socket in the traced cgroup.
func (tr *traced) socket(to netip.AddrPort) int {
	tr.t.Helper()
	var fd int
	inside(tr.t, tr.config.Cgroup, func() {
		var err error
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		check(tr.t, err)
		check(tr.t, unix.Connect(fd, sockaddr.Of(to)))
	})
	tr.t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// sent returns the counts of sent UDP datagrams, including those in flight.
func (tr *traced) sent() (*bpf.TraceStats, bpf.TraceWaiting) {
	tr.t.Helper()
	groups, err := tr.Groups()
	check(tr.t, err)
	under, err := tr.Sending()
	check(tr.t, err)
	for index, g := range groups {
		if g.Protocol == unix.IPPROTO_UDP {
			s, err := tr.Stats(index)
			check(tr.t, err)
			return s, under[index]
		}
	}
	return &bpf.TraceStats{}, bpf.TraceWaiting{}
}

// expectSent fails the test unless all samples are accounted for, with the given counts.
func (tr *traced) expectSent(chosen, sent, dropped, split, underWay int, bytes uint64) *bpf.TraceStats {
	tr.t.Helper()
	s, under := tr.sent()
	var want bpf.TraceStats
	want.Outcome[bpf.TraceSent] = uint64(sent)
	want.Outcome[bpf.TraceDiscarded] = uint64(dropped)
	want.Outcome[bpf.TraceSplit] = uint64(split)
	if s.Chosen != uint64(chosen) || s.Outcome != want.Outcome || under.Count != uint64(underWay) || s.Bytes != bytes {
		tr.t.Errorf("chosen %d, outcomes %v, under way %+v, %d bytes; want %d, %v, %d, %d bytes",
			s.Chosen, s.Outcome, under, s.Bytes, chosen, want.Outcome, underWay, bytes)
	}
	for _, stage := range []int{bpf.TraceStageStack, bpf.TraceStageQdisc} {
		if n, _, _ := span(s.Stage[stage]); n != uint64(sent) {
			tr.t.Errorf("stage %d: %d times, want %d", stage, n, sent)
		}
	}
	return s
}

const udpTX = bpf.TraceRuleUDP | bpf.TraceRuleUDPTX

func write(t testing.TB, fd, bytes int) {
	t.Helper()
	_, err := unix.Write(fd, make([]byte, bytes))
	check(t, err)
}

// TestUDPQdisc checks that time in a rate limiter is counted in the stage qdisc.
func TestUDPQdisc(t *testing.T) {
	const datagrams, bytes, rate = 10, 1000, 100_000
	const each = time.Duration(bytes+42) * time.Second / rate
	w := newWire(t)
	tr := trace(t, rxRules(udpTX, 1))
	fd := tr.socket(far)
	start := time.Now()
	for range 100 {
		write(t, fd, bytes)
	}
	s := tr.expectSent(100, 100, 0, 0, 0, 100*bytes)
	if _, _, most := span(s.Stage[bpf.TraceStageQdisc]); most > time.Since(start) {
		t.Errorf("qdisc: %v without a rate", most)
	}
	w.limit(rate, 1<<20)
	start = time.Now()
	for range datagrams {
		write(t, fd, bytes)
	}
	_, under := tr.sent()
	if late := time.Since(start) > (datagrams-3)*each; under.Count > datagrams || under.Count == 0 && !late {
		t.Errorf("%d under way", under.Count)
	}
	until(t, "all have left", func() bool {
		_, under := tr.sent()
		return under.Count == 0 || under.Oldest > time.Second
	})
	elapsed := time.Since(start)
	s, under = tr.sent()
	// See TestUDPExact.
	sent, missed := s.Outcome[bpf.TraceSent], s.Outcome[bpf.TraceMissed]+under.Count
	if s.Chosen != 100+datagrams || sent+missed != s.Chosen || missed > 2 || s.Bytes != sent*bytes {
		t.Errorf("chosen %d, outcomes %v, %d bytes", s.Chosen, s.Outcome, s.Bytes)
	}
	// The first two are the burst, and two may be missed.
	_, _, most := span(s.Stage[bpf.TraceStageQdisc])
	if most < (datagrams-5)*each || most > elapsed*17/16 {
		t.Errorf("qdisc: at most %v, want %v to %v", most, (datagrams-5)*each, elapsed)
	}
	// One write may wait for a CPU.
	if _, _, most := span(s.Stage[bpf.TraceStageStack]); most > (datagrams-5)*each {
		t.Errorf("stack: at most %v", most)
	}
}

// TestUDPExact accounts for every one of many datagrams while the host drops most of them.
func TestUDPExact(t *testing.T) {
	const datagrams, bytes, threads = exactly, 100, 4
	w := newWire(t)
	tr := trace(t, rxRules(udpTX, 1))
	before := w.packets()
	// The rate is an eighth of the rate at which one thread sends on this host.
	const first = datagrams / 100
	fd, start := tr.socket(far), time.Now()
	for range first {
		write(t, fd, bytes)
	}
	w.limit(uint64(first*(bytes+42)/time.Since(start).Seconds()/8), 20_000)
	var busy sync.WaitGroup
	for range threads {
		fd := tr.socket(far)
		busy.Go(func() {
			for range (datagrams - first) / threads {
				// ENOBUFS means that the datagram was dropped.
				_, _ = unix.Write(fd, make([]byte, bytes))
			}
		})
	}
	busy.Wait()
	end, last := time.Now(), uint64(0)
	var s *bpf.TraceStats
	var under bpf.TraceWaiting
	until(t, "all have left", func() bool {
		left, before := w.packets(), last
		last = left
		s, under = tr.sent()
		// The missed ones stay under way.
		return under.Count == 0 || time.Since(end) > time.Second && left == before
	})
	sent := w.packets() - before
	t.Logf("%d sent: %v, under way %+v", sent, s.Outcome, under)
	if sent == 0 || sent == datagrams {
		t.Errorf("%d of %d were sent", sent, datagrams)
	}
	sum := under.Count
	for _, n := range s.Outcome {
		sum += n
	}
	if s.Chosen != datagrams || sum != datagrams {
		t.Errorf("%d chosen, %d ends and under way, want %d", s.Chosen, sum, datagrams)
	}
	// The kernel skips a tracepoint's program that would interrupt itself. The lost event is counted as missed, or as
	// known when the packet's memory is used again.
	missed := s.Outcome[bpf.TraceMissed] + under.Count
	if missed > datagrams/100 || s.Outcome[bpf.TraceSent] > sent || s.Outcome[bpf.TraceSent]+missed < sent ||
		s.Outcome[bpf.TraceDiscarded] > datagrams-sent || s.Outcome[bpf.TraceDiscarded]+missed < datagrams-sent {
		t.Errorf("%d missed", missed)
	}
}

// TestUDPUnresolved sends to a neighbour that does not answer: the datagram never reaches a driver.
func TestUDPUnresolved(t *testing.T) {
	newWire(t)
	check(t, os.WriteFile("/proc/sys/net/ipv4/neigh/near/retrans_time_ms", []byte("100"), 0))
	tr := trace(t, rxRules(udpTX, 1))
	fd := tr.socket(netip.MustParseAddrPort("10.9.0.3:9"))
	for n := uint64(1); ; n++ {
		write(t, fd, 10)
		var s *bpf.TraceStats
		until(t, "it is given up", func() bool {
			var under bpf.TraceWaiting
			s, under = tr.sent()
			return under.Count == 0
		})
		discarded, missed := s.Outcome[bpf.TraceDiscarded], s.Outcome[bpf.TraceMissed]
		if s.Chosen != n || discarded+missed != n || s.Bytes != 0 || n == 5 {
			t.Fatalf("%d datagrams: chosen %d, outcomes %v, %d bytes", n, s.Chosen, s.Outcome, s.Bytes)
		}
		if discarded > 0 { // see TestUDPExact
			return
		}
	}
}

// TestUDPFragments checks that a datagram longer than the MTU is traced by its first fragment, whether the kernel built it
// from fragments or copies it into fragments.
func TestUDPFragments(t *testing.T) {
	w := newWire(t)
	tr := trace(t, rxRules(udpTX, 1))
	fd := tr.socket(far)
	write(t, fd, 4000)
	tr.expectSent(1, 1, 0, 0, 0, 4000)

	const cork = 1 // UDP_CORK
	check(t, unix.SetsockoptInt(fd, unix.IPPROTO_UDP, cork, 1))
	write(t, fd, 1400)
	check(t, netlink.LinkSetMTU(w.link, 1000))
	check(t, unix.SetsockoptInt(fd, unix.IPPROTO_UDP, cork, 0))
	tr.expectSent(2, 2, 0, 0, 0, 5400)
	for range 20 {
		check(t, netlink.LinkSetMTU(w.link, 1500))
		check(t, unix.SetsockoptInt(fd, unix.IPPROTO_UDP, cork, 1))
		write(t, fd, 1400)
		check(t, netlink.LinkSetMTU(w.link, 1000))
		check(t, unix.SetsockoptInt(fd, unix.IPPROTO_UDP, cork, 0))
	}
	tr.expectSent(22, 22, 0, 0, 0, 33400)
}

// TestUDPMany checks that many datagrams of one sendmsg count as one, whether the kernel or the device segments them.
func TestUDPMany(t *testing.T) {
	const many, each = 5, 1000
	tr := trace(t, rxRules(udpTX, 1))
	total := 0
	for device, make := range map[string]func(testing.TB) *wire{"near": newWire, "slow": newTun} {
		t.Run(device, func(t *testing.T) {
			w := make(t)
			before := w.packets()
			fd := tr.socket(far)
			check(t, unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT, each))
			write(t, fd, many*each)
			total++
			tr.expectSent(total, total, 0, 0, 0, uint64(total*many*each))
			if packets := int(w.packets() - before); device == "slow" && packets != many {
				t.Errorf("%d packets, want %d", packets, many)
			}
		})
	}
}

// newTun creates a device that queues one datagram at most.
func newTun(t testing.TB) *wire {
	t.Helper()
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	check(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	request, err := unix.NewIfreq("slow")
	check(t, err)
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	check(t, unix.IoctlIfreq(fd, unix.TUNSETIFF, request))
	check(t, unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, unix.TUN_F_CSUM))
	link, err := netlink.LinkByName("slow")
	check(t, err)
	w := &wire{t: t, link: link, tun: fd}
	w.address()
	return w
}
