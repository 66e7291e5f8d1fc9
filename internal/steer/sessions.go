// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/member"
	"sockeye/internal/netns"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/listener"
	"sockeye/internal/steer/placement"
)

// session is a TCP connection of a device to the service, or the handshake of one.
type session struct {
	sockdiag.Socket
	address netip.Addr // remote address without a zone
	owner   bpf.Owner  // process that has the connection
	owned   bool       // owner is known
}

// ownerID returns the process that has the connection.
func (s *session) ownerID() member.ID {
	return member.ID{PID: s.owner.PID, StartTime: s.owner.StartTime}
}

// deviceSessions are the sessions of a device: of all addresses with one name in the device map, or of one address.
type deviceSessions struct {
	name     string
	address  netip.Addr // remote address of one session
	location placement.Location
	sessions []session
}

func (d *deviceSessions) String() string {
	if d.name != "" {
		return d.name
	}
	return d.address.String()
}

// deviceKey identifies a device: by its name in the device map, or else by its address. No name of a device map contains
// a comma.
func deviceKey(name string, address netip.Addr) string {
	if name != "" {
		return name
	}
	return "," + address.String()
}

// diag returns the sock_diag connection of the service's network namespace.
func (s *service) diag() (*sockdiag.Conn, error) {
	if s.checks.conn != nil {
		return s.checks.conn, nil
	}
	err := netns.Do(s.socketNetns(), func() (err error) {
		s.checks.conn, err = sockdiag.Open()
		return err
	})
	return s.checks.conn, err
}

// readSessions returns the established connections to the service and the unfinished handshakes. One dump of 5,000
// connections takes about 10 ms.
func (s *service) readSessions() ([]session, error) {
	conn, err := s.diag()
	if err != nil {
		return nil, err
	}
	states := sockdiag.States(0).With(sockdiag.Established).With(sockdiag.SynRecv).With(sockdiag.Listening)
	var list []session
	for _, row := range slices.Sorted(maps.Keys(s.listeners)) {
		l := s.listeners[row]
		if l.Protocol != config.TCP {
			continue
		}
		before := len(list)
		others := make(map[netip.Addr]bool) // local addresses that other listening sockets serve
		begin := func() {
			list = list[:before]
			clear(others)
		}
		err := conn.Dump(sockdiag.Query{States: states, LocalPort: l.Address.Port(), Storage: s.path.OwnersFD()}, begin, func(socket *sockdiag.Socket) {
			switch {
			case !listener.Accepts(l, socket):
				return
			case socket.State == sockdiag.Listening:
				// A socket with a more specific address receives its connections, whatever the group's program
				// selects (compute_score). sk_lookup comes before all sockets.
				if local := socket.Local.Addr(); !s.usesLookup() && local != l.Address.Addr() && !local.IsUnspecified() {
					others[local] = true
				}
				return
			}
			one := session{Socket: *socket, address: socket.Remote.Addr().WithZone("")}
			one.owner, one.owned = bpf.ParseOwner(socket.Storage)
			one.Storage = nil
			list = append(list, one)
		})
		if err != nil {
			return nil, err
		}
		list = append(list[:before], slices.DeleteFunc(list[before:], func(one session) bool { return others[one.Local.Addr()] })...)
	}
	return list, nil
}

// groupByDevice returns the established sessions by device.
func groupByDevice(m *placement.Mapping, list []session) map[string]*deviceSessions {
	devices := make(map[string]*deviceSessions)
	for i := range list {
		if list[i].State != sockdiag.Established {
			continue
		}
		at := m.Locate(list[i].address)
		key := deviceKey(at.Device, list[i].address)
		d := devices[key]
		if d == nil {
			d = &deviceSessions{name: at.Device, address: list[i].address, location: at}
			devices[key] = d
		}
		d.sessions = append(d.sessions, list[i])
	}
	return devices
}

// labelListener records a member as the owner of the connections that a listening socket accepts from now on.
func (s *service) labelListener(p *member.Process, fd int) error {
	return s.path.SetOwner(fd, bpf.Owner{PID: p.PID, StartTime: p.StartTime, Steered: true})
}

// unlabeled are connections whose owner is not known: they were accepted before the member was registered. Their owner
// is found by a scan of /proc.
type unlabeled struct {
	sessions []session
	waiting  bool // some are not accepted yet
}

// findUnlabeled returns the established connections without an owner, except those of processes that have nothing to do
// with the service. A dead owner is no owner: the kernel has given a connection that waited in the backlog of a closed
// listener to another one.
func (s *service) findUnlabeled(list []session) (u unlabeled) {
	alive, missed := make(map[member.ID]bool), make(map[uint64]int)
	for _, one := range list {
		if n, scanned := s.checks.missed[one.Cookie]; scanned {
			missed[one.Cookie] = n
		}
		if one.State != sockdiag.Established || missed[one.Cookie] >= maxScans {
			continue
		}
		if one.owned {
			id := one.ownerID()
			lives, known := alive[id]
			if !known {
				lives = member.Alive(id.PID, id.StartTime)
				alive[id] = lives
			}
			if lives {
				continue
			}
		}
		if one.Inode == 0 {
			u.waiting = true
			continue
		}
		u.sessions = append(u.sessions, one)
	}
	s.checks.missed = missed // without the connections that are closed
	return u
}

// labelMembers finds the owners of unlabeled connections among the members, and reports whether it has recorded one. Each
// connection is looked for once, so that a check finds quickly whether a device is split: when a member exits, the kernel
// gives the connections that the member had not accepted to another member (Linux 5.14), and their label remains that of the
// former one. label finds the others.
func (s *service) labelMembers(list []session) (found bool) {
	wanted := make(map[uint32]*session)
	for i := range list {
		if one := &list[i]; !s.checks.sought[one.Cookie] {
			wanted[one.Inode] = one
		}
	}
	s.checks.sought = make(map[uint64]bool)
	for _, one := range list {
		s.checks.sought[one.Cookie] = true
	}
	if len(wanted) == 0 {
		return false
	}
	ids := s.seatIDs()
	owners := sockdiag.ReadSocketsOf(slices.Collect(maps.Keys(ids)), func(inode uint32) bool { return wanted[inode] != nil })
	handles := make(map[int]*member.Handle)
	defer func() {
		for _, h := range handles {
			h.Close()
		}
	}()
	defer s.host.descriptors.borrow()()
	for inode, one := range wanted {
		for _, p := range owners[inode] {
			if s.labelConnection(handles, p, one, ids[p.PID]) == nil {
				found = true
				break
			}
		}
	}
	return found
}

// label finds the owners of unlabeled connections by a scan of /proc and records them. The owner is the member among the
// process and its ancestors, or else the process itself if it or an ancestor listens on a port of the service. The scan
// takes about 1 s on a host with many processes; the caller does not hold the lock.
func (s *service) label(list []session, seats map[int]member.ID) {
	wanted := make(map[uint32]*session)
	for i := range list {
		wanted[list[i].Inode] = &list[i]
	}
	s.mu.Lock()
	listening, err := s.listeningInodes()
	s.mu.Unlock()
	var owners map[uint32][]sockdiag.Process
	if err == nil {
		owners, _, err = sockdiag.ReadProcesses(func(inode uint32) bool { return wanted[inode] != nil || listening[inode] })
	}
	if err != nil {
		s.log.Warn("connections not checked", "error", err)
		return
	}
	listeners := make(map[int]bool)
	for inode := range listening {
		for _, p := range owners[inode] {
			listeners[p.PID] = true
		}
	}
	family := processTree{seats: seats, listeners: listeners, parents: make(map[int]int)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.events == nil {
		return
	}
	handles := make(map[int]*member.Handle)
	defer func() {
		for _, h := range handles {
			h.Close()
		}
	}()
	defer s.host.descriptors.borrow()()
	for inode, one := range wanted {
		found := false
		for _, p := range owners[inode] {
			id, ok := family.owner(p.PID)
			if !ok {
				continue
			}
			found = true
			if err := s.labelConnection(handles, p, one, id); err == nil {
				break
			}
		}
		switch {
		case found:
		case len(owners[inode]) > 0:
			s.checks.missed[one.Cookie] = maxScans
		default:
			s.checks.missed[one.Cookie]++
		}
	}
}

// listeningInodes returns the inodes of the sockets that listen on the ports of the service.
func (s *service) listeningInodes() (map[uint32]bool, error) {
	conn, err := s.diag()
	if err != nil {
		return nil, err
	}
	inodes := make(map[uint32]bool)
	for _, l := range s.listeners {
		if l.Protocol != config.TCP {
			continue
		}
		query := sockdiag.Query{States: sockdiag.States(0).With(sockdiag.Listening), LocalPort: l.Address.Port()}
		if err := conn.Dump(query, func() {}, func(socket *sockdiag.Socket) {
			if listener.Accepts(l, socket) && (s.usesLookup() || socket.Local.Addr() == l.Address.Addr()) {
				inodes[socket.Inode] = true
			}
		}); err != nil {
			return nil, err
		}
	}
	return inodes, nil
}

// labelConnection records the owner of a connection of a process. handles are the open handles by process id.
func (s *service) labelConnection(handles map[int]*member.Handle, p sockdiag.Process, one *session, owner member.ID) error {
	handle := handles[p.PID]
	if handle == nil {
		var err error
		if handle, err = member.Open(p.PID); err != nil {
			return err
		}
		handles[p.PID] = handle
	}
	socket, err := handle.OpenSocket(p.FD)
	if err != nil {
		return err
	}
	defer socket.Close()
	if socket.Cookie != one.Cookie {
		return fmt.Errorf("descriptor %d of process %d refers to another socket", p.FD, p.PID)
	}
	// A connection that the kernel gave to another listening socket was steered, too.
	return s.path.SetOwner(socket.FD(), bpf.Owner{PID: owner.PID, StartTime: owner.StartTime, Steered: one.owned && one.owner.Steered})
}

// processTree finds the member that is an ancestor of a process.
type processTree struct {
	seats     map[int]member.ID // members by process id
	listeners map[int]bool
	parents   map[int]int
}

// owner returns the nearest member among a process and its ancestors, or else the process itself if the process or one
// of its ancestors listens on a port of the service. ok is false if neither is the case.
func (f *processTree) owner(pid int) (id member.ID, ok bool) {
	const generations = 32
	self := pid
	for range generations {
		if id, seated := f.seats[pid]; seated {
			return id, true
		}
		ok = ok || f.listeners[pid]
		parent, read := f.parents[pid]
		if !read {
			if p, err := member.Read(pid); err == nil {
				parent = p.Parent
			}
			f.parents[pid] = parent
		}
		if parent <= 1 {
			break
		}
		pid = parent
	}
	if !ok {
		return id, false
	}
	p, err := member.Read(self)
	if err != nil {
		return id, false
	}
	return member.ID{PID: p.PID, StartTime: p.StartTime}, true
}

// seatIDs returns the members by process id.
func (s *service) seatIDs() map[int]member.ID {
	ids := make(map[int]member.ID)
	for _, seat := range s.seats {
		ids[seat.process.PID] = seat.id()
	}
	return ids
}
