// SPDX-License-Identifier: Apache-2.0

package gateway

// ended tells whether both ends have ended, and know it.
func (c *conn) ended() bool { return c.snd.finSent && c.snd.una == c.snd.nxt && c.rcv.finPassed }

// abort ends the connection at both ends, after an error of the socket or a guest that
// is gone.
func (c *conn) abort() {
	c.g.count(Reset)
	c.resetGuest()
	c.resetHost()
	c.remove()
}

// resetGuest ends the connection at the guest, whose socket gives its memory back.
func (c *conn) resetGuest() {
	if c.state == synPending {
		return
	}
	a := c.newSegment(c.snd.nxt, flagRST|flagACK)
	if c.state == synSent {
		a.flags = flagRST
	}
	c.transmit(&a, nil)
}

// resetByGuest ends the connection after the guest's RST. What it sent before goes first.
func (c *conn) resetByGuest() {
	if c.writeBatch(); c.fd < 0 {
		return
	}
	c.g.count(Reset)
	c.resetHost()
	c.remove()
}

// resetHost has the host's peer get an RST when the socket is closed.
func (c *conn) resetHost() { resetOnClose(c.fd) }

// release gives back what the connection holds of the host.
func (c *conn) release() {
	c.g.memory.forget(c)
	c.consume() // what is left there would be answered with an RST
	c.g.closeFD(c.fd)
	c.releaseBatch()
	c.dropBacklog()
	c.fd = -1
	if c.outgoing {
		c.g.outgoing--
	}
}

// remove forgets the connection.
func (c *conn) remove() {
	c.g.timers.stop(&c.timer)
	delete(c.g.conns, c.flow)
	if c.fd >= 0 {
		c.release()
	}
}
