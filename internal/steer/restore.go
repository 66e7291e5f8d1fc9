// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"io/fs"

	"sockeye/internal/bpf"
	"sockeye/internal/events"
	"sockeye/internal/member"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/stored"
)

// restore takes over the keeper and the members of an earlier agent, then scans for new members. Afterwards the
// program is attached to all groups.
func (s *service) restore() error {
	s.Restoring = true // openService has set it, but not a policy that replaces the data path (reopen)
	defer func() { s.Restoring = false }()
	if err := s.restoreKeeper(); err != nil {
		return err
	}
	for slot := range bpf.MaxSlots {
		if err := s.restoreSlot(slot); err != nil {
			return err
		}
	}
	s.rooms.AssumeReplayed()
	// The rooms come first, because the slots of members that are found now may be filling.
	if err := s.reconcileKeeper(); err != nil {
		return err
	}
	if err := s.scan(); err != nil {
		return err
	}
	s.Restoring = false
	if err := s.moves.ApplySettings(); err != nil {
		return err
	}
	s.rooms.DeliverWaiting()
	s.rooms.ReplayMoved()
	return s.reconcileKeeper()
}

// restoreSlot takes over the member of a pinned slot if the process and its sockets are unchanged, and closes the slot
// otherwise.
func (s *service) restoreSlot(slot int) error {
	value, err := s.Path.Slot(slot)
	if err != nil {
		return err
	}
	if value == (bpf.Slot{}) {
		return s.closeIncompleteSlot(slot)
	}
	p, err := s.read(int(value.Pid))
	wasReady := value.Ready > 0 || s.SlotState(slot).State == stored.Maint
	if err == nil && p.StartTime == value.StartTime && wasReady && (slot < s.Config.Slots || s.InUse(slot)) {
		var handle *member.Handle
		if handle, err = member.Open(p.PID); err == nil {
			seat := &core.Seat{Slot: slot, Place: s.pinnedPlace(slot, value), Process: p, Handle: handle, Sockets: make(map[int]core.SocketInfo)}
			if _, err = s.membership(p, seat); err == nil && s.loadSeatSockets(seat) {
				err = s.verifySockets(seat)
			} else if err == nil {
				err = fs.ErrNotExist
			}
			if err == nil {
				// An earlier agent may have been killed during a takeover.
				if err := s.ClosePlace(seat.Place.Other()); err != nil {
					return err
				}
				s.occupySlot(seat)
				s.learnGroupOwner(seat)
				s.Log.Info("member restored", events.MemberRestored, "slot", slot, "pid", p.PID)
				return nil
			}
			handle.Close()
		}
	}
	// A child of the former member may still have its sockets open.
	for row := range s.Listeners {
		if cookie, err := s.Path.Cookie(row, s.pinnedPlace(slot, value)); err == nil && cookie != 0 {
			s.recordSocketOwner(member.ID{PID: int(value.Pid), StartTime: value.StartTime}, cookie)
		}
	}
	switch {
	case slot >= s.Config.Slots:
		s.Log.Info("slot cleared", events.SlotClosed, "slot", slot, "pid", value.Pid, "reason", "slot removed")
	case err == nil, errors.Is(err, fs.ErrNotExist):
		s.Log.Info("slot cleared", events.SlotClosed, "slot", slot, "pid", value.Pid, "reason", "process exited, or lacks a socket")
	default:
		s.Log.Warn("member not restored", events.SlotClosed, "slot", slot, "pid", value.Pid, "reason", err)
	}
	return s.closeSlot(slot)
}

// closeIncompleteSlot removes the sockets of a slot that an earlier agent began to register.
func (s *service) closeIncompleteSlot(slot int) error {
	for row := range s.Listeners {
		for _, place := range []bpf.Place{bpf.PlaceOf(slot, 1), bpf.PlaceOf(slot, 2)} {
			cookie, err := s.Path.Cookie(row, place)
			if err != nil {
				return err
			}
			if cookie != 0 {
				return s.closeSlot(slot)
			}
		}
	}
	return nil
}

// pinnedPlace returns the place of the sockets of a pinned slot. A slot in maint does not tell.
func (s *service) pinnedPlace(slot int, value bpf.Slot) bpf.Place {
	place := bpf.PlaceOf(slot, value.Ready)
	for row := range s.Listeners {
		if cookie, err := s.Path.Cookie(row, place); value.Ready == 0 && err == nil && cookie == 0 {
			return place.Other()
		}
	}
	return place
}

// loadSeatSockets reads the sockets of a seat from the pins, and reports whether each listener has one.
func (s *service) loadSeatSockets(seat *core.Seat) bool {
	for row, l := range s.Listeners {
		cookie, err := s.Path.Cookie(row, seat.Place)
		if err != nil || cookie == 0 {
			return false
		}
		if seat.Sockets[row].Cookie != cookie {
			seat.Sockets[row] = core.SocketInfo{Cookie: cookie, Local: l.String()}
		}
	}
	return true
}
