// SPDX-License-Identifier: Apache-2.0

package config

// TuneRule is one rule of tune: the matching connections, and the options to set. The first matching rule of a cgroup
// applies.
type TuneRule struct {
	Name string `yaml:"name" required:"true" form:"name" doc:"The rule's name, unique in the policy."`
	// Cgroup is a clean path below the cgroup v2 mount, starting with "/", or
	// the name of a systemd unit: one that ends with .slice, .service or .scope
	// and has no slash.
	Cgroup string `yaml:"cgroup" required:"true" form:"tune_cgroup" doc:"The cgroup whose connections the rule is for: a path below the cgroup v2 mount, / for all, or the name of a systemd unit that ends with .slice, .service or .scope."`
	Match  Match  `yaml:"match" doc:"The conditions for a connection; all given conditions must hold. All connections of the cgroup by default."`
	// Set is in the order of TuneOptions.
	Set   []Setting `yaml:"set" form:"settings" doc:"The options to set, and their values."`
	React *React    `yaml:"react" form:"react" doc:"Changes connections with many retransmissions or timeouts."`
	Trial *Trial    `yaml:"trial" doc:"Excludes a random share of the connections as a control group."`
	// Tag is written into the SYN and the first data, 1 to 16 bytes; nil for none.
	Tag []byte `yaml:"tag" form:"tag" doc:"The tag that this host writes into the SYN and the first data: 1 to 16 printable ASCII characters, or 0x and 1 to 16 bytes in hexadecimal."`
	// Observe selects the measurements of connections.
	Observe Observe `yaml:"observe" enum:"live,close,off" default:"live" doc:"The measurements of a connection. live: while it is open. close: once, when it closes. off: only the number of connections."`
	// Optional skips options that the kernel does not support, instead of refusing the rule.
	Optional bool `yaml:"optional" default:"false" doc:"Skip options that the kernel does not support, instead of refusing the rule."`
}

// Observe selects the measurements of a rule's connections.
type Observe string

// The values of Observe. Live is the default.
const (
	ObserveLive  Observe = "live"  // while they are open, a callback for each RTT sample
	ObserveClose Observe = "close" // once, when they close
	ObserveOff   Observe = "off"   // only that they were there
)

// Setting is an option of a rule and its value, in the unit of its TuneOption.
type Setting struct {
	Option  string
	Value   int64
	Text    string   // for options of kind text
	Explore *Explore // for initial_cwnd only, instead of Value
}

// Explore has the parameters for learning the initial window of each prefix of remote addresses.
type Explore struct {
	Candidates []int // ascending, 2 to 8
	IPv4, IPv6 int   // prefix lengths
	// Share is the share of a prefix' connections that try a candidate before the prefix has settled, Probe the
	// share afterwards; 0 to 1.
	Share, Probe float64
	Bytes        int64 // bytes of the first flight, which is timed
	Evidence     int   // number of connections that a candidate needs for a decision
	Forget       int64 // half-life of the measurements, microseconds
}

// React changes the options of connections with many retransmissions or timeouts.
type React struct {
	// Retransmits is the threshold of the share of retransmitted segments, 0 to 1; 0: no condition.
	Retransmits float64 `yaml:"retransmits" form:"above_percentage" doc:"React when more of the data segments are retransmitted: > 0.1% to > 50%."`
	// RTOs is the threshold of the number of retransmission timeouts; -1: no condition.
	RTOs int `yaml:"rtos" form:"above_number" min:"0" max:"100" doc:"React after more retransmission timeouts: > 0 to > 100."`
	// Sample is N of the share 1/N of connections that are watched; 1: all.
	Sample int       `yaml:"sample" form:"sample" min:"1" max:"1000000" default:"1/1" doc:"The share of connections that are watched, 1/1 to 1/1000000."`
	Set    []Setting `yaml:"set" required:"true" form:"reactions" doc:"The options to set in a reaction, and their values."`
}

// Trial excludes a random share of a rule's connections as a control group.
type Trial struct {
	// Control is the share of the control group, 0 to 1.
	Control float64 `yaml:"control" required:"true" form:"percentage" min:"0.1%" max:"90%" doc:"The share of connections in the control group, 0.1% to 90%."`
}

// TuneKind is the notation of an option's value.
type TuneKind string

// The kinds of values, and the unit of Setting.Value.
const (
	KindSize     TuneKind = "size"     // bytes: 150KB, 1.5MB; KB is 1000, KiB 1024
	KindDuration TuneKind = "duration" // microseconds: 10ms
	KindRate     TuneKind = "rate"     // bytes a second, written in bits: 2Gbit/s
	KindNumber   TuneKind = "number"
	KindSwitch   TuneKind = "switch" // 0 or 1: true, false
	KindText     TuneKind = "text"
)

// TuneOption is an option that a rule can set.
type TuneOption struct {
	Name     string
	Kind     TuneKind
	Min, Max int64 // in the unit of the kind
	// React reports whether a reaction can set the option.
	React bool
	// Handshake reports that the option has an effect only before the connection is established.
	Handshake bool
	Doc       string
}

const (
	minute    = 60 * 1000 * 1000            // microseconds
	maxBuffer = 1000 * 1000 * 1000          // bytes; the kernel doubles it into an int
	maxPacing = 34 * 1000 * 1000 * 1000 / 8 // bytes a second; bpf_setsockopt takes 32 bits, and all ones means no limit
)

// TuneOptions lists the options of rules, in the order in which they are set.
var TuneOptions = []TuneOption{
	{"syn_rto", KindDuration, 1000, 2 * minute, false, true, "First retransmission timeout of a SYN that connect(2) sends; in whole jiffies of the kernel."},
	{"synack_rto", KindDuration, 1000, 2 * minute, false, true, "First retransmission timeout of a SYN-ACK; in whole jiffies of the kernel."},
	{"initial_rwnd", KindNumber, 1, 1 << 15, false, true, "Initial receive window, in MSS; on connect bounded by the receive buffer."},
	{"ecn", KindSwitch, 0, 1, false, true, "Request and accept ECN regardless of net.ipv4.tcp_ecn; false: as the sysctl says."},
	{"base_rtt", KindDuration, 1, 10 * 1000 * 1000, false, false, "Base RTT for congestion controls that ask for it (nv)."},
	{"sndbuf", KindSize, 2048, maxBuffer, true, false, "SO_SNDBUF: the kernel doubles it, up to twice net.core.wmem_max, and stops autotuning."},
	{"rcvbuf", KindSize, 1024, maxBuffer, true, false, "SO_RCVBUF: the kernel doubles it, up to twice net.core.rmem_max, and stops autotuning."},
	{"rcvlowat", KindSize, 1, maxBuffer, true, false, "SO_RCVLOWAT: number of bytes that make a socket readable; on connect at most half of the maximum of net.ipv4.tcp_rmem."},
	{"pacing_rate", KindRate, 1000, maxPacing, true, false, "SO_MAX_PACING_RATE: upper bound of the sending rate."},
	{"mark", KindNumber, 0, 1<<32 - 1, true, false, "SO_MARK: firewall mark of sent packets; an open connection keeps its route."},
	{"keepalive", KindSwitch, 0, 1, true, false, "SO_KEEPALIVE."},
	{"reuse_address", KindSwitch, 0, 1, false, false, "SO_REUSEADDR."},
	{"bind_ifindex", KindNumber, 0, 1<<31 - 1, false, false, "SO_BINDTOIFINDEX: the interface, by its index in the process' network namespace; 0: any."},
	{"txrehash", KindSwitch, 0, 1, true, false, "SO_TXREHASH: choose another path (hash, flow label) after timeouts."},
	{"congestion", KindText, 0, 0, true, false, "TCP_CONGESTION: the congestion control, by name."},
	{"initial_cwnd", KindNumber, 1, 1 << 15, false, false, "Initial congestion window, in segments; or {explore: ...} to learn it."},
	{"cwnd_clamp", KindNumber, 1, 1<<31 - 1, true, false, "Upper bound of the congestion window and of ssthresh, in segments."},
	{"delack_max", KindDuration, 8000, 200 * 1000, true, false, "Longest delay of an acknowledgement; at least two jiffies of the kernel."},
	{"rto_min", KindDuration, 8000, 200 * 1000, true, false, "Smallest retransmission timeout; at least two jiffies of the kernel."},
	{"rto_max", KindDuration, 1000 * 1000, 2 * minute, true, false, "TCP_RTO_MAX_MS: largest retransmission timeout."},
	{"notsent_lowat", KindSize, 1, 1<<31 - 1, true, false, "TCP_NOTSENT_LOWAT: number of unsent bytes below which a socket is writable."},
	{"window_clamp", KindSize, 1, 1<<31 - 1, true, false, "TCP_WINDOW_CLAMP: upper bound of the advertised window when the connection opens; the kernel changes the bound when data arrives."},
	{"user_timeout", KindDuration, 1000, 24 * 60 * minute, true, false, "TCP_USER_TIMEOUT: longest time that sent data may stay unacknowledged."},
	{"keepalive_idle", KindDuration, 1000 * 1000, 32767 * 1000 * 1000, true, false, "TCP_KEEPIDLE, in whole seconds."},
	{"keepalive_interval", KindDuration, 1000 * 1000, 32767 * 1000 * 1000, true, false, "TCP_KEEPINTVL, in whole seconds."},
	{"keepalive_probes", KindNumber, 1, 127, true, false, "TCP_KEEPCNT."},
	{"syn_retries", KindNumber, 1, 127, false, true, "TCP_SYNCNT: retransmissions of a SYN before connect(2) fails; Linux 6.5 and later add net.ipv4.tcp_syn_linear_timeouts (4)."},
	{"nodelay", KindSwitch, 0, 1, true, false, "TCP_NODELAY."},
	{"mss", KindNumber, 88, 32767, false, true, "TCP_MAXSEG: largest segment, in bytes; only before the SYN is sent."},
	{"thin_linear_timeouts", KindSwitch, 0, 1, true, false, "TCP_THIN_LINEAR_TIMEOUTS: no exponential backoff on thin streams."},
	{"tos", KindNumber, 0, 255, true, false, "IP_TOS, on IPv4 sockets."},
	{"traffic_class", KindNumber, 0, 255, true, false, "IPV6_TCLASS, on IPv6 sockets."},
	// After tos, which sets the priority too.
	{"priority", KindNumber, 0, 6, true, false, "SO_PRIORITY: band or class of the queueing discipline; without it tos sets it on IPv4."},
	{"auto_flow_label", KindSwitch, 0, 1, false, false, "IPV6_AUTOFLOWLABEL, on IPv6 sockets: label flows by their hash."},
	{"flow_label", KindNumber, 0, 1<<20 - 1, true, false, "IPv6 flow label; 0: a random one. The label is the socket's hash, which also selects paths and queues, on IPv4 too. The kernel replaces the hash after retransmission timeouts, unless txrehash is off."},
}

// FindTuneOption returns the option with a name.
func FindTuneOption(name string) (TuneOption, bool) {
	for _, o := range TuneOptions {
		if o.Name == name {
			return o, true
		}
	}
	return TuneOption{}, false
}
