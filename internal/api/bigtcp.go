// SPDX-License-Identifier: Apache-2.0

package api

import (
	"time"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
)

// BigTCPStatus is the answer to GET /v1/bigtcp. The query's netns and interface
// choose.
type BigTCPStatus struct {
	Interfaces []BigTCPInterface `json:"interfaces"` // by namespace and index
}

// BigTCPInterface is an interface that a rule of the policy is for, or that is below
// one; or a rule that no interface matches.
type BigTCPInterface struct {
	Netns     string `json:"netns,omitempty"` // path; "" for that of the agent
	Interface string `json:"interface"`       // or what the rule says, if there is none
	Index     int    `json:"index,omitempty"` // 0 if there is none
	Rule      string `json:"rule,omitempty"`  // "" if none is for it any more
	// Because names the interface for whose sake this one, which is below it, is set.
	Because string      `json:"because,omitempty"`
	Want    sizing.Want `json:"want"`
	Sizes   netif.Sizes `json:"sizes,omitzero"` // that it has
	// State is applied, changed, impossible, conflict or waiting.
	State   string    `json:"state"`
	Notes   []string  `json:"notes,omitempty"` // what is not as was asked for
	Problem string    `json:"problem,omitempty"`
	Hint    string    `json:"hint,omitempty"`
	Since   time.Time `json:"since"` // of the state
}

// The states of interfaces.
const (
	SizesApplied    = "applied"
	SizesChanged    = "changed"    // by somebody else, and left alone
	SizesImpossible = "impossible" // for the kernel or a device
	SizesConflict   = "conflict"   // held by a command
	SizesWaiting    = "waiting"    // for an interface or a namespace, or for another try
)

// BigTCPNetwork is one network namespace of a Status that has rules.
type BigTCPNetwork struct {
	Netns      string `json:"netns,omitempty"` // path; "" for that of the agent
	Rules      int    `json:"rules"`
	Applied    int    `json:"applied"` // interfaces of each state
	Changed    int    `json:"changed"`
	Impossible int    `json:"impossible"`
	Conflict   int    `json:"conflict"`
	Waiting    int    `json:"waiting"`
	// Problems are the first of the interfaces that are not applied.
	Problems []BigTCPInterface `json:"problems"`
	Problem  string            `json:"problem,omitempty"` // of the namespace
	Hint     string            `json:"hint,omitempty"`
}
