// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"

	"golang.org/x/sys/unix"
)

// outputBudget is how many packets a connection sends in a turn.
const outputBudget = 8

// output sends to the guest what the socket has, as far as its window goes.
func (c *conn) output() {
	if c.state != open {
		return
	}
	for range outputBudget {
		if c.finSent || c.drained {
			return
		}
		free := int(int32(c.una + c.window - c.nxt))
		// A window that opens by crumbs is let open further, while something is under way.
		if c.blocked = free <= 0 || c.una != c.nxt && free < min(int(c.mss), defaultMSS4); c.blocked {
			if c.una == c.nxt {
				c.arm() // to probe its window
			}
			return
		}
		a := c.segment(c.nxt, flagACK|flagPSH)
		headers := a.headers()
		n, err := c.peek(c.g.buffer[headers : headers+min(free, c.packet(headers))])
		switch {
		case errors.Is(err, unix.EAGAIN):
			c.drained = true
			return
		case err != nil, n == 0 && c.lost:
			c.abort()
			return
		case n == 0:
			c.finSent = true
			a.flags = flagACK | flagFIN
			c.transmit(&a, nil)
			c.nxt++
			c.arm()
			if c.broken {
				c.abort()
			}
			return
		}
		c.transmit(&a, c.g.buffer[headers:headers+n])
		idle := c.una == c.nxt
		c.nxt += uint32(n)
		if idle {
			c.arm()
		}
	}
	if !c.queued {
		c.queued = true
		c.g.ready = append(c.g.ready, c)
	}
}

// packet is the largest payload of a packet to the guest: of whole segments.
func (c *conn) packet(headers int) int {
	most := maxPacket - 1 - (headers - vnetHeader)
	return most - most%int(c.mss)
}

// peek reads what the socket has behind what was sent, and leaves it there.
func (c *conn) peek(p []byte) (int, error) {
	if c.peeks {
		return receive(c.fd, p, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	}
	return receiveBehind(c.fd, c.spent+int(c.nxt-c.una), p)
}

// discard takes what the guest has acknowledged out of the socket. It is false if that
// has less.
func (c *conn) discard() bool {
	for c.spent > 0 { // an urgent mark splits it
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(c.fd), 0, uintptr(c.spent), unix.MSG_TRUNC|unix.MSG_DONTWAIT, 0, 0)
		switch {
		case errno == unix.EINTR:
		case errno != 0 || n == 0:
			return false
		default:
			c.spent -= int(n)
		}
	}
	return true
}

// acknowledge tells the guest what the socket has taken, and how much more it takes.
func (c *conn) acknowledge() {
	c.advance()
	c.tell()
}

// tell sends the guest the state of the other direction.
func (c *conn) tell() { a := c.segment(c.nxt, flagACK); c.transmit(&a, nil) }

// segment is one to the guest.
func (c *conn) segment(seq uint32, flags uint8) answer {
	return answer{from: c.flow.remote, to: c.flow.guest, seq: seq, ack: c.rcv, flags: flags, mss: c.mss}
}

// transmit sends a segment with what the guest is to know of the other direction. The
// payload, if any, stands behind the headers in the gateway's buffer.
func (c *conn) transmit(a *answer, payload []byte) {
	headers := a.headers()
	b := c.g.buffer[:headers+len(payload)]
	var own [maxHeaders]byte
	if payload == nil {
		b = own[:headers]
	}
	if a.flags&flagSYN == 0 {
		window := c.edge - c.rcv
		if before(c.edge, c.rcv) {
			window = 0
		}
		shift := c.shift()
		unit := uint32(1) << shift
		if (c.armed || c.more) && !c.asked && !c.shut {
			// Rounded up, the window would move the edge further by each segment, and the
			// socket has no room for that. What is too much for a whole number is
			// acknowledged with what follows, when there is room, or if it comes again.
			over := -window % unit
			a.ack, window = a.ack-over, window+over
		}
		// Rounded up, as the kernel does it (tcp_select_window): an edge is not taken back.
		told := min((window+unit-1)>>shift, 65535)
		a.window = uint16(told)
		if edge := a.ack + told<<shift; before(c.edge, edge) {
			c.edge = edge
		}
		c.asked = false
	}
	a.write(b, len(payload))
	c.g.send(b)
}
