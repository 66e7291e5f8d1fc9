// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
	"sockeye/internal/gateway/packet"
	"sockeye/internal/gateway/timer"
	"sockeye/internal/sockaddr"
)

// innerPort is the port of the guest's program.
const innerPort = 1790

// forward opens a listener of the host that is forwarded to the guest.
func forward(t testing.TB) (Forward, uint16) {
	t.Helper()
	addHost(t)
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet6{}), unix.Listen(fd, unix.SOMAXCONN)); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	at := sockaddr.AddrPort(name)
	return Forward{FD: fd, Protocol: unix.IPPROTO_TCP, Port: innerPort}, at.Port()
}

// reach connects to a port of the host from a given address and port.
func reach(t testing.TB, from netip.AddrPort, to netip.AddrPort) *net.TCPConn {
	t.Helper()
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(from), Timeout: patience}
	c, err := d.Dial("tcp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

// called waits for the SYN that the gateway sends to the guest.
func (p *puppet) called() (*link, seen) {
	p.Helper()
	s := p.next()
	if s.Flags != packet.SYN || s.To.Port() != innerPort || !s.Options.WindowScaling {
		p.Fatalf("got %v, want a SYN", s)
	}
	return &link{puppet: p, local: s.To, remote: s.From, seq: 0x7ffffff0, ack: s.Seq + 1, window: 65535}, s
}

// accept replies to a SYN.
func (l *link) accept(syn seen, scale bool) {
	l.Helper()
	l.scale = -1
	if scale {
		l.scale = int(syn.Options.WindShift)
	}
	l.adv = l.seq + 1 + uint32(syn.Window)
	l.put(build(l.local, l.remote, l.seq, l.ack, packet.SYN|packet.ACK, l.window, guestOptions(scale), nil))
	l.seq++
	if s := l.hear(); s.Flags != packet.ACK || s.Ack != l.seq {
		l.Fatalf("unexpected end of the handshake: %v", s)
	}
}

func TestInbound(t *testing.T) {
	for _, c := range []struct {
		name       string
		from, seen netip.Addr
		scale      bool
	}{
		{"IPv4", host4, host4, true},
		{"IPv6, no scale", host6, host6, false},
		{"loopback", netip.MustParseAddr("127.0.0.1"), alias4, true},
		{"loopback IPv6", netip.IPv6Loopback(), alias6, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, port := forward(t)
			p := newPuppet(t, Config{Forwards: []Forward{f}})
			conn := reach(t, netip.AddrPortFrom(c.from, 0), netip.AddrPortFrom(c.from, port))
			if _, err := conn.Write([]byte("early")); err != nil {
				t.Fatal(err)
			}
			l, syn := p.called()
			if l.remote.Addr() != c.seen || l.remote.Port() != conn.LocalAddr().(*net.TCPAddr).AddrPort().Port() {
				t.Errorf("remote address seen by the guest: %v", l.remote)
			}
			p.wait(initialRTO + time.Millisecond)
			if again := p.next(); again.Flags != packet.SYN || again.Seq != syn.Seq {
				t.Errorf("retransmitted SYN: %v", again)
			}
			l.conn = conn
			l.accept(syn, c.scale)
			if got := l.take(5); string(got) != "early" {
				t.Errorf("guest read %q", got)
			}
			l.say(packet.ACK|packet.PSH, []byte("welcome"))
			l.acknowledged()
			if got := l.read(7); string(got) != "welcome" {
				t.Errorf("host read %q", got)
			}
			conn.Close()
			l.fin()
			l.say(packet.FIN|packet.ACK, nil)
			l.acknowledged()
			p.ended()
		})
	}
}

func TestInboundRefused(t *testing.T) {
	f, port := forward(t)
	p := newPuppet(t, Config{Forwards: []Forward{f}})
	to := netip.AddrPortFrom(host4, port)
	for _, answer := range []func(l *link){
		func(l *link) { p.put(build(l.local, l.remote, 0, l.ack, packet.RST|packet.ACK, 0, nil, nil)) },
		func(l *link) { // the guest has an old connection: RFC 9293, figure 9
			p.put(build(l.local, l.remote, 700, l.ack+100, packet.ACK, 65535, nil, nil))
			if s := l.hear(); s.Flags != packet.RST || s.Seq != l.ack+100 {
				t.Errorf("segment to the old connection: %v", s)
			}
			p.put(build(l.local, l.remote, 0, l.ack, packet.RST|packet.ACK, 0, nil, nil))
		},
		func(*link) { // the guest does not reply
			for i := range maxSynTimeouts + 1 {
				p.wait(initialRTO<<i + time.Millisecond)
			}
		},
	} {
		l, _ := func() (*link, seen) {
			c := reach(t, netip.AddrPortFrom(host4, 0), to)
			l, s := p.called()
			l.conn = c
			return l, s
		}()
		answer(l)
		p.ended()
		if err := l.readError(); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("host reads %v", err)
		}
	}
}

// TestAliasPorts opens connections from the same port of the host to several addresses that have the same alias inside.
func TestAliasPorts(t *testing.T) {
	f, port := forward(t)
	p := newPuppet(t, Config{Forwards: []Forward{f}})
	from := map[netip.AddrPort]bool{}
	for i := range 3 {
		a := netip.AddrFrom4([4]byte{127, 0, 0, byte(i + 1)})
		reach(t, netip.AddrPortFrom(a, 40123), netip.AddrPortFrom(a, port))
		l, syn := p.called()
		from[l.remote] = true
		l.accept(syn, true)
		defer l.say(packet.RST, nil)
	}
	if len(from) != 3 {
		t.Errorf("remote address seen by the guest: %v", from)
	}
}

func TestBound(t *testing.T) {
	f, port := forward(t)
	p := newPuppet(t, Config{Forwards: []Forward{f}, Connections: 2, Outbound: access.Outbound{All: true}})
	listener := listenOn(t, host4)
	a, b := p.dial(listener), p.dial(listener)
	if s := p.syn(listener.Addr().(*net.TCPAddr).AddrPort(), true).next(); s.Flags != packet.RST|packet.ACK {
		t.Errorf("connection beyond the limit: %v", s)
	}
	c := reach(t, netip.AddrPortFrom(host4, 0), netip.AddrPortFrom(host4, port))
	p.turn(10)
	l := &link{puppet: p, conn: c}
	if err := l.readError(); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("read on the host's connection beyond the limit: %v", err)
	}
	a.say(packet.RST, nil)
	b.say(packet.RST, nil)
	p.ended()
}

// TestNoDescriptors checks that a gateway without free descriptors waits and does not busy-loop.
func TestNoDescriptors(t *testing.T) {
	f, port := forward(t)
	p := newPuppet(t, Config{Forwards: []Forward{f}, Outbound: access.Outbound{All: true}})
	c := reach(t, netip.AddrPortFrom(host4, 0), netip.AddrPortFrom(host4, port))
	listener := listenOn(t, host4)
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 3, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	restore := func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
			t.Fatal(err)
		}
	}
	defer restore()
	begin := time.Now()
	p.turn(1000)
	events := 0
	for range 20 {
		n, err := p.g.runTurn(p.events, 1)
		if err != nil {
			t.Fatal(err)
		}
		events += n
	}
	// On a busy host, the polls take longer than a pause.
	if took := time.Since(begin); events > int(took/acceptPause) {
		t.Errorf("%d events in %v while accept(2) fails", events, took)
	}
	if s := p.syn(listener.Addr().(*net.TCPAddr).AddrPort(), true).next(); s.Protocol != unix.IPPROTO_ICMP || s.Payload[0] != icmpUnreachable || s.Payload[1] != 0 {
		t.Errorf("reply to a SYN: %v", s)
	}
	restore()
	p.wait(acceptPause)
	l, syn := p.called()
	l.conn = c
	l.accept(syn, true)
	l.say(packet.RST, nil)
	p.ended()
}

// resident returns the resident memory of the process in bytes.
func resident(t *testing.T) int {
	t.Helper()
	debug.FreeOSMemory()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(b), "VmRSS:")
	n, err := strconv.Atoi(strings.Fields(after)[0])
	if err != nil {
		t.Fatal(err)
	}
	return n << 10
}

// TestMemory checks that 10,000 idle connections that have transferred data use less than 100 MB, including the process
// itself.
func TestMemory(t *testing.T) {
	const connections = 10_000
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	raised := limit
	raised.Cur = limit.Max
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &raised); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit) }()
	if limit.Max < connections+100 {
		t.Skipf("kernel: at most %d descriptors", limit.Max)
	}
	// The host's ends remain in the accept queue of the listener, without descriptors.
	const most = "/proc/sys/net/core/somaxconn"
	old, err := os.ReadFile(most)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(most, []byte(strconv.Itoa(2*connections)), 0); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.WriteFile(most, old, 0) }()
	p := newPuppet(t, Config{Outbound: access.Outbound{All: true}, Outgoing: connections})
	host, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(host)
	if err := errors.Join(unix.Bind(host, &unix.SockaddrInet4{Addr: host4.As4()}), unix.Listen(host, 2*connections)); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(host)
	if err != nil {
		t.Fatal(err)
	}
	to := sockaddr.AddrPort(name)
	before := resident(t)
	b := make([]byte, 100)
	for range connections {
		l := p.syn(to, true)
		s := l.next()
		l.ack, l.scale = s.Seq+1, int(s.Options.WindShift)
		l.say(packet.ACK|packet.PSH, b)
		l.acknowledged()
	}
	after := resident(t)
	t.Logf("%d MB before, %d MB with %d connections: %d bytes each", before>>20, after>>20, connections, (after-before)/connections)
	if n := len(p.g.conns); n != connections {
		t.Errorf("%d connections", n)
	}
	if grown := after - before; grown > 60<<20 { // of this test alone: the process has the memory of other tests, too
		t.Errorf("%d MB more", grown>>20)
	}
}

func TestTimers(t *testing.T) {
	var list timer.Queue
	var order []int
	start := time.Now()
	at := func(n int) time.Time { return start.Add(time.Duration(n) * time.Second) }
	var all [100]struct{ timer.Timer }
	for i := range all {
		all[i].Owner = expirer(func() { order = append(order, i) })
		list.Set(&all[i].Timer, at(i*37%100))
	}
	list.Set(&all[0].Timer, at(200))  // later
	list.Set(&all[50].Timer, at(0))   // sooner
	list.Set(&all[50].Timer, at(300)) // and later
	list.Stop(&all[60].Timer)
	list.Stop(&all[60].Timer)
	for now := range 400 {
		list.Run(at(now))
		for _, i := range order {
			want := i * 37 % 100
			switch i {
			case 0:
				want = 200
			case 50:
				want = 300
			}
			if now != want || i == 60 {
				t.Errorf("timer %d expires at %d, want %d", i, now, want)
			}
		}
		order = order[:0]
	}
	if list.Len() != 0 {
		t.Errorf("%d timers remain", list.Len())
	}
}

type expirer func()

func (f expirer) Expired() { f() }

// TestLinger checks that data that a program sent before it exited is still delivered, and that a connection that the
// program has not closed ends with a RST.
func TestLinger(t *testing.T) {
	p := newPuppet(t, everywhere)
	listener := listenOn(t, host4)
	whole, cut := p.dial(listener), p.dial(listener)
	p.g.config.Linger = 0
	whole.say(packet.ACK, text(50_000))
	whole.say(packet.ACK|packet.FIN, nil)
	whole.acknowledged()
	cut.say(packet.ACK, text(50_000))
	p.turn(1)
	if !p.g.unfinished() {
		t.Error("all connections are finished")
	}
	for _, c := range p.g.conns { // as a program's close(2) does
		if !c.state.finReceived() {
			resetOnClose(c.fd)
		}
		c.closeHost()
		delete(p.g.conns, c.endpoints)
	}
	if got, err := io.ReadAll(whole.conn); !bytes.Equal(got, text(50_000)) || err != nil {
		t.Errorf("%d bytes on the closed connection, %v", len(got), err)
	}
	if _, err := io.ReadAll(cut.conn); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the open connection ends with %v", err)
	}
}
