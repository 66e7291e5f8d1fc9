// SPDX-License-Identifier: Apache-2.0

// Package measure reads the measurements of the trace programs: time by stage, group and period, explanations of slow
// messages, and comparisons of groups.
package measure

import (
	"net/netip"
	"time"

	"sockeye/internal/config"
	"sockeye/internal/histogram"
)

// Total is the stage of the whole path of a sent message: from its first known time to the acknowledgement of the
// peer.
const Total config.Stage = "total"

// Histogram counts the times of a stage in nanoseconds.
type Histogram = histogram.Histogram[time.Duration, histogram.Times]

// Stages are all stages in the order of a message's path. Total follows the stages that it contains.
var Stages = []config.Stage{
	config.StageSend, config.StageStack, config.StageQdisc, config.StageNIC, config.StageNetwork, Total,
	config.StageRXStack, config.StageReader,
}

// Outcome is the outcome of a chosen message. Each message has exactly one.
type Outcome string

// The outcomes of sent messages.
const (
	Acked          Outcome = "acked"
	Retransmitted  Outcome = "retransmitted"  // acknowledged after a retransmission of its last segment
	Overwritten    Outcome = "overwritten"    // a later message in the same packet replaced its timestamp request
	Coalesced      Outcome = "coalesced"      // acknowledged; merged into the packet of a later message, with the timestamps of that packet
	Missed         Outcome = "missed"         // acknowledged without timestamps
	Unacknowledged Outcome = "unacknowledged" // connection closed before
	Full           Outcome = "full"           // too many messages of the connection in flight
	Application    Outcome = "application"    // the application uses timestamps itself
	Refused        Outcome = "refused"        // the kernel refused the timestamp request
	Sent           Outcome = "sent"           // datagram reached a driver
	Discarded      Outcome = "discarded"      // datagram dropped by the host before the driver
	Split          Outcome = "split"          // datagram split before the driver into packets that were not recognized
	Parted         Outcome = "parted"         // acknowledged; its last byte was sent in a packet without its key
)

// The outcomes of received segments and datagrams.
const (
	Read    Outcome = "read"
	Dropped Outcome = "dropped" // receive buffer full
	Unread  Outcome = "unread"  // socket closed before
	RXFull  Outcome = "rx_full" // too many were waiting to be read
)

// Outcomes are the outcomes of sent messages in the order of the program's counters.
var Outcomes = []Outcome{Acked, Retransmitted, Overwritten, Coalesced, Missed, Unacknowledged, Full, Application, Refused, Sent, Discarded, Split, Parted}

// Stamped are the outcomes of messages with measured stages.
var Stamped = []Outcome{Acked, Retransmitted, Coalesced, Sent}

// RXOutcomes are the outcomes of received segments and datagrams in the order of the program's counters.
var RXOutcomes = []Outcome{Read, Dropped, Unread, RXFull}

// Group identifies the messages of a result. Fields that the rule does not group by are zero.
type Group struct {
	Rule     string          `json:"rule"`     // trace rule
	Protocol config.Protocol `json:"protocol"` // "" for other
	Other    bool            `json:"other,omitempty"`
	Remote   netip.Prefix    `json:"remote,omitzero"`
	Port     uint16          `json:"port,omitempty"`
	Service  string          `json:"service,omitempty"` // "" or "none"
	Cgroup   string          `json:"cgroup,omitempty"`  // path below the mount
	TuneRule string          `json:"tune_rule,omitempty"`
	Arm      string          `json:"arm,omitempty"` // treated, control
}

// Result contains the measurements of a group.
type Result struct {
	Group    Group              `json:"group"`
	Chosen   uint64             `json:"chosen"`   // sent messages
	Outcomes map[Outcome]uint64 `json:"outcomes"` // of Chosen; zero values may be absent
	InFlight uint64             `json:"in_flight"`
	Bytes    uint64             `json:"bytes"` // bytes of acknowledged messages
	// Unqueued and Undriven count acknowledged messages without the timestamp of the queueing discipline or of the
	// driver. The stages that need this timestamp are unknown.
	Unqueued uint64 `json:"unqueued,omitempty"`
	Undriven uint64 `json:"undriven,omitempty"`

	RXChosen    uint64             `json:"rx_chosen,omitempty"`
	RXOutcomes  map[Outcome]uint64 `json:"rx_outcomes,omitempty"`
	RXWaiting   uint64             `json:"rx_waiting,omitempty"`   // waiting to be read now
	RXOldest    time.Duration      `json:"rx_oldest_ns,omitempty"` // age of the oldest waiting one
	RXUnstamped uint64             `json:"rx_unstamped,omitempty"` // received without a timestamp

	// Stages without measurements are absent.
	Stages map[config.Stage]*Histogram `json:"stages"`
}

// Period contains the measurements of a time interval.
type Period struct {
	From    time.Time `json:"from"`
	To      time.Time `json:"to"`
	Results []Result  `json:"results"`
}

// Sample is a message that has ended, with the state of its connection when it was sent.
type Sample struct {
	Ended   time.Time      `json:"ended"` // time of the acknowledgement, or of the end of the connection
	Group   Group          `json:"group"`
	Cookie  uint64         `json:"cookie"` // cookie of the socket
	Local   netip.AddrPort `json:"local"`
	Remote  netip.AddrPort `json:"remote"`
	Role    config.Role    `json:"role"`
	Outcome Outcome        `json:"outcome"`

	Key    uint32 `json:"key"`    // sequence number of its last byte
	Length uint32 `json:"length"` // bytes

	// Unknown stages are absent. Total is always present; for an unacknowledged message it is the time until the
	// connection closed.
	Stages map[config.Stage]time.Duration `json:"stages_ns"`

	Cwnd        uint32        `json:"cwnd"`        // packets
	InFlight    uint32        `json:"in_flight"`   // packets
	Outstanding uint32        `json:"outstanding"` // bytes in flight
	Unsent      uint32        `json:"unsent"`      // bytes, with this message
	Window      uint32        `json:"window"`      // peer's window in bytes after the last acknowledged byte
	MSS         uint32        `json:"mss"`         // bytes
	SRTT        time.Duration `json:"srtt_ns"`     // smoothed RTT
	MinRTT      time.Duration `json:"min_rtt_ns"`  // 0 if unknown
	PacingRate  uint64        `json:"pacing_rate"` // bytes per second; 0 without pacing
	Nagle       bool          `json:"nagle"`       // TCP_NODELAY is not set
	Cork        bool          `json:"cork"`
	// Retransmits counts the retransmissions of the connection while the message was in flight; Repeats those of
	// the last segment of the message.
	Retransmits uint32 `json:"retransmits"`
	Repeats     uint16 `json:"repeats"`
	// Requeued is the time between the first and the last arrival at the queueing discipline of a segment that was
	// retransmitted before it reached a driver: the host dropped the segment.
	Requeued time.Duration `json:"requeued_ns,omitempty"`
	// WindowLimited and BufferLimited are the times in the stage stack during which the peer's window and the
	// send buffer limited the connection, in whole kernel ticks.
	WindowLimited time.Duration `json:"window_limited_ns,omitempty"`
	BufferLimited time.Duration `json:"buffer_limited_ns,omitempty"`
}
