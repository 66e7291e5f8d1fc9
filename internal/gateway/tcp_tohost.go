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

// segmentBatch is the payload that a connection received in one turn; one system call writes the batch to the host's socket.
// The parts point into the gateway's read buffer, which the next turn overwrites.
type segmentBatch struct {
	parts []unix.Iovec
	bytes int
}

// addPayload adds payload to the batch, or to the backlog if there is one. It returns false if the backlog is full: the
// payload is then dropped, and the guest retransmits.
func (c *conn) addPayload(payload []byte) bool {
	if len(c.rcv.backlog) > 0 {
		return c.addToBacklog(payload)
	}
	c.rcv.recentWrite += (len(payload) - c.rcv.recentWrite) / 4
	c.rcv.received = c.g.now
	if c.rcv.batch == nil {
		c.rcv.batch = c.g.newBatch()
		c.scheduleFlush()
	}
	c.rcv.batch.add(payload)
	return true
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

// scheduleAck schedules an acknowledgement for the end of the turn.
func (c *conn) scheduleAck() {
	if !c.queued.ack {
		c.queued.ack = true
		c.g.ackQueue = append(c.g.ackQueue, c)
	}
}

// scheduleFlush schedules flush, which runs when the TUN's packets of the turn are processed.
func (c *conn) scheduleFlush() {
	if !c.queued.flush {
		c.queued.flush = true
		c.g.flushQueue = append(c.g.flushQueue, c)
	}
}

// flush writes the batch to the host's socket and consumes acknowledged data of the receive queue.
func (c *conn) flush() {
	c.queued.flush = false
	c.writeBatch()
	if c.fd >= 0 && !c.consume() {
		c.abort()
	}
}

// writeBatch writes the batch to the host's socket. The payload that the socket does not accept becomes the backlog.
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
	c.rcv.acked, c.rcv.request = false, b.bytes <= maxRequest && !c.rcv.moreFollows
	if n < b.bytes {
		c.g.count(PartialSend)
		for _, part := range b.parts {
			payload := unsafe.Slice(part.Base, part.Len)
			accepted := min(n, len(payload))
			if n -= accepted; !c.addToBacklog(payload[accepted:]) {
				c.rcv.finPending = false // the guest retransmits the FIN with the payload before it
				break
			}
		}
	}
	c.discardBatch()
	c.forwardFIN()
}

// send writes the batch to a socket, without blocking and without SIGPIPE, and returns the number of bytes accepted.
func (b *segmentBatch) send(fd int) (int, error) {
	if len(b.parts) == 1 {
		return sendTo(fd, unsafe.Slice(b.parts[0].Base, b.bytes))
	}
	h := unix.Msghdr{Iov: &b.parts[0]}
	h.SetIovlen(len(b.parts))
	return sendMessage(fd, &h)
}

// addToBacklog copies payload to the backlog. It returns false if the backlog is full.
func (c *conn) addToBacklog(payload []byte) bool {
	if len(c.rcv.backlog)+len(payload) > maxBacklog || c.g.backlog+len(payload) > maxBacklogs {
		return false
	}
	c.rcv.backlog = append(c.rcv.backlog, payload...)
	c.g.backlog += len(payload)
	return true
}

// writeBacklog writes as much of the backlog as the host's socket accepts.
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
		c.forwardFIN()
	}
}

// sendFailed processes an error of send(2). The data that the socket received before the error still go to the guest.
func (c *conn) sendFailed() {
	c.hostError, c.snd.drained = hostErrorRead, false
	c.discardBatch()
	c.discardBacklog()
	if c.state.finSent() {
		c.abort()
		return
	}
	c.output()
}

// discardBatch returns the batch to the gateway's free batches.
func (c *conn) discardBatch() {
	if b := c.rcv.batch; b != nil {
		clear(b.parts)
		b.parts, b.bytes = b.parts[:0], 0
		c.rcv.batch, c.g.freeBatches = nil, append(c.g.freeBatches, b)
	}
}

func (c *conn) discardBacklog() {
	c.g.backlog -= len(c.rcv.backlog)
	c.rcv.backlog = nil
}
