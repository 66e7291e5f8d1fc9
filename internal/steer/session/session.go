// SPDX-License-Identifier: Apache-2.0

// Package session reads the TCP connections of a service, and finds the devices and the processes that have them.
package session

import (
	"maps"
	"net/netip"
	"slices"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/member"
	"sockeye/internal/placement"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/listener"
)

// Session is a TCP connection of a device to the service, or the handshake of one.
type Session struct {
	sockdiag.Socket
	Address netip.Addr // remote address without a zone
	Owner   bpf.Owner  // process that has the connection
	Owned   bool       // owner is known
}

// OwnerID returns the process that has the connection.
func (s *Session) OwnerID() member.ID {
	return member.ID{PID: s.Owner.PID, StartTime: s.Owner.StartTime}
}

// Device is a device with its sessions: those of all addresses with one name in the device map, or of one address.
type Device struct {
	Name     string
	Address  netip.Addr // remote address of one session
	Location placement.Location
	Sessions []Session
}

// String returns the name in the device map, or else the address.
func (d *Device) String() string {
	if d.Name != "" {
		return d.Name
	}
	return d.Address.String()
}

// Owners returns the number of processes that have the sessions of a device, without those of unknown.
func (d *Device) Owners(unknown map[uint64]bool) int {
	owners := make(map[member.ID]bool)
	for _, one := range d.Sessions {
		if one.Owned && !unknown[one.Cookie] {
			owners[one.OwnerID()] = true
		}
	}
	return len(owners)
}

// Source describes the connections of a service.
type Source struct {
	Listeners map[int]config.Listener // by row
	Lookup    bool                    // steering by sk_lookup
	Owners    int                     // descriptor of the map with the owners of connections
}

// Read returns the established connections to a service and the unfinished handshakes, without TCP_INFO: any local user can have
// a connection with the local port of a service, and hold its lock. One dump of 5,000 connections takes about 10 ms.
func Read(conn *sockdiag.Conn, of Source) ([]Session, error) {
	states := sockdiag.States(0).With(sockdiag.Established).With(sockdiag.SynRecv).With(sockdiag.Listening)
	var list []Session
	for _, row := range slices.Sorted(maps.Keys(of.Listeners)) {
		l := of.Listeners[row]
		if l.Protocol != config.TCP {
			continue
		}
		before := len(list)
		others := make(map[netip.Addr]bool) // local addresses that other listening sockets serve
		begin := func() {
			list = list[:before]
			clear(others)
		}
		err := conn.Dump(sockdiag.Query{States: states, LocalPort: l.Address.Port(), Storage: of.Owners, WithoutInfo: true}, begin, func(socket *sockdiag.Socket) {
			switch {
			case !listener.Accepts(l, socket):
				return
			case socket.State == sockdiag.Listening:
				// A socket with a more specific address receives its connections, whatever the group's program
				// selects (compute_score). sk_lookup comes before all sockets.
				if local := socket.Local.Addr(); !of.Lookup && local != l.Address.Addr() && !local.IsUnspecified() {
					others[local] = true
				}
				return
			}
			one := Session{Socket: *socket, Address: socket.Remote.Addr().WithZone("")}
			one.Owner, one.Owned = bpf.ParseOwner(socket.Storage)
			one.Storage = nil
			list = append(list, one)
		})
		if err != nil {
			return nil, err
		}
		list = append(list[:before], slices.DeleteFunc(list[before:], func(one Session) bool { return others[one.Local.Addr()] })...)
	}
	return list, nil
}

// ByDevice returns the established sessions by device.
func ByDevice(m *placement.Mapping, list []Session) map[string]*Device {
	devices := make(map[string]*Device)
	for i := range list {
		if list[i].State != sockdiag.Established {
			continue
		}
		at := m.Locate(list[i].Address)
		key := Key(at.Device, list[i].Address)
		d := devices[key]
		if d == nil {
			d = &Device{Name: at.Device, Address: list[i].Address, Location: at}
			devices[key] = d
		}
		d.Sessions = append(d.Sessions, list[i])
	}
	return devices
}

// Key identifies a device: by its name in the device map, or else by its address. No name of a device map contains
// a comma.
func Key(name string, address netip.Addr) string {
	if name != "" {
		return name
	}
	return "," + address.String()
}

// Listening returns the inodes of the sockets that listen on the ports of the service.
func Listening(conn *sockdiag.Conn, listeners map[int]config.Listener, lookup bool) (map[uint32]bool, error) {
	inodes := make(map[uint32]bool)
	for _, l := range listeners {
		if l.Protocol != config.TCP {
			continue
		}
		query := sockdiag.Query{States: sockdiag.States(0).With(sockdiag.Listening), LocalPort: l.Address.Port()}
		if err := conn.Dump(query, func() {}, func(socket *sockdiag.Socket) {
			if listener.Accepts(l, socket) && (lookup || socket.Local.Addr() == l.Address.Addr()) {
				inodes[socket.Inode] = true
			}
		}); err != nil {
			return nil, err
		}
	}
	return inodes, nil
}

// ProcessTree finds the member that is an ancestor of a process.
type ProcessTree struct {
	Seats     map[int]member.ID // members by process id
	Listeners map[int]bool
	Parents   map[int]int
}

// Owner returns the nearest member among a process and its ancestors, or else the process itself if the process or one
// of its ancestors listens on a port of the service. ok is false if neither is the case.
func (t *ProcessTree) Owner(pid int) (id member.ID, ok bool) {
	const generations = 32
	self := pid
	for range generations {
		if id, seated := t.Seats[pid]; seated {
			return id, true
		}
		ok = ok || t.Listeners[pid]
		parent, read := t.Parents[pid]
		if !read {
			if p, err := member.Read(pid); err == nil {
				parent = p.Parent
			}
			t.Parents[pid] = parent
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
