// SPDX-License-Identifier: Apache-2.0

// Package listener relates the listeners of a service to sockets: which ports members bind, which sockets can serve
// a listener, and which connections a listener accepts.
package listener

import (
	"errors"
	"fmt"
	"iter"
	"net/netip"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/sockdiag"
)

// ForBPF returns a listener as the data path has it.
func ForBPF(l config.Listener) bpf.Listener {
	protocol := uint8(unix.IPPROTO_TCP)
	if l.Protocol == config.UDP {
		protocol = unix.IPPROTO_UDP
	}
	return bpf.Listener{Protocol: protocol, Address: l.Address, V6Only: l.V6Only}
}

// MemberAddress describes the socket that a member must open for a listener.
func MemberAddress(l config.Listener) string {
	if l.MemberPorts.First == 0 {
		return l.String()
	}
	return fmt.Sprintf("%s port %s", l.Protocol, l.MemberPorts)
}

// MatchesAny reports whether a socket has the protocol and a member's port of one of the listeners.
func MatchesAny(listeners iter.Seq[config.Listener], socket *member.Socket) bool {
	for l := range listeners {
		first, last := MemberPorts(l)
		tcp := socket.Protocol == unix.IPPROTO_TCP || socket.Protocol == unix.IPPROTO_MPTCP
		if tcp == (l.Protocol == config.TCP) && (!tcp || !socket.Connected) &&
			socket.Local.Port() >= first && socket.Local.Port() <= last {
			return true
		}
	}
	return false
}

// MemberPorts returns the range of ports that members bind for a listener.
func MemberPorts(l config.Listener) (first, last uint16) {
	if l.MemberPorts.First == 0 {
		return l.Address.Port(), l.Address.Port()
	}
	return l.MemberPorts.First, l.MemberPorts.Last
}

// CheckFit returns the reason why a socket cannot serve a listener of a service with or without steering by sk_lookup, or nil.
func CheckFit(l config.Listener, socket *member.Socket, lookup bool) error {
	switch {
	case socket.Protocol == unix.IPPROTO_MPTCP:
		return fault.Conflict(fmt.Errorf("its socket %s is MPTCP, which the kernel does not steer", socket),
			"programs in Go: GODEBUG=multipathtcp=0, or ListenConfig.SetMultipathTCP(false)")
	case socket.Connected:
		return fault.Conflict(fmt.Errorf("its socket %s is connected to one peer, and receives nothing from others", socket),
			"make the program receive on a socket that is not connected")
	case !socket.Listening:
		return fmt.Errorf("its socket %s does not listen yet", socket)
	case lookup:
		return checkFamily(l, socket)
	case socket.Local.Addr() != l.Address.Addr():
		return fault.Conflict(fmt.Errorf("its socket %s is not bound to the listener's address %s", socket, l.Address.Addr()),
			"make the listener's address what the member binds, or use steering: lookup")
	case socket.Local.Addr().Is6() && socket.V6Only != l.V6Only:
		return fault.Conflict(fmt.Errorf("its socket %s has IPV6_V6ONLY %v, the listener %v", socket, socket.V6Only, l.V6Only),
			"set v6only of the listener to what the member does")
	case !socket.ReusePort:
		return fault.Conflict(fmt.Errorf("its socket %s lacks SO_REUSEPORT", socket),
			"make the program set SO_REUSEPORT before bind, or use steering: lookup")
	}
	return nil
}

// checkFamily returns an error if a listener receives IPv4 and the socket is for IPv6 only: the kernel refuses such an
// assignment (bpf_sk_lookup_assign).
func checkFamily(l config.Listener, socket *member.Socket) error {
	address := l.Address.Addr()
	if socket.IPv6Alone && (address.Is4() || address.IsUnspecified() && !l.V6Only) {
		return fault.Conflict(fmt.Errorf("its socket %s receives only IPv6, the listener %s also IPv4", socket, l),
			"make the program clear IPV6_V6ONLY, or set v6only of the listener and give the service another one for IPv4")
	}
	return nil
}

// CheckSameFamily returns an error if some sockets of a member receive IPv6 and others only IPv4. A device with IPv6
// addresses would reach only some of the listeners.
func CheckSameFamily(listeners map[int]config.Listener, chosen map[int]*member.Socket) error {
	var alone, both *member.Socket
	for row, socket := range chosen {
		switch address := listeners[row].Address.Addr(); {
		case address.Is4():
		case socket.Local.Addr().Is4():
			alone = socket
		default:
			both = socket
		}
	}
	if alone == nil || both == nil {
		return nil
	}
	return fault.Conflict(fmt.Errorf("its socket %s receives only IPv4, its socket %s also IPv6", alone, both),
		"make the program listen on addresses of the same family with all sockets")
}

// ExplainInsert explains why the data path refuses a socket.
func ExplainInsert(socket *member.Socket, err error) error {
	where := fmt.Errorf("its socket %s is refused: %w", socket, err)
	switch {
	case errors.Is(err, unix.EBUSY):
		hint := "another service, or another program's SOCKMAP, holds this socket"
		if socket.Protocol == unix.IPPROTO_UDP {
			// udp_bpf_recvmsg (Linux 6.18) keeps the psock of the socket, also after the socket has left the SOCKMAP.
			hint += "; after a change from steering: lookup, a blocked read of the program holds it: kill -STOP PID; kill -CONT PID ends the read"
		}
		return fault.Conflict(where, hint)
	case errors.Is(err, unix.EINVAL):
		return fault.Conflict(where, "it was bound before it set SO_REUSEPORT; the program must set it first")
	}
	return where
}

// Accepts reports whether the local address of a TCP socket belongs to a listener.
func Accepts(l config.Listener, socket *sockdiag.Socket) bool {
	addr := socket.Local.Addr()
	switch {
	case l.Address.Addr() == netip.IPv4Unspecified():
		return addr.Is4()
	case l.Address.Addr() == netip.IPv6Unspecified():
		return !l.V6Only || addr.Is6()
	}
	return addr.WithZone("") == l.Address.Addr()
}

// Loopback returns the loopback address of the family of an address.
func Loopback(of netip.Addr) netip.Addr {
	if of.Is4() {
		return netip.MustParseAddr("127.0.0.1")
	}
	return netip.IPv6Loopback()
}
