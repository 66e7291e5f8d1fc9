// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/netip"
	"time"
)

// Why is one entry of the answer to GET /v1/why: how a service treats the packets of an address, and what has happened to
// the device. Counts and rates are those of the address; other addresses of the device have their own.
type Why struct {
	Service string     `json:"service"`
	Address netip.Addr `json:"address"`
	// Host is the host of the fleet that serves the device; absent without a fleet, or if no host does. FleetBucket is the bucket
	// in the table of the fleet. If Effect is elsewhere or dropped, Bucket, Slot, Because, Until, Target and Plan are those of a
	// device of this host, and mean nothing for this one.
	Host        string `json:"host,omitempty"`
	FleetBucket *int   `json:"fleet_bucket,omitempty"`
	Device      string `json:"device,omitempty"` // name in the device map
	Prefix      string `json:"prefix,omitempty"` // prefix of the device map that contains the address
	Bucket      int    `json:"bucket"`
	Slot        int    `json:"slot"`
	// Because says what selects the slot: bucket, pin, or adopted (on_start: adopt).
	Because string     `json:"because"`
	Until   *time.Time `json:"until,omitempty"`  // end of the pin; absent: without end
	Target  *int       `json:"target,omitempty"` // slot to which the device will move; absent: it stays
	// Effect says what becomes of packets now: reach the member of the slot, diverted to the standby slot, wait, or
	// refused; elsewhere if another host of the fleet serves the device, or dropped if none does. Reason says why, unless
	// they reach the member at once.
	Effect string `json:"effect"`
	Reason string `json:"reason,omitempty"`
	// Member is the member of the slot, or of the standby slot if packets are diverted; absent: there is none.
	Member *WhyMember `json:"member,omitempty"`
	// Seen has the counts of the table of devices; absent: the address is not in the table.
	Seen  *WhySeen `json:"seen,omitempty"`
	Rates WhyRates `json:"rates"`
	// SessionCount is the number of open TCP connections, Sessions has at most 100 of them.
	SessionCount int          `json:"session_count"`
	Sessions     []WhySession `json:"sessions"`
	Split        bool         `json:"split"` // a session is at another member than the one that serves the address
	Plan         WhyPlan      `json:"plan"`
	Events       []Event      `json:"events"` // the last 10 of the device, of its slot, and of changes of the service
}

// WhyMember is the member that receives the packets of an address.
type WhyMember struct {
	Slot    int       `json:"slot"`
	PID     int       `json:"pid"`
	Command string    `json:"command"`
	Source  string    `json:"source"` // rule or command that made the process a member
	Since   time.Time `json:"since"`  // start of the process
}

// WhySeen are the counts of an address since it was last added to the table of devices.
type WhySeen struct {
	Connections uint64 `json:"connections"` // SYNs
	Datagrams   uint64 `json:"datagrams"`
	Refused     uint64 `json:"refused"` // SYNs and datagrams
	// Dropped are the datagrams that the kernel has dropped at the member, as in DeviceStatus.
	Dropped  *uint64   `json:"dropped,omitempty"`
	LastSeen time.Time `json:"last_seen"`
	LastSlot *int      `json:"last_slot"` // slot of the last packet; null: refused
}

// WhyRates are rates of an address, measured over Seconds.
type WhyRates struct {
	Seconds   float64 `json:"seconds"`
	Datagrams float64 `json:"datagrams_per_second"`
	Bytes     float64 `json:"bytes_per_second"` // received by TCP
	Refused   float64 `json:"refused_per_second"`
}

// WhySession is an open TCP connection of an address.
type WhySession struct {
	Local    netip.AddrPort `json:"local"`
	Remote   netip.AddrPort `json:"remote"`
	Slot     *int           `json:"slot,omitempty"` // of the member that has the connection; absent: no member
	PID      int            `json:"pid,omitempty"`
	Received uint64         `json:"received_bytes"`
	Unread   uint64         `json:"unread_bytes"`
}

// WhyPlan is what the policy file would change for an address.
type WhyPlan struct {
	Slot    *int     `json:"slot,omitempty"` // slot by the policy file; absent: Problem
	Device  string   `json:"device,omitempty"`
	Changes []Change `json:"changes"`           // of the service
	Problem string   `json:"problem,omitempty"` // why the slot is not known: the file is invalid, or does not have the service
}
