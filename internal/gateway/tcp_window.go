// SPDX-License-Identifier: Apache-2.0

package gateway

import "sockeye/room"

// advanceWindow moves the right edge of the receive window as far as the host's socket has space. The edge never moves left.
func (c *conn) advanceWindow() {
	if c.state.finReceived() || c.host != hostOK || len(c.rcv.backlog) > 0 {
		return
	}
	s, err := room.ReadSnapshot(c.fd)
	if err != nil {
		return
	}
	c.rcv.armed = false
	if s.Arming() || s.NotSentLowat > 0 && 2*s.Unsent >= s.NotSentLowat {
		// As room.Arm does. If the socket became writable since the snapshot, no event comes, and a new snapshot is needed.
		if c.rcv.armed = !isWritable(c.fd); !c.rcv.armed {
			if s, err = room.ReadSnapshot(c.fd); err != nil {
				return
			}
		}
	}
	safe := c.g.config.Kernel.Estimate(s, c.rcv.recentWrite, &c.rcv.tracker).Safe
	if !c.rcv.armed {
		// A writable socket accepts one segment whole, and no event would tell of more space later.
		safe = max(safe, int(c.rcv.mss))
	}
	safe = c.g.memory.allow(c, s.Queued, safe)
	shift := c.rcvWindShift()
	wnd := min(safe, 65535<<shift)
	// A multiple of the scale's unit, which rounding up in transmit leaves as it is.
	if whole := wnd &^ (1<<shift - 1); whole >= int(c.rcv.mss) {
		wnd = whole
	}
	gain := int(int32(c.rcv.nxt + uint32(wnd) - c.rcv.edge))
	if gain <= 0 || c.rcv.armed && gain < min(s.SendBuffer/8, maxPacket) {
		return // silly-window avoidance (RFC 9293, section 3.8.6.2.2): EPOLLOUT brings more
	}
	c.rcv.edge += uint32(gain)
}

// rcvWindShift is Rcv.Wind.Shift (RFC 7323, section 2.2).
func (c *conn) rcvWindShift() uint8 {
	if !c.windowScaling {
		return 0
	}
	return c.g.windShift
}

// hostWritable processes EPOLLOUT: the host's socket has space again.
func (c *conn) hostWritable() {
	nxt, edge := c.rcv.nxt, c.rcv.edge
	if len(c.rcv.backlog) > 0 && c.host == hostOK {
		if c.writeBacklog(); c.fd < 0 {
			return
		}
	}
	c.advanceWindow()
	if c.rcv.nxt != nxt || c.rcv.edge != edge {
		c.sendAck()
	}
}

// offerWindow sends the guest a window update, if the window can grow.
func (c *conn) offerWindow() {
	edge := c.rcv.edge
	if c.advanceWindow(); c.rcv.edge != edge {
		c.sendAck()
	}
}
