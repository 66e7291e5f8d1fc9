// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/sockaddr"
	"sockeye/internal/sockdiag"
	"sockeye/internal/testenv"
)

// replacements are the ways in which a process with a socket in a group ends the program of the group.
var replacements = map[string]func(fd int) error{
	"detached": func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_REUSEPORT_BPF, 0)
	},
	"replaced": func(fd int) error {
		first := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
		return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF, &unix.SockFprog{Len: 1, Filter: &first})
	},
}

// TestAttachWatched ends the programs of two groups, one after the other. Each is noticed for its own group, and the next
// program steers.
func TestAttachWatched(t *testing.T) {
	for name, end := range replacements {
		t.Run(name, func(t *testing.T) {
			s := serve(t, config(t, false, pair...), 1, bpf.NoSlot, nil)
			s.seat(0)
			attach := func(row int) {
				unwatched, err := s.AttachWatched(row, s.keepers[row].fd)
				check(t, errors.Join(unwatched, err))
			}
			steers := func(round int) {
				clients(func(row, protocol int, _ bool) {
					if err := refused(t, protocol, s.sourceIn(0, false), target(s.config.Listeners[row], false)); err != nil {
						t.Errorf("round %d, row %d: %v", round, row, err)
					}
					s.collect(row, 1)
				})
			}
			attached := func(row int) bool {
				ok, err := s.IsAttached(row)
				check(t, err)
				return ok
			}
			for row := range s.rows() {
				attach(row)
				if !s.IsWatched(row) {
					t.Fatalf("row %d is not watched", row)
				}
			}
			for round := range 3 {
				for row := range s.rows() {
					if !attached(row) {
						t.Fatalf("round %d: row %d is not attached", round, row)
					}
					foreign := newSocket(t, s.config.Listeners[row], true)
					check(t, end(foreign.fd))
					foreign.close()
					until(t, "the end of the program is noticed", func() bool { return !attached(row) })
					if attached(row) {
						t.Error("the end of the program is noticed once only")
					}
					attach(row)
				}
				// The kernel frees the programs that were replaced later.
				time.Sleep(50 * time.Millisecond)
				steers(round)
			}
		})
	}
}

// TestAttachUnwatched has no descriptor left for the watch: the program is attached and steers. With descriptors, it is watched again.
func TestAttachUnwatched(t *testing.T) {
	s := serve(t, config(t, false, pair...), 1, bpf.NoSlot, nil)
	s.seat(0)
	first := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0xffffffff}
	for row := range s.rows() {
		fd := s.keepers[row].fd
		// The agent must replace this one.
		check(t, unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF, &unix.SockFprog{Len: 1, Filter: &first}))
		restore := withoutDescriptors(t)
		unwatched, err := s.AttachWatched(row, fd)
		restore()
		check(t, err)
		if unwatched == nil || s.IsWatched(row) {
			t.Errorf("row %d: watched %v: %v", row, s.IsWatched(row), unwatched)
		}
	}
	clients(func(row, protocol int, _ bool) {
		check(t, refused(t, protocol, s.sourceIn(0, false), target(s.config.Listeners[row], false)))
		s.collect(row, 1)
	})
	for row := range s.rows() {
		unwatched, err := s.AttachWatched(row, s.keepers[row].fd)
		check(t, errors.Join(unwatched, err))
		if !s.IsWatched(row) {
			t.Errorf("row %d is not watched", row)
		}
	}
}

// withoutDescriptors lets this process open no descriptor until restore is called.
func withoutDescriptors(t *testing.T) (restore func()) {
	t.Helper()
	var before unix.Rlimit
	check(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	next, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 0) // the lowest one that is free
	check(t, err)
	check(t, unix.Close(next))
	check(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(next), Max: before.Max}))
	return func() { check(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before)) }
}

// TestWatchedGroupGrows has more sockets than the kernel reserves for a group (INIT_SOCKS): the group keeps its program, which steers.
func TestWatchedGroupGrows(t *testing.T) {
	s := serve(t, config(t, false, pair...), 1, bpf.NoSlot, nil)
	s.seat(0)
	for row := range s.rows() {
		unwatched, err := s.AttachWatched(row, s.keepers[row].fd)
		check(t, errors.Join(unwatched, err))
		for range 200 {
			newSocket(t, s.config.Listeners[row], true)
		}
		if ok, err := s.IsAttached(row); err != nil || !ok {
			t.Errorf("row %d: attached %v: %v", row, ok, err)
		}
	}
	clients(func(row, protocol int, _ bool) {
		check(t, refused(t, protocol, s.sourceIn(0, false), target(s.config.Listeners[row], false)))
		s.collect(row, 1)
	})
}

// TestIsInGroup asks about sockets in a group and about sockets that have left it. The question changes nothing.
func TestIsInGroup(t *testing.T) {
	s := serve(t, config(t, false, pair...), 1, bpf.NoSlot, nil)
	s.seat(0)
	in := func(fd int) bool {
		t.Helper()
		ok, err := s.IsInGroup(fd)
		check(t, err)
		return ok
	}
	for row := range s.rows() {
		beside := newSocket(t, s.config.Listeners[row], true)
		for range 3 {
			if !in(beside.fd) || !in(s.keepers[row].fd) {
				t.Errorf("row %d: a socket is not in its group", row)
			}
		}
		beside.close()
	}
	clients(func(row, protocol int, _ bool) {
		check(t, refused(t, protocol, s.sourceIn(0, false), target(s.config.Listeners[row], false)))
		s.collect(row, 1)
	})
	left := newSocket(t, s.config.Listeners[0], true)
	check(t, unix.Connect(left.fd, sockaddr.Of(netip.MustParseAddrPort("[::ffff:127.0.0.9]:9"))))
	check(t, testenv.Disconnect(left.fd))
	alone := newSocket(t, bpf.Listener{Protocol: unix.IPPROTO_UDP, Address: netip.MustParseAddrPort("127.0.0.1:4999")}, false)
	ended := newSocket(t, s.config.Listeners[1], true)
	check(t, unix.Shutdown(ended.fd, unix.SHUT_RDWR))
	for name, fd := range map[string]int{"disconnected": left.fd, "without SO_REUSEPORT": alone.fd, "not listening": ended.fd} {
		if in(fd) {
			t.Errorf("%s: in a group", name)
		}
	}
}

// TestAttachWatchedCloses closes the data path: the program stays attached, and the witnesses are closed.
func TestAttachWatchedCloses(t *testing.T) {
	s := serve(t, config(t, false, pair...), 1, bpf.NoSlot, nil)
	s.seat(0)
	before := loopbackSockets(t)
	for row := range s.rows() {
		for range 2 {
			unwatched, err := s.AttachWatched(row, s.keepers[row].fd)
			check(t, errors.Join(unwatched, err))
		}
	}
	if got := loopbackSockets(t) - before; got != len(s.rows()) {
		t.Errorf("%d witnesses, want %d", got, len(s.rows()))
	}
	check(t, s.Close())
	if got := loopbackSockets(t) - before; got != 0 {
		t.Errorf("%d witnesses are left", got)
	}
	clients(func(row, protocol int, _ bool) {
		check(t, refused(t, protocol, s.sourceIn(0, false), target(s.config.Listeners[row], false)))
		s.collect(row, 1)
	})
}

// loopbackSockets returns the number of UDP sockets on 127.0.0.1 in this network namespace.
func loopbackSockets(t *testing.T) (n int) {
	t.Helper()
	conn, err := sockdiag.Open()
	check(t, err)
	defer conn.Close()
	query := sockdiag.Query{Protocol: unix.IPPROTO_UDP, States: sockdiag.States(0).With(sockdiag.Closed)}
	check(t, conn.Dump(query, func() { n = 0 }, func(s *sockdiag.Socket) {
		if s.Local.Addr() == netip.AddrFrom4([4]byte{127, 0, 0, 1}) {
			n++
		}
	}))
	return n
}
