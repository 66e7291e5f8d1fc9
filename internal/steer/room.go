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
	"sockeye/internal/format"
	"sockeye/internal/member"
	"sockeye/internal/netns"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/steer/listener"
	"sockeye/internal/steer/placement"
	"sockeye/internal/steer/replay"
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
	*core.Service
	kept keptTemplates
	// connected counts the passes that have not found a device, by slot and session.Key; see noteConnected.
	connected map[int]map[string]int
	filling   map[int]*fill               // by slot
	queued    map[int][]waitingDatagram   // datagrams that were read from a room, by the slot for which they wait
	timers    map[int]*time.Timer         // ends of the waits by slot
	released  time.Time                   // time of the last change that let packets leave a room
	prepared  [bpf.MaxListeners]*prepared // settings of the rooms' sockets
	sender    *replay.Sender              // nil before the first replay
	buffer    []byte
	replayed  map[int]uint64   // datagrams since the start of the agent, by slot
	left      map[int]bpf.Room // datagrams that have left the rooms, before flushLeft
	lost      map[int]uint64   // datagrams whose wait has ended, or that could not be sent again, by slot
	err       error            // last error of the sender
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

func newRooms(s *core.Service) *rooms {
	return &rooms{
		Service: s, kept: newKeptTemplates(), connected: make(map[int]map[string]int),
		filling: make(map[int]*fill), queued: make(map[int][]waitingDatagram), timers: make(map[int]*time.Timer),
		replayed: make(map[int]uint64), lost: make(map[int]uint64), left: make(map[int]bpf.Room),
	}
}

// defaultRoom has the bounds of the waiting rooms of a service whose packets wait only while another member takes a slot
// over.
var defaultRoom = config.Room{Datagrams: 100_000, Bytes: 32_000_000}

// room returns the bounds of the waiting room of each slot. Wait is 0 if the packets of empty slots do not wait.
func (r *rooms) room() config.Room {
	if room := r.Config.WhenEmpty.Room; room != nil {
		return *room
	}
	return defaultRoom
}

// hasRooms reports whether the listeners have waiting rooms.
func (r *rooms) hasRooms() bool { return r.Config.WhenEmpty.Room != nil || r.Config.Takeover }

// acceptsWaiting reports whether the kernel completes the handshakes of waiting connections.
func (r *rooms) acceptsWaiting() bool { return !r.UsesLookup() && r.Path.Migrates() }

func (r *rooms) waitLength() time.Duration {
	return time.Duration(r.room().Wait) * time.Microsecond
}

// waitLengthOf returns the time for which the packets of a slot wait. Those of a slot in maint are refused.
func (r *rooms) waitLengthOf(slot int) time.Duration {
	if slot >= r.Config.Slots || r.SlotState(slot).State == stored.Maint {
		return 0
	}
	return r.waitLength()
}

// IsFilling reports whether the member of a slot receives what has waited.
func (r *rooms) IsFilling(slot int) bool { return r.filling[slot] != nil }

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
func (r *rooms) openRoomSocket(row int) (fd int, err error) {
	l := r.Rows[row]
	filter := dropSYN
	if l.Protocol == unix.IPPROTO_UDP {
		filter = onlyPort(l.Address.Port())
	}
	err = netns.Do(r.SocketNetns(), func() error {
		fd, err = keeper.OpenAnywhere(l, func(fd int) error { return keeper.AttachFilter(fd, filter) })
		return err
	})
	return fd, err
}

// prepareRooms makes the keeper sockets waiting rooms, or ends that.
func (r *rooms) prepareRooms() error {
	var errs []error
	if !r.hasRooms() {
		r.discardWaiting()
	}
	for row := range r.Rows {
		fd, open := r.KeeperSockets[row]
		if !open || !r.hasRooms() {
			if r.prepared[row] != nil && open {
				errs = append(errs, r.closeRoom(row, fd))
			}
			errs = append(errs, r.Path.RemoveRoom(row))
			r.prepared[row] = nil
			continue
		}
		errs = append(errs, r.prepareRoom(row, fd))
	}
	return fault.Join(errs...)
}

// send sends a datagram from the address of its sender.
func (r *rooms) send(d replay.Datagram) error {
	if r.sender == nil {
		err := netns.Do(r.SocketNetns(), func() (err error) {
			r.sender, err = replay.Open(bpf.ReplayTTL)
			return err
		})
		if err != nil {
			return err
		}
	}
	return r.sender.Send(d)
}

// discardWaiting discards what waits under a policy that no longer has waiting rooms.
func (r *rooms) discardWaiting() {
	before := r.countLost()
	r.emptyRooms()
	if lost := r.countLost() - before; lost > 0 {
		r.Log.Warn("the policy has no waiting room any more", "discarded", lost)
	}
	for slot := range r.Config.Slots {
		r.markEmpty(slot)
	}
}

func (r *rooms) countLost() (sum uint64) {
	for _, n := range r.lost {
		sum += n
	}
	return sum
}

// closeRoom makes a waiting room a socket that only holds the port.
func (r *rooms) closeRoom(row, fd int) error {
	if r.Listeners[row].Protocol == config.UDP {
		return errors.Join(keeper.RejectQueued(fd), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 0))
	}
	if r.acceptsWaiting() {
		return errors.Join(unix.Listen(fd, 1), keeper.RejectQueued(fd))
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
}

// isPrepared reports whether the socket of a row is a waiting room.
func (r *rooms) isPrepared(row int) bool { return r.prepared[row] != nil }

func (r *rooms) prepareRoom(row, fd int) error {
	cookie, err := socketCookie(fd)
	if err != nil {
		return err
	}
	want := prepared{cookie: cookie, room: r.room(), slots: r.Config.Slots}
	if r.UsesLookup() && r.Listeners[row].Protocol == config.UDP {
		local, err := unix.Getsockname(fd)
		if err != nil {
			return fmt.Errorf("read the address of a waiting room: %w", err)
		}
		want.port = addrPort(local).Port()
	}
	if is := r.prepared[row]; is == nil || *is != want {
		if r.Listeners[row].Protocol == config.TCP {
			err = r.prepareListener(fd)
		} else {
			err = prepareReceiver(fd, r.Rows[row], &want)
		}
		if err != nil {
			return fmt.Errorf("prepare the waiting room of %s: %w", r.Listeners[row], err)
		}
	}
	if registered, err := r.Path.RoomCookie(row); err != nil || registered != cookie {
		if err = errors.Join(err, r.Path.InsertRoom(row, fd, want.port)); err != nil {
			return err
		}
	}
	r.prepared[row] = &want
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
func (r *rooms) prepareListener(fd int) error {
	if r.acceptsWaiting() {
		if err := unix.Listen(fd, r.Backlog()); err != nil {
			return fmt.Errorf("listen: %w", err)
		}
		return nil
	}
	return keeper.AttachFilter(fd, dropSYN)
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
func (r *rooms) writeWaits() error {
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
		begins := length > 0 && wait.Until == 0 && r.Seats[slot] == nil
		switch {
		case wait.Length == uint64(length) && !begins:
			r.scheduleEnd(slot)
			continue
		case length == 0 && r.filling[slot] == nil:
			ended = ended || wait.Until > 0
			wait.Until = 0
		case begins:
			wait.Until = uint64(core.Since(unix.CLOCK_MONOTONIC) + length)
		}
		wait.Length = uint64(length)
		errs = append(errs, r.Path.SetWait(slot, wait))
		r.scheduleEnd(slot)
	}
	if ended && r.hasRooms() { // discards, and counts, what waited
		r.emptyRooms()
		errs = append(errs, r.rotateRooms())
	}
	return fault.Join(errs...)
}

// beginWait makes the packets of a slot wait that is about to be closed.
func (r *rooms) beginWait(slot int) {
	delete(r.filling, slot)
	delete(r.kept.running, slot)
	length := r.waitLengthOf(slot)
	wait, _, err := r.Path.Wait(slot)
	if err == nil {
		wait.Length, wait.Filling, wait.Until = uint64(length), 0, 0
		if length > 0 {
			wait.Until = uint64(core.Since(unix.CLOCK_MONOTONIC) + length)
		} else {
			r.released = time.Now() // the room may have packets of an unfinished takeover
		}
		err = r.Path.SetWait(slot, wait)
	}
	if err != nil {
		r.Log.Error("packets do not wait", "slot", slot, "error", err)
	}
}

// isWaiting reports whether the data path makes the packets of a slot wait. The data path knows before the agent that a member
// has exited.
func (r *rooms) isWaiting(slot int) bool {
	state, err := r.Path.Slot(slot)
	if err != nil || state.Ready > 0 {
		return false
	}
	wait, _, err := r.Path.Wait(slot)
	return err == nil && wait.Until > uint64(core.Since(unix.CLOCK_MONOTONIC))
}

// scheduleEnd schedules the end of the wait of a slot.
func (r *rooms) scheduleEnd(slot int) {
	if timer := r.timers[slot]; timer != nil {
		timer.Stop()
		delete(r.timers, slot)
	}
	wait, _, err := r.Path.Wait(slot)
	if err != nil || wait.Until == 0 || r.Seats[slot] != nil {
		return
	}
	left := time.Duration(wait.Until) - core.Since(unix.CLOCK_MONOTONIC)
	var timer *time.Timer
	timer = time.AfterFunc(max(left, 0)+time.Millisecond, func() {
		r.Mu.Lock()
		defer r.Mu.Unlock()
		if r.Events == nil || r.timers[slot] != timer || r.Seats[slot] != nil {
			return
		}
		delete(r.timers, slot)
		if !r.isWaiting(slot) {
			r.endWait(slot)
		}
	})
	r.timers[slot] = timer
}

// endWait discards the packets that have waited for a slot in vain.
func (r *rooms) endWait(slot int) {
	_, room, err := r.Path.Wait(slot)
	before := r.lost[slot]
	if err == nil {
		r.emptyRooms()
		err = r.rotateRooms()
	}
	if err != nil {
		r.Log.Error("waiting rooms not emptied", "slot", slot, "error", err)
	}
	if lost := r.lost[slot] - before; r.HasDevices(slot) && (lost > 0 || room.Connections > 0) {
		r.Log.Warn("no member came in time: the devices of the slot are refused", "slot", slot, "waited", r.waitLength().String(), "datagrams", lost)
	}
	r.markEmpty(slot)
}

// markEmpty notes that all datagrams of a slot have left the rooms.
func (r *rooms) markEmpty(slot int) {
	wait, room, err := r.Path.Wait(slot)
	if err == nil && (wait.Left != room.Datagrams || wait.LeftBytes != room.Bytes || wait.Filling != 0) {
		wait.Left, wait.LeftBytes, wait.Filling = room.Datagrams, room.Bytes, 0
		err = r.Path.SetWait(slot, wait)
	}
	if err != nil {
		r.Log.Error("waiting room not marked empty", "slot", slot, "error", err)
	}
}

// nextUnread reads the next datagram for a slot from the rooms, and delivers those of other slots.
func (r *rooms) nextUnread(slot int) (d waitingDatagram, ok bool) {
	for row := range r.prepared {
		for r.prepared[row] != nil && r.Listeners[row].Protocol == config.UDP {
			d, ok := r.receiveWaiting(row)
			if !ok {
				break
			}
			home, _ := r.Mapping.Slot(d.From.Addr())
			if home == slot {
				return d, true
			}
			r.deliver(home, d)
		}
	}
	return d, false
}

// deliver keeps a datagram that was read from a room for the member of its slot, or for the next one, or discards it.
// sendQueued must follow.
func (r *rooms) deliver(slot int, d waitingDatagram) {
	if r.IsReady(slot) || r.filling[slot] != nil || r.isWaiting(slot) {
		r.queued[slot] = append(r.queued[slot], d)
		return
	}
	r.lost[slot]++
	r.countLeft(slot, &d)
}

// sendQueued begins to send the datagrams in memory whose slot is ready.
func (r *rooms) sendQueued() {
	for slot := range r.queued {
		if !r.IsReady(slot) || r.isWaiting(slot) || r.kept.running[slot] != nil {
			continue
		}
		r.beginLate(&fill{seat: r.Seats[slot], late: true})
	}
}

// releaseMoved sends what waited for slots whose devices have another slot now to the members of that slot. before is the
// mapping before the change.
func (r *rooms) releaseMoved(before *placement.Mapping) {
	if !r.hasRooms() {
		return
	}
	named := before.Devices != r.Mapping.Devices || !before.SamePins(r.Mapping)
	moved := false
	for slot := range r.Config.Slots {
		moved = moved || r.isWaiting(slot) && (named || r.loses(slot, before)) // also while the slot fills
	}
	if !moved {
		return
	}
	const nobody = -1
	r.nextUnread(nobody)
	r.deliverQueued()
	for slot := range r.Config.Slots {
		if r.Seats[slot] == nil && !r.HasDevices(slot) {
			r.markEmpty(slot)
		}
	}
	r.released = time.Now()
	if err := r.rotateRooms(); err != nil {
		r.Log.Error("waiting connections not released", "error", err)
	}
}

// loses reports whether a slot had buckets that it has no more.
func (r *rooms) loses(slot int, before *placement.Mapping) bool {
	for bucket, was := range before.Table.Bucket {
		if int(was) == slot && int(r.Mapping.Table.Bucket[bucket]) != slot {
			return true
		}
	}
	return false
}

// resend sends a datagram to the member of its slot.
func (r *rooms) resend(slot int, d *waitingDatagram) bool {
	r.countLeft(slot, d)
	if r.keepsTemplates() && templates.HasTemplates(d.Payload) {
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

// noteSendError logs the first error of the sender.
func (r *rooms) noteSendError(slot int, err error) {
	if r.err == nil {
		r.Log.Error("datagram not sent to the member", "slot", slot, "error", err)
	}
	r.err = err
}

// countLeft counts a datagram that has left the room, for flushLeft.
func (r *rooms) countLeft(slot int, d *waitingDatagram) {
	left := r.left[slot]
	left.Datagrams++
	if !r.UsesLookup() {
		left.Bytes += uint64(len(d.Payload)) + 8 // UDP header
	}
	r.left[slot] = left
}

// flushLeft tells the data path which datagrams have left the rooms.
func (r *rooms) flushLeft() {
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

// emptyRooms delivers or discards the datagrams in the rooms, unless a slot waits: its datagrams stay in the socket, where
// they outlive this agent, and those of other slots with them.
func (r *rooms) emptyRooms() {
	const nobody = -1
	for slot := range r.Config.Slots {
		if r.filling[slot] != nil || r.isWaiting(slot) && r.HasDevices(slot) {
			return
		}
	}
	r.nextUnread(nobody)
	r.deliverQueued()
	r.flushLeft()
}

// deliverQueued delivers the datagrams in memory to the members of their devices, or discards those whose slot does not wait
// any more.
func (r *rooms) deliverQueued() {
	var all []waitingDatagram
	for slot, queue := range r.queued {
		if r.filling[slot] == nil {
			delete(r.queued, slot)
			all = append(all, queue...)
		}
	}
	for i := range all {
		home, _ := r.Mapping.Slot(all[i].From.Addr())
		r.deliver(home, all[i])
	}
	r.sendQueued()
}

// returnQueued sends the datagrams in memory to the rooms again, where they outlive this agent.
func (r *rooms) returnQueued() {
	for slot, queue := range r.queued {
		for i := range queue {
			d := &queue[i]
			r.countLeft(slot, d)
			to, ok := r.replayDestination(d.row, d.From.Addr(), true)
			if !ok {
				to = d.To
			}
			if err := r.send(replay.Datagram{From: d.From, To: to, Payload: d.Payload}); err != nil {
				r.noteSendError(slot, err)
			}
		}
	}
	clear(r.queued)
	r.flushLeft()
}

// releaseLate releases packets that were on their way to a room when it was emptied.
func (r *rooms) releaseLate() {
	if !r.hasRooms() || time.Since(r.released) > lateTime {
		return
	}
	r.emptyRooms()
	if err := r.rotateRooms(); err != nil {
		r.Log.Error("waiting connections not released", "error", err)
	}
}

// releaseWaiting releases what an earlier agent, or an earlier policy, has left in the rooms for slots that are ready or
// whose wait has ended.
func (r *rooms) releaseWaiting() {
	r.released = time.Now()
	r.releaseLate()
}

// rotateRooms makes the kernel decide again about the connections that wait: each migrates to the member of its device, or
// to a new room if its slot is still empty, or is reset.
func (r *rooms) rotateRooms() error {
	if !r.acceptsWaiting() {
		return nil
	}
	var errs []error
	for row, l := range r.Listeners {
		if r.prepared[row] != nil && l.Protocol == config.TCP {
			errs = append(errs, r.rotateRoom(row, r.KeeperSockets[row]))
		}
	}
	return fault.Join(errs...)
}

func (r *rooms) rotateRoom(row, fd int) error {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return fmt.Errorf("read TCP_INFO: %w", err)
	}
	if info.State == unix.BPF_TCP_LISTEN && info.Unacked == 0 { // connections in the queue
		return nil
	}
	owner, _ := r.GroupOwner()
	other, err := keeper.OpenSocket(r.Rows[row], owner, r.SocketNetns(), func(fd int) error { return r.Path.Attach(row, fd) })
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

// roomStatus returns the state of the waiting room of a slot, or nil without waiting rooms.
func (r *rooms) roomStatus(slot int) (*api.RoomStatus, error) {
	if !r.hasRooms() {
		return nil, nil
	}
	wait, room, err := r.Path.Wait(slot)
	if err != nil {
		return nil, err
	}
	status := &api.RoomStatus{
		Filling: r.filling[slot] != nil, Waiting: room.Datagrams - wait.Left, Datagrams: room.Datagrams,
		Connections: room.Connections, Full: room.Full, Replayed: r.replayed[slot], Lost: r.lost[slot],
	}
	if r.IsReady(slot) {
		status.Waiting = 0
	} else if now := core.Since(unix.CLOCK_MONOTONIC); wait.Until > uint64(now) {
		until := time.Now().Add(time.Duration(wait.Until) - now)
		status.Until = &until
	}
	for row, p := range r.prepared {
		if p == nil || r.Listeners[row].Protocol != config.UDP {
			continue
		}
		info, err := socketMemory(r.KeeperSockets[row])
		if err != nil {
			return nil, err
		}
		status.Dropped += uint64(info[droppedWord])
	}
	return status, nil
}

// roomNote describes the waiting room of a slot whose packets wait, or have waited in vain.
func (r *rooms) roomNote(slot int) string {
	room, err := r.roomStatus(slot)
	if err != nil || room == nil || r.IsReady(slot) || r.SlotState(slot).State == stored.Maint || !r.HasDevices(slot) {
		return ""
	}
	waiting := format.Count(int(room.Waiting), "datagram waits", "datagrams wait")
	switch {
	case room.Filling && r.filling[slot].dumps != nil:
		return fmt.Sprintf("slot %d has a new member, which reads the connections first: %s", slot, waiting)
	case room.Filling:
		return fmt.Sprintf("slot %d sends its new member what has waited: %s", slot, waiting)
	case room.Until != nil:
		left := max(0, time.Until(*room.Until)).Round(time.Second)
		note := fmt.Sprintf("slot %d waits for its next member, for another %s: %s", slot, left, waiting)
		if room.Waiting >= uint64(r.room().Datagrams) {
			note += "; the room is full, and datagrams are refused"
		}
		return note
	case r.Seats[slot] == nil && r.Config.WhenEmpty.Room != nil:
		return fmt.Sprintf("slot %d has no member, and its wait is over: its devices are refused", slot)
	}
	return ""
}

// receiveWaiting reads a datagram from the room of a row. ok is false if there is none.
func (r *rooms) receiveWaiting(row int) (d waitingDatagram, ok bool) {
	if r.buffer == nil {
		r.buffer = make([]byte, 1<<16)
	}
	control := make([]byte, 128)
	for {
		n, nc, _, from, err := unix.Recvmsg(r.KeeperSockets[row], r.buffer, control, unix.MSG_DONTWAIT)
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
		return waitingDatagram{replay.Datagram{From: source, To: destination, Payload: slices.Clone(r.buffer[:n])}, row}, true
	}
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
