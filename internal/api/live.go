// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net/netip"
	"strings"
	"time"
)

// Frame is the state of the host at one time, for live views. GET /v1/live sends one per second; with the query
// replay=DURATION it sends the recorded ones, of the last hour, one every ten seconds, with at most 1,000 devices of a
// service. Rates are per second, over the time since the frame before.
type Frame struct {
	Time time.Time `json:"time"`
	// Seconds is the time since the frame before; 0: this is the first one, and its rates are 0.
	Seconds  float64       `json:"seconds"`
	Problem  string        `json:"problem,omitempty"` // of the policy, as Status.PolicyProblem
	Services []LiveService `json:"services"`
	Groups   []LiveGroup   `json:"groups"`
	Stuck    []LiveSocket  `json:"stuck"` // at most 100, those with the longest time first
	// Fleet is absent if the host is in no fleet, and in recorded frames.
	Fleet *FleetStatus `json:"fleet,omitempty"`
}

// LiveService is a service of a Frame.
type LiveService struct {
	Name    string  `json:"name"`
	Problem string  `json:"problem,omitempty"`
	Split   int     `json:"split"` // devices
	Refused float64 `json:"refused_per_second"`
	// Waiting has at most 32 processes of ServiceStatus.Waiting, and NotAdmitted those of ServiceStatus.Refused.
	Waiting     []WaitingStatus `json:"waiting,omitempty"`
	NotAdmitted []RefusedStatus `json:"refused,omitempty"`
	Slots       []LiveSlot      `json:"slots"`
	Devices     []LiveDevice    `json:"devices"` // sorted by address; those seen in the last ten minutes, or connected
	// Omitted counts devices beyond the limit of a frame, 20,000: those with the lowest rates.
	Omitted int `json:"omitted"`
}

// LiveSlot is a slot of a LiveService.
type LiveSlot struct {
	Slot        int     `json:"slot"`
	State       string  `json:"state"` // as SlotStatus.State
	Ready       bool    `json:"ready"`
	PID         int     `json:"pid,omitempty"`
	Command     string  `json:"command,omitempty"`
	Cgroup      string  `json:"cgroup,omitempty"` // of the member, below the mount
	Devices     int     `json:"devices"`
	Sessions    int     `json:"sessions"`
	Datagrams   float64 `json:"datagrams_per_second"`
	Bytes       float64 `json:"bytes_per_second"` // received by TCP
	Connections float64 `json:"connections_per_second"`
	Refused     float64 `json:"refused_per_second"`
	Drops       float64 `json:"drops_per_second"` // datagrams dropped at the member's sockets
	Queued      uint64  `json:"queued_bytes"`     // in the member's UDP receive buffers
	QueueLimit  uint64  `json:"queue_limit_bytes"`
	Backlog     uint64  `json:"backlog"`      // connections that the member has not accepted
	Unread      uint64  `json:"unread_bytes"` // in TCP receive buffers
	ZeroWindows int     `json:"zero_windows"` // sessions whose receive window is closed
	Waiting     uint64  `json:"waiting"`      // datagrams in the waiting room
	// WaitUntil is the end of the wait for the next member, as RoomStatus.Until; absent if the waiting room is closed.
	WaitUntil *time.Time `json:"wait_until,omitempty"`
	// ReaderLag is the age of the oldest traced segment or datagram that waits in a socket of the member's cgroup; absent
	// if the cgroup is not traced. A group of several members has the lag of the slowest one.
	ReaderLag *int64 `json:"reader_lag_ns,omitempty"`
}

// LiveDevice is a device of a LiveService: an address.
type LiveDevice struct {
	Address   netip.Addr `json:"address"`
	Device    string     `json:"device,omitempty"` // name in the device map
	Slot      int        `json:"slot"`
	Datagrams float64    `json:"datagrams_per_second"`
	Bytes     float64    `json:"bytes_per_second"` // received by TCP
	Refused   float64    `json:"refused_per_second"`
	Drops     float64    `json:"drops_per_second,omitempty"` // datagrams, as Dropped
	Dropped   *uint64    `json:"dropped,omitempty"`          // as DeviceStatus.Dropped
	Sessions  int        `json:"sessions"`
	LastSeen  time.Time  `json:"last_seen,omitzero"` // last connection request or datagram
	Pinned    bool       `json:"pinned,omitempty"`
	Split     bool       `json:"split,omitempty"`
}

// Total is a figure by which devices are compared: datagrams, refused packets and kilobytes per second.
func (d *LiveDevice) Total() float64 { return d.Datagrams + d.Refused + d.Bytes/1000 }

// LiveGroup is a rule of tune, or a group of a rule of trace.
type LiveGroup struct {
	Kind   string `json:"kind"`   // tune or trace
	Cgroup string `json:"cgroup"` // as in the policy
	Path   string `json:"path"`   // of the cgroup, or of the group by cgroup, below the mount; "" while the cgroup does not exist
	Name   string `json:"name"`   // of the rule, or of the group as in measure.Group.Label
	// Problem is why the cgroup is not tuned or traced.
	Problem string `json:"problem,omitempty"`
	// Connections is the number of open connections of a rule of tune, Retransmits the retransmitted segments per second.
	Connections uint64  `json:"connections,omitempty"`
	Retransmits float64 `json:"retransmits_per_second,omitempty"`
	// Rate has the new connections of a rule of tune per second, or the traced messages and segments of a group, over the
	// last 10 to 20 seconds.
	Rate float64 `json:"per_second"`
	// Stage is the stage of trace with the highest P99 in that time, Median and P99 are of this stage.
	Stage  string `json:"stage,omitempty"`
	Median int64  `json:"median_ns,omitempty"`
	P99    int64  `json:"p99_ns,omitempty"`
	// Oldest is the age of the oldest traced segment or datagram that waits in a socket; absent without such stages.
	Oldest *int64 `json:"oldest_ns,omitempty"`
}

// LiveSocket is a TCP connection that does not progress.
type LiveSocket struct {
	Service string         `json:"service,omitempty"`
	Local   netip.AddrPort `json:"local"`
	Remote  netip.AddrPort `json:"remote"`
	Slot    *int           `json:"slot,omitempty"`
	PID     int            `json:"pid,omitempty"`
	Reason  string         `json:"reason"`       // zero_window: the receive window is closed, because the member does not read
	Bytes   uint64         `json:"bytes"`        // that wait
	Since   float64        `json:"idle_seconds"` // since the last data
}

// SetReaderLags sets the lag of each member from the groups of trace that have its cgroup.
func (f *Frame) SetReaderLags() {
	for i := range f.Services {
		for j := range f.Services[i].Slots {
			slot := &f.Services[i].Slots[j]
			for k := range f.Groups {
				g := &f.Groups[k]
				if g.Oldest == nil || slot.Cgroup == "" || slot.Cgroup != g.Path && !strings.HasPrefix(slot.Cgroup, strings.TrimSuffix(g.Path, "/")+"/") {
					continue
				}
				if slot.ReaderLag == nil || *g.Oldest > *slot.ReaderLag {
					slot.ReaderLag = g.Oldest
				}
			}
		}
	}
}
