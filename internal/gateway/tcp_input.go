// SPDX-License-Identifier: Apache-2.0

package gateway

import "sockeye/internal/gateway/packet"

// segmentArrives processes a segment of the guest (SEGMENT ARRIVES of RFC 9293, section 3.10.7).
func (c *conn) segmentArrives(s *packet.Segment) {
	switch c.state {
	case synPending:
		switch {
		case s.Flags&packet.RST != 0 && s.Seq == c.rcv.nxt:
			c.resetByGuest()
		case s.Flags&(packet.RST|packet.SYN|packet.ACK|packet.FIN) == packet.SYN && s.Seq != c.rcv.irs:
			c.initFromSYN(s) // the guest has aborted the first attempt and reuses the port
		}
		return
	case synSent:
		c.synSentArrives(s)
		return
	case timeWait:
		c.timeWaitArrives(s)
		return
	}
	if s.Flags&packet.RST != 0 {
		switch {
		case s.Seq == c.nextSequence() || s.Seq == c.rcv.nxt:
			c.resetByGuest()
		case packet.Before(c.rcv.nxt, s.Seq) && packet.Before(s.Seq, c.rcv.adv):
			c.acknowledge() // challenge ACK (RFC 5961, section 3.2)
		}
		return
	}
	if s.Flags&packet.SYN != 0 {
		if c.state == synReceived && s.Flags&packet.ACK == 0 && s.Seq == c.rcv.irs {
			c.resendSYN()
			return
		}
		c.acknowledge() // challenge ACK (RFC 5961, section 4.2)
		return
	}
	if s.Flags&packet.ACK == 0 {
		return
	}
	if packet.Before(c.snd.nxt, s.Ack) {
		c.acknowledge()
		return
	}
	if c.state == synReceived {
		if s.Ack != c.snd.nxt {
			c.g.sendReset(s)
			return
		}
		c.establish(s)
	}
	if s.Flags&packet.URG != 0 {
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

// processAck checks the acknowledgement and updates SND.UNA and SND.WND (RFC 9293, section 3.10.7.4, fifth check).
func (c *conn) processAck(s *packet.Segment) {
	if packet.Before(s.Ack, c.snd.una) {
		return
	}
	wnd, previous := uint32(s.Window), c.snd.wnd
	if c.windowScaling {
		wnd <<= c.snd.windShift
	}
	n := s.Ack - c.snd.una
	// SND.WL2 is not needed, as packets on the TUN are never reordered. But a retransmitted segment has an old sequence number
	// with a current acknowledgement and window.
	if n > 0 || !packet.Before(s.Seq, c.snd.wl1) {
		c.snd.wnd, c.snd.wl1 = wnd, s.Seq
	}
	if wnd > previous && c.rtx.backoff > 0 {
		c.rtx.backoff = 0
		c.startRetransmitTimer()
	}
	ackedFIN := false
	switch {
	case n > 0:
		c.snd.una = s.Ack
		c.rtx.dupAcks, c.rtx.backoff = 0, 0
		if c.state.finSent() && c.snd.una == c.snd.nxt {
			ackedFIN = true
			n-- // the FIN has a sequence number but no byte in the socket
		}
		c.snd.unconsumed += int(n)
		c.scheduleFlush()
		if c.snd.una == c.snd.nxt {
			c.startIdleTimer()
		} else {
			c.startRetransmitTimer()
		}
		if packet.Before(c.snd.una, c.rtx.recover) && (!c.rtx.maybeSpurious || !packet.Before(c.rtx.highRxt, c.snd.una)) {
			c.retransmit() // partial acknowledgement (RFC 6582, section 3.2, step 3)
		} else {
			c.rtx.recover = c.snd.una
		}
	case c.snd.una != c.snd.nxt && wnd == previous && len(s.Payload) == 0 && s.Flags&packet.FIN == 0 && s.Seq == c.nextSequence():
		// A duplicate acknowledgement (RFC 5681, section 2).
		if c.rtx.dupAcks = min(c.rtx.dupAcks+1, 4); c.rtx.dupAcks == 3 && !packet.Before(c.snd.una, c.rtx.recover) {
			c.rtx.recover, c.rtx.maybeSpurious = c.snd.nxt, false
			c.retransmit()
		}
	}
	if ackedFIN && c.fd >= 0 {
		c.finAcked()
	}
}

// processText processes the payload of a segment, and its FIN (RFC 9293, section 3.10.7.4, seventh and eighth check).
func (c *conn) processText(s *packet.Segment) {
	if s.Length() == 0 {
		// A keepalive or zero-window probe has a sequence number before RCV.NXT.
		if packet.Before(s.Seq, c.rcv.nxt) {
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
	payload, fin := s.Payload, s.Flags&packet.FIN != 0
	expected := c.nextSequence()
	if packet.Before(expected, s.Seq) {
		c.g.count(OutOfOrder)
		c.acknowledge()
		return
	}
	if old := expected - s.Seq; old > 0 {
		if old >= s.Length() {
			c.rcv.exactAck = true
			c.acknowledge()
			return
		}
		payload = payload[min(int(old), len(payload)):]
	}
	c.scheduleAck()
	if c.hostError != hostOK && c.snd.blocked && len(payload) > 0 {
		c.abort() // output would find the error only when the guest opens its window
		return
	}
	if c.rcv.finPending || c.state.finReceived() || c.hostError != hostOK {
		return
	}
	c.rcv.moreFollows = s.Flags&(packet.PSH|packet.FIN) == 0
	if n := c.fitToWindow(expected, len(payload)); n < len(payload) {
		payload, fin = payload[:n], false
	}
	if len(payload) > 0 && !c.addPayload(payload) {
		return
	}
	if fin {
		c.rcv.finPending = true
		c.forwardFIN()
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

// fitToWindow returns how many of n bytes from a sequence number on are inside the window. Since payload beyond the window
// may be a zero-window probe, fitToWindow recomputes the window first.
func (c *conn) fitToWindow(seq uint32, n int) int {
	if n > int(int32(c.rcv.adv-seq)) {
		c.advanceWindow()
	}
	return min(n, max(int(int32(c.rcv.adv-seq)), 0))
}

// timeWaitArrives processes a segment in TIME-WAIT. A SYN opens a new connection (RFC 9293, section 3.6.1).
func (c *conn) timeWaitArrives(s *packet.Segment) {
	switch {
	case s.Flags&packet.RST != 0:
		c.remove()
	case s.Flags&(packet.SYN|packet.ACK) == packet.SYN:
		c.remove()
		c.g.tcpArrives(s)
	case s.Length() > 0:
		c.sendAck()
	}
}

// sendReset replies with a RST to a segment without a connection (RFC 9293, section 3.10.7.1).
func (g *Gateway) sendReset(s *packet.Segment) {
	a := packet.Outgoing{From: s.To, To: s.From, Flags: packet.RST}
	if s.Flags&packet.ACK != 0 {
		a.Seq = s.Ack
	} else {
		a.Flags |= packet.ACK
		a.Ack = s.Seq + s.Length()
	}
	var b [packet.MaxHeaders]byte
	a.Write(b[:], 0)
	g.send(b[:a.Headers()])
}
