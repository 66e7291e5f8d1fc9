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
	Path     string           `json:"path"`   // below the cgroup v2 mount; "" while there is none
	Attached bool             `json:"attached"`
	Created  bool             `json:"created"` // by the agent, which removes it again
	Problem  string           `json:"problem,omitempty"`
	Hint     string           `json:"hint,omitempty"`
	Foreign  []TuneForeign    `json:"foreign"`
	Rules    []TuneRuleStatus `json:"rules"`
}

// TuneForeign is a sock_ops program of somebody else that runs for the same
// connections.
type TuneForeign struct {
	ID     uint32 `json:"id"`
	Cgroup string `json:"cgroup"`
	// Order is "after" for a program that may override what the rules set, and
	// "before" for one that the rules override.
	Order  string `json:"order"`
	Effect string `json:"effect"`
}

// TuneRuleStatus is a rule and what it has done. Counts are since the rule has
// this content; control is the trial's arm that is left alone.
type TuneRuleStatus struct {
	Name        string        `json:"name"`
	Match       string        `json:"match"`
	Set         []string      `json:"set"`
	React       string        `json:"react,omitempty"`
	Trial       string        `json:"trial,omitempty"`
	Skipped     []TuneSkipped `json:"skipped"`
	Connections uint64        `json:"connections"`
	Control     uint64        `json:"control"` // of the connections
	Adopted     uint64        `json:"adopted"` // of the connections, by apply --live
	Established uint64        `json:"established"`
	Closed      uint64        `json:"closed"`
	OptionsSet  uint64        `json:"options_set"`
	Failures    []TuneFailure `json:"failures"`
	Bytes       uint64        `json:"bytes"`    // acknowledged
	Segments    uint64        `json:"segments"` // sent with data
	Retransmits uint64        `json:"retransmits"`
	RTOs        uint64        `json:"rtos"`
	Reactions   uint64        `json:"reactions"`
	Tags        uint64        `json:"tags"`                 // peers whose tag led to the rule
	Older       int           `json:"older,omitempty"`      // versions of the rule that connections may still have
	Observe     string        `json:"observe"`              // live, close, off
	RTT         *TuneSpread   `json:"rtt_us,omitempty"`     // smoothed, microseconds
	Connect     *TuneSpread   `json:"connect_us,omitempty"` // from SYN to established, microseconds
}

// TuneSpread are quantiles.
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

// TuneFailure counts an option that could not be set.
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
	// Tuned says nothing of an MPTCP socket itself: see Subflows.
	Tuned
	MPTCP    string        `json:"mptcp,omitempty"`    // MPTCPMultipath or MPTCPFallback of an MPTCP socket
	Subflows []TuneSubflow `json:"subflows,omitempty"` // of an MPTCP socket
}

// What has become of an MPTCP socket's connection.
const (
	MPTCPMultipath = "multipath" // it is MPTCP, of one subflow or more
	MPTCPFallback  = "fallback"  // it is TCP: the peer, or something on the path, has no MPTCP
)

// TuneSubflow is a TCP connection that an MPTCP connection consists of.
type TuneSubflow struct {
	Local  string `json:"local"`
	Remote string `json:"remote"`
	Role   string `json:"role"`
	Tuned
}

// Tuned is what a TCP connection has got from the rules.
type Tuned struct {
	Rule      string       `json:"rule"`    // "" for none
	Current   bool         `json:"current"` // the rule is still in force
	Arm       string       `json:"arm,omitempty"`
	Adopted   bool         `json:"adopted"`
	Reacted   bool         `json:"reacted"`
	Candidate *int         `json:"candidate,omitempty"` // initial window that was tried
	Values    []TuneValue  `json:"values"`
	Steps     []match.Step `json:"steps"` // what the rules of now say
}

// TuneTrial is the answer to GET /v1/tune/trial.
type TuneTrial struct {
	Cgroup     string           `json:"cgroup"`
	Rule       string           `json:"rule"`
	Share      float64          `json:"share"` // of the connections that are left alone
	Comparison trial.Comparison `json:"comparison"`
	Summary    string           `json:"summary"`
}

// TuneLearned is one prefix of the answer to GET /v1/tune/learned.
type TuneLearned struct {
	Cgroup     string          `json:"cgroup"`
	Rule       string          `json:"rule"`
	Prefix     string          `json:"prefix"`
	Settled    bool            `json:"settled"`
	Window     int             `json:"window"` // in use, segments; 0: the kernel's own, until it has settled
	Candidates []TuneCandidate `json:"candidates"`
	Last       time.Time       `json:"last"` // evidence
}

// TuneCandidate is an initial window, and what is known of it.
type TuneCandidate struct {
	Window      int     `json:"window"`
	Tries       uint32  `json:"tries"`       // connections that began with it, as far as they are not forgotten
	Connections uint32  `json:"connections"` // of them, that sent the first bytes without a pause
	Lossy       uint32  `json:"lossy"`       // of these, that lost a segment of the first flight
	Time        float64 `json:"time_ms"`     // mean, until the first bytes were acknowledged
}

// TuneLive is the answer to POST /v1/tune/revert, and part of the answer to an
// apply that asks for it: what happened to connections that were open.
type TuneLive struct {
	Rules    map[string]int    `json:"rules"`    // connections that got a rule
	Options  int               `json:"options"`  // set, or set back
	Already  int               `json:"already"`  // connections that had their rule
	NoRule   int               `json:"no_rule"`  // connections that no rule matches
	Reverted int               `json:"reverted"` // connections that lost what they had got
	Gone     int               `json:"gone"`     // connections that have closed since
	Failures []TuneLiveFailure `json:"failures"` // options that the kernel refused
	Left     []TuneLeft        `json:"left"`     // options that were not taken back
	Problems []string          `json:"problems"` // processes and sockets that could not be read
}

// TuneRevert is the body of POST /v1/tune/revert: which rules; none are all.
type TuneRevert struct {
	Rules []string `json:"rules,omitempty"`
}

// TuneValue is a setting of a rule on one connection: what was asked for beside
// what the kernel reports.
type TuneValue struct {
	Option    string `json:"option"`
	Requested string `json:"requested"`
	// Effective is "" if nothing shows it.
	Effective string `json:"effective"`
	// Source is what the kernel was asked: an option of getsockopt(2) or a field
	// of TCP_INFO; "not readable" if nothing shows the value, "" if the option is
	// not for this connection.
	Source string `json:"source"`
	// Note names what the kernel makes of the value, and why it is not set.
	Note string `json:"note,omitempty"`
	// Differs says that the connection does not run with what was asked for. The
	// kernel's units alone are no difference, its bounds are.
	Differs bool `json:"differs"`
}

// TuneLiveFailure counts connections on which an option could not be set.
type TuneLiveFailure struct {
	Rule   string `json:"rule"`
	Option string `json:"option"`
	Error  string `json:"error"`
	Count  uint64 `json:"count"`
}

// TuneLeft counts connections on which an option was not taken back.
type TuneLeft struct {
	Rule        string `json:"rule"`
	Option      string `json:"option"`
	Reason      string `json:"reason"`
	Connections int    `json:"connections"`
}
