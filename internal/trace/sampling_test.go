// SPDX-License-Identifier: Apache-2.0

package trace_test

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/match"
	"sockeye/internal/netns"
	"sockeye/internal/sockaddr"
	"sockeye/internal/testenv"
	"sockeye/internal/trace"
	"sockeye/internal/trace/measure"
	"sockeye/lab"
)

// about fails the test unless a count is within the range of chance; a correct count fails once in 1.7 million times.
func about(t testing.TB, what string, got uint64, want, variance float64) {
	t.Helper()
	if math.Abs(float64(got)-want) > 5*math.Sqrt(variance)+1 {
		t.Errorf("%s: %d, want %.0f or so (standard deviation %.1f)", what, got, want, math.Sqrt(variance))
	}
}

// TestShares samples messages and connections by share.
func TestShares(t *testing.T) {
	policy := func(connections, messages int) string {
		return fmt.Sprintf("trace: [{cgroup: CGROUP, match: {role: connect}, connections: 1/%d, messages: 1/%d}]", connections, messages)
	}
	t.Run("messages", func(t *testing.T) {
		for _, m := range []int{2, 10, 100} {
			k := newTracing(t, policy(1, m))
			const n = 100_000 / fewer
			sending{connections: 2, messages: n / 2, domain: unix.AF_INET}.run(loopback(t))
			// Gaps are uniformly distributed from 1 to 2m - 1, with the variance (m^2 - m) / 3.
			about(t, fmt.Sprintf("1/%d of %d", m, n), k.settled().Chosen, n/float64(m), n/float64(3*m))
			check(t, bpf.RemoveTrace(k.dir))
		}
	})
	// The first message of a connection is sampled like any other.
	t.Run("short connections", func(t *testing.T) {
		for _, m := range []int{2, 10} {
			k := newTracing(t, policy(1, m))
			const n, each = 1000 / fewer, 3
			sending{connections: n, messages: each, domain: unix.AF_INET}.run(loopback(t))
			about(t, fmt.Sprintf("1/%d of %d", m, n*each), k.settled().Chosen, n*each/float64(m), n*each/float64(m))
			check(t, bpf.RemoveTrace(k.dir))
		}
	})
	// A period of the application does not bias the sample.
	t.Run("periodic messages", func(t *testing.T) {
		const period, n = 10, 20_000
		k := newTracing(t, policy(1, period))
		s := k.samples()
		sending{connections: 1, messages: n, domain: unix.AF_INET, length: func(i int) int { return 100 + i%period },
			flags: func(int) int { return unix.MSG_EOR }}.run(loopback(t))
		r := k.settled()
		seen := make(map[uint32]uint64)
		samples := s.wait(int(r.Chosen - r.Outcomes[measure.Full]))
		for _, sample := range samples {
			seen[sample.Message.Length-100]++
		}
		for i := range uint32(period) {
			want := float64(len(samples)) / period
			about(t, fmt.Sprintf("message %d of %d", i, period), seen[i], want, want)
		}
	})
	t.Run("connections", func(t *testing.T) {
		const n, share = 1000, 10
		k := newTracing(t, policy(share, 1))
		w := loopback(t)
		listener, at := w.listen(unix.AF_INET)
		var all []ends
		for range n {
			c := w.connectTo(listener, at)
			check(t, send(c.connected, []byte{1}, 0))
			all = append(all, c)
		}
		chosen := k.settled().Chosen
		about(t, "connections", chosen, n/share, n/share)
		// Connections that were not sampled stay so when they are examined again.
		for range 3 {
			adopted, err := trace.SelectOpen(k.Trace, k.cgroup)
			check(t, err)
			if uint64(adopted.Chosen) != chosen {
				t.Errorf("%d connections chosen when they were made, and %d later", chosen, adopted.Chosen)
			}
		}
		for _, c := range all {
			shut(c.connected, c.accepted)
		}
	})
}

// TestSkipped checks that messages that are not chosen are only counted, unless the application uses timestamps.
func TestSkipped(t *testing.T) {
	k := newTracing(t, "trace: [{cgroup: CGROUP, match: {role: connect}, messages: 1/1000000}]")
	c := loopback(t).connect(unix.AF_INET, noDelay)
	done := drain(c.accepted)
	state := func() *bpf.TraceConnection {
		t.Helper()
		s, err := k.Connection(c.connected)
		check(t, err)
		if s == nil {
			t.Fatal("the connection is not traced")
		}
		return s
	}
	first := state()
	const messages = 10
	for range messages {
		check(t, send(c.connected, make([]byte, size), 0))
	}
	s := state()
	// By chance, one of 100,000 runs chooses one of them.
	if s.Skip != first.Skip-messages || s.WriteSeq != first.WriteSeq || s.Skipped != 1 {
		t.Errorf("%d messages to skip after %d messages, had %d; key %#x, had %#x", s.Skip, messages, first.Skip, s.WriteSeq, first.WriteSeq)
	}
	shut(c.connected, c.accepted)
	<-done
}

// TestRates samples a limited number of messages of a connection per second.
func TestRates(t *testing.T) {
	for _, most := range []int{3, 1000} {
		t.Run(fmt.Sprint(most), func(t *testing.T) {
			k := newTracing(t, fmt.Sprintf("trace: [{cgroup: CGROUP, match: {role: connect}, messages: %d/s}]", most))
			s := k.samples()
			const connections = 2
			w := loopback(t)
			listener, at := w.listen(unix.AF_INET)
			start := time.Now()
			var wait sync.WaitGroup
			var sent, due atomic.Uint64
			interval := time.Second / time.Duration(most)
			for range connections {
				c := w.connectTo(listener, at)
				done := drain(c.accepted)
				wait.Go(func() {
					// due counts the messages that are an interval apart. A sender that waits for a CPU has fewer.
					next := time.Duration(0)
					for now := time.Since(start); now < time.Second; now = time.Since(start) {
						if now >= next {
							due.Add(1)
							next = now + interval
						}
						if err := send(c.connected, make([]byte, 100), unix.MSG_EOR); err != nil {
							t.Error(err)
						}
						sent.Add(1)
					}
					shut(c.connected)
					<-done
				})
			}
			wait.Wait()
			took := time.Since(start)
			r := k.settled()
			t.Logf("in %v %s", took, account(r))
			if limit := uint64(connections * (took.Seconds()*float64(most) + 1)); r.Chosen > limit || r.Chosen < due.Load()/2 {
				t.Errorf("%d of %d chosen in %v, want %d at most, and most of %d that are %v apart", r.Chosen, sent.Load(), took, limit, due.Load(), interval)
			}
			last := make(map[uint64]uint64)
			samples := s.wait(int(r.Chosen - r.Outcomes[measure.Full]))
			slices.SortFunc(samples, func(a, b bpf.TraceSample) int { return cmp.Compare(a.Message.Sent, b.Message.Sent) })
			for _, sample := range samples {
				sent := sample.Message.Sent
				if gap := time.Duration(sent - last[sample.Cookie]); gap < interval {
					t.Errorf("%v between two messages", gap)
				}
				last[sample.Cookie] = sent
			}
		})
	}
}

// TestSlowest finds the slowest messages of each group and minute, while messages of connections end on all CPUs.
func TestSlowest(t *testing.T) {
	k := newTracing(t, "trace: [{cgroup: CGROUP, match: {role: connect}, messages: 1/1, group_by: port}]")
	s := k.samples()
	w := loopback(t)
	var wait sync.WaitGroup
	for range 3 {
		wait.Go(func() {
			sending{connections: 3, messages: 2000, domain: unix.AF_INET, flags: func(i int) int { return i % 2 * unix.MSG_EOR }}.run(w)
		})
	}
	wait.Wait()
	r := k.settled()
	type place struct {
		group  uint32
		minute uint64
	}
	all, kept := make(map[place][]uint64), make(map[place][]uint64)
	for _, sample := range s.wait(int(r.Chosen - r.Outcomes[measure.Full])) {
		at := place{sample.Group, sample.Ended >> bpf.TraceMinuteShift}
		if outcome := measure.Outcomes[sample.Outcome]; outcome != measure.Overwritten && outcome != measure.Missed {
			all[at] = append(all[at], sample.Total)
		}
	}
	groups, err := k.Groups()
	check(t, err)
	if len(groups) != 3 {
		t.Errorf("%d groups, want 3", len(groups))
	}
	for group := range groups {
		slowest, err := k.Slowest(group)
		check(t, err)
		for _, sample := range slowest {
			at := place{sample.Group, sample.Ended >> bpf.TraceMinuteShift}
			kept[at] = append(kept[at], sample.Total)
		}
	}
	for at, totals := range all {
		slices.Sort(totals)
		slices.Sort(kept[at])
		if want := totals[max(0, len(totals)-bpf.TraceSlowestOf):]; !slices.Equal(kept[at], want) {
			t.Errorf("group %d: slowest are %v, want %v", at.group, kept[at], want)
		}
	}
	// In the order that users request: the slowest first.
	first, err := k.names.Slowest(k.Trace, k.compiled.Rules)
	check(t, err)
	if len(first) < 3*bpf.TraceSlowestOf || !slices.IsSortedFunc(first, func(a, b measure.Sample) int {
		return cmp.Compare(b.Stages[measure.Total], a.Stages[measure.Total])
	}) {
		t.Errorf("%d messages are not in their order", len(first))
	}
}

// TestGroups groups messages by every key.
func TestGroups(t *testing.T) {
	lo, err := netlink.LinkByName("lo")
	check(t, err)
	for _, address := range []string{"fd93:0:0:1::1/128", "fd93:0:0:1::2/128", "fd93:0:0:2::1/128"} {
		a := &netlink.Addr{IPNet: &net.IPNet{IP: netip.MustParsePrefix(address).Addr().AsSlice(), Mask: net.CIDRMask(128, 128)}, Flags: unix.IFA_F_NODAD}
		check(t, netlink.AddrAdd(lo, a))
		check(t, netns.AwaitLocal(&netlink.Handle{}, netip.MustParsePrefix(address).Addr(), time.Minute))
		t.Cleanup(func() { check(t, netlink.AddrDel(lo, a)) })
	}
	w := loopback(t)
	listenAt := func(at netip.AddrPort) int {
		t.Helper()
		domain := unix.AF_INET6
		if at.Addr().Is4() {
			domain = unix.AF_INET
		}
		listener := newSocket(t, domain)
		with(unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)(t, listener)
		check(t, unix.Bind(listener, sockaddr.Of(at)))
		check(t, unix.Listen(listener, 10))
		return listener
	}
	to := func(at netip.AddrPort, messages int) {
		t.Helper()
		listener := listenAt(at)
		c := w.connectTo(listener, at)
		done := drain(c.accepted)
		for range messages {
			check(t, send(c.connected, make([]byte, 10), unix.MSG_EOR))
		}
		shut(c.connected, listener)
		<-done
	}
	for _, test := range []struct {
		name, policy string
		send         map[netip.AddrPort]int
		want         map[string]uint64
	}{
		{"remote", "group_by: remote/24", map[netip.AddrPort]int{
			netip.MustParseAddrPort("127.0.1.1:7000"):       1,
			netip.MustParseAddrPort("127.0.1.2:7000"):       2,
			netip.MustParseAddrPort("127.0.2.1:7000"):       4,
			netip.MustParseAddrPort("[fd93:0:0:1::1]:7000"): 8,
			netip.MustParseAddrPort("[fd93:0:0:1::2]:7000"): 16,
			netip.MustParseAddrPort("[fd93:0:0:2::1]:7000"): 32,
			netip.MustParseAddrPort("[::1]:7000"):           64,
		}, map[string]uint64{"127.0.1.0/24": 3, "127.0.2.0/24": 4, "fd93::/48": 56, "::/48": 64}},
		{"prefixes of both", "group_by: [{remote: {ipv4: 32, ipv6: 64}}]", map[netip.AddrPort]int{
			netip.MustParseAddrPort("127.0.1.1:7000"):       1,
			netip.MustParseAddrPort("127.0.1.2:7000"):       2,
			netip.MustParseAddrPort("[fd93:0:0:1::1]:7000"): 8,
			netip.MustParseAddrPort("[fd93:0:0:1::2]:7000"): 16,
			netip.MustParseAddrPort("[fd93:0:0:2::1]:7000"): 32,
		}, map[string]uint64{"127.0.1.1/32": 1, "127.0.1.2/32": 2, "fd93:0:0:1::/64": 24, "fd93:0:0:2::/64": 32}},
		{"port", "group_by: port", map[netip.AddrPort]int{
			netip.MustParseAddrPort("127.0.1.1:7000"): 1,
			netip.MustParseAddrPort("127.0.1.2:7000"): 2,
			netip.MustParseAddrPort("127.0.1.2:7001"): 4,
		}, map[string]uint64{":7000": 3, ":7001": 4}},
		{"no group", "", map[netip.AddrPort]int{
			netip.MustParseAddrPort("127.0.1.1:7000"): 1,
			netip.MustParseAddrPort("[::1]:7001"):     2,
		}, map[string]uint64{"": 3}},
	} {
		t.Run(test.name, func(t *testing.T) {
			k := newTracing(t, "trace: [{cgroup: CGROUP, match: {role: connect}, messages: 1/1, "+test.policy+"}]")
			for at, n := range test.send {
				to(at, n)
			}
			k.settled()
			got := make(map[string]uint64)
			for _, r := range k.results() {
				var label []string
				if r.Group.Remote.IsValid() {
					label = append(label, r.Group.Remote.String())
				}
				if r.Group.Port != 0 {
					label = append(label, fmt.Sprintf(":%d", r.Group.Port))
				}
				got[strings.Join(label, " ")] += r.Chosen
			}
			if fmt.Sprint(got) != fmt.Sprint(test.want) {
				t.Errorf("groups are %v, want %v", got, test.want)
			}
		})
	}
	// The messages of a service are those that the connections of its listeners send.
	t.Run("service", func(t *testing.T) {
		k := newTracing(t, `
trace: [{cgroup: CGROUP, match: {role: accept}, messages: 1/1, group_by: service}]
services:
  one: {listeners: [{protocol: tcp, address: "0.0.0.0:7000"}], slots: 1, user: root, members: [{match: {systemd_unit: x}, slot: 0}]}
  two: {listeners: [{protocol: tcp, address: "127.0.1.2:7001"}], slots: 1, user: root, members: [{match: {systemd_unit: y}, slot: 0}]}
`)
		for i, at := range []string{"127.0.1.1:7000", "127.0.1.2:7000", "127.0.1.2:7001", "127.0.1.1:7001"} {
			address := netip.MustParseAddrPort(at)
			listener := listenAt(address)
			c := w.connectTo(listener, address)
			done := drain(c.connected)
			for range 1 << i {
				check(t, send(c.accepted, make([]byte, 10), unix.MSG_EOR))
			}
			shut(c.accepted, listener)
			<-done
		}
		k.settled()
		got := make(map[string]uint64)
		for _, r := range k.results() {
			got[r.Group.Service] = r.Chosen
		}
		if want := map[string]uint64{"one": 3, "two": 4, "none": 8}; !maps.Equal(got, want) {
			t.Errorf("by service %v, want %v", got, want)
		}
	})
	t.Run("too many", func(t *testing.T) {
		k := newTracing(t, "trace: [{cgroup: CGROUP, match: {role: connect}, messages: 1/1, group_by: port, groups: 3}]")
		for i := range 7 {
			to(netip.AddrPortFrom(w.addr(unix.AF_INET), uint16(7000+i)), 1<<i)
		}
		k.settled()
		var other, rest uint64
		for _, r := range k.results() {
			if r.Group.Other {
				other += r.Chosen
			} else {
				rest += r.Chosen
			}
		}
		if rest != 1+2+4 || other != 8+16+32+64 {
			t.Errorf("%d messages in three groups, %d in other", rest, other)
		}
	})
	t.Run("cgroup", func(t *testing.T) {
		k := newTracing(t, "trace: [{cgroup: CGROUP, match: {role: connect}, messages: 1/1, group_by: cgroup}]")
		want := make(map[uint64]uint64)
		for i, dir := range []string{testenv.Cgroup(), testenv.Subgroup(t, "one"), testenv.Subgroup(t, "two")} {
			var stat unix.Stat_t
			check(t, unix.Stat(dir, &stat))
			inCgroup(t, dir, func() { to(netip.AddrPortFrom(w.addr(unix.AF_INET), 7000), 1<<i) })
			want[stat.Ino] = 1 << i
		}
		k.settled()
		groups, err := k.Groups()
		check(t, err)
		got := make(map[uint64]uint64)
		for index, group := range groups {
			stats, err := k.Stats(index)
			check(t, err)
			got[group.Cgroup] = stats.Chosen
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("by cgroup %v, want %v", got, want)
		}
	})
}

// newTune tunes the tests' cgroup with one rule for all, with half of the connections as a control arm.
func newTune(t testing.TB, dir string) *bpf.Tune {
	t.Helper()
	tune, err := bpf.OpenTune(bpf.TuneConfig{Dir: dir, Cgroup: testenv.Cgroup()})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() {
		if err := errors.Join(bpf.RemoveTune(dir), tune.Close()); err != nil {
			t.Error(err)
		}
	})
	sets, err := match.Compile([]config.Match{{Role: config.RoleConnect}}, nil, nil)
	check(t, err)
	check(t, tune.Install(&bpf.TuneRules{MatchRules: *sets, Rules: []bpf.TuneRule{{Control: 1 << 31, Flags: bpf.TuneFlagLive}}}))
	return tune
}

// TestTuned groups by rule and arm of tune, on a cgroup that is also tuned.
func TestTuned(t *testing.T) {
	fs := testenv.BPFFS(t)
	tune := newTune(t, filepath.Join(fs, "tune_test"))
	k := openTracing(t, "trace: [{cgroup: CGROUP, messages: 1/1, group_by: [rule, arm]}]", testenv.Cgroup(),
		filepath.Join(fs, "trace_test"), filepath.Join(fs, "tune_test"))
	w := loopback(t)
	want := make(map[string]uint64)
	for range 40 {
		c := w.connect(unix.AF_INET)
		connection, err := tune.Connection(c.connected)
		check(t, err)
		want[fmt.Sprint("id ", connection.Rule, " ", [...]string{"treated", "control"}[connection.Arm])] += 3
		want["none none"]++
		for range 3 {
			check(t, send(c.connected, []byte{1}, 0))
		}
		check(t, send(c.accepted, []byte{1}, 0))
		acknowledged(t, c.connected)
		acknowledged(t, c.accepted)
		shut(c.connected, c.accepted)
	}
	k.settled()
	got := make(map[string]uint64)
	for _, r := range k.results() {
		got[r.Group.TuneRule+" "+r.Group.Arm] += r.Chosen
	}
	if len(want) != 3 || fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("by rule and arm %v, want %v", got, want)
	}
}

// TestBesideTune stops tuning a connection while it is traced: messages in flight still end with the connection.
func TestBesideTune(t *testing.T) {
	fs := testenv.BPFFS(t)
	tune := newTune(t, filepath.Join(fs, "tune_test"))
	k := openTracing(t, everything, testenv.Cgroup(), filepath.Join(fs, "trace_test"), "")
	w, lost := hole(t, lab.LinkOptions{})
	c := w.connect(unix.AF_INET, noDelay)
	live, err := tune.Live()
	check(t, err)
	defer live.Close()
	check(t, live.Forget(c.connected))
	check(t, live.ApplyTo(c.connected, bpf.MatchConnect))
	check(t, live.Forget(c.connected))
	lost.Store(true)
	for range 10 {
		check(t, send(c.connected, make([]byte, 100), unix.MSG_EOR))
	}
	check(t, unix.SetsockoptLinger(c.connected, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
	shut(c.connected)
	if r := k.settled(); r.Outcomes[measure.Unacknowledged] != 10 {
		t.Errorf("%s, want 10 to be unacknowledged", account(r))
	}
}

// TestConnectedAgain uses a socket for a second connection: its messages belong to another group.
func TestConnectedAgain(t *testing.T) {
	k := newTracing(t, "trace: [{cgroup: CGROUP, match: {role: connect}, messages: 1/1, group_by: port}]")
	w := loopback(t)
	fd := newSocket(t, unix.AF_INET)
	want := make(map[uint16]uint64)
	for i := range 3 {
		listener, at := w.listen(unix.AF_INET)
		check(t, connect(fd, sockaddr.Of(at)))
		accepted := accept(t, listener)
		done := drain(accepted)
		for range i + 1 {
			check(t, send(fd, make([]byte, 10), 0))
			acknowledged(t, fd)
		}
		want[at.Port()] = uint64(i + 1)
		disconnect(t, fd)
		<-done
		shut(accepted, listener)
	}
	k.settled()
	got := make(map[uint16]uint64)
	for _, r := range k.results() {
		got[r.Group.Port] = r.Chosen
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("by port %v, want %v", got, want)
	}
}
