// SPDX-License-Identifier: Apache-2.0

package packets

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"time"

	"sockeye/internal/trace/capture"
)

// DatagramAssembler assembles the packets of a UDP socket from events. It keeps a packet until no further event is
// expected, and emits the packets in the order of their times.
//
// A sent packet is a datagram, several datagrams that the kernel segments (UDP_SEGMENT), or a fragment. A received
// packet is what reached the socket: a whole datagram, or several that the kernel has merged (UDP_GRO).
type DatagramAssembler struct {
	recorder

	sending map[uint64]*packet // sent packets, by skb
	arrived map[uint64]*packet // received packets that are neither read nor dropped, by skb
	unread  []*packet          // the same, in the order of arrival
	first   map[fragments]int  // numbers of the first fragments
	reasons map[uint32]string  // names of the reasons for drops
}

// fragments identifies the fragments of one datagram.
type fragments struct{ peer, id uint32 }

// NewDatagramAssembler returns an assembler that remembers at most window packets, or DefaultWindow packets if window is
// 0. reasons are the names of the reasons for drops (capture.DropReasons). Add and Close return errors of emit.
func NewDatagramAssembler(clock Clock, window int, reasons map[uint32]string, emit func(*Packet) error) *DatagramAssembler {
	return &DatagramAssembler{
		recorder: newRecorder(clock, window, emit), reasons: reasons,
		sending: make(map[uint64]*packet), arrived: make(map[uint64]*packet), first: make(map[fragments]int),
	}
}

// Add processes an event. Add the events in the order of occurrence; in another order, packets are less complete.
func (a *DatagramAssembler) Add(e *capture.Event) error {
	h := &e.Header
	a.observe(h)
	switch h.Kind {
	case capture.Queue:
		a.handleQueue(e)
	case capture.Driver:
		a.handleDriver(h)
	case capture.Receive:
		a.handleReceive(e)
	case capture.Read:
		a.handleRead(h)
	case capture.Drop:
		a.handleDrop(e)
	}
	return a.flush(a.finished, a.conclude, false)
}

// Close emits the remaining packets and returns the summary.
func (a *DatagramAssembler) Close() (*Summary, error) {
	err := a.flush(a.finished, a.conclude, true)
	return &a.summary, err
}

// handleQueue processes the arrival of a packet at a queueing discipline.
func (a *DatagramAssembler) handleQueue(e *capture.Event) {
	h := &e.Header
	if p := a.sending[h.Skb]; p != nil && p.continues(h) && p.same(h) {
		if hop := p.hop(h); hop.queued == 0 {
			hop.queued = int64(h.Time)
		}
		return
	}
	if p := a.addSent(e); p != nil {
		p.hop(h).queued = int64(h.Time)
	}
}

// handleDriver processes the event of a packet, or of a part of a packet, at a driver.
func (a *DatagramAssembler) handleDriver(h *capture.Header) {
	p := a.sending[h.Skb]
	if p != nil && p.driver != 0 && p.hop(h).bytes+int64(h.Length) > int64(p.Length) {
		p = nil // the skb was reused
	}
	if p == nil {
		p = a.splitPacket(h)
	}
	if p == nil {
		a.summary.Strays++
		return
	}
	hop := p.hop(h)
	hop.driver = int64(h.Time)
	hop.bytes += int64(h.Length)
	hop.Segments++
	hop.wire += max(1, int(h.GsoSegments))
	p.device = p.device || h.GsoSegments > 1
	p.driver = int64(h.Time)
	p.last = *h
	if a.sending[h.Skb] != p && len(p.pointers) < maxPointers {
		a.sending[h.Skb] = p
		p.pointers = append(p.pointers, h.Skb)
	}
}

// handleReceive processes a packet that reached the socket.
func (a *DatagramAssembler) handleReceive(e *capture.Event) {
	p := a.add(e)
	p.Received = &Received{}
	var payload int
	p.Peer, _, payload = udpHeader(e.Bytes)
	p.Length = max(0, p.Size-payload)
	a.summary.Received++
	a.summary.ReceivedBytes += int64(p.Length)
	a.arrived[e.Skb] = p
	p.pointers = append(p.pointers, e.Skb)
	a.unread = append(a.unread, p)
}

// handleRead processes the receive operation of an application.
func (a *DatagramAssembler) handleRead(h *capture.Header) {
	p := a.arrived[h.Skb]
	if h.Flags&capture.Left != 0 {
		p = a.readBefore(p, h)
	}
	if p == nil {
		a.summary.EarlierReads++
		return
	}
	p.Received.Read = a.clock.Time(int64(h.Time))
	p.Received.Waited = time.Duration(int64(h.Time) - p.at)
	a.summary.Read++
	a.forget(p)
}

// readBefore returns the packet that an application has received: one that is older than the oldest one left, which is
// nil if none is left. A packet of another length is not that one, unless the buffer of the application was too short.
//
// All packets that are older have left the queue. Where no event follows that says how, that event was lost.
func (a *DatagramAssembler) readBefore(left *packet, h *capture.Header) (found *packet) {
	older := a.unread
	switch {
	case left != nil:
		older = older[:slices.Index(older, left)]
	case h.Skb != 0:
		return nil // older than the capture, or its event was lost
	}
	older = slices.Clone(older) // forget changes a.unread
	for _, p := range older {
		switch {
		case p.leftAt != 0 && int64(h.Time)-p.leftAt > settle:
			p.Received.Unseen = true
			a.summary.ReceivedUnseen++
			a.forget(p)
		case found == nil || found.Length != int(h.Length) && p.Length == int(h.Length):
			if p.Length >= int(h.Length) {
				found = p
			}
		}
	}
	for _, p := range older {
		if p != found && p.leftAt == 0 {
			p.leftAt = int64(h.Time)
		}
	}
	if found == nil && left != nil && a.summary.Read > 0 {
		return a.readAfter(left, h)
	}
	return found
}

// readAfter returns a packet that reached the socket at the same time as the oldest one left: CPUs that receive packets
// at the same time queue them in another order than that of their events.
func (a *DatagramAssembler) readAfter(left *packet, h *capture.Header) *packet {
	for _, p := range a.unread[slices.Index(a.unread, left)+1:] {
		switch {
		case p.at-left.at > sameCall:
			return nil
		case p.Length == int(h.Length):
			return p
		}
	}
	return nil
}

// beforeDriver are the reasons for drops that occur only before a driver.
var beforeDriver = map[string]bool{"netfilter_drop": true, "tc_egress": true, "qdisc_egress": true, "qdisc_drop": true}

// handleDrop processes the drop of a packet by the host.
func (a *DatagramAssembler) handleDrop(e *capture.Event) {
	h := &e.Header
	if h.Flags&capture.Inward != 0 {
		// Without a packet, the application has received the datagram: the event is of a later use of the skb.
		if p := a.arrived[h.Skb]; p != nil {
			p.Received.Dropped, p.Received.Reason = true, a.reasons[h.Reason]
			a.summary.ReceivedDropped++
			a.forget(p)
		}
		return
	}
	p := a.sending[h.Skb]
	if p != nil && (p.Sent.Fate == Dropped || !p.same(h) || p.driver != 0 && (beforeDriver[a.reasons[h.Reason]] || int64(h.Time)-p.driver > sameCall)) {
		p = nil // the skb was reused
	}
	if p == nil {
		p = a.splitPacket(h)
	}
	switch {
	case p != nil && p.split && int(h.Length) < p.Length:
		p.hop(h).bytes += int64(h.Length)
		p.Sent.LostBytes += int(h.Length)
		p.Sent.Fate = PartlyLost
		if p.Sent.LostBytes >= p.Length {
			p.Sent.Fate = Dropped
		}
	default:
		if p == nil {
			p = a.addSent(e) // dropped before a queueing discipline
		}
		if p == nil {
			return
		}
		p.Sent.Fate = Dropped
	}
	p.Sent.Reason = a.reasons[h.Reason]
}

// same returns whether an event can be of the packet, whose skb may have been reused. The headers of a tunnel may hide those
// of the datagram.
func (p *packet) same(h *capture.Header) bool {
	return h.Flags&capture.UDP == 0 || p.peer == h.Peer && p.fragmentID == h.Ack && (p.Length == int(h.Length) || p.split) &&
		(p.Fragment == nil || p.Fragment.Offset == int(h.Seq))
}

// addSent creates a sent packet, or returns nil if the event is of no datagram.
func (a *DatagramAssembler) addSent(e *capture.Event) *packet {
	h := &e.Header
	if h.Flags&capture.UDP == 0 {
		a.summary.Unreadable++
		return nil
	}
	p := a.add(e)
	p.Sent = &Sent{}
	_, p.Peer, _ = udpHeader(e.Bytes)
	p.peer = h.Peer
	p.gso, p.split = h.GsoSize, h.GsoSize > 0 && h.GsoSegments > 1
	if h.Flags&capture.Fragment != 0 {
		p.Seq, p.RawSeq, p.Ack, p.RawAck = 0, 0, 0, 0
		key := fragments{h.Peer, h.Ack}
		p.fragmentID = h.Ack
		if h.Seq == 0 {
			a.first[key] = p.Number
		}
		p.Fragment = &Fragment{Of: a.first[key], Offset: int(h.Seq)}
	}
	a.sending[h.Skb] = p
	p.pointers = append(p.pointers, h.Skb)
	a.summary.Sent++
	a.summary.SentBytes += int64(p.Length)
	return p
}

// splitPacket returns the oldest packet to the same peer that the host splits, and whose parts have not all reached the
// driver.
func (a *DatagramAssembler) splitPacket(h *capture.Header) *packet {
	for _, p := range a.order {
		if p.Sent == nil || !p.split || p.peer != h.Peer || p.Sent.Fate == Dropped {
			continue
		}
		for i := range p.hops {
			if o := &p.hops[i]; o.device == h.Device && o.bytes+int64(h.Length) <= int64(p.Length) {
				return p
			}
		}
	}
	return nil
}

// finished returns whether no further event of a packet is expected.
func (a *DatagramAssembler) finished(p *packet) bool {
	age := a.now - p.at
	switch {
	case p.Received != nil:
		return p.doneAt != 0
	case p.Sent.Fate == Dropped:
		return age >= settle
	case len(p.hops) > 0 && p.hops[len(p.hops)-1].bytes >= int64(p.Length) && p.Sent.Fate == PartlyLost:
		return age >= settle
	case p.driver == 0:
		return age >= giveUp
	}
	last := &p.hops[len(p.hops)-1]
	return a.now-p.driver >= settle && (last.bytes >= int64(p.Length) || age >= giveUp)
}

// conclude completes a packet and removes the packet from memory.
func (a *DatagramAssembler) conclude(p *packet) {
	if p.Received != nil {
		if p.doneAt == 0 {
			a.summary.Unread++
			a.forget(p)
		}
		return
	}
	a.describeSent(p)
	if p.Sent.Fate == "" && p.driver == 0 && a.now-p.at >= giveUp {
		p.Sent.Fate = Dropped
	}
	if p.Sent.Fate != "" {
		a.summary.Fates[p.Sent.Fate]++
	}
	for _, skb := range p.pointers {
		if a.sending[skb] == p {
			delete(a.sending, skb)
		}
	}
	if f := p.Fragment; f != nil && f.Offset == 0 {
		for key, number := range a.first {
			if number < p.Number {
				delete(a.first, key)
			}
		}
	}
}

// forget removes a packet that was read or dropped.
func (a *DatagramAssembler) forget(p *packet) {
	p.doneAt = a.now
	if i := slices.Index(a.unread, p); i >= 0 {
		a.unread = slices.Delete(a.unread, i, i+1)
	}
	for _, skb := range p.pointers {
		if a.arrived[skb] == p {
			delete(a.arrived, skb)
		}
	}
}

// udpHeader returns the ends of a datagram and the offset of its payload. The ports of a later fragment are 0.
func udpHeader(b []byte) (source, destination netip.AddrPort, payload int) {
	if len(b) < 20 {
		return source, destination, 0
	}
	var from, to netip.Addr
	later := false
	switch b[0] >> 4 {
	case 4:
		from, to = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
		payload, later = int(b[0]&15)*4, binary.BigEndian.Uint16(b[6:])&0x1fff != 0
	case 6:
		if len(b) < 40 {
			return source, destination, 0
		}
		from, to = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
		next := b[6]
		payload = 40
		for payload+8 <= len(b) {
			size := (int(b[payload+1]) + 1) * 8
			switch next {
			case protocolFragment:
				later, size = later || binary.BigEndian.Uint16(b[payload+2:])&0xfff8 != 0, 8
			case protocolHopByHop, protocolRouting, protocolDestination:
			default:
				size = 0
			}
			if size == 0 {
				break
			}
			next, payload = b[payload], payload+size
		}
	default:
		return source, destination, 0
	}
	var ports [2]uint16
	if !later {
		if payload+8 <= len(b) {
			ports = [2]uint16{binary.BigEndian.Uint16(b[payload:]), binary.BigEndian.Uint16(b[payload+2:])}
		}
		payload += 8
	}
	return netip.AddrPortFrom(from, ports[0]), netip.AddrPortFrom(to, ports[1]), payload
}
