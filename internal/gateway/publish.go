// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
	"sockeye/internal/sockaddr"
	"sockeye/internal/sysctl"
)

// ListenError is returned if a port of the host cannot be opened.
type ListenError struct {
	At       netip.AddrPort // zero address: the wildcard address
	Protocol uint8
	Err      error
}

func (e *ListenError) Error() string {
	at := fmt.Sprintf("port %d", e.At.Port())
	if e.At.Addr().IsValid() {
		at = e.At.String()
	}
	return fmt.Sprintf("listen on %s %s: %v", access.ProtocolName(e.Protocol), at, e.Err)
}

func (e *ListenError) Unwrap() error { return e.Err }

// Listen opens one socket of the host per published port. If one fails, Listen closes all and returns a ListenError.
func Listen(specs []access.ForwardSpec) (list []Forward, err error) {
	defer func() {
		if err != nil {
			for _, f := range list {
				unix.Close(f.FD)
			}
			list = nil
		}
	}()
	for _, s := range specs {
		for n := range int(s.Last-s.First) + 1 {
			at := netip.AddrPortFrom(s.Address, s.First+uint16(n))
			fd, err := listen(at, s.Protocol)
			if err != nil {
				return list, &ListenError{at, s.Protocol, err}
			}
			list = append(list, Forward{FD: fd, Protocol: s.Protocol, Port: s.Guest + uint16(n)})
		}
	}
	return list, nil
}

// listen opens one socket. Without an address, listen binds it to the wildcard address of both families, or of IPv4 if the kernel
// does not support IPv6.
func listen(at netip.AddrPort, protocol uint8) (fd int, err error) {
	s := hostSocket{family: domain(at.Addr()), protocol: protocol}
	wildcard := !at.Addr().IsValid()
	if wildcard {
		at = netip.AddrPortFrom(netip.IPv6Unspecified(), at.Port())
	}
	fd, err = s.open()
	if wildcard && errors.Is(err, unix.EAFNOSUPPORT) {
		s.family, at = unix.AF_INET, netip.AddrPortFrom(netip.IPv4Unspecified(), at.Port())
		fd, err = s.open()
	}
	if err != nil {
		return -1, err
	}
	err = unix.Bind(fd, sockaddr.Of(at))
	if err == nil && protocol == unix.IPPROTO_TCP {
		err = unix.Listen(fd, unix.SOMAXCONN)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// MemberSocket is a listener of a service that the gateway opens on behalf of the program inside.
type MemberSocket struct {
	Protocol uint8          // unix.IPPROTO_TCP or IPPROTO_UDP
	Address  netip.AddrPort // the service's listener; the program inside listens on its port
	V6Only   bool
	// First and Last are the range of host ports to choose from, often a single port.
	First, Last uint16
}

// ListenAsMember opens the sockets of a member as deferred forwards. In a range of ports, the port at the index slot is preferred.
// If one fails, ListenAsMember closes all and returns a ListenError.
func ListenAsMember(sockets []MemberSocket, slot int) (list []Forward, err error) {
	defer func() {
		if err != nil {
			for _, f := range list {
				unix.Close(f.FD)
			}
			list = nil
		}
	}()
	for _, s := range sockets {
		f, err := s.open(slot)
		if err != nil {
			return list, err
		}
		list = append(list, f)
	}
	return list, nil
}

func (s *MemberSocket) open(slot int) (f Forward, err error) {
	// Members that choose from a range of ports must not share a port.
	fd, err := hostSocket{domain(s.Address.Addr()), s.Protocol, s.First == s.Last, s.V6Only}.open()
	if err != nil {
		return f, &ListenError{netip.AddrPortFrom(s.Address.Addr(), s.First), s.Protocol, err}
	}
	f = Forward{FD: fd, Protocol: s.Protocol, Port: s.Address.Port()}
	count := int(s.Last-s.First) + 1
	for n := range count {
		f.Deferred = append(f.Deferred, netip.AddrPortFrom(s.Address.Addr(), s.First+uint16((slot+n)%count)))
	}
	if s.Protocol == unix.IPPROTO_UDP && !privileged(s.First) {
		return f, nil
	}
	at, err := bindFirst(fd, f.Deferred)
	if err != nil {
		unix.Close(fd)
		return f, &ListenError{at, s.Protocol, err}
	}
	f.Deferred = []netip.AddrPort{at}
	return f, nil
}

// privileged returns whether binding a port needs CAP_NET_BIND_SERVICE, which the gateway drops before it binds deferred forwards.
func privileged(port uint16) bool { return int(port) < sysctl.FirstUnprivilegedPort() }

// bindFirst binds a socket to the first free address of a list and returns the address, or the last address tried with its error.
func bindFirst(fd int, list []netip.AddrPort) (at netip.AddrPort, err error) {
	for _, at = range list {
		if err = unix.Bind(fd, sockaddr.Of(at)); !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	return at, err
}

// hostSocket describes a listening or bound socket of the host.
type hostSocket struct {
	family    int
	protocol  uint8 // unix.IPPROTO_TCP or IPPROTO_UDP
	reusePort bool
	v6Only    bool // IPV6_V6ONLY
}

// open opens the socket with SOCK_NONBLOCK and SOCK_CLOEXEC.
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
