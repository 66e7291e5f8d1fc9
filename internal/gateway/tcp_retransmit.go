// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/packet"
)

// retransmit retransmits the first unacknowledged packet: SYN, SYN-ACK, payload, or FIN.
func (c *conn) retransmit() {
	c.g.count(Retransmitted)
	if c.state < established {
		c.resendSYN()
		return
	}
	if !c.consume() {
		c.abort()
		return
	}
	unacked := int(c.snd.nxt - c.snd.una)
	if c.state.finSent() {
		unacked-- // the FIN has a sequence number but no byte in the socket
	}
	a := c.newSegment(c.snd.una, packet.ACK|packet.PSH)
	c.rtx.highRxt = c.snd.nxt
	if unacked == 0 {
		a.Flags = packet.ACK | packet.FIN
		c.transmit(&a, nil)
		return
	}
	headers := a.Headers()
	// If the guest has shrunk its window, one segment probes the window.
	n := min(unacked, c.maxPayload(headers), int(max(c.snd.wnd, uint32(c.snd.mss))))
	n, err := c.peekUnacked(c.g.writeBuffer[headers:headers+n], unacked)
	if err != nil || n == 0 {
		c.abort()
		return
	}
	if c.state.finSent() && n == unacked {
		a.Flags |= packet.FIN
	}
	c.rtx.highRxt = c.snd.una + uint32(n)
	c.transmit(&a, c.g.writeBuffer[headers:headers+n])
}

// peekUnacked copies data from SND.UNA on, the head of the receive queue, and restores the peek offset to SND.NXT.
func (c *conn) peekUnacked(p []byte, unacked int) (n int, err error) {
	if !c.snd.peekOffset {
		return receive(c.fd, p, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	}
	if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, 0); err != nil {
		return 0, err
	}
	if n, err = receive(c.fd, p, unix.MSG_PEEK|unix.MSG_DONTWAIT); err != nil {
		return 0, err
	}
	return n, unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_PEEK_OFF, unacked)
}
