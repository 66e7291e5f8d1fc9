// SPDX-License-Identifier: Apache-2.0

package api

import "time"

// Event is one line of the answer to GET /v1/events.
type Event struct {
	ID      uint64    `json:"id"` // increases by one with each recorded event
	Time    time.Time `json:"time"`
	Kind    string    `json:"kind"`
	Level   string    `json:"level"` // info, warning or error
	Text    string    `json:"text"`
	Service string    `json:"service,omitempty"`
	Slot    *int      `json:"slot,omitempty"`
	// Device is the name in the device map, or the address.
	Device    string `json:"device,omitempty"`
	Address   string `json:"address,omitempty"`
	PID       int    `json:"pid,omitempty"`
	Cgroup    string `json:"cgroup,omitempty"`
	Netns     string `json:"netns,omitempty"`
	Interface string `json:"interface,omitempty"`
	// Details has the remaining attributes, as text.
	Details map[string]string `json:"details,omitempty"`
}

// Kinds of events that the log itself adds.
const (
	// EventsSuppressed counts events of a kind that were too frequent to be recorded.
	EventsSuppressed = "events_suppressed"
	// EventsMissing counts events that a reader did not get: they were removed before, or the file is damaged.
	EventsMissing = "events_missing"
)
