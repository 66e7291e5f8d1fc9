// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/netns"
	"sockeye/internal/steer/placement"
	"sockeye/internal/steer/replay"
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
// A slot whose member must first receive what has waited is filling. It is not ready until then.

const (
	// fillBatch is the maximum number of datagrams that are sent again while the lock is held.
	fillBatch = 256
	// templateTime is the maximum time for which a slot without a waiting room waits until its member knows the templates.
	templateTime = 5 * time.Second
	// templatePause is the time between the templates and the first records. Collectors with several threads, as goflow2, may
	// decode a record before the datagram in front of it.
	templatePause = 20 * time.Millisecond
	// passTime is the time after which a datagram that was sent again and has not arrived is considered lost.
	passTime = 500 * time.Millisecond
	// A member receives what has waited at fillFactor times the rate at which it came, and at leastRate datagrams a second.
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

// rooms contains the waiting rooms of a service. Their sockets are those of the keeper.
type rooms struct {
	filling  map[int]*fill               // by slot
	queued   map[int][]waitingDatagram   // datagrams that were read from a room, by the slot for which they wait
	timers   map[int]*time.Timer         // ends of the waits by slot
	released time.Time                   // time of the last change that let packets leave a room
	prepared [bpf.MaxListeners]*prepared // settings of the rooms' sockets
	sender   *replay.Sender              // nil before the first replay
	buffer   []byte
	replayed map[int]uint64   // datagrams since the start of the agent, by slot
	left     map[int]bpf.Room // datagrams that have left the rooms, before flushLeft
	lost     map[int]uint64   // datagrams whose wait has ended, or that could not be sent again, by slot
	err      error            // last error of the sender
}

// fill is a slot whose member receives what has waited.
type fill struct {
	seat            *seat
	began, deadline time.Time
	waited          time.Time // time at which the slot became empty
	stored          uint64    // datagrams that the room had received by then
	replayed        int       // datagrams of the room that were sent
	arrived         uint64    // datagrams that were steered to the slot before the first one
	sent            uint64    // datagrams that were sent
	last            time.Time // time of the last one
	alone           bool      // the receive buffer had no space for a datagram
	templates       []waitingDatagram
	addresses       []netip.Addr // exporters whose templates are sent
	late            bool         // the slot is ready: templates and datagrams for devices that have moved
	holds           bool         // no new datagram passes until the templates have arrived
	connects        bool         // connections pass
	dumps           *dumps       // nil if the datagrams do not wait for the routes
	limit           time.Duration
	flows           time.Time // begin of the templates and datagrams
}

// waitingDatagram is a datagram that waits, and the row of its listener.
type waitingDatagram struct {
	replay.Datagram
	row int
}

// prepared contains the settings of the socket of a room.
type prepared struct {
	cookie uint64
	port   uint16 // of the room of a UDP listener with sk_lookup
	room   config.Room
	slots  int
}

func newRooms() rooms {
	return rooms{
		filling: make(map[int]*fill), queued: make(map[int][]waitingDatagram), timers: make(map[int]*time.Timer),
		replayed: make(map[int]uint64), lost: make(map[int]uint64), left: make(map[int]bpf.Room),
	}
}

// defaultRoom has the bounds of the waiting rooms of a service whose packets wait only while another member takes a slot
// over.
var defaultRoom = config.Room{Datagrams: 100_000, Bytes: 32_000_000}

// room returns the bounds of the waiting room of each slot. Wait is 0 if the packets of empty slots do not wait.
func (s *service) room() config.Room {
	if room := s.config.WhenEmpty.Room; room != nil {
		return *room
	}
	return defaultRoom
}

// hasRooms reports whether the listeners have waiting rooms.
func (s *service) hasRooms() bool { return s.config.WhenEmpty.Room != nil || s.config.Takeover }

// acceptsWaiting reports whether the kernel completes the handshakes of waiting connections.
func (s *service) acceptsWaiting() bool { return !s.usesLookup() && s.path.Migrates() }

func (s *service) waitLength() time.Duration {
	return time.Duration(s.room().Wait) * time.Microsecond
}

// waitLengthOf returns the time for which the packets of a slot wait. Those of a slot in maint are refused.
func (s *service) waitLengthOf(slot int) time.Duration {
	if slot >= s.config.Slots || s.slotState(slot).State == maintState {
		return 0
	}
	return s.waitLength()
}

// close stops the timers and closes the sender. What waits stays in the sockets of the keeper.
func (r *rooms) close() {
	for _, timer := range r.timers {
		timer.Stop()
	}
	if r.sender != nil {
		r.sender.Close()
		r.sender = nil
	}
}

// openRoomSocket opens the waiting room of a listener with steering by sk_lookup.
func (s *service) openRoomSocket(row int) (fd int, err error) {
	l := s.rows[row]
	filter := dropSYN
	if l.Protocol == unix.IPPROTO_UDP {
		filter = onlyPort(l.Address.Port())
	}
	err = netns.Do(s.socketNetns(), func() error {
		fd, err = openAnywhere(l, func(fd int) error { return attachFilter(fd, filter) })
		return err
	})
	return fd, err
}

// prepareRooms makes the keeper sockets waiting rooms, or ends that.
func (s *service) prepareRooms() error {
	var errs []error
	if !s.hasRooms() {
		s.discardWaiting()
	}
	for row := range s.rows {
		fd, open := s.keeperSockets[row]
		if !open || !s.hasRooms() {
			if s.rooms.prepared[row] != nil && open {
				errs = append(errs, s.closeRoom(row, fd))
			}
			errs = append(errs, s.path.RemoveRoom(row))
			s.rooms.prepared[row] = nil
			continue
		}
		errs = append(errs, s.prepareRoom(row, fd))
	}
	return fault.Join(errs...)
}

// send sends a datagram from the address of its sender.
func (s *service) send(d replay.Datagram) error {
	if s.rooms.sender == nil {
		err := netns.Do(s.socketNetns(), func() (err error) {
			s.rooms.sender, err = replay.Open(bpf.ReplayTTL)
			return err
		})
		if err != nil {
			return err
		}
	}
	return s.rooms.sender.Send(d)
}

// discardWaiting discards what waits under a policy that no longer has waiting rooms.
func (s *service) discardWaiting() {
	before := s.countLost()
	s.emptyRooms()
	if lost := s.countLost() - before; lost > 0 {
		s.log.Warn("the policy has no waiting room any more", "discarded", lost)
	}
	for slot := range s.config.Slots {
		s.markEmpty(slot)
	}
}

func (s *service) countLost() (sum uint64) {
	for _, n := range s.rooms.lost {
		sum += n
	}
	return sum
}

// closeRoom makes a waiting room a socket that only holds the port.
func (s *service) closeRoom(row, fd int) error {
	if s.listeners[row].Protocol == config.UDP {
		return errors.Join(rejectQueued(fd), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 0))
	}
	if s.acceptsWaiting() {
		return errors.Join(unix.Listen(fd, 1), rejectQueued(fd))
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
}

func (s *service) prepareRoom(row, fd int) error {
	cookie, err := socketCookie(fd)
	if err != nil {
		return err
	}
	want := prepared{cookie: cookie, room: s.room(), slots: s.config.Slots}
	if s.usesLookup() && s.listeners[row].Protocol == config.UDP {
		local, err := unix.Getsockname(fd)
		if err != nil {
			return fmt.Errorf("read the address of a waiting room: %w", err)
		}
		want.port = addrPort(local).Port()
	}
	if is := s.rooms.prepared[row]; is == nil || *is != want {
		if s.listeners[row].Protocol == config.TCP {
			err = s.prepareListener(fd)
		} else {
			err = prepareReceiver(fd, s.rows[row], &want)
		}
		if err != nil {
			return fmt.Errorf("prepare the waiting room of %s: %w", s.listeners[row], err)
		}
	}
	if registered, err := s.path.RoomCookie(row); err != nil || registered != cookie {
		if err = errors.Join(err, s.path.InsertRoom(row, fd, want.port)); err != nil {
			return err
		}
	}
	s.rooms.prepared[row] = &want
	return nil
}

func socketCookie(fd int) (uint64, error) {
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("read SO_COOKIE: %w", err)
	}
	return cookie, nil
}

// dropSYN is a socket filter that drops segments with the flag SYN, and passes others: peers of connections that no
// longer exist get a RST.
var dropSYN = []unix.SockFilter{
	{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: 13}, // flags of the TCP header
	{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: 0x02, Jt: 0, Jf: 1},
	{Code: unix.BPF_RET | unix.BPF_K},
	{Code: unix.BPF_RET | unix.BPF_K, K: 0xffffffff},
}

// onlyPort returns a socket filter that drops datagrams to other ports: a room with sk_lookup has a port of its own, which
// other hosts can reach.
func onlyPort(port uint16) []unix.SockFilter {
	return []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: 2}, // destination port of the UDP header
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: uint32(port), Jt: 0, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0xffffffff},
		{Code: unix.BPF_RET | unix.BPF_K},
	}
}

// prepareListener makes a listening socket accept connections, or drop SYNs.
func (s *service) prepareListener(fd int) error {
	if s.acceptsWaiting() {
		if err := unix.Listen(fd, s.backlog()); err != nil {
			return fmt.Errorf("listen: %w", err)
		}
		return nil
	}
	return attachFilter(fd, dropSYN)
}

// prepareReceiver sizes the receive buffer for the datagrams of all slots, and makes the kernel report the destination of
// each datagram. The kernel doubles the size for its own memory (socket(7)) and limits the memory of all UDP sockets
// (net.ipv4.udp_mem).
func prepareReceiver(fd int, l bpf.Listener, p *prepared) error {
	size := min(p.room.Bytes+int64(p.room.Datagrams)*overhead/2, 1<<29) * int64(p.slots)
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, int(min(size, 1<<30-1))); err != nil {
		return fmt.Errorf("set SO_RCVBUFFORCE: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVORIGDSTADDR, 1); err != nil {
		return fmt.Errorf("set IP_RECVORIGDSTADDR: %w", err)
	}
	if !l.Address.Addr().Is4() {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVORIGDSTADDR, 1); err != nil {
			return fmt.Errorf("set IPV6_RECVORIGDSTADDR: %w", err)
		}
	}
	return nil
}

// writeWaits writes the time for which packets wait for each slot, and begins to wait for slots that are empty for the
// first time.
func (s *service) writeWaits() error {
	var errs []error
	ended := false
	for slot := range bpf.MaxSlots {
		wait, _, err := s.path.Wait(slot)
		if err != nil {
			return err
		}
		length := s.waitLengthOf(slot)
		if s.slotState(slot).State == maintState {
			delete(s.rooms.filling, slot)
		}
		if length == 0 && wait == (bpf.Wait{}) {
			continue
		}
		begins := length > 0 && wait.Until == 0 && s.seats[slot] == nil
		switch {
		case wait.Length == uint64(length) && !begins:
			s.scheduleEnd(slot)
			continue
		case length == 0 && s.rooms.filling[slot] == nil:
			ended = ended || wait.Until > 0
			wait.Until = 0
		case begins:
			wait.Until = uint64(since(unix.CLOCK_MONOTONIC) + length)
		}
		wait.Length = uint64(length)
		errs = append(errs, s.path.SetWait(slot, wait))
		s.scheduleEnd(slot)
	}
	if ended && s.hasRooms() { // discards, and counts, what waited
		s.emptyRooms()
		errs = append(errs, s.rotateRooms())
	}
	return fault.Join(errs...)
}

// beginWait makes the packets of a slot wait that is about to be closed.
func (s *service) beginWait(slot int) {
	delete(s.rooms.filling, slot)
	delete(s.kept.running, slot)
	length := s.waitLengthOf(slot)
	wait, _, err := s.path.Wait(slot)
	if err == nil {
		wait.Length, wait.Filling, wait.Until = uint64(length), 0, 0
		if length > 0 {
			wait.Until = uint64(since(unix.CLOCK_MONOTONIC) + length)
		} else {
			s.rooms.released = time.Now() // the room may have packets of an unfinished takeover
		}
		err = s.path.SetWait(slot, wait)
	}
	if err != nil {
		s.log.Error("packets do not wait", "slot", slot, "error", err)
	}
}

// isWaiting reports whether the data path makes the packets of a slot wait. The data path knows before the agent that a member
// has exited.
func (s *service) isWaiting(slot int) bool {
	state, err := s.path.Slot(slot)
	if err != nil || state.Ready > 0 {
		return false
	}
	wait, _, err := s.path.Wait(slot)
	return err == nil && wait.Until > uint64(since(unix.CLOCK_MONOTONIC))
}

// scheduleEnd schedules the end of the wait of a slot.
func (s *service) scheduleEnd(slot int) {
	if timer := s.rooms.timers[slot]; timer != nil {
		timer.Stop()
		delete(s.rooms.timers, slot)
	}
	wait, _, err := s.path.Wait(slot)
	if err != nil || wait.Until == 0 || s.seats[slot] != nil {
		return
	}
	left := time.Duration(wait.Until) - since(unix.CLOCK_MONOTONIC)
	var timer *time.Timer
	timer = time.AfterFunc(max(left, 0)+time.Millisecond, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.events == nil || s.rooms.timers[slot] != timer || s.seats[slot] != nil {
			return
		}
		delete(s.rooms.timers, slot)
		if !s.isWaiting(slot) {
			s.endWait(slot)
		}
	})
	s.rooms.timers[slot] = timer
}

// endWait discards the packets that have waited for a slot in vain.
func (s *service) endWait(slot int) {
	_, room, err := s.path.Wait(slot)
	before := s.rooms.lost[slot]
	if err == nil {
		s.emptyRooms()
		err = s.rotateRooms()
	}
	if err != nil {
		s.log.Error("waiting rooms not emptied", "slot", slot, "error", err)
	}
	if lost := s.rooms.lost[slot] - before; lost > 0 || room.Connections > 0 {
		s.log.Warn("no member came in time: the devices of the slot are refused", "slot", slot, "waited", s.waitLength().String(), "datagrams", lost)
	}
	s.markEmpty(slot)
}

// markEmpty notes that all datagrams of a slot have left the rooms.
func (s *service) markEmpty(slot int) {
	wait, room, err := s.path.Wait(slot)
	if err == nil && (wait.Left != room.Datagrams || wait.LeftBytes != room.Bytes || wait.Filling != 0) {
		wait.Left, wait.LeftBytes, wait.Filling = room.Datagrams, room.Bytes, 0
		err = s.path.SetWait(slot, wait)
	}
	if err != nil {
		s.log.Error("waiting room not marked empty", "slot", slot, "error", err)
	}
}

// beginFill makes a slot filling whose sockets are registered, if packets wait for it. The slot must not be made ready
// until the end.
func (s *service) beginFill(seat *seat, takesOver bool) error {
	wait, _, err := s.path.Wait(seat.slot)
	if err != nil {
		return err
	}
	limit := s.waitLengthOf(seat.slot)
	// At a takeover, until is that of the last time at which the slot was empty.
	waits := !takesOver && limit > 0 && wait.Until > uint64(since(unix.CLOCK_MONOTONIC))
	if s.slotState(seat.slot).State == maintState || !waits && !takesOver && len(s.withoutTemplates(seat.slot, seat.id())) == 0 {
		return nil
	}
	if !waits {
		limit = max(limit, templateTime)
	}
	waited := time.Now()
	if waits {
		waited = waited.Add(-max(0, limit-(time.Duration(wait.Until)-since(unix.CLOCK_MONOTONIC))))
	}
	wait.Filling = seat.place.Ready() | bpf.Hold
	wait.Until = uint64(since(unix.CLOCK_MONOTONIC) + limit)
	if err := s.path.SetWait(seat.slot, wait); err != nil {
		return err
	}
	one := &fill{seat: seat, began: time.Now(), holds: true, waited: waited, stored: wait.Left, limit: limit}
	if (waits || takesOver) && s.hasSessions() {
		most := min(dumpLimit, limit/2)
		if takesOver {
			most = takeoverDumpLimit
		}
		err = s.beginDumps(one, wait, most)
	} else {
		err = s.beginFlows(one)
	}
	if err != nil {
		return err
	}
	s.rooms.filling[seat.slot] = one
	time.AfterFunc(0, func() { s.continueFill(one) })
	return nil
}

// beginFlows begins with the templates and datagrams for the member of a filling slot.
func (s *service) beginFlows(f *fill) error {
	slot := f.seat.slot
	f.flows, f.deadline = time.Now(), time.Now().Add(f.limit)
	f.addresses = s.withoutTemplates(slot, f.seat.id())
	if len(f.addresses) == 0 {
		return nil
	}
	if err := s.openTemporaryRooms(); err != nil {
		return err
	}
	f.templates = s.templateDatagrams(f.addresses, false, s.nextSequences(slot))
	return nil
}

// continueFill sends the next datagrams to the member of a filling slot, or makes the slot ready if none is left.
func (s *service) continueFill(f *fill) {
	for {
		s.mu.Lock()
		if running := s.rooms.filling; s.events == nil || s.seats[f.seat.slot] != f.seat ||
			!f.late && running[f.seat.slot] != f || f.late && s.kept.running[f.seat.slot] != f {
			s.mu.Unlock()
			return
		}
		done, pause := s.fillSome(f)
		if !f.late {
			s.sendQueued() // of other slots
		}
		if done {
			s.endFill(f)
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		time.Sleep(pause)
	}
}

// fillSome sends one batch, and reports whether no datagram is left. The next batch follows after the pause.
func (s *service) fillSome(f *fill) (done bool, pause time.Duration) {
	slot := f.seat.slot
	if f.dumps != nil {
		if !s.endDumps(f) {
			return false, dumpInterval
		}
		f.dumps = nil
		if err := s.beginFlows(f); err != nil {
			s.log.Error("templates not sent", "slot", slot, "error", err)
		}
	}
	if time.Now().After(f.deadline) {
		before := s.rooms.lost[slot]
		for {
			d, ok := s.nextFor(f)
			if !ok {
				break
			}
			s.rooms.lost[slot]++
			s.countLeft(slot, &d)
		}
		s.flushLeft()
		s.log.Warn("the member did not receive what had waited", "slot", slot, "pid", f.seat.process.PID, "lost", s.rooms.lost[slot]-before)
		return true, 0
	}
	if !f.late && f.sent == 0 {
		var err error
		if f.arrived, err = s.path.Datagrams(slot); err != nil {
			s.log.Error("slot filled without pauses", "slot", slot, "error", err)
		}
	}
	// The datagrams pass the loopback interface, whose queue is short. The next batch waits for the previous one.
	if arrived, err := s.path.Datagrams(slot); err == nil && arrived-f.arrived < f.sent && time.Since(f.last) < passTime {
		return false, fillPause / 10
	}
	// A datagram that has not arrived must not be overtaken by a new one.
	s.flushLeft()
	if f.holds && len(f.templates) == 0 {
		if len(f.addresses) > 0 && time.Since(f.last) < templatePause {
			return false, fillPause
		}
		f.holds = false
		if err := s.endHold(f); err != nil {
			s.log.Error("datagrams wait", "slot", slot, "error", err)
		}
	}
	space, err := s.receiveSpace(f.seat)
	if err != nil {
		return false, fillPause // the member is exiting
	}
	if f.late && len(f.templates) == 0 && len(s.rooms.queued[slot]) > 0 && len(f.addresses) > 0 && time.Since(f.last) < templatePause {
		return false, fillPause
	}
	before, budget := f.sent, s.fillBudget(f)
	for range fillBatch {
		var d waitingDatagram
		isTemplate := len(f.templates) > 0
		if isTemplate {
			d = f.templates[0]
		} else if f.holds {
			return false, 0
		} else if budget--; budget < 0 {
			return false, fillPause
		} else if next, ok := s.nextFor(f); ok {
			d = next
		} else {
			return f.late || f.sent == before, 0
		}
		need := 2*len(d.Payload) + overhead
		// A buffer for less than one datagram takes one that is larger.
		fits := space[d.row] >= need || f.alone && space[d.row] >= 0
		if !fits {
			if !isTemplate {
				s.rooms.queued[slot] = slices.Insert(s.rooms.queued[slot], 0, d)
			}
			f.alone = true
			return false, fillPause
		}
		f.alone = false
		space[d.row] -= need
		if isTemplate {
			f.templates = f.templates[1:]
			if err := s.send(d.Datagram); err != nil {
				s.noteSendError(slot, err)
				continue
			}
			f.sent++
			f.last = time.Now()
		} else if f.replayed++; s.resend(slot, &d) {
			f.sent++
			f.last = time.Now()
		}
	}
	return false, 0
}

// nextFor returns the next datagram for the member of a slot that fills, or that was ready before.
func (s *service) nextFor(f *fill) (d waitingDatagram, ok bool) {
	slot := f.seat.slot
	if queue := s.rooms.queued[slot]; len(queue) > 0 {
		if s.rooms.queued[slot] = queue[1:]; len(queue) == 1 {
			delete(s.rooms.queued, slot)
		}
		return queue[0], true
	}
	if f.late {
		return d, false
	}
	return s.nextUnread(slot)
}

// nextUnread reads the next datagram for a slot from the rooms, and delivers those of other slots.
func (s *service) nextUnread(slot int) (d waitingDatagram, ok bool) {
	for row := range s.rooms.prepared {
		for s.rooms.prepared[row] != nil && s.listeners[row].Protocol == config.UDP {
			d, ok := s.receiveWaiting(row)
			if !ok {
				break
			}
			home, _ := s.mapping.Slot(d.From.Addr())
			if home == slot {
				return d, true
			}
			s.deliver(home, d)
		}
	}
	return d, false
}

// deliver keeps a datagram that was read from a room for the member of its slot, or for the next one, or discards it.
// sendQueued must follow.
func (s *service) deliver(slot int, d waitingDatagram) {
	if s.isReady(slot) || s.rooms.filling[slot] != nil || s.isWaiting(slot) {
		s.rooms.queued[slot] = append(s.rooms.queued[slot], d)
		return
	}
	s.rooms.lost[slot]++
	s.countLeft(slot, &d)
}

// sendQueued begins to send the datagrams in memory whose slot is ready.
func (s *service) sendQueued() {
	for slot := range s.rooms.queued {
		if !s.isReady(slot) || s.isWaiting(slot) || s.kept.running[slot] != nil {
			continue
		}
		s.beginLate(&fill{seat: s.seats[slot], late: true})
	}
}

// beginLate begins to send templates, and datagrams in memory, to a member whose slot is ready. The first ones are sent at
// once.
func (s *service) beginLate(f *fill) {
	slot, now := f.seat.slot, time.Now()
	f.began, f.flows, f.deadline = now, now, now.Add(time.Minute)
	var err error
	if f.arrived, err = s.path.Datagrams(slot); err != nil {
		s.log.Error("datagrams not sent to the member", "slot", slot, "error", err)
		return
	}
	s.kept.running[slot] = f
	if done, _ := s.fillSome(f); done {
		s.endFill(f)
		return
	}
	go s.continueFill(f)
}

// releaseMoved sends what waited for slots whose devices have another slot now to the members of that slot. before is the
// mapping before the change.
func (s *service) releaseMoved(before *placement.Mapping) {
	if !s.hasRooms() {
		return
	}
	named := before.Devices != s.mapping.Devices || !before.SamePins(s.mapping)
	moved := false
	for slot := range s.config.Slots {
		moved = moved || s.seats[slot] == nil && s.isWaiting(slot) && (named || s.loses(slot, before))
	}
	if !moved {
		return
	}
	const nobody = -1
	s.nextUnread(nobody)
	s.deliverQueued()
	for slot := range s.config.Slots {
		if s.seats[slot] == nil && !s.hasDevices(slot) {
			s.markEmpty(slot)
		}
	}
	s.rooms.released = time.Now()
	if err := s.rotateRooms(); err != nil {
		s.log.Error("waiting connections not released", "error", err)
	}
}

// loses reports whether a slot had buckets that it has no more.
func (s *service) loses(slot int, before *placement.Mapping) bool {
	for bucket, was := range before.Table.Bucket {
		if int(was) == slot && int(s.mapping.Table.Bucket[bucket]) != slot {
			return true
		}
	}
	return false
}

// hasDevices reports whether devices can have a slot.
func (s *service) hasDevices(slot int) bool {
	return s.inUse(slot) || slices.ContainsFunc(s.state.Pins, func(p pin) bool { return p.Slot == slot })
}

// resend sends a datagram to the member of its slot.
func (s *service) resend(slot int, d *waitingDatagram) bool {
	s.countLeft(slot, d)
	if s.keepsTemplates() && templates.HasTemplates(d.Payload) {
		s.learn(d.From, d.row, d.Payload, member.ID{})
	}
	send := d.Datagram
	if p := s.rooms.prepared[d.row]; p != nil && p.port != 0 {
		send.To = netip.AddrPortFrom(loopback(send.From.Addr()), p.port)
	}
	if err := s.send(send); err != nil {
		s.rooms.lost[slot]++
		s.noteSendError(slot, err)
		return false
	}
	s.rooms.replayed[slot]++
	return true
}

// noteSendError logs the first error of the sender.
func (s *service) noteSendError(slot int, err error) {
	if s.rooms.err == nil {
		s.log.Error("datagram not sent to the member", "slot", slot, "error", err)
	}
	s.rooms.err = err
}

// maxPeeked is the number of datagrams that are read before the templates of their exporters are sent.
const maxPeeked = 256

// nextSequences reads datagrams from the rooms, and returns the sequence numbers of the first message of each exporter that
// waits for a slot.
func (s *service) nextSequences(slot int) map[templates.Session]uint32 {
	next := make(map[templates.Session]uint32)
	if !s.hasRooms() {
		return next
	}
	for len(s.rooms.queued[slot]) < maxPeeked {
		d, ok := s.nextUnread(slot)
		if !ok {
			break
		}
		s.rooms.queued[slot] = append(s.rooms.queued[slot], d)
	}
	s.flushLeft()
	for i := range s.rooms.queued[slot] {
		d := &s.rooms.queued[slot][i]
		version, domain, sequence, ok := templates.Sequence(d.Payload)
		session := templates.Session{Source: d.From, Row: d.row, Version: version, Domain: domain}
		if _, known := next[session]; ok && !known {
			next[session] = sequence
		}
	}
	return next
}

// countLeft counts a datagram that has left the room, for flushLeft.
func (s *service) countLeft(slot int, d *waitingDatagram) {
	left := s.rooms.left[slot]
	left.Datagrams++
	if !s.usesLookup() {
		left.Bytes += uint64(len(d.Payload)) + 8 // UDP header
	}
	s.rooms.left[slot] = left
}

// flushLeft tells the data path which datagrams have left the rooms.
func (s *service) flushLeft() {
	for slot, left := range s.rooms.left {
		wait, room, err := s.path.Wait(slot)
		if err == nil {
			wait.Left = min(wait.Left+left.Datagrams, room.Datagrams)
			wait.LeftBytes = min(wait.LeftBytes+left.Bytes, room.Bytes)
			err = s.path.SetWait(slot, wait)
		}
		if err != nil {
			s.log.Error("waiting room not updated", "slot", slot, "error", err)
		}
	}
	clear(s.rooms.left)
}

// endFill makes a slot ready whose member has received what has waited.
func (s *service) endFill(f *fill) {
	slot := f.seat.slot
	s.noteReplayed(f.addresses, f.seat.id())
	s.flushLeft()
	if f.late {
		delete(s.kept.running, slot)
		if len(f.addresses) > 0 {
			s.log.Info("templates sent to the member that newly serves their exporters", "slot", slot, "pid", f.seat.process.PID,
				"exporters", len(f.addresses), "datagrams", f.sent-uint64(f.replayed))
		}
		if f.replayed > 0 {
			s.log.Info("what had waited sent to the member that serves its devices now", "slot", slot, "pid", f.seat.process.PID, "datagrams", f.replayed)
		}
		return
	}
	delete(s.rooms.filling, slot)
	s.closeTemporaryRooms()
	if err := s.setReady(f.seat); err != nil {
		s.log.Error("slot not ready", "slot", slot, "error", err)
		s.vacateSlot(slot, "socket closed")
		return
	}
	s.deliverQueued()
	s.emptyRooms()
	s.markEmpty(slot)
	s.rooms.released = time.Now()
	if err := s.rotateRooms(); err != nil {
		s.log.Error("waiting connections not released", "slot", slot, "error", err)
	}
	if arrived, err := s.path.Datagrams(slot); err == nil && arrived-f.arrived < f.sent {
		missing := f.sent - (arrived - f.arrived)
		s.rooms.lost[slot] += missing
		s.log.Warn("datagrams did not arrive over the loopback interface", "slot", slot, "lost", missing)
	}
	s.log.Info("slot filled", "slot", slot, "pid", f.seat.process.PID, "exporters", len(f.addresses), "datagrams", f.sent,
		"took", time.Since(f.began).Round(time.Millisecond).String())
	if err := s.place(); err != nil {
		s.log.Error("devices not moved", "error", err)
	}
	s.checkSoon()
}

// emptyRooms delivers or discards the datagrams in the rooms, unless a slot waits: its datagrams stay in the socket, where
// they outlive this agent, and those of other slots with them.
func (s *service) emptyRooms() {
	const nobody = -1
	for slot := range s.config.Slots {
		if s.rooms.filling[slot] != nil || s.isWaiting(slot) && s.hasDevices(slot) {
			return
		}
	}
	s.nextUnread(nobody)
	s.deliverQueued()
	s.flushLeft()
}

// deliverQueued delivers the datagrams in memory to the members of their devices, or discards those whose slot does not wait
// any more.
func (s *service) deliverQueued() {
	var all []waitingDatagram
	for slot, queue := range s.rooms.queued {
		if s.rooms.filling[slot] == nil {
			delete(s.rooms.queued, slot)
			all = append(all, queue...)
		}
	}
	for i := range all {
		home, _ := s.mapping.Slot(all[i].From.Addr())
		s.deliver(home, all[i])
	}
	s.sendQueued()
}

// returnQueued sends the datagrams in memory to the rooms again, where they outlive this agent.
func (s *service) returnQueued() {
	for slot, queue := range s.rooms.queued {
		for i := range queue {
			d := &queue[i]
			s.countLeft(slot, d)
			to, ok := s.replayDestination(d.row, d.From.Addr(), true)
			if !ok {
				to = d.To
			}
			if err := s.send(replay.Datagram{From: d.From, To: to, Payload: d.Payload}); err != nil {
				s.noteSendError(slot, err)
			}
		}
	}
	clear(s.rooms.queued)
	s.flushLeft()
}

// releaseLate releases packets that were on their way to a room when it was emptied.
func (s *service) releaseLate() {
	if !s.hasRooms() || time.Since(s.rooms.released) > lateTime {
		return
	}
	s.emptyRooms()
	if err := s.rotateRooms(); err != nil {
		s.log.Error("waiting connections not released", "error", err)
	}
}

// releaseWaiting releases what an earlier agent, or an earlier policy, has left in the rooms for slots that are ready or
// whose wait has ended.
func (s *service) releaseWaiting() {
	s.rooms.released = time.Now()
	s.releaseLate()
}

// rotateRooms makes the kernel decide again about the connections that wait: each migrates to the member of its device, or
// to a new room if its slot is still empty, or is reset.
func (s *service) rotateRooms() error {
	if !s.acceptsWaiting() {
		return nil
	}
	var errs []error
	for row, l := range s.listeners {
		if s.rooms.prepared[row] != nil && l.Protocol == config.TCP {
			errs = append(errs, s.rotateRoom(row, s.keeperSockets[row]))
		}
	}
	return fault.Join(errs...)
}

func (s *service) rotateRoom(row, fd int) error {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return fmt.Errorf("read TCP_INFO: %w", err)
	}
	if info.State == unix.BPF_TCP_LISTEN && info.Unacked == 0 { // connections in the queue
		return nil
	}
	owner, _ := s.groupOwner()
	other, err := openKeeperSocket(s.rows[row], owner, s.socketNetns(), func(fd int) error { return s.path.Attach(row, fd) })
	if err != nil {
		return fmt.Errorf("open a second waiting room: %w", err)
	}
	defer unix.Close(other)
	err = unix.Listen(other, s.backlog())
	if err == nil {
		err = s.path.InsertRoom(row, other, 0)
	}
	if err == nil {
		err = unix.Shutdown(fd, unix.SHUT_RD)
	}
	if err == nil {
		err = unix.Listen(fd, s.backlog())
	}
	if err == nil {
		err = s.path.InsertRoom(row, fd, 0)
	}
	if err == nil {
		err = unix.Shutdown(other, unix.SHUT_RD)
	}
	return err
}

// roomStatus returns the state of the waiting room of a slot, or nil without waiting rooms.
func (s *service) roomStatus(slot int) (*api.RoomStatus, error) {
	if !s.hasRooms() {
		return nil, nil
	}
	wait, room, err := s.path.Wait(slot)
	if err != nil {
		return nil, err
	}
	status := &api.RoomStatus{
		Filling: s.rooms.filling[slot] != nil, Waiting: room.Datagrams - wait.Left, Datagrams: room.Datagrams,
		Connections: room.Connections, Full: room.Full, Replayed: s.rooms.replayed[slot], Lost: s.rooms.lost[slot],
	}
	if s.isReady(slot) {
		status.Waiting = 0
	} else if now := since(unix.CLOCK_MONOTONIC); wait.Until > uint64(now) {
		until := time.Now().Add(time.Duration(wait.Until) - now)
		status.Until = &until
	}
	for row, p := range s.rooms.prepared {
		if p == nil || s.listeners[row].Protocol != config.UDP {
			continue
		}
		info, err := socketMemory(s.keeperSockets[row])
		if err != nil {
			return nil, err
		}
		status.Dropped += uint64(info[droppedWord])
	}
	return status, nil
}

// receiveWaiting reads a datagram from the room of a row. ok is false if there is none.
func (s *service) receiveWaiting(row int) (d waitingDatagram, ok bool) {
	if s.rooms.buffer == nil {
		s.rooms.buffer = make([]byte, 1<<16)
	}
	control := make([]byte, 128)
	for {
		n, nc, _, from, err := unix.Recvmsg(s.keeperSockets[row], s.rooms.buffer, control, unix.MSG_DONTWAIT)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return d, false
		}
		source, destination := addrPort(from), originalDestination(control[:nc])
		if !source.IsValid() || !destination.IsValid() {
			continue
		}
		return waitingDatagram{replay.Datagram{From: source, To: destination, Payload: slices.Clone(s.rooms.buffer[:n])}, row}, true
	}
}

// loopback returns the loopback address of the family of an address.
func loopback(of netip.Addr) netip.Addr {
	if of.Is4() {
		return netip.MustParseAddr("127.0.0.1")
	}
	return netip.IPv6Loopback()
}

func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

// originalDestination returns the destination in the control messages of a datagram (IP_ORIGDSTADDR, IPV6_ORIGDSTADDR).
func originalDestination(control []byte) netip.AddrPort {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return netip.AddrPort{}
	}
	for i := range messages {
		if sa, err := unix.ParseOrigDstAddr(&messages[i]); err == nil {
			return addrPort(sa)
		}
	}
	return netip.AddrPort{}
}

// fillBudget returns the number of datagrams that the member may receive now. The first ones are free, because most rooms
// have few.
func (s *service) fillBudget(f *fill) int {
	if f.late {
		return fillBatch + int(leastRate*time.Since(f.flows).Seconds()) - f.replayed
	}
	_, room, err := s.path.Wait(f.seat.slot)
	if err != nil {
		return fillBatch
	}
	came := float64(room.Datagrams-f.stored) / max(time.Since(f.waited).Seconds(), 1e-3)
	rate := max(leastRate, fillFactor*came)
	return fillBatch + int(rate*time.Since(f.flows).Seconds()) - f.replayed
}

// endHold lets new datagrams of a filling slot pass when no other datagram waits.
func (s *service) endHold(f *fill) error {
	wait, _, err := s.path.Wait(f.seat.slot)
	if err != nil {
		return err
	}
	wait.Filling &^= bpf.Hold
	wait.Until = max(wait.Until, uint64(since(unix.CLOCK_MONOTONIC)+f.limit))
	return s.path.SetWait(f.seat.slot, wait)
}

// receiveSpace returns the free memory of the receive buffers of a member by row, half of their size at most: the datagrams
// that leave the room must not displace each other.
func (s *service) receiveSpace(seat *seat) (map[int]int, error) {
	space := make(map[int]int)
	for row := range seat.sockets {
		if s.listeners[row].Protocol != config.UDP {
			continue
		}
		socket, err := seat.openSocket(row)
		if err != nil {
			return nil, err
		}
		memory, err := socketMemory(socket.FD())
		socket.Close()
		if err != nil {
			return nil, err
		}
		space[row] = int(memory[limitWord])/2 - int(memory[allocatedWord])
	}
	return space, nil
}

// Words of SO_MEMINFO (SK_MEMINFO_RMEM_ALLOC, SK_MEMINFO_RCVBUF, SK_MEMINFO_DROPS).
const (
	allocatedWord = 0
	limitWord     = 1
	droppedWord   = 8
)

// socketMemory returns SO_MEMINFO of a socket.
func socketMemory(fd int) (info [9]uint32, err error) {
	size := uint32(unsafe.Sizeof(info))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_MEMINFO,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return info, fmt.Errorf("read SO_MEMINFO: %w", errno)
	}
	return info, nil
}
