// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"slices"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/steer/rooms"
)

// Retire kills the keepers of the services that are pinned under a directory, and detaches their programs and the filters that copy templates.
func Retire(pins string) error { return fault.Join(rooms.DetachFilters(pins), keeper.Retire(pins, "")) }

// Retire is the function Retire for the services of this agent.
func (d *Domain) Retire() error { return Retire(d.host.Root.Dir) }

// Outlives reports whether a keeper has run since before start.
func (d *Domain) Outlives(start uint64) (bool, error) {
	keepers, err := keeper.Find(d.host.Root.Dir, "", nil, keeper.PinnedRows(d.host.Root.Dir))
	for _, k := range keepers {
		k.Close()
	}
	return slices.ContainsFunc(keepers, func(k *keeper.Process) bool { return k.Self.StartTime < start }), err
}

// retire detaches the programs of the service, clears its slots, and removes its pins. Afterwards the kernel's hash selects the
// socket. retire returns the target that was in force, also with an error.
func (s *service) retire() (before *target, err error) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	before = s.currentTarget()
	s.moves.CloseGateSockets() // without a program, the kernel would give them connections
	s.emptying = true
	errs := []error{s.detachPrograms()}
	for slot := range s.Seats {
		s.VacateSlot(slot, "service removed")
	}
	errs = append(errs, bpf.Remove(s.Host.Root.Service(s.Name)))
	s.closeLocked()
	return before, fault.Join(errs...)
}

// detachPrograms detaches the program of each group. The keeper sockets are closed first: without a program, the kernel
// would give them a share of the members' traffic.
func (s *service) detachPrograms() error {
	groups := s.groupSockets()
	errs := []error{s.killKeeper()}
	for _, fd := range groups {
		errs = append(errs, bpf.Detach(fd))
		unix.Close(fd)
	}
	return fault.Join(errs...)
}

// groupSockets returns a descriptor of one socket of each SO_REUSEPORT group with a program: a keeper socket or a
// member's socket. The caller closes the descriptors.
func (s *service) groupSockets() (fds []int) {
	if s.UsesLookup() {
		return nil
	}
	done := make(map[int]bool)
	add := func(row, fd int) {
		if copied, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0); err == nil {
			fds, done[row] = append(fds, copied), true
		}
	}
	for row, fd := range s.KeeperSockets {
		add(row, fd)
	}
	for _, seat := range s.Seats {
		if len(done) == len(s.Listeners) {
			break
		}
		sockets, err := seat.Handle.Sockets(s.matchesListener)
		if err != nil {
			continue
		}
		for _, socket := range sockets {
			for row, info := range seat.Sockets {
				if info.Cookie == socket.Cookie && !done[row] {
					add(row, socket.FD())
				}
			}
		}
		member.CloseAll(sockets)
	}
	return fds
}
