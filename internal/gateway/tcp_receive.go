// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// maxBacklog and maxSpilled bound what is kept of segments that sockets did not take, in
	// bytes: of a connection, and of all together.
	maxBacklog  = 256 << 10
	maxBacklogs = 16 << 20
)

// segmentBatch is payload that a socket is given in one call. It stands where it was read.
type segmentBatch struct {
	parts []unix.Iovec
	bytes int
}

// newBatch is an empty one.
func (g *Gateway) newBatch() *segmentBatch {
	last := len(g.freeBatches) - 1
	if last < 0 {
		return &segmentBatch{parts: make([]unix.Iovec, 0, tunBudget)}
	}
	b := g.freeBatches[last]
	g.freeBatches = g.freeBatches[:last]
	return b
}

func (b *segmentBatch) add(payload []byte) {
	part := unix.Iovec{Base: unsafe.SliceData(payload)}
	part.SetLen(len(payload))
	b.parts = append(b.parts, part)
	b.bytes += len(payload)
}

// send gives it to a socket, which neither waits nor raises SIGPIPE.
func (b *segmentBatch) send(fd int) (int, error) {
	if len(b.parts) == 1 {
		return sendTo(fd, unsafe.Slice(b.parts[0].Base, b.bytes))
	}
	h := unix.Msghdr{Iov: &b.parts[0]}
	h.SetIovlen(len(b.parts))
	return sendMessage(fd, &h)
}

// addToBatch has payload given to the socket at the end of the turn. If the socket did not take
// all before it, it is kept, up to a bound: then it is false, and is to be sent again.
func (c *conn) addToBatch(payload []byte) bool {
	if len(c.rcv.backlog) > 0 {
		return c.addToBacklog(payload)
	}
	c.rcv.recentWrite += (len(payload) - c.rcv.recentWrite) / 4
	if c.rcv.batch == nil {
		c.rcv.batch = c.g.newBatch()
		c.scheduleFlush()
	}
	c.rcv.batch.add(payload)
	return true
}

// scheduleAck has what came acknowledged at the end of the turn.
func (c *conn) scheduleAck() {
	if !c.queued.ack {
		c.queued.ack = true
		c.g.ackQueue = append(c.g.ackQueue, c)
	}
}

// scheduleFlush has conclude called at the end of the turn.
func (c *conn) scheduleFlush() {
	if !c.queued.flush {
		c.queued.flush = true
		c.g.flushQueue = append(c.g.flushQueue, c)
	}
}

// flush does what was left for the end of the turn.
func (c *conn) flush() {
	c.queued.flush = false
	c.writeBatch()
	if c.fd >= 0 && !c.consume() {
		c.abort()
	}
}

// writeBatch gives the socket what came in this turn. What it does not take is kept.
func (c *conn) writeBatch() {
	b := c.rcv.batch
	if b == nil {
		return
	}
	n, err := b.send(c.fd)
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		c.sendFailed()
		return
	}
	c.rcv.nxt += uint32(n)
	c.rcv.tracker.Wrote(n, b.bytes)
	if n < b.bytes {
		c.g.count(PartialSend)
		for _, part := range b.parts {
			payload := unsafe.Slice(part.Base, part.Len)
			taken := min(n, len(payload))
			if n -= taken; !c.addToBacklog(payload[taken:]) {
				c.rcv.finReceived = false // what is before its FIN comes again
				break
			}
		}
	}
	c.releaseBatch()
	c.passFIN()
}

// releaseBatch gives back what held the payload of this turn.
func (c *conn) releaseBatch() {
	if b := c.rcv.batch; b != nil {
		clear(b.parts)
		b.parts, b.bytes = b.parts[:0], 0
		c.rcv.batch, c.g.freeBatches = nil, append(c.g.freeBatches, b)
	}
}

// addToBacklog keeps what the socket did not take; false if that is too much.
func (c *conn) addToBacklog(payload []byte) bool {
	if len(c.rcv.backlog)+len(payload) > maxBacklog || c.g.backlog+len(payload) > maxBacklogs {
		return false
	}
	c.rcv.backlog = append(c.rcv.backlog, payload...)
	c.g.backlog += len(payload)
	return true
}

// writeBacklog gives the socket what it did not take before.
func (c *conn) writeBacklog() {
	n, err := sendTo(c.fd, c.rcv.backlog)
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		c.sendFailed()
		return
	}
	c.rcv.nxt += uint32(n)
	c.g.backlog -= n
	c.rcv.tracker.Wrote(n, len(c.rcv.backlog))
	if c.rcv.backlog = c.rcv.backlog[n:]; len(c.rcv.backlog) == 0 {
		c.rcv.backlog = nil
		c.passFIN()
	}
}

func (c *conn) dropBacklog() {
	c.g.backlog -= len(c.rcv.backlog)
	c.rcv.backlog = nil
}

// passFIN passes the guest's FIN on, when all before it is in the socket.
func (c *conn) passFIN() {
	if !c.rcv.finReceived || c.rcv.finPassed || c.rcv.batch != nil || len(c.rcv.backlog) > 0 {
		return
	}
	c.rcv.finPassed = true
	c.rcv.nxt++
	if err := unix.Shutdown(c.fd, unix.SHUT_WR); err != nil {
		c.sendFailed()
		return
	}
	if !c.ended() {
		c.scheduleAck()
		return
	}
	c.sendAck()
	c.g.count(Closed)
	c.release()
	c.state = timeWait
	c.g.timers.set(&c.timer, c.g.now.Add(timeWaitTimeout))
}

// sendFailed: a send has met the socket's error. What it has received before is still for the
// guest.
func (c *conn) sendFailed() {
	c.hostFailed, c.hostErrorRead, c.snd.drained = true, true, false
	c.releaseBatch()
	c.dropBacklog()
	if c.snd.finSent {
		c.abort()
		return
	}
	c.output()
}
