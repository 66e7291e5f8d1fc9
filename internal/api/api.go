// SPDX-License-Identifier: Apache-2.0

// Package api defines the API of the agent: the requests, the answers, and the client. The API is HTTP with JSON over
// a Unix socket. Field names are stable.
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
	Starts  int       `json:"starts"` // starts of the agent since the creation of its state directory
	Policy  string    `json:"policy"`
	// PolicyProblem describes the difference between the policy in force and the policy file; "" for none.
	PolicyProblem string          `json:"policy_problem,omitempty"`
	PolicyHint    string          `json:"policy_hint,omitempty"`
	Services      []ServiceStatus `json:"services"`
	Tune          []TunedCgroup   `json:"tune"`
	Trace         []TracedCgroup  `json:"trace"`
	BigTCP        []BigTCPNetwork `json:"bigtcp"`
}

// TunedCgroup is one tuned cgroup of a Status.
type TunedCgroup struct {
	Cgroup   string `json:"cgroup"`
	Attached bool   `json:"attached"`
	Rules    int    `json:"rules"`
	Problem  string `json:"problem,omitempty"`
	Hint     string `json:"hint,omitempty"`
}

// ServiceStatus is one service of a Status.
type ServiceStatus struct {
	Name         string           `json:"name"`
	Steering     string           `json:"steering"`
	WhenEmpty    string           `json:"when_empty"` // "reject" or "standby N"
	Listeners    []string         `json:"listeners"`
	Slots        int              `json:"slots"`
	SlotsAs      string           `json:"slots_as,omitempty"` // another service with the same slots
	Ready        int              `json:"ready"`
	Nonce        string           `json:"nonce"`            // hexadecimal, with 0x
	PortsSteered bool             `json:"ports_steered"`    // the ports stay steered without members: by the keeper, or by lookup
	Keeper       int              `json:"keeper,omitempty"` // process id
	DeviceMap    *DeviceMapStatus `json:"device_map,omitempty"`
	// SplitDevices counts devices that have TCP connections with another member than that of their slot.
	SplitDevices int `json:"split_devices"`
	// AdoptedDevices counts devices that on_start: adopt assigned to the member that had their connections.
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

// WaitingStatus is a process that matches a rule and cannot be registered yet.
type WaitingStatus struct {
	Slot    *int   `json:"slot"` // null: first free slot
	PID     int    `json:"pid"`
	Command string `json:"command"`
	Source  string `json:"source"`
	Problem string `json:"problem"`
	Hint    string `json:"hint,omitempty"`
}

// RefusedStatus is a process that matches a rule and listens on members' ports, but is not admitted: it runs as
// another user, or in its own namespaces.
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

// Counts are totals since the creation of the pins.
type Counts struct {
	Connections uint64            `json:"connections"` // SYNs steered to the slot
	Datagrams   uint64            `json:"datagrams"`
	Diverted    uint64            `json:"diverted"` // SYNs and datagrams for the slot, sent to the standby slot
	Refused     map[string]uint64 `json:"refused"`  // SYNs and datagrams, by reason
}

// DeviceStatus is one entry of the answer to GET /v1/devices.
type DeviceStatus struct {
	Service     string     `json:"service"`
	Address     netip.Addr `json:"address"`
	Device      string     `json:"device,omitempty"` // name in the device map
	Slot        int        `json:"slot"`             // in the table in force
	LastSlot    *int       `json:"last_slot"`        // slot of the last packet; null: refused
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
	Ready   *bool      `json:"ready,omitempty"` // absent if unknown, as with --offline
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
	User      string           `json:"user,omitempty"` // user of the members, if the policy names exactly one
}

// MemberListener is the address and the ports that a member listens on for a listener of its service.
type MemberListener struct {
	Protocol string         `json:"protocol"` // tcp or udp
	Address  netip.AddrPort `json:"address"`  // address of the service
	V6Only   bool           `json:"v6only"`
	// First and Last are the range of ports of members; with reuseport, both are the port of Address.
	First uint16 `json:"first"`
	Last  uint16 `json:"last"`
}

// Plan is the answer to POST /v1/plan and /v1/apply.
type Plan struct {
	Policy  string    `json:"policy"`
	Changes []Change  `json:"changes"`
	Live    *TuneLive `json:"live,omitempty"` // result of an apply with Candidate.Live
}

// Change is one change of a plan.
type Change struct {
	Service   string `json:"service,omitempty"`
	Cgroup    string `json:"cgroup,omitempty"`    // cgroup of a change of tune or trace
	Netns     string `json:"netns,omitempty"`     // network namespace of Interface; "" for the agent's own
	Interface string `json:"interface,omitempty"` // network interface whose sizes or rule change
	Action    string `json:"action"`              // add, remove, change
	What      string `json:"what"`
	Effect    string `json:"effect,omitempty"` // effect on members and devices
}

// Candidate is the body of POST /v1/plan and /v1/apply. If Text and Path are empty, the agent reads its policy file.
type Candidate struct {
	Text     string `json:"text,omitempty"`
	Path     string `json:"path,omitempty"`
	Previous bool   `json:"previous,omitempty"` // use the policy before the last apply
	Live     bool   `json:"live,omitempty"`     // also tune open connections; apply only
}

// Failure is the body of every answer with an HTTP status other than 200.
type Failure struct {
	Error string `json:"error"`
	Hint  string `json:"hint,omitempty"`
	Code  int    `json:"code"`
}

// ParseAddresses parses IP addresses.
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
