// SPDX-License-Identifier: Apache-2.0

package tune_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/cgroup"
	"sockeye/internal/config"
	"sockeye/internal/testenv"
	"sockeye/internal/tune"
)

// apply applies the installed rules to the open connections of the tests' cgroup.
func (k *tuning) apply(only func(string) bool) tune.Report {
	k.t.Helper()
	had := descriptors(k.t)
	r, err := tune.Apply(k.Tune, testenv.Cgroup(), only, anyway)
	if got := descriptors(k.t); got != had {
		k.t.Errorf("%d open files after Apply, had %d", got, had)
	}
	checkLive(k.t, err)
	r.Problems = k.problems(r)
	return r
}

// anyway records nothing.
func anyway(uint64, tune.SavedConnection) error { return nil }

// problems returns the problems of single sockets and processes.
func (k *tuning) problems(r tune.Report) []string {
	last := len(r.Problems) - 1
	if last < 0 || !strings.HasSuffix(r.Problems[last], "are not counted and never react: not supported before Linux 6.12") {
		return r.Problems
	}
	if !olderThan(k.t, "6.12") {
		k.t.Errorf("problem %q, on a kernel that is not older", r.Problems[last])
	}
	k.unseen = true
	return r.Problems[:last]
}

// checkLive skips a test if the kernel cannot set options of open connections.
func checkLive(t testing.TB, err error) {
	t.Helper()
	if errors.Is(err, ebpf.ErrNotSupported) {
		if !strings.HasPrefix(err.Error(), "set options of open connections: not supported before Linux 5.15: ") || strings.Contains(err.Error(), "\n") {
			t.Errorf("error text %q", err)
		}
		lacking(t, "5.15", err)
	}
	check(t, err)
}

// revert reverts the changes, with the saved state written to a file and read back.
func (k *tuning) revert(saved tune.Saved) tune.Reverted {
	k.t.Helper()
	text, err := json.Marshal(saved)
	check(k.t, err)
	var read tune.Saved
	check(k.t, json.Unmarshal(text, &read))
	had := descriptors(k.t)
	r, err := tune.Revert(k.Tune, testenv.Cgroup(), read)
	if got := descriptors(k.t); got != had {
		k.t.Errorf("%d open files after Revert, had %d", got, had)
	}
	checkLive(k.t, err)
	return r
}

// readings returns all values of a connection that this kernel reports, and the locks of its buffers.
func readings(t testing.TB, c *net.TCPConn) map[string]string {
	t.Helper()
	values := make(map[string]string)
	control(t, c, func(fd int) {
		family := sockopt(t, fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		for _, o := range []struct {
			name          string
			level, option int
			family        int
		}{
			{"sndbuf", unix.SOL_SOCKET, unix.SO_SNDBUF, 0},
			{"rcvbuf", unix.SOL_SOCKET, unix.SO_RCVBUF, 0},
			{"locks", unix.SOL_SOCKET, unix.SO_BUF_LOCK, 0},
			{"rcvlowat", unix.SOL_SOCKET, unix.SO_RCVLOWAT, 0},
			{"priority", unix.SOL_SOCKET, unix.SO_PRIORITY, 0},
			{"mark", unix.SOL_SOCKET, unix.SO_MARK, 0},
			{"keepalive", unix.SOL_SOCKET, unix.SO_KEEPALIVE, 0},
			{"reuse_address", unix.SOL_SOCKET, unix.SO_REUSEADDR, 0},
			{"txrehash", unix.SOL_SOCKET, unix.SO_TXREHASH, 0},
			{"delack_max", unix.SOL_TCP, unix.TCP_DELACK_MAX_US, 0},
			{"rto_min", unix.SOL_TCP, unix.TCP_RTO_MIN_US, 0},
			{"rto_max", unix.SOL_TCP, unix.TCP_RTO_MAX_MS, 0},
			{"notsent_lowat", unix.SOL_TCP, unix.TCP_NOTSENT_LOWAT, 0},
			{"window_clamp", unix.SOL_TCP, unix.TCP_WINDOW_CLAMP, 0},
			{"user_timeout", unix.SOL_TCP, unix.TCP_USER_TIMEOUT, 0},
			{"keepalive_idle", unix.SOL_TCP, unix.TCP_KEEPIDLE, 0},
			{"keepalive_interval", unix.SOL_TCP, unix.TCP_KEEPINTVL, 0},
			{"keepalive_probes", unix.SOL_TCP, unix.TCP_KEEPCNT, 0},
			{"nodelay", unix.SOL_TCP, unix.TCP_NODELAY, 0},
			{"thin_linear_timeouts", unix.SOL_TCP, unix.TCP_THIN_LINEAR_TIMEOUTS, 0},
			{"tos", unix.SOL_IP, unix.IP_TOS, unix.AF_INET},
			{"traffic_class", unix.SOL_IPV6, unix.IPV6_TCLASS, unix.AF_INET6},
			{"auto_flow_label", unix.SOL_IPV6, unix.IPV6_AUTOFLOWLABEL, unix.AF_INET6},
		} {
			if o.family == 0 || o.family == family {
				value, err := unix.GetsockoptInt(fd, o.level, o.option)
				if errors.Is(err, unix.ENOPROTOOPT) {
					continue
				}
				check(t, err)
				values[o.name] = strconv.Itoa(value)
			}
		}
		name, err := unix.GetsockoptString(fd, unix.SOL_TCP, unix.TCP_CONGESTION)
		check(t, err)
		values["congestion"] = name
		rate, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE)
		check(t, err)
		values["pacing_rate"] = strconv.FormatUint(rate, 10)
	})
	return values
}

// differences names the values that differ.
func differences(a, b map[string]string) []string {
	var names []string
	for name := range a {
		if a[name] != b[name] {
			names = append(names, name+" "+a[name]+" "+b[name])
		}
	}
	slices.Sort(names)
	return names
}

// flow sends random data over connections in both directions until it is stopped.
type flow struct {
	t    testing.TB
	stop chan struct{}
	once sync.Once
	wait sync.WaitGroup
}

func startFlow(t testing.TB, pairs ...pair) *flow {
	f := &flow{t: t, stop: make(chan struct{})}
	for _, p := range pairs {
		f.pump(p.connected, p.accepted)
		f.pump(p.accepted, p.connected)
	}
	return f
}

func (f *flow) pump(from, to *net.TCPConn) {
	seed := maphash.MakeSeed()
	sent, got := make(chan uint64, 1), make(chan uint64, 1)
	f.wait.Go(func() {
		var h maphash.Hash
		h.SetSeed(seed)
		defer func() { sent <- h.Sum64() }()
		b := make([]byte, 1<<15)
		for {
			select {
			case <-f.stop:
				if err := from.CloseWrite(); err != nil {
					f.t.Error(err)
				}
				return
			default:
			}
			for i := 0; i < len(b); i += 512 {
				b[i] = byte(rand.Uint32())
			}
			h.Write(b)
			if _, err := from.Write(b); err != nil {
				f.t.Error(err)
				return
			}
		}
	})
	f.wait.Go(func() {
		var h maphash.Hash
		h.SetSeed(seed)
		defer func() { got <- h.Sum64() }()
		if _, err := io.Copy(&h, to); err != nil {
			f.t.Error(err)
		}
	})
	f.wait.Go(func() {
		if s, g := <-sent, <-got; s != g {
			f.t.Errorf("%v -> %v: what arrives is not what was sent", from.LocalAddr(), from.RemoteAddr())
		}
	})
}

// end closes the connections and checks the received data.
func (f *flow) end() {
	f.once.Do(func() { close(f.stop) })
	f.wait.Wait()
}

const bothRoles = `tune:
  - {name: c, cgroup: CGROUP, match: {role: connect}, set: {sndbuf: 150KB, user_timeout: 5s, congestion: reno, cwnd_clamp: 90, initial_cwnd: 40}}
  - {name: a, cgroup: CGROUP, match: {role: accept}, set: {rcvbuf: 150KB, rto_min: 20ms, tos: 0x20, traffic_class: 0x40}}
`

// TestApply applies rules to connections of this process and of another process, while they transfer data.
func TestApply(t *testing.T) {
	var pairs []pair
	for _, address := range families {
		l := testenv.Listen(t, address)
		for range flows {
			pairs = append(pairs, connect(t, l))
		}
	}
	child := testenv.StartServer(t, testenv.Subgroup(t, "served"), "127.0.0.1:0", 0)
	toChild, err := net.Dial("tcp", child.Address)
	check(t, err)
	defer toChild.Close()
	testenv.Within(t, "the child accepts", func() bool {
		return openSockets(t) == len(families)+2*len(pairs)+3
	})
	f := startFlow(t, pairs...)
	defer f.end()
	k := newTuning(t, bothRoles)
	for _, p := range pairs {
		if k.ruleOf(p.connected) != "" {
			t.Fatal("an open connection has a rule before Apply")
		}
	}

	r := k.apply(nil)
	want := map[string]int{"c": len(pairs) + 1, "a": len(pairs) + 1}
	if r.TunedLive != 2*len(pairs)+2 || r.ByRule["c"] != want["c"] || r.ByRule["a"] != want["a"] || r.AlreadyTuned+r.NoRule+r.NotAsked+r.Control != 0 {
		t.Errorf("report %+v, want %v", r, want)
	}
	// c: sndbuf, user_timeout, congestion, cwnd_clamp; a: rcvbuf, rto_min and one of the newest options.
	if options := 4*want["c"] + 3*want["a"]; r.Options != options || len(r.Failures) > 0 || len(r.Problems) > 0 || len(r.Saved) != r.TunedLive {
		t.Errorf("report %+v, want %d options set", r, options)
	}
	for rule, n := range want {
		if s := k.stats(rule, bpf.TuneArmTreated); s.Adopted != uint64(n) || s.Connections != uint64(n) || s.Established != uint64(n) {
			t.Errorf("%s: %d adopted of %d connections, want %d", rule, s.Adopted, s.Connections, n)
		}
	}
	for _, p := range pairs {
		v := k.effective(p.connected, nil)
		expect(t, v["sndbuf"], "150KB", "300KB", "SO_SNDBUF", false)
		expect(t, v["user_timeout"], "5s", "5s", "TCP_USER_TIMEOUT", false, "")
		expect(t, v["congestion"], "reno", "reno", "TCP_CONGESTION", false, "")
		expect(t, v["initial_cwnd"], "40", v["initial_cwnd"].Effective, "TCP_INFO snd_cwnd", v["initial_cwnd"].Differs, "not set: the connection was open before it had the rule")
		v = k.effective(p.accepted, nil)
		expect(t, v["rcvbuf"], "150KB", "300KB", "SO_RCVBUF", false)
		if tells(t, unix.SOL_TCP, unix.TCP_RTO_MIN_US) {
			expect(t, v["rto_min"], "20ms", "20ms", "TCP_RTO_MIN_US", false, "")
		} else {
			expect(t, v["rto_min"], "20ms", v["rto_min"].Effective, "TCP_INFO rto", false, "cannot be read before Linux 6.15")
		}
		if v["tos"].Effective+v["traffic_class"].Effective == "" || v["tos"].Differs || v["traffic_class"].Differs {
			t.Errorf("%+v, %+v", v["tos"], v["traffic_class"])
		}
	}

	again := connect(t, testenv.Listen(t, "127.0.0.1:0"))
	if k.ruleOf(again.connected) != "c" {
		t.Fatal("a new connection does not have its rule")
	}
	r = k.apply(nil)
	if r.TunedLive != 0 || r.AlreadyTuned != 2*len(pairs)+4 || len(r.Saved) != 0 || r.Options != 0 {
		t.Errorf("once more: %+v, want all tuned", r)
	}
	f.end()
	testenv.Within(t, "closed connections are counted", func() bool {
		for _, p := range pairs {
			p.connected.Close()
			p.accepted.Close()
		}
		s := k.stats("c", bpf.TuneArmTreated)
		if k.unseen {
			// The adopted connections are closed, and are not counted.
			return s.Closed == uint64(len(pairs)+1) && s.Bytes == 0
		}
		return s.Closed == uint64(len(pairs)) && s.Bytes > 0
	})
}

func TestApplyOnly(t *testing.T) {
	p := connect(t, testenv.Listen(t, "[::1]:0"))
	k := newTuning(t, bothRoles)
	r := k.apply(func(rule string) bool { return rule == "a" })
	if r.TunedLive != 1 || r.NotAsked != 1 || k.ruleOf(p.connected) != "" || k.ruleOf(p.accepted) != "a" {
		t.Errorf("report %+v, rules %q, %q", r, k.ruleOf(p.connected), k.ruleOf(p.accepted))
	}
	k.install("tune: [{name: other, cgroup: CGROUP, match: {remote_port: 1}, set: {user_timeout: 1s}}]\n")
	if r = k.apply(nil); r.TunedLive != 0 || r.NoRule != 2 || k.ruleOf(p.accepted) != "a" {
		t.Errorf("report %+v, rule %q", r, k.ruleOf(p.accepted))
	}
}

// TestApplyAfterAChange checks that the next rule takes over from a removed rule.
func TestApplyAfterAChange(t *testing.T) {
	p := connect(t, testenv.Listen(t, "127.0.0.1:0"))
	before := readings(t, p.connected)
	k := newTuning(t, oneRule("user_timeout: 1s, nodelay: false"))
	saved := k.apply(nil).Saved
	old := k.id("r")
	k.install(oneRule("user_timeout: 2s, keepalive_probes: 3"))
	r := k.apply(nil)
	if r.TunedLive != 2 || option(t, p.connected, unix.SOL_TCP, unix.TCP_USER_TIMEOUT) != 2000 {
		t.Errorf("report %+v", r)
	}
	s, err := k.Stats(old, bpf.TuneArmTreated)
	check(t, err)
	if s.Connections != 2 || s.Closed != 2 {
		t.Errorf("previous rule: %d of %d connections closed, want all", s.Closed, s.Connections)
	}
	saved.Merge(r.Saved)
	back := k.revert(saved)
	if d := differences(before, readings(t, p.connected)); back.Connections != 2 || len(d) > 0 {
		t.Errorf("reverted %+v, differs in %v", back, d)
	}
	if s := k.stats("r", bpf.TuneArmTreated); s.Connections != 2 || s.Closed != 2 {
		t.Errorf("after Revert %d of %d connections are closed, want all", s.Closed, s.Connections)
	}
}

// TestApplyOrder checks that a new rule in first place takes over connections, by their known role, although their
// listener is closed.
func TestApplyOrder(t *testing.T) {
	k := newTuning(t, oneRule("user_timeout: 1s"))
	l := testenv.Listen(t, "127.0.0.1:0")
	p := connect(t, l)
	check(t, l.Close())
	k.install("tune: [{name: first, cgroup: CGROUP, match: {role: accept}, set: {user_timeout: 2s}}, {name: r, cgroup: CGROUP, set: {user_timeout: 1s}}]\n")
	r := k.apply(nil)
	if r.TunedLive != 1 || r.AlreadyTuned != 1 || k.ruleOf(p.accepted) != "first" || k.ruleOf(p.connected) != "r" {
		t.Errorf("report %+v, rules %q, %q", r, k.ruleOf(p.accepted), k.ruleOf(p.connected))
	}
}

// TestApplyKeepsTagged checks that a connection that matched by its tag keeps its rule.
func TestApplyKeepsTagged(t *testing.T) {
	k := newTuning(t, `tune:
  - {name: tagged, cgroup: CGROUP, match: {role: accept, tag: rack}, set: {user_timeout: 1s}}
  - {name: writer, cgroup: CGROUP, match: {role: connect}, tag: rack}
  - {name: plain, cgroup: CGROUP, match: {role: accept}, set: {user_timeout: 2s}}
`)
	p := connect(t, testenv.Listen(t, "127.0.0.1:0"))
	if got := k.ruleOf(p.accepted); got != "tagged" {
		t.Fatalf("the rule is %q", got)
	}
	r := k.apply(nil)
	if r.AlreadyTuned != 2 || r.TunedLive != 0 || len(r.Saved) != 0 || k.ruleOf(p.accepted) != "tagged" ||
		option(t, p.accepted, unix.SOL_TCP, unix.TCP_USER_TIMEOUT) != 1000 {
		t.Errorf("report %+v, rule %q", r, k.ruleOf(p.accepted))
	}
	k.install("tune: [{name: plain, cgroup: CGROUP, match: {role: accept}, set: {user_timeout: 2s}}]\n")
	if r = k.apply(nil); r.TunedLive != 1 || k.ruleOf(p.accepted) != "plain" {
		t.Errorf("without the tagged rule: %+v, rule %q", r, k.ruleOf(p.accepted))
	}
}

func TestApplyPreparesListeners(t *testing.T) {
	l := testenv.Listen(t, "127.0.0.1:0")
	k := newTuning(t, `tune:
  - {name: tagged, cgroup: CGROUP, match: {role: accept, tag: rack}, set: {user_timeout: 1s}}
  - {name: writer, cgroup: CGROUP, match: {role: connect}, tag: rack}
`)
	if r := k.apply(nil); len(r.Problems) > 0 {
		t.Fatalf("report %+v", r)
	}
	if p := connect(t, l); k.ruleOf(p.accepted) != "tagged" {
		t.Errorf("rule %q of a connection to a listener that was there before", k.ruleOf(p.accepted))
	}
}

func TestApplyTrial(t *testing.T) {
	l := testenv.Listen(t, "127.0.0.1:0")
	var pairs []pair
	for range 40 {
		pairs = append(pairs, connect(t, l))
	}
	k := newTuning(t, "tune: [{name: r, cgroup: CGROUP, set: {user_timeout: 5s}, trial: {control: 50%}}]\n")
	r := k.apply(nil)
	control := 0
	for _, p := range pairs {
		for _, c := range []*net.TCPConn{p.connected, p.accepted} {
			if option(t, c, unix.SOL_TCP, unix.TCP_USER_TIMEOUT) == 0 {
				control++
			}
		}
	}
	if r.TunedLive != 80 || r.Control != control || control == 0 || control == 80 || r.Options != 80-control {
		t.Errorf("report %+v, %d connections are left alone", r, control)
	}
	if s := k.stats("r", bpf.TuneArmControl); s.Adopted != uint64(control) {
		t.Errorf("%d adopted in the control arm, want %d", s.Adopted, control)
	}
	back := k.revert(r.Saved)
	if back.Connections != 80 || back.Options != 80-control || k.ruleOf(pairs[0].connected) != "" {
		t.Errorf("reverted %+v", back)
	}
}

func TestApplyCountsFailures(t *testing.T) {
	connect(t, testenv.Listen(t, "127.0.0.1:0"))
	k := newTuning(t, "")
	k.installRules(config.TuneRule{Name: "r", Set: []config.Setting{{Option: "priority", Value: 3}, {Option: "congestion", Text: "nonesuch"}}})
	r := k.apply(nil)
	want := api.TuneLiveFailure{Rule: "r", Option: "congestion", Error: unix.ENOENT.Error(), Count: 2}
	if r.TunedLive != 2 || r.Options != 2 || len(r.Failures) != 1 || r.Failures[0] != want {
		t.Errorf("report %+v, want the failure %+v", r, want)
	}
	if r = k.apply(nil); len(r.Failures) != 0 {
		t.Errorf("failures of before are counted again: %+v", r)
	}
}

// TestApplyToOthers checks that sockets that cannot be tuned are named with the reason.
func TestApplyToOthers(t *testing.T) {
	here, there := testenv.Subgroup(t, "here"), testenv.Subgroup(t, "there")
	child := testenv.StartServer(t, there, "127.0.0.1:0", 0)
	c, err := net.Dial("tcp", child.Address)
	check(t, err)
	defer c.Close()
	testenv.Within(t, "the child accepts", func() bool { return openSockets(t) == 3 })
	check(t, cgroup.Move(here, child.Process.Pid))

	dir := filepath.Join(testenv.BPFFS(t), "tune_here")
	b, err := bpf.OpenTune(bpf.TuneConfig{Dir: dir, Cgroup: here})
	check(t, err)
	defer func() {
		if err := bpf.RemoveTune(dir); err != nil {
			t.Error(err)
		}
		b.Close()
	}()
	rules, err := tune.Compile(parse(t, oneRule("user_timeout: 5s")).Tune, nil, nil)
	check(t, err)
	check(t, b.Install(rules))
	r, err := tune.Apply(b, here, nil, anyway)
	checkLive(t, err)
	if r.TunedLive != 0 || len(r.Problems) != 2 {
		t.Fatalf("report %+v, want problems with the listener and the connection", r)
	}
	for _, p := range r.Problems {
		if !strings.Contains(p, fmt.Sprintf("of pid %d", child.Process.Pid)) || !strings.Contains(p, "the cgroup in which it was opened") {
			t.Errorf("problem %q", p)
		}
	}
}

func TestApplyToMPTCP(t *testing.T) {
	var config net.ListenConfig
	config.SetMultipathTCP(true)
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	check(t, err)
	defer l.Close()
	if protocol := protocolOf(t, l.(*net.TCPListener)); protocol != unix.IPPROTO_MPTCP {
		t.Skipf("kernel: no MPTCP: protocol %d", protocol)
	}
	var multi, single net.Dialer
	multi.SetMultipathTCP(true)
	single.SetMultipathTCP(false)
	var ends []syscall.Conn
	for _, d := range []*net.Dialer{&multi, &single} {
		c, err := d.DialContext(t.Context(), "tcp", l.Addr().String())
		check(t, err)
		defer c.Close()
		a, err := l.Accept()
		check(t, err)
		defer a.Close()
		ends = append(ends, c.(*net.TCPConn), a.(*net.TCPConn))
	}
	k := newTuning(t, bothRoles)
	r := k.apply(nil)
	// A listener for MPTCP accepts TCP, too.
	if r.ByRule["c"] != 1 || r.ByRule["a"] != 1 || len(r.Problems) != 2 || k.ruleOf(ends[3].(*net.TCPConn)) != "a" {
		t.Errorf("report %+v", r)
	}
	for _, p := range r.Problems {
		if !strings.Contains(p, "MPTCP") {
			t.Errorf("problem %q", p)
		}
	}
}

// liveOptions sets every option that can be set on open connections to a value other than the default.
const liveOptions = `sndbuf: 150KB, rcvbuf: 150KB, rcvlowat: 100, pacing_rate: 2Gbit/s, priority: 3, mark: 7, keepalive: false,
	reuse_address: true, txrehash: false, congestion: reno, cwnd_clamp: 90, delack_max: 20ms, rto_min: 24ms, rto_max: 10s,
	notsent_lowat: 128KiB, window_clamp: 30KB, user_timeout: 5s, keepalive_idle: 7s, keepalive_interval: 8s, keepalive_probes: 4,
	nodelay: false, thin_linear_timeouts: true, tos: 0x10, traffic_class: 0x40, auto_flow_label: false`

// TestRevert reverts every option.
func TestRevert(t *testing.T) {
	for family, address := range families {
		t.Run(family, func(t *testing.T) {
			p := connect(t, testenv.Listen(t, address))
			ends := []*net.TCPConn{p.connected, p.accepted}
			paced := 0 // by bbr, which not every kernel has
			control(t, p.connected, func(fd int) {
				check(t, unix.SetsockoptString(fd, unix.SOL_TCP, unix.TCP_CONGESTION, "cubic"))
			})
			control(t, p.accepted, func(fd int) {
				if unix.SetsockoptString(fd, unix.SOL_TCP, unix.TCP_CONGESTION, "bbr") == nil {
					paced++
				}
			})
			var before []map[string]string
			for _, c := range ends {
				before = append(before, readings(t, c))
			}
			k := newTuning(t, oneRule(has(t, liveOptions)))
			r := k.apply(nil)
			if len(r.Failures) > 0 {
				t.Fatalf("failures: %+v", r.Failures)
			}
			for i, c := range ends {
				now := readings(t, c)
				for name, value := range now {
					// An accepted socket inherits the listener's values.
					if value == before[i][name] && (name != "reuse_address" || c == p.connected) {
						t.Errorf("%s is %s, as before Apply", name, value)
					}
				}
				if got := info(t, c).Snd_ssthresh; got != 90 {
					t.Errorf("snd_ssthresh %d, want the clamp", got)
				}
			}
			back := k.revert(r.Saved)
			if back.Connections != 2 || back.Gone != 0 || len(back.Problems) > 0 || len(back.Remaining) > 0 {
				t.Errorf("reverted %+v", back)
			}
			// Except for the bounds of the window and of the rate, which cannot be restored completely.
			reasons := make(map[string]int)
			for _, l := range back.Left {
				reasons[l.Rule+" "+l.Option] += l.Connections
				if l.Reason == "" {
					t.Errorf("no reason: %+v", l)
				}
			}
			want := map[string]int{"r cwnd_clamp": 2, "r pacing_rate": 2 - paced}
			if !tells(t, unix.SOL_TCP, unix.TCP_RTO_MIN_US) {
				want["r rto_min"], want["r delack_max"] = 2, 2
			}
			if !maps.Equal(reasons, want) {
				t.Errorf("left %+v, want %v", back.Left, want)
			}
			for i, c := range ends {
				if d := differences(before[i], readings(t, c)); len(d) > 0 {
					t.Errorf("before and after Revert: %v", d)
				}
				if got := info(t, c).Snd_ssthresh; got != 1<<31-1 {
					t.Errorf("snd_ssthresh %d, want none", got)
				}
				if name := k.ruleOf(c); name != "" {
					t.Errorf("the connection still has rule %s", name)
				}
			}
			s := k.stats("r", bpf.TuneArmTreated)
			transferBetween(t, p.connected, p.accepted, 1<<20)
			transferBetween(t, p.accepted, p.connected, 1<<20)
			for _, c := range ends {
				c.Close()
			}
			if now := k.stats("r", bpf.TuneArmTreated); *now != *s {
				t.Errorf("the rule goes on counting: %d bytes, had %d", now.Bytes, s.Bytes)
			}
			// Nothing is left to revert.
			again := k.revert(r.Saved)
			if again.Connections != 0 || again.Gone != 2 {
				t.Errorf("of closed connections: %+v", again)
			}
		})
	}
}

// TestRevertUnfinished reverts what is recorded before connections are changed: they are changed, or not yet.
func TestRevertUnfinished(t *testing.T) {
	for family, address := range families {
		t.Run(family, func(t *testing.T) {
			p := connect(t, testenv.Listen(t, address))
			control(t, p.connected, func(fd int) { // later options are the rule's alone
				check(t, unix.SetsockoptString(fd, unix.SOL_TCP, unix.TCP_CONGESTION, "cubic"))
			})
			before := readings(t, p.connected)
			k := newTuning(t, oneRule(has(t, liveOptions)))
			apply := func(failure error) (begun tune.Saved) {
				begun = make(tune.Saved)
				_, err := tune.Apply(k.Tune, testenv.Cgroup(), nil, func(cookie uint64, c tune.SavedConnection) error {
					begun[cookie] = c
					return failure
				})
				if !errors.Is(err, failure) {
					checkLive(t, err)
					t.Errorf("%v, want %v", err, failure)
				}
				return begun
			}
			unchanged := func(when string) {
				t.Helper()
				if d := differences(before, readings(t, p.connected)); len(d) > 0 {
					t.Errorf("%s: %v", when, d)
				}
			}
			begun := apply(unix.ENOSPC)
			unchanged("not begun")
			if back := k.revert(begun); len(begun) != 1 || back.Connections != 0 || back.Options != 0 || len(back.Left) > 0 {
				t.Errorf("not changed: %+v", back)
			}
			if begun = apply(nil); len(begun) != 2 || k.ruleOf(p.connected) != "r" {
				t.Errorf("begun %+v, rule %q", begun, k.ruleOf(p.connected))
			}
			if back := k.revert(begun); back.Connections != 2 || len(back.Problems) > 0 {
				t.Errorf("reverted %+v", back)
			}
			unchanged("reverted")
			if name := k.ruleOf(p.connected); name != "" {
				t.Errorf("the connection still has rule %s", name)
			}
			// A later Apply ends before and after it has changed the connections.
			for _, failure := range []error{unix.ENOSPC, nil} {
				saved := k.apply(nil).Saved
				k.install(oneRule("user_timeout: 99s, sndbuf: 100KB"))
				saved.Merge(apply(failure))
				if back := k.revert(saved); back.Connections != 2 || len(back.Problems) > 0 {
					t.Errorf("%v: reverted %+v", failure, back)
				}
				unchanged(fmt.Sprint("the second one: ", failure))
				k.install(oneRule(has(t, liveOptions)))
			}
		})
	}
}

func info(t testing.TB, c *net.TCPConn) (i *unix.TCPInfo) {
	t.Helper()
	control(t, c, func(fd int) {
		var err error
		i, err = unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
		check(t, err)
	})
	return i
}

// TestRevertTunesAgain checks that the kernel tunes the buffers again as before, while data is transferred.
func TestRevertTunesAgain(t *testing.T) {
	newNetworks(t) // segments that fit into small buffers
	p := connect(t, testenv.Listen(t, "127.0.0.1:0"))
	k := newTuning(t, oneRule("sndbuf: 20KB, rcvbuf: 20KB"))
	snd := func() int { return option(t, p.connected, unix.SOL_SOCKET, unix.SO_SNDBUF) }
	rcv := func() int { return option(t, p.accepted, unix.SOL_SOCKET, unix.SO_RCVBUF) }
	window := func() int { return option(t, p.accepted, unix.SOL_TCP, unix.TCP_WINDOW_CLAMP) }
	wasSnd, wasRcv, wasWindow := snd(), rcv(), window()
	r := k.apply(nil)
	f := startFlow(t, p)
	defer f.end()
	sent := info(t, p.connected).Bytes_acked
	testenv.Within(t, "data flows", func() bool { return info(t, p.connected).Bytes_acked > sent+4<<20 })
	if snd() != 40000 || rcv() != 40000 {
		t.Errorf("buffers of %d and %d bytes, want 40000", snd(), rcv())
	}
	// The kernel has computed the bound of the window from the small buffer.
	if window() >= wasWindow && !olderThan(t, "6.11") {
		t.Errorf("the window is bounded by %d bytes, was by %d", window(), wasWindow)
	}
	k.revert(r.Saved)
	if window() < wasWindow {
		t.Errorf("after Revert the window is bounded by %d bytes, was by %d", window(), wasWindow)
	}
	testenv.Within(t, fmt.Sprintf("the receive buffer grows from %d", wasRcv), func() bool { return rcv() > wasRcv })
	testenv.Within(t, fmt.Sprintf("the send buffer grows from %d", wasSnd), func() bool { return snd() > wasSnd })
}

// TestRevertLargeBuffers restores sizes that SO_SNDBUF and SO_RCVBUF cannot set. The buffers start at the largest
// size: a connection to a host with known reordering starts with a larger send buffer (tcp_init_metrics).
func TestRevertLargeBuffers(t *testing.T) {
	sysctl(t, "net/ipv4/tcp_rmem", "4096 30000000 30000000")
	sysctl(t, "net/ipv4/tcp_wmem", "4096 30000000 30000000")
	p := connect(t, testenv.Listen(t, "127.0.0.1:0"))
	before := readings(t, p.connected)
	if before["rcvbuf"] != "30000000" || before["sndbuf"] != "30000000" {
		t.Fatalf("buffers of %s and %s bytes", before["sndbuf"], before["rcvbuf"])
	}
	k := newTuning(t, oneRule("sndbuf: 20KB, rcvbuf: 20KB"))
	r := k.apply(nil)
	d := differences(before, readings(t, p.connected))
	// Newer kernels compute the bound of the window at once.
	d = slices.DeleteFunc(d, func(name string) bool { return strings.HasPrefix(name, "window_clamp ") })
	if len(d) != 3 {
		t.Errorf("after Apply: %v, want both buffers and their locks", d)
	}
	k.revert(r.Saved)
	if d := differences(before, readings(t, p.connected)); len(d) > 0 {
		t.Errorf("before and after Revert: %v", d)
	}
}

// TestRevertLeavesChanges checks that values that the application has set since stay.
func TestRevertLeavesChanges(t *testing.T) {
	p := connect(t, testenv.Listen(t, "127.0.0.1:0"))
	k := newTuning(t, oneRule("sndbuf: 150KB, user_timeout: 5s, congestion: reno, priority: 3"))
	r := k.apply(nil)
	control(t, p.connected, func(fd int) {
		check(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 50000))
		check(t, unix.SetsockoptInt(fd, unix.SOL_TCP, unix.TCP_USER_TIMEOUT, 9000))
		check(t, unix.SetsockoptString(fd, unix.SOL_TCP, unix.TCP_CONGESTION, "cubic"))
	})
	back := k.revert(r.Saved)
	var changed []string
	for _, l := range back.Left {
		if strings.Contains(l.Reason, "changed since") {
			changed = append(changed, fmt.Sprint(l.Option, l.Connections))
		}
	}
	slices.Sort(changed)
	if want := "[congestion1 sndbuf1 user_timeout1]"; fmt.Sprint(changed) != want {
		t.Errorf("left %+v, want %s", back.Left, want)
	}
	now := readings(t, p.connected)
	if now["sndbuf"] != "100000" || now["user_timeout"] != "9000" || now["congestion"] != "cubic" || now["priority"] != "0" {
		t.Errorf("after Revert: %v", now)
	}
	if got := option(t, p.accepted, unix.SOL_TCP, unix.TCP_USER_TIMEOUT); got != 0 {
		t.Errorf("user timeout %d of the other side", got)
	}
}

// TestRevertRemaining distinguishes connections that are closed from those that may be open.
func TestRevertRemaining(t *testing.T) {
	k := newTuning(t, "")
	saved := tune.Saved{1<<63 + 5: {Rule: "r"}}
	r := k.revert(saved)
	if r.Gone != 1 || len(r.Remaining) != 0 || r.Connections != 0 {
		t.Errorf("%+v", r)
	}
	text, err := json.Marshal(r)
	if want := `{"connections":0,"options":0,"gone":1,"left":[],"problems":[]}`; err != nil || string(text) != want {
		t.Errorf("%s, %v, want %s", text, err, want)
	}
	text, err = json.Marshal(k.apply(nil))
	if want := `{"tuned_live":0,"by_rule":{},"control":0,"already_tuned":0,"no_rule":0,"not_asked":0,"options":0,"failures":[],"problems":[]}`; err != nil || string(text) != want {
		t.Errorf("%s, %v, want %s", text, err, want)
	}
}

func TestMerge(t *testing.T) {
	number := func(n int64) *tune.Reading { return &tune.Reading{Number: n} }
	saved := tune.Saved{
		1: {Rule: "old", Values: []tune.SavedValue{
			{Option: "sndbuf", Before: number(1), After: number(2)},
			{Option: "cwnd_clamp"},
			{Option: "window_clamp", Before: number(9)},
			{Option: "user_timeout", Before: number(10), After: number(20)},
			{Option: "nodelay", Before: number(0), After: number(1)},
		}},
		2: {Rule: "alone"},
	}
	saved.Merge(tune.Saved{
		1: {Rule: "new", Values: []tune.SavedValue{
			{Option: "sndbuf", Before: number(2), After: number(3)},
			{Option: "cwnd_clamp"},
			{Option: "window_clamp", Before: number(8)},                     // the kernel's
			{Option: "user_timeout", Before: number(15), After: number(30)}, // the application's
			{Option: "tos", Before: number(0), After: number(4)},
		}},
		3: {Rule: "new"},
	})
	got, err := json.Marshal(saved)
	check(t, err)
	want := `{"1":{"rule":"new","local":"","remote":"","values":[` +
		`{"option":"sndbuf","before":{"number":1},"after":{"number":3}},{"option":"cwnd_clamp"},{"option":"window_clamp","before":{"number":9}},` +
		`{"option":"user_timeout","before":{"number":15},"after":{"number":30}},` +
		`{"option":"nodelay","before":{},"after":{"number":1}},` +
		`{"option":"tos","before":{},"after":{"number":4}}]},` +
		`"2":{"rule":"alone","local":"","remote":"","values":null},"3":{"rule":"new","local":"","remote":"","values":null}}`
	if !bytes.Equal(got, []byte(want)) {
		t.Errorf("%s\nwant %s", got, want)
	}
}

// TestApplyWhileProcessesEnd kills processes during apply.
func TestApplyWhileProcessesEnd(t *testing.T) {
	k := newTuning(t, oneRule("user_timeout: 5s"))
	for range killings {
		had := descriptors(t)
		s := testenv.StartServer(t, testenv.Cgroup(), "127.0.0.1:0", 0)
		var clients []net.Conn
		for range 50 {
			c, err := net.Dial("tcp", s.Address)
			check(t, err)
			clients = append(clients, c)
		}
		k.install(oneRule(fmt.Sprintf("user_timeout: %ds", 1+rand.IntN(1000))))
		killed := make(chan struct{})
		go func() {
			defer close(killed)
			s.Kill()
		}()
		for ended := false; !ended; {
			select {
			case <-killed:
				ended = true
			default:
			}
			r, err := tune.Apply(k.Tune, testenv.Cgroup(), nil, anyway)
			checkLive(t, err)
			if len(k.problems(r)) > 0 {
				t.Fatalf("%+v", r)
			}
		}
		for _, c := range clients {
			c.Close()
		}
		s.Stop.Close()
		if got := descriptors(t); got != had {
			t.Errorf("%d open files, had %d", got, had)
		}
	}
}
