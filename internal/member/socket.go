// SPDX-License-Identifier: Apache-2.0

package member

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Handle is a pidfd of a process. A handle never refers to a later process with the same id.
type Handle struct {
	file *os.File // registered with the runtime poller
	fd   int
	pid  int
}

// Open returns a handle of a process, by pidfd_open(2). The error wraps fs.ErrNotExist if there is no such process.
func Open(pid int) (*Handle, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		if errors.Is(err, unix.ESRCH) {
			err = fs.ErrNotExist
		}
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	return &Handle{file: os.NewFile(uintptr(fd), "pidfd:"+strconv.Itoa(pid)), fd: fd, pid: pid}, nil
}

// FromPidfd returns a handle that owns a pidfd. pid is the process id. After an error, the pidfd is closed.
func FromPidfd(pidfd, pid int) (*Handle, error) {
	if err := unix.SetNonblock(pidfd, true); err != nil {
		unix.Close(pidfd)
		return nil, fmt.Errorf("open process %d: %w", pid, err)
	}
	return &Handle{file: os.NewFile(uintptr(pidfd), "pidfd:"+strconv.Itoa(pid)), fd: pidfd, pid: pid}, nil
}

// Wait blocks until the process exits. After Close, Wait returns an error.
func (h *Handle) Wait() error {
	conn, err := h.file.SyscallConn()
	if err != nil {
		return err
	}
	return conn.Read(func(fd uintptr) bool { return ended(int(fd)) })
}

// Ended returns whether the process has exited.
func (h *Handle) Ended() bool { return ended(h.fd) }

func ended(pidfd int) bool {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1
}

// Kill sends SIGKILL to the process.
func (h *Handle) Kill() error {
	return unix.PidfdSendSignal(h.fd, unix.SIGKILL, nil, 0)
}

// Close closes the pidfd and makes Wait return.
func (h *Handle) Close() error { return h.file.Close() }

// Socket is a copied descriptor of a TCP or UDP socket of another process. The copy keeps the socket open, so close it
// as soon as possible.
type Socket struct {
	// Not an os.File: that would change the file status flags, which the copy shares with the original.
	fd        int
	Number    int // number of the descriptor in the other process
	Cookie    uint64
	UID       uint32 // owner
	Protocol  int    // unix.IPPROTO_TCP, _UDP, or _MPTCP
	Local     netip.AddrPort
	V6Only    bool // bound to [::] with IPV6_V6ONLY
	IPv6Alone bool // receives no IPv4: V6Only, or bound to a specific IPv6 address
	ReusePort bool
	Listening bool // always true for UDP
	Connected bool
}

// FD returns the descriptor, which is valid until Close.
func (s *Socket) FD() int { return s.fd }

// Close closes the copy.
func (s *Socket) Close() error { return unix.Close(s.fd) }

var protocols = map[int]string{
	unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_MPTCP: "mptcp",
}

func (s *Socket) String() string {
	return protocols[s.Protocol] + " " + s.Local.String()
}

// SharesTraffic returns whether the kernel, without a program, would distribute traffic over the two sockets.
func (s *Socket) SharesTraffic(other *Socket) bool {
	return s.Protocol == other.Protocol && s.Local == other.Local && s.V6Only == other.V6Only && !s.Connected && !other.Connected
}

// Sockets returns copies of the bound TCP and UDP sockets of a process for which want returns true. The caller closes
// them. Sockets needs CAP_SYS_PTRACE over the process; otherwise the error wraps fs.ErrPermission.
func (h *Handle) Sockets(want func(*Socket) bool) ([]*Socket, error) {
	var sockets []*Socket
	seen := make(map[uint64]bool)
	// A process can have any number of sockets, and each copy needs a descriptor of the agent. Those of UDP that are connected to devices do
	// not displace the others.
	const most = 512
	left := map[bool]int{false: most, true: most} // by whether a socket is connected
	// A descriptor that disappears during the scan may have been duplicated to another number, as in programs whose
	// libraries pass sockets on.
	const maxScans = 4
	for range maxScans {
		more, moved, err := h.scanDescriptors(seen, left, want)
		sockets = append(sockets, more...)
		if err != nil {
			CloseAll(sockets)
			return nil, err
		}
		if !moved {
			break
		}
	}
	return sockets, nil
}

// HasSocket returns whether a process has a socket of TableSockets for which want returns true by the protocol and the port.
func (h *Handle) HasSocket(want func(*Socket) bool) bool {
	return len(h.TableSockets(func(s *Socket) bool {
		return want(&Socket{Protocol: s.Protocol, Local: netip.AddrPortFrom(netip.IPv6Unspecified(), s.Local.Port())})
	})) > 0
}

// TableSockets returns the listening TCP sockets and the UDP sockets for which want returns true, of the first 1024 descriptors of a process.
// TableSockets copies no descriptor, because a process that is not a member may hold the lock of its sockets (lock_sock), for example in a send
// from a file system that does not answer, and getsockname(2) would wait for the lock. The protocol, the local address, the owner and whether
// a UDP socket is connected come from the tables of the process's network namespace; SO_REUSEPORT is assumed. Sockets of another namespace
// are not found, and neither are those after the first MiB of a table.
func (h *Handle) TableSockets(want func(*Socket) bool) (sockets []*Socket) {
	const most = 1024
	links := make(map[string]*Socket)
	for table, protocol := range map[string]int{"tcp": unix.IPPROTO_TCP, "tcp6": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "udp6": unix.IPPROTO_UDP} {
		h.readTable(table, func(s *Socket, inode string) bool {
			if protocol == unix.IPPROTO_TCP && !s.Listening { // sockets that listen come first (tcp_get_idx, net/ipv4/tcp_ipv4.c, Linux 6.18)
				return false
			}
			s.Protocol, s.Listening = protocol, true
			if want(s) {
				links["socket:["+inode+"]"] = s
			}
			return true
		})
	}
	if len(links) == 0 {
		return nil
	}
	dir, err := os.Open(fmt.Sprintf("/proc/%d/fd", h.pid))
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(most)
	for _, name := range names {
		target, err := os.Readlink(dir.Name() + "/" + name)
		if s := links[target]; err == nil && s != nil {
			sockets = append(sockets, s)
			delete(links, target)
		}
	}
	return sockets
}

// readTable reads a table of sockets of the process's network namespace (proc_pid_net(5)) until visit returns false, at most 1 MiB.
func (h *Handle) readTable(name string, visit func(s *Socket, inode string) bool) {
	file, err := os.Open(fmt.Sprintf("/proc/%d/net/%s", h.pid, name))
	if err != nil {
		return
	}
	defer file.Close()
	for lines := bufio.NewScanner(io.LimitReader(file, 1<<20)); lines.Scan(); {
		const local, remote, state, owner, inode, listen = 1, 2, 3, 7, 9, "0A"
		fields := strings.Fields(lines.Text())
		if len(fields) <= inode {
			continue
		}
		at, ok := parseTableAddress(fields[local])
		uid, err := strconv.ParseUint(fields[owner], 10, 32)
		if !ok || err != nil {
			continue // the header
		}
		s := &Socket{fd: -1, UID: uint32(uid), Local: at, ReusePort: true, Listening: fields[state] == listen, Connected: !strings.HasSuffix(fields[remote], ":0000")}
		if !visit(s, fields[inode]) {
			return
		}
	}
}

// parseTableAddress parses an address of a table of sockets: words of 32 bits in the byte order of the host, and the port.
func parseTableAddress(text string) (at netip.AddrPort, ok bool) {
	words, port, _ := strings.Cut(text, ":")
	number, err := strconv.ParseUint(port, 16, 16)
	if err != nil {
		return at, false
	}
	var address []byte
	for ; len(words) >= 8; words = words[8:] {
		word, err := strconv.ParseUint(words[:8], 16, 32)
		if err != nil {
			return at, false
		}
		address = binary.NativeEndian.AppendUint32(address, uint32(word))
	}
	addr, ok := netip.AddrFromSlice(address)
	return netip.AddrPortFrom(addr, uint16(number)), ok && words == ""
}

// scanDescriptors scans the descriptors once and skips the sockets in seen. moved is true if a descriptor disappeared
// during the scan. left is the number of sockets that are copied, by whether they are connected.
func (h *Handle) scanDescriptors(seen map[uint64]bool, left map[bool]int, want func(*Socket) bool) (sockets []*Socket, moved bool, err error) {
	dir := fmt.Sprintf("/proc/%d/fd", h.pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, false, fmt.Errorf("list descriptors: %w", readError(h.pid, err))
	}
	for _, e := range entries {
		target, err := os.Readlink(dir + "/" + e.Name())
		if errors.Is(err, fs.ErrPermission) {
			return sockets, false, fmt.Errorf("read descriptor %s of process %d: %w", e.Name(), h.pid, err)
		}
		if err != nil {
			moved = true
			continue
		}
		number, err := strconv.Atoi(e.Name())
		if err != nil || !strings.HasPrefix(target, "socket:") {
			continue
		}
		fd, err := h.copyDescriptor(number)
		switch {
		case errors.Is(err, unix.EBADF):
			moved = true
			continue
		case err != nil:
			return sockets, false, err
		}
		s, ok := InspectSocket(fd)
		if !ok {
			continue
		}
		s.Number = number
		if seen[s.Cookie] || left[s.Connected] == 0 || !want(s) {
			s.Close()
			continue
		}
		seen[s.Cookie] = true
		left[s.Connected]--
		sockets = append(sockets, s)
	}
	return sockets, moved, nil
}

// OpenSocket returns a copy of one descriptor of a process. The caller closes the copy. The error wraps fs.ErrNotExist
// if the descriptor does not exist or is not a bound TCP or UDP socket. OpenSocket needs the same capability as Sockets.
func (h *Handle) OpenSocket(number int) (*Socket, error) {
	fd, err := h.copyDescriptor(number)
	if errors.Is(err, unix.EBADF) {
		return nil, fmt.Errorf("copy descriptor %d of process %d: %w", number, h.pid, fs.ErrNotExist)
	}
	if err != nil {
		return nil, err
	}
	s, ok := InspectSocket(fd)
	if !ok {
		return nil, fmt.Errorf("copy descriptor %d of process %d: no bound TCP or UDP socket: %w", number, h.pid, fs.ErrNotExist)
	}
	s.Number = number
	return s, nil
}

func (h *Handle) copyDescriptor(number int) (int, error) {
	fd, err := unix.PidfdGetfd(h.fd, number, 0)
	if err == nil {
		return fd, nil
	}
	if errors.Is(err, unix.ESRCH) {
		err = fs.ErrNotExist
	}
	return -1, fmt.Errorf("copy descriptor %d of process %d: %w", number, h.pid, err)
}

// CloseAll closes sockets.
func CloseAll(sockets []*Socket) {
	for _, s := range sockets {
		s.Close()
	}
}

// InspectSocket returns a socket that owns a descriptor. If the descriptor is not a bound TCP or UDP socket,
// InspectSocket closes the descriptor and returns false.
func InspectSocket(fd int) (*Socket, bool) {
	s := &Socket{fd: fd}
	if s.inspect() {
		return s, true
	}
	unix.Close(fd)
	return nil, false
}

func (s *Socket) inspect() bool {
	fd := s.fd
	option := func(name int) int {
		value, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, name)
		if err != nil {
			return -1
		}
		return value
	}
	family := option(unix.SO_DOMAIN)
	if family != unix.AF_INET && family != unix.AF_INET6 {
		return false
	}
	switch option(unix.SO_PROTOCOL) {
	case unix.IPPROTO_TCP:
		s.Protocol = unix.IPPROTO_TCP
		s.Listening = option(unix.SO_ACCEPTCONN) == 1
	case unix.IPPROTO_MPTCP:
		s.Protocol = unix.IPPROTO_MPTCP
		s.Listening = option(unix.SO_ACCEPTCONN) == 1
	case unix.IPPROTO_UDP:
		s.Protocol = unix.IPPROTO_UDP
		s.Listening = true
	default:
		return false
	}
	s.ReusePort = option(unix.SO_REUSEPORT) == 1
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return false
	}
	s.Cookie = cookie
	// The owner of the inode is sk_uid, which the kernel compares in a SO_REUSEPORT group: the user that opened the
	// socket, or a user set by fchown(2), which needs CAP_CHOWN in a user namespace that maps both users.
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return false
	}
	s.UID = stat.Uid
	local, err := unix.Getsockname(fd)
	if err != nil {
		return false
	}
	switch a := local.(type) {
	case *unix.SockaddrInet4:
		s.Local = netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		s.Local = netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port))
		only, err := unix.GetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY)
		// The kernel also sets IPV6_V6ONLY for all specific IPv6 addresses.
		s.IPv6Alone = err == nil && only == 1
		s.V6Only = s.IPv6Alone && a.Addr == [16]byte{}
	}
	if _, err := unix.Getpeername(fd); err == nil {
		s.Connected = true
	}
	return s.Local.Port() != 0
}

// Netns returns the inode of the network namespace of the socket, which may differ from that of the process. Netns needs
// CAP_NET_ADMIN over the namespace.
func (s *Socket) Netns() (uint64, error) {
	ns, err := unix.IoctlRetInt(s.fd, unix.SIOCGSKNS)
	if err != nil {
		return 0, fmt.Errorf("find network namespace of %s: %w", s, err)
	}
	defer unix.Close(ns)
	var stat unix.Stat_t
	if err := unix.Fstat(ns, &stat); err != nil {
		return 0, fmt.Errorf("find network namespace of %s: %w", s, err)
	}
	return stat.Ino, nil
}

// Listen sets the backlog of a listening TCP socket. The kernel limits the backlog to net.core.somaxconn of the socket's
// network namespace.
func (s *Socket) Listen(backlog int) error {
	if err := unix.Listen(s.FD(), backlog); err != nil {
		return fmt.Errorf("set backlog of %s: %w", s, err)
	}
	return nil
}
