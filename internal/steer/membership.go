// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"sockeye/internal/bpf"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/steer/stored"
)

// errNotMember is the error of a process that matches no rule and has no claim.
var errNotMember = errors.New("not a member")

// membership returns the slot of a process by its claim or by the first rule that admits it, and sets the source and
// the permitted socket owners of the seat. The error is errNotMember, or a member.Refusal for a process that matches a
// rule and is not admitted.
func (s *service) membership(p *member.Process, seat *core.Seat) (slot int, err error) {
	self := member.ID{PID: p.PID, StartTime: p.StartTime}
	if p.PID == os.Getpid() || keeper.IsKeeper(p) || slices.Contains(s.State.Released, self) {
		return 0, errNotMember
	}
	for _, c := range s.State.Claims {
		if c.ID == self {
			seat.Source, seat.Claimed, seat.AllowedOwners = c.Source, true, s.allowedSocketOwners(p, s.Users)
			return c.Slot, s.admitClaim(p)
		}
	}
	if !p.InCgroup(s.Config.Cgroup) {
		return 0, errNotMember
	}
	err = errNotMember
	for i := range s.rules {
		rule := &s.rules[i]
		if !rule.Matches(p) {
			continue
		}
		source := fmt.Sprintf("members[%d]", i)
		if refusal := rule.Admit(p, s.Users, s.memberHost); refusal != nil {
			if errors.Is(err, errNotMember) {
				seat.Source, err = source, refusal
			}
			continue
		}
		s.recordFirst(self, p)
		seat.Source, seat.AllowedOwners = source, s.allowedSocketOwners(p, rule.Users(s.Users))
		slots := s.Config.Slots
		if now := s.seatOf(p.PID); now != nil && now.Slot >= slots || seat.Sockets != nil && seat.Slot >= slots {
			slots = bpf.MaxSlots // a slot that the policy no longer has, until its devices have moved
		}
		return rule.Slot(p, slots)
	}
	return 0, err
}

// recordFirst records the first sight of a process that a rule admits. Any number of such processes can exist, and end before they are ready.
func (s *service) recordFirst(self member.ID, p *member.Process) {
	if _, known := s.firstSeen[self]; !known && len(s.firstSeen) >= 2*bpf.MaxSlots {
		maps.DeleteFunc(s.firstSeen, func(other member.ID, _ *member.Process) bool { return !member.Alive(other.PID, other.StartTime) })
	}
	if len(p.Args) > 0 && len(s.firstSeen) < 2*bpf.MaxSlots { // empty during execve(2), when the executable is already the new one
		s.firstSeen[self] = p
	}
}

// admitClaim returns an error if a process with a claim does not run as a user of the service.
func (s *service) admitClaim(p *member.Process) error {
	users := s.Users
	if len(users) == 0 {
		users = p.UIDs[:1]
	}
	return explainRefusal(member.AdmitUser(p, users))
}

// allowedSocketOwners returns the permitted owners of the sockets of a process, which itself runs as one of users.
func (s *service) allowedSocketOwners(p *member.Process, users []uint32) []uint32 {
	if owner, known := s.GroupOwner(); known {
		return []uint32{owner}
	}
	if len(s.Users) == 0 {
		return p.UIDs[:1]
	}
	return slices.Compact(slices.Sorted(slices.Values(slices.Concat(s.Users, users))))
}

// learnGroupOwner sets the group owner from a member if the policy does not determine the owner. Such a member has a
// claim.
func (s *service) learnGroupOwner(seat *core.Seat) {
	if _, known := s.GroupOwner(); !known && !s.UsesLookup() {
		uid := seat.Process.UIDs[0]
		s.State.ClaimedUID = &uid
	}
}

// explainRefusal turns a member.Refusal into an error with a hint.
func explainRefusal(err error) error {
	if refusal, ok := errors.AsType[*member.Refusal](err); ok {
		return fault.Conflict(err, refusal.Hint)
	}
	return err
}

func (s *service) hasClaim(p *member.Process) bool {
	return slices.ContainsFunc(s.State.Claims, func(c stored.Claim) bool { return c.ID == member.ID{PID: p.PID, StartTime: p.StartTime} })
}

// isRelated reports whether a process is an ancestor or a descendant of a member, as a shell that started the member or
// a plugin that the member forked.
func (s *service) isRelated(p *member.Process) bool {
	if len(s.Seats) == 0 {
		return false
	}
	up := core.Ancestors(p)
	for _, seat := range s.Seats {
		if seat.IsRelated(p, up) {
			return true
		}
	}
	return false
}

// isIsolatedProgram reports whether a process runs in its own network namespace as a descendant of a process with a
// claim: the gateway of run --isolated.
func (s *service) isIsolatedProgram(p *member.Process) bool {
	if p.Netns == s.NetnsInode || len(s.State.Claims) == 0 {
		return false
	}
	up := core.Ancestors(p)
	return slices.ContainsFunc(s.State.Claims, func(c stored.Claim) bool {
		return slices.Contains(up, c.PID) && member.Alive(c.PID, c.StartTime)
	})
}
