// SPDX-License-Identifier: Apache-2.0

// Package rooms keeps what arrives for a slot without a member, and the templates of exporters, for the next member of
// the slot.
package rooms

import (
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/clock"
	"sockeye/internal/config"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/placement"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/steer/listener"
	"sockeye/internal/steer/spoof"
	"sockeye/internal/steer/stored"
	"sockeye/internal/steer/templates"
)

// With when_empty: {wait: 30s}, the packets for an empty slot wait for the next member of the slot. Each listener has one
// waiting room, which all slots share: a socket that the keeper process has open too, so that it outlives the agent. The
// data path decides, with or without an agent, which packets wait, and for how long (struct steer_wait):
//
//   - Datagrams wait in the receive buffer of the room. When the slot has a member, the agent sends them again, from the
//     address of their sender, to the member (see package replay), and then makes the slot ready. The data path keeps new
//     datagrams in the room until the last datagram has left the room, so that the member receives all in their order.
//   - TCP connections: with SO_REUSEPORT and Linux 5.14, the kernel completes their handshakes and receives their data. To
//     release them, the agent shuts the listening socket down: the kernel migrates each connection to the member of its
//     device, or to a second room if its slot is still empty. Otherwise, a socket filter of the room drops SYNs, and the
//     peers send theirs again after 1, 3, 7 s, and so on (RFC 6298).
//
// A slot whose member must first receive the waiting packets is filling. It is not ready until then.

const (
	// fillBatch is the maximum number of datagrams that are sent again while the lock is held.
	fillBatch = 256
	// templateTime is the maximum time for which a slot without a waiting room waits until its member knows the templates.
	templateTime = 5 * time.Second
	// templatePause is the minimum time between the templates and the first records, and templateLimit the maximum time for which
	// these wait until the member has decoded the templates.
	templatePause = 20 * time.Millisecond
	templateLimit = 500 * time.Millisecond
	// templateSamples is the number of samples in a row from which a member that sleeps has decoded the templates.
	templateSamples = 2
	// decodePause is the time between two of these samples, which read the state of each thread.
	decodePause = 5 * time.Millisecond
	// passTime is the time after which a datagram that was sent again and has not arrived is considered lost.
	passTime = 500 * time.Millisecond
	// A member receives the waiting packets at fillFactor times the rate at which they arrived, and at leastRate datagrams a second or more.
	// Faster, nfacctd reads all from its socket and loses records on the way to its plugins, if the host is busy.
	fillFactor = 3
	leastRate  = 5000
	// fillPause is the time between two batches if the member's receive buffer is half full.
	fillPause = time.Millisecond
	// lateTime is the time after a change of a slot for which its rooms are searched for packets that were on their way
	// to the room.
	lateTime = 5 * time.Second
	// overhead is the approximate memory of the kernel for a datagram, without its payload (struct sk_buff).
	overhead = 1024
)

// Rooms contains the waiting rooms of a service. Their sockets are those of the keeper.
type Rooms struct {
	*core.Service
	kept keptTemplates
	// connected counts the passes that have not found a device, by slot and session.Key; see NoteConnected.
	connected map[int]map[string]int
	// vacated has the slots that became empty, and have had no member since that has received all that waited.
	vacated  map[int]time.Time
	filling  map[int]*fill       // by slot
	queued   map[int]*queue      // datagrams that were read from a room, by the slot for which they wait
	timers   map[int]*time.Timer // ends of the waits by slot
	released time.Time           // time of the last change that let packets leave a room
	// arrived counts the SYNs by slot that had come to the rooms when the slot was last seen not to wait, and departed is the
	// last time when handshakes of such a slot could be unfinished; see mayHaveDeparted.
	arrived  map[int]uint64
	departed time.Time
	prepared [bpf.MaxListeners]*prepared // settings of the rooms' sockets
	sender   *spoof.Sender               // nil before the first replay
	buffer   []byte
	memory   [bpf.MaxListeners]int64 // size of the datagrams in queued, by row
	stale    map[int]uint64          // datagrams in the rooms whose wait has ended, by slot; see endWait
	replayed map[int]uint64          // datagrams since the start of the agent, by slot
	left     map[int]bpf.Room        // datagrams that have left the rooms, before flushLeft
	unread   *placement.Mapping      // by which unread datagrams were stored; nil: the mapping in force
	lost     map[int]uint64          // datagrams whose wait has ended, or that could not be sent again, by slot
	err      error                   // last error of the sender
}

// nobody is the slot of no device: nextUnread delivers all datagrams.
const nobody = -1

// waitingDatagram is a datagram that waits, and the row of its listener.
type waitingDatagram struct {
	spoof.Datagram
	row    int
	stored int // slot for which the data path has counted it
}

// queue contains datagrams in memory. A nil queue is empty.
type queue struct {
	list []waitingDatagram
	head int // index of the first one
}

// New returns the rooms of a service. They open with its keeper sockets.
func New(s *core.Service) *Rooms {
	return &Rooms{
		Service: s, kept: newKeptTemplates(), connected: make(map[int]map[string]int),
		vacated: make(map[int]time.Time), filling: make(map[int]*fill), queued: make(map[int]*queue), timers: make(map[int]*time.Timer),
		replayed: make(map[int]uint64), lost: make(map[int]uint64), left: make(map[int]bpf.Room), arrived: make(map[int]uint64),
		stale: make(map[int]uint64),
	}
}

// Exist reports whether the listeners have waiting rooms.
func (r *Rooms) Exist() bool { return r.Config.WhenEmpty.Room != nil || r.Config.Takeover }

// acceptsWaiting reports whether the kernel completes the handshakes of waiting connections.
func (r *Rooms) acceptsWaiting() bool { return !r.UsesLookup() && r.Path.Migrates() }

func (r *Rooms) waitLength() time.Duration {
	return time.Duration(r.Room().Wait) * time.Microsecond
}

// IsFilling reports whether the member of a slot receives the waiting packets.
func (r *Rooms) IsFilling(slot int) bool { return r.filling[slot] != nil }

// Close stops the timers and closes the sender. What waits stays in the sockets of the keeper.
func (r *Rooms) Close() {
	for _, timer := range r.timers {
		timer.Stop()
	}
	r.LeaveNetns()
}

// LeaveNetns closes the sockets that send to the members, and those of openTemporaryRooms, which are in the network
// namespace of the service.
func (r *Rooms) LeaveNetns() {
	if r.sender != nil {
		r.sender.Close()
		r.sender = nil
	}
	r.closeTemporaryRooms()
	clear(r.arrived) // the next data path may count from 0
}

// WriteWaits writes the time for which packets wait for each slot, and begins to wait for slots that are empty for the
// first time.
func (r *Rooms) WriteWaits() error {
	var errs []error
	ended := false
	for slot := range bpf.MaxSlots {
		wait, _, err := r.Path.Wait(slot)
		if err != nil {
			return err
		}
		length := r.waitLengthOf(slot)
		if r.SlotState(slot).State == stored.Maint {
			delete(r.filling, slot)
		}
		if length == 0 && wait == (bpf.Wait{}) {
			continue
		}
		r.closeTemporaryRooms()
		begins := length > 0 && wait.Until == 0 && r.Seats[slot] == nil
		switch {
		case wait.Length == uint64(length) && !begins:
			r.ScheduleEnd(slot)
			continue
		case length == 0 && r.filling[slot] == nil:
			ended = ended || wait.Until > 0
			wait.Until = 0
		case begins:
			wait.Until = uint64(clock.Monotonic() + length)
		}
		wait.Length = uint64(length)
		errs = append(errs, r.Path.SetWait(slot, wait))
		r.ScheduleEnd(slot)
	}
	if ended && r.Exist() { // discards, and counts, what waited
		r.emptyRooms()
		errs = append(errs, r.rotateRooms())
	}
	return fault.Join(errs...)
}

// BeginWait makes the data path store the packets for a slot that is about to be closed.
func (r *Rooms) BeginWait(slot int) {
	if _, before := r.vacated[slot]; !before {
		r.vacated[slot] = time.Now()
	}
	delete(r.filling, slot)
	r.closeTemporaryRooms()
	delete(r.kept.running, slot)
	length := r.waitLengthOf(slot)
	wait, _, err := r.Path.Wait(slot)
	if err == nil {
		wait.Length, wait.Filling, wait.Until = uint64(length), 0, 0
		if length > 0 {
			wait.Until = uint64(clock.Monotonic() + length)
		} else {
			r.released = time.Now() // the room may have packets of an unfinished takeover
		}
		err = r.Path.SetWait(slot, wait)
	}
	if err != nil {
		r.Log.Error("packets do not wait", "slot", slot, "error", err)
	}
}

// waitLengthOf returns the time for which the packets of a slot wait. Those of a slot in maint are refused.
func (r *Rooms) waitLengthOf(slot int) time.Duration {
	if slot >= r.Config.Slots || r.SlotState(slot).State == stored.Maint {
		return 0
	}
	return r.waitLength()
}

// ScheduleEnd schedules the end of the wait of a slot.
func (r *Rooms) ScheduleEnd(slot int) {
	if timer := r.timers[slot]; timer != nil {
		timer.Stop()
		delete(r.timers, slot)
	}
	wait, _, err := r.Path.Wait(slot)
	if err != nil || wait.Until == 0 || r.Seats[slot] != nil {
		return
	}
	left := time.Duration(wait.Until) - clock.Monotonic()
	var timer *time.Timer
	timer = time.AfterFunc(max(left, 0)+time.Millisecond, func() {
		r.Mu.Lock()
		defer r.Mu.Unlock()
		if r.Events == nil || r.timers[slot] != timer || r.Seats[slot] != nil {
			return
		}
		delete(r.timers, slot)
		if !r.IsWaiting(slot) {
			r.endWait(slot)
		}
	})
	r.timers[slot] = timer
}

// endWait discards the packets that wait for a slot.
func (r *Rooms) endWait(slot int) {
	_, room, err := r.Path.Wait(slot)
	before := r.lost[slot]
	if err == nil {
		r.emptyRooms()
		err = fault.Join(r.rotateRooms(), r.discardRest(slot))
	}
	if err != nil {
		r.Log.Error("waiting rooms not emptied", "slot", slot, "error", err)
	}
	if lost := r.lost[slot] - before; r.HasDevices(slot) && (lost > 0 || room.Connections > 0) {
		r.Log.Warn("no member came in time: the devices of the slot are refused", events.TrafficDiscarded, "slot", slot, "waited", r.waitLength().String(), "datagrams", lost)
	}
	r.markEmpty(slot)
}

// discardRest discards what emptyRooms has left of a slot, because another slot waits. What is in the sockets of the rooms is
// discarded when it is read.
func (r *Rooms) discardRest(slot int) error {
	for _, d := range r.takeQueue(slot) {
		r.lost[slot]++
		r.countLeft(&d)
	}
	r.flushLeft()
	wait, room, err := r.Path.Wait(slot)
	if err != nil {
		return err
	}
	r.stale[slot] += room.Datagrams - wait.Left
	r.lost[slot] += room.Datagrams - wait.Left
	return nil
}

// size returns the memory of a datagram as prepared.size counts it.
func (d *waitingDatagram) size() int64 { return int64(len(d.Payload)) + overhead/2 }

// requeue keeps a datagram of dequeue again, in front of the others.
func (r *Rooms) requeue(slot int, d waitingDatagram) {
	q := r.queued[slot]
	if q == nil || q.head == 0 {
		rest := q
		delete(r.queued, slot)
		r.enqueue(slot, d)
		if rest != nil {
			r.queued[slot].list = append(r.queued[slot].list, rest.list...)
		}
		return
	}
	q.head--
	q.list[q.head] = d
	r.memory[d.row] += d.size()
}

// dequeue removes the first datagram of a slot from memory.
func (r *Rooms) dequeue(slot int) (d waitingDatagram, ok bool) {
	q := r.queued[slot]
	if q == nil {
		return d, false
	}
	d, q.list[q.head] = q.list[q.head], waitingDatagram{}
	r.memory[d.row] -= d.size()
	switch q.head++; {
	case q.head == len(q.list):
		delete(r.queued, slot)
	case q.head > len(q.list)/2 && q.head > fillBatch:
		q.list, q.head = slices.Clone(q.list[q.head:]), 0
	}
	return d, true
}

// DeliverMoved delivers the packets of slots whose devices now have another slot to the members of that slot. before is the
// mapping before the change.
func (r *Rooms) DeliverMoved(before *placement.Mapping) {
	if !r.Exist() {
		return
	}
	named := before.Devices != r.Mapping.Devices || !before.SamePins(r.Mapping)
	moved := false
	for slot := range r.Config.Slots {
		moved = moved || r.IsWaiting(slot) && (named || r.loses(slot, before)) // also while the slot fills
	}
	if !moved {
		return
	}
	r.rehome()
	r.unread = before
	r.nextUnread(nobody)
	r.unread = nil
	r.deliverQueued()
	r.flushLeft()
	for slot := range r.Config.Slots {
		if r.Seats[slot] == nil && !r.HasDevices(slot) {
			r.markEmpty(slot)
		}
	}
	r.released, r.departed = time.Now(), time.Now()
	if err := r.rotateRooms(); err != nil {
		r.Log.Error("waiting connections not released", "error", err)
	}
}

// markEmpty notes that all datagrams of a slot have left the rooms.
func (r *Rooms) markEmpty(slot int) {
	wait, room, err := r.Path.Wait(slot)
	if err == nil && (wait.Left != room.Datagrams || wait.LeftBytes != room.Bytes || wait.Filling != 0) {
		wait.Left, wait.LeftBytes, wait.Filling = room.Datagrams, room.Bytes, 0
		err = r.Path.SetWait(slot, wait)
	}
	if err != nil {
		r.Log.Error("waiting room not marked empty", "slot", slot, "error", err)
	}
}

// rehome moves what is in memory for filling slots, and belongs to another slot now, to that slot. The data path steers by
// the new mapping what the agent sends again. What was sent just before may be at the other slot, and is not missing here.
func (r *Rooms) rehome() {
	for slot, f := range r.filling {
		moved := func(d waitingDatagram) bool {
			home, _ := r.Mapping.Slot(d.From.Addr())
			return home != slot
		}
		f.templates = slices.DeleteFunc(f.templates, moved)
		if arrived, err := r.Path.Datagrams(slot); err == nil && f.sent > 0 {
			f.sent = min(f.sent, arrived-f.arrived)
		}
		for _, d := range r.takeQueue(slot) {
			if home, _ := r.Mapping.Slot(d.From.Addr()); home != slot {
				r.deliver(home, d)
			} else {
				r.enqueue(slot, d)
			}
		}
	}
}

// loses reports whether a slot had buckets that it has no more.
func (r *Rooms) loses(slot int, before *placement.Mapping) bool {
	for bucket, was := range before.Table.Bucket {
		if int(was) == slot && int(r.Mapping.Table.Bucket[bucket]) != slot {
			return true
		}
	}
	return false
}

// prepared contains the settings of the socket of a room.
type prepared struct {
	cookie uint64
	port   uint16 // of the room of a UDP listener with sk_lookup
	room   config.Room
	slots  int
}

// resend sends a datagram to the member of its slot.
func (r *Rooms) resend(slot int, d *waitingDatagram) bool {
	r.countLeft(d)
	if r.KeepsTemplates() && templates.HasTemplates(d.Payload) {
		r.learn(d.From, d.row, d.Payload, member.ID{})
	}
	send := d.Datagram
	if p := r.prepared[d.row]; p != nil && p.port != 0 {
		send.To = netip.AddrPortFrom(listener.Loopback(send.From.Addr()), p.port)
	}
	if err := r.send(send); err != nil {
		r.lost[slot]++
		r.noteSendError(slot, err)
		return false
	}
	r.replayed[slot]++
	return true
}

// ReturnQueued sends the datagrams in memory to the rooms again, where they outlive this agent.
func (r *Rooms) ReturnQueued() {
	// The data path refuses what exceeds the bounds of the room: all have left it before the first one comes back.
	for _, q := range r.queued {
		for d := range q.all() {
			r.countLeft(d)
		}
	}
	r.flushLeft()
	for slot, q := range r.queued {
		for d := range q.all() {
			to, ok := r.replayDestination(d.row, d.From.Addr(), true)
			if !ok {
				to = d.To
			}
			if err := r.send(spoof.Datagram{From: d.From, To: to, Payload: d.Payload}); err != nil {
				r.noteSendError(slot, err)
			}
		}
	}
	clear(r.queued)
	clear(r.memory[:])
}

// noteSendError logs the first error of the sender.
func (r *Rooms) noteSendError(slot int, err error) {
	if r.err == nil {
		r.Log.Error("datagram not sent to the member", "slot", slot, "error", err)
	}
	r.err = err
}

// DeliverLate delivers packets that were on their way to a room when it was emptied.
func (r *Rooms) DeliverLate() {
	if !r.Exist() || time.Since(r.released) > lateTime {
		return
	}
	r.emptyRooms()
	if !r.mayHaveDeparted() {
		return
	}
	if err := r.rotateRooms(); err != nil {
		r.Log.Error("waiting connections not released", "error", err)
	}
}

// DeliverWaiting delivers the packets that an earlier agent, or an earlier policy, has left in the rooms for slots that are ready or
// whose wait has ended.
func (r *Rooms) DeliverWaiting() {
	r.released = time.Now()
	r.emptyRooms()
	if err := r.rotateRooms(); err != nil {
		r.Log.Error("waiting connections not released", "error", err)
	}
}

// emptyRooms delivers or discards the datagrams in the rooms, unless a slot waits: its datagrams stay in the socket, where
// they outlive this agent, and those of other slots with them.
func (r *Rooms) emptyRooms() {
	for slot := range r.Config.Slots {
		if r.filling[slot] != nil || r.IsWaiting(slot) && r.HasDevices(slot) {
			return
		}
	}
	r.nextUnread(nobody)
	r.deliverQueued()
	r.flushLeft()
}

// nextUnread reads the next datagram for a slot from the rooms, and delivers those of other slots.
func (r *Rooms) nextUnread(slot int) (d waitingDatagram, ok bool) {
	for row := range r.prepared {
		for r.prepared[row] != nil && r.Listeners[row].Protocol == config.UDP {
			d, ok := r.receiveWaiting(row)
			if !ok {
				break
			}
			if r.stale[d.stored] > 0 {
				r.stale[d.stored]--
				continue
			}
			home, _ := r.Mapping.Slot(d.From.Addr())
			if home == slot {
				return d, true
			}
			r.deliver(home, d)
		}
	}
	clear(r.stale) // nothing is unread: after a change of the mapping, the counts of slots could be too high
	return d, false
}

// flushLeft tells the data path which datagrams have left the rooms.
func (r *Rooms) flushLeft() {
	for slot, left := range r.left {
		wait, room, err := r.Path.Wait(slot)
		if err == nil {
			wait.Left = min(wait.Left+left.Datagrams, room.Datagrams)
			wait.LeftBytes = min(wait.LeftBytes+left.Bytes, room.Bytes)
			err = r.Path.SetWait(slot, wait)
		}
		if err != nil {
			r.Log.Error("waiting room not updated", "slot", slot, "error", err)
		}
	}
	clear(r.left)
}

// deliverQueued delivers the datagrams in memory to the members of their devices, or discards those whose slot does not wait
// any more.
func (r *Rooms) deliverQueued() {
	var all []waitingDatagram
	for slot := range r.queued {
		if r.filling[slot] == nil {
			all = append(all, r.takeQueue(slot)...)
		}
	}
	for i := range all {
		home, _ := r.Mapping.Slot(all[i].From.Addr())
		r.deliver(home, all[i])
	}
	r.sendQueued()
}

// deliver keeps a datagram that was read from a room for the member of its slot, or for the next one, or discards it.
// sendQueued must follow. With sk_lookup, the data path does not know the size of a datagram, and limits only their number.
func (r *Rooms) deliver(slot int, d waitingDatagram) {
	size := prepared{room: r.Room(), slots: r.Config.Slots}
	if p := r.prepared[d.row]; p != nil {
		size = *p // of the policy under which the datagram came
	}
	fits := r.memory[d.row]+d.size() <= size.size()
	if fits && (r.IsReady(slot) || r.filling[slot] != nil || r.IsWaiting(slot)) {
		r.enqueue(slot, d)
		return
	}
	r.lost[slot]++
	r.countLeft(&d)
}

// defaultRoom has the bounds of the waiting rooms of a service whose packets wait only while another member takes a slot
// over.
var defaultRoom = config.Room{Datagrams: 100_000, Bytes: 32_000_000}

// Room returns the bounds of the waiting room of each slot. Wait is 0 if the packets of empty slots do not wait.
func (r *Rooms) Room() config.Room {
	if room := r.Config.WhenEmpty.Room; room != nil {
		return *room
	}
	return defaultRoom
}

// enqueue keeps a datagram in memory, behind the others of its slot.
func (r *Rooms) enqueue(slot int, d waitingDatagram) {
	q := r.queued[slot]
	if q == nil {
		q = new(queue)
		r.queued[slot] = q
	}
	q.list = append(q.list, d)
	r.memory[d.row] += d.size()
}

// takeQueue removes all datagrams of a slot from memory.
func (r *Rooms) takeQueue(slot int) (all []waitingDatagram) {
	for d := range r.queued[slot].all() {
		r.memory[d.row] -= d.size()
		all = append(all, *d)
	}
	delete(r.queued, slot)
	return all
}

// all yields the datagrams, the first one first.
func (q *queue) all() iter.Seq[*waitingDatagram] {
	return func(yield func(*waitingDatagram) bool) {
		for i := range q.len() {
			if !yield(&q.list[q.head+i]) {
				return
			}
		}
	}
}

func (q *queue) len() int {
	if q == nil {
		return 0
	}
	return len(q.list) - q.head
}

// sendQueued begins to send the datagrams in memory whose slot is ready.
func (r *Rooms) sendQueued() {
	for slot := range r.queued {
		if !r.IsReady(slot) || r.IsWaiting(slot) || r.kept.running[slot] != nil {
			continue
		}
		r.beginLate(&fill{seat: r.Seats[slot], late: true})
	}
}

// IsWaiting reports whether the data path makes the packets of a slot wait. The data path knows before the agent that a member
// has exited.
func (r *Rooms) IsWaiting(slot int) bool {
	wait, _, err := r.Path.Wait(slot)
	return err == nil && r.waits(slot, wait)
}

// countLeft counts a datagram that has left the room, for flushLeft.
func (r *Rooms) countLeft(d *waitingDatagram) {
	left := r.left[d.stored]
	left.Datagrams++
	if !r.UsesLookup() {
		left.Bytes += uint64(len(d.Payload)) + 8 // UDP header
	}
	r.left[d.stored] = left
}

// rotateRooms makes the kernel decide again about the connections that wait: each migrates to the member of its device, or
// to a new room if its slot is still empty, or is reset. If a handshake ends in the microseconds in which a listener is shut
// down, the kernel resets the connection (inet_csk_reqsk_queue_add, Linux 6.18).
func (r *Rooms) rotateRooms() error {
	if !r.acceptsWaiting() {
		return nil
	}
	var errs []error
	for row, l := range r.Listeners {
		if fd, open := r.KeeperSockets[row]; open && r.prepared[row] != nil && l.Protocol == config.TCP {
			errs = append(errs, r.rotateRoom(row, fd))
		}
	}
	return fault.Join(errs...)
}

// mayHaveDeparted reports whether handshakes may have ended in a room whose slot did not wait any more: those whose SYN came
// before the slot got its member. Connections that the kernel moves to a room from the queue of a member that exits are not
// counted; they are in the room before the next change.
func (r *Rooms) mayHaveDeparted() bool {
	for slot := range bpf.MaxSlots {
		wait, room, err := r.Path.Wait(slot)
		if err != nil || room.Connections == r.arrived[slot] || wait.Filling&bpf.Connect == 0 && r.waits(slot, wait) {
			continue
		}
		r.arrived[slot], r.departed = room.Connections, time.Now()
	}
	return time.Since(r.departed) <= lateTime
}

func (r *Rooms) waits(slot int, wait bpf.Wait) bool {
	state, err := r.Path.Slot(slot)
	return err == nil && state.Ready == 0 && wait.Until > uint64(clock.Monotonic())
}

func (r *Rooms) rotateRoom(row, fd int) error {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return fmt.Errorf("read TCP_INFO: %w", err)
	}
	if info.State == unix.BPF_TCP_LISTEN && info.Unacked == 0 { // connections in the queue
		return nil
	}
	owner, _ := r.GroupOwner()
	other, err := keeper.OpenSocket(r.Rows[row], owner, r.SocketNetns(), func(fd int) error { return r.Attach(row, fd) })
	if err != nil {
		return fmt.Errorf("open a second waiting room: %w", err)
	}
	defer unix.Close(other)
	err = unix.Listen(other, r.Backlog())
	if err == nil {
		err = r.Path.InsertRoom(row, other, 0)
	}
	if err == nil {
		err = unix.Shutdown(fd, unix.SHUT_RD)
	}
	if err == nil {
		err = unix.Listen(fd, r.Backlog())
	}
	if err == nil {
		err = r.Path.InsertRoom(row, fd, 0)
	}
	if err == nil {
		err = unix.Shutdown(other, unix.SHUT_RD)
	}
	return err
}
