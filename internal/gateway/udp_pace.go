// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/timer"
)

// pacer delivers datagrams of a bound socket no faster than the program reads them. The free space in the receive buffer of the
// program's socket is known from the guest's sock_diag; further datagrams stay in the receive buffer of the host's socket, which
// is larger as a rule.
type pacer struct {
	b         *boundSocket
	last      flow        // of the last datagram
	payload   int         // of the largest datagram since the update before the last one, bytes
	largest   int         // of the largest datagram since the last update, bytes
	room      int         // free space of the program's socket, at least, in bytes of kernel memory
	fullSince time.Time   // since when the socket is full; zero: it is not
	stalled   bool        // the program has read nothing for readPatience: datagrams do not wait for it
	timer     timer.Timer // while the socket is full
}

const (
	// shortestPause and longestPause bound the time between two updates for a full socket: a program reads a buffer of 208 KB
	// within some hundred microseconds.
	shortestPause = 100 * time.Microsecond
	longestPause  = 20 * time.Millisecond
	// readPatience is how long a program may read nothing. After that its socket drops datagrams, so that the program's other
	// sockets are served.
	readPatience = time.Second
)

// cost is the largest kernel memory of a datagram, bytes: a block of a power of two with headers and payload, and struct sk_buff.
func (p *pacer) cost() int { return 2*(p.payload+ipv6Header+udpHeader) + 1024 }

// allowed returns how many datagrams may be delivered now. If none, the host's socket is not polled until some are.
func (p *pacer) allowed() int {
	switch {
	case p.b.g.guestSockets == nil || !p.last.guest.IsValid():
		return receiveBatchSize
	case !p.fullSince.IsZero():
		return 0
	}
	if p.room < receiveBatchSize*p.cost() && !p.update() {
		return 0
	}
	switch {
	case p.room >= p.cost():
		p.stalled = false
		return min(p.room/p.cost(), receiveBatchSize)
	case p.stalled:
		return receiveBatchSize
	}
	p.fullSince = p.b.g.now
	_ = p.b.g.watch(unix.EPOLL_CTL_MOD, p.b.FD, 0) // it is registered
	p.b.g.timers.Set(&p.timer, p.fullSince)        // at the end of this turn
	return 0
}

// update asks the guest's kernel for the free space. It returns false if an answer made the gateway close the host's socket.
func (p *pacer) update() bool {
	if p.largest > 0 {
		p.payload, p.largest = p.largest, 0
	}
	m := p.b.g.guestSockets.memoryFor(p.last)
	switch {
	case !m.known: // no socket receives there, or the kernel does not tell
		p.room = receiveBatchSize * p.cost()
	case m.allocated == 0: // an empty buffer accepts a datagram of any size
		p.room = max(m.limit, p.cost())
	default:
		p.room = m.limit - m.allocated
	}
	return !p.b.g.guestSockets.ended
}

// delivered accounts for a datagram.
func (p *pacer) delivered(f flow, payload int) {
	p.last = f
	p.largest = max(p.largest, payload)
	p.payload = max(p.payload, payload)
	p.room -= p.cost()
}

// Expired updates a full socket.
func (p *pacer) Expired() {
	if !p.update() {
		return
	}
	g := p.b.g
	since := g.now.Sub(p.fullSince)
	if p.room >= p.cost() || since >= readPatience {
		p.stalled = p.room < p.cost()
		p.fullSince = time.Time{}
		_ = g.watch(unix.EPOLL_CTL_MOD, p.b.FD, unix.EPOLLIN)
		return
	}
	pause := min(max(since, shortestPause), longestPause)
	g.timers.Set(&p.timer, g.now.Add(pause))
	if pause < time.Millisecond && len(g.outputQueue) == 0 {
		g.nap(pause)
	}
}

// nap waits for events for less than a millisecond, the unit of epoll_wait(2).
func (g *Gateway) nap(d time.Duration) {
	fd, timeout := unix.PollFd{Fd: int32(g.epoll), Events: unix.POLLIN}, unix.NsecToTimespec(int64(d))
	_, _, _ = unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&fd)), 1, uintptr(unsafe.Pointer(&timeout)), 0, 0, 0)
}
