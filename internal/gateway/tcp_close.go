// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/packet"
)

// forwardFIN shuts down the write side of the host's socket if the guest has sent a FIN and the socket has accepted all
// payload before the FIN.
func (c *conn) forwardFIN() {
	if !c.rcv.finPending || c.rcv.batch != nil || len(c.rcv.backlog) > 0 {
		return
	}
	c.rcv.finPending = false
	c.rcv.nxt++
	switch c.state {
	case established:
		c.state = closeWait
		if c.snd.una == c.snd.nxt && !c.snd.blocked {
			c.startIdleTimer()
		}
	case finWait1:
		c.state = closing
	case finWait2:
		c.state = timeWait
	}
	if err := unix.Shutdown(c.fd, unix.SHUT_WR); err != nil {
		c.sendFailed()
		return
	}
	if c.state != timeWait {
		c.scheduleAck()
		return
	}
	c.sendAck()
	c.g.count(Closed)
	c.closeHost()
	c.g.timers.Set(&c.timer, c.g.now.Add(timeWaitTimeout))
}

// finAcked processes the guest's acknowledgement of the gateway's FIN.
func (c *conn) finAcked() {
	switch c.state {
	case finWait1:
		c.state = finWait2
	case closing, lastAck:
		c.g.count(Closed)
		c.remove()
	}
}

// abort resets both ends, after an error of the host's socket or when the guest no longer responds.
func (c *conn) abort() {
	c.g.count(Reset)
	c.resetGuest()
	resetOnClose(c.fd)
	c.remove()
}

// resetGuest sends a RST to the guest.
func (c *conn) resetGuest() {
	if c.state == synPending {
		return
	}
	a := c.newSegment(c.snd.nxt, packet.RST|packet.ACK)
	if c.state == synSent {
		a.Flags = packet.RST
	}
	c.transmit(&a, nil)
}

// resetByGuest processes the guest's RST. Payload that arrived before it in the same turn is written first.
func (c *conn) resetByGuest() {
	if c.writeBatch(); c.fd < 0 {
		return
	}
	c.g.count(Reset)
	// The reply to a keepalive says that the guest's socket is gone, not that the program has reset the connection: what the guest
	// has sent before its FIN is still delivered.
	if gone := c.state.finReceived() && c.rtx.timeouts > 0; !gone {
		resetOnClose(c.fd)
	}
	c.remove()
}

// remove deletes the connection (CLOSED).
func (c *conn) remove() {
	c.g.timers.Stop(&c.timer)
	delete(c.g.conns, c.endpoints)
	if c.fd >= 0 {
		c.closeHost()
	}
}

// closeHost closes the host's socket and frees the batch, the backlog and the share of memory.
func (c *conn) closeHost() {
	c.g.memory.forget(c)
	c.consume() // close(2) of a socket with unread data sends a RST
	c.g.closeFD(c.fd)
	c.discardBatch()
	c.discardBacklog()
	c.fd = -1
	if c.outgoing {
		c.g.outgoing--
	}
}
