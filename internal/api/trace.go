// SPDX-License-Identifier: Apache-2.0

package api

import (
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/trace/measure"
)

// TraceStatus is the answer to GET /v1/trace.
type TraceStatus struct {
	// Timestamps tells whether the kernel has BPF timestamping, without which
	// nothing that is sent over TCP is measured; Needs says what it would take.
	Timestamps bool           `json:"timestamps"`
	Needs      string         `json:"needs,omitempty"`
	Cgroups    []TracedCgroup `json:"cgroups"`
}

// TracedCgroup is one cgroup that is traced.
type TracedCgroup struct {
	Cgroup   string            `json:"cgroup"` // as in the policy
	Path     string            `json:"path"`   // below the cgroup v2 mount; "" while there is none
	Attached bool              `json:"attached"`
	Created  bool              `json:"created"` // by the agent, which removes it again
	Problem  string            `json:"problem,omitempty"`
	Hint     string            `json:"hint,omitempty"`
	Since    time.Time         `json:"since,omitzero"` // when the counts began
	Programs []string          `json:"programs"`       // that are attached
	Memory   int64             `json:"memory_bytes"`   // of its maps, about
	Rules    []TraceRuleStatus `json:"rules"`
}

// TraceRuleStatus is a rule, as the policy has it, and what the kernel lacks
// for it.
type TraceRuleStatus struct {
	Name        string         `json:"name"`
	Match       string         `json:"match"`
	Connections string         `json:"connections"` // 1/10
	Messages    string         `json:"messages"`    // 1/100 or 100/s
	GroupBy     []string       `json:"group_by"`
	Groups      int            `json:"groups"` // in use
	Limit       int            `json:"limit"`  // of groups
	Stages      []string       `json:"stages"` // that are measured
	Protocols   []string       `json:"protocols"`
	Skipped     []TraceSkipped `json:"skipped"`
}

// TraceSkipped is a stage that cannot be measured on this kernel.
type TraceSkipped struct {
	Stage string `json:"stage"`
	Needs string `json:"needs"`
}

// TraceResults is the answer to GET /v1/trace/results: one period, from when
// the counts began or as the query asks. The query's since is a duration, or
// from and to are times (RFC 3339); select is as trace.MatchGroup reads it.
type TraceResults struct {
	measure.Period
	// Partial: the history does not go back as far as was asked for.
	Partial bool `json:"partial"`
}

// TraceHistory is the answer to GET /v1/trace/history, with the same query:
// slices of 10 s, the oldest first.
type TraceHistory struct {
	Slices  []measure.Period `json:"slices"`
	Partial bool             `json:"partial"`
}

// TraceSlow is one message of the answer to GET /v1/trace/slow?n=..&since=..&select=..,
// the slowest first.
type TraceSlow struct {
	measure.Sample
	Explanation measure.Explanation `json:"explanation"`
}

// TraceSampleLine is one line of the answer to GET /v1/trace/samples?buffer=..&select=..,
// which goes on until the caller leaves. Lost counts the samples that found no
// room since the answer began; it comes at least once a second.
type TraceSampleLine struct {
	Sample *measure.Sample `json:"sample,omitempty"`
	Lost   uint64          `json:"lost,omitempty"`
}

// TracePacketLine is one line of the answer to
// GET /v1/trace/packets?local=..&remote=..|pid=..&fd=..&for=..&buffer=..&limit=..:
// first the connection, then what happens, as packets.Assembler takes it, last
// how much was lost.
type TracePacketLine struct {
	Connection *TraceConnection `json:"connection,omitempty"`
	Event      *bpf.PacketEvent `json:"event,omitempty"`
	End        *TracePacketsEnd `json:"end,omitempty"`
}

// TraceConnection is a connection whose packets are traced.
type TraceConnection struct {
	Local   string `json:"local"`
	Remote  string `json:"remote"`
	PID     int    `json:"pid"`
	FD      int    `json:"fd"`
	Command string `json:"command"`
	Cookie  uint64 `json:"cookie"`
	// Clock is CLOCK_REALTIME - CLOCK_MONOTONIC, nanoseconds.
	Clock int64 `json:"clock_ns"`
	// Missing are tracepoints that the kernel does not have.
	Missing []string `json:"missing"`
}

// TracePacketsEnd is how a trace of packets ended.
type TracePacketsEnd struct {
	Lost   uint64 `json:"lost"`   // events that found no room
	Reason string `json:"reason"` // time, limit, closed
}
