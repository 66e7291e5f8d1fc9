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
	EventsProblem string          `json:"events_problem,omitempty"` // why events are not recorded now
	Services      []ServiceStatus `json:"services"`
	Tune          []TunedCgroup   `json:"tune"`
	Trace         []TracedCgroup  `json:"trace"`
	BigTCP        []BigTCPNetwork `json:"bigtcp"`
	Fleet         *FleetStatus    `json:"fleet,omitempty"`
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
	WhenEmpty    string           `json:"when_empty"` // as text, as in "reject" or "standby 3"
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
	// Notes are the changes by commands that are in force, as in "slot 2 drains".
	Notes []string `json:"notes"`
	// AdoptedDevices counts devices that on_start: adopt assigned to the member that had their connections.
	AdoptedDevices int             `json:"adopted_devices"`
	Problem        string          `json:"problem,omitempty"`
	Hint           string          `json:"hint,omitempty"`
	Waiting        []WaitingStatus `json:"waiting"`
	Refused        []RefusedStatus `json:"refused"` // at most 16
	Formers        []FormerStatus  `json:"formers,omitempty"`
	// Drops are the members at whose sockets the kernel has dropped packets in the last ten minutes.
	Drops []DropStatus `json:"drops,omitempty"`
	// ProgramsReplaced counts how often another process has replaced or detached the program of a listener since the start of
	// the agent, which has attached the program again.
	ProgramsReplaced uint64 `json:"programs_replaced,omitempty"`
	// Bypass are sockets of other processes that receive packets to a listener past the service.
	Bypass []BypassStatus `json:"bypass,omitempty"`
}

// BypassStatus is a socket that the kernel prefers to those of the service.
type BypassStatus struct {
	Socket  string `json:"socket"` // as in "udp 192.0.2.1:4739"
	Takes   string `json:"takes"`  // as in "packets to 192.0.2.1"
	Cookie  uint64 `json:"cookie"`
	PID     int    `json:"pid,omitempty"`
	Command string `json:"command,omitempty"`
}

// DropStatus is a member at whose sockets of a protocol the kernel has dropped packets: datagrams (udp) without space in the
// receive buffer, or connection requests (tcp) beyond the backlog.
type DropStatus struct {
	Slot     int       `json:"slot"`
	PID      int       `json:"pid"`
	Protocol string    `json:"protocol"`
	Dropped  uint64    `json:"dropped"` // since the member opened the sockets
	Last     time.Time `json:"last"`    // of the last reading with new drops
	// Limit is the smallest receive buffer in bytes, as the kernel counts, or the smallest backlog in connections.
	Limit uint64 `json:"limit"`
	Hint  string `json:"hint"`
	// Devices are at most 5 addresses of the slot with the most dropped datagrams since the start of the agent; none if the
	// kernel does not report them.
	Devices []DroppedDevice `json:"devices,omitempty"`
}

// DroppedDevice is an address whose datagrams the kernel has dropped at a member.
type DroppedDevice struct {
	Address netip.Addr `json:"address"`
	Device  string     `json:"device,omitempty"` // name in the device map
	Dropped uint64     `json:"dropped"`
}

// DeviceMapStatus is the device map in force.
type DeviceMapStatus struct {
	Path     string `json:"path"`
	Prefixes int    `json:"prefixes"`
	Devices  int    `json:"devices"`
}

// FormerStatus is a running process whose slot another process has taken over.
type FormerStatus struct {
	Slot    int    `json:"slot"`
	PID     int    `json:"pid"`
	Command string `json:"command"`
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
	Service string      `json:"service"`
	Slot    int         `json:"slot"`
	State   string      `json:"state"`  // ready, drain or maint; removed: the policy no longer has the slot
	Weight  int         `json:"weight"` // 0 to 256
	Share   float64     `json:"share"`  // of the devices by the table in force, 0 to 1
	Pins    []PinStatus `json:"pins"`
	// Sessions counts the open TCP connections that the member has.
	Sessions int            `json:"sessions"`
	Ready    bool           `json:"ready"`
	PID      int            `json:"pid,omitempty"`
	Command  string         `json:"command,omitempty"`
	Source   string         `json:"source,omitempty"`
	Since    *time.Time     `json:"since,omitempty"` // start of the process
	Sockets  []SocketStatus `json:"sockets"`
	// Room is absent unless empty slots have a waiting room.
	Room *RoomStatus `json:"room,omitempty"`
	Counts
}

// RoomStatus is the waiting room of a slot. The counts of what was stored are totals since the creation of the pins, the
// others since the start of the agent.
type RoomStatus struct {
	Until       *time.Time `json:"until,omitempty"` // end of the wait; absent while no packets wait
	Filling     bool       `json:"filling"`         // the member receives the waiting packets
	Waiting     uint64     `json:"waiting"`         // datagrams that wait now
	Datagrams   uint64     `json:"datagrams"`       // datagrams that were stored
	Connections uint64     `json:"connections"`     // SYNs that were answered or held
	Full        uint64     `json:"full"`            // datagrams that were refused because the room was full
	Dropped     uint64     `json:"dropped"`         // datagrams of all slots that did not fit into the receive buffers, or were sent to the port of a room
	Replayed    uint64     `json:"replayed"`        // datagrams that a member has received later
	Lost        uint64     `json:"lost"`            // datagrams whose wait ended without a member
}

// TemplateStatus is a template of IPFIX or NetFlow v9.
type TemplateStatus struct {
	Service     string     `json:"service"`
	Source      string     `json:"source"`           // address and port of the exporter
	Device      string     `json:"device,omitempty"` // name in the device map
	Slot        int        `json:"slot"`
	Listener    string     `json:"listener"`
	Protocol    string     `json:"protocol"` // ipfix or netflow-v9
	Domain      uint32     `json:"domain"`   // observation domain, or source ID
	Template    uint16     `json:"template"`
	Options     bool       `json:"options"`
	Fields      int        `json:"fields"` // scope fields included
	ScopeFields int        `json:"scope_fields"`
	Learned     time.Time  `json:"learned"`
	Refreshed   time.Time  `json:"refreshed"`
	Replayed    *time.Time `json:"replayed,omitempty"`
	Replays     uint64     `json:"replays"` // of all templates of the domain
	// Elements are only present if the request names a device.
	Elements []TemplateField `json:"elements,omitempty"`
}

// TemplateField is a field of a template.
type TemplateField struct {
	Element    uint16 `json:"element"` // information element, or field type
	Enterprise uint32 `json:"enterprise,omitempty"`
	Length     uint16 `json:"length"` // bytes; 65535 is variable
	Scope      bool   `json:"scope,omitempty"`
}

// PinStatus is a device that is pinned to a slot.
type PinStatus struct {
	Device  string     `json:"device"` // name in the device map, address or prefix
	Until   *time.Time `json:"until,omitempty"`
	InForce bool       `json:"in_force"`          // false: the slot has no member yet, or the device waits for its turn
	Problem string     `json:"problem,omitempty"` // the device map makes the pin ineffective
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
	// Dropped counts the datagrams that the kernel has dropped at the member since the start of the agent, for lack of space
	// in the receive buffer; absent if the kernel does not report them (before Linux 6.10).
	Dropped  *uint64   `json:"dropped,omitempty"`
	LastSeen time.Time `json:"last_seen"`
	Pinned   bool      `json:"pinned"`
	Sessions int       `json:"sessions"` // open TCP connections
	// SessionSlots are the slots of the members that have the sessions; -1: no member.
	SessionSlots []int `json:"session_slots"`
	// Split is set if a session is at another member than the one that receives the device's datagrams.
	Split   bool   `json:"split"`
	Problem string `json:"problem,omitempty"` // reason why the agent cannot close the sessions of a split device
}

// WhereStatus is one entry of the answer to GET /v1/where.
type WhereStatus struct {
	Service string     `json:"service"`
	Address netip.Addr `json:"address"`
	Device  string     `json:"device,omitempty"`
	Bucket  int        `json:"bucket"`
	Slot    int        `json:"slot"`
	Pinned  bool       `json:"pinned"`          // by sockeye move or on_start: adopt
	Ready   *bool      `json:"ready,omitempty"` // absent if unknown, as with --offline
	Host    string     `json:"host,omitempty"`  // of the fleet
	// HostUnknown is why Host is absent in a fleet: there is no table, or no agent was asked.
	HostUnknown string `json:"host_unknown,omitempty"`
	FleetBucket *int   `json:"fleet_bucket,omitempty"` // in the table of the fleet
	// SlotUnknown is why Ready is absent although Host is another host, which tells Bucket, Slot and Pinned: they have no meaning then.
	SlotUnknown string `json:"slot_unknown,omitempty"`
}

// FleetWhere is the answer to GET /v1/fleet/where: what other hosts of the fleet tell about their devices.
type FleetWhere struct {
	Host   string            `json:"host"` // name of this host
	Asks   bool              `json:"asks"` // hosts can ask each other: the fleet is not one of a file
	Slots  []WhereStatus     `json:"slots"`
	Silent map[string]string `json:"silent"` // why a host did not tell all slots, by host
}

// Membership is the body of POST /v1/register, /v1/unregister and /v1/run.
type Membership struct {
	Service string `json:"service"`
	Slot    *int   `json:"slot"`
	PID     int    `json:"pid,omitempty"`
}

// SlotChange is the body of POST /v1/slot, which sets the state or the weight of a slot, or both.
type SlotChange struct {
	Service string `json:"service"`
	Slot    *int   `json:"slot"`
	State   string `json:"state,omitempty"` // ready, drain or maint
	Weight  *int   `json:"weight,omitempty"`
	DryRun  bool   `json:"dry_run,omitempty"`
}

// DeviceMove is the body of POST /v1/move, which pins a device to a slot.
type DeviceMove struct {
	Service string `json:"service"`
	Device  string `json:"device"`        // name in the device map, address or prefix
	All     bool   `json:"all,omitempty"` // instead of Device: remove all pins
	Slot    *int   `json:"slot"`          // null: remove the pin
	For     int64  `json:"for,omitempty"` // seconds; 0: without end
	DryRun  bool   `json:"dry_run,omitempty"`
}

// RebalanceRequest is the body of POST /v1/rebalance.
type RebalanceRequest struct {
	Service string  `json:"service"`
	Seconds float64 `json:"seconds"` // time of the measurement, 1 to 45
	Apply   bool    `json:"apply,omitempty"`
}

// Rebalance is one entry of the answer to POST /v1/rebalance. Loads are shares of the load of the service, 0 to 1: the
// mean of the share of the datagrams and the share of the TCP bytes.
type Rebalance struct {
	Service   string         `json:"service"`
	Datagrams float64        `json:"datagrams"` // per second
	Bytes     float64        `json:"bytes"`     // received by TCP, per second
	Devices   int            `json:"devices"`   // with a load
	Slots     []SlotLoad     `json:"slots"`
	Moves     []ProposedMove `json:"moves"`
	Applied   bool           `json:"applied"`
}

// SlotLoad is the load of a slot before and after the moves.
type SlotLoad struct {
	Slot   int     `json:"slot"`
	Fair   float64 `json:"fair"` // by the weights
	Before float64 `json:"before"`
	After  float64 `json:"after"`
}

// ProposedMove is a move of a device that makes the load more even.
type ProposedMove struct {
	Device string  `json:"device"`
	From   int     `json:"from"`
	To     int     `json:"to"`
	Load   float64 `json:"load"`
}

// MovesRequest is the body of POST /v1/moves, which stops or continues the moves of a service.
type MovesRequest struct {
	Service string `json:"service"`
	Stop    bool   `json:"stop"`
}

// MovesStatus is one entry of the answer to GET /v1/moves.
type MovesStatus struct {
	Service string `json:"service"`
	// State is none, running, stopped (by sockeye moves --cancel), or blocked: the target slots have no member yet.
	State     string         `json:"state"`
	Cause     string         `json:"cause,omitempty"` // the change that caused the moves
	Paced     bool           `json:"paced"`
	OnMove    string         `json:"on_move"` // reset or keep
	Done      int            `json:"done"`    // devices with sessions
	Running   []MovingDevice `json:"running"`
	Waiting   int            `json:"waiting"` // devices that wait for their turn: with sessions, or at a gate
	Gates     []int          `json:"gates"`   // slots that admit devices in turn, because their member is new
	Blocked   []BlockedMoves `json:"blocked"`
	Started   *time.Time     `json:"started,omitempty"`
	Remaining *float64       `json:"remaining_seconds,omitempty"` // estimate
}

// MovingDevice is a device that has moved and sends its initial dump.
type MovingDevice struct {
	Device   string    `json:"device"`
	Slot     int       `json:"slot"`
	Since    time.Time `json:"since"`
	Received uint64    `json:"received"` // bytes
	Rate     float64   `json:"rate"`     // bytes per second
}

// BlockedMoves are devices that stay at their slot until another slot has a member.
type BlockedMoves struct {
	Slot   int     `json:"slot"`
	Reason string  `json:"reason"` // "has no member" or "is in maint"
	Share  float64 `json:"share"`  // of all devices, 0 to 1
}

// ClaimedSlot is the answer to POST /v1/run.
type ClaimedSlot struct {
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
	Policy  string    `json:"policy,omitempty"` // path of the policy file; absent if the change is not one of a policy
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
