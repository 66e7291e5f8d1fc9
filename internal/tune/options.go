// SPDX-License-Identifier: Apache-2.0

// Package tune turns the rules of the policy into what the tune program
// reads, and what the program counts into what a person reads.
package tune

import (
	"math/bits"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
)

// Option is how the kernel knows an option of the policy.
type Option struct {
	config.TuneOption
	// ID stands for the option in counts of failures.
	ID int
	// Level and Number are those of setsockopt(2), or of bpf_setsockopt alone.
	// Both are 0 where the program answers a question of the kernel instead.
	Level, Number uint32
	// Phases say when it is set; see enum tune_phase. 0: never, it is an answer.
	Phases uint16
	// Unit divides the policy's value into the kernel's.
	Unit int64
	// Since is the kernel version that brought it to bpf_setsockopt, as far as
	// it is known; only for people, as vendors carry features back.
	Since string
}

// Not in golang.org/x/sys/unix: include/uapi/linux/{bpf,tcp}.h and
// include/uapi/asm-generic/socket.h of Linux 6.18.
const (
	tcpBPFInitialWindow = 1001
	tcpBPFCwndClamp     = 1002
	tcpBPFDelackMax     = 1003
	tcpBPFRTOMin        = 1004
	tcpRTOMaxMs         = 44
	soTxRehash          = 74
)

const (
	atStart = bpf.TunePhaseConnect | bpf.TunePhasePassive
	always  = atStart | bpf.TunePhaseLive
	opened  = bpf.TunePhaseActive | bpf.TunePhasePassive
)

var kernelOptions = map[string]Option{
	"syn_rto":      {Since: "4.13"},
	"synack_rto":   {Since: "4.13"},
	"initial_rwnd": {Since: "4.13"},
	"ecn":          {Since: "4.13"},
	"base_rtt":     {Since: "4.15"},

	"sndbuf":        {Level: unix.SOL_SOCKET, Number: unix.SO_SNDBUF, Phases: always, Since: "4.13"},
	"rcvbuf":        {Level: unix.SOL_SOCKET, Number: unix.SO_RCVBUF, Phases: always, Since: "4.13"},
	"rcvlowat":      {Level: unix.SOL_SOCKET, Number: unix.SO_RCVLOWAT, Phases: always, Since: "4.13"},
	"pacing_rate":   {Level: unix.SOL_SOCKET, Number: unix.SO_MAX_PACING_RATE, Phases: always, Since: "4.13"},
	"priority":      {Level: unix.SOL_SOCKET, Number: unix.SO_PRIORITY, Phases: always, Since: "4.13"},
	"mark":          {Level: unix.SOL_SOCKET, Number: unix.SO_MARK, Phases: always, Since: "4.13"},
	"keepalive":     {Level: unix.SOL_SOCKET, Number: unix.SO_KEEPALIVE, Phases: always, Since: "5.9"},
	"reuse_address": {Level: unix.SOL_SOCKET, Number: unix.SO_REUSEADDR, Phases: always, Since: "6.1"},
	"bind_ifindex":  {Level: unix.SOL_SOCKET, Number: unix.SO_BINDTOIFINDEX, Phases: bpf.TunePhaseConnect, Since: "6.1"},
	"txrehash":      {Level: unix.SOL_SOCKET, Number: soTxRehash, Phases: always, Since: "6.1"},

	// dctcp looks whether ECN was agreed on when it is set, and is reno without.
	"congestion":           {Level: bpf.TuneLevelCongestion, Phases: opened | bpf.TunePhaseLive, Since: "4.13"},
	"initial_cwnd":         {Level: unix.SOL_TCP, Number: tcpBPFInitialWindow, Phases: opened, Since: "4.13"},
	"cwnd_clamp":           {Level: unix.SOL_TCP, Number: tcpBPFCwndClamp, Phases: opened | bpf.TunePhaseLive, Since: "4.13"},
	"delack_max":           {Level: unix.SOL_TCP, Number: tcpBPFDelackMax, Phases: always, Since: "5.10"},
	"rto_min":              {Level: unix.SOL_TCP, Number: tcpBPFRTOMin, Phases: always, Since: "5.10"},
	"rto_max":              {Level: unix.SOL_TCP, Number: tcpRTOMaxMs, Phases: always, Unit: 1000, Since: "6.15"},
	"notsent_lowat":        {Level: unix.SOL_TCP, Number: unix.TCP_NOTSENT_LOWAT, Phases: always, Since: "5.10"},
	"window_clamp":         {Level: unix.SOL_TCP, Number: unix.TCP_WINDOW_CLAMP, Phases: always, Since: "5.11"},
	"user_timeout":         {Level: unix.SOL_TCP, Number: unix.TCP_USER_TIMEOUT, Phases: always, Unit: 1000, Since: "5.9"},
	"keepalive_idle":       {Level: unix.SOL_TCP, Number: unix.TCP_KEEPIDLE, Phases: always, Unit: 1000000, Since: "5.9"},
	"keepalive_interval":   {Level: unix.SOL_TCP, Number: unix.TCP_KEEPINTVL, Phases: always, Unit: 1000000, Since: "5.9"},
	"keepalive_probes":     {Level: unix.SOL_TCP, Number: unix.TCP_KEEPCNT, Phases: always, Since: "5.9"},
	"syn_retries":          {Level: unix.SOL_TCP, Number: unix.TCP_SYNCNT, Phases: bpf.TunePhaseConnect, Since: "5.9"},
	"nodelay":              {Level: unix.SOL_TCP, Number: unix.TCP_NODELAY, Phases: always, Since: "6.1"},
	"mss":                  {Level: unix.SOL_TCP, Number: unix.TCP_MAXSEG, Phases: bpf.TunePhaseConnect, Since: "6.1"},
	"thin_linear_timeouts": {Level: unix.SOL_TCP, Number: unix.TCP_THIN_LINEAR_TIMEOUTS, Phases: always, Since: "6.1"},

	"tos":             {Level: unix.SOL_IP, Number: unix.IP_TOS, Phases: always | bpf.TunePhaseIPv4, Since: "5.10"},
	"traffic_class":   {Level: unix.SOL_IPV6, Number: unix.IPV6_TCLASS, Phases: always | bpf.TunePhaseIPv6, Since: "4.15"},
	"auto_flow_label": {Level: unix.SOL_IPV6, Number: unix.IPV6_AUTOFLOWLABEL, Phases: always | bpf.TunePhaseIPv6, Since: "6.1"},
	"flow_label":      {Level: bpf.TuneLevelTxhash, Phases: atStart, Since: "4.15"},
}

// AllOptions are all options, in the order of config.TuneOptions: an option's ID
// is its index.
func AllOptions() []Option {
	options := make([]Option, len(config.TuneOptions))
	for i, o := range config.TuneOptions {
		options[i] = kernelOptions[o.Name]
		options[i].TuneOption = o
		options[i].ID = i
		options[i].Unit = max(options[i].Unit, 1)
	}
	return options
}

// FindOption finds an option by its name.
func FindOption(name string) (Option, bool) {
	for _, o := range AllOptions() {
		if o.Name == name {
			return o, true
		}
	}
	return Option{}, false
}

// ecnBits of a type of service or a traffic class are TCP's own (RFC 3168).
const ecnBits = 3

// value is a setting as the kernel takes it.
func (o Option) value(s config.Setting) int32 {
	if o.Name == "flow_label" && s.Value != 0 {
		// ip6_make_flowlabel (include/net/ipv6.h, Linux 6.18) rotates the hash by
		// 16 bits and takes 20 of it in network order.
		return int32(bits.RotateLeft32(bits.ReverseBytes32(uint32(s.Value)), -16))
	}
	if o.Name == "tos" || o.Name == "traffic_class" {
		// Linux 5.10 would have BPF set the bits of ECN.
		return int32(s.Value &^ ecnBits)
	}
	return int32(uint32(s.Value / o.Unit))
}
