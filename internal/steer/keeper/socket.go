// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/netns"
	"sockeye/internal/sockaddr"
	"sockeye/internal/steer/listener"
)

// A keeper socket is a socket in the SO_REUSEPORT group of a listener that the program never selects, unless it is a waiting room (see package rooms). The keeper socket
// keeps the group and its program alive while the service has no member, so that the kernel's hash never selects a
// socket. Both the agent and the keeper have the keeper sockets open; the keeper is a process that does nothing else
// and outlives the agent.

// OpenSocket opens the keeper socket of a listener and attaches the program before a packet can reach the socket.
// All sockets of a SO_REUSEPORT group belong to one user, uid.
func OpenSocket(l bpf.Listener, uid uint32, network *os.File, attach func(fd int) error) (int, error) {
	// A socket that has a program can only be the first of its group; otherwise bind fails
	// (inet_csk_bind_conflict). In that case the program of the existing group already selects.
	fd, err := trySocket(l, uid, network, attach, true)
	if errors.Is(err, unix.EADDRINUSE) {
		return trySocket(l, uid, network, attach, false)
	}
	return fd, err
}

func trySocket(l bpf.Listener, uid uint32, network *os.File, attach func(fd int) error, attachFirst bool) (fd int, err error) {
	domain, kind := unix.AF_INET6, unix.SOCK_DGRAM
	if l.Address.Addr().Is4() {
		domain = unix.AF_INET
	}
	if l.Protocol == unix.IPPROTO_TCP {
		kind = unix.SOCK_STREAM
	}
	err = netns.Do(network, func() error {
		fd, err = unix.Socket(domain, kind|unix.SOCK_CLOEXEC, int(l.Protocol))
		return err
	})
	if err != nil {
		return -1, fmt.Errorf("create socket: %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
			fd = -1
		}
	}()
	// sockfs_setattr (net/socket.c) copies the owner to sk_uid.
	if err := unix.Fchown(fd, int(uid), -1); err != nil {
		return fd, fmt.Errorf("give socket to user %d: %w", uid, err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		return fd, fmt.Errorf("set SO_REUSEPORT: %w", err)
	}
	if domain == unix.AF_INET6 {
		only := 0
		if l.V6Only {
			only = 1
		}
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, only); err != nil {
			return fd, fmt.Errorf("set IPV6_V6ONLY: %w", err)
		}
	}
	if attachFirst {
		if err := attach(fd); err != nil {
			return fd, err
		}
	}
	if err := bind(fd, l.Address); err != nil {
		return fd, err
	}
	if l.Protocol == unix.IPPROTO_TCP {
		if err := unix.Listen(fd, 1); err != nil {
			return fd, fmt.Errorf("listen: %w", err)
		}
	}
	if attachFirst {
		return fd, nil
	}
	if err := attach(fd); err != nil {
		return fd, err
	}
	return fd, RejectQueued(fd)
}

// OpenAnywhere opens a socket on any free port that receives the packets of a listener by sk_lookup. before runs before bind.
// A listener of IPv6 may receive IPv4, too, so that its socket is bound to [::] (bpf_sk_assign), and other hosts can reach the
// port.
func OpenAnywhere(l bpf.Listener, before func(fd int) error) (fd int, err error) {
	domain, kind, address := unix.AF_INET6, unix.SOCK_DGRAM, netip.IPv6Unspecified()
	if l.Address.Addr().Is4() {
		domain, address = unix.AF_INET, listener.Loopback(l.Address.Addr())
	}
	if l.Protocol == unix.IPPROTO_TCP {
		kind = unix.SOCK_STREAM
	}
	fd, err = unix.Socket(domain, kind|unix.SOCK_CLOEXEC, int(l.Protocol))
	if err != nil {
		return -1, fmt.Errorf("create socket: %w", err)
	}
	err = before(fd)
	if err == nil {
		err = bind(fd, netip.AddrPortFrom(address, 0))
	}
	if err == nil && kind == unix.SOCK_STREAM {
		err = unix.Listen(fd, 1)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// AttachFilter attaches a socket filter.
func AttachFilter(fd int, filter []unix.SockFilter) error {
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &program); err != nil {
		return fmt.Errorf("set SO_ATTACH_FILTER: %w", err)
	}
	return nil
}

// RejectQueued resets the connections and discards the datagrams that a keeper socket received before the program was
// attached. The queue is empty unless the group had no program.
func RejectQueued(fd int) error {
	if err := unix.SetNonblock(fd, true); err != nil {
		return fmt.Errorf("drain keeper socket: %w", err)
	}
	const most = 1 << 16
	for range most {
		conn, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
		if err == nil {
			// A reset makes the device connect again.
			err = unix.SetsockoptLinger(conn, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
			unix.Close(conn)
		} else if errors.Is(err, unix.EOPNOTSUPP) {
			_, _, err = unix.Recvfrom(fd, nil, 0)
		}
		if errors.Is(err, unix.EAGAIN) {
			return nil
		}
		if err != nil && !errors.Is(err, unix.ECONNABORTED) {
			return fmt.Errorf("drain keeper socket: %w", err)
		}
	}
	return nil
}

func bind(fd int, address netip.AddrPort) error {
	if err := unix.Bind(fd, sockaddr.Of(address)); err != nil {
		return fmt.Errorf("bind to %s: %w", address, err)
	}
	return nil
}
