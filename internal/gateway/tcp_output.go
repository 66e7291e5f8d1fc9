// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"

	"golang.org/x/sys/unix"
)

// outputBudget is how many packets a connection sends in a turn.
const outputBudget = 8

// output sends the guest what the host's socket has received, as far as SND.WND allows, and a FIN at the end of the data.
func (c *conn) output() {
	if c.state != established && c.state != closeWait {
		return
	}
	for range outputBudget {
		if c.snd.drained {
			return
		}
		usable := int(int32(c.snd.una + c.snd.wnd - c.snd.nxt))
		// While data are in flight, a small window is left to grow (silly-window avoidance, RFC 9293, section 3.8.6.2.1).
		if c.snd.blocked = usable <= 0 || c.snd.una != c.snd.nxt && usable < min(int(c.snd.mss), defaultMSS4); c.snd.blocked {
			if c.snd.una == c.snd.nxt {
				c.startRetransmitTimer() // which probes the window
			}
			return
		}
		a := c.newSegment(c.snd.nxt, flagACK|flagPSH)
		headers := a.headers()
		n, err := c.peekUnsent(c.g.writeBuffer[headers : headers+min(usable, c.maxPayload(headers))])
		switch {
		case errors.Is(err, unix.EAGAIN):
			c.snd.drained = true
			return
		case err != nil, n == 0 && c.host == hostErrorRead:
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
	}
	if !c.queued.output {
		c.queued.output = true
		c.g.outputQueue = append(c.g.outputQueue, c)
	}
}

// sendFIN sends a FIN: the host's socket is at the end of its data. If the socket has an error, a RST follows.
func (c *conn) sendFIN(a *outSegment) {
	if c.state == closeWait {
		c.state = lastAck
	} else {
		c.state = finWait1
	}
	a.flags = flagACK | flagFIN
	c.transmit(a, nil)
	c.snd.nxt++
	c.startRetransmitTimer()
	if c.host != hostOK {
		c.abort()
	}
}

// maxPayload is the largest payload of a packet to the guest, bytes: whole segments, which the guest's kernel sees as one
// packet (GSO).
func (c *conn) maxPayload(headers int) int {
	most := maxPacket - 1 - (headers - vnetHeader)
	return most - most%int(c.snd.mss)
}

// peekUnsent reads what is behind SND.NXT in the receive queue, without removing it. At the end of the data n is 0.
func (c *conn) peekUnsent(p []byte) (n int, err error) {
	if c.snd.peekOffset {
		return receive(c.fd, p, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	}
	return receiveBehind(c.fd, c.snd.unconsumed+int(c.snd.nxt-c.snd.una), p)
}

// consume removes what the guest has acknowledged from the receive queue. It returns false if the queue has less, which is an
// error of the host's socket.
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

// acknowledge sends RCV.NXT with the window computed anew.
func (c *conn) acknowledge() {
	c.advanceWindow()
	c.sendAck()
}

// sendAck sends an acknowledgement without payload.
func (c *conn) sendAck() { a := c.newSegment(c.snd.nxt, flagACK); c.transmit(&a, nil) }

// newSegment returns a segment to the guest that acknowledges RCV.NXT.
func (c *conn) newSegment(seq uint32, flags uint8) outSegment {
	return outSegment{from: c.flow.remote, to: c.flow.guest, seq: seq, ack: c.rcv.nxt, flags: flags, mss: c.snd.mss}
}

// transmit sends a segment, with the window. The payload, if any, is behind the headers in the gateway's write buffer.
func (c *conn) transmit(a *outSegment, payload []byte) {
	headers := a.headers()
	b := c.g.writeBuffer[:headers+len(payload)]
	var own [maxHeaders]byte
	if payload == nil {
		b = own[:headers]
	}
	if a.flags&flagSYN == 0 {
		c.setWindow(a)
	}
	a.write(b, len(payload))
	c.g.send(b)
}

// setWindow sets SEG.WND. The window is rounded up to the unit of its scale, as Linux does (tcp_select_window): rounded down,
// the right edge would move left. Rounded up, the edge moves right with every segment. While the socket has no space for
// that, up to a unit less is acknowledged instead; the rest follows with a later segment, or at once if the guest repeats it.
func (c *conn) setWindow(a *outSegment) {
	wnd := c.rcv.wnd()
	shift := c.rcvWindShift()
	unit := uint32(1) << shift
	if (c.rcv.armed || c.rcv.moreFollows) && !c.rcv.ackAll && !c.state.finReceived() {
		excess := -wnd % unit
		a.ack, wnd = a.ack-excess, wnd+excess
	}
	field := min((wnd+unit-1)>>shift, 65535)
	a.window = uint16(field)
	if edge := a.ack + field<<shift; before(c.rcv.edge, edge) {
		c.rcv.edge = edge
	}
	c.rcv.ackAll = false
}
