// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/peer"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/stored"
)

// addClaim assigns a slot to a process by command, and returns the slot. With register, caller is nil and the sockets
// must exist already. With run, caller is the process itself, which is registered as soon as its sockets exist.
func (s *service) addClaim(pid int, slot *int, source string, caller *peer.Caller) (int, error) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if err := s.CheckOpen(); err != nil {
		return 0, err
	}
	defer s.Host.Descriptors.Borrow()()
	p, err := member.Read(pid)
	if err != nil {
		return 0, explainMissing(pid, err)
	}
	if caller != nil {
		// The attributes in p belong to the caller only if the caller still runs.
		if err := caller.Alive(); err != nil || p.StartTime != caller.ID.StartTime {
			return 0, peer.ErrGone
		}
	}
	self := member.ID{PID: p.PID, StartTime: p.StartTime}
	for _, seat := range s.Seats {
		if seat.ID() == self {
			if slot == nil || *slot == seat.Slot {
				return seat.Slot, nil
			}
			return 0, fault.Conflict(fmt.Errorf("process %d is in slot %d already", pid, seat.Slot),
				fmt.Sprintf("sockeye unregister --service %s --slot %d first", s.Name, seat.Slot))
		}
	}
	// Root may change its user before it opens sockets, as run --isolated does.
	if users := s.Users; len(users) > 0 && !p.UIDs.Within([]uint32{0}) {
		if err := member.AdmitUser(p, users); err != nil {
			return 0, explainRefusal(fmt.Errorf("make process %d a member: %w", pid, err))
		}
	}
	assigned, err := s.assignSlot(self, slot)
	if err != nil {
		return 0, err
	}
	before := s.State
	s.State.Released = slices.DeleteFunc(slices.Clone(s.State.Released), func(r member.ID) bool { return r == self })
	s.State.Claims = append(s.liveClaims(self), stored.Claim{ID: self, Slot: assigned, Source: source})
	if caller == nil {
		// The claim is saved first: an agent that is killed after the registration must not find a process that it
		// released.
		if err := s.State.Save(s.StatePath()); err != nil {
			s.State = before
			return 0, err
		}
		if err := s.register(p, &core.Seat{Slot: assigned, Source: source}); err != nil {
			s.State = before
			if saved := s.State.Save(s.StatePath()); saved != nil {
				err = fault.Join(err, saved)
			}
			if errors.Is(err, fs.ErrNotExist) {
				return 0, explainMissing(pid, err)
			}
			if fault.Hint(err) == "" {
				err = fault.WithHint(err, "register it once it listens, or start it with sockeye run, which waits for that")
			}
			return 0, fmt.Errorf("register process %d in slot %d: %w", pid, assigned, err)
		}
		s.forgetWaiting(pid)
	} else {
		s.registerIfMember(p)
	}
	return assigned, s.State.Save(s.StatePath())
}

// explainMissing turns an error that wraps fs.ErrNotExist into one about a missing process.
func explainMissing(pid int, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fault.Usage(fmt.Errorf("there is no process %d", pid), "it may have ended; name another with --pid")
	}
	return err
}

// assignSlot returns the requested slot, or the first free slot for nil. The process has no slot yet.
func (s *service) assignSlot(self member.ID, slot *int) (int, error) {
	if slot == nil {
		return s.takeSlot(member.AnySlot, self)
	}
	if *slot < 0 || *slot >= s.Config.Slots {
		return 0, s.SlotRange(*slot)
	}
	for _, c := range s.liveClaims(self) {
		if c.Slot == *slot {
			return 0, fault.Conflict(fmt.Errorf("slot %d is claimed by process %d", c.Slot, c.PID),
				"end that process, or give this one another slot")
		}
	}
	return s.takeSlot(*slot, self)
}

// unregister removes a member from its slot. The process is not registered again until a command does so or the
// program is restarted.
func (s *service) unregister(slot int) error {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if err := s.CheckOpen(); err != nil {
		return err
	}
	if slot < 0 || slot >= s.Config.Slots {
		return s.SlotRange(slot)
	}
	seat := s.Seats[slot]
	if seat == nil {
		return fault.Conflict(fmt.Errorf("slot %d is empty", slot), "sockeye slots lists the members")
	}
	self := seat.ID()
	s.State.Claims = s.liveClaims(self)
	s.State.Released = append(slices.DeleteFunc(slices.Clone(s.State.Released), func(r member.ID) bool {
		return !member.Alive(r.PID, r.StartTime)
	}), self)
	if err := s.State.Save(s.StatePath()); err != nil {
		return err
	}
	s.VacateSlot(slot, "unregistered")
	return nil
}

// liveClaims returns the claims of running processes other than except.
func (s *service) liveClaims(except member.ID) []stored.Claim {
	return slices.DeleteFunc(slices.Clone(s.State.Claims), func(c stored.Claim) bool {
		return c.ID == except || !member.Alive(c.PID, c.StartTime)
	})
}
