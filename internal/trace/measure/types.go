// SPDX-License-Identifier: Apache-2.0

// Package measure reads the figures of the trace programs: where messages spend their time, by group
// and period, why one message was slow, and whether two groups differ.
package measure

import (
	"net/netip"
	"time"

	"sockeye/internal/config"
	"sockeye/internal/histogram"
)

// Total is the stage that is the whole of a message's way out: from its first
// known time to the peer's acknowledgement.
const Total config.Stage = "total"

// Histogram counts times of a stage, in nanoseconds.
type Histogram = histogram.Histogram[time.Duration, histogram.Times]

// Stages are all stages in the order of a message's way, total after those that
// it is made of.
var Stages = []config.Stage{
	config.StageSend, config.StageStack, config.StageQdisc, config.StageNIC, config.StageNetwork, Total,
	config.StageRXStack, config.StageReader,
}

// Outcome is what became of a message that was chosen: exactly one.
type Outcome string

// The outcomes of messages sent.
const (
	Acked          Outcome = "acked"
	Retransmitted  Outcome = "retransmitted"  // acknowledged, its last segment was sent again
	Overwritten    Outcome = "overwritten"    // a later message took its key before it was sent
	Coalesced      Outcome = "coalesced"      // acknowledged; its packet was joined to that of a later one, whose stamps are its own
	Missed         Outcome = "missed"         // acknowledged, and the kernel gave no stamp
	Unacknowledged Outcome = "unacknowledged" // the connection ended first
	Full           Outcome = "full"           // too many of its connection were under way
	Application    Outcome = "application"    // left to the application's own timestamps
	Refused        Outcome = "refused"        // the kernel did not take the request
	Sent           Outcome = "sent"           // a datagram that a driver had
	Discarded      Outcome = "discarded"      // a datagram that the host dropped before
	Split          Outcome = "split"          // a datagram that was cut into fragments before
	Parted         Outcome = "parted"         // acknowledged; its packet was joined to that of a later one, and split again before its end
)

// The outcomes of what was received.
const (
	Read    Outcome = "read"
	Dropped Outcome = "dropped" // no room in the socket
	Unread  Outcome = "unread"  // the connection ended first
	RXFull  Outcome = "rx_full" // too many were waiting
)

// Outcomes are those of messages sent, in the order of the program's counters.
var Outcomes = []Outcome{Acked, Retransmitted, Overwritten, Coalesced, Missed, Unacknowledged, Full, Application, Refused, Sent, Discarded, Split, Parted}

// Stamped are the outcomes of messages whose stages were measured.
var Stamped = []Outcome{Acked, Retransmitted, Coalesced, Sent}

// RXOutcomes are those of what was received, likewise.
var RXOutcomes = []Outcome{Read, Dropped, Unread, RXFull}

// Group is whose messages a result is of. What its rule does not group by is
// zero.
type Group struct {
	Rule     string          `json:"rule"`     // of trace
	Protocol config.Protocol `json:"protocol"` // "" of other
	Other    bool            `json:"other,omitempty"`
	Remote   netip.Prefix    `json:"remote,omitzero"`
	Port     uint16          `json:"port,omitempty"`
	Service  string          `json:"service,omitempty"` // "" or "none"
	Cgroup   string          `json:"cgroup,omitempty"`  // below the mount
	TuneRule string          `json:"tune_rule,omitempty"`
	Arm      string          `json:"arm,omitempty"` // treated, control
}

// Result is what was measured of a group.
type Result struct {
	Group    Group              `json:"group"`
	Chosen   uint64             `json:"chosen"`   // messages sent
	Outcomes map[Outcome]uint64 `json:"outcomes"` // of Chosen; those that are 0 may be absent
	InFlight uint64             `json:"in_flight"`
	Bytes    uint64             `json:"bytes"` // of those acknowledged
	// Unqueued and Undriven are acknowledged messages without the stamp of the
	// queueing discipline and of the driver: their stages are not known.
	Unqueued uint64 `json:"unqueued,omitempty"`
	Undriven uint64 `json:"undriven,omitempty"`

	RXChosen    uint64             `json:"rx_chosen,omitempty"`
	RXOutcomes  map[Outcome]uint64 `json:"rx_outcomes,omitempty"`
	RXWaiting   uint64             `json:"rx_waiting,omitempty"`   // for their reader, now
	RXOldest    time.Duration      `json:"rx_oldest_ns,omitempty"` // how long the oldest of them has waited
	RXUnstamped uint64             `json:"rx_unstamped,omitempty"` // arrivals that the host did not stamp

	// Stages that were not measured are absent.
	Stages map[config.Stage]*Histogram `json:"stages"`
}

// Period is what was measured in a time.
type Period struct {
	From    time.Time `json:"from"`
	To      time.Time `json:"to"`
	Results []Result  `json:"results"`
}

// Sample is one message at its end, with its connection as it was when it was
// sent.
type Sample struct {
	Ended   time.Time      `json:"ended"` // acknowledged, or given up
	Group   Group          `json:"group"`
	Cookie  uint64         `json:"cookie"` // of the socket
	Local   netip.AddrPort `json:"local"`
	Remote  netip.AddrPort `json:"remote"`
	Role    config.Role    `json:"role"`
	Outcome Outcome        `json:"outcome"`

	Key    uint32 `json:"key"`    // sequence number of its last byte
	Length uint32 `json:"length"` // bytes

	// Stages that are not known are absent. Total is always there; of a message
	// without an acknowledgement it is the time until it was given up.
	Stages map[config.Stage]time.Duration `json:"stages_ns"`

	Cwnd        uint32        `json:"cwnd"`        // packets
	InFlight    uint32        `json:"in_flight"`   // packets
	Outstanding uint32        `json:"outstanding"` // bytes sent and not acknowledged
	Unsent      uint32        `json:"unsent"`      // bytes, those of this message included
	Window      uint32        `json:"window"`      // of the peer, bytes from what it had acknowledged
	MSS         uint32        `json:"mss"`         // bytes
	SRTT        time.Duration `json:"srtt_ns"`     // smoothed
	MinRTT      time.Duration `json:"min_rtt_ns"`  // 0: not known
	PacingRate  uint64        `json:"pacing_rate"` // bytes a second; 0: not paced
	Nagle       bool          `json:"nagle"`       // no TCP_NODELAY
	Cork        bool          `json:"cork"`
	// Retransmits are those of the connection while the message was under way;
	// Repeats those of its own last segment.
	Retransmits uint32 `json:"retransmits"`
	Repeats     uint16 `json:"repeats"`
	// Requeued is the time from the queueing discipline to the last time there,
	// where a segment was sent again before a driver had it: the host dropped it.
	Requeued time.Duration `json:"requeued_ns,omitempty"`
	// WindowLimited and BufferLimited are how long, in the stage stack, the peer's
	// window and the send buffer held the connection, in whole ticks of the kernel.
	WindowLimited time.Duration `json:"window_limited_ns,omitempty"`
	BufferLimited time.Duration `json:"buffer_limited_ns,omitempty"`
}
