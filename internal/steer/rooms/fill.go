// SPDX-License-Identifier: Apache-2.0

package rooms

import (
	"net/netip"
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/clock"
	"sockeye/internal/config"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/stored"
	"sockeye/internal/steer/templates"
)

// fill is a slot whose member receives the waiting packets.
type fill struct {
	seat            *core.Seat
	before          bpf.Wait // wait of the slot before the fill
	began, deadline time.Time
	waited          time.Time // time at which the slot became empty
	stored          uint64    // datagrams that the room had received by then
	replayed        int       // datagrams of the room that were sent
	arrived         uint64    // datagrams that were steered to the slot before the first one
	sent            uint64    // datagrams that were sent
	last            time.Time // time of the last one
	alone           bool      // the receive buffer had no space for a datagram
	templates       []waitingDatagram
	addresses       []netip.Addr  // exporters whose templates are sent
	again           bool          // another host has handed over later templates of some exporters
	decoded         bool          // the member has decoded the templates
	idle            int           // samples in a row in which the member had nothing to do with the templates
	late            bool          // the slot is ready: templates and datagrams for devices that have moved
	holds           bool          // no new datagram passes until the templates have arrived
	starting        bool          // the member may not have finished its start: connections wait
	slept           int           // samples in a row in which its first thread slept
	ran             time.Duration // CPU time of this thread at the last sample
	connects        bool          // connections pass
	dumpLimit       time.Duration
	dumps           *dumps // nil if the datagrams do not wait for the routes
	limit           time.Duration
	flows           time.Time // begin of the templates and datagrams
}

// BeginFill begins to send the waiting packets to a new member whose sockets are registered, if packets wait for its slot. The caller
// must not make the slot ready until the fill has ended.
func (r *Rooms) BeginFill(seat *core.Seat, takesOver bool) error {
	wait, _, err := r.Path.Wait(seat.Slot)
	if err != nil {
		return err
	}
	limit := r.waitLengthOf(seat.Slot)
	// At a takeover, until is that of the last time at which the slot was empty.
	waits := !takesOver && limit > 0 && wait.Until > uint64(clock.Monotonic())
	if r.SlotState(seat.Slot).State == stored.Maint || !waits && !takesOver && len(r.withoutTemplates(seat.Slot, seat.ID())) == 0 {
		delete(r.vacated, seat.Slot)
		return nil
	}
	if !waits {
		limit = max(limit, templateTime)
	}
	waited := time.Now()
	if waits {
		waited = waited.Add(-max(0, limit-(time.Duration(wait.Until)-clock.Monotonic())))
	}
	before := wait
	wait.Filling = seat.Place.Ready() | bpf.Hold
	wait.Until = uint64(clock.Monotonic() + limit)
	if err := r.Path.SetWait(seat.Slot, wait); err != nil {
		return err
	}
	one := &fill{seat: seat, began: time.Now(), holds: true, waited: waited, stored: wait.Left, limit: limit}
	if (waits || takesOver) && r.hasSessions() {
		one.starting, one.dumpLimit = true, min(dumpLimit, limit/2)
		if takesOver {
			one.dumpLimit = takeoverDumpLimit
		}
	} else if err := r.beginFlows(one); err != nil {
		return fault.Join(err, r.Path.SetWait(seat.Slot, before))
	}
	one.before = before
	r.filling[seat.Slot] = one
	time.AfterFunc(0, func() { r.continueFill(one) })
	return nil
}

// CancelFill ends the fill of a member that could not be registered. The packets wait for the next one.
func (r *Rooms) CancelFill(seat *core.Seat) error {
	f := r.filling[seat.Slot]
	if f == nil || f.seat != seat {
		return nil
	}
	delete(r.filling, seat.Slot)
	r.closeTemporaryRooms()
	err := r.Path.SetWait(seat.Slot, f.before)
	r.ScheduleEnd(seat.Slot)
	return err
}

// beginLate begins to send templates, and datagrams in memory, to a member whose slot is ready. The first ones are sent at
// once.
func (r *Rooms) beginLate(f *fill) {
	slot, now := f.seat.Slot, time.Now()
	f.began, f.flows, f.deadline = now, now, now.Add(time.Minute)
	var err error
	if f.arrived, err = r.Path.Datagrams(slot); err != nil {
		r.Log.Error("datagrams not sent to the member", "slot", slot, "error", err)
		return
	}
	r.kept.running[slot] = f
	if done, _ := r.fillSome(f); done {
		r.endFill(f)
		return
	}
	go r.continueFill(f)
}

// continueFill sends the next datagrams to the member of a filling slot, or makes the slot ready if none is left.
func (r *Rooms) continueFill(f *fill) {
	for {
		r.Mu.Lock()
		if running := r.filling; r.Events == nil || r.Seats[f.seat.Slot] != f.seat ||
			!f.late && running[f.seat.Slot] != f || f.late && r.kept.running[f.seat.Slot] != f {
			r.Mu.Unlock()
			return
		}
		done, pause := r.fillSome(f)
		if !f.late {
			r.sendQueued() // of other slots
		}
		if done {
			r.endFill(f)
			r.Mu.Unlock()
			return
		}
		r.Mu.Unlock()
		time.Sleep(pause)
	}
}

// fillSome sends one batch, and reports whether no datagram is left. The next batch follows after the pause.
func (r *Rooms) fillSome(f *fill) (done bool, pause time.Duration) {
	slot := f.seat.Slot
	if f.starting {
		if !r.hasStarted(f) {
			return false, startInterval
		}
		f.starting = false
		if err := r.beginDumps(f); err != nil {
			r.Log.Error("connections wait", "slot", slot, "error", err)
		}
	}
	if f.dumps != nil {
		if !r.endDumps(f) {
			return false, dumpInterval
		}
		f.dumps = nil
		if err := r.beginFlows(f); err != nil {
			r.Log.Error("templates not sent", "slot", slot, "error", err)
		}
	}
	if time.Now().After(f.deadline) {
		before := r.lost[slot]
		for {
			d, ok := r.nextFor(f)
			if !ok {
				break
			}
			r.lost[slot]++
			r.countLeft(&d)
		}
		r.flushLeft()
		r.Log.Warn("the member did not receive the waiting datagrams", events.MemberNotReachable, "slot", slot, "pid", f.seat.Process.PID, "lost", r.lost[slot]-before)
		return true, 0
	}
	if !f.late && f.sent == 0 {
		var err error
		if f.arrived, err = r.Path.Datagrams(slot); err != nil {
			r.Log.Error("cannot count the datagrams of the slot: waiting datagrams are sent without pauses", "slot", slot, "error", err)
		}
	}
	// The datagrams pass the loopback interface, whose queue is short. The next batch waits for the previous one.
	if arrived, err := r.Path.Datagrams(slot); err == nil && arrived-f.arrived < f.sent && time.Since(f.last) < passTime {
		return false, fillPause / 10
	}
	// A datagram that has not arrived must not be overtaken by a new one.
	r.flushLeft()
	if f.holds && len(f.templates) == 0 {
		if !r.hasDecoded(f) {
			return false, decodePause
		}
		f.holds = false
		if err := r.endHold(f); err != nil {
			r.Log.Error("datagrams wait", "slot", slot, "error", err)
		}
	}
	space, err := r.receiveSpace(f.seat)
	if err != nil {
		return false, fillPause // the member is exiting
	}
	if f.late && len(f.templates) == 0 && r.queued[slot] != nil && !r.hasDecoded(f) {
		return false, decodePause
	}
	before, budget := f.sent, r.fillBudget(f)
	for range fillBatch {
		var d waitingDatagram
		isTemplate := len(f.templates) > 0
		if isTemplate {
			d = f.templates[0]
		} else if f.holds {
			return false, 0
		} else if budget--; budget < 0 {
			return false, fillPause
		} else if next, ok := r.nextFor(f); ok {
			d = next
		} else {
			return f.late || f.sent == before, 0
		}
		need := 2*len(d.Payload) + overhead
		// A buffer for less than one datagram takes one that is larger.
		fits := space[d.row] >= need || f.alone && space[d.row] >= 0
		if !fits {
			if !isTemplate {
				r.requeue(slot, d)
			}
			f.alone = true
			return false, fillPause
		}
		f.alone = false
		space[d.row] -= need
		if isTemplate {
			f.templates = f.templates[1:]
			if err := r.send(d.Datagram); err != nil {
				r.noteSendError(slot, err)
				continue
			}
			f.sent++
			f.last = time.Now()
		} else if f.replayed++; r.resend(slot, &d) {
			f.sent++
			f.last = time.Now()
		}
	}
	return false, 0
}

// beginFlows begins with the templates and datagrams for the member of a filling slot.
func (r *Rooms) beginFlows(f *fill) error {
	slot := f.seat.Slot
	f.flows, f.deadline = time.Now(), time.Now().Add(f.limit)
	f.addresses = r.withoutTemplates(slot, f.seat.ID())
	if len(f.addresses) == 0 {
		return nil
	}
	if err := r.openTemporaryRooms(); err != nil {
		return err
	}
	f.templates = r.templateDatagrams(f.addresses, false, r.nextSequences(slot))
	return nil
}

// hasDecoded reports whether a member has decoded the templates that it was sent, or is not waited for any longer. A collector with several
// threads, as goflow2, may decode a record before the datagram in front of it. When the receive buffers are empty, and no thread runs or
// waits for a CPU, no thread decodes a template.
func (r *Rooms) hasDecoded(f *fill) bool {
	since, limit := time.Since(f.last), templateLimit
	if !f.late {
		limit = min(limit, f.limit/4) // the slot's packets do not wait longer than f.limit
	}
	if f.decoded || len(f.addresses) == 0 || since >= limit {
		f.decoded = true
		return true
	}
	if since < templatePause {
		return false
	}
	if r.isIdle(f.seat) {
		f.idle++
	} else {
		f.idle = 0
	}
	f.decoded = f.idle >= templateSamples
	return f.decoded
}

// isIdle reports whether a member has read all datagrams, and its threads sleep. A process that cannot be read counts as asleep.
func (r *Rooms) isIdle(seat *core.Seat) bool {
	buffers, err := r.receiveBuffers(seat)
	if err != nil {
		return false
	}
	for _, memory := range buffers {
		if memory[allocatedWord] > 0 {
			return false
		}
	}
	asleep, err := member.AllSleep(seat.Process.PID)
	return err != nil || asleep
}

// nextFor returns the next datagram for the member of a slot that fills, or that was ready before.
func (r *Rooms) nextFor(f *fill) (d waitingDatagram, ok bool) {
	slot := f.seat.Slot
	if d, ok := r.dequeue(slot); ok {
		return d, true
	}
	if f.late {
		return d, false
	}
	return r.nextUnread(slot)
}

// maxPeeked is the number of datagrams that are read before the templates of their exporters are sent.
const maxPeeked = 256

// nextSequences reads datagrams from the rooms, and returns the sequence numbers of the first message of each exporter that
// waits for a slot.
func (r *Rooms) nextSequences(slot int) map[templates.Session]uint32 {
	next := make(map[templates.Session]uint32)
	if !r.Exist() {
		return next
	}
	for r.queued[slot].len() < maxPeeked {
		d, ok := r.nextUnread(slot)
		if !ok {
			break
		}
		r.enqueue(slot, d)
	}
	r.flushLeft()
	for d := range r.queued[slot].all() {
		version, domain, sequence, ok := templates.Sequence(d.Payload)
		of := templates.Session{Source: d.From, Row: d.row, Version: version, Domain: domain}
		if _, known := next[of]; ok && !known {
			next[of] = sequence
		}
	}
	return next
}

// fillBudget returns the number of datagrams that the member may receive now. The first ones are free, because most rooms
// have few.
func (r *Rooms) fillBudget(f *fill) int {
	if f.late {
		return fillBatch + int(leastRate*time.Since(f.flows).Seconds()) - f.replayed
	}
	_, room, err := r.Path.Wait(f.seat.Slot)
	if err != nil {
		return fillBatch
	}
	came := float64(room.Datagrams-f.stored) / max(time.Since(f.waited).Seconds(), 1e-3)
	rate := max(leastRate, fillFactor*came)
	return fillBatch + int(rate*time.Since(f.flows).Seconds()) - f.replayed
}

// endHold lets new datagrams of a filling slot pass when no other datagram waits.
func (r *Rooms) endHold(f *fill) error {
	wait, _, err := r.Path.Wait(f.seat.Slot)
	if err != nil {
		return err
	}
	wait.Filling &^= bpf.Hold
	wait.Until = max(wait.Until, uint64(clock.Monotonic()+f.limit))
	return r.Path.SetWait(f.seat.Slot, wait)
}

// receiveSpace returns the free memory of the receive buffers of a member by row, half of their size at most: the datagrams
// that leave the room must not displace each other.
func (r *Rooms) receiveSpace(seat *core.Seat) (map[int]int, error) {
	buffers, err := r.receiveBuffers(seat)
	space := make(map[int]int)
	for row, memory := range buffers {
		space[row] = int(memory[limitWord])/2 - int(memory[allocatedWord])
	}
	return space, err
}

// receiveBuffers returns the memory of the UDP sockets of a member by row, as socketMemory does.
func (r *Rooms) receiveBuffers(seat *core.Seat) (map[int][9]uint32, error) {
	buffers := make(map[int][9]uint32)
	for row := range seat.Sockets {
		if r.Listeners[row].Protocol != config.UDP {
			continue
		}
		socket, err := seat.OpenSocket(row)
		if err != nil {
			return nil, err
		}
		memory, err := socketMemory(socket.FD())
		socket.Close()
		if err != nil {
			return nil, err
		}
		buffers[row] = memory
	}
	return buffers, nil
}

// endFill makes a slot ready whose member has received the waiting packets.
func (r *Rooms) endFill(f *fill) {
	slot := f.seat.Slot
	arrived, err := r.Path.Datagrams(slot)
	missing := max(0, int64(f.sent)-int64(arrived-f.arrived))
	if f.late || err != nil || missing == 0 { // otherwise ReplayMoved sends the templates again
		r.noteReplayed(f.addresses, f.seat.ID())
	}
	r.flushLeft()
	if f.late {
		delete(r.kept.running, slot)
		if len(f.addresses) > 0 {
			r.Log.Info("templates sent to the member that newly serves their exporters", events.TemplatesReplayed, "slot", slot, "pid", f.seat.Process.PID,
				"exporters", len(f.addresses), "datagrams", f.sent-uint64(f.replayed))
		}
		if f.replayed > 0 {
			r.Log.Info("waiting datagrams sent to the member that serves their devices now", events.ReplayedToMember, "slot", slot, "pid", f.seat.Process.PID, "datagrams", f.replayed)
		}
		r.ReplayMoved() // others may have come meanwhile
		return
	}
	delete(r.filling, slot)
	delete(r.vacated, slot)
	r.closeTemporaryRooms()
	if err := r.SetReady(f.seat); err != nil {
		r.Log.Error("slot not ready", "slot", slot, "error", err)
		r.Actions.VacateSlot(slot, "socket closed")
		return
	}
	r.deliverQueued()
	r.emptyRooms()
	r.markEmpty(slot)
	r.released = time.Now()
	if err := r.rotateRooms(); err != nil {
		r.Log.Error("waiting connections not released", "slot", slot, "error", err)
	}
	if err == nil && missing > 0 {
		r.lost[slot] += uint64(missing)
		r.Log.Warn("datagrams did not arrive over the loopback interface", events.ReplayIncomplete, "slot", slot, "lost", missing)
	}
	if f.again || err == nil && missing > 0 {
		r.ReplayMoved()
	}
	r.Log.Info("slot filled", events.TrafficReleased, "slot", slot, "pid", f.seat.Process.PID, "exporters", len(f.addresses), "datagrams", f.sent,
		"took", time.Since(f.began).Round(time.Millisecond).String())
	if err := r.Actions.Advance(); err != nil {
		r.Log.Error("devices not moved", "error", err)
	}
	r.Actions.CheckSoon()
}

// ServingConnections returns the decision of the data path about connections: the member of a filling slot may have them
// before the datagrams.
func (r *Rooms) ServingConnections() *core.Serving {
	v := r.Serving()
	for slot, f := range r.filling {
		if f.connects {
			v.Members[slot] = f.seat.ID()
		}
	}
	return v
}
