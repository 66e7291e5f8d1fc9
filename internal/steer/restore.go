// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/events"
	"sockeye/internal/member"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/keeper"
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

// restoreKeeper takes over the keeper of an earlier agent and copies its sockets.
func (s *service) restoreKeeper() error {
	// A keeper may have the listeners of the previous policy, which are no longer pinned.
	rows := slices.DeleteFunc(slices.Concat(s.Rows[:], s.previousRows[:]), func(l bpf.Listener) bool { return l == (bpf.Listener{}) })
	keepers, err := keeper.Find(s.Host.Root.Dir, s.Name, s.State.Keeper, func(string) []bpf.Listener { return rows })
	if err != nil {
		return err
	}
	for _, k := range keepers {
		if s.keeper != nil || s.UsesLookup() && !s.rooms.Exist() {
			if err := k.Kill(); err != nil {
				return err
			}
			continue
		}
		for row := range s.Listeners {
			i := slices.IndexFunc(k.Sockets, func(socket *member.Socket) bool {
				if s.UsesLookup() {
					cookie, err := s.Path.RoomCookie(row)
					return err == nil && cookie == socket.Cookie
				}
				return keeper.IsSocket(socket, s.Rows[row])
			})
			if i < 0 {
				continue
			}
			fd, err := unix.FcntlInt(uintptr(k.Sockets[i].FD()), unix.F_DUPFD_CLOEXEC, 0)
			if err != nil {
				k.Close()
				return fmt.Errorf("copy keeper socket: %w", err)
			}
			s.KeeperSockets[row] = fd
		}
		member.CloseAll(k.Sockets)
		k.Sockets = nil
		s.keeper = k
		s.recordKeeper()
		s.moveKeeperToScope(k)
		go s.watchKeeper(k, time.Now())
		s.Log.Info("keeper restored", events.KeeperRestored, "pid", k.Self.PID, "sockets", len(s.KeeperSockets))
	}
	return nil
}
