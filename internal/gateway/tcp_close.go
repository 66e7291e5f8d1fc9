// SPDX-License-Identifier: Apache-2.0

package gateway

// ended tells whether both ends have ended, and know it.
func (c *conn) ended() bool { return c.finSent && c.una == c.nxt && c.shut }

// abort ends the connection at both ends, after an error of the socket or a guest that
// is gone.
func (c *conn) abort() {
	c.g.count(Reset)
	c.resetGuest()
	c.resetSocket()
	c.drop()
}

// resetGuest ends the connection at the guest, whose socket gives its memory back.
func (c *conn) resetGuest() {
	if c.state == connecting {
		return
	}
	a := c.segment(c.nxt, flagRST|flagACK)
	if c.state == calling {
		a.flags = flagRST
	}
	c.transmit(&a, nil)
}

// abandon ends the connection after the guest's RST. What it sent before goes first.
func (c *conn) abandon() {
	if c.push(); c.fd < 0 {
		return
	}
	c.g.count(Reset)
	c.resetSocket()
	c.drop()
}

// resetSocket has the host's peer get an RST when the socket is closed.
func (c *conn) resetSocket() { resetOnClose(c.fd) }

// release gives back what the connection holds of the host.
func (c *conn) release() {
	c.g.memory.forget(c)
	c.discard() // what is left there would be answered with an RST
	c.g.forget(c.fd)
	c.unhold()
	c.unspill()
	c.fd = -1
	if c.ours {
		c.g.outgoing--
	}
}

// drop forgets the connection.
func (c *conn) drop() {
	c.g.timers.stop(&c.timer)
	delete(c.g.conns, c.flow)
	if c.fd >= 0 {
		c.release()
	}
}
