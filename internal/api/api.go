// SPDX-License-Identifier: Apache-2.0

// Package api has everything that travels over the agent's socket: the requests, the answers, and the
// client. The API is HTTP with JSON on a Unix socket. Names of fields are stable.
package api

import (
	"fmt"
	"net/netip"
	"time"

	"sockeye/internal/fault"
)

// Status is the answer to GET /v1/status.
type Status struct {
	Version string    `json:"version"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
	Starts  int       `json:"starts"` // of the agent, since its state directory was made
	Policy  string    `json:"policy"`
	// PolicyProblem tells how the policy in force differs from the policy file.
	PolicyProblem string          `json:"policy_problem,omitempty"`
	PolicyHint    string          `json:"policy_hint,omitempty"`
	Services      []ServiceStatus `json:"services"`
	Tune          []TunedCgroup   `json:"tune"`
	Trace         []TracedCgroup  `json:"trace"`
	BigTCP        []BigTCPNetwork `json:"bigtcp"`
}

// TunedCgroup is one cgroup of a Status that is tuned.
type TunedCgroup struct {
	Cgroup   string `json:"cgroup"`
	Attached bool   `json:"attached"`
	Rules    int    `json:"rules"`
	Problem  string `json:"problem,omitempty"`
	Hint     string `json:"hint,omitempty"`
}

// ServiceStatus is one service of a Status.
type ServiceStatus struct {
	Name      string           `json:"name"`
	Steering  string           `json:"steering"`
	WhenEmpty string           `json:"when_empty"` // "reject" or "standby N"
	Listeners []string         `json:"listeners"`
	Slots     int              `json:"slots"`
	SlotsAs   string           `json:"slots_as,omitempty"` // another service with the same slots
	Ready     int              `json:"ready"`
	Nonce     string           `json:"nonce"` // hexadecimal, with 0x
	Held      bool             `json:"held"`  // the ports are held when no member lives
	Keeper    int              `json:"keeper,omitempty"`
	DeviceMap *DeviceMapStatus `json:"device_map,omitempty"`
	// SplitDevices have TCP connections at another member than their slot's.
	SplitDevices int `json:"split_devices"`
	// AdoptedDevices are with the member that had their connections, by on_start.
	AdoptedDevices int             `json:"adopted_devices"`
	Problem        string          `json:"problem,omitempty"`
	Hint           string          `json:"hint,omitempty"`
	Waiting        []WaitingStatus `json:"waiting"`
	Refused        []RefusedStatus `json:"refused"` // at most 16
}

// DeviceMapStatus is the device map in force.
type DeviceMapStatus struct {
	Path     string `json:"path"`
	Prefixes int    `json:"prefixes"`
	Devices  int    `json:"devices"`
}

// WaitingStatus is a process that would be a member, and what it lacks.
type WaitingStatus struct {
	Slot    *int   `json:"slot"` // null: the first free one
	PID     int    `json:"pid"`
	Command string `json:"command"`
	Source  string `json:"source"`
	Problem string `json:"problem"`
	Hint    string `json:"hint,omitempty"`
}

// RefusedStatus is a process that a rule describes, that has ports of members, and that is none: it
// is of another user, or in namespaces of its own.
type RefusedStatus struct {
	PID     int    `json:"pid"`
	Command string `json:"command"`
	Source  string `json:"source"`
	Problem string `json:"problem"`
	Hint    string `json:"hint"`
}

// SlotStatus is one entry of the answer to GET /v1/slots.
type SlotStatus struct {
	Service string         `json:"service"`
	Slot    int            `json:"slot"`
	Ready   bool           `json:"ready"`
	PID     int            `json:"pid,omitempty"`
	Command string         `json:"command,omitempty"`
	Source  string         `json:"source,omitempty"`
	Since   *time.Time     `json:"since,omitempty"` // start of the process
	Sockets []SocketStatus `json:"sockets"`
	Counts
}

// SocketStatus is a registered socket.
type SocketStatus struct {
	Listener string `json:"listener"`
	Local    string `json:"local"`
	Cookie   uint64 `json:"cookie"`
}

// Counts are totals since the pins were made.
type Counts struct {
	Connections uint64            `json:"connections"` // SYNs steered here
	Datagrams   uint64            `json:"datagrams"`
	Diverted    uint64            `json:"diverted"` // meant for here, sent to the standby slot
	Refused     map[string]uint64 `json:"refused"`  // SYNs and datagrams, by reason
}

// DeviceStatus is one entry of the answer to GET /v1/devices.
type DeviceStatus struct {
	Service     string     `json:"service"`
	Address     netip.Addr `json:"address"`
	Device      string     `json:"device,omitempty"` // its name in the device map
	Slot        int        `json:"slot"`             // by the table in force
	Served      *int       `json:"served_by"`        // the slot of the last packet; null: refused
	Datagrams   uint64     `json:"datagrams"`
	Connections uint64     `json:"connections"`
	Refused     uint64     `json:"refused"`
	LastSeen    time.Time  `json:"last_seen"`
}

// WhereStatus is one entry of the answer to GET /v1/where.
type WhereStatus struct {
	Service string     `json:"service"`
	Address netip.Addr `json:"address"`
	Device  string     `json:"device,omitempty"`
	Bucket  int        `json:"bucket"`
	Slot    int        `json:"slot"`
	Ready   *bool      `json:"ready,omitempty"` // not known offline
}

// Membership is the body of POST /v1/register, /v1/unregister and /v1/run.
type Membership struct {
	Service string `json:"service"`
	Slot    *int   `json:"slot"`
	PID     int    `json:"pid,omitempty"`
}

// Place is the answer to POST /v1/run.
type Place struct {
	Membership
	Listeners []MemberListener `json:"listeners"`
	User      string           `json:"user,omitempty"` // of the members, if the policy names one
}

// MemberListener is what a member is to listen on for a listener of its service.
type MemberListener struct {
	Protocol string         `json:"protocol"` // tcp or udp
	Address  netip.AddrPort `json:"address"`  // of the service
	V6Only   bool           `json:"v6only"`
	// First and Last are the ports of members; with reuseport that of the address.
	First uint16 `json:"first"`
	Last  uint16 `json:"last"`
}

// Plan is the answer to POST /v1/plan and /v1/apply: what changes.
type Plan struct {
	Policy  string    `json:"policy"`
	Changes []Change  `json:"changes"`
	Live    *TuneLive `json:"live,omitempty"` // of an apply that asked for it
}

// Change is a step of a plan.
type Change struct {
	Service   string `json:"service,omitempty"`
	Cgroup    string `json:"cgroup,omitempty"`    // whose tuning changes
	Netns     string `json:"netns,omitempty"`     // of Interface; "" for the agent's own
	Interface string `json:"interface,omitempty"` // whose sizes change, or of which a rule does
	Action    string `json:"action"`              // add, remove, change
	What      string `json:"what"`
	Effect    string `json:"effect,omitempty"` // on what runs
}

// Candidate is the body of POST /v1/plan and /v1/apply. Without a text the
// agent reads its policy file.
type Candidate struct {
	Text     string `json:"text,omitempty"`
	Path     string `json:"path,omitempty"`
	Previous bool   `json:"previous,omitempty"` // the policy before the last apply
	Live     bool   `json:"live,omitempty"`     // also tune connections that are open; with apply only
}

// Failure is the body of every answer that is not a success.
type Failure struct {
	Error string `json:"error"`
	Hint  string `json:"hint,omitempty"`
	Code  int    `json:"code"`
}

// ParseAddresses reads IP addresses.
func ParseAddresses(texts []string) ([]netip.Addr, error) {
	addresses := make([]netip.Addr, len(texts))
	for i, text := range texts {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			return nil, fault.Usage(fmt.Errorf("%q is not an IP address", text), "as in 192.0.2.1 or 2001:db8::1")
		}
		addresses[i] = addr
	}
	return addresses, nil
}
