// SPDX-License-Identifier: Apache-2.0

package tune_test

import (
	"fmt"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/sockaddr"
	"sockeye/internal/testenv"
	"sockeye/internal/tune"
)

// generation is a set of rules and the values that it gives both ends of a connection.
type generation struct {
	name string
	// base distinguishes the generations in every value.
	base int64
	ecn  bool
}

var generations = []generation{{"first", 10, false}, {"second", 40, true}}

// rules has one rule per role, so that an end with the values of the other role is detected.
func (g generation) rules(t testing.TB) *bpf.TuneRules {
	t.Helper()
	var rules []config.TuneRule
	for _, role := range []config.Role{config.RoleConnect, config.RoleAccept} {
		base := g.of(role)
		set := []config.Setting{
			{Option: "synack_rto", Value: base * 1000 * 1000},
			{Option: "initial_rwnd", Value: base},
			{Option: "sndbuf", Value: base * 5000},
			{Option: "pacing_rate", Value: base * 1000 * 1000},
			{Option: "mark", Value: base},
			{Option: "congestion", Text: "reno"},
			{Option: "initial_cwnd", Value: base},
			{Option: "cwnd_clamp", Value: base * 10},
			{Option: "user_timeout", Value: base * 1000 * 1000},
		}
		if g.ecn {
			set = append([]config.Setting{{Option: "ecn", Value: 1}}, set...)
		}
		rules = append(rules, config.TuneRule{
			Name: g.name + "-" + string(role), Cgroup: testenv.CgroupPath(), Match: config.Match{Role: role}, Set: set,
		})
	}
	compiled, err := tune.Compile(rules, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return compiled
}

func (g generation) of(role config.Role) int64 {
	if role == config.RoleAccept {
		return g.base + 1
	}
	return g.base
}

// seen holds the values of one end. Each value identifies its generation.
type seen struct {
	mark, sndbuf, timeout int
	cwnd, ssthresh        uint32
	pacing                uint64
	window                uint32
}

func (g generation) seen(role config.Role, mss int) seen {
	base := g.of(role)
	if role == config.RoleAccept {
		mss -= timestamps
	}
	return seen{
		mark: int(base), sndbuf: int(base) * 10000, timeout: int(base) * 1000,
		cwnd: uint32(base), ssthresh: uint32(base) * 10, pacing: uint64(base) * 1000 * 1000,
		window: uint32(int(base) * mss),
	}
}

// look reads the values of an end, whether the connection has ECN, and the number of retransmitted segments. It
// returns errors instead of failing the test, because it runs in every iteration.
func look(fd int) (s seen, ecn bool, retransmits uint32, err error) {
	info, err := unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
	if err != nil {
		return s, false, 0, os.NewSyscallError("getsockopt", err)
	}
	s = seen{cwnd: info.Snd_cwnd, ssthresh: info.Snd_ssthresh, pacing: info.Max_pacing_rate, window: info.Rcv_wnd}
	for _, o := range []struct {
		level, name int
		to          *int
	}{
		{unix.SOL_SOCKET, unix.SO_MARK, &s.mark}, {unix.SOL_SOCKET, unix.SO_SNDBUF, &s.sndbuf},
		{unix.SOL_TCP, unix.TCP_USER_TIMEOUT, &s.timeout},
	} {
		if *o.to, err = unix.GetsockoptInt(fd, o.level, o.name); err != nil {
			return s, false, 0, os.NewSyscallError("getsockopt", err)
		}
	}
	return s, info.Options&tcpiOptECN != 0, info.Total_retrans, nil
}

// generationOf returns the generation to which all values of an end belong. The window may be rounded up to a
// multiple of its scale.
func (r *replaced) generationOf(s seen, role config.Role, mss int) (generation, error) {
	for _, g := range generations {
		want := g.seen(role, mss)
		if !r.window || s.window >= want.window && s.window < want.window+1<<14 {
			want.window = s.window
		}
		if s == want {
			return g, nil
		}
	}
	return generation{}, fmt.Errorf("an end that did %s has %+v, which no set of rules gives", role, s)
}

// replaced counts connections by the generations of their ends.
type replaced struct {
	window bool // the kernel tells it
	mu     sync.Mutex
	pairs  map[string]int
}

// connectOften opens connections between its own addresses until done, and checks both ends.
func (r *replaced) connectOften(n network, addr netip.Addr, done *atomic.Bool) error {
	listener, err := unix.Socket(n.domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(listener)
	if err := unix.Bind(listener, sockaddr.Of(netip.AddrPortFrom(addr, 0))); err != nil {
		return os.NewSyscallError("bind", err)
	}
	if err := unix.Listen(listener, 16); err != nil {
		return os.NewSyscallError("listen", err)
	}
	at, err := unix.Getsockname(listener)
	if err != nil {
		return os.NewSyscallError("getsockname", err)
	}
	pairs := make(map[string]int)
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		for pair, count := range pairs {
			r.pairs[pair] += count
		}
	}()
	for !done.Load() {
		pair, err := r.connectOnce(n, listener, at)
		if err != nil {
			return err
		}
		pairs[pair]++
	}
	return nil
}

// connectOnce opens a connection and resets it, so that its port is free again.
func (r *replaced) connectOnce(n network, listener int, at unix.Sockaddr) (pair string, err error) {
	client, err := unix.Socket(n.domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", os.NewSyscallError("socket", err)
	}
	defer unix.Close(client)
	if err := unix.Connect(client, at); err != nil {
		return "", os.NewSyscallError("connect", err)
	}
	server, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
	if err != nil {
		return "", os.NewSyscallError("accept", err)
	}
	defer unix.Close(server)
	if err := unix.SetsockoptLinger(client, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return "", os.NewSyscallError("setsockopt", err)
	}
	connected, connectedECN, retransmits, err := look(client)
	if err != nil {
		return "", err
	}
	accepted, acceptedECN, _, err := look(server)
	if err != nil {
		return "", err
	}
	c, err := r.generationOf(connected, config.RoleConnect, n.mss)
	if err != nil {
		return "", err
	}
	a, err := r.generationOf(accepted, config.RoleAccept, n.mss)
	if err != nil {
		return "", err
	}
	// A connection has ECN if one end requests it and the other agrees. A retransmitted SYN does not request ECN (RFC
	// 3168, section 6.1.1.1; tcp_ecn_clear_syn, net/ipv4/tcp_output.c).
	if both := c.ecn && a.ecn; retransmits == 0 && (connectedECN != both || acceptedECN != both) {
		return "", fmt.Errorf("%s to %s has ECN %v and %v", c.name, a.name, connectedECN, acceptedECN)
	}
	return c.name + "-" + a.name, nil
}

// TestReplaceRules opens connections while rules are replaced, both as fast as possible: each end has all values of
// one set of rules, including those of the handshake.
func TestReplaceRules(t *testing.T) {
	const length, workers = 3 * time.Second, 4
	sysctl(t, "net/ipv4/tcp_ecn", "0")
	k := newTuning(t, "")
	networks := newNetworks(t)
	var compiled []*bpf.TuneRules
	for _, g := range generations {
		compiled = append(compiled, g.rules(t))
	}
	if err := k.Install(compiled[0]); err != nil {
		t.Fatal(err)
	}
	r := &replaced{window: tellsWindow(t), pairs: make(map[string]int)}
	var done atomic.Bool
	failed := make(chan error, workers)
	for i := range workers {
		// With IPv4, each worker has ports of an address of its own; with IPv6, lo has one address.
		n, addr := networks[0], netip.AddrFrom4([4]byte{127, 0, 0, byte(10 + i)})
		if i == workers-1 {
			n, addr = networks[1], networks[1].addr
		}
		go func() { failed <- r.connectOften(n, addr, &done) }()
	}
	installs, began := 0, time.Now()
	for time.Since(began) < length {
		installs++
		if err := k.Install(compiled[installs%2]); err != nil {
			t.Error(err)
			break
		}
	}
	done.Store(true)
	took := time.Since(began)
	for range workers {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
	connections := 0
	for _, count := range r.pairs {
		connections += count
	}
	t.Logf("%d connections in %v, %.0f a second, while rules were replaced %d times; by the ends' rules: %v",
		connections, took.Round(time.Millisecond), float64(connections)/took.Seconds(), installs, r.pairs)
	for _, same := range []string{"first-first", "second-second"} {
		if r.pairs[same] == 0 {
			t.Errorf("no connection with rules %s", same)
		}
	}
	if failed := k.failed(); len(failed) > 0 {
		t.Errorf("failures: %v", failed)
	}
	counted := uint64(0)
	for _, g := range generations {
		for _, role := range []config.Role{config.RoleConnect, config.RoleAccept} {
			rules, err := k.Rules()
			if err != nil {
				t.Fatal(err)
			}
			for id, rule := range rules {
				if bpf.Text(rule.Name[:]) == g.name+"-"+string(role) {
					s, err := k.Stats(id, 0)
					if err != nil {
						t.Fatal(err)
					}
					counted += s.Connections
				}
			}
		}
	}
	if counted != uint64(2*connections) {
		t.Errorf("rules have counted %d ends, want %d", counted, 2*connections)
	}
}
