// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/packet"
	"sockeye/internal/netns"
	"sockeye/room"
)

var (
	guest4 = netip.MustParseAddr("10.95.0.1")
	guest6 = netip.MustParseAddr("fd95::1")
	alias4 = netip.MustParseAddr("169.254.53.1")
	alias6 = netip.MustParseAddr("fd53:6f63:6b65:7965::1")
	// Addresses of the host on lo.
	host4 = netip.MustParseAddr("10.96.0.1")
	host6 = netip.MustParseAddr("fd96::1")
)

// addHost adds the host's addresses to lo.
func addHost(t testing.TB) {
	t.Helper()
	hostAdded.Do(func() { addAddresses(t) })
}

var hostAdded sync.Once

func addAddresses(t testing.TB) {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range []netip.Addr{host4, host6} {
		address := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
		if a.Is6() {
			address.Flags = unix.IFA_F_NODAD
		}
		err := netlink.AddrReplace(lo, address)
		if err == nil {
			err = netns.AwaitLocal(&netlink.Handle{}, a, patience)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// puppet is a guest whose packets the test sends and receives. The test also runs the turns of the gateway and sets its
// clock.
type puppet struct {
	testing.TB
	g      *Gateway
	fd     int
	later  time.Duration // offset of the gateway's clock
	events []unix.EpollEvent
	queue  []seen // received segments that the test has not processed
}

// seen is a segment from the gateway.
type seen struct {
	packet.Segment
	gso int // GSO segment size; 0: one segment
}

func (s seen) String() string {
	return fmt.Sprintf("flags %02x seq %d ack %d window %d, %d bytes", s.Flags, s.Seq, s.Ack, s.Window, len(s.Payload))
}

// newPuppet creates a gateway with a socket in place of its TUN device, and checks for leaked descriptors at the end.
func newPuppet(t testing.TB, c Config) *puppet {
	t.Helper()
	listenOn(t, host4).Close() // lets the runtime open its own descriptors
	before := descriptors(t)
	t.Cleanup(func() {
		if now := descriptors(t); now > before {
			t.Errorf("%d descriptors before, %d after", before, now)
		}
	})
	return makePuppet(t, c)
}

func makePuppet(t testing.TB, c Config) *puppet {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range pair {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 64<<20); err != nil {
			t.Fatal(err)
		}
	}
	c.TUN = pair[0]
	if c.MTU == 0 {
		c.MTU = 65520
	}
	c.Guest4, c.Guest6, c.Host4, c.Host6 = guest4, guest6, alias4, alias6
	if c.Kernel == (room.Kernel{}) {
		if c.Kernel, err = room.Calibrate(); err != nil {
			t.Fatal(err)
		}
	}
	g, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	p := &puppet{TB: t, g: g, fd: pair[1], events: make([]unix.EpollEvent, 256)}
	g.clock = func() time.Time { return time.Now().Add(p.later) }
	t.Cleanup(func() {
		g.close()
		unix.Close(p.fd)
	})
	return p
}

// descriptors returns the number of open descriptors of the process.
func descriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// turn runs one turn of the gateway's event loop.
func (p *puppet) turn(timeout int) {
	p.Helper()
	if _, err := p.g.runTurn(p.events, timeout); err != nil {
		p.Fatal(err)
	}
}

// patience is the maximum time to wait for an event.
const patience = time.Minute

// until runs turns of the gateway until a condition holds.
func (p *puppet) until(what string, ok func() bool) {
	p.Helper()
	for end := time.Now().Add(patience); !ok(); {
		if time.Now().After(end) {
			p.Fatalf("timeout: %s: %v", what, p.g.Counts())
		}
		p.turn(1)
	}
}

// stopClock lets only wait advance the gateway's clock. Otherwise, a pause of the host is a timeout for the gateway.
func (p *puppet) stopClock() {
	start := p.g.clock().Add(-p.later)
	p.g.clock = func() time.Time { return start.Add(p.later) }
}

// wait advances the gateway's clock.
func (p *puppet) wait(d time.Duration) {
	p.Helper()
	p.later += d
	p.turn(0)
}

// put sends a packet to the gateway.
func (p *puppet) put(raw []byte) {
	p.Helper()
	b := append(make([]byte, packet.VnetHeader), raw...)
	if err := unix.Send(p.fd, b, 0); err != nil {
		p.Fatal(err)
	}
}

// receive returns the next segment of the gateway, if any.
func (p *puppet) receive() (seen, bool) {
	p.Helper()
	for {
		b := make([]byte, 1<<17)
		n, err := unix.Read(p.fd, b)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil || n == 0 {
			p.Fatalf("read from gateway: %d %v", n, err)
		}
		p.queue = append(p.queue, p.check(b[:n]))
	}
	if len(p.queue) == 0 {
		return seen{}, false
	}
	s := p.queue[0]
	p.queue = p.queue[1:]
	return s, true
}

// check parses a packet as a kernel does, and checks that its headers are consistent.
func (p *puppet) check(b []byte) seen {
	p.Helper()
	raw := b[packet.VnetHeader:]
	s, ok := packet.Parse(raw)
	if !ok {
		p.Fatalf("not a packet: % x", raw[:min(len(raw), 64)])
	}
	if s.Network == nil || len(s.Network) != len(raw) {
		p.Fatalf("packet of %d bytes, length field %d", len(raw), len(s.Network))
	}
	if raw[0]>>4 == 4 && packet.Fold(packet.Sum(raw[:packet.IPv4Header])) != 0xffff {
		p.Fatal("wrong checksum of the IPv4 header")
	}
	out := seen{Segment: s}
	if s.Protocol != unix.IPPROTO_TCP {
		return out
	}
	start := binary.NativeEndian.Uint16(b[6:])
	if b[0] != packet.VnetNeedsCsum || binary.NativeEndian.Uint16(b[8:]) != 16 {
		p.Fatalf("struct virtio_net_hdr: % x", b[:packet.VnetHeader])
	}
	tcp := raw[start:]
	partial := packet.Fold(packet.Pseudo(s.From.Addr(), s.To.Addr(), unix.IPPROTO_TCP, len(tcp)))
	if got := binary.BigEndian.Uint16(tcp[16:]); got != partial {
		p.Fatalf("partial checksum %#x, want %#x", got, partial)
	}
	if b[1] != 0 {
		out.gso = int(binary.NativeEndian.Uint16(b[4:]))
		if headers := int(binary.NativeEndian.Uint16(b[2:])); headers != len(raw)-len(s.Payload) {
			p.Fatalf("headers of %d bytes, hdr_len %d", len(raw)-len(s.Payload), headers)
		}
		if len(s.Payload) <= out.gso {
			p.Fatalf("payload of %d bytes with a GSO segment size of %d", len(s.Payload), out.gso)
		}
	} else if len(raw) > p.g.config.MTU {
		p.Fatalf("packet of %d bytes exceeds the MTU", len(raw))
	}
	return out
}

// next waits for a segment.
func (p *puppet) next() seen {
	p.Helper()
	var s seen
	p.until("a segment", func() (ok bool) {
		s, ok = p.receive()
		return ok
	})
	return s
}

// quiet checks that the gateway sends no further segment.
func (p *puppet) quiet() {
	p.Helper()
	for range 5 {
		p.turn(1)
	}
	if s, ok := p.receive(); ok {
		p.Fatalf("unexpected segment: %v", s)
	}
}

// link is the puppet's end of a connection.
type link struct {
	*puppet
	local, remote netip.AddrPort
	seq, ack      uint32
	window        uint16 // not scaled
	scale         int    // window scale of the gateway; -1: none
	acked         uint32 // SEG.ACK of the gateway
	adv           uint32 // right edge of the widest window that the gateway has advertised
	conn          *net.TCPConn
}

// build returns a TCP segment of the guest.
func build(from, to netip.AddrPort, seq, ack uint32, flags uint8, window uint16, options, payload []byte) []byte {
	ip := packet.IPv4Header
	if from.Addr().Is6() {
		ip = packet.IPv6Header
	}
	header := packet.TCPHeader + len(options)
	b := make([]byte, ip+header+len(payload))
	packet.WriteIP(b, from.Addr(), to.Addr(), unix.IPPROTO_TCP, header+len(payload))
	t := b[ip:]
	binary.BigEndian.PutUint16(t, from.Port())
	binary.BigEndian.PutUint16(t[2:], to.Port())
	binary.BigEndian.PutUint32(t[4:], seq)
	binary.BigEndian.PutUint32(t[8:], ack)
	t[12], t[13] = uint8(header/4<<4), flags
	binary.BigEndian.PutUint16(t[14:], window)
	copy(t[packet.TCPHeader:], options)
	copy(t[header:], payload)
	return b
}

// guestOptions returns the options of a SYN: MSS 1460 and, with scale, a window scale of 7.
func guestOptions(scale bool) []byte {
	o := []byte{2, 4, 1460 >> 8, 1460 & 0xff}
	if scale {
		o = append(o, 1, 3, 3, 7)
	}
	return o
}

// say sends a segment at the guest's SND.NXT.
func (l *link) say(flags uint8, payload []byte) {
	l.Helper()
	l.sayAt(l.seq, flags, payload)
	l.seq += uint32(len(payload))
	if flags&packet.FIN != 0 {
		l.seq++
	}
}

// sayAt sends a segment at a sequence number.
func (l *link) sayAt(seq uint32, flags uint8, payload []byte) {
	l.Helper()
	l.put(build(l.local, l.remote, seq, l.ack, flags, l.window, nil, payload))
}

// hear receives the next segment of the gateway and updates the connection. It reports an error if the right edge of
// the window moves left.
func (l *link) hear() seen {
	l.Helper()
	s := l.next()
	l.note(s)
	return s
}

func (l *link) note(s seen) {
	l.Helper()
	if s.From != l.remote || s.To != l.local {
		l.Fatalf("segment from %v to %v", s.From, s.To)
	}
	if s.Flags&packet.RST != 0 {
		return
	}
	window := uint32(s.Window)
	if s.Flags&packet.SYN == 0 && l.scale > 0 {
		window <<= l.scale
	}
	l.acked = s.Ack
	adv := s.Ack + window
	if l.adv != 0 && packet.Before(adv, l.adv) && packet.Before(s.Ack, l.adv) {
		l.Errorf("right edge of the window moved left by %d: %v", l.adv-adv, s)
	}
	if l.adv == 0 || packet.Before(l.adv, adv) {
		l.adv = adv
	}
}

// acknowledged waits until the gateway has acknowledged all data.
func (l *link) acknowledged() seen {
	l.Helper()
	for {
		s := l.hear()
		if s.Ack == l.seq {
			return s
		}
		if packet.Before(l.seq, s.Ack) {
			l.Fatalf("acknowledgement of data that was not sent: %v", s)
		}
	}
}

var nextPort = uint16(20000)

// dial connects the guest to a listener of the host.
func (p *puppet) dial(to *net.TCPListener) *link {
	p.Helper()
	return p.dialWith(to, true)
}

func (p *puppet) dialWith(to *net.TCPListener, scale bool) *link {
	p.Helper()
	l := p.syn(to.Addr().(*net.TCPAddr).AddrPort(), scale)
	s := l.hear()
	if s.Flags != packet.SYN|packet.ACK || s.Ack != l.seq {
		p.Fatalf("reply to a SYN: %v", s)
	}
	if s.Options.WindowScaling != scale {
		p.Fatalf("window scale offered: %v, guest's SYN has one: %v", s.Options.WindowScaling, scale)
	}
	l.scale = -1
	if scale {
		l.scale = int(s.Options.WindShift)
	}
	l.ack = s.Seq + 1
	l.say(packet.ACK, nil)
	if err := to.SetDeadline(time.Now().Add(patience)); err != nil {
		p.Fatal(err)
	}
	c, err := to.AcceptTCP()
	if err != nil {
		p.Fatal(err)
	}
	p.Cleanup(func() { c.Close() })
	l.conn = c
	p.turn(0)
	return l
}

// syn sends the SYN of a connection.
func (p *puppet) syn(to netip.AddrPort, scale bool) *link {
	p.Helper()
	from := guest4
	if to.Addr().Is6() {
		from = guest6
	}
	nextPort++
	l := &link{puppet: p, local: netip.AddrPortFrom(from, nextPort), remote: to, seq: 0xfffffe00, window: 65535}
	p.put(build(l.local, l.remote, l.seq, 0, packet.SYN, l.window, guestOptions(scale), nil))
	l.seq++
	p.turn(100)
	return l
}

// listenOn opens a listener of the host.
func listenOn(t testing.TB, a netip.Addr) *net.TCPListener {
	t.Helper()
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	addHost(t)
	l, err := c.Listen(t.Context(), "tcp", netip.AddrPortFrom(a, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

// ended waits until the gateway has freed all connections.
func (p *puppet) ended() {
	p.Helper()
	p.until("the end of the connection", func() bool {
		for _, c := range p.g.conns {
			if c.state != timeWait {
				return false
			}
		}
		return true
	})
	p.wait(timeWaitTimeout + time.Second)
	if n := len(p.g.conns); n != 0 {
		p.Errorf("%d connections remain", n)
	}
	if n := p.g.timers.Len(); n != 0 {
		p.Errorf("%d timers remain", n)
	}
	if p.g.backlog != 0 {
		p.Errorf("%d bytes remain in the backlog", p.g.backlog)
	}
	for _, ok := p.receive(); ok; _, ok = p.receive() {
	}
	for _, h := range p.g.handlers {
		if c, ok := h.handler.(*conn); ok {
			p.Errorf("descriptor %d still has a handler", c.fd)
		}
	}
}
