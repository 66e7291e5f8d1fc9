// SPDX-License-Identifier: Apache-2.0

package packets

import (
	"cmp"
	"iter"
	"slices"
	"strconv"
	"time"

	"sockeye/internal/trace/capture"
)

// Maximum times between related events, in nanoseconds.
const (
	// nextHop is the time from a driver to the queueing discipline of the lower interface.
	nextHop = int64(50 * time.Millisecond)
	// sameCall is the time from the queueing discipline to TCP's event of the retransmission.
	sameCall = int64(time.Millisecond)
	// settle is the time to wait for further hops of a packet that is never acknowledged.
	settle = int64(10 * time.Millisecond)
	// giveUp is the maximum time to wait for a driver event, or for a D-SACK.
	giveUp = int64(time.Second)
)

// Assembler assembles packets from events. It keeps a packet until no further event is expected, and emits the packets
// in the order of their times.
type Assembler struct {
	recorder

	mine, peer   sequence
	flight       []*packet // sent packets with bytes that are not acknowledged or not assigned; sorted by start and number
	widest       int64     // length of the longest packet in sequence numbers
	resent       []*packet // packets in order that overlap other packets
	byPointer    map[uint64]*packet
	lastSent     *packet
	lastReceived capture.Header // last received packet
	unaSet       bool
	una          int64 // SND.UNA: first unacknowledged sequence number
	sentSet      bool
	sent         int64 // end of the highest sequence number seen: SND.MAX
	rtt          int64 // smoothed RTT in nanoseconds; 0 if unknown
	leastRTT     int64
}

// packet is a packet that the assembler remembers.
type packet struct {
	Packet
	at                                int64 // as Time
	span                              span  // with SYN and FIN
	left                              spans // parts not yet assigned to an acknowledgement
	lost                              spans
	credited, needless                int64 // counts of sequence numbers
	firstAcked, acked, doneAt, driver int64
	hops                              []hop
	pointers                          []uint64
	last                              capture.Header // last event of a driver
	options                           options
	gso                               uint16
	root                              *packet // first packet that sent its first byte, for retransmissions
	flying                            bool    // in Assembler.flight
	resent                            bool    // in Assembler.resent
	emitted                           bool
	split                             bool
	device                            bool   // split by the device
	peer, fragmentID                  uint32 // capture.Header.Peer and, of a fragment, Ack
	leftAt                            int64  // since when a received packet is known to have left the queue of its socket
}

type hop struct {
	Hop
	device         uint32
	queued, driver int64
	bytes          int64 // sequence numbers that reached the driver
	wire           int   // segments on the wire
}

// NewAssembler returns an assembler that remembers at most window packets, or DefaultWindow packets if window is 0. Add
// and Close return errors of emit.
func NewAssembler(clock Clock, window int, emit func(*Packet) error) *Assembler {
	return &Assembler{recorder: newRecorder(clock, window, emit), byPointer: make(map[uint64]*packet)}
}

// Add processes an event. Add the events in the order of occurrence; in another order, packets are less complete.
func (a *Assembler) Add(e *capture.Event) error {
	h := &e.Header
	a.observe(h)
	switch h.Kind {
	case capture.Queue:
		a.handleQueue(e)
	case capture.Driver:
		a.handleDriver(h)
	case capture.Retransmit:
		a.handleRetransmit(h)
	case capture.Receive:
		a.handleReceive(e)
	case capture.State:
		a.summary.State = stateName(h.State)
		if h.Flags&capture.TCP != 0 && a.mine.set {
			a.acknowledge(int64(h.Time), nil, a.mine.at(h.Ack), options{}, nil)
		}
	}
	return a.flush(a.finished, a.conclude, false)
}

// Close emits the remaining packets and returns the summary.
func (a *Assembler) Close() (*Summary, error) {
	err := a.flush(a.finished, a.conclude, true)
	return &a.summary, err
}

func stateName(state uint8) string {
	names := [...]string{
		"", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT", "CLOSE", "CLOSE_WAIT", "LAST_ACK", "LISTEN", "CLOSING",
	}
	if int(state) < len(names) {
		return names[state]
	}
	return strconv.Itoa(int(state))
}

// handleQueue processes the arrival of a packet at a queueing discipline.
func (a *Assembler) handleQueue(e *capture.Event) {
	h := &e.Header
	at := int64(h.Time)
	if p := a.byPointer[h.Skb]; p != nil && p.continues(h) {
		hop := p.hop(h)
		if hop.queued == 0 {
			hop.queued = at
		}
		return
	}
	if h.Flags&capture.TCP == 0 {
		a.summary.Unreadable++
		return
	}
	p := a.add(e)
	p.Sent = &Sent{}
	p.Seq = a.mine.sure(h.Seq)
	if p.Flags&FlagACK != 0 {
		p.Ack = a.peer.sure(h.Ack)
	}
	p.gso = h.GsoSize
	p.split = h.GsoSize > 0 && h.GsoSegments > 1
	p.span = span{p.Seq, p.Seq + int64(h.Length) + p.control()}
	p.hop(h).queued = at
	a.point(p, h.Skb)
	a.lastSent = p
	a.summary.Sent++
	a.summary.SentBytes += int64(p.Length)
	if p.span.length() == 0 {
		return
	}
	p.left = spans{p.span}
	a.widest = max(a.widest, p.span.length())
	switch {
	case a.sentSet && p.span.start < a.sent:
		a.markRetransmission(p)
	case a.sentSet:
		a.summary.Unseen += p.span.start - a.sent
	}
	a.sentSet, a.sent = true, max(a.sent, p.span.end)
	if a.unaSet {
		// Remove the parts that are already acknowledged.
		p.left = p.left.without(span{least, a.una})
		p.needless = p.span.length() - p.left.length()
		if len(p.left) == 0 {
			p.doneAt = p.at
			return
		}
	}
	i, _ := slices.BinarySearchFunc(a.flight, p, byStart)
	a.flight = slices.Insert(a.flight, i, p)
	p.flying = true
}

func byStart(p, q *packet) int {
	return cmp.Or(cmp.Compare(p.span.start, q.span.start), cmp.Compare(p.Number, q.Number))
}

// continues returns whether an event of a queueing discipline is a further hop of the packet that the last driver
// received: an upper interface passed the packet to a lower one.
func (p *packet) continues(h *capture.Header) bool {
	last := &p.last
	return last.Time != 0 && last.Skb == h.Skb && last.Device != h.Device && int64(h.Time-last.Time) <= nextHop &&
		(h.Flags&capture.TCP == 0 || last.Flags&capture.TCP == 0 || last.Seq == h.Seq && last.Length == h.Length)
}

// markRetransmission records that a packet repeats bytes of earlier packets.
func (a *Assembler) markRetransmission(p *packet) {
	p.Sent.Retransmission = &Retransmission{Ordinal: 1}
	a.summary.Retransmissions++
	var before *packet
	for q := range a.overlapping(p.span) {
		a.overlapped(q)
		if q.Sent.Again == 0 {
			q.Sent.Again = p.Number
		}
		if q.span.start <= p.span.start && p.span.start < q.span.end && (before == nil || q.Number > before.Number) {
			before = q
		}
	}
	a.overlapped(p)
	if before == nil {
		return
	}
	p.root = cmp.Or(before.root, before)
	r := p.Sent.Retransmission
	r.Of = p.root.Number
	r.After = time.Duration(p.at - cmp.Or(before.driver, before.at))
	if b := before.Sent.Retransmission; b != nil {
		r.Ordinal = b.Ordinal + 1
	}
}

func (a *Assembler) overlapped(p *packet) {
	if !p.resent {
		p.resent = true
		a.resent = append(a.resent, p)
	}
}

// handleDriver processes the event of a packet, or of a part of a packet, at a driver.
func (a *Assembler) handleDriver(h *capture.Header) {
	at := int64(h.Time)
	known := h.Flags&capture.TCP != 0
	var s span
	if known && a.mine.set {
		start := a.mine.at(h.Seq)
		s = span{start, start + int64(h.Length) + (&packet{Packet: Packet{Flags: Flags(h.Tcp)}}).control()}
	}
	p := a.byPointer[h.Skb]
	if p == nil || known && !p.contains(s) {
		p = a.holder(h, s)
	}
	if p == nil {
		a.summary.Strays++
		return
	}
	hop := p.hop(h)
	hop.driver = at
	hop.bytes += s.length()
	hop.Segments++
	hop.wire += max(1, int(h.GsoSegments))
	p.device = p.device || h.GsoSegments > 1
	p.driver = at
	p.last = *h
	a.point(p, h.Skb)
}

// hop finds or creates the hop at the interface of an event.
func (p *packet) hop(h *capture.Header) *hop {
	for i := range p.hops {
		if p.hops[i].device == h.Device {
			return &p.hops[i]
		}
	}
	p.hops = append(p.hops, hop{Hop: Hop{Index: int(h.Ifindex), Interface: name(h)}, device: h.Device})
	return &p.hops[len(p.hops)-1]
}

func (a *Assembler) point(p *packet, pointer uint64) {
	if a.byPointer[pointer] == p || len(p.pointers) == maxPointers {
		return
	}
	a.byPointer[pointer] = p
	p.pointers = append(p.pointers, pointer)
}

func (p *packet) contains(s span) bool { return p.span.start <= s.start && s.end <= p.span.end }

// holder returns the packet that contains a segment: the first packet that waits for the driver, otherwise the last
// one.
func (a *Assembler) holder(h *capture.Header, s span) (found *packet) {
	waits := false
	for p := range a.overlapping(s) {
		if !p.contains(s) {
			continue
		}
		i := slices.IndexFunc(p.hops, func(o hop) bool { return o.device == h.Device })
		room := i >= 0 && p.hops[i].bytes+s.length() <= p.span.length()
		switch {
		case found == nil, room && !waits, room == waits && (p.Number < found.Number) == waits:
			found, waits = p, room
		}
	}
	return found
}

// overlapping yields the remembered packets that overlap a span.
func (a *Assembler) overlapping(s span) iter.Seq[*packet] {
	return func(yield func(*packet) bool) {
		for p := range a.inFlight(s) {
			if !yield(p) {
				return
			}
		}
		for _, p := range a.resent {
			if !p.flying && p.span.and(s).length() > 0 && !yield(p) {
				return
			}
		}
	}
}

// handleRetransmit processes TCP's event that the last packet is a retransmission.
func (a *Assembler) handleRetransmit(h *capture.Header) {
	p := a.lastSent
	if p == nil || p.emitted || int64(h.Time)-p.at > sameCall {
		return
	}
	if at := a.mine.at(h.Seq); at < p.span.start || at >= p.span.end {
		return
	}
	if p.Sent.Retransmission == nil {
		// The first transmission was before the capture.
		p.Sent.Retransmission = &Retransmission{Ordinal: 1}
		a.summary.Retransmissions++
	}
	p.Sent.Retransmission.Cause = cause(h.Congestion)
}

// cause converts enum tcp_ca_state of linux/tcp.h.
func cause(state uint8) Cause {
	switch state {
	case 4: // TCP_CA_Loss
		return CauseTimeout
	case 3: // TCP_CA_Recovery
		return CauseFast
	}
	return CauseProbe
}

// handleReceive processes a received packet.
func (a *Assembler) handleReceive(e *capture.Event) {
	h, last := &e.Header, &a.lastReceived
	if h.Flags&capture.TCP == 0 {
		a.summary.Unreadable++
		return
	}
	early := h.Flags&capture.Early != 0
	if early && h.Skb == last.Skb && h.Device != last.Device && int64(h.Time-last.Time) <= nextHop &&
		h.Seq == last.Seq && h.Ack == last.Ack && h.Length == last.Length && h.Tcp == last.Tcp {
		return // the same packet, seen again on an upper interface
	}
	p := a.add(e)
	r := &Received{Early: early}
	p.Received = r
	p.Seq = a.peer.at(h.Seq)
	a.summary.Received++
	a.summary.ReceivedBytes += int64(p.Length)
	if p.Flags&FlagACK != 0 {
		p.Ack = a.mine.at(h.Ack)
		blocks := a.selective(p)
		r.Duplicate = a.unaSet && p.Ack == a.una && p.Length == 0 && p.control() == 0 && h.Window == last.Window && len(a.flight) > 0
		a.acknowledge(p.at, p, p.Ack, p.options, blocks)
	}
	a.lastReceived = *h
}

// control returns the number of sequence numbers of SYN and FIN.
func (p *packet) control() (n int64) {
	if p.Flags&FlagSYN != 0 {
		n++
	}
	if p.Flags&FlagFIN != 0 {
		n++
	}
	return n
}

// selective returns the SACK blocks of a packet, and processes a D-SACK (RFC 2883).
func (a *Assembler) selective(p *packet) (blocks []span) {
	for _, b := range p.options.sack[:p.options.blocks] {
		s := span{a.mine.at(b[0]), a.mine.at(b[1])}
		if s.length() > 0 {
			blocks = append(blocks, s)
		}
	}
	if len(blocks) > 0 && (blocks[0].end <= p.Ack || len(blocks) > 1 && blocks[1].start <= blocks[0].start && blocks[0].end <= blocks[1].end) {
		p.Received.Twice = &Block{blocks[0].start, blocks[0].end}
		for _, q := range a.resent {
			if q.span.and(blocks[0]).length() > 0 {
				q.undoLoss(blocks[0])
			}
		}
		blocks = blocks[1:]
	}
	for _, s := range blocks {
		p.Received.Selective = append(p.Received.Selective, Block{s.start, s.end})
	}
	return blocks
}

// undoLoss records that a part counted as lost was received.
func (p *packet) undoLoss(s span) {
	p.Sent.Twice = true
	before := p.lost.length()
	p.lost = p.lost.without(s)
	p.credited += before - p.lost.length()
}

// ackEvent is an acknowledgement, with the packets that it acknowledges.
type ackEvent struct {
	at        int64
	by        *packet
	options   options
	edge      int64 // the echoed timestamp identifies the packet
	selective bool
	packets   []int // completely acknowledged packets
}

// acknowledge processes an acknowledgement of all sequence numbers before ack, and of SACK blocks. by is nil if the
// acknowledging packet was not seen.
func (a *Assembler) acknowledge(at int64, by *packet, ack int64, o options, blocks []span) {
	w := &ackEvent{at: at, by: by, options: o, edge: least}
	before := int64(least)
	if a.unaSet {
		before = a.una
		w.edge = before
	}
	if ack > before {
		a.account(w, span{before, ack})
		a.unaSet, a.una = true, ack
	}
	w.edge, w.selective = least, true
	for _, s := range blocks {
		a.account(w, s.and(span{a.una, most}))
	}
	a.removeAcked()
	if by != nil {
		by.Received.Packets = ranges(w.packets)
	}
}

// removeAcked removes packets below a.una from a.flight.
func (a *Assembler) removeAcked() {
	n, _ := slices.BinarySearchFunc(a.flight, a.una, func(p *packet, una int64) int { return cmp.Compare(p.span.start, una) })
	kept := a.flight[:0:0]
	for _, p := range a.flight[:n] {
		if len(p.left) > 0 {
			kept = append(kept, p)
		} else {
			p.flying = false
		}
	}
	copy(a.flight[n-len(kept):n], kept)
	clear(a.flight[:n-len(kept)])
	a.flight = a.flight[n-len(kept):]
}

// account finds the packets that delivered the acknowledged sequence numbers.
func (a *Assembler) account(w *ackEvent, s span) {
	if s.length() <= 0 {
		return
	}
	var cluster []*packet
	end := int64(0)
	for p := range a.inFlight(s) {
		if !p.left.overlap(s) {
			continue
		}
		if len(cluster) > 0 && p.span.start >= end {
			a.settleCluster(w, s, cluster)
			cluster = cluster[:0]
		}
		if len(cluster) == 0 {
			end = p.span.end
		}
		cluster = append(cluster, p)
		end = max(end, p.span.end)
	}
	a.settleCluster(w, s, cluster)
}

// inFlight yields the overlapping packets that are not below a.una, in order.
func (a *Assembler) inFlight(s span) iter.Seq[*packet] {
	return func(yield func(*packet) bool) {
		first, _ := slices.BinarySearchFunc(a.flight, s.start, func(p *packet, start int64) int {
			return cmp.Compare(p.span.start+a.widest, start)
		})
		for _, p := range a.flight[first:] {
			if p.span.start >= s.end {
				return
			}
			if p.span.and(s).length() > 0 && !yield(p) {
				return
			}
		}
	}
}

// settleCluster assigns an acknowledgement to a set of overlapping packets.
func (a *Assembler) settleCluster(w *ackEvent, s span, cluster []*packet) {
	if len(cluster) == 0 {
		return
	}
	if p := cluster[0]; len(cluster) == 1 && !p.resent && p.driver != 0 && w.at > p.driver {
		a.measure(w.at - p.driver)
	}
	if len(cluster) == 1 || len(cluster) > maxCluster {
		for _, p := range cluster {
			for _, one := range p.left {
				p.acknowledgePart(w, one.and(s))
			}
		}
		return
	}
	var cuts []int64
	for _, p := range cluster {
		for _, one := range p.left {
			if one = one.and(s); one.length() > 0 {
				cuts = append(cuts, one.start, one.end)
			}
		}
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	byNumber := slices.Clone(cluster)
	slices.SortFunc(byNumber, func(p, q *packet) int { return cmp.Compare(p.Number, q.Number) })
	for i := range cuts[:len(cuts)-1] {
		piece := span{cuts[i], cuts[i+1]}
		var first, winner *packet
		for _, p := range byNumber {
			if !p.left.covers(piece) {
				continue
			}
			if first == nil {
				first = p
			}
			if a.plausible(w, p, piece) {
				winner = p
			}
		}
		winner = cmp.Or(winner, first)
		if winner == nil {
			continue
		}
		for _, p := range byNumber {
			switch {
			case !p.left.covers(piece):
			case p == winner:
				p.acknowledgePart(w, piece)
			case p.Number < winner.Number:
				p.lost = append(p.lost, piece)
				p.settlePart(w, piece)
			default:
				p.needless += piece.length()
				p.settlePart(w, piece)
			}
		}
	}
}

// plausible returns whether an acknowledgement can answer a packet that repeats earlier bytes: it arrives at least half
// of the minimum RTT after the packet, and does not echo the timestamp of the earlier packet (RFC 3522).
func (a *Assembler) plausible(w *ackEvent, p *packet, s span) bool {
	if p.driver == 0 || w.at-p.driver < a.leastRTT/2 {
		return false
	}
	tells := s.start == w.edge && w.options.timestamps && p.options.timestamps
	return !tells || int32(w.options.reply-p.options.value) >= 0
}

func (a *Assembler) measure(rtt int64) {
	if a.rtt == 0 {
		a.rtt, a.leastRTT = rtt, rtt
		return
	}
	a.rtt += (rtt - a.rtt) / 8
	a.leastRTT = min(a.leastRTT, rtt)
}

// acknowledgePart records that a part of the packet was received.
func (p *packet) acknowledgePart(w *ackEvent, s span) {
	if s.length() <= 0 {
		return
	}
	p.credited += s.length()
	p.Sent.AckedBytes += p.payload(s)
	p.Sent.Sacked = p.Sent.Sacked || w.selective
	if p.firstAcked == 0 {
		p.firstAcked = w.at
	}
	p.acked = w.at
	p.Sent.AckedBy = 0
	if w.by != nil {
		p.Sent.AckedBy = w.by.Number
		w.by.Received.Acked += p.payload(s)
	}
	p.settlePart(w, s)
	if len(p.left) == 0 {
		w.packets = append(w.packets, p.Number)
	}
}

// settlePart records that a part of the packet is assigned.
func (p *packet) settlePart(w *ackEvent, s span) {
	p.left = p.left.without(s)
	if len(p.left) == 0 {
		p.doneAt = w.at
	}
}

// ranges converts packet numbers to ranges.
func ranges(numbers []int) (all []Range) {
	slices.Sort(numbers)
	for _, n := range numbers {
		if last := len(all) - 1; last >= 0 && all[last].Last == n-1 {
			all[last].Last = n
		} else {
			all = append(all, Range{n, n})
		}
	}
	return all
}

// finished returns whether no further event of a packet is expected.
func (a *Assembler) finished(p *packet) bool {
	age := a.now - p.at
	switch {
	case p.Sent == nil:
		return true
	case p.span.length() == 0:
		return p.driver != 0 && age >= settle || age >= giveUp
	case len(p.left) > 0:
		return false
	case p.resent:
		// The D-SACK arrives one round-trip time later.
		wait := giveUp
		if a.rtt > 0 {
			wait = min(max(2*a.rtt, settle), giveUp)
		}
		return a.now-p.doneAt >= wait
	}
	return true
}

// conclude sets the fate of a packet and removes the packet from memory.
func (a *Assembler) conclude(p *packet) {
	if p.Sent == nil {
		return
	}
	s := p.Sent
	a.describeSent(p)
	s.FirstAcked, s.Acked = a.clock.Time(p.firstAcked), a.clock.Time(p.acked)
	if p.driver != 0 && p.acked != 0 {
		s.Network = time.Duration(p.acked - p.driver)
	}
	for _, one := range p.lost {
		s.LostBytes += p.payload(one)
	}
	if s.Fate = a.fate(p); s.Fate != "" {
		a.summary.Fates[s.Fate]++
	}
	for _, pointer := range p.pointers {
		if a.byPointer[pointer] == p {
			delete(a.byPointer, pointer)
		}
	}
	if p.flying {
		i, _ := slices.BinarySearchFunc(a.flight, p, byStart)
		a.flight = slices.Delete(a.flight, i, i+1)
	}
	if p.resent {
		i := slices.Index(a.resent, p)
		a.resent = slices.Delete(a.resent, i, i+1)
	}
}

// payload returns the number of bytes of a span without SYN and FIN.
func (p *packet) payload(s span) int {
	data := span{p.span.end - int64(p.Length), p.span.end}
	if p.Flags&FlagFIN != 0 {
		data.start--
		data.end--
	}
	return int(s.and(data).length())
}

func (a *Assembler) fate(p *packet) Fate {
	lost := p.lost.length()
	switch {
	case len(p.left) > 0 || p.span.length() == 0:
		if p.driver == 0 && a.now-p.at >= giveUp {
			return Dropped
		}
		if p.span.length() > 0 {
			return Unacknowledged
		}
		return ""
	case p.credited == 0 && p.driver == 0:
		return Dropped
	case lost > 0 && p.credited == 0:
		return Lost
	case lost > 0:
		return PartlyLost
	case p.credited == 0:
		return Needless
	}
	return Acknowledged
}
