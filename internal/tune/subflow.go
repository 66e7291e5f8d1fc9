// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/procsock"
	"sockeye/internal/sockdiag"
)

// lowWaterMPTCP says what SO_RCVLOWAT of a subflow does, which nothing shows. The kernel
// wakes the MPTCP socket only once the subflow has as much. After the subflow has become
// part of the application's socket, it cannot be set (mptcp_set_rcvlowat in
// net/mptcp/sockopt.c, Linux 6.18).
const lowWaterMPTCP = "the value shown is that of the application's MPTCP socket; a subflow with the rule's value hands data on late; " +
	"on some subflows the kernel refuses it with EINVAL"

// EffectiveSubflow is Effective of a subflow of an MPTCP connection. s is the
// application's socket, and subflow what sock_diag tells, with its options. fellBack is
// of Socket.Subflows: the kernel then passes options of TCP and IP on to the subflow.
func EffectiveSubflow(s *procsock.Socket, subflow *sockdiag.Socket, fellBack bool, rule config.TuneRule, c *bpf.TuneConnection) ([]api.TuneValue, error) {
	l := &comparison{family: int(subflow.Family), socketRole: s.Role, c: c, info: &subflow.Info, settings: rule.Set, mptcp: true,
		unreadable: "of a subflow, which has no descriptor",
		otherCause: "MPTCP gives subflows what the application sets on its socket; or set by another program, or refused by the kernel"}
	l.read = func(o Option) (Reading, string, bool, error) {
		switch {
		case o.Name == "rcvlowat":
			r, ok, err := o.read(s.FD)
			return r, readable[o.Name].name + " of the MPTCP socket", ok, err
		case fellBack && o.Level != unix.SOL_SOCKET:
			r, ok, err := o.read(s.FD)
			return r, readable[o.Name].name, ok, err
		}
		r, source := o.diagnosed(subflow)
		return r, source, source != "", nil
	}
	values, err := l.values(rule)
	if err != nil {
		return nil, fmt.Errorf("read values of subflow %s -> %s of %s: %w", subflow.Local, subflow.Remote, s, err)
	}
	return values, nil
}

// diagnosed is an option as sock_diag tells it, and in which field or attribute; "" if
// it does not.
func (o Option) diagnosed(s *sockdiag.Socket) (r Reading, source string) {
	number := func(option sockdiag.Option, attribute string) (Reading, string) {
		if !option.Known {
			return r, ""
		}
		return Reading{Number: int64(option.Value)}, attribute
	}
	switch o.Name {
	case "sndbuf":
		if s.HasMemory {
			return Reading{Number: int64(s.Buffer), Locked: true}, "SK_MEMINFO_SNDBUF"
		}
	case "rcvbuf":
		if s.HasMemory {
			return Reading{Number: int64(s.ReceiveBuffer), Locked: true}, "SK_MEMINFO_RCVBUF"
		}
	case "pacing_rate":
		if s.HasInfo {
			// -1 is no bound.
			return Reading{Number: int64(s.Info.Max_pacing_rate)}, "TCP_INFO max_pacing_rate"
		}
	case "congestion":
		if s.Congestion != "" {
			return Reading{Text: s.Congestion}, "INET_DIAG_CONG"
		}
	case "tos":
		return number(s.Options.TOS, "INET_DIAG_TOS")
	case "traffic_class":
		return number(s.Options.TrafficClass, "INET_DIAG_TCLASS")
	case "mark":
		return number(s.Options.Mark, "INET_DIAG_MARK")
	case "priority":
		return number(s.Options.Priority, "INET_DIAG_CLASS_ID")
	}
	return r, ""
}
