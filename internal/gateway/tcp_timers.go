// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"
)

const (
	initialRTO        = 200 * time.Millisecond
	maxRTO            = 60 * time.Second
	maxTimeouts       = 12                    // some six minutes
	maxSynAckTimeouts = 6                     // of a SYN-ACK, some twelve seconds
	initialSynRTO     = 10 * time.Millisecond // a guest whose program accepts slowly drops SYNs
	maxSynRTO         = 320 * time.Millisecond
	maxSynTimeouts    = 30                  // of a SYN, some twelve seconds
	maxKeepalive      = 32767 * time.Second // MAX_TCP_KEEPIDLE
	// keepaliveInterval is the kernel's own time between two probes that are not answered
	// (TCP_KEEPALIVE_INTVL).
	keepaliveInterval = 75 * time.Second
	idleTimeout       = 2 * time.Hour   // before the guest is asked whether it is there (RFC 9293, section 3.8.4)
	timeWaitTimeout   = 2 * time.Second // the guest sends its FIN three times at least
)

// startIdleTimer sets the timer for a connection with nothing under way.
func (c *conn) startIdleTimer() { c.g.timers.set(&c.timer, c.g.now.Add(idleTimeout)) }

// startRetransmitTimer sets the timer for what the guest has not acknowledged, or for its window.
func (c *conn) startRetransmitTimer() {
	wait := min(initialRTO<<min(c.rtx.backoff, 16), maxRTO)
	if c.state == synSent {
		wait = min(initialSynRTO<<min(c.rtx.backoff, 16), maxSynRTO)
		wait += rand.N(wait) // not all that a short queue had no place for at once
	}
	c.g.timers.set(&c.timer, c.g.now.Add(wait))
}

// expired is called when the guest has not answered in time.
func (c *conn) expired() {
	if c.state == timeWait {
		c.remove()
		return
	}
	// A guest that answers, but reads nothing, may take as long as it likes.
	c.rtx.backoff, c.rtx.unanswered = min(c.rtx.backoff+1, maxTimeouts), c.rtx.unanswered+1
	if c.rtx.unanswered > c.maxUnanswered() {
		c.abort()
		return
	}
	if c.state == established && c.snd.una == c.snd.nxt {
		// A segment from before its window has the guest answer.
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

// maxUnanswered is how often the guest is asked in vain.
func (c *conn) maxUnanswered() uint8 {
	switch c.state {
	case synReceived:
		return maxSynAckTimeouts
	case synSent:
		return maxSynTimeouts
	}
	return maxTimeouts
}

// copyKeepalive has the socket ask its peer whether it is there, as the guest does, after the same
// time without a word: a guest that would find out natively that its peer is gone would
// hear from the gateway for ever.
func (c *conn) copyKeepalive() {
	idle := uint16(min(max(c.g.now.Sub(c.alive.lastHeard).Round(time.Second), time.Second), maxKeepalive) / time.Second)
	if idle == c.alive.idle {
		return
	}
	c.alive.idle = idle
	// The interval first: if the time is over, the kernel asks at once.
	every := min(int(idle), int(keepaliveInterval/time.Second))
	_ = unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, every)
	_ = unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(idle))
}
