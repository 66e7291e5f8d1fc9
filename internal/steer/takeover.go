// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"maps"

	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/steer/core"
)

// takeSlot checks that a slot is free, or returns the first free slot without a claim for member.AnySlot. Slots whose
// member has exited are vacated first.
func (s *service) takeSlot(slot int, of member.ID) (int, error) {
	// A supervisor may start the next member before the agent handles the exit of the last one.
	for taken, seat := range maps.Clone(s.Seats) {
		if (taken == slot || slot == member.AnySlot) && s.Seats[taken] == seat && seat.Handle.Ended() {
			s.VacateSlot(taken, "process exited")
		}
	}
	if slot != member.AnySlot {
		if seat := s.Seats[slot]; seat != nil && !s.takesOver(of, seat) {
			return 0, fault.Conflict(fmt.Errorf("slot %d is taken by process %d", slot, seat.Process.PID),
				"end that process, or give this one another slot")
		}
		return slot, nil
	}
	reserved := make(map[int]bool)
	for _, c := range s.liveClaims(member.ID{}) {
		reserved[c.Slot] = true
	}
	for slot := range s.Config.Slots {
		if s.Seats[slot] == nil && !reserved[slot] {
			return slot, nil
		}
	}
	return 0, fault.Conflict(fmt.Errorf("all %d slots are taken", s.Config.Slots), "raise slots in the policy")
}

// takesOver reports whether a process takes the slot of a member over. Only a process that was started later does, so that
// two processes do not take the slot from each other.
func (s *service) takesOver(p member.ID, from *core.Seat) bool {
	return s.Config.Takeover && p.StartTime > from.Process.StartTime
}

// makeFormer removes the sockets of a member whose slot another process has taken over. The former member goes on with what it has
// received; the next check closes its connections.
func (s *service) makeFormer(former, by *core.Seat) error {
	s.Formers[former.ID()] = former
	s.rooms.StopCopying(former)
	s.Log.Info("slot taken over", events.SlotTakenOver, "slot", by.Slot, "pid", by.Process.PID, "former", former.Process.PID)
	return s.ClosePlace(former.Place)
}

// isFormer reports whether the member of a slot was started later than a process, so that the process is a former member.
func (s *service) isFormer(slot int, p *member.Process) bool {
	now := s.Seats[slot]
	return s.Config.Takeover && now != nil && p.StartTime < now.Process.StartTime
}

// addFormer records a former member until it exits.
func (s *service) addFormer(slot int, former *core.Seat) {
	former.Slot = slot
	s.Formers[former.ID()] = former
	go func() {
		if former.Handle.Wait() != nil {
			return
		}
		s.Mu.Lock()
		defer s.Mu.Unlock()
		s.forgetFormer(former)
	}()
}

// forgetFormer forgets a former member that has exited.
func (s *service) forgetFormer(former *core.Seat) {
	if s.Formers[former.ID()] == former {
		s.Log.Info("former member exited", events.FormerExited, "slot", former.Slot, "pid", former.Process.PID)
		delete(s.Formers, former.ID())
		former.Handle.Close()
	}
}
