// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"net"
	"net/netip"
)

// HostAddresses are the addresses that the host sends from by default, which the
// guest has too; the zero value where it has none.
func HostAddresses() (v4, v6 netip.Addr) {
	return sourceTo("udp4", "192.0.2.1:9"), sourceTo("udp6", "[2001:db8::1]:9")
}

// sourceTo is the address that the host would send from. Nothing is sent.
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
