// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"os"
	"strconv"
	"strings"
	"time"

	"sockeye/internal/gateway/timer"
	"sockeye/room"
)

// The kernel bounds the memory of all TCP sockets of the host together by net.ipv4.tcp_mem. Near the bound, connections of
// every program slow down. A guest with many uploads whose peers do not read would reach the bound, as each upload fills a
// send buffer of megabytes. All connections of a guest together may therefore hold a part of it only.

const (
	// memoryShare is the part (one in so many) of the low mark of net.ipv4.tcp_mem that a guest's data may occupy in the send
	// buffers of the host's sockets. Below the low mark the kernel bounds nothing.
	memoryShare = 4
	// minHeld is how many bytes each connection may hold in any case. minPromised is the largest window of a connection, in
	// bytes, while all windows together exceed the limit and what the sockets hold does not.
	minHeld     = 1 << 16
	minPromised = 1 << 17
	// memoryInterval is how often windows that are closed for lack of memory are computed again.
	memoryInterval = 100 * time.Millisecond
)

// sendMemory accounts for the send buffers of the host's sockets of a guest.
type sendMemory struct {
	g        *Gateway
	limit    int            // bytes
	held     int            // bytes in send buffers, each as of the last time that the connection's window was computed
	promised int            // bytes of all receive windows
	waiting  map[*conn]bool // connections whose window is closed for lack of memory
	timer    timer.Timer
}

// defaultMemory is the limit for a guest on this host, bytes; 64 MB if the kernel does not say.
func defaultMemory() int {
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_mem")
	if fields := strings.Fields(string(text)); err == nil && len(fields) == 3 {
		if pages, err := strconv.Atoi(fields[0]); err == nil && pages > 0 {
			return pages * os.Getpagesize() / memoryShare
		}
	}
	return 64 << 20
}

// connMemory is the share of one connection.
type connMemory struct{ held, promised int }

func (m *sendMemory) update(c *conn, s connMemory) {
	m.held += s.held - c.rcv.memory.held
	m.promised += s.promised - c.rcv.memory.promised
	c.rcv.memory = s
}

// forget removes the share of a connection whose socket is closed.
func (m *sendMemory) forget(c *conn) {
	m.update(c, connMemory{})
	delete(m.waiting, c)
}

// allow bounds the window of a connection, in bytes, whose socket has queued bytes and space for room more.
func (m *sendMemory) allow(c *conn, queued, room int) int {
	outstanding := int(int32(c.rcv.edge - c.rcv.nxt))
	m.update(c, connMemory{queued, outstanding})
	delete(m.waiting, c)
	switch {
	case m.held > m.limit:
		if least := max(minHeld-queued, 0); least < room {
			room = least
			m.waiting[c] = true
			if !m.timer.IsSet() {
				m.g.timers.Set(&m.timer, m.g.now.Add(memoryInterval))
			}
		}
	case m.held+m.promised-outstanding+room > m.limit:
		room = min(room, minPromised)
	}
	m.update(c, connMemory{queued, max(outstanding, room)})
	return room
}

// Expired updates the shares of all connections, and computes the windows of the waiting ones again.
func (m *sendMemory) Expired() {
	for _, c := range m.g.conns {
		if c.fd < 0 {
			continue
		}
		if s, err := room.ReadSnapshot(c.fd); err == nil {
			m.update(c, connMemory{s.Queued, c.rcv.memory.promised})
		}
	}
	waiting := m.waiting
	m.waiting = make(map[*conn]bool)
	for c := range waiting {
		if c.fd >= 0 {
			c.offerWindow()
		}
	}
}
