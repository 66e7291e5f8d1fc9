// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"slices"
	"time"
)

// # Requests
//
// A small payload with PSH may be a request, whose response follows soon. A separate acknowledgement and a new window would cost the
// guest and the gateway as much as the request itself. Therefore the gateway does not recompute the window while half of it is left.
// If the peer responded to the last payload within ackDelay, the gateway delays the acknowledgement (RFC 9293, section 3.8.6.3) by up
// to ackDelay, and the response carries the acknowledgement.
//
// A guest with Nagle's algorithm may send the rest of a request only after the acknowledgement. The delay is then in vain, but the peer
// responds to the rest in time. Therefore, after a delay in vain, delayPenalty responses must be in time before the gateway delays
// acknowledgements again.

const (
	maxRequest = 4096 // bytes of payload in a turn
	ackDelay   = time.Millisecond
	// delayPenalty is how many timely responses end the penalty for a delay in vain: a guest that writes twice before it reads waits
	// for ackDelay once in this number of responses.
	delayPenalty = 64
)

// responded updates the delay credit when the peer sends data to the guest.
func (c *conn) responded() {
	if c.g.now.Sub(c.rcv.received) < ackDelay {
		c.rcv.delayCredit = min(c.rcv.delayCredit+1, 1)
	} else {
		c.rcv.delayCredit = min(c.rcv.delayCredit, 0)
	}
}

// delayedAck is an acknowledgement that waits for the response to carry it.
type delayedAck struct {
	*conn
	due time.Time
}

// acknowledgeTurn acknowledges the payload of a turn.
func (c *conn) acknowledgeTurn() {
	r := &c.rcv
	switch {
	case !r.request || r.received != c.g.now || c.state != established || r.armed || r.exactAck || r.finPending || len(r.backlog) > 0,
		r.wnd() < max(r.lastWindow/2, 2*uint32(r.mss)):
		c.acknowledge()
	case r.acked || c.queued.delayedAck:
		// Everything is acknowledged, or sendDelayedAcks acknowledges this payload within ackDelay, too.
	case r.delayCredit > 0:
		c.queued.delayedAck = true
		c.g.delayedAcks = append(c.g.delayedAcks, delayedAck{c, c.g.now.Add(ackDelay)})
	default:
		c.sendAck()
	}
}

// sendDelayedAcks sends the delayed acknowledgements that are due.
func (g *Gateway) sendDelayedAcks() {
	n := 0
	for _, l := range g.delayedAcks {
		if g.now.Before(l.due) {
			break
		}
		n++
		c := l.conn
		c.queued.delayedAck = false
		switch waited := g.now.Sub(c.rcv.received); {
		case c.fd < 0 || c.rcv.acked:
		case waited < ackDelay: // for the acknowledgement of a later request
			c.queued.delayedAck = true
			g.delayedAcks = append(g.delayedAcks, delayedAck{c, c.rcv.received.Add(ackDelay)})
		default:
			c.rcv.delayCredit = -delayPenalty
			c.acknowledge()
		}
	}
	g.delayedAcks = slices.Delete(g.delayedAcks, 0, n)
}
