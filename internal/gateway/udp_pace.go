// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pacer has datagrams of a bound socket go inside no faster than the program reads them,
// where its kernel can be asked: what is too much for the buffer of its socket stays in that
// of the host's, which is larger, mostly.
type pacer struct {
	b         *boundSocket
	last      flow      // of the last datagram
	payload   int       // of the largest datagram between the last looks, or since
	largest   int       // since the last look
	room      int       // of the program's socket, at least, in bytes as the kernel counts them
	fullSince time.Time // when it was found full; zero: it is not
	stalled   bool      // the program did not read for long: nothing waits for it
	timer     timer     // while it is full
}

const (
	// shortestPause and longestPause are between looks at a socket that is full: a buffer
	// of 208 KB is read in some hundred microseconds.
	shortestPause = 100 * time.Microsecond
	longestPause  = 20 * time.Millisecond
	// readPatience is how long a program may read nothing. After that what comes is dropped
	// by its own socket: it may have others, that are read.
	readPatience = time.Second
)

// cost is what a datagram takes of the buffer of a socket, at most: a block of a power of two
// that holds headers and payload, and the kernel's description of the packet.
func (p *pacer) cost() int { return 2*(p.payload+ipv6Header+udpHeader) + 1024 }

// allowed is how many datagrams may go inside now. If there is no room for one, the socket
// is left alone until there is.
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
	p.b.g.timers.set(&p.timer, p.fullSince)        // at the end of this turn
	return 0
}

// update asks for the room. It is false if the socket of the host was closed over that.
func (p *pacer) update() bool {
	if p.largest > 0 {
		p.payload, p.largest = p.largest, 0
	}
	m := p.b.g.guestSockets.memoryFor(p.last)
	switch {
	case !m.known: // nobody listens there, or the kernel cannot tell
		p.room = receiveBatchSize * p.cost()
	case m.allocated == 0: // then it takes one of any size
		p.room = max(m.limit, p.cost())
	default:
		p.room = m.limit - m.allocated
	}
	return !p.b.g.guestSockets.ended
}

// delivered takes note of a datagram.
func (p *pacer) delivered(f flow, payload int) {
	p.last = f
	p.largest = max(p.largest, payload)
	p.payload = max(p.payload, payload)
	p.room -= p.cost()
}

// expired looks again at a socket that is full.
func (p *pacer) expired() {
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
	g.timers.set(&p.timer, g.now.Add(pause))
	if pause < time.Millisecond && len(g.outputQueue) == 0 {
		g.nap(pause)
	}
}

// nap waits for events, for less than a millisecond, which is the least that epoll_wait(2)
// waits.
func (g *Gateway) nap(d time.Duration) {
	fd, timeout := unix.PollFd{Fd: int32(g.epoll), Events: unix.POLLIN}, unix.NsecToTimespec(int64(d))
	_, _, _ = unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&fd)), 1, uintptr(unsafe.Pointer(&timeout)), 0, 0, 0)
}
