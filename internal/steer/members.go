// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"slices"
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/domain"
	"sockeye/internal/events"
	"sockeye/internal/member"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/stored"
)

// scan evaluates all processes of the host.
func (s *service) scan() error {
	defer s.Host.Descriptors.Borrow()()
	processes, err := member.All()
	if err != nil {
		return err
	}
	s.probesLeft = maxProbes
	alive := make(map[member.ID]bool)
	for _, p := range processes {
		alive[member.ID{PID: p.PID, StartTime: p.StartTime}] = true
		s.registerIfMember(s.recallFirstSeen(p))
	}
	maps.DeleteFunc(s.firstSeen, func(self member.ID, _ *member.Process) bool { return !alive[self] })
	return nil
}

// watch handles the events of the BPF hooks until the ring buffer is closed.
func (s *service) watch(events *bpf.Events) {
	for {
		event, err := events.Next()
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil {
			s.Log.Error("event ring failed", "error", err)
			return
		}
		s.Mu.Lock()
		if s.Events == events {
			s.handle(event)
		}
		s.Mu.Unlock()
	}
}

func (s *service) handle(event bpf.Event) {
	if lost, err := s.Path.LostEvents(); err == nil && lost != s.lostEvents {
		s.Log.Warn("events lost, scanning", "lost", lost-s.lostEvents)
		s.lostEvents = lost
		s.scanRateLimited()
	}
	switch bpf.EventKind(event.Kind) {
	case bpf.EventBind:
		if len(s.boundBy) > 4*bpf.MaxSlots {
			clear(s.boundBy)
		}
		s.boundBy[event.Cookie] = int(event.Pid)
		s.inspect(int(event.Pid))
	case bpf.EventListen:
		pid, ok := s.boundBy[event.Cookie]
		delete(s.boundBy, event.Cookie)
		if ok {
			s.inspect(pid)
		} else {
			s.scanRateLimited()
		}
	case bpf.EventRelease:
		delete(s.socketOwners, event.Cookie)
		for slot, seat := range s.Seats {
			for _, socket := range seat.Sockets {
				if socket.Cookie == event.Cookie {
					s.VacateSlot(slot, core.WhyClosed(event))
					s.evaluatePID(seat.Process.PID)
					return
				}
			}
		}
	}
}

func (s *service) seatOf(pid int) *core.Seat {
	for _, seat := range s.Seats {
		if seat.Process.PID == pid {
			return seat
		}
	}
	return nil
}

// saveInterval is the minimum time between two saves of the members. A save reads all processes of the state, so one
// save per registration would be quadratic.
const saveInterval = 100 * time.Millisecond

// scheduleSave saves the members for the next agent, now or at the end of saveInterval.
func (s *service) scheduleSave() {
	if s.saveTimer != nil {
		return
	}
	if wait := saveInterval - time.Since(s.lastSave); wait > 0 {
		s.saveTimer = time.AfterFunc(wait, func() {
			s.Mu.Lock()
			defer s.Mu.Unlock()
			s.flushMembers()
		})
		return
	}
	s.saveMembers()
}

// flushMembers saves the members now if a save is due.
func (s *service) flushMembers() {
	if s.saveTimer != nil {
		s.saveTimer.Stop()
		s.saveTimer = nil
		s.saveMembers()
	}
}

// saveMembers saves the members, and deletes processes that have exited.
func (s *service) saveMembers() {
	s.lastSave = time.Now()
	s.State.Members = nil
	seated := make(map[member.ID]bool) // a goroutine waits for the exit of each of these
	for _, seat := range s.Seats {
		seated[seat.ID()] = true
	}
	for self, p := range s.firstSeen {
		if !seated[self] && !member.Alive(self.PID, self.StartTime) {
			delete(s.firstSeen, self)
			continue
		}
		exe, file := p.VerifiedExecutable()
		s.State.Members = append(s.State.Members, stored.FirstSight{ID: self, Args: p.Args, SlotVariable: p.SlotVariable(), Exe: exe, File: file})
	}
	cookies := make(map[member.ID][]uint64)
	for cookie, self := range s.socketOwners {
		cookies[self] = append(cookies[self], cookie)
	}
	s.State.Sockets = nil
	for self, list := range cookies {
		s.State.Sockets = append(s.State.Sockets, stored.OpenedSockets{ID: self, Cookies: list})
	}
	if err := s.State.Save(s.StatePath()); err != nil {
		s.Log.Error("state not saved", "error", err)
	}
}

// reevaluateWaiting evaluates the waiting processes, at most once per period: no hook reports some changes of a process,
// such as a change of its user before execve(2).
func (s *service) reevaluateWaiting() {
	if s.Events == nil || time.Since(s.lastReevaluation) < inspectionPeriod {
		return
	}
	s.lastReevaluation = time.Now()
	for _, pid := range slices.Sorted(maps.Keys(s.waiting)) {
		s.evaluatePID(pid)
	}
}

func (s *service) evaluatePID(pid int) {
	defer s.Host.Descriptors.Borrow()()
	p, err := s.read(pid)
	if err != nil {
		return // the process has exited
	}
	s.probesLeft = max(s.probesLeft, 1)
	s.registerIfMember(p)
}

// read returns a process with the arguments of its first inspection.
func (s *service) read(pid int) (*member.Process, error) {
	p, err := member.Read(pid)
	if err != nil {
		return nil, err
	}
	return s.recallFirstSeen(p), nil
}

// recallFirstSeen replaces the attributes that p may have overwritten by those of the first inspection.
func (s *service) recallFirstSeen(p *member.Process) *member.Process {
	self := member.ID{PID: p.PID, StartTime: p.StartTime}
	first := s.firstSeen[self]
	switch {
	case first == nil:
	case first.MayRun(p.File):
		p.RecallFirstSeen(first)
	default:
		// The first inspection was between fork(2) and execve(2), and saw the parent's executable.
		delete(s.firstSeen, self)
	}
	return p
}

// registerIfMember registers a process if a rule or a claim makes it a member and all its sockets exist. A process that is not
// ready yet is added to the waiting processes.
func (s *service) registerIfMember(p *member.Process) {
	candidate := &core.Seat{}
	slot, err := s.membership(p, candidate)
	if errors.Is(err, errNotMember) {
		s.forgetWaiting(p.PID)
		s.notAdmitted.Delete(member.ID{PID: p.PID, StartTime: p.StartTime})
		return
	}
	for _, seat := range s.Seats {
		if seat.Process.PID == p.PID && seat.Process.StartTime == p.StartTime {
			return
		}
	}
	if former := s.Formers[member.ID{PID: p.PID, StartTime: p.StartTime}]; former != nil && s.Seats[former.Slot] != nil {
		s.forgetWaiting(p.PID)
		return
	}
	if refusal, ok := errors.AsType[*member.Refusal](err); ok && !s.hasClaim(p) {
		s.forgetWaiting(p.PID)
		s.addRefusal(p, candidate.Source, refusal)
		return
	}
	candidate.Slot = slot
	if err == nil {
		err = s.register(p, candidate)
	}
	if err == nil || errors.Is(err, errInherited) || errors.Is(err, fs.ErrNotExist) || s.isRelated(p) || s.isIsolatedProgram(p) {
		s.forgetWaiting(p.PID)
		return
	}
	s.addWaiting(p, candidate.Source, slot, err)
}

// Limits of the waiting processes, each of which needs a descriptor.
const waitingShare, leastWaiting, mostWaiting = 8, 16, 256

// waitingProcess is a process that matches a rule or has a claim and cannot be registered yet.
type waitingProcess struct {
	process *member.Process
	handle  *member.Handle
	source  string
	slot    int   // or member.AnySlot
	problem error // reason
}

// addWaiting records p as a waiting process until p exits or becomes a member.
func (s *service) addWaiting(p *member.Process, source string, slot int, problem error) {
	w := s.waiting[p.PID]
	if w != nil && w.process.StartTime == p.StartTime {
		if w.problem.Error() != problem.Error() {
			s.Log.Info("member not ready", events.MemberWaiting, "slot", slot, "pid", p.PID, "problem", problem)
		}
		w.process, w.problem, w.slot, w.source = p, problem, slot, source
		return
	}
	s.forgetWaiting(p.PID)
	if len(s.waiting) >= domain.ShareOfDescriptors(waitingShare, leastWaiting, mostWaiting) {
		if !s.waitingFull {
			s.Log.Warn("too many waiting processes, further ones are not recorded", "recorded", len(s.waiting))
		}
		s.waitingFull = true
		return
	}
	handle, err := member.Open(p.PID)
	if err != nil {
		return
	}
	s.Log.Info("member not ready", events.MemberWaiting, "slot", slot, "pid", p.PID, "problem", problem)
	w = &waitingProcess{process: p, handle: handle, source: source, slot: slot, problem: problem}
	s.waiting[p.PID] = w
	go func() {
		if handle.Wait() != nil {
			return
		}
		s.Mu.Lock()
		defer s.Mu.Unlock()
		if s.waiting[p.PID] == w {
			s.forgetWaiting(p.PID)
		}
	}()
}

// forgetWaiting deletes a waiting process.
func (s *service) forgetWaiting(pid int) {
	if w := s.waiting[pid]; w != nil {
		w.handle.Close()
		delete(s.waiting, pid)
		s.waitingFull = false
	}
}
