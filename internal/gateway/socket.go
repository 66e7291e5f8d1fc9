// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/packet"
	"sockeye/internal/sockaddr"
	"sockeye/room"
)

// receiveBuffer is the requested receive buffer of UDP sockets in bytes, for bursts. The kernel doubles the value, enough for 20,000
// datagrams of 1400 bytes with a truesize of 2304 bytes each. Without CAP_NET_ADMIN the maximum is net.core.rmem_max.
const receiveBuffer = 24 << 20

// growReceiveBuffer sets the receive buffer to receiveBuffer, or to the user's maximum.
func growReceiveBuffer(fd int) {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)
	}
}

// skipped receives the bytes before the offset of peekAt.
var skipped [1 << 16]byte

// peekAt peeks at the receive queue from an offset on, for kernels without SO_PEEK_OFF for TCP (before 6.9).
func peekAt(fd, offset int, p []byte) (int, error) {
	var parts []unix.Iovec
	for left := offset; left > 0; left -= len(skipped) {
		parts = append(parts, buffer(skipped[:min(left, len(skipped))]))
	}
	parts = append(parts, buffer(p))
	message := unix.Msghdr{Iov: &parts[0]}
	message.SetIovlen(len(parts))
	peeked, _, errno := unix.RawSyscall(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(&message)), unix.MSG_PEEK|unix.MSG_DONTWAIT)
	switch n := int(peeked); {
	case errno != 0:
		return 0, errno
	case n > offset:
		return n - offset, nil
	case offset == 0:
		return 0, nil
	}
	// The queue has no data at the offset. poll(2) reports the end of the data, or an error.
	if pollNow(fd, unix.POLLRDHUP) == 0 {
		return 0, unix.EAGAIN
	}
	if code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err == nil && code != 0 {
		return 0, unix.Errno(code)
	}
	return 0, nil
}

func buffer(p []byte) unix.Iovec {
	v := unix.Iovec{Base: unsafe.SliceData(p)}
	v.SetLen(len(p))
	return v
}

// isWritable returns whether a socket is writable. If not, poll(2) makes the kernel report EPOLLOUT later, and lets the kernel grow
// the send buffer of a connection that can use more.
func isWritable(fd int) bool {
	writable, err := room.Arm(fd)
	return writable && err == nil
}

// pollNow calls poll(2) with a timeout of 0, and returns the events that occurred.
func pollNow(fd int, events int16) int16 {
	p := unix.PollFd{Fd: int32(fd), Events: events}
	var now unix.Timespec
	_, _, errno := unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(&now)), 0, 0, 0)
	if errno != 0 {
		return 0
	}
	return p.Revents
}

// resetOnClose makes the kernel send the peer a RST when the socket is closed.
func resetOnClose(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

// sendTo calls send(2), without blocking and without SIGPIPE.
func sendTo(fd int, p []byte) (int, error) {
	return direct(unix.SYS_SENDTO, fd, p, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
}

// sendNamed calls sendto(2), without blocking and without SIGPIPE; an empty name sends to the connected peer.
func sendNamed(fd int, p, name []byte) error {
	for {
		_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)),
			unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, uintptr(unsafe.Pointer(unsafe.SliceData(name))), uintptr(len(name)))
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return errno
		}
	}
}

// receive calls recv(2). The flags must include MSG_DONTWAIT.
func receive(fd int, p []byte, flags int) (int, error) {
	return direct(unix.SYS_RECVFROM, fd, p, flags)
}

// direct makes a system call that does not block, without releasing the Go runtime's processor.
func direct(trap uintptr, fd int, p []byte, flags int) (int, error) {
	for {
		n, _, errno := unix.RawSyscall6(trap, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)), uintptr(flags), 0, 0)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// openSocket opens a socket of the host. If the process has no descriptor left, openSocket evicts a UDP flow, so that datagrams to
// many destinations stop neither connections nor DNS queries.
func (g *Gateway) openSocket(to netip.Addr, kind, protocol int) (fd int, err error) {
	kind |= unix.SOCK_NONBLOCK | unix.SOCK_CLOEXEC
	fd, err = unix.Socket(domain(to), kind, protocol)
	if noDescriptor(err) && g.freeDescriptor() {
		fd, err = unix.Socket(domain(to), kind, protocol)
	}
	return fd, err
}

func domain(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// freeDescriptor logs a warning that no descriptor is left, and evicts UDP flows to free one. It returns false if there is none.
func (g *Gateway) freeDescriptor() bool {
	g.warn(warnFiles, "no file descriptors left: UDP flows are evicted, and new connections are refused; raise ulimit -n", "limit", g.maxFiles)
	if u := g.flows.connected.victim(); u != nil {
		g.evict(u)
		return true
	}
	if u := g.flows.shared.victim(); u != nil {
		for _, other := range u.shared.byPeer {
			g.evict(other)
		}
		return true
	}
	return false
}

func noDescriptor(err error) bool { return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) }

// connectWithErrorQueue connects a socket and enables its error queue.
func connectWithErrorQueue(fd int, to netip.AddrPort) error {
	if err := enableErrorQueue(fd, to.Addr()); err != nil {
		return err
	}
	return unix.Connect(fd, sockaddr.Of(to))
}

// enableErrorQueue enables the error queue of a socket that sends to addresses of one family (IP_RECVERR, IPV6_RECVERR).
func enableErrorQueue(fd int, to netip.Addr) error {
	level, option := unix.IPPROTO_IP, unix.IP_RECVERR
	if to.Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVERR
	}
	return unix.SetsockoptInt(fd, level, option, 1)
}

// hopLimit is the TTL or hop limit that was set on a socket; 0: the host's default.
type hopLimit uint8

// set copies the hop limit of the guest's datagram to the socket, as traceroute(8) needs. The guest's default becomes the host's
// default.
func (h *hopLimit) set(fd int, s *packet.Segment) {
	limit := s.Hops()
	if limit == packet.DefaultHops {
		limit = 0
	}
	if hopLimit(limit) == *h {
		return
	}
	*h = hopLimit(limit)
	value := int(limit)
	if limit == 0 {
		value = -1 // the default
	}
	level, option := unix.IPPROTO_IP, unix.IP_TTL
	if family, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); err == nil && family == unix.AF_INET6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
	}
	_ = unix.SetsockoptInt(fd, level, option, value) // on an error the datagram has another hop limit
}

// hasPort returns whether the socket is bound to a port.
func hasPort(fd int) bool {
	name, err := unix.Getsockname(fd)
	if err != nil {
		return false
	}
	return sockaddr.AddrPort(name).Port() != 0
}

func withPort(a netip.AddrPort, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr(), port)
}
