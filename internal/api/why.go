// SPDX-License-Identifier: Apache-2.0

package api

import "net/netip"

// Why is one entry of the answer to GET /v1/why: how a service treats an address, and what has happened to it.
type Why struct {
	Service string     `json:"service"`
	Address netip.Addr `json:"address"`
	// Prefix is the prefix of the device map that has the address, or "".
	Prefix string `json:"prefix,omitempty"`
	Device string `json:"device,omitempty"`
	Bucket int    `json:"bucket"`
	Slot   int    `json:"slot"`
	// Because says what selects the slot: bucket, pin, adopted, or standby.
	Because string      `json:"because"`
	Target  *int        `json:"target,omitempty"` // slot to which the device will move; absent: Slot
	Member  *SlotStatus `json:"member,omitempty"` // without sockets; absent: the slot is empty
	// Seen are the counts of the address, absent if it has sent nothing lately; Rates are of the last second.
	Seen  *DeviceStatus `json:"seen,omitempty"`
	Rates *LiveDevice   `json:"rates,omitempty"`
	// Planned is the slot by the policy file, absent if the file cannot be read or does not have the service.
	Planned *int `json:"planned,omitempty"`
	// Effect says what becomes of packets now: reach, wait, refused, diverted.
	Effect string  `json:"effect"`
	Events []Event `json:"events"` // the last 10 of the device and of its slot
}
