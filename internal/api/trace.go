// SPDX-License-Identifier: Apache-2.0

package api

import (
	"time"

	"sockeye/internal/trace/capture"
	"sockeye/internal/trace/measure"
)

// TraceStatus is the answer to GET /v1/trace.
type TraceStatus struct {
	// Timestamps reports whether the kernel has BPF timestamping. Without it, nothing sent over TCP is measured,
	// and Needs names what is missing.
	Timestamps bool           `json:"timestamps"`
	Needs      string         `json:"needs,omitempty"`
	Cgroups    []TracedCgroup `json:"cgroups"`
}

// TracedCgroup is one traced cgroup.
type TracedCgroup struct {
	Cgroup   string            `json:"cgroup"` // as in the policy
	Path     string            `json:"path"`   // below the cgroup v2 mount; "" while the cgroup does not exist
	Attached bool              `json:"attached"`
	Created  bool              `json:"created"` // created by the agent, which also removes it
	Problem  string            `json:"problem,omitempty"`
	Hint     string            `json:"hint,omitempty"`
	Since    time.Time         `json:"since,omitzero"` // start of the counts
	Programs []string          `json:"programs"`       // attached programs
	Memory   int64             `json:"memory_bytes"`   // approximate memory of the maps
	Rules    []TraceRuleStatus `json:"rules"`
}

// TraceRuleStatus is a rule of the policy and the stages that the kernel cannot measure.
type TraceRuleStatus struct {
	Name        string         `json:"name"`
	Match       string         `json:"match"`
	Connections string         `json:"connections"` // 1/10
	Messages    string         `json:"messages"`    // 1/100 or 100/s
	GroupBy     []string       `json:"group_by"`
	Groups      int            `json:"groups"` // in use
	Limit       int            `json:"limit"`  // maximum number of groups
	Stages      []string       `json:"stages"` // measured stages
	Protocols   []string       `json:"protocols"`
	Skipped     []TraceSkipped `json:"skipped"`
}

// TraceSkipped is a stage that this kernel cannot measure.
type TraceSkipped struct {
	Stage string `json:"stage"`
	Needs string `json:"needs"`
}

// TraceResults is the answer to GET /v1/trace/results: one period, from the start of the counts or as the query
// requests. The query has since, a duration, or from and to, times in RFC 3339; select has the syntax of
// measure.MatchGroup.
type TraceResults struct {
	measure.Period
	// Partial reports that the history starts after the requested time.
	Partial bool `json:"partial"`
}

// TraceHistory is the answer to GET /v1/trace/history, with the query of TraceResults: periods of 10 s, oldest first.
type TraceHistory struct {
	Slices  []measure.Period `json:"slices"`
	Partial bool             `json:"partial"`
}

// TraceSlow is one message of the answer to GET /v1/trace/slow?n=..&since=..&select=.., slowest first.
type TraceSlow struct {
	measure.Sample
	Explanation measure.Explanation `json:"explanation"`
}

// TraceSampleLine is one line of the answer to GET /v1/trace/samples?buffer=..&select=..,
// which ends when the client disconnects. Lost counts the samples that did not fit into the buffer since the start of
// the answer; a line with Lost follows at least once a second.
type TraceSampleLine struct {
	Sample *measure.Sample `json:"sample,omitempty"`
	Lost   uint64          `json:"lost,omitempty"`
}

// TracePacketLine is one line of the answer to
// GET /v1/trace/packets?local=..&remote=..|pid=..&fd=..&for=..&buffer=..&limit=..:
// first the connection or the UDP socket, then the events for packets.Assembler or packets.DatagramAssembler, last the
// number of lost events.
type TracePacketLine struct {
	Connection *TraceConnection `json:"connection,omitempty"`
	Event      *capture.Event   `json:"event,omitempty"`
	End        *TracePacketsEnd `json:"end,omitempty"`
}

// TraceConnection is a connection or a UDP socket with a packet trace.
type TraceConnection struct {
	Protocol string `json:"protocol"` // tcp or udp
	Local    string `json:"local"`
	Remote   string `json:"remote"` // "" for a UDP socket without a peer
	PID      int    `json:"pid"`
	FD       int    `json:"fd"`
	Command  string `json:"command"`
	Cookie   uint64 `json:"cookie"`
	// Clock is CLOCK_REALTIME - CLOCK_MONOTONIC in nanoseconds.
	Clock int64 `json:"clock_ns"`
	// Missing names the tracepoints that the kernel does not have.
	Missing []string `json:"missing"`
	// DropReasons has the names of the reasons in the events of UDP sockets; empty before Linux 5.17.
	DropReasons map[uint32]string `json:"drop_reasons,omitempty"`
}

// TracePacketsEnd is the end of a packet trace.
type TracePacketsEnd struct {
	Lost   uint64 `json:"lost"`   // events that did not fit into the buffer
	Reason string `json:"reason"` // time, limit, closed
}
