// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"os"
	"strconv"
	"strings"
	"time"

	"sockeye/room"
)

// The kernel counts the memory of all TCP sockets of the host together, and when it reaches net.ipv4.tcp_mem every
// program's connections suffer. A guest with many uploads whose peers do not read would get it there: each
// takes a send buffer of megabytes. So the connections of a guest together hold no more than a part of that.

const (
	// memoryShare is the part of the low mark of net.ipv4.tcp_mem, below which nothing is bounded, that a guest's
	// uploads may hold in the host's sockets.
	memoryShare = 4
	// minHeld is what each connection may hold even so, in bytes, and leastPromised what it may be told to send
	// while what all were told to send is more than that part, and what they hold is not.
	minHeld     = 1 << 16
	minPromised = 1 << 17
	// memoryInterval is how often connections are looked at whose window stays closed for the lack of memory.
	memoryInterval = 100 * time.Millisecond
)

// sendMemory is what the host's sockets of a guest hold to send, in bytes, as each was when it was looked at last,
// and what the guest was told that it may send.
type sendMemory struct {
	g              *Gateway
	limit          int
	held, promised int
	waiting        map[*conn]bool // that hold as much as they may
	timer          timer
}

// defaultMemory reads what a guest may hold.
func defaultMemory() int {
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_mem")
	if fields := strings.Fields(string(text)); err == nil && len(fields) == 3 {
		if pages, err := strconv.Atoi(fields[0]); err == nil && pages > 0 {
			return pages * os.Getpagesize() / memoryShare
		}
	}
	return 64 << 20
}

// connMemory is what one connection has of it.
type connMemory struct{ held, promised int }

func (m *sendMemory) update(c *conn, s connMemory) {
	m.held += s.held - c.rcv.memory.held
	m.promised += s.promised - c.rcv.memory.promised
	c.rcv.memory = s
}

// forget is for a connection whose socket is closed.
func (m *sendMemory) forget(c *conn) {
	m.update(c, connMemory{})
	delete(m.waiting, c)
}

// allow bounds how much a connection is told to send, of the room that its socket has.
func (m *sendMemory) allow(c *conn, queued, room int) int {
	outstanding := int(int32(c.rcv.edge - c.rcv.nxt))
	m.update(c, connMemory{queued, outstanding})
	delete(m.waiting, c)
	switch {
	case m.held > m.limit:
		if least := max(minHeld-queued, 0); least < room {
			room = least
			m.waiting[c] = true
			if m.timer.index == 0 {
				m.g.timers.set(&m.timer, m.g.now.Add(memoryInterval))
			}
		}
	case m.held+m.promised-outstanding+room > m.limit:
		room = min(room, minPromised)
	}
	m.update(c, connMemory{queued, max(outstanding, room)})
	return room
}

// expired looks at all connections anew.
func (m *sendMemory) expired() {
	for _, c := range m.g.conns {
		if c.fd < 0 {
			continue
		}
		if s, err := room.Take(c.fd); err == nil {
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
