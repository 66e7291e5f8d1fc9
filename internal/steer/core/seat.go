// SPDX-License-Identifier: Apache-2.0

package core

import (
	"fmt"
	"io/fs"
	"slices"

	"sockeye/internal/bpf"
	"sockeye/internal/member"
)

// Seat is a member in its slot.
type Seat struct {
	Slot          int
	Place         bpf.Place // of the sockets in the data path
	Process       *member.Process
	Handle        *member.Handle
	Source        string             // rule or command that made the process a member
	Claimed       bool               // true for run and register
	AllowedOwners []uint32           // permitted owners of the sockets
	Sockets       map[int]SocketInfo // by row
	Duplicate     error              // error about another socket with the same address, which gets no traffic; nil for none
	Ancestors     []int              // process ids of its ancestors at registration; reparenting can only remove some of them
}

// ID returns the process of the member.
func (s *Seat) ID() member.ID {
	return member.ID{PID: s.Process.PID, StartTime: s.Process.StartTime}
}

// SocketInfo is a registered socket.
type SocketInfo struct {
	Cookie uint64
	Local  string
	Number int // descriptor at the member, when it was opened last; 0 if it is not known
}

// OpenSocket returns a copy of the registered socket of a row. The caller closes the copy. Programs may move a socket to
// another descriptor: those in Go do for inherited sockets.
func (s *Seat) OpenSocket(row int) (*member.Socket, error) {
	info := s.Sockets[row]
	if socket, err := s.Handle.OpenSocket(info.Number); err == nil {
		if socket.Cookie == info.Cookie {
			return socket, nil
		}
		socket.Close()
	}
	all, err := s.Handle.Sockets(func(socket *member.Socket) bool { return socket.Cookie == info.Cookie })
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("open socket %s of process %d: %w", info.Local, s.Process.PID, fs.ErrNotExist)
	}
	member.CloseAll(all[1:])
	info.Number = all[0].Number
	s.Sockets[row] = info
	return all[0], nil
}

// IsRelated reports whether a process with the ancestors up is an ancestor or a descendant of the member. The recorded
// ancestors of the member are read again, because their ids may have been reused.
func (s *Seat) IsRelated(p *member.Process, up []int) bool {
	return slices.Contains(up, s.Process.PID) || slices.Contains(s.Ancestors, p.PID) && slices.Contains(Ancestors(s.Process), p.PID)
}

// Ancestors returns the process ids of the ancestors of a process up to, and without, process 1.
func Ancestors(p *member.Process) (list []int) {
	const generations = 32
	for pid := p.Parent; pid > 1 && len(list) < generations; {
		list = append(list, pid)
		parent, err := member.Parent(pid)
		if err != nil {
			break
		}
		pid = parent
	}
	return list
}
