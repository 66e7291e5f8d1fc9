// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/clock"
	"sockeye/internal/config"
	"sockeye/internal/procsock"
	"sockeye/internal/sysctl"
)

// Reading is the value of an option that the kernel reports for a socket.
type Reading struct {
	// Number is in the unit of the option's kind. -1 means an unlimited pacing rate. A buffer size is the
	// kernel's, twice the requested size.
	Number int64  `json:"number,omitempty"`
	Text   string `json:"text,omitempty"` // value of an option of kind text
	// Locked reports that the buffer has a fixed size and is not tuned by the kernel. Before Linux 5.14, which
	// cannot report this, Locked is true.
	Locked bool `json:"locked,omitempty"`
}

// comparison compares the settings of a rule with the values of one connection.
type comparison struct {
	family     int         // unix.AF_INET or AF_INET6
	socketRole config.Role // role derived from the socket
	c          *bpf.TuneConnection
	info       *unix.TCPInfo
	hz         int64
	settings   []config.Setting
	reacted    []config.Setting
	// read returns the value of an option and its source. ok is false if the kernel does not report the option.
	read func(Option) (r Reading, source string, ok bool, err error)
	// mptcp reports that the connection is a subflow.
	mptcp bool
	// unreadable is the source of options that cannot be read. otherCause is the explanation of values that
	// differ for an unknown reason.
	unreadable, otherCause string
}

// readable contains the options that getsockopt(2) reports. The minimum RTO and the maximum delay of acknowledgements
// exist since Linux 6.15 and have option numbers of their own.
var readable = map[string]struct {
	name   string
	number int
}{
	"sndbuf":               {"SO_SNDBUF", unix.SO_SNDBUF},
	"rcvbuf":               {"SO_RCVBUF", unix.SO_RCVBUF},
	"rcvlowat":             {"SO_RCVLOWAT", unix.SO_RCVLOWAT},
	"pacing_rate":          {"SO_MAX_PACING_RATE", unix.SO_MAX_PACING_RATE},
	"priority":             {"SO_PRIORITY", unix.SO_PRIORITY},
	"mark":                 {"SO_MARK", unix.SO_MARK},
	"keepalive":            {"SO_KEEPALIVE", unix.SO_KEEPALIVE},
	"reuse_address":        {"SO_REUSEADDR", unix.SO_REUSEADDR},
	"bind_ifindex":         {"SO_BINDTOIFINDEX", unix.SO_BINDTOIFINDEX},
	"txrehash":             {"SO_TXREHASH", unix.SO_TXREHASH},
	"congestion":           {"TCP_CONGESTION", unix.TCP_CONGESTION},
	"delack_max":           {"TCP_DELACK_MAX_US", unix.TCP_DELACK_MAX_US},
	"rto_min":              {"TCP_RTO_MIN_US", unix.TCP_RTO_MIN_US},
	"rto_max":              {"TCP_RTO_MAX_MS", unix.TCP_RTO_MAX_MS},
	"notsent_lowat":        {"TCP_NOTSENT_LOWAT", unix.TCP_NOTSENT_LOWAT},
	"window_clamp":         {"TCP_WINDOW_CLAMP", unix.TCP_WINDOW_CLAMP},
	"user_timeout":         {"TCP_USER_TIMEOUT", unix.TCP_USER_TIMEOUT},
	"keepalive_idle":       {"TCP_KEEPIDLE", unix.TCP_KEEPIDLE},
	"keepalive_interval":   {"TCP_KEEPINTVL", unix.TCP_KEEPINTVL},
	"keepalive_probes":     {"TCP_KEEPCNT", unix.TCP_KEEPCNT},
	"syn_retries":          {"TCP_SYNCNT", unix.TCP_SYNCNT},
	"nodelay":              {"TCP_NODELAY", unix.TCP_NODELAY},
	"thin_linear_timeouts": {"TCP_THIN_LINEAR_TIMEOUTS", unix.TCP_THIN_LINEAR_TIMEOUTS},
	"tos":                  {"IP_TOS", unix.IP_TOS},
	"traffic_class":        {"IPV6_TCLASS", unix.IPV6_TCLASS},
	"auto_flow_label":      {"IPV6_AUTOFLOWLABEL", unix.IPV6_AUTOFLOWLABEL},
}

// Effective compares the settings of a rule with the values that the kernel reports for a connection. c is the state
// of the connection in the program (Tune.Connection), or nil if no rule matched.
func Effective(s *procsock.Socket, rule config.TuneRule, c *bpf.TuneConnection) ([]api.TuneValue, error) {
	if s.MPTCP || s.Listening {
		return nil, fmt.Errorf("read values of %s: it is not a TCP connection", s)
	}
	info, err := unix.GetsockoptTCPInfo(s.FD, unix.SOL_TCP, unix.TCP_INFO)
	if err != nil {
		return nil, fmt.Errorf("read TCP_INFO of %s: %w", s, err)
	}
	l := &comparison{family: s.Family, socketRole: s.Role, c: c, info: info, settings: rule.Set, unreadable: "before Linux 6.15",
		otherCause: "set by the application or by another program, or refused by the kernel"}
	l.read = func(o Option) (Reading, string, bool, error) {
		r, ok, err := o.read(s.FD)
		return r, readable[o.Name].name, ok, err
	}
	values, err := l.values(rule)
	if err != nil {
		return nil, fmt.Errorf("read values of %s: %w", s, err)
	}
	return values, nil
}

// values compares all settings of the rule, including those of its reaction.
func (l *comparison) values(rule config.TuneRule) ([]api.TuneValue, error) {
	hz, err := clock.Hz()
	if err != nil {
		return nil, err
	}
	l.hz = int64(hz)
	if c := l.c; c != nil && c.Flags&bpf.TuneConnectionReacted != 0 && rule.React != nil {
		l.reacted = rule.React.Set
		l.settings = slices.Clone(l.settings)
		for _, r := range l.reacted {
			at := slices.IndexFunc(l.settings, func(s config.Setting) bool { return s.Option == r.Option })
			if at < 0 {
				l.settings = append(l.settings, r)
			} else {
				l.settings[at] = r
			}
		}
	}
	values := make([]api.TuneValue, 0, len(l.settings))
	for _, setting := range l.settings {
		o, ok := FindOption(setting.Option)
		if !ok {
			continue
		}
		v, err := l.value(o, setting)
		if err != nil {
			return nil, err
		}
		values = append(values, v)
	}
	return values, nil
}

func (l *comparison) value(o Option, s config.Setting) (api.TuneValue, error) {
	v := api.TuneValue{Option: o.Name, Requested: l.requested(o, s)}
	if v.Note = l.inapplicable(o); v.Note != "" {
		return v, nil
	}
	r, source, ok, err := l.read(o)
	if err != nil {
		return v, err
	}
	var notes []string
	if ok {
		v.Source, v.Effective = source, o.format(r)
		v.Differs, notes, err = l.compare(o, s, r)
		if err != nil {
			return v, err
		}
	} else {
		notes = l.fromTCPInfo(&v, o, s)
	}
	unset := l.notSet(o, s)
	switch {
	case unset != "":
		notes = []string{unset}
	case v.Differs && len(notes) == 0:
		notes = []string{l.otherCause}
	case slices.ContainsFunc(l.reacted, func(r config.Setting) bool { return r.Option == o.Name }):
		notes = append(notes, "the rule's reaction")
	}
	v.Note = strings.Join(notes, "; ")
	return v, nil
}

// requested formats the value of a setting.
func (l *comparison) requested(o Option, s config.Setting) string {
	switch {
	case s.Explore != nil:
		candidates := make([]string, len(s.Explore.Candidates))
		for i, n := range s.Explore.Candidates {
			candidates[i] = strconv.Itoa(n)
		}
		all := "one of " + strings.Join(candidates, ", ")
		switch {
		case l.notSet(o, s) != "":
			return all
		case int(l.c.Candidate) < len(candidates):
			return candidates[l.c.Candidate] + ", " + all
		}
		return "the kernel's own, or " + all
	case o.Kind == config.KindText:
		return s.Text
	}
	return config.FormatValue(o.TuneOption, s.Value)
}

// inapplicable explains why an option does not apply to this connection, or returns "".
func (l *comparison) inapplicable(o Option) string {
	switch {
	case !o.isFor(l.family) && l.family == unix.AF_INET6:
		return "only on IPv4 sockets; an IPv6 socket with an IPv4 peer is none"
	case !o.isFor(l.family):
		return "only on IPv6 sockets"
	case l.role() == config.RoleConnect && o.Name == "synack_rto":
		return "only on connections that are accepted"
	case l.role() == config.RoleAccept && (o.Name == "syn_rto" || o.Phases == bpf.TunePhaseConnect):
		return "only on connections that this host makes"
	}
	return ""
}

// notSet explains why the rule has not set an option, or returns "".
func (l *comparison) notSet(o Option, s config.Setting) string {
	switch {
	case l.c == nil:
		return "not set: the connection does not have the rule"
	case int(l.c.Arm) == bpf.TuneArmControl:
		return "not set: control arm of the trial"
	case l.c.Flags&bpf.TuneConnectionAdopted != 0 && o.Phases&bpf.TunePhaseLive == 0 &&
		!slices.Contains(l.reacted, s):
		return "not set: the connection was open before it had the rule"
	}
	return ""
}

// compare reports whether the reported value differs from the requested one, and explains what the kernel did with
// the value. A difference without a note was caused by another program.
func (l *comparison) compare(o Option, s config.Setting, r Reading) (differs bool, notes []string, err error) {
	switch o.Name {
	case "congestion":
		if r.Text == s.Text+"-reno" {
			notes = []string{"without ECN it is reno: set ecn, on both sides"}
		}
		return r.Text != s.Text, notes, nil
	case "sndbuf", "rcvbuf":
		return l.compareBuffer(o, s.Value, r)
	case "rcvlowat":
		if l.mptcp {
			return r.Number != s.Value, []string{lowWaterMPTCP}, nil
		}
		if r.Number < s.Value {
			notes, err = l.lowWaterNotes(r.Number)
		}
		return r.Number != s.Value, notes, err
	case "window_clamp":
		// SOCK_MIN_RCVBUF / 2 is 1152 on 64-bit kernels.
		if r.Number != s.Value {
			notes = []string{"the kernel computes it anew from the receive buffer, and makes it at least half of the smallest one"}
		}
		return r.Number != s.Value, notes, nil
	}
	want, note := l.rounded(o, s.Value, r.Number)
	if want != s.Value {
		notes = append(notes, note)
	}
	if want != r.Number {
		return true, nil, nil
	}
	if o.Name == "delack_max" {
		minimum, _ := FindOption("rto_min")
		// tcp_delack_max (net/ipv4/tcp_output.c, Linux 6.18).
		rto, _, ok, err := l.read(minimum)
		if err == nil && ok && rto.Number <= r.Number {
			notes = append(notes, "acknowledgements wait for less than the smallest RTO, "+minimum.format(rto))
		}
	}
	return false, notes, nil
}

// jiffies converts microseconds to jiffies and rounds up.
func (l *comparison) jiffies(us int64) int64 { return (us*l.hz + 999999) / 1000000 }

func (l *comparison) jiffiesNote() string {
	return "rounded up to jiffies of " + duration(1000000/l.hz)
}

// smallestBuffer is an upper bound of SOCK_MIN_SNDBUF and SOCK_MIN_RCVBUF (include/net/sock.h, Linux 6.18), which are
// 4608 and 2304 on 64-bit kernels.
const smallestBuffer = 8192

// compareBuffer compares the size of a buffer, which the kernel has doubled.
func (l *comparison) compareBuffer(o Option, want int64, r Reading) (differs bool, notes []string, err error) {
	most := "net.core.wmem_max"
	if o.Name == "rcvbuf" {
		most = "net.core.rmem_max"
	}
	limit := sysctl.Numbers(most)
	switch {
	case !r.Locked:
		differs, notes = true, []string{"the kernel tunes it: it is not set any more, or never was"}
	case r.Number == 2*want:
		notes = []string{"the kernel doubles it"}
	case len(limit) == 1 && limit[0] < want && r.Number == 2*limit[0]:
		differs, notes = true, []string{"cut to " + most + ", " + bytesText(limit[0]), "the kernel doubles it"}
	case r.Number > 2*want && r.Number <= smallestBuffer:
		differs, notes = true, []string{"raised to the kernel's smallest buffer"}
	default:
		differs = true
	}
	if o.Name != "rcvbuf" || !r.Locked {
		return differs, notes, nil
	}
	clamp, _ := FindOption("window_clamp")
	window, _, ok, err := l.read(clamp)
	if err != nil {
		return differs, notes, err
	}
	switch scaled := int64(math.MaxUint16) << l.windowScale(); {
	case scaled < r.Number/2 && l.role() == config.RoleAccept:
		notes = append(notes, fmt.Sprintf("the window is at most %s: its scale was fixed at the SYN, by the listener's receive buffer", bytesText(scaled)))
	case scaled < r.Number/2:
		notes = append(notes, fmt.Sprintf("the window is at most %s: its scale was fixed at the SYN", bytesText(scaled)))
	case ok && window.Number < r.Number/4:
		// Half of the buffer is the requested size.
		notes = append(notes, fmt.Sprintf("the window is at most %s for now: TCP_WINDOW_CLAMP", bytesText(window.Number)))
	}
	return differs, notes, nil
}

// role returns the role of the connection: the one that the program recorded, otherwise the one derived from the
// socket.
func (l *comparison) role() config.Role {
	switch {
	case l.c == nil:
		return l.socketRole
	case uint32(l.c.Role) == bpf.MatchAccept:
		return config.RoleAccept
	}
	return config.RoleConnect
}

// Bits of tcpi_options: include/uapi/linux/tcp.h, Linux 6.18.
const (
	tcpiOptTimestamps = 1
	tcpiOptWscale     = 4
	tcpiOptECN        = 8
)

// windowScale returns the window scale that this host advertises. golang.org/x/sys has no field for the bits after
// tcpi_options.
func (l *comparison) windowScale() uint {
	scales := *(*uint8)(unsafe.Add(unsafe.Pointer(&l.info.Options), 1))
	if l.info.Options&tcpiOptWscale == 0 {
		return 0
	}
	return uint(scales >> 4)
}

// lowWaterNotes explains why SO_RCVLOWAT is less than requested.
func (l *comparison) lowWaterNotes(got int64) ([]string, error) {
	buffer, _ := FindOption("rcvbuf")
	r, _, ok, err := l.read(buffer)
	if err != nil {
		return nil, err
	}
	if ok && r.Locked && got == r.Number/2 {
		return []string{"cut to half of the receive buffer"}, nil
	}
	if most := sysctl.Numbers("net.ipv4.tcp_rmem"); len(most) == 3 && got == most[2]/2 {
		return []string{"cut to half of the largest receive buffer, the third number of net.ipv4.tcp_rmem"}, nil
	}
	return nil, nil
}

// timestamps is TCPOLEN_TSTAMP_ALIGNED (include/net/tcp.h, Linux 6.18).
const timestamps = 12

// infiniteThreshold is TCP_INFINITE_SSTHRESH (include/net/tcp.h, Linux 6.18).
const infiniteThreshold = 0x7fffffff

const notReadable = "not readable"

// fromTCPInfo fills in the value of an option that cannot be read, as far as TCP_INFO reports it.
func (l *comparison) fromTCPInfo(v *api.TuneValue, o Option, s config.Setting) (notes []string) {
	v.Source = notReadable
	show := func(field string, n int64) {
		v.Source, v.Effective = "TCP_INFO "+field, o.format(Reading{Number: n})
	}
	info := l.info
	switch o.Name {
	case "syn_rto", "synack_rto":
		if want, note := l.rounded(o, s.Value, 0); want != s.Value {
			notes = append(notes, note+": "+duration(want))
		}
		notes = append(notes, "only during the handshake")
	case "initial_rwnd":
		if info.Rcv_wnd > 0 && info.Advmss > 0 {
			show("rcv_wnd", int64(info.Rcv_wnd/info.Advmss))
		}
		notes = append(notes, "only at the start; the window moves on with what is received")
	case "ecn":
		agreed := info.Options & tcpiOptECN
		show("options", int64(agreed))
		switch {
		case s.Value == 0:
			notes = append(notes, "left to net.ipv4.tcp_ecn")
		case agreed == 0:
			v.Differs = true
			notes = append(notes, "the peer does not agree")
		}
	case "base_rtt":
		notes = append(notes, "only the congestion control nv asks for it")
	case "initial_cwnd":
		show("snd_cwnd", int64(info.Snd_cwnd))
		want := s.Value
		if s.Explore != nil {
			want = 0
			if l.c != nil && int(l.c.Candidate) < len(s.Explore.Candidates) {
				want = int64(s.Explore.Candidates[l.c.Candidate])
			}
		}
		switch {
		case info.Data_segs_out == 0:
			v.Differs = want != 0 && int64(info.Snd_cwnd) != want
		case want == 0:
			notes = append(notes, "only at the start; the congestion control moves it from there")
		case int64(info.Snd_cwnd) == want:
			notes = append(notes, "only at the start; the congestion control has not moved it since")
		default:
			notes = append(notes, "only at the start; the congestion control has moved it since")
		}
	case "cwnd_clamp":
		show("snd_cwnd", int64(info.Snd_cwnd))
		v.Differs = int64(info.Snd_cwnd) > s.Value
		threshold := "none"
		if info.Snd_ssthresh < infiniteThreshold {
			threshold = strconv.Itoa(int(info.Snd_ssthresh))
		}
		notes = append(notes, "the window is shown, its bound cannot be read; snd_ssthresh "+threshold)
		if v.Differs {
			notes = append(notes, "it comes down with the next acknowledgements")
		}
	case "rto_min":
		show("rto", int64(info.Rto))
		v.Differs = int64(info.Rto) < s.Value
		notes = append(notes, "the timeout is shown, its minimum cannot be read "+l.unreadable)
	case "delack_max":
		show("ato", int64(info.Ato))
		notes = append(notes, "the present delay is shown, its maximum cannot be read "+l.unreadable)
	case "mss":
		show("advmss", int64(info.Advmss))
		got := int64(info.Advmss)
		if info.Options&tcpiOptTimestamps != 0 {
			got += timestamps
			notes = append(notes, fmt.Sprintf("timestamps take %d bytes of it", timestamps))
		}
		if v.Differs = got != s.Value; got < s.Value {
			notes = append(notes, "bounded by the MTU of the route")
		}
		notes = append(notes, fmt.Sprintf("segments carry %d bytes", info.Snd_mss))
	default:
		if _, known := readable[o.Name]; known && l.mptcp {
			notes = append(notes, "it cannot be read "+l.unreadable)
		}
	}
	return notes
}

// rounded returns a value in the kernel's units, and a note that names the unit.
func (l *comparison) rounded(o Option, value, got int64) (rounded int64, note string) {
	switch o.Name {
	case "tos", "traffic_class":
		return value&^ecnBits | got&ecnBits, "the two lowest bits are the kernel's, for ECN"
	case "syn_rto", "synack_rto", "delack_max", "rto_min":
		return l.jiffies(value) * 1000000 / l.hz, l.jiffiesNote()
	case "rto_max":
		return (l.jiffies(value/o.Unit*o.Unit)*1000 + l.hz - 1) / l.hz * o.Unit, l.jiffiesNote()
	case "user_timeout":
		value, note = value/o.Unit*o.Unit, "in whole milliseconds"
	case "keepalive_idle", "keepalive_interval":
		value, note = value/o.Unit*o.Unit, "in whole seconds"
	}
	return value, note
}

// read reads an option of a socket. ok is false if the kernel does not report the option.
func (o Option) read(fd int) (r Reading, ok bool, err error) {
	source, ok := readable[o.Name]
	if !ok {
		return r, false, nil
	}
	switch o.Name {
	case "congestion":
		r.Text, err = unix.GetsockoptString(fd, unix.SOL_TCP, source.number)
	case "pacing_rate":
		var rate uint64
		rate, err = unix.GetsockoptUint64(fd, int(o.Level), source.number)
		r.Number = int64(rate)
	default:
		var value int
		value, err = unix.GetsockoptInt(fd, int(o.Level), source.number)
		if o.Name == "mark" {
			value = int(uint32(value))
		}
		r.Number = int64(value) * o.Unit
	}
	if errors.Is(err, unix.ENOPROTOOPT) || errors.Is(err, unix.EOPNOTSUPP) {
		return r, false, nil
	}
	if err != nil {
		return r, false, fmt.Errorf("read %s: %w", source.name, err)
	}
	if lock := o.lock(); lock != 0 {
		locks, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK)
		r.Locked = err != nil || locks&lock != 0
	}
	return r, true, nil
}

// lock returns the bit of SO_BUF_LOCK that disables the kernel's tuning of the buffer.
func (o Option) lock() int {
	switch o.Name {
	case "sndbuf":
		return unix.SOCK_SNDBUF_LOCK
	case "rcvbuf":
		return unix.SOCK_RCVBUF_LOCK
	}
	return 0
}

// format formats a reading.
func (o Option) format(r Reading) string {
	switch {
	case o.Kind == config.KindText:
		return r.Text
	case o.Name == "pacing_rate" && r.Number < 0:
		return "no bound"
	}
	return config.FormatValue(o.TuneOption, r.Number)
}

// isFor reports whether the option exists for sockets of a family.
func (o Option) isFor(family int) bool {
	if family == unix.AF_INET {
		return o.Phases&bpf.TunePhaseIPv6 == 0
	}
	return o.Phases&bpf.TunePhaseIPv4 == 0
}

func duration(us int64) string {
	return config.FormatValue(config.TuneOption{Kind: config.KindDuration}, us)
}

func bytesText(n int64) string {
	return config.FormatValue(config.TuneOption{Kind: config.KindSize}, n)
}
