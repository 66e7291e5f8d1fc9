// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	maxBacklog  = 256 << 10 // bytes of a connection's backlog
	maxBacklogs = 16 << 20  // bytes of all backlogs
)

// segmentBatch is the payload of a connection's segments of one turn, which one system call writes to the host's socket. The
// payload is not copied: the parts point into the gateway's read buffer, which is overwritten in the next turn.
type segmentBatch struct {
	parts []unix.Iovec
	bytes int
}

// newBatch returns an empty batch. Batches are reused, so that the loop does not allocate.
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

// send writes the batch to a socket, without blocking and without SIGPIPE. It returns how many bytes the socket accepted.
func (b *segmentBatch) send(fd int) (int, error) {
	if len(b.parts) == 1 {
		return sendTo(fd, unsafe.Slice(b.parts[0].Base, b.bytes))
	}
	h := unix.Msghdr{Iov: &b.parts[0]}
	h.SetIovlen(len(b.parts))
	return sendMessage(fd, &h)
}

// addToBatch adds payload to what is written at the end of the turn, or to the backlog if there is one. It returns false if
// the backlog is full: then the payload is dropped, and the guest sends it again.
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

// scheduleAck has an acknowledgement sent at the end of the turn.
func (c *conn) scheduleAck() {
	if !c.queued.ack {
		c.queued.ack = true
		c.g.ackQueue = append(c.g.ackQueue, c)
	}
}

// scheduleFlush has flush called at the end of the turn.
func (c *conn) scheduleFlush() {
	if !c.queued.flush {
		c.queued.flush = true
		c.g.flushQueue = append(c.g.flushQueue, c)
	}
}

// flush writes the batch to the host's socket, and removes what the guest acknowledged from the receive queue.
func (c *conn) flush() {
	c.queued.flush = false
	c.writeBatch()
	if c.fd >= 0 && !c.consume() {
		c.abort()
	}
}

// writeBatch writes the batch to the host's socket. What the socket does not accept becomes the backlog.
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
			accepted := min(n, len(payload))
			if n -= accepted; !c.addToBacklog(payload[accepted:]) {
				c.rcv.finPending = false // the guest sends it again, with the payload before it
				break
			}
		}
	}
	c.releaseBatch()
	c.passFIN()
}

// releaseBatch returns the batch to the free ones.
func (c *conn) releaseBatch() {
	if b := c.rcv.batch; b != nil {
		clear(b.parts)
		b.parts, b.bytes = b.parts[:0], 0
		c.rcv.batch, c.g.freeBatches = nil, append(c.g.freeBatches, b)
	}
}

// addToBacklog copies payload that the socket did not accept. It returns false if the backlog is full.
func (c *conn) addToBacklog(payload []byte) bool {
	if len(c.rcv.backlog)+len(payload) > maxBacklog || c.g.backlog+len(payload) > maxBacklogs {
		return false
	}
	c.rcv.backlog = append(c.rcv.backlog, payload...)
	c.g.backlog += len(payload)
	return true
}

// writeBacklog writes the backlog to the host's socket, as far as the socket accepts it.
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

// sendFailed processes an error that send(2) returned. What the socket received before the error still goes to the guest.
func (c *conn) sendFailed() {
	c.host, c.snd.drained = hostErrorRead, false
	c.releaseBatch()
	c.dropBacklog()
	if c.state.finSent() {
		c.abort()
		return
	}
	c.output()
}
