// SPDX-License-Identifier: Apache-2.0

// Package sockaddr converts the addresses of sockets.
package sockaddr

import (
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"
)

// Of converts an address. A zone must be the index of an interface.
func Of(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	to := &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
	if zone, err := strconv.ParseUint(a.Addr().Zone(), 10, 32); err == nil {
		to.ZoneId = uint32(zone)
	}
	return to
}

// AddrPort converts an address of the kernel, without its zone; an IPv4-mapped address becomes its IPv4 address. The
// result is not valid for an address of another family.
func AddrPort(a unix.Sockaddr) netip.AddrPort {
	switch a := a.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr).Unmap(), uint16(a.Port))
	}
	return netip.AddrPort{}
}
