// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"
)

func domain(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// sockaddr takes a zone as the number of an interface only.
func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	to := &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
	if zone, err := strconv.ParseUint(a.Addr().Zone(), 10, 32); err == nil {
		to.ZoneId = uint32(zone)
	}
	return to
}

// addrPort is the address of a peer, without a zone; an IPv4-mapped one is its IPv4
// address.
func addrPort(a unix.Sockaddr) (netip.AddrPort, bool) {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)), true
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port)), true
	}
	return netip.AddrPort{}, false
}

// hostSocket is a socket of the host that is to be bound for the guest.
type hostSocket struct {
	family    int
	protocol  uint8 // unix.IPPROTO_TCP or IPPROTO_UDP
	reusePort bool
	v6Only    bool // of IPv6: not for IPv4 as well
}

// receiveBuffer is what is asked for of UDP sockets, in bytes: datagrams come in bursts. The
// kernel allows twice as much: 20,000 datagrams of 1400 bytes, which it counts as 2304 each.
// Without CAP_NET_ADMIN net.core.rmem_max bounds it.
const receiveBuffer = 24 << 20

// open opens it. It does not wait, and no program inherits it.
func (s hostSocket) open() (fd int, err error) {
	kind := unix.SOCK_STREAM
	if s.protocol == unix.IPPROTO_UDP {
		kind = unix.SOCK_DGRAM
	}
	if fd, err = unix.Socket(s.family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0); err != nil {
		return -1, err
	}
	options := [][3]int{}
	if s.protocol == unix.IPPROTO_TCP {
		options = append(options, [3]int{unix.SOL_SOCKET, unix.SO_REUSEADDR, 1})
	}
	if s.reusePort {
		options = append(options, [3]int{unix.SOL_SOCKET, unix.SO_REUSEPORT, 1})
	}
	if s.family == unix.AF_INET6 {
		only := 0
		if s.v6Only {
			only = 1
		}
		options = append(options, [3]int{unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, only})
	}
	for _, o := range options {
		if err := unix.SetsockoptInt(fd, o[0], o[1], o[2]); err != nil {
			unix.Close(fd)
			return -1, err
		}
	}
	if s.protocol == unix.IPPROTO_UDP {
		growReceiveBuffer(fd)
	}
	return fd, nil
}

// growReceiveBuffer gives a socket receiveBuffer, or as much of it as this user may have.
func growReceiveBuffer(fd int) {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer)
	}
}

// behindBuffer is where receiveBehind puts what was sent already.
var behindBuffer [1 << 16]byte

// receiveBehind peeks behind the first bytes of a socket, for kernels without
// SO_PEEK_OFF for TCP (before 6.9).
func receiveBehind(fd, sent int, p []byte) (int, error) {
	var parts [][]byte
	for left := sent; left > 0; left -= len(behindBuffer) {
		parts = append(parts, behindBuffer[:min(left, len(behindBuffer))])
	}
	n, _, _, _, err := unix.RecvmsgBuffers(fd, append(parts, p), nil, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	switch {
	case err != nil:
		return 0, err
	case n > sent:
		return n - sent, nil
	case sent == 0:
		return 0, nil
	}
	// All was sent that is there. Whether there will be more is for poll to say.
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	if _, err := unix.Poll(fds, 0); err != nil || fds[0].Revents == 0 {
		return 0, unix.EAGAIN
	}
	if code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err == nil && code != 0 {
		return 0, unix.Errno(code)
	}
	return 0, nil
}
