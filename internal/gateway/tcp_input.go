// SPDX-License-Identifier: Apache-2.0

package gateway

// input takes a segment of the guest (RFC 9293, section 3.10.7).
func (c *conn) input(s *segment) {
	switch c.state {
	case connecting:
		switch {
		case s.flags&flagRST != 0 && s.seq == c.rcv:
			c.abandon()
		case s.flags&(flagRST|flagSYN|flagACK|flagFIN) == flagSYN && s.seq+1 != c.rcv:
			c.begin(s) // the guest has given up the first one
		}
		return
	case calling:
		c.called(s)
		return
	case over:
		c.recalled(s)
		return
	}
	if s.flags&flagRST != 0 {
		switch {
		case s.seq == c.expected() || s.seq == c.rcv:
			c.abandon()
		case before(c.rcv, s.seq) && before(s.seq, c.edge):
			c.acknowledge() // RFC 5961, section 3.2
		}
		return
	}
	if s.flags&flagSYN != 0 {
		if c.state == answered && s.flags&flagACK == 0 && s.seq+1 == c.rcv {
			c.answer()
			return
		}
		c.acknowledge() // RFC 5961, section 4.2
		return
	}
	if s.flags&flagACK == 0 {
		return
	}
	if before(c.nxt, s.ack) {
		c.acknowledge()
		return
	}
	if c.state == answered {
		if s.ack != c.nxt {
			c.g.reset(s)
			return
		}
		c.opened(s)
	}
	if s.flags&flagURG != 0 {
		c.g.count(UrgentData)
		c.abort()
		return
	}
	if c.silent > 0 {
		c.silent = 0
		if c.una == c.nxt && !c.blocked {
			c.tries = 0
			c.rest()
		}
	}
	c.acked(s)
	if c.fd >= 0 {
		c.data(s)
	}
	c.heard = c.g.now
	if c.fd >= 0 {
		c.output()
	}
}

// expected is the sequence number of the guest's next segment.
func (c *conn) expected() uint32 {
	n := c.rcv + uint32(len(c.spill))
	if c.held != nil {
		n += uint32(c.held.bytes)
	}
	if c.guestEnded && !c.shut {
		n++
	}
	return n
}

// acked takes the guest's acknowledgement and its window.
func (c *conn) acked(s *segment) {
	if before(s.ack, c.una) {
		return
	}
	window, told := uint32(s.window), c.window
	if c.hasScale {
		window <<= c.scale
	}
	n := s.ack - c.una
	// A segment that was sent again may have a new one, as it has a new acknowledgement. None
	// overtakes another.
	if n > 0 || !before(s.seq, c.wl1) {
		c.window, c.wl1 = window, s.seq
	}
	if window > told && c.tries > 0 {
		c.tries = 0
		c.arm()
	}
	switch {
	case n > 0:
		c.una = s.ack
		c.dupAcks, c.tries = 0, 0
		if c.finSent && c.una == c.nxt {
			n-- // the FIN
		}
		c.spent += int(n)
		c.hold()
		if c.una == c.nxt {
			c.rest()
		} else {
			c.arm()
		}
		if before(c.una, c.recover) && (!c.late || !before(c.again, c.una)) {
			c.resend()
		} else {
			c.recover = c.una
		}
	case c.una != c.nxt && window == told && len(s.payload) == 0 && s.flags&flagFIN == 0 && s.seq == c.expected():
		if c.dupAcks = min(c.dupAcks+1, 4); c.dupAcks == 3 && !before(c.una, c.recover) {
			c.recover, c.late = c.nxt, false
			c.resend()
		}
	}
	if c.fd >= 0 && c.ended() {
		c.g.count(Closed)
		c.drop()
	}
}

// data takes the payload of a segment, and its FIN.
func (c *conn) data(s *segment) {
	if s.length() == 0 {
		// A keepalive or a probe of a closed window is from before it.
		if before(s.seq, c.rcv) {
			if c.edge != c.rcv {
				c.ask()
			}
			c.acknowledge()
		}
		return
	}
	if len(c.spill) > 0 {
		if c.flush(); c.fd < 0 {
			return
		}
	}
	payload, fin := s.payload, s.flags&flagFIN != 0
	expected := c.expected()
	if before(expected, s.seq) {
		c.g.count(OutOfOrder)
		c.acknowledge()
		return
	}
	if old := expected - s.seq; old > 0 {
		if old >= s.length() {
			c.asked = true
			c.acknowledge()
			return
		}
		payload = payload[min(int(old), len(payload)):]
	}
	c.mark()
	if c.guestEnded || c.broken {
		return
	}
	c.more = s.flags&(flagPSH|flagFIN) == 0
	if n := c.fits(expected, len(payload)); n < len(payload) {
		payload, fin = payload[:n], false
	}
	if len(payload) > 0 && !c.take(payload) {
		return
	}
	if fin {
		c.guestEnded = true
		c.finish()
	}
}

// fits is how many bytes from a sequence number on are inside the window.
func (c *conn) fits(seq uint32, n int) int {
	if n > int(int32(c.edge-seq)) {
		c.advance() // as a probe asks for
	}
	return min(n, max(int(int32(c.edge-seq)), 0))
}

// recalled takes what the guest sends after both ends have ended.
func (c *conn) recalled(s *segment) {
	switch {
	case s.flags&flagRST != 0:
		c.drop()
	case s.flags&(flagSYN|flagACK) == flagSYN:
		c.drop()
		c.g.tcp(s)
	case s.length() > 0:
		c.tell()
	}
}

// reset answers a segment that belongs to no connection (RFC 9293, section 3.10.7.1).
func (g *Gateway) reset(s *segment) {
	a := answer{from: s.to, to: s.from, flags: flagRST}
	if s.flags&flagACK != 0 {
		a.seq = s.ack
	} else {
		a.flags |= flagACK
		a.ack = s.seq + s.length()
	}
	var b [maxHeaders]byte
	a.write(b[:], 0)
	g.send(b[:a.headers()])
}
