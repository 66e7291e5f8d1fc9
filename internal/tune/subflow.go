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

// lowWaterMPTCP explains the effect of SO_RCVLOWAT on a subflow, which the kernel does not report: the MPTCP socket
// is woken only when the subflow has that much data. The option cannot be set after the subflow has become part of
// the application's socket (mptcp_set_rcvlowat, Linux 6.18).
const lowWaterMPTCP = "the value shown is that of the application's MPTCP socket; a subflow with the rule's value hands data on late; " +
	"on some subflows the kernel refuses it with EINVAL"

// EffectiveSubflow is Effective for a subflow of an MPTCP connection. s is the socket of the application, and subflow
// the entry of sock_diag with its options. fellBack is that of Socket.Subflows: the kernel passes TCP and IP options
// on to such a subflow.
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

// diagnosed returns the value of an option in an entry of sock_diag and the name of its field or attribute, or "" if
// sock_diag does not report the option.
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
			// -1 means no limit.
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
