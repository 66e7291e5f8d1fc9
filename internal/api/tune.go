// SPDX-License-Identifier: Apache-2.0

package api

import (
	"time"

	"sockeye/internal/match"
	"sockeye/internal/tune/trial"
)

// TuneStatus is one cgroup of the answer to GET /v1/tune.
type TuneStatus struct {
	Cgroup   string           `json:"cgroup"` // as in the policy
	Path     string           `json:"path"`   // below the cgroup v2 mount; "" while the cgroup does not exist
	Attached bool             `json:"attached"`
	Created  bool             `json:"created"` // created by the agent, which also removes it
	Problem  string           `json:"problem,omitempty"`
	Hint     string           `json:"hint,omitempty"`
	Foreign  []TuneForeign    `json:"foreign"`
	Rules    []TuneRuleStatus `json:"rules"`
}

// TuneForeign is a sock_ops program of another owner that runs for the same connections.
type TuneForeign struct {
	ID     uint32 `json:"id"`
	Cgroup string `json:"cgroup"`
	// Order is "after" for a program that may override the rules, and "before" for a program that the rules
	// override.
	Order  string `json:"order"`
	Effect string `json:"effect"`
}

// TuneRuleStatus is a rule and its counters. A changed rule starts again at 0. The control arm of a trial has the
// connections without the settings.
type TuneRuleStatus struct {
	Name        string        `json:"name"`
	Match       string        `json:"match"`
	Set         []string      `json:"set"`
	React       string        `json:"react,omitempty"`
	Trial       string        `json:"trial,omitempty"`
	Skipped     []TuneSkipped `json:"skipped"`
	Connections uint64        `json:"connections"`
	Control     uint64        `json:"control"`    // connections in the control arm
	TunedLive   uint64        `json:"tuned_live"` // connections tuned by apply --live
	Established uint64        `json:"established"`
	Closed      uint64        `json:"closed"`
	OptionsSet  uint64        `json:"options_set"`
	Failures    []TuneFailure `json:"failures"`
	Bytes       uint64        `json:"bytes"`    // acknowledged
	Segments    uint64        `json:"segments"` // sent data segments
	Retransmits uint64        `json:"retransmits"`
	RTOs        uint64        `json:"rtos"`
	Reactions   uint64        `json:"reactions"`
	Tags        uint64        `json:"tags"`                 // connections whose rule was selected by the tag of the peer
	Older       int           `json:"older,omitempty"`      // earlier versions of the rule that open connections may have
	Observe     string        `json:"observe"`              // live, close, off
	RTT         *TuneSpread   `json:"rtt_us,omitempty"`     // smoothed, microseconds
	Connect     *TuneSpread   `json:"connect_us,omitempty"` // from SYN to established, microseconds
}

// TuneSpread has quantiles of a distribution.
type TuneSpread struct {
	P50 float64 `json:"p50"`
	P90 float64 `json:"p90"`
	P99 float64 `json:"p99"`
}

// TuneSkipped is an option that the kernel cannot set.
type TuneSkipped struct {
	Option string `json:"option"`
	Needs  string `json:"needs"`
}

// TuneFailure counts the failed attempts to set an option.
type TuneFailure struct {
	Option string `json:"option"`
	Error  string `json:"error"` // name of the errno
	Count  uint64 `json:"count"`
}

// TuneExplanation is one cgroup of the answer to GET /v1/tune/explain.
type TuneExplanation struct {
	Cgroup string       `json:"cgroup"`
	Role   string       `json:"role"`
	Rule   string       `json:"rule"` // "" for none
	Steps  []match.Step `json:"steps"`
	Set    []string     `json:"set"`
}

// TuneSocket is the answer to GET /v1/tune/socket: a live connection.
type TuneSocket struct {
	PID     int    `json:"pid"`
	FD      int    `json:"fd"`
	Command string `json:"command"`
	Local   string `json:"local"`
	Remote  string `json:"remote"`
	Role    string `json:"role"`
	Cgroup  string `json:"cgroup"`
	// Tuned is empty for an MPTCP socket, whose Subflows have it.
	Tuned
	MPTCP    string        `json:"mptcp,omitempty"`    // MPTCPMultipath or MPTCPFallback; "" for a TCP socket
	Subflows []TuneSubflow `json:"subflows,omitempty"` // subflows of an MPTCP socket
}

// States of the connection of an MPTCP socket.
const (
	MPTCPMultipath = "multipath" // MPTCP with one or more subflows
	MPTCPFallback  = "fallback"  // TCP: the peer or a middlebox does not support MPTCP
)

// TuneSubflow is one TCP subflow of an MPTCP connection.
type TuneSubflow struct {
	Local  string `json:"local"`
	Remote string `json:"remote"`
	Role   string `json:"role"`
	Tuned
}

// Tuned is the rule and the settings of a TCP connection.
type Tuned struct {
	Rule      string       `json:"rule"`    // "" for none
	Current   bool         `json:"current"` // the rule is still in force
	Arm       string       `json:"arm,omitempty"`
	TunedLive bool         `json:"tuned_live"`
	Reacted   bool         `json:"reacted"`
	Candidate *int         `json:"candidate,omitempty"` // initial window under trial, segments
	Values    []TuneValue  `json:"values"`
	Steps     []match.Step `json:"steps"` // evaluation of the rules in force
}

// TuneTrial is the answer to GET /v1/tune/trial.
type TuneTrial struct {
	Cgroup     string           `json:"cgroup"`
	Rule       string           `json:"rule"`
	Share      float64          `json:"share"` // share of connections in the control arm
	Comparison trial.Comparison `json:"comparison"`
	Summary    string           `json:"summary"`
}

// TuneLearned is one prefix of the answer to GET /v1/tune/learned.
type TuneLearned struct {
	Cgroup     string          `json:"cgroup"`
	Rule       string          `json:"rule"`
	Prefix     string          `json:"prefix"`
	Settled    bool            `json:"settled"`
	Window     int             `json:"window"` // initial window in use, segments; 0: the kernel's default, until settled
	Candidates []TuneCandidate `json:"candidates"`
	Last       time.Time       `json:"last"` // time of the last measurement
}

// TuneCandidate is an initial window and its measurements. Old measurements decay with the half-life forget.
type TuneCandidate struct {
	Window      int     `json:"window"`      // segments
	Tries       uint32  `json:"tries"`       // connections that started with this window
	Connections uint32  `json:"connections"` // tries that sent the first flight without a pause
	Lossy       uint32  `json:"lossy"`       // Connections that lost a segment of the first flight
	Time        float64 `json:"time_ms"`     // mean time until the acknowledgement of the first flight
}

// TuneLive is the answer to POST /v1/tune/revert, and part of the answer to an apply with live: the changes to open
// connections.
type TuneLive struct {
	Rules       map[string]int    `json:"rules"`        // connections that got a rule
	Options     int               `json:"options"`      // options set or reverted
	Already     int               `json:"already"`      // connections that already had their rule
	NoRule      int               `json:"no_rule"`      // connections without a matching rule
	Reverted    int               `json:"reverted"`     // connections with reverted options
	Gone        int               `json:"gone"`         // connections that have closed since
	Failures    []TuneLiveFailure `json:"failures"`     // options that the kernel refused
	NotReverted []TuneNotReverted `json:"not_reverted"` // options that were not reverted
	Problems    []string          `json:"problems"`     // processes and sockets that could not be read
}

// TuneRevert is the body of POST /v1/tune/revert. An empty list selects all rules.
type TuneRevert struct {
	Rules []string `json:"rules,omitempty"`
}

// TuneValue is a setting of a rule on one connection: the requested value and the value that the kernel reports.
type TuneValue struct {
	Option    string `json:"option"`
	Requested string `json:"requested"`
	// Effective is "" if the value cannot be read.
	Effective string `json:"effective"`
	// Source is the source of Effective: an option of getsockopt(2) or a field of TCP_INFO; "not readable" if the
	// kernel does not report the value, "" if the option does not apply to this connection.
	Source string `json:"source"`
	// Note explains how the kernel changes the value, or why the value is not set.
	Note string `json:"note,omitempty"`
	// Differs reports that the effective value differs from the requested one. Rounding to the kernel's units is
	// not a difference; its limits are.
	Differs bool `json:"differs"`
}

// TuneLiveFailure counts connections for which the kernel refused an option.
type TuneLiveFailure struct {
	Rule   string `json:"rule"`
	Option string `json:"option"`
	Error  string `json:"error"`
	Count  uint64 `json:"count"`
}

// TuneNotReverted counts connections whose option was not reverted.
type TuneNotReverted struct {
	Rule        string `json:"rule"`
	Option      string `json:"option"`
	Reason      string `json:"reason"`
	Connections int    `json:"connections"`
}
