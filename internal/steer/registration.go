// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/listener"
)

// errNotOpen is the error of a process that lacks a socket, typically because it has just started.
var errNotOpen = errors.New("not opened")

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
			seat.Slot, err = s.takeSlot(slot, seat.ID())
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
	return listener.MatchesAny(maps.Values(s.Listeners), socket)
}

const duplicateHint = "make the program open one socket (nginx: without reuseport), or start one member per socket"

// chooseSockets returns the socket for each row, or the reason why a listener has none.
func (s *service) chooseSockets(seat *core.Seat, sockets []*member.Socket) (map[int]*member.Socket, error) {
	self := seat.ID()
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

// noteDuplicate sets seat.Duplicate if the member has a second socket with the address of a registered one. Without a
// program, the kernel would distribute the traffic over both.
func (s *service) noteDuplicate(seat *core.Seat) {
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
		s.Log.Warn("socket without traffic", events.SocketIdle, "slot", seat.Slot, "pid", seat.Process.PID, "problem", seat.Duplicate)
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

// verifySockets checks the origin and the ports of the registered sockets of a seat, and records the member as the owner
// of the connections. Earlier versions of the agent did neither at registration, and a policy may change the ports.
func (s *service) verifySockets(seat *core.Seat) error {
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
		if err := s.rooms.AttachTemplateFilter(seat, socket); err != nil {
			return err
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
