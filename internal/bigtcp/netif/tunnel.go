// SPDX-License-Identifier: Apache-2.0

package netif

import "sockeye/internal/linux"

// tunnelKinds contains the kinds of interfaces that encapsulate packets. The value is
// true for kinds that encapsulate packets above Legacy since Linux 7.3.
var tunnelKinds = map[string]bool{
	"vxlan": true, "geneve": true,
	"gre": false, "gretap": false, "erspan": false, "ip6gre": false, "ip6gretap": false, "ip6erspan": false,
	"ipip": false, "sit": false, "ip6tnl": false, "vti": false, "vti6": false, "xfrm": false,
	"wireguard": false, "ovpn": false, "bareudp": false, "gtp": false, "amt": false, "l2tpeth": false,
}

// IsTunnel reports whether interfaces of a kind (IFLA_INFO_KIND) are tunnels.
func IsTunnel(kind string) bool {
	_, tunnel := tunnelKinds[kind]
	return tunnel
}

// LegacyTunnel reports whether an interface is a tunnel that does not encapsulate packets
// above Legacy on a kernel. The kernel lets such a tunnel have the tso_max_size of its
// lower interface, but writes lengths of 16 bits into the outer headers.
func LegacyTunnel(i *Interface, running linux.Version) bool {
	large, tunnel := tunnelKinds[i.Kind]
	return tunnel && (!large || running.Before(linux.Version{7, 3, 0}) || i.TSOMaxSize <= Legacy)
}
