// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/listener"
)

// openSlot inserts a member's sockets into the data path and then opens the slot for all listeners at once.
func (s *service) openSlot(seat *core.Seat, sockets map[int]*member.Socket) (err error) {
	former := s.Seats[seat.Slot]
	seat.Place = bpf.PlaceOf(seat.Slot, 1)
	if former != nil {
		seat.Place = former.Place.Other()
	}
	flipped := false
	// clearPlace removes the sockets of the new member. Before the flip, the former member keeps the slot.
	clearPlace := func() error {
		err := s.rooms.CancelFill(seat)
		if former != nil && !flipped {
			return fault.Join(err, s.ClosePlace(seat.Place))
		}
		return fault.Join(err, s.closeSlot(seat.Slot))
	}
	defer func() {
		if err == nil {
			return
		}
		if former == nil || !flipped {
			err = fault.Join(err, clearPlace())
			return
		}
		// The former member gets the slot back.
		delete(s.Formers, former.ID())
		s.VacateSlot(seat.Slot, "its successor is not ready")
		s.evaluatePID(former.Process.PID)
	}()
	if err := clearPlace(); err != nil {
		return err
	}
	seat.Sockets = make(map[int]core.SocketInfo)
	for row, socket := range sockets {
		if socket.Protocol == unix.IPPROTO_TCP {
			if err := socket.Listen(s.Backlog()); err != nil {
				return err
			}
		}
		if err := s.Path.Insert(row, seat.Place, socket.FD(), socket.Cookie); err != nil {
			return listener.ExplainInsert(socket, err)
		}
		seat.Sockets[row] = core.SocketInfo{Cookie: socket.Cookie, Local: socket.String(), Number: socket.Number}
		if err := s.rooms.AttachTemplateFilter(seat, socket); err != nil {
			return err
		}
		if socket.Protocol == unix.IPPROTO_TCP {
			if err := s.LabelListener(seat.Process, socket.FD()); err != nil {
				return err
			}
		}
	}
	if err := s.moves.ShutBefore(seat.Slot); err != nil {
		return err
	}
	// The devices of a slot that is filling would be steered to the standby slot.
	if former == nil || s.Config.WhenEmpty.Standby == nil {
		if err := s.rooms.BeginFill(seat, former != nil); err != nil {
			return err
		}
	}
	flipped = true
	if err := s.SetReady(seat); err != nil {
		return err
	}
	if former != nil {
		if err := s.makeFormer(former, seat); err != nil {
			return err
		}
	}
	if !s.UsesLookup() {
		for row, socket := range sockets {
			fd, kept := s.KeeperSockets[row]
			if kept {
				if err := s.past.Ensure(row, fd); err != nil { // notes that another process has replaced the program
					return err
				}
			}
			// The keeper socket is in the same group, unless another process has divided the group.
			if err := s.Path.Attach(row, socket.FD()); err != nil {
				return err
			}
			if kept {
				if err := s.past.Attach(row, fd); err != nil {
					return err
				}
			}
		}
	}
	s.registrations[seat.Slot]++
	s.notAdmitted.Delete(seat.ID())
	s.occupySlot(seat)
	_, held := s.GroupOwner()
	s.learnGroupOwner(seat)
	s.scheduleSave()
	for pid, w := range s.waiting {
		if seat.IsRelated(w.process, core.Ancestors(w.process)) {
			s.forgetWaiting(pid)
		}
	}
	s.Log.Info("member registered", events.MemberRegistered, "slot", seat.Slot, "pid", seat.Process.PID, "source", seat.Source)
	// Moved runs the first pass now: a policy that is being applied can hold the lock for 100 ms before a scheduled pass.
	s.checks.Moved()
	s.checks.Soon()
	if err := s.moves.Advance(); err != nil {
		s.Log.Error("devices not moved", "error", err)
	}
	if !held && !s.UsesLookup() {
		_ = s.reconcileKeeper() // returns an error only with lookup
	}
	return nil
}

// occupySlot records the member of a slot and starts a goroutine that waits for the exit of the process.
func (s *service) occupySlot(seat *core.Seat) {
	s.Seats[seat.Slot] = seat
	seat.Ancestors = core.Ancestors(seat.Process)
	for _, socket := range seat.Sockets {
		s.recordSocketOwner(seat.ID(), socket.Cookie)
	}
	handle := seat.Handle
	go func() {
		if handle.Wait() != nil {
			return // the handle is closed: the slot was vacated before
		}
		// The release event is in the ring already, and says how the process has ended.
		s.awaitVacated(seat)
		s.Mu.Lock()
		defer s.Mu.Unlock()
		if s.Removed {
			return
		}
		if s.Seats[seat.Slot] == seat {
			s.VacateSlot(seat.Slot, "process exited")
		}
		s.checks.ForgetAdopter(handle)
		s.forgetFormer(seat)
	}()
}

// VacateSlot closes a slot in the data path and removes its member, then evaluates the waiting processes.
func (s *service) VacateSlot(slot int, reason string) {
	s.rooms.BeginWait(slot)
	if err := s.closeSlot(slot); err != nil {
		s.Log.Error("slot not cleared", "slot", slot, "error", err)
	}
	seat := s.Seats[slot]
	if seat == nil {
		return
	}
	delete(s.Seats, slot)
	s.rooms.ScheduleEnd(slot)
	s.rooms.StopCopying(seat)
	s.checks.ReleaseHandle(seat)
	s.Log.Info("slot cleared", events.SlotClosed, "slot", slot, "pid", seat.Process.PID, "reason", reason)
	if s.rooms.IsWaiting(slot) {
		s.Log.Info("the packets of the slot wait for its next member", events.TrafficHeld, "slot", slot, "when_empty", s.Config.WhenEmpty.String())
	}
	s.pruneSocketOwners()
	s.checks.Moved()
	s.checks.Soon()
	if err := s.moves.Advance(); err != nil {
		s.Log.Error("devices not moved", "error", err)
	}
	if s.emptying {
		return
	}
	// A process whose slot was taken over may get the slot back.
	for id, former := range s.Formers {
		if former.Slot == slot {
			delete(s.Formers, id)
			former.Handle.Close()
			s.evaluatePID(id.PID)
		}
	}
	// A waiting process may get the slot.
	for _, w := range slices.SortedFunc(maps.Values(s.waiting), func(a, b *waitingProcess) int {
		return cmp.Compare(a.process.StartTime, b.process.StartTime)
	}) {
		s.evaluatePID(w.process.PID)
	}
	// A child with sockets of its own may get the slot.
	if s.Seats[slot] == nil {
		s.after(0, s.scanRateLimited)
	}
}

// recordSocketOwner records the member that registered sockets.
func (s *service) recordSocketOwner(self member.ID, cookies ...uint64) {
	for _, cookie := range cookies {
		s.socketOwners[cookie] = self
	}
}

// pruneSocketOwners deletes the sockets of former members when the table is large.
func (s *service) pruneSocketOwners() {
	if len(s.socketOwners) <= 8*bpf.MaxSlots {
		return
	}
	live := make(map[uint64]member.ID)
	for _, seat := range s.Seats {
		for _, socket := range seat.Sockets {
			live[socket.Cookie] = seat.ID()
		}
	}
	s.socketOwners = live
}

// closeSlot closes a slot in the data path, first for all listeners at once, and then deletes its sockets.
func (s *service) closeSlot(slot int) error {
	place := bpf.PlaceOf(slot, 1)
	return fault.Join(s.Path.SetSlot(slot, bpf.Slot{}), s.ClosePlace(place), s.ClosePlace(place.Other()))
}

// awaitVacated waits until the release event of a seat is handled, at most for eventTime.
func (s *service) awaitVacated(seat *core.Seat) {
	const eventTime, step = 100 * time.Millisecond, 5 * time.Millisecond
	for begin := time.Now(); time.Since(begin) < eventTime; time.Sleep(step) {
		s.Mu.Lock()
		seated := s.Seats[seat.Slot] == seat && !s.Removed
		s.Mu.Unlock()
		if !seated {
			return
		}
	}
}
