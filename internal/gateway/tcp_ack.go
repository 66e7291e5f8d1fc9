// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"slices"
	"time"
)

// # Requests
//
// A small payload with PSH may be a request, whose response follows soon. Its acknowledgement and a new window would cost the guest
// and the gateway as much as the request itself. Therefore the window is not recomputed while half of it is left, and if the peer has
// responded within ackDelay before, the acknowledgement waits that long for the response, which carries it. A guest with Nagle's
// algorithm may wait for the acknowledgement with its next payload, which the peer then answers in time: after an acknowledgement that
// has waited in vain, answersAfterLate responses must be in time before acknowledgements wait again.

const (
	maxRequest = 4096 // bytes of payload in a turn
	ackDelay   = time.Millisecond
	// A guest that writes twice before it reads waits for ackDelay once in this number of responses.
	answersAfterLate = 64
)

// responded processes data of the peer for the guest.
func (c *conn) responded() {
	if c.g.now.Sub(c.rcv.received) < ackDelay {
		c.rcv.answers = min(c.rcv.answers+1, 1)
	} else {
		c.rcv.answers = min(c.rcv.answers, 0)
	}
}

// lateAck is an acknowledgement that waits for a response.
type lateAck struct {
	*conn
	due time.Time
}

// acknowledgeTurn acknowledges the payload of a turn.
func (c *conn) acknowledgeTurn() {
	r := &c.rcv
	switch {
	case !r.request || r.received != c.g.now || c.state != established || r.armed || r.exactAck || r.finPending || len(r.backlog) > 0,
		r.wnd() < max(r.opened/2, 2*uint32(r.mss)):
		c.acknowledge()
	case r.acked || c.queued.lateAck:
		// In the latter case, the acknowledgement is at most as late as that of the payload before.
	case r.answers > 0:
		c.queued.lateAck = true
		c.g.lateAcks = append(c.g.lateAcks, lateAck{c, c.g.now.Add(ackDelay)})
	default:
		c.sendAck()
	}
}

// sendLateAcks acknowledges payload to which no response has followed in time.
func (g *Gateway) sendLateAcks() {
	n := 0
	for _, l := range g.lateAcks {
		if g.now.Before(l.due) {
			break
		}
		n++
		c := l.conn
		c.queued.lateAck = false
		switch waited := g.now.Sub(c.rcv.received); {
		case c.fd < 0 || c.rcv.acked:
		case waited < ackDelay: // for the acknowledgement of a later request
			c.queued.lateAck = true
			g.lateAcks = append(g.lateAcks, lateAck{c, c.rcv.received.Add(ackDelay)})
		default:
			c.rcv.answers = -answersAfterLate
			c.acknowledge()
		}
	}
	g.lateAcks = slices.Delete(g.lateAcks, 0, n)
}
