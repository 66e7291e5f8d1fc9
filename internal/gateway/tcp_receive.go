// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// maxSpill and maxSpilled bound what is kept of segments that sockets did not take, in
	// bytes: of a connection, and of all together.
	maxSpill   = 256 << 10
	maxSpilled = 16 << 20
)

// batch is payload that a socket is given in one call. It stands where it was read.
type batch struct {
	parts []unix.Iovec
	bytes int
}

// batch is an empty one.
func (g *Gateway) batch() *batch {
	last := len(g.batches) - 1
	if last < 0 {
		return &batch{parts: make([]unix.Iovec, 0, tunBudget)}
	}
	b := g.batches[last]
	g.batches = g.batches[:last]
	return b
}

func (b *batch) add(payload []byte) {
	part := unix.Iovec{Base: unsafe.SliceData(payload)}
	part.SetLen(len(payload))
	b.parts = append(b.parts, part)
	b.bytes += len(payload)
}

// send gives it to a socket, which neither waits nor raises SIGPIPE.
func (b *batch) send(fd int) (int, error) {
	if len(b.parts) == 1 {
		return sendTo(fd, unsafe.Slice(b.parts[0].Base, b.bytes))
	}
	h := unix.Msghdr{Iov: &b.parts[0]}
	h.SetIovlen(len(b.parts))
	return sendMessage(fd, &h)
}

// take has payload given to the socket at the end of the turn. If the socket did not take
// all before it, it is kept, up to a bound: then it is false, and is to be sent again.
func (c *conn) take(payload []byte) bool {
	if len(c.spill) > 0 {
		return c.keep(payload)
	}
	c.usual += (len(payload) - c.usual) / 4
	if c.held == nil {
		c.held = c.g.batch()
		c.hold()
	}
	c.held.add(payload)
	return true
}

// mark has what came acknowledged at the end of the turn.
func (c *conn) mark() {
	if !c.dirty {
		c.dirty = true
		c.g.dirty = append(c.g.dirty, c)
	}
}

// hold has conclude called at the end of the turn.
func (c *conn) hold() {
	if !c.holds {
		c.holds = true
		c.g.holding = append(c.g.holding, c)
	}
}

// conclude does what was left for the end of the turn.
func (c *conn) conclude() {
	c.holds = false
	c.push()
	if c.fd >= 0 && !c.discard() {
		c.abort()
	}
}

// push gives the socket what came in this turn. What it does not take is kept.
func (c *conn) push() {
	b := c.held
	if b == nil {
		return
	}
	n, err := b.send(c.fd)
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		c.lose()
		return
	}
	c.rcv += uint32(n)
	c.tracker.Wrote(n, b.bytes)
	if n < b.bytes {
		c.g.count(PartialSend)
		for _, part := range b.parts {
			payload := unsafe.Slice(part.Base, part.Len)
			taken := min(n, len(payload))
			if n -= taken; !c.keep(payload[taken:]) {
				c.guestEnded = false // what is before its FIN comes again
				break
			}
		}
	}
	c.unhold()
	c.finish()
}

// unhold gives back what held the payload of this turn.
func (c *conn) unhold() {
	if b := c.held; b != nil {
		clear(b.parts)
		b.parts, b.bytes = b.parts[:0], 0
		c.held, c.g.batches = nil, append(c.g.batches, b)
	}
}

// keep keeps what the socket did not take; false if that is too much.
func (c *conn) keep(payload []byte) bool {
	if len(c.spill)+len(payload) > maxSpill || c.g.spilled+len(payload) > maxSpilled {
		return false
	}
	c.spill = append(c.spill, payload...)
	c.g.spilled += len(payload)
	return true
}

// flush gives the socket what it did not take before.
func (c *conn) flush() {
	n, err := sendTo(c.fd, c.spill)
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		c.lose()
		return
	}
	c.rcv += uint32(n)
	c.g.spilled -= n
	c.tracker.Wrote(n, len(c.spill))
	if c.spill = c.spill[n:]; len(c.spill) == 0 {
		c.spill = nil
		c.finish()
	}
}

func (c *conn) unspill() {
	c.g.spilled -= len(c.spill)
	c.spill = nil
}

// finish passes the guest's FIN on, when all before it is in the socket.
func (c *conn) finish() {
	if !c.guestEnded || c.shut || c.held != nil || len(c.spill) > 0 {
		return
	}
	c.shut = true
	c.rcv++
	if err := unix.Shutdown(c.fd, unix.SHUT_WR); err != nil {
		c.lose()
		return
	}
	if !c.ended() {
		c.mark()
		return
	}
	c.tell()
	c.g.count(Closed)
	c.release()
	c.state = over
	c.g.timers.set(&c.timer, c.g.now.Add(overTime))
}

// lose: a send has met the socket's error. What it has received before is still for the
// guest.
func (c *conn) lose() {
	c.broken, c.lost, c.drained = true, true, false
	c.unhold()
	c.unspill()
	if c.finSent {
		c.abort()
		return
	}
	c.output()
}
