// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"math/bits"

	"sockeye/internal/gateway/packet"
	"sockeye/internal/sysctl"
	"sockeye/room"
)

const (
	// minWindShift and maxWindShift bound Rcv.Wind.Shift.
	minWindShift = 6
	maxWindShift = 14 // RFC 7323, section 2.3
)

// chooseWindShift returns the smallest window scale that can advertise the largest send buffer of the host (net.ipv4.tcp_wmem): a
// larger scale would make the rounding of windows coarser.
func chooseWindShift() uint8 {
	if wmem := sysctl.Numbers("net.ipv4.tcp_wmem"); len(wmem) == 3 && wmem[2] > 0 {
		return uint8(min(max(bits.Len64(uint64(wmem[2]-1)>>16), minWindShift), maxWindShift))
	}
	return minWindShift
}

// hostWritable processes EPOLLOUT: the host's socket has space again.
func (c *conn) hostWritable() {
	nxt, adv := c.rcv.nxt, c.rcv.adv
	if len(c.rcv.backlog) > 0 && c.hostError == hostOK {
		if c.writeBacklog(); c.fd < 0 {
			return
		}
	}
	c.advanceWindow()
	if c.rcv.nxt != nxt || c.rcv.adv != adv {
		c.sendAck()
	}
}

// sendWindowUpdate sends the guest a window update, if the window can grow.
func (c *conn) sendWindowUpdate() {
	adv := c.rcv.adv
	if c.advanceWindow(); c.rcv.adv != adv {
		c.sendAck()
	}
}

// advanceWindow moves the right edge of the receive window to the right, as far as the host's socket has space.
func (c *conn) advanceWindow() {
	if c.state.finReceived() || c.hostError != hostOK || len(c.rcv.backlog) > 0 {
		return
	}
	if s, err := room.ReadSnapshot(c.fd); err == nil {
		c.advanceWindowTo(s)
	}
}

// advanceWindowTo is advanceWindow with a snapshot of the host's socket.
func (c *conn) advanceWindowTo(s room.Snapshot) {
	c.rcv.armed = false
	f := c.g.config.Formula
	polls := f == nil || f.Polls
	if polls && (s.Arming() || s.NotSentLowat > 0 && 2*s.Unsent >= s.NotSentLowat) {
		// isWritable requests EPOLLOUT, as room.Arm does. A socket that has become writable since the snapshot reports no
		// event, and its snapshot is out of date.
		if c.rcv.armed = !isWritable(c.fd); !c.rcv.armed {
			var err error
			if s, err = room.ReadSnapshot(c.fd); err != nil {
				return
			}
		}
	}
	if f != nil && f.Space != nil {
		c.openWindow(s, f.Space(s))
		return
	}
	safe := c.g.config.Kernel.Estimate(s, c.rcv.recentWrite, &c.rcv.tracker).Safe
	if polls && !c.rcv.armed {
		// A writable socket accepts one whole segment, and no later event would report more space.
		safe = max(safe, int(c.rcv.mss))
	}
	c.openWindow(s, safe)
}

// openWindow moves the right edge of the receive window to the right, if the host's socket accepts space bytes more.
func (c *conn) openWindow(s room.Snapshot, space int) {
	space = c.g.memory.limitWindow(c, s.Queued, space)
	shift := c.rcvWindShift()
	wnd := min(space, 65535<<shift)
	// Round down to the unit of the window scale, so that setWindow does not round up.
	if whole := wnd &^ (1<<shift - 1); whole >= int(c.rcv.mss) {
		wnd = whole
	}
	gain := int(int32(c.rcv.nxt + uint32(wnd) - c.rcv.adv))
	// Silly-window avoidance (RFC 9293, section 3.8.6.2.2) until EPOLLOUT.
	if gain > 0 && (!c.rcv.armed || gain >= min(s.SendBuffer/8, packet.MaxSize)) {
		c.rcv.adv += uint32(gain)
	}
	c.rcv.lastWindow = c.rcv.wnd()
}

// rcvWindShift returns Rcv.Wind.Shift (RFC 7323, section 2.2).
func (c *conn) rcvWindShift() uint8 {
	if !c.windowScaling {
		return 0
	}
	return c.g.windShift
}
