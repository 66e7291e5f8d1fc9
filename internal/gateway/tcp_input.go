// SPDX-License-Identifier: Apache-2.0

package gateway

// segmentArrives takes a segment of the guest (RFC 9293, section 3.10.7).
func (c *conn) segmentArrives(s *segment) {
	switch c.state {
	case synPending:
		switch {
		case s.flags&flagRST != 0 && s.seq == c.rcv.nxt:
			c.resetByGuest()
		case s.flags&(flagRST|flagSYN|flagACK|flagFIN) == flagSYN && s.seq+1 != c.rcv.nxt:
			c.acceptSYN(s) // the guest has given up the first one
		}
		return
	case synSent:
		c.synSentArrives(s)
		return
	case timeWait:
		c.timeWaitArrives(s)
		return
	}
	if s.flags&flagRST != 0 {
		switch {
		case s.seq == c.nextExpected() || s.seq == c.rcv.nxt:
			c.resetByGuest()
		case before(c.rcv.nxt, s.seq) && before(s.seq, c.rcv.edge):
			c.acknowledge() // RFC 5961, section 3.2
		}
		return
	}
	if s.flags&flagSYN != 0 {
		if c.state == synReceived && s.flags&flagACK == 0 && s.seq+1 == c.rcv.nxt {
			c.sendSYN()
			return
		}
		c.acknowledge() // RFC 5961, section 4.2
		return
	}
	if s.flags&flagACK == 0 {
		return
	}
	if before(c.snd.nxt, s.ack) {
		c.acknowledge()
		return
	}
	if c.state == synReceived {
		if s.ack != c.snd.nxt {
			c.g.sendReset(s)
			return
		}
		c.establish(s)
	}
	if s.flags&flagURG != 0 {
		c.g.count(UrgentData)
		c.abort()
		return
	}
	if c.rtx.unanswered > 0 {
		c.rtx.unanswered = 0
		if c.snd.una == c.snd.nxt && !c.snd.blocked {
			c.rtx.backoff = 0
			c.startIdleTimer()
		}
	}
	c.processAck(s)
	if c.fd >= 0 {
		c.processText(s)
	}
	c.alive.lastHeard = c.g.now
	if c.fd >= 0 {
		c.output()
	}
}

// nextExpected is the sequence number of the guest's next segment.
func (c *conn) nextExpected() uint32 {
	n := c.rcv.nxt + uint32(len(c.rcv.backlog))
	if c.rcv.batch != nil {
		n += uint32(c.rcv.batch.bytes)
	}
	if c.rcv.finReceived && !c.rcv.finPassed {
		n++
	}
	return n
}

// processAck takes the guest's acknowledgement and its window.
func (c *conn) processAck(s *segment) {
	if before(s.ack, c.snd.una) {
		return
	}
	window, told := uint32(s.window), c.snd.wnd
	if c.windowScaling {
		window <<= c.snd.windShift
	}
	n := s.ack - c.snd.una
	// A segment that was sent again may have a new one, as it has a new acknowledgement. None
	// overtakes another.
	if n > 0 || !before(s.seq, c.snd.wl1) {
		c.snd.wnd, c.snd.wl1 = window, s.seq
	}
	if window > told && c.rtx.backoff > 0 {
		c.rtx.backoff = 0
		c.startRetransmitTimer()
	}
	switch {
	case n > 0:
		c.snd.una = s.ack
		c.rtx.dupAcks, c.rtx.backoff = 0, 0
		if c.snd.finSent && c.snd.una == c.snd.nxt {
			n-- // the FIN
		}
		c.snd.unconsumed += int(n)
		c.scheduleFlush()
		if c.snd.una == c.snd.nxt {
			c.startIdleTimer()
		} else {
			c.startRetransmitTimer()
		}
		if before(c.snd.una, c.rtx.recover) && (!c.rtx.maybeSpurious || !before(c.rtx.highRxt, c.snd.una)) {
			c.retransmit()
		} else {
			c.rtx.recover = c.snd.una
		}
	case c.snd.una != c.snd.nxt && window == told && len(s.payload) == 0 && s.flags&flagFIN == 0 && s.seq == c.nextExpected():
		if c.rtx.dupAcks = min(c.rtx.dupAcks+1, 4); c.rtx.dupAcks == 3 && !before(c.snd.una, c.rtx.recover) {
			c.rtx.recover, c.rtx.maybeSpurious = c.snd.nxt, false
			c.retransmit()
		}
	}
	if c.fd >= 0 && c.ended() {
		c.g.count(Closed)
		c.remove()
	}
}

// processText takes the payload of a segment, and its FIN.
func (c *conn) processText(s *segment) {
	if s.length() == 0 {
		// A keepalive or a probe of a closed window is from before it.
		if before(s.seq, c.rcv.nxt) {
			if c.rcv.edge != c.rcv.nxt {
				c.copyKeepalive()
			}
			c.acknowledge()
		}
		return
	}
	if len(c.rcv.backlog) > 0 {
		if c.writeBacklog(); c.fd < 0 {
			return
		}
	}
	payload, fin := s.payload, s.flags&flagFIN != 0
	expected := c.nextExpected()
	if before(expected, s.seq) {
		c.g.count(OutOfOrder)
		c.acknowledge()
		return
	}
	if old := expected - s.seq; old > 0 {
		if old >= s.length() {
			c.rcv.ackAll = true
			c.acknowledge()
			return
		}
		payload = payload[min(int(old), len(payload)):]
	}
	c.scheduleAck()
	if c.rcv.finReceived || c.hostFailed {
		return
	}
	c.rcv.moreFollows = s.flags&(flagPSH|flagFIN) == 0
	if n := c.fitToWindow(expected, len(payload)); n < len(payload) {
		payload, fin = payload[:n], false
	}
	if len(payload) > 0 && !c.addToBatch(payload) {
		return
	}
	if fin {
		c.rcv.finReceived = true
		c.passFIN()
	}
}

// fitToWindow is how many bytes from a sequence number on are inside the window.
func (c *conn) fitToWindow(seq uint32, n int) int {
	if n > int(int32(c.rcv.edge-seq)) {
		c.advanceWindow() // as a probe asks for
	}
	return min(n, max(int(int32(c.rcv.edge-seq)), 0))
}

// timeWaitArrives takes what the guest sends after both ends have ended.
func (c *conn) timeWaitArrives(s *segment) {
	switch {
	case s.flags&flagRST != 0:
		c.remove()
	case s.flags&(flagSYN|flagACK) == flagSYN:
		c.remove()
		c.g.tcpArrives(s)
	case s.length() > 0:
		c.sendAck()
	}
}

// sendReset answers a segment that belongs to no connection (RFC 9293, section 3.10.7.1).
func (g *Gateway) sendReset(s *segment) {
	a := outSegment{from: s.to, to: s.from, flags: flagRST}
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
