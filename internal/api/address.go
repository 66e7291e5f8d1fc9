// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"net/netip"

	"sockeye/internal/fault"
)

// ParseEndpoint parses an endpoint of a connection: IP:port, or an IP address without a port (0).
func ParseEndpoint(what, text string) (netip.AddrPort, error) {
	if a, err := netip.ParseAddrPort(text); err == nil {
		return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port()), nil
	}
	a, err := netip.ParseAddr(text)
	if err != nil {
		return netip.AddrPort{}, fault.Usage(fmt.Errorf("the %s end %q is not an address", what, text), "as in 192.0.2.1:1790, [2001:db8::1]:1790 or 192.0.2.1")
	}
	return netip.AddrPortFrom(a.Unmap().WithZone(""), 0), nil
}
