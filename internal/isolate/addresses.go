// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"net"
	"net/netip"
)

// Aliases are addresses inside that the gateway maps to other addresses.
var (
	// NameServerAliases are the aliases of the host's name servers.
	NameServerAliases = []netip.Addr{
		netip.MustParseAddr("169.254.53.53"), netip.MustParseAddr("169.254.53.54"), netip.MustParseAddr("169.254.53.55"),
	}
	// Host4 and Host6 are the source addresses, inside, of connections from the host itself.
	Host4 = netip.MustParseAddr("169.254.53.1")
	Host6 = netip.MustParseAddr("fd53:6f63:6b65:7965::1")
	// fallback4 and fallback6 are the guest's addresses for a family in which the host has no suitable address.
	fallback4 = netip.MustParseAddr("169.254.53.2")
	fallback6 = netip.MustParseAddr("fd53:6f63:6b65:7965::2")
)

// GuestAddresses returns the addresses of the guest: the host's default source addresses, or fixed addresses for a family in which
// the host has none.
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

// sourceTo returns the source address that the kernel selects for a destination; the zero value if it is unreachable.
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
