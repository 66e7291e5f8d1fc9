// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"
)

// A connection has one timer. Its meaning follows from the state: retransmission, zero-window probe, idle probe, or the end of
// TIME-WAIT.
const (
	initialRTO = 200 * time.Millisecond
	maxRTO     = 60 * time.Second
	// maxTimeouts is how many timeouts in a row the guest may leave unanswered, after about six minutes (R2 of RFC 9293,
	// section 3.8.3). maxSynAckTimeouts and maxSynTimeouts are for a SYN-ACK and a SYN, about twelve seconds each.
	maxTimeouts       = 12
	maxSynAckTimeouts = 6
	maxSynTimeouts    = 30
	// initialSynRTO and maxSynRTO are for a SYN. The guest's kernel drops SYNs while the accept queue of the program is full.
	initialSynRTO = 10 * time.Millisecond
	maxSynRTO     = 320 * time.Millisecond
	// idleTimeout is after which time of silence the guest is probed (RFC 9293, section 3.8.4).
	idleTimeout = 2 * time.Hour
	// timeWaitTimeout covers three retransmissions of the guest's FIN.
	timeWaitTimeout = 2 * time.Second

	maxKeepalive      = 32767 * time.Second // MAX_TCP_KEEPIDLE of Linux
	keepaliveInterval = 75 * time.Second    // TCP_KEEPALIVE_INTVL, the kernel's default between two probes
)

// startIdleTimer sets the timer of a connection that has nothing in flight.
func (c *conn) startIdleTimer() { c.g.timers.Set(&c.timer, c.g.now.Add(idleTimeout)) }

// startRetransmitTimer sets the timer for what the guest has not acknowledged, or for a zero-window probe.
func (c *conn) startRetransmitTimer() {
	rto := min(initialRTO<<min(c.rtx.backoff, 16), maxRTO)
	if c.state == synSent {
		rto = min(initialSynRTO<<min(c.rtx.backoff, 16), maxSynRTO)
		rto += rand.N(rto) // SYNs that a full queue dropped together do not come again together
	}
	c.g.timers.Set(&c.timer, c.g.now.Add(rto))
}

// Expired processes a timeout.
func (c *conn) Expired() {
	if c.state == timeWait {
		c.remove()
		return
	}
	// Only silence counts: a guest that answers with a zero window may do so for any time (RFC 9293, section 3.8.6.1).
	c.rtx.backoff, c.rtx.unanswered = min(c.rtx.backoff+1, maxTimeouts), c.rtx.unanswered+1
	if c.rtx.unanswered > c.maxUnanswered() {
		c.abort()
		return
	}
	if c.state >= established && c.snd.una == c.snd.nxt {
		// The guest answers a segment from before its window, as it does a keepalive.
		a := c.newSegment(c.snd.una-1, flagACK)
		c.transmit(&a, nil)
		c.startRetransmitTimer()
		return
	}
	c.rtx.recover, c.rtx.maybeSpurious = c.snd.nxt, c.rtx.dupAcks == 0
	c.retransmit()
	if c.fd >= 0 {
		c.startRetransmitTimer()
	}
}

// maxUnanswered is after how many timeouts without an answer the connection is aborted.
func (c *conn) maxUnanswered() uint8 {
	switch c.state {
	case synReceived:
		return maxSynAckTimeouts
	case synSent:
		return maxSynTimeouts
	}
	return maxTimeouts
}

// copyKeepalive sets on the host's socket the keepalive time that the guest's probe shows: how long the guest had been silent.
// The gateway answers the guest's probes itself, so that a guest would never learn that its peer is gone unless the host's
// kernel probes the peer as well.
func (c *conn) copyKeepalive() {
	idle := uint16(min(max(c.g.now.Sub(c.alive.lastHeard).Round(time.Second), time.Second), maxKeepalive) / time.Second)
	if idle == c.alive.idle {
		return
	}
	c.alive.idle = idle
	// The interval precedes the idle time: if that has passed already, the kernel probes at once.
	every := min(int(idle), int(keepaliveInterval/time.Second))
	_ = unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, every)
	_ = unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(idle))
}
