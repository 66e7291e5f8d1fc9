// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/steer/listener"
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
		s.evaluate(s.recallFirstSeen(p))
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
					s.VacateSlot(slot, "socket closed")
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

func (s *service) evaluatePID(pid int) {
	defer s.Host.Descriptors.Borrow()()
	p, err := s.read(pid)
	if err != nil {
		return // the process has exited
	}
	s.probesLeft = max(s.probesLeft, 1)
	s.evaluate(p)
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
		seated[member.ID{PID: seat.Process.PID, StartTime: seat.Process.StartTime}] = true
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

// errNotOpen is the error of a process that lacks a socket, typically because it has just started.
var errNotOpen = errors.New("not opened")

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
		if len(p.Args) > 0 { // empty during execve(2), when the executable is already the new one
			s.firstSeen[self] = p
		}
		seat.Source, seat.AllowedOwners = source, s.allowedSocketOwners(p, rule.Users(s.Users))
		slots := s.Config.Slots
		if now := s.seatOf(p.PID); now != nil && now.Slot >= slots || seat.Sockets != nil && seat.Slot >= slots {
			slots = bpf.MaxSlots // a slot that the policy no longer has, until its devices have moved
		}
		return rule.Slot(p, slots)
	}
	return 0, err
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

// evaluate registers a process if a rule or a claim makes it a member and all its sockets exist. A process that is not
// ready yet is added to the waiting processes.
func (s *service) evaluate(p *member.Process) {
	candidate := &core.Seat{}
	slot, err := s.membership(p, candidate)
	if errors.Is(err, errNotMember) {
		s.forgetWaiting(p.PID)
		delete(s.refusals, member.ID{PID: p.PID, StartTime: p.StartTime})
		return
	}
	for _, seat := range s.Seats {
		if seat.Process.PID == p.PID && seat.Process.StartTime == p.StartTime {
			return
		}
	}
	if former := s.formers[member.ID{PID: p.PID, StartTime: p.StartTime}]; former != nil && s.Seats[former.Slot] != nil {
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

// Limits of the waiting processes, each of which needs a descriptor.
const waitingShare, leastWaiting, mostWaiting = 8, 16, 256

// addWaiting records p as a waiting process until p exits or becomes a member.
func (s *service) addWaiting(p *member.Process, source string, slot int, problem error) {
	w := s.waiting[p.PID]
	if w != nil && w.process.StartTime == p.StartTime {
		if w.problem.Error() != problem.Error() {
			s.Log.Info("member not ready", "slot", slot, "pid", p.PID, "problem", problem)
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
	s.Log.Info("member not ready", "slot", slot, "pid", p.PID, "problem", problem)
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

// forgetWaiting deletes a waiting process.
func (s *service) forgetWaiting(pid int) {
	if w := s.waiting[pid]; w != nil {
		w.handle.Close()
		delete(s.waiting, pid)
		s.waitingFull = false
	}
}

// errInherited is the error of a process whose sockets another member opened, as a plugin that nfacctd forked.
var errInherited = fault.Conflict(errors.New("its sockets are another member's"), "name the process that opened them")

// register copies the sockets of a process and opens the slot of the seat. seat has the source and the slot, or
// member.AnySlot.
func (s *service) register(p *member.Process, seat *core.Seat) error {
	if seat.Slot >= s.Config.Slots {
		return fault.Usage(fmt.Errorf("slot %d is out of range, the service has %d", seat.Slot, s.Config.Slots),
			fmt.Sprintf("slots are numbered 0 to %d", s.Config.Slots-1))
	}
	if p.Netns != s.NetnsInode {
		return fault.Conflict(errors.New("it is in another network namespace than the service"),
			"set netns of the service to the members' namespace")
	}
	handle, err := member.Open(p.PID)
	if err != nil {
		return err
	}
	sockets, err := handle.Sockets(s.matchesListener)
	if err != nil {
		handle.Close()
		return err
	}
	defer member.CloseAll(sockets)
	// Between Read and Open, the process id may have been reused, and the process may have changed its user. The
	// attributes that are read now belong to the process of the handle as long as that process runs.
	now, err := s.read(p.PID)
	if err != nil || handle.Ended() || now.StartTime != p.StartTime {
		handle.Close()
		return fs.ErrNotExist
	}
	slot := seat.Slot
	if _, err = s.membership(now, seat); err == nil {
		seat.Process, seat.Handle = now, handle
		var chosen map[int]*member.Socket
		if chosen, err = s.chooseSockets(seat, sockets); err == nil {
			if s.isFormer(slot, now) {
				s.addFormer(slot, seat)
				return nil
			}
			seat.Slot, err = s.findSlot(slot, seat.ID())
		}
		if err == nil {
			err = s.openSlot(seat, chosen)
		}
	}
	if err != nil {
		handle.Close()
		return err
	}
	return nil
}

// matchesListener reports whether a socket has the protocol and a member's port of one of the listeners.
func (s *service) matchesListener(socket *member.Socket) bool {
	return listener.MatchesAny(s.Listeners, socket)
}

const duplicateHint = "make the program open one socket (nginx: without reuseport), or start one member per socket"

// chooseSockets returns the socket for each row, or the reason why a listener has none.
func (s *service) chooseSockets(seat *core.Seat, sockets []*member.Socket) (map[int]*member.Socket, error) {
	self := member.ID{PID: seat.Process.PID, StartTime: seat.Process.StartTime}
	chosen := make(map[int]*member.Socket)
	for _, row := range slices.Sorted(maps.Keys(s.Listeners)) {
		l := s.Listeners[row]
		var problem error
		for _, socket := range sockets {
			if (socket.Protocol == unix.IPPROTO_UDP) != (l.Protocol == config.UDP) {
				continue
			}
			if first, last := listener.MemberPorts(l); socket.Local.Port() < first || socket.Local.Port() > last {
				continue
			}
			if chosen[row] != nil {
				if socket.Listening && socket.SharesTraffic(chosen[row]) {
					return nil, fault.Conflict(fmt.Errorf("it has more than one socket %s: a slot has one socket per listener, the others would get no traffic", socket), duplicateHint)
				}
				continue
			}
			owner, owned := s.socketOwners[socket.Cookie]
			if owned && owner != self && (!seat.Claimed || member.Alive(owner.PID, owner.StartTime)) {
				return nil, errInherited
			}
			err := s.checkOrigin(seat, socket)
			if err == nil {
				err = listener.CheckFit(l, socket, s.UsesLookup())
			}
			if err != nil {
				problem = cmp.Or(problem, err)
				continue
			}
			chosen[row] = socket
		}
		if chosen[row] != nil {
			continue
		}
		if problem == nil {
			problem = fmt.Errorf("it has %w %s yet", errNotOpen, listener.MemberAddress(l))
		}
		return nil, problem
	}
	if s.UsesLookup() {
		return chosen, listener.CheckSameFamily(s.Listeners, chosen)
	}
	return chosen, nil
}

// findDuplicate sets seat.duplicate if the member has a second socket with the address of a registered one. Without a
// program, the kernel would distribute the traffic over both.
func (s *service) findDuplicate(seat *core.Seat) {
	sockets, err := seat.Handle.Sockets(s.matchesListener)
	if err != nil {
		return // the process is exiting
	}
	defer member.CloseAll(sockets)
	seat.Duplicate = nil
	for _, registered := range sockets {
		if !slices.ContainsFunc(slices.Collect(maps.Values(seat.Sockets)), func(i core.SocketInfo) bool { return i.Cookie == registered.Cookie }) {
			continue
		}
		for _, socket := range sockets {
			if socket.Cookie != registered.Cookie && socket.Listening && socket.SharesTraffic(registered) {
				seat.Duplicate = fault.Conflict(fmt.Errorf("process %d in slot %d has another socket %s, which gets no traffic: a slot has one socket per listener",
					seat.Process.PID, seat.Slot, socket), duplicateHint)
			}
		}
	}
	if seat.Duplicate != nil {
		s.Log.Warn("socket without traffic", "slot", seat.Slot, "pid", seat.Process.PID, "problem", seat.Duplicate)
	}
}

// duplicateProblem returns the duplicate error of the lowest slot that has one.
func (s *service) duplicateProblem() error {
	for _, slot := range slices.Sorted(maps.Keys(s.Seats)) {
		if duplicate := s.Seats[slot].Duplicate; duplicate != nil {
			return duplicate
		}
	}
	return nil
}

// checkOrigin returns an error if another user opened a socket, or if it was opened in another network namespace. Such a
// socket was passed to the process.
func (s *service) checkOrigin(seat *core.Seat, socket *member.Socket) error {
	if !slices.Contains(seat.AllowedOwners, socket.UID) {
		return fault.Conflict(fmt.Errorf("its socket %s belongs to user %s, not to %s", socket, member.UserName(socket.UID), member.UserNames(seat.AllowedOwners)),
			"start the program as that user, or name the owner in user of the service")
	}
	switch netns, err := socket.Netns(); {
	case err != nil:
		return err
	case netns != s.NetnsInode:
		return fault.Conflict(fmt.Errorf("its socket %s was opened in another network namespace than the service's", socket),
			"make the program open it in the service's namespace")
	}
	return nil
}

// checkSeatSockets checks the origin and the ports of the registered sockets of a seat, and records the member as the owner
// of the connections. Earlier versions of the agent did neither at registration, and a policy may change the ports.
func (s *service) checkSeatSockets(seat *core.Seat) error {
	rows := make(map[uint64]int)
	for row, registered := range seat.Sockets {
		rows[registered.Cookie] = row
	}
	sockets, err := seat.Handle.Sockets(func(socket *member.Socket) bool {
		_, registered := rows[socket.Cookie]
		return registered
	})
	if err != nil {
		return err
	}
	defer member.CloseAll(sockets)
	for _, socket := range sockets {
		if err := s.checkOrigin(seat, socket); err != nil {
			return err
		}
		if l, ok := s.Listeners[rows[socket.Cookie]]; ok {
			if first, last := listener.MemberPorts(l); socket.Local.Port() < first || socket.Local.Port() > last {
				return fmt.Errorf("its socket %s is not on %s", socket, listener.MemberAddress(l))
			}
		}
		if socket.Protocol == unix.IPPROTO_TCP {
			if err := s.LabelListener(seat.Process, socket.FD()); err != nil {
				return err
			}
		}
		if err := s.rooms.CopyTemplates(seat, socket); err != nil {
			return err
		}
	}
	return nil
}

// findSlot checks that a slot is free, or returns the first free slot without a claim for member.AnySlot.
func (s *service) findSlot(slot int, of member.ID) (int, error) {
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

// openSlot inserts a member's sockets into the data path and then opens the slot for all listeners at once.
func (s *service) openSlot(seat *core.Seat, sockets map[int]*member.Socket) (err error) {
	former := s.Seats[seat.Slot]
	seat.Place = bpf.PlaceOf(seat.Slot, 1)
	if former != nil {
		seat.Place = former.Place.Other()
	}
	flipped := false
	closeSlot := func() error {
		if former != nil && !flipped {
			return s.ClosePlace(seat.Place)
		}
		return s.closeSlot(seat.Slot)
	}
	defer func() {
		if err == nil {
			return
		}
		if former == nil || !flipped {
			err = fault.Join(err, closeSlot())
			return
		}
		// The former member gets the slot back.
		delete(s.formers, former.ID())
		s.VacateSlot(seat.Slot, "its successor is not ready")
		s.evaluatePID(former.Process.PID)
	}()
	if err := closeSlot(); err != nil {
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
		if err := s.rooms.CopyTemplates(seat, socket); err != nil {
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
			if err := s.Path.Attach(row, socket.FD()); err != nil {
				return err
			}
		}
	}
	s.registrations++
	delete(s.refusals, member.ID{PID: seat.Process.PID, StartTime: seat.Process.StartTime})
	s.occupySlot(seat)
	_, held := s.GroupOwner()
	s.learnGroupOwner(seat)
	s.scheduleSave()
	for pid, w := range s.waiting {
		if seat.IsRelated(w.process, core.Ancestors(w.process)) {
			s.forgetWaiting(pid)
		}
	}
	s.Log.Info("member registered", "slot", seat.Slot, "pid", seat.Process.PID, "source", seat.Source)
	// A policy that is being applied may hold the lock for 100 ms before the next pass.
	s.checks.Moved()
	s.checks.Soon()
	if err := s.moves.Place(); err != nil {
		s.Log.Error("devices not moved", "error", err)
	}
	if !held && !s.UsesLookup() {
		if err := s.reconcileKeeper(); err != nil {
			s.Log.Error("ports not held", "error", err)
		}
	}
	return nil
}

// makeFormer removes the sockets of a member whose slot another process has taken over. Its process goes on with what it
// has received; its connections are closed by the next check.
func (s *service) makeFormer(former, by *core.Seat) error {
	s.formers[former.ID()] = former
	s.rooms.StopCopying(former)
	s.Log.Info("slot taken over", "slot", by.Slot, "pid", by.Process.PID, "former", former.Process.PID)
	return s.ClosePlace(former.Place)
}

// isFormer reports whether the member of a slot has taken the slot over from a process, before this agent started.
func (s *service) isFormer(slot int, p *member.Process) bool {
	now := s.Seats[slot]
	return s.Config.Takeover && now != nil && p.StartTime < now.Process.StartTime
}

// addFormer records a former member until it exits.
func (s *service) addFormer(slot int, former *core.Seat) {
	former.Slot = slot
	s.formers[former.ID()] = former
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
	if s.formers[former.ID()] == former {
		s.Log.Info("former member exited", "slot", former.Slot, "pid", former.Process.PID)
		delete(s.formers, former.ID())
		former.Handle.Close()
	}
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
	s.Log.Info("slot cleared", "slot", slot, "pid", seat.Process.PID, "reason", reason)
	s.pruneSocketOwners()
	s.checks.Moved()
	s.checks.Soon()
	if err := s.moves.Place(); err != nil {
		s.Log.Error("devices not moved", "error", err)
	}
	// A process whose slot was taken over may get the slot back.
	for id, former := range s.formers {
		if former.Slot == slot {
			delete(s.formers, id)
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
			live[socket.Cookie] = member.ID{PID: seat.Process.PID, StartTime: seat.Process.StartTime}
		}
	}
	s.socketOwners = live
}

// closeSlot closes a slot in the data path, first for all listeners at once, and then deletes its sockets.
func (s *service) closeSlot(slot int) error {
	place := bpf.PlaceOf(slot, 1)
	return fault.Join(s.Path.SetSlot(slot, bpf.Slot{}), s.ClosePlace(place), s.ClosePlace(place.Other()))
}
