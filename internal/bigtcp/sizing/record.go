// SPDX-License-Identifier: Apache-2.0

package sizing

import (
	"time"

	"sockeye/internal/bigtcp/netif"
)

// Want is what somebody asks for, in bytes; 0 leaves a family as it is. Legacy turns
// it off.
type Want struct {
	IPv6 uint32 `json:"ipv6,omitempty"` // Legacy to Most
	IPv4 uint32 `json:"ipv4,omitempty"` // likewise
}

// Change is a change of one interface's sizes.
type Change struct {
	Netns     string      `json:"netns,omitempty"` // path; "" for that of the caller
	Interface string      `json:"interface"`
	Index     int         `json:"index"`
	From      netif.Sizes `json:"from"`
	To        netif.Sizes `json:"to"` // the same as From: nothing to do
	// Because names the interface for whose sake this one, which is below it, is
	// changed; "" for one that was asked for.
	Because string `json:"because,omitempty"`
	// Notes say what is not as was asked for: a size that the device bounds, a family
	// that the kernel does not have.
	Notes []string `json:"notes,omitempty"`
}

// Owner is who had sizes set.
type Owner string

// The owners.
const (
	ByCommand Owner = "command" // sockeye bigtcp apply
	ByPolicy  Owner = "policy"  // the agent
)

// Record is what is remembered of an interface whose sizes were set, in the state
// directory. It is of one life of the host: sizes do not outlive a reboot.
type Record struct {
	BootID    string      `json:"boot_id"`
	Netns     string      `json:"netns,omitempty"` // path; "" for that of the host
	NetnsID   uint64      `json:"netns_id,string"` // SO_NETNS_COOKIE, or the inode before 5.14
	Interface string      `json:"interface"`
	Index     int         `json:"index"`
	Owner     Owner       `json:"owner"`
	Want      Want        `json:"want"`
	Before    netif.Sizes `json:"before"`  // to go back to
	Applied   netif.Sizes `json:"applied"` // written before they are set
	// From is what it had when Applied was written, until that is set; zero then.
	From netif.Sizes `json:"from,omitzero"`
	// For are the indexes of the interfaces that were asked for and led to this: its
	// own, or those above it, in its namespace.
	For   []int     `json:"for"`
	Since time.Time `json:"since"`
}
