// SPDX-License-Identifier: Apache-2.0

package config

// TraceRule is one rule of trace: the connections whose messages are traced, and the groups of the results. The first
// matching rule of a cgroup applies.
type TraceRule struct {
	// Name is the cgroup's unless the file gives one.
	Name   string `yaml:"name" form:"name" doc:"The rule's name, unique among those of trace; the name of the cgroup by default."`
	Cgroup string `yaml:"cgroup" required:"true" form:"tune_cgroup" doc:"The cgroup whose sockets are traced: a path below the cgroup v2 mount, / for all, or the name of a systemd unit that ends with .slice, .service or .scope."`
	Match  Match  `yaml:"match" doc:"The conditions for a connection, as in tune, without tag."`
	// Connections is N of the share 1/N of connections that are selected; 1: all.
	Connections int `yaml:"connections" form:"sample" min:"1" max:"1000000" default:"1/1" doc:"The share of connections that are chosen, 1/1 to 1/1000000."`
	// Messages is the sampling of the messages of a selected connection.
	Messages TraceSampling `yaml:"messages" form:"trace_sampling" default:"1/100" doc:"The share of a chosen connection's messages that are traced, 1/1 to 1/1000000; or how many a second at most, 1/s to 100000/s."`
	// GroupBy has each kind at most once.
	GroupBy []TraceGroupBy `yaml:"group_by" form:"trace_group_by" doc:"The keys that group the results: remote/N (bits of IPv4 addresses; IPv6 has twice as many), port, service, cgroup, rule (of tune), arm (of its trial), or a list of them."`
	// Groups is the maximum number of groups of the rule; further ones are counted as other.
	Groups    int        `yaml:"groups" min:"1" max:"1024" default:"64" doc:"The maximum number of groups; further ones are counted together as other."`
	Stages    []Stage    `yaml:"stages" form:"trace_stages" doc:"The stages to measure: send, stack, qdisc, nic, network, rx_stack, reader; stack, qdisc, nic and network by default."`
	Protocols []Protocol `yaml:"protocols" form:"trace_protocols" doc:"tcp, udp or both, as a list; tcp by default."`
}

// TraceSampling selects the traced messages of a connection: one of OneIn, or at most PerSecond per second. The other
// field is 0.
type TraceSampling struct {
	OneIn     int
	PerSecond int
}

// Stage is a section of the path of a message.
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

// GroupKind is a kind of grouping key.
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

// TraceGroupBy is one grouping key. IPv4 and IPv6 are prefix lengths of the remote address, for the kind remote only.
type TraceGroupBy struct {
	Kind       GroupKind
	IPv4, IPv6 int
}
