// SPDX-License-Identifier: Apache-2.0

package tune_test

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/clock"
	"sockeye/internal/config"
	"sockeye/internal/procsock"
	"sockeye/internal/testenv"
	"sockeye/internal/tune"
)

// effective explains a connection with its installed rule, or with the first rule if it has none, after f may have
// changed the known state.
func (k *tuning) effective(c *net.TCPConn, f func(*bpf.TuneConnection)) map[string]api.TuneValue {
	k.t.Helper()
	values := make(map[string]api.TuneValue)
	control(k.t, c, func(fd int) {
		s, err := procsock.Take(os.Getpid(), fd)
		check(k.t, err)
		defer s.Close()
		has, err := k.Connection(s.FD)
		check(k.t, err)
		rule := k.rules[0]
		if name := k.ruleOf(c); name != "" {
			rule = k.rules[slices.IndexFunc(k.rules, func(r config.TuneRule) bool { return r.Name == name })]
		}
		if f != nil {
			f(has)
		}
		list, err := tune.Effective(s, rule, has)
		check(k.t, err)
		for i, v := range list {
			values[v.Option] = v
			if i < len(rule.Set) && rule.Set[i].Option != v.Option {
				k.t.Errorf("value %d is of %s, want %s, as in the rule", i, v.Option, rule.Set[i].Option)
			}
		}
	})
	return values
}

// expect compares a value. The note must contain each part; "" means no note.
func expect(t testing.TB, got api.TuneValue, requested, effective, source string, differs bool, notes ...string) {
	t.Helper()
	if got.Requested != requested || got.Effective != effective || got.Source != source || got.Differs != differs {
		t.Errorf("%+v, want requested %q, effective %q, source %q, differs %v", got, requested, effective, source, differs)
	}
	for _, part := range notes {
		if !strings.Contains(got.Note, part) || part == "" && got.Note != "" {
			t.Errorf("%s is noted as %q, want %q", got.Option, got.Note, part)
		}
	}
}

// seeing compares values except those of options that the kernel cannot set.
func seeing(t testing.TB, values map[string]api.TuneValue) func(option, requested, effective, source string, differs bool, notes ...string) {
	return func(option, requested, effective, source string, differs bool, notes ...string) {
		t.Helper()
		if lacks(t, option) == nil {
			expect(t, values[option], requested, effective, source, differs, notes...)
		}
	}
}

const changed = "set by the application or by another program"

func TestEffective(t *testing.T) {
	// The window grows with these segments, and does not shrink while it waits.
	newNetworks(t)
	sysctl(t, "net/ipv4/tcp_slow_start_after_idle", "0")
	k := newTuning(t, oneRule(has(t, `sndbuf: 150KB, rcvbuf: 150KB, rcvlowat: 100, pacing_rate: 2Gbit/s, priority: 3, mark: 4294967295, keepalive: true,
		txrehash: true, congestion: reno, initial_cwnd: 40, cwnd_clamp: 100, rto_max: 10s, notsent_lowat: 128KiB,
		user_timeout: 1.5ms, keepalive_idle: 1.5s, keepalive_interval: 30s, keepalive_probes: 4, syn_retries: 4, nodelay: false, mss: 1000,
		thin_linear_timeouts: true, traffic_class: 0x12, base_rtt: 1ms, initial_rwnd: 40, ecn: true, flow_label: 7, syn_rto: 20ms, synack_rto: 20ms`)))
	for family, address := range families {
		t.Run(family, func(t *testing.T) {
			p := connect(t, testenv.Listen(t, address))
			for role, c := range map[string]*net.TCPConn{"connect": p.connected, "accept": p.accepted} {
				// Options that package net sets on the sockets after the rule.
				control(t, c, func(fd int) {
					for option, value := range map[int]int{unix.TCP_NODELAY: 0, unix.TCP_KEEPIDLE: 1, unix.TCP_KEEPINTVL: 30, unix.TCP_KEEPCNT: 4} {
						check(t, unix.SetsockoptInt(fd, unix.SOL_TCP, option, value))
					}
				})
				v := k.effective(c, nil)
				see := seeing(t, v)
				see("sndbuf", "150KB", "300KB", "SO_SNDBUF", false, "the kernel doubles it")
				see("rcvbuf", "150KB", "300KB", "SO_RCVBUF", false, "the kernel doubles it")
				see("rcvlowat", "100B", "100B", "SO_RCVLOWAT", false, "")
				see("pacing_rate", "2Gbit/s", "2Gbit/s", "SO_MAX_PACING_RATE", false, "")
				see("priority", "3", "3", "SO_PRIORITY", false, "")
				see("mark", "4294967295", "4294967295", "SO_MARK", false, "")
				see("keepalive", "true", "true", "SO_KEEPALIVE", false, "")
				see("txrehash", "true", "true", "SO_TXREHASH", false, "")
				see("congestion", "reno", "reno", "TCP_CONGESTION", false, "")
				see("initial_cwnd", "40", "40", "TCP_INFO snd_cwnd", false, "")
				see("cwnd_clamp", "100", "40", "TCP_INFO snd_cwnd", false, "snd_ssthresh 100")
				see("rto_max", "10s", "10s", "TCP_RTO_MAX_MS", false, "")
				see("notsent_lowat", "128KiB", "128KiB", "TCP_NOTSENT_LOWAT", false, "")
				see("user_timeout", "1.5ms", "1ms", "TCP_USER_TIMEOUT", false, "in whole milliseconds")
				see("keepalive_idle", "1.5s", "1s", "TCP_KEEPIDLE", false, "in whole seconds")
				see("keepalive_interval", "30s", "30s", "TCP_KEEPINTVL", false, "")
				see("keepalive_probes", "4", "4", "TCP_KEEPCNT", false, "")
				see("nodelay", "false", "false", "TCP_NODELAY", false, "")
				see("thin_linear_timeouts", "true", "true", "TCP_THIN_LINEAR_TIMEOUTS", false, "")
				see("base_rtt", "1ms", "", "not readable", false, "nv")
				see("ecn", "true", "true", "TCP_INFO options", false, "")
				see("flow_label", "7", "", "not readable", false, "")
				if !tellsWindow(t) {
					see("initial_rwnd", "40", "", "not readable", false, "only at the start")
				} else if window, err := strconv.Atoi(v["initial_rwnd"].Effective); err != nil || window < 1 {
					t.Errorf("initial_rwnd is %+v", v["initial_rwnd"])
				}
				made := "only on connections that this host makes"
				if role == "connect" {
					see("syn_rto", "20ms", "", "not readable", false, "only during the handshake")
					see("synack_rto", "20ms", "", "", false, "only on connections that are accepted")
					see("syn_retries", "4", "4", "TCP_SYNCNT", false, "")
					see("mss", "1000", "988", "TCP_INFO advmss", false, "timestamps take 12 bytes of it", "segments carry 988 bytes")
				} else {
					see("syn_rto", "20ms", "", "", false, made)
					see("synack_rto", "20ms", "", "not readable", false, "only during the handshake")
					see("syn_retries", "4", "", "", false, made)
					see("mss", "1000", "", "", false, made)
				}
				if family == "ipv4" {
					see("traffic_class", "18", "", "", false, "only on IPv6 sockets")
				} else {
					see("traffic_class", "18", v["traffic_class"].Effective, "IPV6_TCLASS", false, "for ECN")
				}
			}
			// The window grows while it is fully used, which depends on scheduling.
			var v map[string]api.TuneValue
			testenv.Within(t, "a window that has grown", func() bool {
				transferBetween(t, p.connected, p.accepted, 1<<20)
				v = k.effective(p.connected, nil)
				got, err := strconv.Atoi(v["initial_cwnd"].Effective)
				check(t, err)
				return got > 40
			})
			if v["initial_cwnd"].Differs || !strings.Contains(v["initial_cwnd"].Note, "only at the start") {
				t.Errorf("initial_cwnd of a window that has grown: %+v", v["initial_cwnd"])
			}
			if v["cwnd_clamp"].Differs {
				t.Errorf("cwnd_clamp of a window that has grown: %+v", v["cwnd_clamp"])
			}
		})
	}
	if failed := k.failed(); len(failed) > 0 {
		t.Errorf("failures: %v", failed)
	}
}

// transferBetween sends bytes through a connection.
func transferBetween(t testing.TB, from, to *net.TCPConn, bytes int) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		_, err := from.Write(make([]byte, bytes))
		done <- err
	}()
	buffer := make([]byte, 1<<16)
	for got := 0; got < bytes; {
		n, err := to.Read(buffer[:min(len(buffer), bytes-got)])
		check(t, err)
		got += n
	}
	check(t, <-done)
}

// TestEffectiveOfEveryOption expects a source or a reason for every option.
func TestEffectiveOfEveryOption(t *testing.T) {
	k := newTuning(t, "")
	p := connect(t, testenv.Listen(t, "[::1]:0"))
	var rule config.TuneRule
	rule.Name = "all"
	for _, o := range config.TuneOptions {
		s := config.Setting{Option: o.Name, Value: o.Max}
		if o.Kind == config.KindText {
			s.Text = "reno"
		}
		rule.Set = append(rule.Set, s)
	}
	k.rules = []config.TuneRule{rule}
	for role, c := range map[string]*net.TCPConn{"connect": p.connected, "accept": p.accepted} {
		values := k.effective(c, nil)
		if len(values) != len(config.TuneOptions) {
			t.Errorf("%d values, want %d", len(values), len(config.TuneOptions))
		}
		for name, v := range values {
			if v.Source == "" && v.Effective != "" || v.Source == "not readable" && v.Effective != "" ||
				v.Source != "" && v.Source != "not readable" && v.Effective == "" || v.Note == "" {
				t.Errorf("%s: %s is %+v", role, name, v)
			}
			if v.Source != "" && !strings.Contains(v.Note, "does not have the rule") {
				t.Errorf("%s: %s is noted as %q, though there is no rule", role, name, v.Note)
			}
		}
	}
	text, err := json.Marshal(k.effective(p.connected, nil)["nodelay"])
	if want := `{"option":"nodelay","requested":"true","effective":"true","source":"TCP_NODELAY","note":"not set: the connection does not have the rule","differs":false}`; err != nil || string(text) != want {
		t.Errorf("%s, %v, want %s", text, err, want)
	}
}

func TestEffectiveBounds(t *testing.T) {
	limit := func(name string) int64 {
		text, err := os.ReadFile("/proc/sys/net/core/" + name)
		if os.IsNotExist(err) {
			t.Skipf("kernel: no net.core.%s in a network namespace", name)
		}
		check(t, err)
		n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		check(t, err)
		return n
	}
	size, _ := config.FindTuneOption("sndbuf")
	time, _ := config.FindTuneOption("rto_min")
	snd, rcv := limit("wmem_max"), limit("rmem_max")
	readable := tells(t, unix.SOL_TCP, unix.TCP_RTO_MIN_US)
	hz, err := clock.Hz()
	check(t, err)
	jiffy := int64(1000000 / hz)
	uneven := config.FormatValue(time, 20*jiffy+1)

	k := newTuning(t, oneRule(fmt.Sprintf("sndbuf: %d, rcvbuf: %d, rcvlowat: 1GB, rto_min: %[3]s, delack_max: %[3]s, window_clamp: 1, priority: 5, tos: 0x13", snd+1000, rcv+1000, uneven)))
	p := connect(t, testenv.Listen(t, "127.0.0.1:0"))
	v := k.effective(p.accepted, nil)
	rounded := "rounded up to jiffies of " + config.FormatValue(time, jiffy)
	expect(t, v["sndbuf"], config.FormatValue(size, snd+1000), config.FormatValue(size, 2*snd), "SO_SNDBUF", true, "cut to net.core.wmem_max, "+config.FormatValue(size, snd), "doubles")
	expect(t, v["rcvbuf"], config.FormatValue(size, rcv+1000), config.FormatValue(size, 2*rcv), "SO_RCVBUF", true, "cut to net.core.rmem_max, "+config.FormatValue(size, rcv), "doubles")
	if readable {
		expect(t, v["rto_min"], uneven, config.FormatValue(time, 21*jiffy), "TCP_RTO_MIN_US", false, rounded)
		expect(t, v["delack_max"], uneven, config.FormatValue(time, 21*jiffy), "TCP_DELACK_MAX_US", false, rounded, "less than the smallest RTO, "+config.FormatValue(time, 21*jiffy))
	} else {
		expect(t, v["rto_min"], uneven, v["rto_min"].Effective, "TCP_INFO rto", false, "cannot be read before Linux 6.15")
		expect(t, v["delack_max"], uneven, v["delack_max"].Effective, "TCP_INFO ato", false, "cannot be read before Linux 6.15")
	}
	expect(t, v["window_clamp"], "1B", v["window_clamp"].Effective, "TCP_WINDOW_CLAMP", true, "computes it anew")
	expect(t, v["tos"], "19", v["tos"].Effective, "IP_TOS", false, "for ECN")
	expect(t, v["priority"], "5", "5", "SO_PRIORITY", false, "") // though IP_TOS sets the priority too
	// A socket that is not accepted is not limited: only a socket of a process is.
	v = k.effective(p.connected, nil)
	expect(t, v["rcvlowat"], "1GB", config.FormatValue(size, rcv), "SO_RCVLOWAT", true, "cut to half of the receive buffer")

	k.install(oneRule(has(t, "sndbuf: 2048, rcvbuf: 1024, rcvlowat: 1KB, rto_max: 1000001us")))
	p = connect(t, testenv.Listen(t, "127.0.0.1:0"))
	v = k.effective(p.accepted, nil)
	expect(t, v["sndbuf"], "2KiB", v["sndbuf"].Effective, "SO_SNDBUF", true, "raised to the kernel's smallest buffer")
	expect(t, v["rcvbuf"], "1KiB", v["rcvbuf"].Effective, "SO_RCVBUF", true, "raised to the kernel's smallest buffer")
	expect(t, v["rcvlowat"], "1KB", "1KB", "SO_RCVLOWAT", false, "")
	seeing(t, v)("rto_max", "1.000001s", "1s", "TCP_RTO_MAX_MS", false, rounded)

	large := min(1000*1000, rcv)
	asked, got := config.FormatValue(size, large), config.FormatValue(size, 2*large)
	k.install("tune: [{name: none, cgroup: CGROUP, match: {remote_port: 1}, set: {rcvbuf: 1MB}}]\n")
	l := testenv.Listen(t, "127.0.0.1:0")
	raw, err := l.SyscallConn()
	check(t, err)
	p = connect(t, l)
	k.install(oneRule(fmt.Sprintf("rcvbuf: %d", large)))
	k.apply(nil)
	v = k.effective(p.accepted, nil)
	notes := []string{"doubles"}
	// Newer kernels compute the value at once.
	if clamp := option(t, p.accepted, unix.SOL_TCP, unix.TCP_WINDOW_CLAMP); int64(clamp) < large/2 {
		notes = append(notes, "64KiB for now: TCP_WINDOW_CLAMP")
	}
	expect(t, v["rcvbuf"], asked, got, "SO_RCVBUF", false, notes...)
	transferBetween(t, p.connected, p.accepted, 1<<20)
	expect(t, k.effective(p.accepted, nil)["rcvbuf"], asked, got, "SO_RCVBUF", false, "doubles")
	check(t, raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 8192) }))
	check(t, err)
	p = connect(t, l)
	v = k.effective(p.accepted, nil)
	expect(t, v["rcvbuf"], asked, got, "SO_RCVBUF", false, "at most 65535B", "at the SYN, by the listener's receive buffer")
}

func TestEffectiveChangedSince(t *testing.T) {
	k := newTuning(t, oneRule(has(t, "sndbuf: 150KB, rcvbuf: 150KB, pacing_rate: 1Gbit/s, congestion: reno, tos: 0x20, nodelay: true, user_timeout: 5s")))
	p := connect(t, testenv.Listen(t, "127.0.0.1:0"))
	locks := tells(t, unix.SOL_SOCKET, unix.SO_BUF_LOCK)
	control(t, p.connected, func(fd int) {
		check(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 100000))
		if locks {
			check(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK, unix.SOCK_SNDBUF_LOCK))
		}
		check(t, unix.SetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, ^uint64(0)))
		check(t, unix.SetsockoptString(fd, unix.SOL_TCP, unix.TCP_CONGESTION, "cubic"))
		check(t, unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TOS, 0))
		check(t, unix.SetsockoptInt(fd, unix.SOL_TCP, unix.TCP_NODELAY, 0))
	})
	v := k.effective(p.connected, nil)
	see := seeing(t, v)
	expect(t, v["sndbuf"], "150KB", "200KB", "SO_SNDBUF", true, changed)
	if locks {
		expect(t, v["rcvbuf"], "150KB", "300KB", "SO_RCVBUF", true, "the kernel tunes it")
	}
	expect(t, v["pacing_rate"], "1Gbit/s", "no bound", "SO_MAX_PACING_RATE", true, changed)
	expect(t, v["congestion"], "reno", "cubic", "TCP_CONGESTION", true, changed)
	see("tos", "32", "0", "IP_TOS", true, changed)
	see("nodelay", "true", "false", "TCP_NODELAY", true, changed)
	expect(t, v["user_timeout"], "5s", "5s", "TCP_USER_TIMEOUT", false, "")
}

func TestEffectiveControlArm(t *testing.T) {
	k := newTuning(t, "tune: [{name: r, cgroup: CGROUP, set: {user_timeout: 5s, cwnd_clamp: 100, flow_label: 1}, trial: {control: 50%}}]\n")
	l := testenv.Listen(t, "127.0.0.1:0")
	const alone = "not set: control arm of the trial"
	for arms := make(map[uint8]bool); len(arms) < bpf.TuneArms; {
		p := connect(t, l)
		var arm uint8
		v := k.effective(p.connected, func(c *bpf.TuneConnection) { arm = c.Arm })
		arms[arm] = true
		if int(arm) == bpf.TuneArmControl {
			expect(t, v["user_timeout"], "5s", "0us", "TCP_USER_TIMEOUT", true, alone)
			expect(t, v["cwnd_clamp"], "100", "10", "TCP_INFO snd_cwnd", false, alone)
			expect(t, v["flow_label"], "1", "", "not readable", false, alone)
		} else {
			expect(t, v["user_timeout"], "5s", "5s", "TCP_USER_TIMEOUT", false, "")
		}
	}
}

// TestEffectiveReaction expects the values of the reaction after it took place.
func TestEffectiveReaction(t *testing.T) {
	k := newTuning(t, "tune: [{name: r, cgroup: CGROUP, set: {congestion: cubic, user_timeout: 5s}, react: {rtos: '> 2', set: {congestion: reno, cwnd_clamp: 10}}}]\n")
	p := connect(t, testenv.Listen(t, "[::1]:0"))
	v := k.effective(p.accepted, nil)
	expect(t, v["congestion"], "cubic", "cubic", "TCP_CONGESTION", false, "")
	if len(v) != 2 {
		t.Errorf("before the reaction: %v", v)
	}
	control(t, p.accepted, func(fd int) {
		check(t, unix.SetsockoptString(fd, unix.SOL_TCP, unix.TCP_CONGESTION, "reno"))
	})
	v = k.effective(p.accepted, func(c *bpf.TuneConnection) { c.Flags |= bpf.TuneConnectionReacted })
	expect(t, v["congestion"], "reno", "reno", "TCP_CONGESTION", false, "the rule's reaction")
	expect(t, v["cwnd_clamp"], "10", "10", "TCP_INFO snd_cwnd", false, "the rule's reaction")
	expect(t, v["user_timeout"], "5s", "5s", "TCP_USER_TIMEOUT", false, "")
	if len(v) != 3 {
		t.Errorf("after the reaction: %v", v)
	}
}

func TestEffectiveLearned(t *testing.T) {
	k := newTuning(t, oneRule("initial_cwnd: {explore: [20, 30], by: remote/24, share: 100%, probe: 100%}"))
	p := connect(t, testenv.Listen(t, "127.0.0.1:0"))
	v := k.effective(p.accepted, nil)["initial_cwnd"]
	if v.Requested != v.Effective+", one of 20, 30" || !slices.Contains([]string{"20", "30"}, v.Effective) {
		t.Errorf("%+v", v)
	}
}

// TestEffectiveOfMappedAddresses checks an IPv6 socket with IPv4-mapped addresses.
func TestEffectiveOfMappedAddresses(t *testing.T) {
	k := newTuning(t, oneRule(has(t, "tos: 0x20, traffic_class: 0x20")))
	l := testenv.Listen(t, "[::]:0")
	_, port, _ := net.SplitHostPort(l.Addr().String())
	p := connectTo(t, l, "127.0.0.1:"+port)
	v := k.effective(p.accepted, nil)
	seeing(t, v)("tos", "32", "", "", false, "an IPv6 socket with an IPv4 peer")
	expect(t, v["traffic_class"], "32", "32", "IPV6_TCLASS", false, "")
	p = connect(t, testenv.Listen(t, "127.0.0.1:0"))
	v = k.effective(p.connected, nil)
	seeing(t, v)("tos", "32", "32", "IP_TOS", false, "")
}

func TestEffectiveRefuses(t *testing.T) {
	l := testenv.Listen(t, "127.0.0.1:0")
	raw, err := l.SyscallConn()
	check(t, err)
	check(t, raw.Control(func(fd uintptr) {
		s, err := procsock.Take(os.Getpid(), int(fd))
		check(t, err)
		defer s.Close()
		if v, err := tune.Effective(s, config.TuneRule{}, nil); err == nil {
			t.Errorf("values of a listener: %v", v)
		}
	}))
}
