// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"sockeye/internal/bigtcp/linux"
)

// tunnelKinds are the kinds of interfaces that wrap packets into others; true are
// those that Linux 7.3 taught to wrap large ones.
var TunnelKinds = map[string]bool{
	"vxlan": true, "geneve": true,
	"gre": false, "gretap": false, "erspan": false, "ip6gre": false, "ip6gretap": false, "ip6erspan": false,
	"ipip": false, "sit": false, "ip6tnl": false, "vti": false, "vti6": false, "xfrm": false,
	"wireguard": false, "ovpn": false, "bareudp": false, "gtp": false, "amt": false, "l2tpeth": false,
}

// smallTunnel says whether an interface is a tunnel that wraps no large packets.
func LegacyTunnel(i *Interface, kernel linux.Version) bool {
	large, tunnel := TunnelKinds[i.Kind]
	return tunnel && (!large || kernel.Before(linux.Version{7, 3, 0}) || i.TSOMaxSize <= Legacy)
}
