// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"net/netip"

	"sockeye/internal/bpf"
	"sockeye/internal/member"
	"sockeye/internal/netns"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/placement"
	"sockeye/internal/steer/session"
)

// diag returns the sock_diag connection of the service's network namespace.
func (s *coreService) diag() (*sockdiag.Conn, error) {
	if s.conn != nil {
		return s.conn, nil
	}
	err := netns.Do(s.socketNetns(), func() (err error) {
		s.conn, err = sockdiag.Open()
		return err
	})
	return s.conn, err
}

// readSessions returns the established connections to the service and the unfinished handshakes.
func (s *coreService) readSessions() ([]session.Session, error) {
	conn, err := s.diag()
	if err != nil {
		return nil, err
	}
	return session.Read(conn, session.Source{Listeners: s.listeners, Lookup: s.usesLookup(), Owners: s.path.OwnersFD()})
}

// listeningSockets returns the inodes of the sockets that listen on the ports of the service.
func (s *coreService) listeningSockets() (map[uint32]bool, error) {
	conn, err := s.diag()
	if err != nil {
		return nil, err
	}
	return session.Listening(conn, s.listeners, s.usesLookup())
}

// seatIDs returns the members by process id.
func (s *coreService) seatIDs() map[int]member.ID {
	ids := make(map[int]member.ID)
	for _, seat := range s.seats {
		ids[seat.process.PID] = seat.id()
	}
	return ids
}

// serving is the decision of the data path about each address.
type serving struct {
	mapping *placement.Mapping
	members map[int]member.ID // members of the ready slots
	standby int               // or bpf.NoSlot
}

func (s *coreService) serving() *serving {
	v := &serving{mapping: s.mapping, members: make(map[int]member.ID), standby: bpf.NoSlot}
	for slot, seat := range s.seats {
		if s.isReady(slot) {
			v.members[slot] = seat.id()
		}
	}
	if s.config.WhenEmpty.Standby != nil {
		v.standby = *s.config.WhenEmpty.Standby
	}
	return v
}

// slot returns the slot that serves a home slot: the slot itself, or the standby slot. ok is false if neither is ready.
func (v *serving) slot(home int) (slot int, ok bool) {
	if _, ok := v.members[home]; ok {
		return home, true
	}
	_, ok = v.members[v.standby]
	return v.standby, ok
}

// server returns the member that serves an address.
func (v *serving) server(addr netip.Addr) (member.ID, bool) {
	home, _ := v.mapping.Slot(addr)
	slot, ok := v.slot(home)
	return v.members[slot], ok
}
