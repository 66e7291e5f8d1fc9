// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"

	"golang.org/x/sys/unix"
)

// outputBudget is how many packets a connection sends in a turn.
const outputBudget = 8

// output sends to the guest what the socket has, as far as its window goes.
func (c *conn) output() {
	if c.state != established {
		return
	}
	for range outputBudget {
		if c.snd.finSent || c.snd.drained {
			return
		}
		free := int(int32(c.snd.una + c.snd.wnd - c.snd.nxt))
		// A window that opens by crumbs is let open further, while something is under way.
		if c.snd.blocked = free <= 0 || c.snd.una != c.snd.nxt && free < min(int(c.snd.mss), defaultMSS4); c.snd.blocked {
			if c.snd.una == c.snd.nxt {
				c.startRetransmitTimer() // to probe its window
			}
			return
		}
		a := c.newSegment(c.snd.nxt, flagACK|flagPSH)
		headers := a.headers()
		n, err := c.peekUnsent(c.g.writeBuffer[headers : headers+min(free, c.maxPayload(headers))])
		switch {
		case errors.Is(err, unix.EAGAIN):
			c.snd.drained = true
			return
		case err != nil, n == 0 && c.hostErrorRead:
			c.abort()
			return
		case n == 0:
			c.snd.finSent = true
			a.flags = flagACK | flagFIN
			c.transmit(&a, nil)
			c.snd.nxt++
			c.startRetransmitTimer()
			if c.hostFailed {
				c.abort()
			}
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

// maxPayload is the largest payload of a packet to the guest: of whole segments.
func (c *conn) maxPayload(headers int) int {
	most := maxPacket - 1 - (headers - vnetHeader)
	return most - most%int(c.snd.mss)
}

// peekUnsent reads what the socket has behind what was sent, and leaves it there.
func (c *conn) peekUnsent(p []byte) (int, error) {
	if c.snd.peekOffset {
		return receive(c.fd, p, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	}
	return receiveBehind(c.fd, c.snd.unconsumed+int(c.snd.nxt-c.snd.una), p)
}

// consume takes what the guest has acknowledged out of the socket. It is false if that
// has less.
func (c *conn) consume() bool {
	for c.snd.unconsumed > 0 { // an urgent mark splits it
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

// acknowledge tells the guest what the socket has taken, and how much more it takes.
func (c *conn) acknowledge() {
	c.advanceWindow()
	c.sendAck()
}

// sendAck sends the guest the state of the other direction.
func (c *conn) sendAck() { a := c.newSegment(c.snd.nxt, flagACK); c.transmit(&a, nil) }

// newSegment is one to the guest.
func (c *conn) newSegment(seq uint32, flags uint8) outSegment {
	return outSegment{from: c.flow.remote, to: c.flow.guest, seq: seq, ack: c.rcv.nxt, flags: flags, mss: c.snd.mss}
}

// transmit sends a segment with what the guest is to know of the other direction. The
// payload, if any, stands behind the headers in the gateway's buffer.
func (c *conn) transmit(a *outSegment, payload []byte) {
	headers := a.headers()
	b := c.g.writeBuffer[:headers+len(payload)]
	var own [maxHeaders]byte
	if payload == nil {
		b = own[:headers]
	}
	if a.flags&flagSYN == 0 {
		window := c.rcv.edge - c.rcv.nxt
		if before(c.rcv.edge, c.rcv.nxt) {
			window = 0
		}
		shift := c.rcvWindShift()
		unit := uint32(1) << shift
		if (c.rcv.armed || c.rcv.moreFollows) && !c.rcv.ackAll && !c.rcv.finPassed {
			// Rounded up, the window would move the edge further by each segment, and the
			// socket has no room for that. What is too much for a whole number is
			// acknowledged with what follows, when there is room, or if it comes again.
			over := -window % unit
			a.ack, window = a.ack-over, window+over
		}
		// Rounded up, as the kernel does it (tcp_select_window): an edge is not taken back.
		told := min((window+unit-1)>>shift, 65535)
		a.window = uint16(told)
		if edge := a.ack + told<<shift; before(c.rcv.edge, edge) {
			c.rcv.edge = edge
		}
		c.rcv.ackAll = false
	}
	a.write(b, len(payload))
	c.g.send(b)
}
