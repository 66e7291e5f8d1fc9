// SPDX-License-Identifier: Apache-2.0

package gateway

import "golang.org/x/sys/unix"

// resend sends the first packet again that the guest has not acknowledged.
func (c *conn) resend() {
	c.g.count(Retransmitted)
	if c.state != open {
		c.answer()
		return
	}
	if !c.discard() {
		c.abort()
		return
	}
	sent := int(c.nxt - c.una)
	if c.finSent {
		sent--
	}
	a := c.segment(c.una, flagACK|flagPSH)
	c.again = c.nxt
	if sent == 0 {
		a.flags = flagACK | flagFIN
		c.transmit(&a, nil)
		return
	}
	headers := a.headers()
	// A guest that took back its window gets one segment, which probes it.
	n := min(sent, c.packet(headers), int(max(c.window, uint32(c.mss))))
	n, err := c.peekAgain(c.g.buffer[headers:headers+n], sent)
	if err != nil || n == 0 {
		c.abort()
		return
	}
	if c.finSent && n == sent {
		a.flags |= flagFIN
	}
	c.again = c.una + uint32(n)
	c.transmit(&a, c.g.buffer[headers:headers+n])
}

// peekAgain reads the first of what was sent.
func (c *conn) peekAgain(p []byte, sent int) (n int, err error) {
	if !c.peeks {
		return receive(c.fd, p, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	}
	if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, 0); err != nil {
		return 0, err
	}
	if n, err = receive(c.fd, p, unix.MSG_PEEK|unix.MSG_DONTWAIT); err != nil {
		return 0, err
	}
	return n, unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, sent)
}
