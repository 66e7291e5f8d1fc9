// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/packet"
)

// outputBudget is the maximum number of packets that a connection sends in a turn.
const outputBudget = 8

// output sends the data of the receive queue to the guest, up to SND.WND and outputBudget, and a FIN at the end of the data.
func (c *conn) output() {
	if c.state != established && c.state != closeWait {
		return
	}
	for range outputBudget {
		if c.snd.drained {
			return
		}
		usable := int(int32(c.snd.una + c.snd.wnd - c.snd.nxt))
		// Silly-window avoidance (RFC 9293, section 3.8.6.2.1): while data are in flight, a small window is not used.
		if c.snd.blocked = usable <= 0 || c.snd.una != c.snd.nxt && usable < min(int(c.snd.mss), defaultMSS4); c.snd.blocked {
			if c.snd.una == c.snd.nxt {
				c.startRetransmitTimer() // for zero-window probes
			}
			return
		}
		a := c.newSegment(c.snd.nxt, packet.ACK|packet.PSH)
		headers := a.Headers()
		asked := min(usable, c.maxPayload(headers))
		n, err := c.peekUnsent(c.g.writeBuffer[headers : headers+asked])
		switch {
		case errors.Is(err, unix.EAGAIN):
			c.snd.drained = true
			return
		case err != nil, n == 0 && c.hostError == hostErrorRead:
			c.abort()
			return
		case n == 0:
			c.sendFIN(&a)
			return
		}
		c.transmit(&a, c.g.writeBuffer[headers:headers+n])
		idle := c.snd.una == c.snd.nxt
		c.snd.nxt += uint32(n)
		if idle {
			c.startRetransmitTimer()
		}
		c.responded()
		// recv(2) returns less than asked for at the end of the queue and at an urgent mark. An event follows when the end moves.
		if n < asked && !c.snd.readToEnd {
			c.snd.drained = true
			return
		}
	}
	if !c.queued.output {
		c.queued.output = true
		c.g.outputQueue = append(c.g.outputQueue, c)
	}
}

// sendFIN sends a FIN after the last byte of the host's socket. If the socket has an error, a RST follows.
func (c *conn) sendFIN(a *packet.Outgoing) {
	if c.state == closeWait {
		c.state = lastAck
	} else {
		c.state = finWait1
	}
	a.Flags = packet.ACK | packet.FIN
	c.transmit(a, nil)
	c.snd.nxt++
	c.startRetransmitTimer()
	if c.hostError != hostOK {
		c.abort()
	}
}

// maxPayload returns the largest payload of a packet to the guest, in bytes: a multiple of SMSS in one packet (GSO).
func (c *conn) maxPayload(headers int) int {
	most := packet.MaxSize - 1 - (headers - packet.VnetHeader)
	return most - most%int(c.snd.mss)
}

// peekUnsent copies data of the receive queue from SND.NXT on and leaves them in the queue. At the end of the data n is 0.
func (c *conn) peekUnsent(p []byte) (n int, err error) {
	if c.snd.peekOffset {
		return receive(c.fd, p, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	}
	return peekAt(c.fd, c.snd.unconsumed+int(c.snd.nxt-c.snd.una), p)
}

// consume removes the data that the guest has acknowledged from the receive queue. It returns false if recv(2) fails or the
// queue has fewer bytes.
func (c *conn) consume() bool {
	for c.snd.unconsumed > 0 { // recv(2) stops at an urgent mark
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(c.fd), 0, uintptr(c.snd.unconsumed), unix.MSG_TRUNC|unix.MSG_DONTWAIT, 0, 0)
		switch {
		case errno == unix.EINTR:
		case errno != 0 || n == 0:
			return false
		default:
			c.snd.unconsumed -= int(n)
		}
	}
	return true
}

// acknowledge recomputes the window and sends an acknowledgement.
func (c *conn) acknowledge() {
	c.advanceWindow()
	c.sendAck()
}

// sendAck sends an acknowledgement without payload.
func (c *conn) sendAck() { a := c.newSegment(c.snd.nxt, packet.ACK); c.transmit(&a, nil) }

// newSegment returns a segment to the guest with SEG.ACK = RCV.NXT.
func (c *conn) newSegment(seq uint32, flags uint8) packet.Outgoing {
	return packet.Outgoing{From: c.endpoints.remote, To: c.endpoints.guest, Seq: seq, Ack: c.rcv.nxt, Flags: flags, MSS: c.snd.mss}
}

// transmit sets the window of a segment and sends it. The payload, if any, follows the headers in the gateway's write buffer.
func (c *conn) transmit(a *packet.Outgoing, payload []byte) {
	headers := a.Headers()
	b := c.g.writeBuffer[:headers+len(payload)]
	var own [packet.MaxHeaders]byte
	if payload == nil {
		b = own[:headers]
	}
	if a.Flags&packet.SYN == 0 {
		c.setWindow(a)
		c.rcv.acked = a.Ack == c.rcv.nxt
	}
	a.Write(b, len(payload))
	c.g.send(b)
}

// setWindow sets SEG.WND. Like Linux (tcp_select_window), setWindow rounds the window up to the unit of the window scale,
// because rounding down would move the right edge left. Rounding up can move the edge right with every segment. While the
// socket has no space for that, SEG.ACK is reduced by less than one unit instead. A later segment acknowledges these bytes;
// if the guest retransmits them, the next segment does.
func (c *conn) setWindow(a *packet.Outgoing) {
	wnd := c.rcv.wnd()
	shift := c.rcvWindShift()
	unit := uint32(1) << shift
	if (c.rcv.armed || c.rcv.moreFollows) && !c.rcv.exactAck && !c.state.finReceived() {
		excess := -wnd % unit
		a.Ack, wnd = a.Ack-excess, wnd+excess
	}
	field := min((wnd+unit-1)>>shift, 65535)
	a.Window = uint16(field)
	if adv := a.Ack + field<<shift; packet.Before(c.rcv.adv, adv) {
		c.rcv.adv = adv
	}
	c.rcv.exactAck = false
}
