// SPDX-License-Identifier: Apache-2.0

// Package bypass finds the sockets that receive packets to the listeners of a service without its program: the kernel prefers a
// socket of another SO_REUSEPORT group with a more specific address, and a connected UDP socket.
package bypass

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/sockdiag"
)

// Socket is a socket that the kernel prefers to those of the service.
type Socket struct {
	Protocol config.Protocol
	Local    netip.AddrPort
	Remote   netip.AddrPort // of a connected UDP socket; else the zero value
	Device   uint32         // index of the bound interface, or 0
	Cookie   uint64
	Inode    uint32
}

// Takes returns which packets the socket receives, as in "packets to 192.0.2.1".
func (s *Socket) Takes() string {
	switch {
	case s.Remote.IsValid():
		return fmt.Sprintf("datagrams from %s", s.Remote)
	case s.Device != 0:
		return fmt.Sprintf("packets of interface %d", s.Device)
	case s.Local.Addr().IsUnspecified():
		return "IPv4 packets"
	}
	return fmt.Sprintf("packets to %s", s.Local.Addr())
}

// String returns the protocol and the addresses, as in "udp 192.0.2.1:4739".
func (s *Socket) String() string {
	text := fmt.Sprintf("%s %s", s.Protocol, s.Local)
	if s.Remote.IsValid() {
		text += " from " + s.Remote.String()
	}
	return text
}

// mostSockets limits the result of Find: any process of the members' user can open more.
const mostSockets = 100

// Find returns the sockets that the kernel prefers, sorted by address, at most mostSockets. own are the cookies of the
// registered sockets. With lookup, sk_lookup runs before the kernel looks for sockets without a peer.
func Find(conn *sockdiag.Conn, listeners map[int]config.Listener, lookup bool, own map[uint64]bool) ([]Socket, error) {
	var found []Socket
	asked := make(map[sockdiag.Query]bool)
	for _, l := range listeners {
		query := sockdiag.Query{Protocol: unix.IPPROTO_TCP, States: sockdiag.States(0).With(sockdiag.Listening), LocalPort: l.Address.Port()}
		if l.Protocol == config.UDP {
			query.Protocol, query.States = unix.IPPROTO_UDP, sockdiag.States(0).With(sockdiag.Closed).With(sockdiag.Established)
		}
		if asked[query] {
			continue
		}
		asked[query] = true
		before := len(found)
		err := conn.Dump(query, func() { found = found[:before] }, func(socket *sockdiag.Socket) {
			if len(found) < mostSockets && !own[socket.Cookie] && isPreferred(listeners, l.Protocol, lookup, socket) {
				one := Socket{Protocol: l.Protocol, Local: socket.Local, Device: socket.Device, Cookie: socket.Cookie, Inode: socket.Inode}
				if socket.State == sockdiag.Established {
					one.Remote = socket.Remote
				}
				found = append(found, one)
			}
		})
		if err != nil {
			return nil, err
		}
	}
	slices.SortFunc(found, func(a, b Socket) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), a.Local.Compare(b.Local), a.Remote.Compare(b.Remote), cmp.Compare(a.Cookie, b.Cookie))
	})
	return found, nil
}

// isPreferred reports whether the kernel prefers a socket to those of the listener whose address is as specific as the socket's, or
// else of the listener with the unspecified address.
func isPreferred(listeners map[int]config.Listener, protocol config.Protocol, lookup bool, socket *sockdiag.Socket) bool {
	preferred := false
	for _, l := range listeners {
		if l.Protocol != protocol || l.Address.Port() != socket.Local.Port() {
			continue
		}
		served := l.Address.Addr()
		local := socket.Local.Addr().WithZone("")
		switch {
		case !covers(l, local):
		case socket.State == sockdiag.Established:
			preferred = true
		case lookup:
		case socket.Device != 0:
			preferred = true
		case served == local:
			return false // in the listener's group, unless it has left the group (see SECURITY.md)
		case served.IsUnspecified() && (!local.IsUnspecified() || local.Is4()):
			preferred = true
		}
	}
	return preferred
}

// covers reports whether packets to a local address can reach a listener.
func covers(l config.Listener, local netip.Addr) bool {
	switch served := l.Address.Addr(); {
	case served == netip.IPv4Unspecified():
		return local.Is4()
	case served == netip.IPv6Unspecified():
		return !l.V6Only || local.Is6()
	default:
		return local == served.WithZone("")
	}
}
