// SPDX-License-Identifier: Apache-2.0

package core

import (
	"net/netip"
	"slices"

	"sockeye/internal/bpf"
	"sockeye/internal/member"
	"sockeye/internal/netns"
	"sockeye/internal/placement"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/session"
)

// ReadSessions returns the established connections to the service and the unfinished handshakes.
func (s *Service) ReadSessions() ([]session.Session, error) {
	conn, err := s.Diag()
	if err != nil {
		return nil, err
	}
	return session.Read(conn, session.Source{Listeners: s.Listeners, Lookup: s.UsesLookup(), Owners: s.Path.OwnersFD()})
}

// BytesReceived returns the number of bytes that a connection has received, and false if the connection is not one of a user of a
// member or has ended. Other users' connections are not asked: their owners could make the caller wait, see sockdiag.Query.
func (s *Service) BytesReceived(one *session.Session) (n uint64, ok bool) {
	known := false
	for _, seat := range s.Seats {
		known = known || slices.Contains(seat.Process.UIDs[:], one.UID)
	}
	if !known {
		return 0, false
	}
	conn, err := s.Diag()
	if err != nil {
		return 0, false
	}
	found, err := conn.Find(one.Local, one.Remote, int(one.Device))
	if err != nil || found == nil || found.Cookie != one.Cookie || !found.HasInfo {
		return 0, false
	}
	return found.Info.Bytes_received, true
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
