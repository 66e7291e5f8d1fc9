// SPDX-License-Identifier: Apache-2.0

package gateway

import "sockeye/room"

// advanceWindow moves the right edge of the window as far as the socket has room. An edge
// that the guest knows of stays.
func (c *conn) advanceWindow() {
	if c.rcv.finPassed || c.hostFailed || len(c.rcv.backlog) > 0 {
		return
	}
	s, err := room.Take(c.fd)
	if err != nil {
		return
	}
	c.rcv.armed = false
	if s.Arming() || s.NotSentLowat > 0 && 2*s.Unsent >= s.NotSentLowat {
		// As room.Arm. What left the socket since then wakes nobody.
		if c.rcv.armed = !isWritable(c.fd); !c.rcv.armed {
			if s, err = room.Take(c.fd); err != nil {
				return
			}
		}
	}
	safe := c.g.config.Kernel.Estimate(s, c.rcv.recentWrite, &c.rcv.tracker).Safe
	if !c.rcv.armed {
		// The kernel takes a packet whole while it is writable at all, and nothing would
		// say later that there is more room.
		safe = max(safe, int(c.rcv.mss))
	}
	safe = c.g.memory.allow(c, s.Queued, safe)
	window := min(safe, 65535<<c.rcvWindShift())
	// In units of the scale, so that rounding takes no edge further.
	if whole := window &^ (1<<c.rcvWindShift() - 1); whole >= int(c.rcv.mss) {
		window = whole
	}
	gain := int(int32(c.rcv.nxt + uint32(window) - c.rcv.edge))
	if gain <= 0 || c.rcv.armed && gain < min(s.SendBuffer/8, maxPacket) {
		return // crumbs (RFC 9293, section 3.8.6.2.2): more comes with EPOLLOUT
	}
	c.rcv.edge += uint32(gain)
}

// rcvWindShift is the scale of the window that the guest is told.
func (c *conn) rcvWindShift() uint8 {
	if !c.windowScaling {
		return 0
	}
	return c.g.windShift
}

// hostWritable is called when the socket has room again.
func (c *conn) hostWritable() {
	rcv, edge := c.rcv.nxt, c.rcv.edge
	if len(c.rcv.backlog) > 0 && !c.hostFailed {
		if c.writeBacklog(); c.fd < 0 {
			return
		}
	}
	c.advanceWindow()
	if c.rcv.nxt != rcv || c.rcv.edge != edge {
		c.sendAck()
	}
}

// offerWindow tells the guest of a larger window, if there is one.
func (c *conn) offerWindow() {
	edge := c.rcv.edge
	if c.advanceWindow(); c.rcv.edge != edge {
		c.sendAck()
	}
}
