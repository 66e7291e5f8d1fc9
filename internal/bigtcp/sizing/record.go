// SPDX-License-Identifier: Apache-2.0

package sizing

import (
	"time"

	"sockeye/internal/bigtcp/netif"
)

// Want is a requested size of each family, in bytes; 0 leaves the family unchanged,
// netif.Legacy turns BIG TCP off.
type Want struct {
	IPv6 uint32 `json:"ipv6,omitempty"` // netif.Legacy to netif.MaxSize
	IPv4 uint32 `json:"ipv4,omitempty"` // netif.Legacy to netif.MaxSize
}

// Change is a change of the sizes of one interface.
type Change struct {
	Netns     string      `json:"netns,omitempty"` // path; "" for the namespace of the caller
	Interface string      `json:"interface"`
	Index     int         `json:"index"`
	From      netif.Sizes `json:"from"`
	To        netif.Sizes `json:"to"` // equal to From if nothing changes
	// UpperInterface names the upper interface for which this lower interface is changed; ""
	// if the change was requested for the interface itself.
	UpperInterface string `json:"upper_interface,omitempty"`
	// Notes say where the change differs from the request: a size that tso_max_size
	// bounds, a family that the kernel does not support.
	Notes []string `json:"notes,omitempty"`
}

// Owner is who requested sizes.
type Owner string

// The owners.
const (
	ByCommand Owner = "command" // sockeye bigtcp apply
	ByPolicy  Owner = "policy"  // the agent
)

// Record is the record of an interface whose sizes were changed, in the state
// directory. It is valid until the next boot, as the sizes are.
type Record struct {
	BootID    string      `json:"boot_id"`
	Netns     string      `json:"netns,omitempty"` // path; "" for the namespace of the host
	NetnsID   uint64      `json:"netns_id,string"` // SO_NETNS_COOKIE, or the inode before 5.14
	Interface string      `json:"interface"`
	Index     int         `json:"index"`
	Owner     Owner       `json:"owner"`
	Want      Want        `json:"want"`
	Before    netif.Sizes `json:"before"`  // to revert to
	Applied   netif.Sizes `json:"applied"` // the record is written before the sizes are set
	// From contains the sizes at the time when Applied was written, until Applied is set;
	// then it is zero.
	From netif.Sizes `json:"from,omitzero"`
	// For contains the indexes of the interfaces for which the sizes were requested: its
	// own, or those of upper interfaces in its namespace.
	For   []int     `json:"for"`
	Since time.Time `json:"since"`
}
