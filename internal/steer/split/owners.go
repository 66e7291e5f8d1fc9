// SPDX-License-Identifier: Apache-2.0

package split

import (
	"fmt"
	"maps"
	"slices"

	"sockeye/internal/bpf"
	"sockeye/internal/member"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/session"
)

// unlabeled are connections whose owner is not known: they were accepted before the member was registered. Their owner
// is found by a scan of /proc.
type unlabeled struct {
	sessions []session.Session
	waiting  bool // some are not accepted yet
}

// findUnlabeled returns the established connections without an owner, except those of processes that have nothing to do
// with the service. A dead owner is not an owner: the kernel has given a connection that waited in the backlog of a closed
// listener to another one.
func (c *Checks) findUnlabeled(list []session.Session) (u unlabeled) {
	alive, missed := make(map[member.ID]bool), make(map[uint64]int)
	for _, one := range list {
		if n, scanned := c.missed[one.Cookie]; scanned {
			missed[one.Cookie] = n
		}
		if one.State != sockdiag.Established || missed[one.Cookie] >= maxScans {
			continue
		}
		if one.Owned {
			id := one.OwnerID()
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
	c.missed = missed // without the connections that are closed
	return u
}

// labelMembers finds the owners of unlabeled connections among the members, and reports whether it has recorded one. Each
// connection is looked for once, so that a check finds quickly whether a device is split: when a member exits, the kernel
// gives the connections that the member had not accepted to another member (Linux 5.14), and their label remains that of the
// former one. label finds the others.
func (c *Checks) labelMembers(list []session.Session) (found bool) {
	wanted := make(map[uint32]*session.Session)
	for i := range list {
		if one := &list[i]; !c.sought[one.Cookie] {
			wanted[one.Inode] = one
		}
	}
	c.sought = make(map[uint64]bool)
	for _, one := range list {
		c.sought[one.Cookie] = true
	}
	if len(wanted) == 0 {
		return false
	}
	ids := c.SeatIDs()
	owners := sockdiag.ReadSocketsOf(slices.Collect(maps.Keys(ids)), func(inode uint32) bool { return wanted[inode] != nil })
	open := make(handles)
	defer open.close()
	defer c.Host.Descriptors.Borrow()()
	for inode, one := range wanted {
		for _, p := range owners[inode] {
			if c.labelConnection(open, p, one, ids[p.PID]) == nil {
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
func (c *Checks) label(list []session.Session, seats map[int]member.ID) {
	wanted := make(map[uint32]*session.Session)
	for i := range list {
		wanted[list[i].Inode] = &list[i]
	}
	c.Mu.Lock()
	if c.Events == nil {
		c.Mu.Unlock()
		return
	}
	listening, err := c.ListeningSockets()
	c.Mu.Unlock()
	var owners map[uint32][]sockdiag.Process
	if err == nil {
		owners, _, err = sockdiag.ReadProcesses(func(inode uint32) bool { return wanted[inode] != nil || listening[inode] })
	}
	if err != nil {
		c.Log.Warn("connections not checked", "error", err)
		return
	}
	listeners := make(map[int]bool)
	for inode := range listening {
		for _, p := range owners[inode] {
			listeners[p.PID] = true
		}
	}
	tree := session.ProcessTree{Seats: seats, Listeners: listeners, Parents: make(map[int]int)}
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if c.Events == nil {
		return
	}
	open := make(handles)
	defer open.close()
	defer c.Host.Descriptors.Borrow()()
	for inode, one := range wanted {
		found := false
		for _, p := range owners[inode] {
			id, ok := tree.Owner(p.PID)
			if !ok {
				continue
			}
			found = true
			if err := c.labelConnection(open, p, one, id); err == nil {
				break
			}
		}
		switch {
		case found:
		case len(owners[inode]) > 0:
			c.missed[one.Cookie] = maxScans
		default:
			c.missed[one.Cookie]++
		}
	}
}

// handles are open handles by process id.
type handles map[int]*member.Handle

func (h handles) close() {
	for _, handle := range h {
		handle.Close()
	}
}

// labelConnection records the owner of a connection of a process.
func (c *Checks) labelConnection(open handles, p sockdiag.Process, one *session.Session, owner member.ID) error {
	handle := open[p.PID]
	if handle == nil {
		var err error
		if handle, err = member.Open(p.PID); err != nil {
			return err
		}
		open[p.PID] = handle
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
	return c.Path.SetOwner(socket.FD(), bpf.Owner{PID: owner.PID, StartTime: owner.StartTime, Steered: one.Owned && one.Owner.Steered})
}
