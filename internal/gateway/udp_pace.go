// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/packet"
	"sockeye/internal/gateway/timer"
)

// pacer delivers datagrams of a bound socket no faster than the program reads them. sock_diag in the guest reports the free space of
// the program's receive buffer; further datagrams stay in the receive buffer of the host's socket, which is usually larger.
type pacer struct {
	b         *boundSocket
	last      endpoints   // of the last datagram
	payload   int         // largest payload since the update before the last one, bytes
	largest   int         // largest payload since the last update, bytes
	free      int         // lower bound of the free space of the program's socket, in bytes of kernel memory
	fullSince time.Time   // when the program's socket became full; zero: it is not full
	stalled   bool        // the program has read nothing for stallTimeout: delivery is not paced
	timer     timer.Timer // set while the socket is full
}

const (
	// minPause and maxPause bound the time between two updates of a full socket: a program reads a buffer of 208 KB within a few
	// hundred microseconds.
	minPause = 100 * time.Microsecond
	maxPause = 20 * time.Millisecond
	// stallTimeout is how long a program may read nothing before pacing stops, so that the guest's kernel drops datagrams and the
	// program's other sockets are served.
	stallTimeout = time.Second
)

// truesize returns the maximum kernel memory of a datagram in bytes: headers and payload in a block of a power of two, and struct
// sk_buff.
func (p *pacer) truesize() int { return 2*(p.payload+packet.IPv6Header+packet.UDPHeader) + 1024 }

// allowed returns the number of datagrams that may be delivered now. If that is 0, the host's socket is not polled meanwhile.
func (p *pacer) allowed() int {
	switch {
	case p.b.g.guestSockets == nil || !p.last.guest.IsValid():
		return receiveBatchSize
	case !p.fullSince.IsZero():
		return 0
	}
	if p.free < receiveBatchSize*p.truesize() && !p.update() {
		return 0
	}
	switch {
	case p.free >= p.truesize():
		p.stalled = false
		return min(p.free/p.truesize(), receiveBatchSize)
	case p.stalled:
		return receiveBatchSize
	}
	p.fullSince = p.b.g.now
	_ = p.b.g.watch(unix.EPOLL_CTL_MOD, p.b.FD, 0) // cannot fail: the descriptor is registered
	p.b.g.timers.Set(&p.timer, p.fullSince)        // at the end of this turn
	return 0
}

// delivered accounts for a datagram.
func (p *pacer) delivered(f endpoints, payload int) {
	p.last = f
	p.largest = max(p.largest, payload)
	p.payload = max(p.payload, payload)
	p.free -= p.truesize()
}

// Expired checks whether a full socket has space.
func (p *pacer) Expired() {
	if !p.update() {
		return
	}
	g := p.b.g
	since := g.now.Sub(p.fullSince)
	if p.free >= p.truesize() || since >= stallTimeout {
		p.stalled = p.free < p.truesize()
		p.fullSince = time.Time{}
		_ = g.watch(unix.EPOLL_CTL_MOD, p.b.FD, unix.EPOLLIN)
		return
	}
	pause := min(max(since, minPause), maxPause)
	g.timers.Set(&p.timer, g.now.Add(pause))
	if pause < time.Millisecond && len(g.outputQueue) == 0 {
		g.waitBriefly(pause)
	}
}

// update reads the free space from the guest's kernel. It returns false if a reply made the gateway close the host's socket.
func (p *pacer) update() bool {
	if p.largest > 0 {
		p.payload, p.largest = p.largest, 0
	}
	m := p.b.g.guestSockets.memoryFor(p.last)
	switch {
	case !m.known: // no socket receives the flow, or the kernel does not report the memory
		p.free = receiveBatchSize * p.truesize()
	case m.allocated == 0: // an empty buffer accepts a datagram of any size
		p.free = max(m.limit, p.truesize())
	default:
		p.free = m.limit - m.allocated
	}
	return !p.b.g.guestSockets.closed
}

// waitBriefly waits for events for less than a millisecond, the unit of epoll_wait(2).
func (g *Gateway) waitBriefly(d time.Duration) {
	fd, timeout := unix.PollFd{Fd: int32(g.poller.epoll), Events: unix.POLLIN}, unix.NsecToTimespec(int64(d))
	_, _, _ = unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&fd)), 1, uintptr(unsafe.Pointer(&timeout)), 0, 0, 0)
}
