// SPDX-License-Identifier: Apache-2.0

package gateway

import "sockeye/room"

// advance moves the right edge of the window as far as the socket has room. An edge
// that the guest knows of stays.
func (c *conn) advance() {
	if c.shut || c.broken || len(c.spill) > 0 {
		return
	}
	s, err := room.Take(c.fd)
	if err != nil {
		return
	}
	c.armed = false
	if s.Arming() || s.NotSentLowat > 0 && 2*s.Unsent >= s.NotSentLowat {
		// As room.Arm. What left the socket since then wakes nobody.
		if c.armed = !writable(c.fd); !c.armed {
			if s, err = room.Take(c.fd); err != nil {
				return
			}
		}
	}
	safe := c.g.config.Kernel.Estimate(s, c.usual, &c.tracker).Safe
	if !c.armed {
		// The kernel takes a packet whole while it is writable at all, and nothing would
		// say later that there is more room.
		safe = max(safe, int(c.grain))
	}
	safe = c.g.memory.allow(c, s.Queued, safe)
	window := min(safe, 65535<<c.shift())
	// In units of the scale, so that rounding takes no edge further.
	if whole := window &^ (1<<c.shift() - 1); whole >= int(c.grain) {
		window = whole
	}
	gain := int(int32(c.rcv + uint32(window) - c.edge))
	if gain <= 0 || c.armed && gain < min(s.SendBuffer/8, maxPacket) {
		return // crumbs (RFC 9293, section 3.8.6.2.2): more comes with EPOLLOUT
	}
	c.edge += uint32(gain)
}

// shift is the scale of the window that the guest is told.
func (c *conn) shift() uint8 {
	if !c.hasScale {
		return 0
	}
	return c.g.scale
}

// writable is called when the socket has room again.
func (c *conn) writable() {
	rcv, edge := c.rcv, c.edge
	if len(c.spill) > 0 && !c.broken {
		if c.flush(); c.fd < 0 {
			return
		}
	}
	c.advance()
	if c.rcv != rcv || c.edge != edge {
		c.tell()
	}
}

// open tells the guest of a larger window, if there is one.
func (c *conn) open() {
	edge := c.edge
	if c.advance(); c.edge != edge {
		c.tell()
	}
}
