// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"net"
	"net/netip"
)

// Addresses inside that stand for something else.
var (
	// NameServerAliases stand for the host's name servers.
	NameServerAliases = []netip.Addr{
		netip.MustParseAddr("169.254.53.53"), netip.MustParseAddr("169.254.53.54"), netip.MustParseAddr("169.254.53.55"),
	}
	// Host4 and Host6 are the source of connections from the host itself.
	Host4 = netip.MustParseAddr("169.254.53.1")
	Host6 = netip.MustParseAddr("fd53:6f63:6b65:7965::1")
	// fallback4 and fallback6 are the guest's where the host has none.
	fallback4 = netip.MustParseAddr("169.254.53.2")
	fallback6 = netip.MustParseAddr("fd53:6f63:6b65:7965::2")
)

// GuestAddresses are the addresses of the guest: those that the host sends from by default, or fixed ones for a family that
// the host has no such address of.
func GuestAddresses() (v4, v6 netip.Addr) {
	v4, v6 = sourceTo("udp4", "192.0.2.1:9"), sourceTo("udp6", "[2001:db8::1]:9")
	if !v4.IsValid() {
		v4 = fallback4
	}
	if !v6.IsValid() {
		v6 = fallback6
	}
	return v4, v6
}

// sourceTo is the source address that the kernel selects for a destination; the zero value if the destination is unreachable.
// connect(2) of a UDP socket sends nothing.
func sourceTo(network, to string) netip.Addr {
	c, err := net.Dial(network, to)
	if err != nil {
		return netip.Addr{}
	}
	defer c.Close()
	own := c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap().WithZone("")
	if own.IsLoopback() || own.IsUnspecified() || own.IsLinkLocalUnicast() {
		return netip.Addr{}
	}
	return own
}
