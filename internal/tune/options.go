// SPDX-License-Identifier: Apache-2.0

// Package tune compiles the tune rules of the policy for the tune program, and converts the
// counters of the program for display.
package tune

import (
	"math/bits"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
)

// Option describes how the kernel sets an option of the policy.
type Option struct {
	config.TuneOption
	// ID identifies the option in counts of failures.
	ID int
	// Level and Number are those of setsockopt(2), or of bpf_setsockopt only. Both are 0 if the option is a reply
	// to a request of the kernel.
	Level, Number uint32
	// Phases are the phases in which the option is set (enum tune_phase); 0 for a reply.
	Phases uint16
	// Unit is the divisor from the unit of the policy to that of the kernel.
	Unit int64
	// Since is the kernel version that added the option to bpf_setsockopt, for messages only: vendors backport
	// features.
	Since string
}

// Constants of include/uapi/linux/{bpf,tcp}.h and include/uapi/asm-generic/socket.h, Linux 6.18, that
// golang.org/x/sys/unix lacks.
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

	// dctcp checks for ECN when it is set, and falls back to reno without it.
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

// FindOption returns the option with a name.
func FindOption(name string) (Option, bool) {
	for _, o := range AllOptions() {
		if o.Name == name {
			return o, true
		}
	}
	return Option{}, false
}

// AllOptions returns all options in the order of config.TuneOptions. The ID of an option is its index.
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

// ecnBits are the ECN bits of the type of service or the traffic class (RFC 3168), which TCP sets.
const ecnBits = 3

// value converts a setting to the kernel's unit.
func (o Option) value(s config.Setting) int32 {
	if o.Name == "flow_label" && s.Value != 0 {
		// ip6_make_flowlabel (include/net/ipv6.h, Linux 6.18) rotates the hash by 16 bits and uses 20 bits in
		// network byte order.
		return int32(bits.RotateLeft32(bits.ReverseBytes32(uint32(s.Value)), -16))
	}
	if o.Name == "tos" || o.Name == "traffic_class" {
		// On Linux 5.10, bpf_setsockopt also sets the ECN bits.
		return int32(s.Value &^ ecnBits)
	}
	return int32(uint32(s.Value / o.Unit))
}
