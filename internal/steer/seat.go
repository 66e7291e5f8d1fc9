// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"io/fs"
	"slices"

	"sockeye/internal/bpf"
	"sockeye/internal/member"
)

// seat is a member in its slot.
type seat struct {
	slot          int
	place         bpf.Place // of the sockets in the data path
	process       *member.Process
	handle        *member.Handle
	source        string             // rule or command that made the process a member
	claimed       bool               // true for run and register
	allowedOwners []uint32           // permitted owners of the sockets
	sockets       map[int]socketInfo // by row
	duplicate     error              // error about another socket with the same address, which gets no traffic; nil for none
	ancestors     []int              // process ids of its ancestors at registration; reparenting can only remove some of them
}

func (s *seat) id() member.ID {
	return member.ID{PID: s.process.PID, StartTime: s.process.StartTime}
}

type socketInfo struct {
	cookie uint64
	local  string
	number int // descriptor at the member, when it was opened last; 0 if it is not known
}

// openSocket returns a copy of the registered socket of a row. The caller closes the copy. Programs may move a socket to
// another descriptor: those in Go do for inherited sockets.
func (s *seat) openSocket(row int) (*member.Socket, error) {
	info := s.sockets[row]
	if socket, err := s.handle.OpenSocket(info.number); err == nil {
		if socket.Cookie == info.cookie {
			return socket, nil
		}
		socket.Close()
	}
	all, err := s.handle.Sockets(func(socket *member.Socket) bool { return socket.Cookie == info.cookie })
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("open socket %s of process %d: %w", info.local, s.process.PID, fs.ErrNotExist)
	}
	member.CloseAll(all[1:])
	info.number = all[0].Number
	s.sockets[row] = info
	return all[0], nil
}

// isRelated reports whether a process with the ancestors up is an ancestor or a descendant of the member. The recorded
// ancestors of the member are read again, because their ids may have been reused.
func (s *seat) isRelated(p *member.Process, up []int) bool {
	return slices.Contains(up, s.process.PID) || slices.Contains(s.ancestors, p.PID) && slices.Contains(ancestors(s.process), p.PID)
}

// ancestors returns the process ids of the ancestors of a process up to, and without, process 1.
func ancestors(p *member.Process) (list []int) {
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
