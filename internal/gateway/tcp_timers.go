// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"math/rand/v2"
	"time"

	"golang.org/x/sys/unix"
)

const (
	firstRTO      = 200 * time.Millisecond
	maxRTO        = 60 * time.Second
	maxTries      = 12                    // some six minutes
	answerTries   = 6                     // of a SYN-ACK, some twelve seconds
	firstCall     = 10 * time.Millisecond // a guest whose program accepts slowly drops SYNs
	maxCall       = 320 * time.Millisecond
	callTries     = 30                  // of a SYN, some twelve seconds
	mostKeepalive = 32767 * time.Second // MAX_TCP_KEEPIDLE
	// keepaliveEvery is the kernel's own time between two probes that are not answered
	// (TCP_KEEPALIVE_INTVL).
	keepaliveEvery = 75 * time.Second
	idleTime       = 2 * time.Hour   // before the guest is asked whether it is there (RFC 9293, section 3.8.4)
	overTime       = 2 * time.Second // the guest sends its FIN three times at least
)

// rest sets the timer for a connection with nothing under way.
func (c *conn) rest() { c.g.timers.set(&c.timer, c.g.now.Add(idleTime)) }

// arm sets the timer for what the guest has not acknowledged, or for its window.
func (c *conn) arm() {
	wait := min(firstRTO<<min(c.tries, 16), maxRTO)
	if c.state == calling {
		wait = min(firstCall<<min(c.tries, 16), maxCall)
		wait += rand.N(wait) // not all that a short queue had no place for at once
	}
	c.g.timers.set(&c.timer, c.g.now.Add(wait))
}

// expired is called when the guest has not answered in time.
func (c *conn) expired() {
	if c.state == over {
		c.drop()
		return
	}
	// A guest that answers, but reads nothing, may take as long as it likes.
	c.tries, c.silent = min(c.tries+1, maxTries), c.silent+1
	if c.silent > c.patience() {
		c.abort()
		return
	}
	if c.state == open && c.una == c.nxt {
		// A segment from before its window has the guest answer.
		a := c.segment(c.una-1, flagACK)
		c.transmit(&a, nil)
		c.arm()
		return
	}
	c.recover, c.late = c.nxt, c.dupAcks == 0
	c.resend()
	if c.fd >= 0 {
		c.arm()
	}
}

// patience is how often the guest is asked in vain.
func (c *conn) patience() uint8 {
	switch c.state {
	case answered:
		return answerTries
	case calling:
		return callTries
	}
	return maxTries
}

// ask has the socket ask its peer whether it is there, as the guest does, after the same
// time without a word: a guest that would find out natively that its peer is gone would
// hear from the gateway for ever.
func (c *conn) ask() {
	idle := uint16(min(max(c.g.now.Sub(c.heard).Round(time.Second), time.Second), mostKeepalive) / time.Second)
	if idle == c.keepalive {
		return
	}
	c.keepalive = idle
	// The interval first: if the time is over, the kernel asks at once.
	every := min(int(idle), int(keepaliveEvery/time.Second))
	_ = unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, every)
	_ = unix.SetsockoptInt(c.fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(idle))
}
