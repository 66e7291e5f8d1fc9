// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/packet"
)

// A connection has one timer, for retransmissions, zero-window probes, keepalives, or the end of TIME-WAIT.
const (
	initialRTO = 200 * time.Millisecond
	maxRTO     = 60 * time.Second
	// maxTimeouts is the maximum number of consecutive timeouts without a segment of the guest, about six minutes (R2 of
	// RFC 9293, section 3.8.3). maxSynAckTimeouts is the maximum for a SYN-ACK, 25 seconds, and maxSynTimeouts for a SYN,
	// 9 to 18 seconds.
	maxTimeouts       = 12
	maxSynAckTimeouts = 6
	maxSynTimeouts    = 30
	// initialSynRTO and maxSynRTO are the timeouts of a SYN, which the guest's kernel drops while the accept queue is full.
	initialSynRTO = 10 * time.Millisecond
	maxSynRTO     = 320 * time.Millisecond
	// idleTimeout is the idle time before the first keepalive (RFC 9293, section 3.8.4).
	idleTimeout = 2 * time.Hour
	// halfClosedTimeout is the same after the guest's FIN: the guest's socket may be gone, as that of a program that has closed
	// it (tcp_fin_timeout of Linux).
	halfClosedTimeout = time.Minute
	// timeWaitTimeout covers three retransmissions of the guest's FIN.
	timeWaitTimeout = 2 * time.Second

	maxKeepalive      = 32767 * time.Second // MAX_TCP_KEEPIDLE of Linux
	keepaliveInterval = 75 * time.Second    // TCP_KEEPALIVE_INTVL, the kernel's default interval of keepalives
)

// startIdleTimer sets the keepalive timer of a connection without unacknowledged data.
func (c *conn) startIdleTimer() {
	idle := idleTimeout
	if c.state == closeWait {
		idle = halfClosedTimeout
	}
	c.g.timers.Set(&c.timer, c.g.now.Add(idle))
}

// Expired processes a timeout.
func (c *conn) Expired() {
	if c.state == timeWait {
		c.remove()
		return
	}
	// Any segment resets timeouts: a guest may keep its window closed indefinitely (RFC 9293, section 3.8.6.1).
	c.rtx.backoff, c.rtx.timeouts = min(c.rtx.backoff+1, maxTimeouts), c.rtx.timeouts+1
	if c.rtx.timeouts > c.timeoutLimit() {
		c.abort()
		return
	}
	if c.state >= established && c.snd.una == c.snd.nxt {
		// The guest acknowledges a segment before its window, as a keepalive.
		a := c.newSegment(c.snd.una-1, packet.ACK)
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

// startRetransmitTimer sets the timer for a retransmission, or for a zero-window probe.
func (c *conn) startRetransmitTimer() {
	rto := min(initialRTO<<min(c.rtx.backoff, 16), maxRTO)
	if c.state == synSent {
		rto = min(initialSynRTO<<min(c.rtx.backoff, 16), maxSynRTO)
		rto += rand.N(rto) // jitter, so that SYNs dropped by one full queue are not retransmitted together
	}
	c.g.timers.Set(&c.timer, c.g.now.Add(rto))
}

// timeoutLimit returns the maximum number of consecutive timeouts before the connection is aborted.
func (c *conn) timeoutLimit() uint8 {
	switch c.state {
	case synReceived:
		return maxSynAckTimeouts
	case synSent:
		return maxSynTimeouts
	}
	return maxTimeouts
}

// copyKeepalive sets the keepalive time of the host's socket to the guest's idle time before this keepalive. Since the gateway
// acknowledges the guest's keepalives itself, the guest learns of a dead peer only if the host's kernel probes the peer, too.
func (c *conn) copyKeepalive() {
	idle := uint16(min(max(c.g.now.Sub(c.keepalive.lastReceived).Round(time.Second), time.Second), maxKeepalive) / time.Second)
	if idle == c.keepalive.idle {
		return
	}
	c.keepalive.idle = idle
	// The interval is set first: if the idle time has passed already, TCP_KEEPIDLE starts the probes at once.
	every := min(int(idle), int(keepaliveInterval/time.Second))
	_ = unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, every)
	_ = unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(idle))
}
