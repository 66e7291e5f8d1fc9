// SPDX-License-Identifier: Apache-2.0

// Package netif reads the interfaces of a network namespace by netlink and ethtool: their
// GSO and GRO maximum sizes, the limits of these sizes, and the lower, peer and upper
// interfaces. It sets the sizes of a single interface.
package netif

const (
	// Legacy is the default GSO and GRO maximum size of every interface, and the
	// largest without BIG TCP, in bytes (GSO_LEGACY_MAX_SIZE in the kernel).
	Legacy = 65536
	// MaxSize is the largest size that the kernel accepts, in bytes (GSO_MAX_SIZE and
	// GRO_MAX_SIZE, 8 * 65535). tso_max_size may bound GSO sizes to less.
	MaxSize = 8 * 65535
)

// Sizes are the GSO and GRO maximum sizes of an interface, in bytes. An IPv4 size of 0
// means that the kernel has no size of its own for IPv4 (before 6.3): GSO and GRO are
// for both families then, and only IPv6 packets may exceed Legacy.
type Sizes struct {
	GSO     uint32 `json:"gso_max_size"`                // sent packets
	GRO     uint32 `json:"gro_max_size"`                // received packets
	GSOIPv4 uint32 `json:"gso_ipv4_max_size,omitempty"` // sent IPv4 packets
	GROIPv4 uint32 `json:"gro_ipv4_max_size,omitempty"` // received IPv4 packets
}

// Interface is a network interface.
type Interface struct {
	Index  int    `json:"index"`
	Name   string `json:"name"`
	Kind   string `json:"kind"`             // IFLA_INFO_KIND: veth, vlan, bridge ...; "" for hardware
	Driver string `json:"driver,omitempty"` // of ETHTOOL_GDRVINFO; "" if there is none
	MTU    int    `json:"mtu"`
	Up     bool   `json:"up"`
	// TSOMaxSize bounds the GSO sizes, in bytes; TSOMaxSegs bounds the segments of a
	// packet. Both are 0 on kernels without the attributes (before 5.19).
	TSOMaxSize uint32   `json:"tso_max_size,omitempty"`
	TSOMaxSegs uint32   `json:"tso_max_segs,omitempty"`
	Sizes      Sizes    `json:"sizes"`
	Offloads   Offloads `json:"offloads"`
	// Related are the lower interfaces, the peer, and the bridge or bond of which the
	// interface is a port.
	Related []Related `json:"related"`

	// LegacyTunnel is a tunnel that encapsulates no packets above Legacy, whatever
	// TSOMaxSize says.
	LegacyTunnel bool `json:"-"`
}

// Offloads are the features of ethtool -k that concern BIG TCP.
type Offloads struct {
	GSO bool `json:"gso"` // generic segmentation offload
	TSO bool `json:"tso"` // TCP segmentation offload
	GRO bool `json:"gro"` // generic receive offload
}

// Relation is the relation of an interface to another.
type Relation string

// The relations.
const (
	// Lower is an interface through which the interface sends: the parent of a VLAN or
	// macvlan, a port of a bridge or bond, the underlay of a tunnel.
	Lower Relation = "lower"
	// Peer is the other end of a veth, netkit or vxcan pair.
	Peer Relation = "peer"
	// Upper is the bridge or bond of which the interface is a port.
	Upper Relation = "upper"
)

// Related is an interface that is related to another.
type Related struct {
	Relation Relation `json:"relation"`
	Index    int      `json:"index"`
	Name     string   `json:"name,omitempty"` // "" if its namespace is unknown
	// Netns is the path of the network namespace of the related interface if it is in
	// another namespace, or "unknown" if no path to that namespace is known.
	Netns      string `json:"netns,omitempty"`
	Kind       string `json:"kind,omitempty"`
	Driver     string `json:"driver,omitempty"`
	TSOMaxSize uint32 `json:"tso_max_size,omitempty"`
	Sizes      Sizes  `json:"sizes,omitzero"`

	LegacyTunnel bool `json:"-"` // as Interface.LegacyTunnel
}

// State is the state of BIG TCP on an interface.
type State string

// The states.
const (
	On         State = "on"         // for all families that the kernel supports
	Partly     State = "partly"     // for one family, or in one direction
	Off        State = "off"        // possible up to Verdict.UpTo
	Impossible State = "impossible" // Verdict.Text has the reason
)

// Verdict is the state of BIG TCP on an interface, and the reason.
type Verdict struct {
	State State `json:"state"`
	// UpTo is the largest possible GSO size, in bytes; lower interfaces may bound it.
	UpTo uint32 `json:"up_to,omitempty"`
	Text string `json:"text"` // as in "off, possible up to 524280 bytes"
}
