// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// reader is the socket of the program behind a member's gateway. Datagrams from the gateway reach the puppet and not
// this socket; the test fills and empties the socket.
type reader struct {
	*behind
	c      *net.UDPConn
	peer   net.Conn // of the host
	filler net.Conn // inside
}

func newReader(t *testing.T, port uint16) *reader {
	t.Helper()
	r := &reader{behind: standFor(t, member(unix.IPPROTO_UDP, port, port))}
	r.open(port)
	r.until("the gateway to listen", func() bool { return r.g.guestSockets.listening })
	return r
}

// open opens the sockets of the program and of its peers.
func (r *reader) open(port uint16) {
	t := r.TB
	t.Helper()
	r.c = r.program(unix.IPPROTO_UDP).(*net.UDPConn)
	dial := func(port uint16) net.Conn {
		c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	r.peer = dial(port)
	if err := r.inside.Do(func() error { r.filler = dial(serviceUDP); return nil }); err != nil {
		t.Fatal(err)
	}
}

// fill sends the program more datagrams than its socket accepts.
func (r *reader) fill() {
	r.Helper()
	for range 400 {
		r.write(r.filler, 1400)
	}
}

// empty reads all datagrams of the socket.
func (r *reader) empty() {
	r.Helper()
	raw, err := r.c.SyscallConn()
	if err != nil {
		r.Fatal(err)
	}
	b := make([]byte, 2048)
	if err := raw.Read(func(fd uintptr) bool {
		for err == nil {
			_, _, err = unix.Recvfrom(int(fd), b, unix.MSG_DONTWAIT)
		}
		return true
	}); err != nil {
		r.Fatal(err)
	}
	if !errors.Is(err, unix.EAGAIN) {
		r.Fatal(err)
	}
}

func (r *reader) write(c net.Conn, n int) {
	r.Helper()
	if _, err := c.Write(make([]byte, n)); err != nil {
		r.Fatal(err)
	}
}

// given counts the datagrams that the gateway has sent to the guest.
func (r *reader) given() (n int) {
	r.Helper()
	for _, ok := r.receive(); ok; _, ok = r.receive() {
		n++
	}
	return n
}

// gets waits until exactly n datagrams have been sent to the guest since the last call.
func (r *reader) gets(what string, n int) {
	r.Helper()
	got := 0
	r.until(fmt.Sprintf("%d datagrams %s", n, what), func() bool { got += r.given(); return got >= n })
	r.turn(1)
	if got += r.given(); got != n {
		r.Errorf("%d datagrams %s, want %d", got, what, n)
	}
}

// keeps runs the gateway for some time and checks that at most n datagrams are sent to the guest.
func (r *reader) keeps(where string, most int) {
	r.Helper()
	for range 20 {
		r.turn(1)
	}
	if n := r.given(); n > most {
		r.Errorf("%d datagrams delivered to %s, want at most %d", n, where, most)
	}
}

// TestPace checks that datagrams wait in the host's socket while the receive buffer of the program's socket is full,
// and arrive in order when it has space.
func TestPace(t *testing.T) {
	newReader(t, 25739).paced()
}

// TestPaceForward checks the same for a host's socket that was opened before the program's.
func TestPaceForward(t *testing.T) {
	f, port := forwardUDP(t)
	f.Port = serviceUDP
	r := &reader{behind: standBehind(t, false, f)}
	r.open(port)
	r.paced()
}

func (r *reader) paced() {
	r.Helper()
	r.write(r.peer, 1400)
	r.gets("into an empty socket", 1)
	r.fill()
	for range 100 {
		r.write(r.peer, 1400)
	}
	r.keeps("a socket that is full", 0)
	r.empty()
	r.until("the rest", func() bool { return r.g.bound[serviceUDP][0].pacer.fullSince.IsZero() })
	r.write(r.peer, 1)
	r.until("all datagrams", func() bool {
		for s, ok := r.receive(); ok; s, ok = r.receive() {
			if len(s.Payload) == 1 {
				return true
			}
		}
		return false
	})
}

// TestPaceSmallBuffer checks that a buffer smaller than a datagram accepts one datagram at a time.
func TestPaceSmallBuffer(t *testing.T) {
	r := newReader(t, 25740)
	if err := r.c.SetReadBuffer(1); err != nil {
		t.Fatal(err)
	}
	for range 40 {
		r.write(r.peer, 1400)
	}
	r.gets("into a small, empty socket", 40)
}

// TestPaceShrunkBuffer checks a socket that holds more than its buffer because the program has reduced the buffer.
func TestPaceShrunkBuffer(t *testing.T) {
	r := newReader(t, 25743)
	r.write(r.peer, 1400)
	r.gets("into an empty socket", 1)
	r.fill()
	if err := r.c.SetReadBuffer(1); err != nil {
		t.Fatal(err)
	}
	r.write(r.peer, 1400)
	r.keeps("a socket above its limit", 0)
	r.empty()
	r.gets("into a small, empty socket", 1)
}

// TestPaceStuck checks that the gateway stops pacing if a program has not read for a long time; the guest's kernel then
// drops datagrams. When the program reads again, the gateway paces again.
func TestPaceStuck(t *testing.T) {
	r := newReader(t, 25741)
	r.write(r.peer, 1400)
	r.gets("into an empty socket", 1)
	r.fill()
	send := func() {
		for range 40 {
			r.write(r.peer, 1400)
		}
	}
	send()
	r.keeps("a socket that is full", 0)
	r.wait(stallTimeout)
	r.gets("into a stalled socket", 40)
	send()
	r.gets("into a stalled socket, without a second wait", 40)
	r.empty()
	send()
	r.gets("into a socket that is read again", 40)
	r.fill()
	send()
	r.keeps("a socket that is full again", 39) // the socket had space at the last update
}

// TestPaceEnds checks that closing a full socket ends the pacing, and the member.
func TestPaceEnds(t *testing.T) {
	r := newReader(t, 25742)
	r.write(r.peer, 1400)
	r.gets("into an empty socket", 1)
	r.fill()
	for range 100 {
		r.write(r.peer, 1400)
	}
	r.keeps("a socket that is full", 0)
	// A kernel worker reports the closed socket, possibly late. Before the report, sock_diag finds no socket and the
	// gateway would not pace; stop its clock until then.
	clock, now := r.g.clock, r.g.now
	r.g.clock = func() time.Time { return now }
	r.c.Close()
	r.until("the gateway to close", func() bool { return r.g.guestSockets.closed })
	r.g.clock = clock
	r.wait(2 * stallTimeout)
	r.keeps("a program that has exited", 0)
}
