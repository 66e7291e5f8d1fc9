// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"os"
	"time"

	"sockeye/internal/gateway/timer"
	"sockeye/internal/sysctl"
	"sockeye/room"
)

// net.ipv4.tcp_mem bounds the memory of all TCP sockets of the host. Near the bound, the connections of every program slow
// down. A guest with many uploads to peers that do not read would reach the bound, because each upload fills a send buffer of
// megabytes. sendMemory therefore limits all connections of a guest together to a part of tcp_mem.

const (
	// A guest's data may occupy 1/memoryDivisor of the low mark of net.ipv4.tcp_mem in send buffers of the host's sockets.
	// Below the low mark the kernel does not regulate.
	memoryDivisor = 4
	// minQueued is the number of bytes that each connection may queue regardless of the limit. minWindow is the largest
	// window, in bytes, while the queued bytes are within the limit and would exceed it with all windows.
	minQueued = 1 << 16
	minWindow = 1 << 17
	// memoryInterval is the time between two computations of windows that are closed for lack of memory.
	memoryInterval = 100 * time.Millisecond
)

// sendMemory accounts for the send buffers of the host's sockets of a guest. n connections hold at most
// 2*limit + n*(minWindow+minQueued) bytes of payload: windows larger than minWindow are opened only while the queued and
// the advertised bytes together are within the limit; smaller ones are opened while the queued bytes alone are, as an
// advertised window may never be used; and a window cannot be taken back (RFC 9293, section 3.8.6).
type sendMemory struct {
	g          *Gateway
	limit      int            // bytes
	queued     int            // bytes in all send buffers, each as of the last computation of the connection's window
	advertised int            // bytes of all receive windows
	waiting    map[*conn]bool // connections whose window is closed for lack of memory
	timer      timer.Timer
}

// defaultMemory returns the limit for a guest on this host in bytes; 64 MB if tcp_mem is not readable.
func defaultMemory() int {
	if pages := sysctl.Numbers("net.ipv4.tcp_mem"); len(pages) == 3 && pages[0] > 0 {
		return int(pages[0]) * os.Getpagesize() / memoryDivisor
	}
	return 64 << 20
}

// connMemory is the share of one connection, in bytes.
type connMemory struct{ queued, advertised int }

// forget removes the share of a connection whose socket is closed.
func (m *sendMemory) forget(c *conn) {
	m.update(c, connMemory{})
	delete(m.waiting, c)
}

// limitWindow returns the window, in bytes, of a connection whose socket has queued bytes and accepts space bytes more.
func (m *sendMemory) limitWindow(c *conn, queued, space int) int {
	outstanding := int(int32(c.rcv.adv - c.rcv.nxt))
	m.update(c, connMemory{queued, outstanding})
	delete(m.waiting, c)
	switch {
	case m.queued > m.limit:
		if least := max(minQueued-queued, 0); least < space {
			space = least
			m.waiting[c] = true
			if !m.timer.IsSet() {
				m.g.timers.Set(&m.timer, m.g.now.Add(memoryInterval))
			}
		}
	case m.queued+m.advertised-outstanding+space > m.limit:
		space = min(space, minWindow)
	}
	m.update(c, connMemory{queued, max(outstanding, space)})
	return space
}

// Expired updates the shares of all connections and recomputes the windows of the waiting ones.
func (m *sendMemory) Expired() {
	for _, c := range m.g.conns {
		if c.fd < 0 {
			continue
		}
		if s, err := room.ReadSnapshot(c.fd); err == nil {
			m.update(c, connMemory{s.Queued, c.rcv.memory.advertised})
		}
	}
	waiting := m.waiting
	m.waiting = make(map[*conn]bool)
	for c := range waiting {
		if c.fd >= 0 {
			c.sendWindowUpdate()
		}
	}
}

func (m *sendMemory) update(c *conn, s connMemory) {
	m.queued += s.queued - c.rcv.memory.queued
	m.advertised += s.advertised - c.rcv.memory.advertised
	c.rcv.memory = s
}
