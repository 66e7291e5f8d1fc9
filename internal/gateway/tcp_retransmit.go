// SPDX-License-Identifier: Apache-2.0

package gateway

import "golang.org/x/sys/unix"

// retransmit sends the first packet again that the guest has not acknowledged.
func (c *conn) retransmit() {
	c.g.count(Retransmitted)
	if c.state != established {
		c.sendSYN()
		return
	}
	if !c.consume() {
		c.abort()
		return
	}
	sent := int(c.snd.nxt - c.snd.una)
	if c.snd.finSent {
		sent--
	}
	a := c.newSegment(c.snd.una, flagACK|flagPSH)
	c.rtx.highRxt = c.snd.nxt
	if sent == 0 {
		a.flags = flagACK | flagFIN
		c.transmit(&a, nil)
		return
	}
	headers := a.headers()
	// A guest that took back its window gets one segment, which probes it.
	n := min(sent, c.maxPayload(headers), int(max(c.snd.wnd, uint32(c.snd.mss))))
	n, err := c.peekUnacked(c.g.writeBuffer[headers:headers+n], sent)
	if err != nil || n == 0 {
		c.abort()
		return
	}
	if c.snd.finSent && n == sent {
		a.flags |= flagFIN
	}
	c.rtx.highRxt = c.snd.una + uint32(n)
	c.transmit(&a, c.g.writeBuffer[headers:headers+n])
}

// peekUnacked reads the first of what was sent.
func (c *conn) peekUnacked(p []byte, sent int) (n int, err error) {
	if !c.snd.peekOffset {
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
