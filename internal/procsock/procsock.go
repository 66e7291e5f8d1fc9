// SPDX-License-Identifier: Apache-2.0

// Package procsock lists the TCP and MPTCP sockets of the processes of a cgroup, and duplicates their descriptors by
// pidfd_getfd(2), so that socket options can be read and set. It needs the right to trace each process.
//
// Package sockdiag lists the sockets of a network namespace without rights over processes, and without descriptors.
package procsock

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"sockeye/internal/cgroup"
	"sockeye/internal/config"
	"sockeye/internal/member"
	"sockeye/internal/sockaddr"
)

// Socket is an open TCP socket of a process, or a UDP socket that Open returned.
type Socket struct {
	// FD is a duplicate of the descriptor, which keeps the socket open. It must not become an os.File, which
	// would change the file status flags that the duplicate shares with the process.
	FD      int
	PID     int
	Number  int    // number of the descriptor in the process
	Command string // command line of the process
	Cookie  uint64
	// In Local and Remote, IPv4-mapped addresses are IPv4 addresses. Remote is the zero value without a peer.
	Local, Remote netip.AddrPort
	State         uint8 // TCP_ESTABLISHED is 1; 0 if unknown
	Listening     bool  // always true for UDP
	Protocol      int   // unix.IPPROTO_TCP, _UDP, or _MPTCP
	// Role is accept if the local address is that of a visited listener, otherwise connect: the kernel does not record
	// the role. Role is "" for a listener.
	Role   config.Role
	Family int // unix.AF_INET or AF_INET6
	// MPTCP is set for an MPTCP socket, whose TCP options can be neither read nor set. Subflows returns its
	// connections.
	MPTCP bool

	netns  uint64 // cookie of the network namespace
	v6only bool
}

// String returns the name of the connection or the listener, with its process.
func (s *Socket) String() string {
	name := s.Local.String()
	if s.Remote.IsValid() {
		name += " -> " + s.Remote.String()
	}
	return fmt.Sprintf("%s (descriptor %d of pid %d)", name, s.Number, s.PID)
}

// Close closes the duplicate. Call it only for the results of Find and Take.
func (s *Socket) Close() error { return unix.Close(s.FD) }

// Connected returns whether the socket is a connection that can send.
func (s *Socket) Connected() bool {
	return s.State == unix.BPF_TCP_ESTABLISHED || s.State == unix.BPF_TCP_CLOSE_WAIT
}

// absent is an error about something that does not exist.
type absent struct {
	text  string
	cause error // why it was perhaps not found; nil: it does not exist
}

// Find returns the connection with these addresses of a process of a cgroup, or an MPTCP connection with such a
// subflow. The caller closes it. The error wraps fs.ErrNotExist if there is no such connection.
func Find(cgroup string, local, remote netip.AddrPort) (*Socket, error) {
	local, remote = plain(local), plain(remote)
	found := errors.New("found")
	var socket *Socket
	problems, err := Walk(cgroup, func(s *Socket) error {
		if s.Listening || !s.has(local, remote) {
			return nil
		}
		fd, err := unix.FcntlInt(uintptr(s.FD), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return os.NewSyscallError("fcntl", err)
		}
		socket = s
		socket.FD = fd
		return found
	})
	switch {
	case errors.Is(err, found):
		return socket, nil
	case err != nil:
		return nil, fmt.Errorf("find connection %s -> %s: %w", local, remote, err)
	}
	none := absent{text: fmt.Sprintf("no process in cgroup %s has the connection %s -> %s", cgroup, local, remote)}
	if len(problems) > 0 {
		none.text += fmt.Sprintf(" (%d of the processes could not be read)", len(problems))
		none.cause = problems[0]
	}
	return nil, none
}

// Listeners contains the visited listeners by namespace and port.
type Listeners map[listenerKey][]*Socket

type listenerKey struct {
	netns uint64
	port  uint16
}

// Walk visits the TCP sockets of all processes in a cgroup directory and below. A socket that several processes share
// is visited once, and its duplicate is closed after the visit. Connections that are not yet accepted have no
// descriptor and are not visited.
//
// Processes that exit concurrently are skipped. problems contains an error for each process whose sockets cannot be
// duplicated. If visit returns an error, Walk ends and returns it.
func Walk(cgroup string, visit func(*Socket) error) (problems []error, err error) {
	heard := make(Listeners)
	_, err = WalkOnce(cgroup, func(s *Socket) error {
		heard.Add(s)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return WalkOnce(cgroup, func(s *Socket) error {
		s.Role = heard.Role(s)
		return visit(s)
	})
}

func (a absent) Error() string { return a.text }

// Is reports that the error is fs.ErrNotExist.
func (absent) Is(target error) bool { return target == fs.ErrNotExist }

func (a absent) Unwrap() error { return a.cause }

// Take returns the TCP socket of a descriptor of a process. The caller closes it. Its role is derived from the
// listeners of this process only. The error wraps fs.ErrNotExist if there is no such socket.
func Take(pid, number int) (*Socket, error) {
	s, err := Open(pid, number)
	if err != nil {
		return nil, err
	}
	if s.Protocol == unix.IPPROTO_UDP {
		s.Close()
		return nil, absent{text: fmt.Sprintf("descriptor %d of process %d is a UDP socket, at %s", number, pid, s.Local)}
	}
	heard := make(Listeners)
	if err := walkProcess(pid, make(map[uint64]bool), heard.Add); err != nil {
		s.Close()
		return nil, fmt.Errorf("duplicate sockets of pid %d: %w", pid, err)
	}
	s.Role = heard.Role(s)
	return s, nil
}

// Open returns the socket of a descriptor of a process, without Role. The caller closes it. The error wraps
// fs.ErrNotExist if there is no such socket.
func Open(pid, number int) (*Socket, error) {
	h, err := member.Open(pid)
	if errors.Is(err, fs.ErrNotExist) {
		err = absent{text: fmt.Sprintf("there is no process %d", pid)}
	}
	if err != nil {
		return nil, err
	}
	defer h.Close()
	m, err := h.OpenSocket(number)
	if errors.Is(err, fs.ErrNotExist) {
		err = absent{text: fmt.Sprintf("descriptor %d of process %d is not open, or is not a bound TCP or UDP socket", number, pid)}
	}
	if err != nil {
		return nil, err
	}
	s := describe(m, pid)
	s.Command = command(pid)
	return s, nil
}

// WalkOnce is like Walk at half the cost, and without Role, which is unknown until all listeners are visited (see
// Listeners).
func WalkOnce(dir string, visit func(*Socket) error) (problems []error, err error) {
	pids, err := cgroup.Processes(dir)
	if err != nil {
		return nil, err
	}
	seen := make(map[uint64]bool)
	for _, pid := range pids {
		var failed error
		err := walkProcess(pid, seen, func(s *Socket) {
			if failed == nil {
				failed = visit(s)
			}
		})
		switch {
		case failed != nil:
			return problems, failed
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			problems = append(problems, fmt.Errorf("duplicate sockets of pid %d: %w", pid, err))
		}
	}
	return problems, nil
}

// walkProcess visits the TCP sockets of a process that are not in seen.
func walkProcess(pid int, seen map[uint64]bool, visit func(*Socket)) error {
	h, err := member.Open(pid)
	if err != nil {
		return err
	}
	defer h.Close()
	line := ""
	_, err = h.Sockets(func(m *member.Socket) bool {
		if m.Protocol == unix.IPPROTO_UDP || seen[m.Cookie] {
			return false
		}
		seen[m.Cookie] = true
		if line == "" {
			line = command(pid)
		}
		s := describe(m, pid)
		s.Command = line
		visit(s)
		return false
	})
	return err
}

func command(pid int) string {
	p, err := member.Read(pid)
	if err != nil {
		return ""
	}
	return p.Command()
}

func describe(m *member.Socket, pid int) *Socket {
	s := &Socket{FD: m.FD(), PID: pid, Number: m.Number, Cookie: m.Cookie,
		Local: plain(m.Local), Listening: m.Listening, Protocol: m.Protocol, Family: unix.AF_INET,
		MPTCP: m.Protocol == unix.IPPROTO_MPTCP, v6only: m.V6Only}
	if m.Local.Addr().Is6() {
		s.Family = unix.AF_INET6
	}
	peer, _ := unix.Getpeername(s.FD)
	s.Remote = sockaddr.AddrPort(peer)
	if info, err := unix.GetsockoptTCPInfo(s.FD, unix.SOL_TCP, unix.TCP_INFO); err == nil {
		s.State = info.State
	}
	// Before Linux 5.14, netns is 0: all sockets count as sockets of one namespace.
	s.netns, _ = unix.GetsockoptUint64(s.FD, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	return s
}

func plain(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}

// Add records a socket if it is a listener.
func (l Listeners) Add(s *Socket) {
	if s.Listening {
		key := listenerKey{s.netns, s.Local.Port()}
		l[key] = append(l[key], s)
	}
}

// Role returns the role of a socket according to the recorded listeners, and "" for a listener.
func (l Listeners) Role(s *Socket) config.Role {
	if s.Listening {
		return ""
	}
	local := s.Local.Addr()
	for _, at := range l[listenerKey{s.netns, s.Local.Port()}] {
		addr := at.Local.Addr()
		if addr == local || addr.IsUnspecified() && (addr.Is4() == local.Is4() || addr.Is6() && !at.v6only) {
			return config.RoleAccept
		}
	}
	return config.RoleConnect
}
