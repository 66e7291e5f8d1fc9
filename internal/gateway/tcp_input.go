// SPDX-License-Identifier: Apache-2.0

package gateway

// segmentArrives processes a segment of the guest (SEGMENT ARRIVES of RFC 9293, section 3.10.7).
func (c *conn) segmentArrives(s *segment) {
	switch c.state {
	case synPending:
		switch {
		case s.flags&flagRST != 0 && s.seq == c.rcv.nxt:
			c.resetByGuest()
		case s.flags&(flagRST|flagSYN|flagACK|flagFIN) == flagSYN && s.seq != c.rcv.irs:
			c.acceptSYN(s) // the guest has aborted the first attempt and reuses the port
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
		case s.seq == c.nextSequence() || s.seq == c.rcv.nxt:
			c.resetByGuest()
		case before(c.rcv.nxt, s.seq) && before(s.seq, c.rcv.adv):
			c.acknowledge() // challenge ACK (RFC 5961, section 3.2)
		}
		return
	}
	if s.flags&flagSYN != 0 {
		if c.state == synReceived && s.flags&flagACK == 0 && s.seq == c.rcv.irs {
			c.resendSYN()
			return
		}
		c.acknowledge() // challenge ACK (RFC 5961, section 4.2)
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
	if c.rtx.timeouts > 0 {
		c.rtx.timeouts = 0
		if c.snd.una == c.snd.nxt && !c.snd.blocked {
			c.rtx.backoff = 0
			c.startIdleTimer()
		}
	}
	c.processAck(s)
	if c.fd >= 0 {
		c.processText(s)
	}
	c.keepalive.lastReceived = c.g.now
	if c.fd >= 0 {
		c.output()
	}
}

// nextSequence returns the expected sequence number of the guest's next segment: RCV.NXT plus the batch or the backlog.
func (c *conn) nextSequence() uint32 {
	n := c.rcv.nxt + uint32(len(c.rcv.backlog))
	if c.rcv.batch != nil {
		n += uint32(c.rcv.batch.bytes)
	}
	if c.rcv.finPending {
		n++
	}
	return n
}

// processAck checks the acknowledgement and updates SND.UNA and SND.WND (RFC 9293, section 3.10.7.4, fifth check).
func (c *conn) processAck(s *segment) {
	if before(s.ack, c.snd.una) {
		return
	}
	wnd, previous := uint32(s.window), c.snd.wnd
	if c.windowScaling {
		wnd <<= c.snd.windShift
	}
	n := s.ack - c.snd.una
	// SND.WL2 is not needed, as packets on the TUN are never reordered. But a retransmitted segment has an old sequence number
	// with a current acknowledgement and window.
	if n > 0 || !before(s.seq, c.snd.wl1) {
		c.snd.wnd, c.snd.wl1 = wnd, s.seq
	}
	if wnd > previous && c.rtx.backoff > 0 {
		c.rtx.backoff = 0
		c.startRetransmitTimer()
	}
	finAcked := false
	switch {
	case n > 0:
		c.snd.una = s.ack
		c.rtx.dupAcks, c.rtx.backoff = 0, 0
		if c.state.finSent() && c.snd.una == c.snd.nxt {
			finAcked = true
			n-- // the FIN has a sequence number but no byte in the socket
		}
		c.snd.unconsumed += int(n)
		c.scheduleFlush()
		if c.snd.una == c.snd.nxt {
			c.startIdleTimer()
		} else {
			c.startRetransmitTimer()
		}
		if before(c.snd.una, c.rtx.recover) && (!c.rtx.maybeSpurious || !before(c.rtx.highRxt, c.snd.una)) {
			c.retransmit() // partial acknowledgement (RFC 6582, section 3.2, step 3)
		} else {
			c.rtx.recover = c.snd.una
		}
	case c.snd.una != c.snd.nxt && wnd == previous && len(s.payload) == 0 && s.flags&flagFIN == 0 && s.seq == c.nextSequence():
		// A duplicate acknowledgement (RFC 5681, section 2).
		if c.rtx.dupAcks = min(c.rtx.dupAcks+1, 4); c.rtx.dupAcks == 3 && !before(c.snd.una, c.rtx.recover) {
			c.rtx.recover, c.rtx.maybeSpurious = c.snd.nxt, false
			c.retransmit()
		}
	}
	if finAcked && c.fd >= 0 {
		c.finAcked()
	}
}

// processText processes the payload of a segment, and its FIN (RFC 9293, section 3.10.7.4, seventh and eighth check).
func (c *conn) processText(s *segment) {
	if s.length() == 0 {
		// A keepalive or zero-window probe has a sequence number before RCV.NXT.
		if before(s.seq, c.rcv.nxt) {
			if c.rcv.adv != c.rcv.nxt {
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
	expected := c.nextSequence()
	if before(expected, s.seq) {
		c.g.count(OutOfOrder)
		c.acknowledge()
		return
	}
	if old := expected - s.seq; old > 0 {
		if old >= s.length() {
			c.rcv.exactAck = true
			c.acknowledge()
			return
		}
		payload = payload[min(int(old), len(payload)):]
	}
	c.scheduleAck()
	if c.rcv.finPending || c.state.finReceived() || c.hostError != hostOK {
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
		c.rcv.finPending = true
		c.forwardFIN()
	}
}

// fitToWindow returns how many of n bytes from a sequence number on are inside the window. Since payload beyond the window
// may be a zero-window probe, fitToWindow recomputes the window first.
func (c *conn) fitToWindow(seq uint32, n int) int {
	if n > int(int32(c.rcv.adv-seq)) {
		c.advanceWindow()
	}
	return min(n, max(int(int32(c.rcv.adv-seq)), 0))
}

// timeWaitArrives processes a segment in TIME-WAIT. A SYN opens a new connection (RFC 9293, section 3.6.1).
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

// sendReset replies with a RST to a segment without a connection (RFC 9293, section 3.10.7.1).
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
