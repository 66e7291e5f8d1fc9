// SPDX-License-Identifier: Apache-2.0

// Package netif reads the interfaces of a network namespace by netlink and ethtool:
// their GSO and GRO maximum sizes, what bounds these sizes, and the lower, peer and
// upper interfaces. It sets the sizes of a single interface.
package netif

import "fmt"

const (
	// Legacy is the largest size without BIG TCP, in bytes (GSO_LEGACY_MAX_SIZE in
	// the kernel); every interface begins with it.
	Legacy = 65536
	// Most is the largest size that the kernel takes, in bytes (GSO_MAX_SIZE and
	// GRO_MAX_SIZE, 8 * 65535). For sending, the device may have less.
	Most = 8 * 65535
)

// Sizes are the four sizes of an interface, in bytes. An IPv4 size of 0 is one that
// the kernel does not have: before 6.3 the others are for both families, and only
// IPv6 may exceed Legacy.
type Sizes struct {
	GSO     uint32 `json:"gso_max_size"`                // packets that are sent
	GRO     uint32 `json:"gro_max_size"`                // packets that are received
	GSOIPv4 uint32 `json:"gso_ipv4_max_size,omitempty"` // the same of IPv4
	GROIPv4 uint32 `json:"gro_ipv4_max_size,omitempty"`
}

// Interface is a network interface, as the kernel shows it.
type Interface struct {
	Index  int    `json:"index"`
	Name   string `json:"name"`
	Kind   string `json:"kind"`             // veth, vlan, bridge ... as ip -d link shows it; "" for hardware
	Driver string `json:"driver,omitempty"` // of ETHTOOL_GDRVINFO; "" where there is none
	MTU    int    `json:"mtu"`
	Up     bool   `json:"up"`
	// TSOMaxSize bounds GSO sizes, in bytes; TSOMaxSegs the segments of a packet.
	// They are 0 where the kernel does not say (before 5.19).
	TSOMaxSize uint32   `json:"tso_max_size,omitempty"`
	TSOMaxSegs uint32   `json:"tso_max_segs,omitempty"`
	Sizes      Sizes    `json:"sizes"`
	Offloads   Offloads `json:"offloads"`
	// Related are the devices below it, the ends that it talks to and the bridge or
	// bond that it is in.
	Related []Related `json:"related"`

	// LegacyTunnel is a tunnel that encapsulates no packets above Legacy, whatever
	// TSOMaxSize says.
	LegacyTunnel bool `json:"-"`
}

// Offloads are the settings of ethtool -k that matter here.
type Offloads struct {
	GSO bool `json:"gso"` // generic segmentation
	TSO bool `json:"tso"` // segmentation by the device
	GRO bool `json:"gro"` // joining of received packets
}

// Relation is how an interface is bound to another.
type Relation string

// The relations.
const (
	// Lower is a device through which this one sends: that of a VLAN, a port of a
	// bridge or bond, the device of a macvlan or of a tunnel.
	Lower Relation = "lower"
	// Peer is the other end of a veth pair.
	Peer Relation = "peer"
	// Upper is the bridge or bond that this one is a port of.
	Upper Relation = "upper"
)

// Related is a device that an interface is bound to.
type Related struct {
	Relation Relation `json:"relation"`
	Index    int      `json:"index"`
	Name     string   `json:"name,omitempty"` // "" where its namespace cannot be found
	// Netns is the path of its namespace where that is another one; "unknown" where
	// it cannot be found.
	Netns      string `json:"netns,omitempty"`
	Kind       string `json:"kind,omitempty"`
	Driver     string `json:"driver,omitempty"`
	TSOMaxSize uint32 `json:"tso_max_size,omitempty"`
	Sizes      Sizes  `json:"sizes,omitzero"`

	LegacyTunnel bool `json:"-"` // as of Interface
}

// State is the verdict on an interface in a word.
type State string

// The states.
const (
	On         State = "on"         // for all families that the kernel has it for
	Partly     State = "partly"     // for one family, or in one direction
	Off        State = "off"        // possible up to Verdict.UpTo
	Impossible State = "impossible" // because of what Verdict.Text says
)

// Verdict is what is to be said of an interface.
type Verdict struct {
	State State `json:"state"`
	// UpTo is the largest size that can be set for packets that are sent, in bytes,
	// which the devices below bound too.
	UpTo uint32 `json:"up_to,omitempty"`
	Text string `json:"text"` // as in "off, possible up to 524280 bytes"
}

// Kind is what kind of error an Error is.
type Kind int

// The kinds of Error.
const (
	KindUsage       Kind = iota // what was asked for does not exist or makes no sense
	KindUnsupported             // the kernel or the device cannot
	KindConflict                // somebody else has changed it meanwhile, or holds it
)

// Error is an error of which the kind is known, and what to do about it.
type Error struct {
	Kind Kind
	Err  error
	Hint string // "" for none
}

func (e *Error) Error() string { return e.Err.Error() }

func (e *Error) Unwrap() error { return e.Err }

func Refuse(kind Kind, hint, format string, args ...any) error {
	return &Error{kind, fmt.Errorf(format, args...), hint}
}
