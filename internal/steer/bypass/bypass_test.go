// SPDX-License-Identifier: Apache-2.0

package bypass

import (
	"net/netip"
	"testing"

	"sockeye/internal/config"
	"sockeye/internal/sockdiag"
)

// TestRelate is what the kernel does with a packet for which several sockets are open (compute_score of net/ipv4/udp.c and
// net/ipv4/inet_hashtables.c, and those of IPv6, in Linux 6.18).
func TestRelate(t *testing.T) {
	listener := func(address string, v6only bool) config.Listener {
		return config.Listener{Protocol: config.UDP, Address: netip.MustParseAddrPort(address), V6Only: v6only}
	}
	both, four, six, one := listener("[::]:4739", false), listener("0.0.0.0:4739", false), listener("[::]:4739", true), listener("192.0.2.1:4739", false)
	for _, c := range []struct {
		name      string
		listeners []config.Listener
		local     string
		state     sockdiag.State
		ifindex   uint32
		lookup    bool
		want      relation
	}{
		{"in the group", []config.Listener{both}, "[::]:4739", sockdiag.Closed, 0, false, sameAddress},
		{"another port", []config.Listener{both}, "192.0.2.1:4740", sockdiag.Closed, 0, false, receivesNone},
		{"an IPv4 address", []config.Listener{both}, "192.0.2.1:4739", sockdiag.Closed, 0, false, preferred},
		{"an IPv6 address", []config.Listener{both}, "[2001:db8::1]:4739", sockdiag.Closed, 0, false, preferred},
		{"a link-local address", []config.Listener{both}, "[fe80::1%2]:4739", sockdiag.Closed, 0, false, preferred},
		{"IPv4 beside both", []config.Listener{both}, "0.0.0.0:4739", sockdiag.Closed, 0, false, preferred},
		{"IPv4 beside IPv6", []config.Listener{six}, "0.0.0.0:4739", sockdiag.Closed, 0, false, receivesNone},
		{"an IPv4 address beside IPv6", []config.Listener{six}, "192.0.2.1:4739", sockdiag.Closed, 0, false, receivesNone},
		{"both beside IPv4", []config.Listener{four}, "[::]:4739", sockdiag.Closed, 0, false, receivesNone},
		{"an address beside IPv4", []config.Listener{four}, "192.0.2.1:4739", sockdiag.Closed, 0, false, preferred},
		{"all beside an address", []config.Listener{one}, "0.0.0.0:4739", sockdiag.Closed, 0, false, receivesNone},
		{"another address", []config.Listener{one}, "192.0.2.2:4739", sockdiag.Closed, 0, false, receivesNone},
		{"a listener's address beside all", []config.Listener{both, one}, "192.0.2.1:4739", sockdiag.Closed, 0, false, sameAddress},
		{"a listener's address after all", []config.Listener{one, both}, "192.0.2.1:4739", sockdiag.Closed, 0, false, sameAddress},
		{"an interface", []config.Listener{both}, "[::]:4739", sockdiag.Closed, 2, false, preferred},
		{"an interface and an address", []config.Listener{one}, "192.0.2.1:4739", sockdiag.Closed, 2, false, preferred},
		{"a peer", []config.Listener{both}, "192.0.2.1:4739", sockdiag.Established, 0, false, preferred},
		{"lookup: an address", []config.Listener{both}, "192.0.2.1:4739", sockdiag.Closed, 0, true, receivesNone},
		{"lookup: an interface", []config.Listener{both}, "[::]:4739", sockdiag.Closed, 2, true, receivesNone},
		{"lookup: a peer", []config.Listener{both}, "192.0.2.1:4739", sockdiag.Established, 0, true, preferred},
	} {
		listeners := make(map[int]config.Listener)
		for row, l := range c.listeners {
			listeners[row] = l
		}
		socket := &sockdiag.Socket{Local: netip.MustParseAddrPort(c.local), State: c.state, Interface: c.ifindex}
		if got := relate(listeners, config.UDP, c.lookup, socket); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
		if got := relate(listeners, config.TCP, c.lookup, socket); got != receivesNone {
			t.Errorf("%s: %v for TCP", c.name, got)
		}
	}
}
