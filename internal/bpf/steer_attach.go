// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf/watched"
)

func attach(p *ebpf.Program, fd int) error {
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_EBPF, p.FD())
}

// Detach detaches the program from the SO_REUSEPORT group of a socket. The kernel's hash selects afterwards. A socket without
// a group has no program.
func Detach(fd int) error {
	err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_REUSEPORT_BPF, 0)
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("detach program from socket: %w", err)
	}
	return nil
}

// AttachWatched attaches a copy of the program of a row to the SO_REUSEPORT group of a socket, so that IsAttached reports
// whether another process has replaced or detached the program since (see package watched). RunStats does not count the runs of a
// copy: while kernel.bpf_stats_enabled is 1, AttachWatched is the same as Attach. It returns EINVAL if the socket is not in a group.
//
// unwatched is the reason for which IsAttached does not notice the end of the program, which is attached in any case.
func (s *Steer) AttachWatched(row, fd int) (unwatched, err error) {
	if watched.CountsRuns() {
		s.watched.Forget(row)
		return nil, s.Attach(row, fd)
	}
	unwatchable := func(reason error) (unwatched, err error) {
		s.watched.Forget(row)
		return reason, s.Attach(row, fd)
	}
	p, err := s.loadCopy(row)
	if err != nil {
		return unwatchable(err)
	}
	defer p.Close()
	attached, abandon, err := s.watched.Prepare(p)
	if err != nil {
		return unwatchable(err)
	}
	if err := attach(p, fd); err != nil {
		abandon()
		return nil, fmt.Errorf("attach %s to socket: %w", programPin(s.lookup, row), err)
	}
	attached(row)
	return nil, nil
}

// Attach attaches the program of a row to the SO_REUSEPORT group of a socket. It returns EINVAL if the socket is not
// in a group.
func (s *Steer) Attach(row, fd int) error {
	p := s.programs[row]
	if p == nil {
		return fmt.Errorf("attach to listener %d: no such listener", row)
	}
	if err := attach(p, fd); err != nil {
		return fmt.Errorf("attach %s to socket: %w", programPin(s.lookup, row), err)
	}
	return nil
}

// IsWatched reports whether IsAttached notices the end of the program of a row.
func (s *Steer) IsWatched(row int) bool { return s.watched.Has(row) }

// IsAttached reports whether the group has the program that AttachWatched has attached last. It reports true for a program that
// is not watched.
func (s *Steer) IsAttached(row int) (bool, error) { return s.watched.IsAttached(row) }

// IsInGroup reports whether a socket is in a SO_REUSEPORT group.
func (s *Steer) IsInGroup(fd int) (bool, error) { return s.watched.IsInGroup(fd) }
