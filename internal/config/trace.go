// SPDX-License-Identifier: Apache-2.0

package config

// TraceRule is one rule of trace: of which connections messages are traced, and
// how they are grouped. Of the rules of one cgroup the first that matches decides.
type TraceRule struct {
	// Name is the cgroup's unless the file gives one.
	Name   string `yaml:"name" form:"name" doc:"The rule's name, unique among those of trace; the name of the cgroup by default."`
	Cgroup string `yaml:"cgroup" required:"true" form:"tune_cgroup" doc:"The cgroup whose sockets are traced: a path below the cgroup v2 mount, / for all, or the name of a systemd unit that ends with .slice, .service or .scope."`
	Match  Match  `yaml:"match" doc:"What a connection must be, as in tune, without tag."`
	// Connections: one of so many is chosen; 1: all.
	Connections int `yaml:"connections" form:"sample" min:"1" max:"1000000" default:"1/1" doc:"The share of connections that are chosen, 1/1 to 1/1000000."`
	// Messages are those of a chosen connection.
	Messages TraceSampling `yaml:"messages" form:"trace_sampling" default:"1/100" doc:"The share of a chosen connection's messages that are traced, 1/1 to 1/1000000; or how many a second at most, 1/s to 100000/s."`
	// GroupBy has each kind at most once.
	GroupBy []TraceGroupBy `yaml:"group_by" form:"trace_group_by" doc:"What results are grouped by: remote/N (bits of IPv4 addresses; IPv6 has twice as many), port, service, cgroup, rule (of tune), arm (of its trial), or a list of them."`
	// Groups bounds how many groups a rule has; the rest is counted as other.
	Groups    int        `yaml:"groups" min:"1" max:"1024" default:"64" doc:"How many groups are kept at most; what is beyond is counted together, as other."`
	Stages    []Stage    `yaml:"stages" form:"trace_stages" doc:"The stages to measure: send, stack, qdisc, nic, network, rx_stack, reader; stack, qdisc, nic and network by default."`
	Protocols []Protocol `yaml:"protocols" form:"trace_protocols" doc:"tcp, udp or both, as a list; tcp by default."`
}

// TraceSampling says which messages of a connection are traced: one of OneIn, or at
// most PerSecond. The other is 0.
type TraceSampling struct {
	OneIn     int
	PerSecond int
}

// Stage is a leg of a message's way.
type Stage string

// The stages. Stack, qdisc, nic and network are the default.
const (
	StageSend    Stage = "send"     // sendmsg(2) itself; TCP only
	StageStack   Stage = "stack"    // sendmsg to the queueing discipline
	StageQdisc   Stage = "qdisc"    // to the driver
	StageNIC     Stage = "nic"      // to the hardware's stamp; TCP only
	StageNetwork Stage = "network"  // driver to the peer's acknowledgement; TCP only
	StageRXStack Stage = "rx_stack" // reaching the host to reaching the socket
	StageReader  Stage = "reader"   // to the application
)

// GroupKind is something to group by.
type GroupKind string

// The kinds of groups.
const (
	GroupRemote  GroupKind = "remote"
	GroupPort    GroupKind = "port" // that was connected to
	GroupService GroupKind = "service"
	GroupCgroup  GroupKind = "cgroup"
	GroupRule    GroupKind = "rule" // of tune
	GroupArm     GroupKind = "arm"  // of its trial
)

// TraceGroupBy is one thing to group by. IPv4 and IPv6 are bits of the remote
// address, of kind remote only.
type TraceGroupBy struct {
	Kind       GroupKind
	IPv4, IPv6 int
}
