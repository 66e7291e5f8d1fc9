// SPDX-License-Identifier: Apache-2.0

package core

import (
	"net/netip"
	"slices"
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/member"
	"sockeye/internal/netns"
	"sockeye/internal/placement"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/session"
)

// ReadSessions returns the established connections to the service and the unfinished handshakes. Connections that processes of other
// users have accepted are left out: their owners can hold the lock of the socket, and each request of the agent for such a connection would
// then block.
func (s *Service) ReadSessions() ([]session.Session, error) {
	conn, err := s.Diag()
	if err != nil {
		return nil, err
	}
	list, err := session.Read(conn, session.Source{Listeners: s.Listeners, Lookup: s.UsesLookup(), Owners: s.Path.OwnersFD()})
	if err != nil {
		return nil, err
	}
	members, users := s.Processes()
	s.Strangers = Strangers{Read: time.Now()}
	return slices.DeleteFunc(list, func(one session.Session) bool {
		if one.Inode == 0 || users[one.UID] || one.Owned && members[one.OwnerID()] {
			return false
		}
		if s.Strangers.Count++; s.Strangers.Count == 1 {
			s.Strangers.First = one
		}
		return true
	}), nil
}

// Strangers are the connections to the service that processes of other users have, as of the last ReadSessions.
type Strangers struct {
	Read  time.Time
	Count int
	First session.Session // if Count > 0
}

// Processes returns the members and the former members, and the users whose processes may be members; root is one of them.
func (s *Service) Processes() (members map[member.ID]bool, users map[uint32]bool) {
	members, users = make(map[member.ID]bool), map[uint32]bool{0: true}
	for _, uid := range s.Users {
		users[uid] = true
	}
	if s.State.ClaimedUID != nil {
		users[*s.State.ClaimedUID] = true
	}
	note := func(seat *Seat) {
		members[seat.ID()] = true
		for _, uid := range seat.Process.UIDs {
			users[uid] = true
		}
	}
	for _, seat := range s.Seats {
		note(seat)
	}
	for _, former := range s.Formers {
		note(former)
	}
	return members, users
}

// Ask returns what the kernel knows of a connection of ReadSessions now, with TCP_INFO. It returns nil for a connection that was not accepted
// when it was read, unless it is a member's, and for one that has ended; ended is set for the latter.
func (s *Service) Ask(one *session.Session) (socket *sockdiag.Socket, ended bool) {
	if one.Inode == 0 && !one.Owned {
		return nil, false
	}
	conn, err := s.Diag()
	if err != nil {
		return nil, false
	}
	socket, err = conn.Get(&one.Socket)
	if err != nil || socket == nil || !socket.HasInfo {
		return nil, true
	}
	return socket, false
}

// ListeningSockets returns the inodes of the sockets that listen on the ports of the service.
func (s *Service) ListeningSockets() (map[uint32]bool, error) {
	conn, err := s.Diag()
	if err != nil {
		return nil, err
	}
	return session.Listening(conn, s.Listeners, s.UsesLookup())
}

// Diag returns the sock_diag connection of the service's network namespace.
func (s *Service) Diag() (*sockdiag.Conn, error) {
	if s.Conn != nil {
		return s.Conn, nil
	}
	err := netns.Do(s.SocketNetns(), func() (err error) {
		s.Conn, err = sockdiag.Open()
		return err
	})
	return s.Conn, err
}

// SeatIDs returns the members by process id.
func (s *Service) SeatIDs() map[int]member.ID {
	ids := make(map[int]member.ID)
	for _, seat := range s.Seats {
		ids[seat.Process.PID] = seat.ID()
	}
	return ids
}

// Serving is the decision of the data path about each address.
type Serving struct {
	Mapping *placement.Mapping
	Members map[int]member.ID // members of the ready slots
	standby int               // or bpf.NoSlot
}

// Serving returns the present decision of the data path. The kernel closes the slot of a member that exits before the agent
// notices the exit.
func (s *Service) Serving() *Serving {
	v := &Serving{Mapping: s.Mapping, Members: make(map[int]member.ID), standby: bpf.NoSlot}
	for slot, seat := range s.Seats {
		if s.IsReady(slot) && !s.closedByKernel(slot) {
			v.Members[slot] = seat.ID()
		}
	}
	if s.Config.WhenEmpty.Standby != nil {
		v.standby = *s.Config.WhenEmpty.Standby
	}
	return v
}

// closedByKernel reports whether the release hook has closed a slot.
func (s *Service) closedByKernel(slot int) bool {
	if s.Path == nil {
		return false
	}
	value, err := s.Path.Slot(slot)
	return err == nil && value.Ready == 0
}

// Server returns the member that serves an address.
func (v *Serving) Server(addr netip.Addr) (member.ID, bool) {
	home, _ := v.Mapping.Slot(addr)
	slot, ok := v.Slot(home)
	return v.Members[slot], ok
}

// Slot returns the slot that serves a home slot: the slot itself, or the standby slot. ok is false if neither is ready.
func (v *Serving) Slot(home int) (slot int, ok bool) {
	if _, ok := v.Members[home]; ok {
		return home, true
	}
	_, ok = v.Members[v.standby]
	return v.standby, ok
}

// LabelListener records a member as the owner of the connections that a listening socket accepts from now on.
func (s *Service) LabelListener(p *member.Process, fd int) error {
	return s.Path.SetOwner(fd, bpf.Owner{PID: p.PID, StartTime: p.StartTime, Steered: true})
}
