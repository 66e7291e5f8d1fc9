// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
	"sockeye/internal/gateway/packet"
	"sockeye/internal/sockaddr"
)

// everywhere allows all destinations.
var everywhere = Config{Outbound: access.Outbound{All: true}}

func text(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i>>8 ^ i)
	}
	return b
}

// read returns the data that the host's end receives.
func (l *link) read(n int) []byte {
	l.Helper()
	b := make([]byte, n)
	if err := l.conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		l.Fatal(err)
	}
	if got, err := io.ReadFull(l.conn, b); err != nil {
		l.Fatalf("host read %d of %d: %v", got, n, err)
	}
	return b
}

// readError returns the error that the host's end reads.
func (l *link) readError() error {
	l.Helper()
	if err := l.conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		l.Fatal(err)
	}
	n, err := l.conn.Read(make([]byte, 1))
	if n != 0 {
		l.Fatal("the host received data")
	}
	return err
}

func (l *link) write(b []byte) {
	l.Helper()
	if err := l.conn.SetWriteDeadline(time.Now().Add(patience)); err != nil {
		l.Fatal(err)
	}
	if _, err := l.conn.Write(b); err != nil {
		l.Fatal(err)
	}
}

// take receives n bytes and acknowledges them packet by packet.
func (l *link) take(n int) []byte {
	l.Helper()
	var got []byte
	for len(got) < n {
		s := l.hear()
		if s.Flags&(packet.FIN|packet.RST|packet.SYN) != 0 {
			l.Fatalf("after %d of %d bytes: %v", len(got), n, s)
		}
		if len(s.Payload) == 0 {
			continue
		}
		if s.Seq != l.ack {
			l.Fatalf("got seq %d, want %d", s.Seq, l.ack)
		}
		got = append(got, s.Payload...)
		l.ack += uint32(len(s.Payload))
		l.say(packet.ACK, nil)
	}
	return got
}

// fin receives the gateway's FIN.
func (l *link) fin() {
	l.Helper()
	for {
		s := l.hear()
		if s.Flags&packet.FIN == 0 {
			if len(s.Payload) > 0 || s.Flags&packet.RST != 0 {
				l.Fatalf("got %v, want a FIN", s)
			}
			continue
		}
		if s.Seq+uint32(len(s.Payload)) != l.ack {
			l.Fatalf("FIN at %d, want %d", s.Seq, l.ack)
		}
		l.ack++
		l.say(packet.ACK, nil)
		return
	}
}

// rst receives the gateway's RST.
func (l *link) rst() seen {
	l.Helper()
	for {
		if s := l.hear(); s.Flags&packet.RST != 0 {
			return s
		}
	}
}

func TestOpenAndClose(t *testing.T) {
	for _, c := range []struct {
		name  string
		host  netip.Addr
		scale bool
		close func(l *link)
	}{
		{"guest first", host4, true, func(l *link) {
			l.say(packet.FIN|packet.ACK, nil)
			l.acknowledged()
			if err := l.readError(); !errors.Is(err, io.EOF) {
				t.Error(err)
			}
			l.conn.Close()
			l.fin()
		}},
		{"host first", host4, true, func(l *link) {
			l.conn.Close()
			l.fin()
			l.say(packet.FIN|packet.ACK, nil)
			l.acknowledged()
		}},
		{"simultaneous close", host6, true, func(l *link) {
			l.conn.Close()
			s := l.hear() // the gateway's FIN, not yet acknowledged
			if s.Flags&packet.FIN == 0 {
				t.Errorf("got %v, want a FIN", s)
			}
			l.say(packet.FIN|packet.ACK, nil)
			l.acknowledged()
			l.ack++
			l.say(packet.ACK, nil)
		}},
		{"FIN with data, no scale", host6, false, func(l *link) {
			l.say(packet.FIN|packet.ACK, []byte("bye"))
			l.acknowledged()
			if got, err := io.ReadAll(l.conn); string(got) != "bye" || err != nil {
				t.Errorf("host read %q, %v", got, err)
			}
			l.conn.Close()
			l.fin()
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPuppet(t, everywhere)
			l := p.dialWith(listenOn(t, c.host), c.scale)
			l.say(packet.ACK|packet.PSH, []byte("hello"))
			l.acknowledged()
			if got := l.read(5); string(got) != "hello" {
				t.Errorf("host read %q", got)
			}
			l.write([]byte("welcome"))
			if got := l.take(7); string(got) != "welcome" {
				t.Errorf("guest read %q", got)
			}
			c.close(l)
			p.ended()
			counts := p.g.Counts()
			if counts[Opened] != 1 || counts[Closed] != 1 || counts[Reset]+counts[Refused]+counts[PartialSend] != 0 {
				t.Errorf("counts %v", counts)
			}
		})
	}
}

func TestHalfClose(t *testing.T) {
	t.Run("guest", func(t *testing.T) {
		p := newPuppet(t, everywhere)
		l := p.dial(listenOn(t, host4))
		l.say(packet.ACK|packet.FIN, []byte("request"))
		l.acknowledged()
		if got, err := io.ReadAll(l.conn); string(got) != "request" || err != nil {
			t.Errorf("host read %q, %v", got, err)
		}
		l.write(text(100_000))
		if got := l.take(100_000); !bytes.Equal(got, text(100_000)) {
			t.Error("wrong reply")
		}
		l.conn.Close()
		l.fin()
		p.ended()
	})
	t.Run("host", func(t *testing.T) {
		p := newPuppet(t, everywhere)
		l := p.dial(listenOn(t, host4))
		if err := l.conn.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		l.fin()
		for range 10 {
			l.say(packet.ACK|packet.PSH, text(10_000))
			l.acknowledged()
			if got := l.read(10_000); !bytes.Equal(got, text(10_000)) {
				t.Error("wrong data")
			}
		}
		l.say(packet.ACK|packet.FIN, nil)
		l.acknowledged()
		if err := l.readError(); !errors.Is(err, io.EOF) {
			t.Error(err)
		}
		p.ended()
	})
}

// TestStragglers checks that the gateway acknowledges retransmissions of the guest's FIN, and that the guest can reuse
// the port.
func TestStragglers(t *testing.T) {
	p := newPuppet(t, everywhere)
	listener := listenOn(t, host4)
	l := p.dial(listener)
	l.conn.Close()
	l.fin()
	l.say(packet.FIN|packet.ACK, nil)
	l.acknowledged()
	l.sayAt(l.seq-1, packet.FIN|packet.ACK, nil)
	if s := l.hear(); s.Flags != packet.ACK || s.Ack != l.seq {
		t.Errorf("reply to a retransmitted FIN: %v", s)
	}
	p.put(build(l.local, l.remote, l.seq+1000, 0, packet.SYN, 65535, guestOptions(true), nil))
	if s := p.next(); s.Flags != packet.SYN|packet.ACK || s.Ack != l.seq+1001 {
		t.Errorf("reply to a new SYN from the same port: %v", s)
	}
	p.put(build(l.local, l.remote, l.seq+1001, 0, packet.RST, 0, nil, nil))
	p.ended()
	l.sayAt(l.seq-1, packet.FIN|packet.ACK, nil)
	if s := p.next(); s.Flags != packet.RST || s.Seq != l.ack {
		t.Errorf("reply to a FIN of a removed connection: %v", s)
	}
}

func TestUnknownSegments(t *testing.T) {
	p := newPuppet(t, everywhere)
	to := netip.AddrPortFrom(host4, 9)
	from := netip.AddrPortFrom(guest4, 1)
	p.put(build(from, to, 100, 200, packet.ACK, 0, nil, []byte("abc")))
	if s := p.next(); s.Flags != packet.RST || s.Seq != 200 {
		t.Errorf("reply to an ACK without a connection: %v", s)
	}
	p.put(build(from, to, 100, 0, packet.FIN, 0, nil, []byte("abc")))
	if s := p.next(); s.Flags != packet.RST|packet.ACK || s.Ack != 104 || s.Seq != 0 {
		t.Errorf("reply to a FIN without a connection: %v", s)
	}
	p.put(build(from, to, 100, 200, packet.RST|packet.ACK, 0, nil, nil))
	p.put(build(netip.AddrPortFrom(host4, 5), to, 100, 0, packet.SYN, 0, nil, nil)) // not an address of the guest
	p.quiet()
	if got := p.g.Counts()[Malformed]; got != 1 {
		t.Errorf("%d malformed packets counted", got)
	}
}

func TestConnectFails(t *testing.T) {
	rule := access.Rule{Prefix: netip.PrefixFrom(host4, 32), First: 1, Last: 65535}
	elsewhere := access.Rule{Prefix: netip.MustParsePrefix("192.0.2.0/24"), First: 80, Last: 80}
	p := newPuppet(t, Config{Outbound: access.Outbound{Rules: []access.Rule{rule, elsewhere}}})
	closed := listenOn(t, host4)
	to := closed.Addr().(*net.TCPAddr).AddrPort()
	closed.Close()

	l := p.syn(to, true)
	if s := l.hear(); s.Flags != packet.RST|packet.ACK || s.Ack != l.seq {
		t.Errorf("closed port: %v", s)
	}
	for _, c := range []struct {
		to         string
		kind, code uint8
	}{
		{"192.0.2.1:80", 3, 0},  // no route
		{"192.0.2.1:81", 3, 13}, // not allowed
		{"[fd96::1]:80", 1, 1},
	} {
		l := p.syn(netip.MustParseAddrPort(c.to), true)
		s := p.next()
		if s.Protocol == unix.IPPROTO_TCP {
			t.Errorf("%s: %v", c.to, s)
			continue
		}
		if s.Payload[0] != c.kind || s.Payload[1] != c.code {
			t.Errorf("%s: ICMP type %d code %d, want %d %d", c.to, s.Payload[0], s.Payload[1], c.kind, c.code)
		}
		ip := packet.IPv4Header
		if l.local.Addr().Is6() {
			ip = packet.IPv6Header
		}
		if quote := s.Payload[icmpHeader+ip:]; binary.BigEndian.Uint16(quote) != l.local.Port() || binary.BigEndian.Uint32(quote[4:]) != l.seq-1 {
			t.Errorf("%s: wrong quoted segment", c.to)
		}
	}
	if n := len(p.g.conns); n != 0 {
		t.Errorf("%d connections", n)
	}
	p.quiet()
}

// TestSlowConnect checks connections to a peer of the host that does not reply at first.
func TestSlowConnect(t *testing.T) {
	p := newPuppet(t, everywhere)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: host4.As4()}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	to := sockaddr.AddrPort(name)
	// The accept queue holds one connection.
	filler, err := net.Dial("tcp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	defer filler.Close()

	l := p.syn(to, true)
	p.put(build(l.local, l.remote, l.seq-1, 0, packet.SYN, 65535, guestOptions(true), nil)) // retransmission
	p.quiet()
	if got := p.g.Counts()[Opened]; got != 1 {
		t.Errorf("%d connections opened", got)
	}
	// The guest aborts the attempt and connects again from the same port.
	l.seq = 5000
	p.put(build(l.local, l.remote, l.seq, 0, packet.SYN, 65535, guestOptions(false), nil))
	l.seq++
	p.turn(1)
	peer, _, err := unix.Accept(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(peer)
	s := l.hear() // after the host's kernel has retransmitted its SYN
	if s.Flags != packet.SYN|packet.ACK || s.Ack != l.seq || s.Options.WindowScaling {
		t.Errorf("reply to the second SYN: %v, %+v", s, s.Options)
	}
	p.put(build(l.local, l.remote, l.seq, 0, packet.RST, 0, nil, nil))
	p.ended()
}

func TestSYNAgain(t *testing.T) {
	p := newPuppet(t, everywhere)
	listener := listenOn(t, host4)
	to := listener.Addr().(*net.TCPAddr).AddrPort()
	l := p.syn(to, true)
	first := l.hear()
	p.put(build(l.local, l.remote, l.seq-1, 0, packet.SYN, 65535, guestOptions(true), nil))
	if s := l.hear(); s.Flags != packet.SYN|packet.ACK || s.Seq != first.Seq {
		t.Errorf("reply to a retransmitted SYN: %v, want %v", s, first)
	}
	p.wait(initialRTO + time.Millisecond) // retransmission timeout
	if s := l.hear(); s.Flags != packet.SYN|packet.ACK || s.Seq != first.Seq {
		t.Errorf("retransmitted SYN-ACK: %v, want %v", s, first)
	}
	l.ack, l.scale = first.Seq+1, int(first.Options.WindShift)
	l.say(packet.ACK|packet.PSH, []byte("x"))
	l.acknowledged()
	// In an established connection, the reply to a SYN is a challenge ACK (RFC 5961); only a RST that matches this ACK
	// closes the connection.
	p.put(build(l.local, l.remote, 77, 0, packet.SYN, 65535, guestOptions(true), nil))
	s := l.hear()
	if s.Flags != packet.ACK || s.Ack != l.seq {
		t.Errorf("reply to a SYN in an established connection: %v", s)
	}
	p.put(build(l.local, l.remote, l.seq+5, 0, packet.RST, 0, nil, nil))
	if s := l.hear(); s.Flags != packet.ACK {
		t.Errorf("reply to a RST with a wrong sequence number: %v", s)
	}
	p.put(build(l.local, l.remote, s.Ack, 0, packet.RST, 0, nil, nil))
	p.ended()
	c, err := listener.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	l.conn = c
	defer c.Close()
	l.read(1)
	if err := l.readError(); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("host reads %v after the guest's RST", err)
	}
}

// TestHandshakeUnanswered checks that an incomplete handshake of the guest occupies resources for a short time only.
func TestHandshakeUnanswered(t *testing.T) {
	p := newPuppet(t, everywhere)
	l := p.syn(listenOn(t, host4).Addr().(*net.TCPAddr).AddrPort(), true)
	answers := 0
	for range maxSynAckTimeouts + 1 {
		if s := l.hear(); s.Flags != packet.SYN|packet.ACK {
			t.Fatal(s)
		}
		answers++
		p.wait(initialRTO<<answers + time.Millisecond)
	}
	if s := l.hear(); s.Flags&packet.RST == 0 {
		t.Errorf("after the last timeout: %v", s)
	}
	p.ended()
}

func TestHostResets(t *testing.T) {
	p := newPuppet(t, everywhere)
	listener := listenOn(t, host4)
	t.Run("at once", func(t *testing.T) {
		l := p.dial(listener)
		if err := l.conn.SetLinger(0); err != nil {
			t.Fatal(err)
		}
		l.conn.Close()
		if s := l.rst(); s.Seq != l.ack || s.Ack != l.seq {
			t.Errorf("got %v, want seq %d ack %d", s, l.ack, l.seq)
		}
		p.ended()
	})
	// A server may reply and close without reading the whole request: the guest must receive the data before the RST.
	t.Run("after data", func(t *testing.T) {
		l := p.dial(listener)
		l.window = 100 // << 7 bytes
		l.say(packet.ACK|packet.PSH, []byte("x"))
		l.acknowledged()
		want := text(50_000) // fits into the initial window of the socket
		l.write(want)
		l.conn.Close() // with an unread byte: sends a RST
		if got := l.take(len(want)); !bytes.Equal(got, want) {
			t.Error("wrong data")
		}
		if s := l.rst(); s.Seq != l.ack {
			t.Errorf("got %v, want seq %d", s, l.ack)
		}
		p.ended()
	})
	t.Run("while the guest sends", func(t *testing.T) {
		l := p.dial(listener)
		if err := l.conn.SetLinger(0); err != nil {
			t.Fatal(err)
		}
		l.conn.Close()
		l.sayAt(l.seq, packet.ACK, text(1000))
		l.rst()
		p.ended()
	})
	t.Run("while the guest sends and does not read", func(t *testing.T) {
		l := p.dial(listener)
		l.window = 0
		l.say(packet.ACK, nil)
		l.write(text(1000))
		p.turn(1)
		if err := l.conn.SetLinger(0); err != nil {
			t.Fatal(err)
		}
		l.conn.Close()
		p.turn(1)
		l.sayAt(l.seq, packet.ACK, text(1000))
		l.rst()
		p.ended()
	})
	t.Run("after its FIN", func(*testing.T) {
		l := p.dial(listener)
		l.conn.Close()
		l.fin()
		l.say(packet.ACK, text(1000)) // the socket is closed: the host's kernel replies with a RST
		l.rst()
		p.ended()
	})
	t.Run("before the guest has opened", func(t *testing.T) {
		l := p.syn(listener.Addr().(*net.TCPAddr).AddrPort(), true)
		s := l.hear()
		c, err := listener.AcceptTCP()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.SetLinger(0); err != nil {
			t.Fatal(err)
		}
		c.Close()
		if r := l.hear(); r.Flags&packet.RST == 0 || r.Seq != s.Seq+1 {
			t.Errorf("%v after %v", r, s)
		}
		p.ended()
	})
}

// TestGuestGone checks that a connection ends whose socket in the guest is gone, and that the host still receives what the guest has
// sent before.
func TestGuestGone(t *testing.T) {
	p := newPuppet(t, everywhere)
	l := p.dial(listenOn(t, host4))
	l.say(packet.ACK|packet.PSH|packet.FIN, text(1000))
	l.acknowledged()
	for range 3 { // a program that reads for long
		p.wait(halfClosedTimeout - time.Second)
		p.quiet()
		p.wait(2 * time.Second)
		if s := l.hear(); s.Seq != l.ack-1 || s.Length() != 0 {
			t.Fatalf("asks %v", s)
		}
		l.say(packet.ACK, nil)
		p.turn(1)
	}
	p.wait(halfClosedTimeout + time.Second)
	l.hear()
	l.say(packet.RST, nil) // of a kernel that does not know the connection
	p.ended()
	if got, err := io.ReadAll(l.conn); !bytes.Equal(got, text(1000)) || err != nil {
		t.Errorf("host read %d bytes, %v", len(got), err)
	}
}

func TestGuestResets(t *testing.T) {
	p := newPuppet(t, everywhere)
	l := p.dial(listenOn(t, host6))
	l.write(text(100))
	l.take(100)
	l.say(packet.RST, nil)
	p.ended()
	if err := l.readError(); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("host reads %v", err)
	}
}

func TestUrgent(t *testing.T) {
	p := newPuppet(t, everywhere)
	listener := listenOn(t, host4)
	l := p.dial(listener)
	l.say(packet.ACK|packet.URG, []byte("now"))
	l.rst()
	p.ended()
	if err := l.readError(); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("host reads %v", err)
	}
	if got := p.g.Counts()[UrgentData]; got != 1 {
		t.Errorf("UrgentData counter: %d", got)
	}
	// Urgent data of the host is delivered in line.
	l = p.dial(listener)
	raw, err := l.conn.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	l.write([]byte("one"))
	if err := raw.Control(func(fd uintptr) { err = unix.Sendto(int(fd), []byte("now"), unix.MSG_OOB, nil) }); err != nil {
		t.Fatal(err)
	}
	l.write([]byte("two"))
	if got := l.take(9); string(got) != "onenowtwo" {
		t.Errorf("guest read %q", got)
	}
	l.conn.Close()
	l.fin()
	l.say(packet.FIN|packet.ACK, nil)
	p.ended()
}

func TestKeepalive(t *testing.T) {
	p := newPuppet(t, everywhere)
	listener := listenOn(t, host4)
	l := p.dial(listener)
	l.sayAt(l.seq-1, packet.ACK, nil) // keepalive of the guest
	if s := l.hear(); s.Flags != packet.ACK || s.Ack != l.seq || s.Seq != l.ack {
		t.Errorf("reply to a keepalive: %v", s)
	}
	for range 3 { // keepalives of the gateway
		p.wait(idleTimeout - 2*time.Minute)
		p.quiet()
		p.wait(3 * time.Minute)
		if s := l.hear(); s.Seq != l.ack-1 || s.Length() != 0 {
			t.Errorf("asks %v", s)
		}
		l.say(packet.ACK, nil)
		p.turn(1)
		p.wait(time.Minute)
		p.quiet()
	}
	// The guest no longer responds.
	p.wait(idleTimeout)
	for asked := 0; ; asked++ {
		s := l.hear()
		if s.Flags&packet.RST != 0 {
			if asked < maxTimeouts {
				t.Errorf("aborted after %d probes", asked)
			}
			break
		}
		if asked > maxTimeouts {
			t.Fatal("the connection is not aborted")
		}
		p.wait(maxRTO + time.Millisecond)
	}
	p.ended()
	if err := l.readError(); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("host reads %v", err)
	}
}

// TestGuestKeepalive checks that keepalives of the guest enable keepalive with the same interval on the host's socket,
// and that a zero-window probe does not.
func TestGuestKeepalive(t *testing.T) {
	p := newPuppet(t, everywhere)
	l := p.dial(listenOn(t, host4))
	c := p.g.conns[endpoints{l.local, l.remote}]
	set := func() (values [2]int) {
		t.Helper()
		for i, option := range []int{unix.TCP_KEEPIDLE, unix.TCP_KEEPINTVL} {
			v, err := unix.GetsockoptInt(c.fd, unix.IPPROTO_TCP, option)
			if err != nil {
				t.Fatal(err)
			}
			values[i] = v
		}
		return values
	}
	for _, tc := range []struct {
		after time.Duration
		want  [2]int
	}{
		{15*time.Second + 200*time.Millisecond, [2]int{15, 15}},
		{time.Hour, [2]int{3600, 75}},
		{300 * time.Millisecond, [2]int{1, 1}},
	} {
		p.wait(tc.after)
		l.sayAt(l.seq-1, packet.ACK, nil)
		if s := l.hear(); s.Ack != l.seq || s.Length() != 0 {
			t.Errorf("reply to a keepalive: %v", s)
		}
		if got := set(); got != tc.want {
			t.Errorf("after %v: idle and interval %v, want %v", tc.after, got, tc.want)
		}
	}
	before := set()
	l.pour(text(64<<20), 60_000)
	c.rcv.adv = c.rcv.nxt // closed
	p.wait(20 * time.Second)
	l.sayAt(l.seq-1, packet.ACK, nil)
	p.turn(0)
	if got := set(); got != before {
		t.Errorf("after a zero-window probe: %v, before: %v", got, before)
	}
	l.say(packet.RST, nil)
	p.ended()
}

// called counts the events of a descriptor.
type called struct {
	events int
	then   func()
}

func (c *called) event(uint32) {
	c.events++
	if c.then != nil {
		c.then()
	}
}

// TestStaleEvent checks that events of a descriptor that was closed in the same turn do not reach the new handler of
// the same descriptor number.
func TestStaleEvent(t *testing.T) {
	p := newPuppet(t, everywhere)
	event := func(value uint) int {
		t.Helper()
		fd, err := unix.Eventfd(value, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	fds := [2]int{event(1), event(1)}
	var first, late called
	var replaced int // the descriptor whose event is still pending
	handlers := [2]*called{{}, {}}
	for i, h := range handlers {
		h.then = func() {
			if first.events++; first.events > 1 {
				return
			}
			replaced = fds[1-i]
			p.g.closeFD(replaced)
			other := event(0)
			if err := unix.Dup3(other, replaced, unix.O_CLOEXEC); err != nil && other != replaced {
				t.Error(err)
			}
			if other != replaced {
				unix.Close(other)
			}
			if err := p.g.register(replaced, unix.EPOLLIN, &late); err != nil {
				t.Error(err)
			}
		}
		if err := p.g.register(fds[i], unix.EPOLLIN|unix.EPOLLET, h); err != nil {
			t.Fatal(err)
		}
	}
	p.turn(100)
	if first.events != 1 || late.events != 0 {
		t.Errorf("%d events for the old handlers, %d for the new one", first.events, late.events)
	}
	if _, err := unix.Write(replaced, []byte{1, 0, 0, 0, 0, 0, 0, 0}); err != nil {
		t.Fatal(err)
	}
	p.turn(100)
	if late.events != 1 {
		t.Errorf("%d events for the new handler", late.events)
	}
	for _, fd := range fds {
		p.g.closeFD(fd)
	}
}
