// SPDX-License-Identifier: Apache-2.0

package api

import (
	"time"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
)

// BigTCPStatus is the answer to GET /v1/bigtcp. The query parameters netns and interface select interfaces.
type BigTCPStatus struct {
	Interfaces []BigTCPInterface `json:"interfaces"` // sorted by namespace and index
}

// BigTCPInterface is a network interface that a rule matches, or a lower device of such an interface; or a rule that
// matches no interface.
type BigTCPInterface struct {
	Netns     string `json:"netns,omitempty"` // path; "" for the network namespace of the agent
	Interface string `json:"interface"`       // name, or the pattern of a rule that matches no interface
	Index     int    `json:"index,omitempty"` // 0 for a rule that matches no interface
	Rule      string `json:"rule,omitempty"`  // "" if no rule matches the interface any more
	// UpperInterface names the upper interface whose rule requires the sizes of this lower device.
	UpperInterface string      `json:"upper_interface,omitempty"`
	Requested      sizing.Want `json:"requested"`
	Sizes          netif.Sizes `json:"sizes,omitzero"` // current sizes
	// State is applied, changed, impossible, conflict or waiting.
	State   string    `json:"state"`
	Notes   []string  `json:"notes,omitempty"` // differences from Requested
	Problem string    `json:"problem,omitempty"`
	Hint    string    `json:"hint,omitempty"`
	Since   time.Time `json:"since"` // time of the last change of State
}

// The states of interfaces.
const (
	SizesApplied    = "applied"
	SizesChanged    = "changed"    // changed by another program, and not set again
	SizesImpossible = "impossible" // not supported by the kernel or by the interface
	SizesConflict   = "conflict"   // held by a sockeye bigtcp command
	SizesWaiting    = "waiting"    // waiting for an interface, a namespace or the next attempt
)

// BigTCPNetwork is one network namespace of a Status that has rules.
type BigTCPNetwork struct {
	Netns      string `json:"netns,omitempty"` // path; "" for the network namespace of the agent
	Rules      int    `json:"rules"`
	Applied    int    `json:"applied"` // number of interfaces in this state, as the fields below
	Changed    int    `json:"changed"`
	Impossible int    `json:"impossible"`
	Conflict   int    `json:"conflict"`
	Waiting    int    `json:"waiting"`
	// Problems has the first interfaces whose state is not applied.
	Problems []BigTCPInterface `json:"problems"`
	Problem  string            `json:"problem,omitempty"` // problem of the namespace itself
	Hint     string            `json:"hint,omitempty"`
}
