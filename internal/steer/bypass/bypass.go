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
	Protocol  config.Protocol
	Local     netip.AddrPort
	Remote    netip.AddrPort // of a connected UDP socket; else the zero value
	Ifindex   uint32         // index of the bound interface, or 0
	Interface string         // name of the bound interface, or its index if there is none
	// Outside is set for a socket that has the address of a listener, and is not in the group of the listener.
	Outside bool
	Cookie  uint64
	Inode   uint32
}

// Takes returns which packets the socket receives, as in "packets to 192.0.2.1".
func (s *Socket) Takes() string {
	switch {
	case s.Outside:
		return fmt.Sprintf("packets to %s (it has left the group)", s.Local)
	case s.Remote.IsValid():
		return fmt.Sprintf("datagrams from %s", s.Remote)
	case s.Ifindex != 0:
		return "packets of interface " + s.Interface
	case s.Local.Addr().IsUnspecified():
		return "IPv4 packets"
	}
	return fmt.Sprintf("packets to %s", s.Local.Addr())
}

// advice returns the hint for a message about the socket.
func (s *Socket) advice() string {
	switch {
	case s.Outside:
		return "end the process; a member keeps SO_REUSEPORT after bind, and does not connect its socket"
	case s.Remote.IsValid():
		return "end the process, or register it as a member, which may have a socket for each device"
	case s.Ifindex != 0:
		return "end the process, or make it bind no interface"
	}
	return "end the process, or make it bind the address of the listener"
}

// String returns the protocol and the addresses, as in "udp 192.0.2.1:4739".
func (s *Socket) String() string {
	text := fmt.Sprintf("%s %s", s.Protocol, s.Local)
	if s.Remote.IsValid() {
		text += " from " + s.Remote.String()
	}
	return text
}

// mostCandidates limits the sockets that find keeps of a dump: any process of the members' user can open more.
const mostCandidates = 10_000

// find returns the sockets that the kernel prefers to those of the service: sockets without a peer first, sorted by address. Sockets that are Outside are still in
// doubt. Sockets for which skip returns true are left out. With lookup, sk_lookup runs before the kernel looks for sockets without a peer.
func find(conn *sockdiag.Conn, listeners map[int]config.Listener, lookup bool, skip func(*Socket) bool) ([]Socket, error) {
	var found []Socket
	asked := make(map[sockdiag.Query]bool)
	for _, l := range listeners {
		// Connected sockets have a dump, and a limit, of their own: a member may have one for each device.
		queries := []sockdiag.Query{{Protocol: unix.IPPROTO_TCP, States: sockdiag.States(0).With(sockdiag.Listening), LocalPort: l.Address.Port()}}
		if l.Protocol == config.UDP {
			queries = []sockdiag.Query{
				{Protocol: unix.IPPROTO_UDP, States: sockdiag.States(0).With(sockdiag.Closed), LocalPort: l.Address.Port()},
				{Protocol: unix.IPPROTO_UDP, States: sockdiag.States(0).With(sockdiag.Established), LocalPort: l.Address.Port()},
			}
		}
		for _, query := range queries {
			if asked[query] {
				continue
			}
			asked[query] = true
			before := len(found)
			err := conn.Dump(query, func() { found = found[:before] }, func(socket *sockdiag.Socket) {
				how := relate(listeners, l.Protocol, lookup, socket)
				if how == receivesNone || len(found)-before >= mostCandidates {
					return
				}
				one := Socket{Protocol: l.Protocol, Local: socket.Local, Ifindex: socket.Interface, Outside: how == sameAddress, Cookie: socket.Cookie, Inode: socket.Inode}
				if socket.State == sockdiag.Established {
					one.Remote = socket.Remote
				}
				if !skip(&one) {
					found = append(found, one)
				}
			})
			if err != nil {
				return nil, err
			}
		}
	}
	slices.SortFunc(found, func(a, b Socket) int {
		return cmp.Or(comparePeer(a, b), cmp.Compare(a.Protocol, b.Protocol), a.Local.Compare(b.Local), a.Remote.Compare(b.Remote), cmp.Compare(a.Cookie, b.Cookie))
	})
	return found, nil
}

// comparePeer compares whether sockets have a peer.
func comparePeer(a, b Socket) int {
	switch {
	case a.Remote.IsValid() == b.Remote.IsValid():
		return 0
	case a.Remote.IsValid():
		return 1
	}
	return -1
}

// relation is the relation of a socket to the sockets of a service.
type relation int

const (
	receivesNone relation = iota // no packets to the listeners
	sameAddress                  // in the group of a listener, unless it has left the group
	preferred                    // the kernel prefers the socket
)

// relate compares a socket with the listener whose address is as specific as the socket's, or else with the listener that has the
// unspecified address.
func relate(listeners map[int]config.Listener, protocol config.Protocol, lookup bool, socket *sockdiag.Socket) relation {
	how := receivesNone
	for _, l := range listeners {
		if l.Protocol != protocol || l.Address.Port() != socket.Local.Port() {
			continue
		}
		served := l.Address.Addr()
		local := socket.Local.Addr().WithZone("")
		switch {
		case !l.Receives(local):
		case socket.State == sockdiag.Established:
			how = preferred
		case lookup:
		case socket.Interface != 0:
			how = preferred
		case served == local:
			return sameAddress
		case served.IsUnspecified() && (!local.IsUnspecified() || local.Is4()):
			how = preferred
		}
	}
	return how
}
