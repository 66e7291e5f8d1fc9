// SPDX-License-Identifier: Apache-2.0

package tune_test

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/clock"
	"sockeye/internal/config"
	"sockeye/internal/sockaddr"
	"sockeye/internal/testenv"
)

// Not in golang.org/x/sys/unix: include/uapi/linux/tcp.h and
// include/uapi/asm-generic/socket.h of Linux 6.18.
const (
	tcpRTOMaxMs    = 44
	tcpRTOMinUs    = 45
	tcpDelackMaxUs = 46
	soTxRehash     = 74
	tcpiOptECN     = 8
)

// optionTest checks that an option takes effect.
type optionTest func(t *testing.T, k *tuning, o config.TuneOption)

var optionTests = map[string]optionTest{
	"syn_rto":              testSynRTO,
	"synack_rto":           testSynackRTO,
	"initial_rwnd":         testInitialRwnd,
	"ecn":                  testECN,
	"base_rtt":             testBaseRTT,
	"sndbuf":               number(150*1000, unix.SOL_SOCKET, unix.SO_SNDBUF, buffer(unix.SO_SNDBUF)),
	"rcvbuf":               number(150*1000, unix.SOL_SOCKET, unix.SO_RCVBUF, buffer(unix.SO_RCVBUF)),
	"rcvlowat":             testRcvlowat,
	"pacing_rate":          number(250*1000*1000, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, nil),
	"priority":             number(3, unix.SOL_SOCKET, unix.SO_PRIORITY, nil),
	"mark":                 number(0x5eed, unix.SOL_SOCKET, unix.SO_MARK, nil),
	"keepalive":            number(1, unix.SOL_SOCKET, unix.SO_KEEPALIVE, nil),
	"reuse_address":        number(1, unix.SOL_SOCKET, unix.SO_REUSEADDR, nil),
	"bind_ifindex":         testBindIfindex,
	"txrehash":             number(1, unix.SOL_SOCKET, soTxRehash, nil),
	"congestion":           testCongestion,
	"initial_cwnd":         testInitialCwnd,
	"cwnd_clamp":           testCwndClamp,
	"delack_max":           testDelackMax,
	"rto_min":              testRTOMin,
	"rto_max":              number(30*1000*1000, unix.SOL_TCP, tcpRTOMaxMs, in(time.Millisecond)),
	"notsent_lowat":        number(1<<17, unix.SOL_TCP, unix.TCP_NOTSENT_LOWAT, nil),
	"window_clamp":         testWindowClamp,
	"user_timeout":         number(30*1000*1000, unix.SOL_TCP, unix.TCP_USER_TIMEOUT, in(time.Millisecond)),
	"keepalive_idle":       number(300*1000*1000, unix.SOL_TCP, unix.TCP_KEEPIDLE, in(time.Second)),
	"keepalive_interval":   number(45*1000*1000, unix.SOL_TCP, unix.TCP_KEEPINTVL, in(time.Second)),
	"keepalive_probes":     number(5, unix.SOL_TCP, unix.TCP_KEEPCNT, nil),
	"syn_retries":          testSynRetries,
	"nodelay":              number(1, unix.SOL_TCP, unix.TCP_NODELAY, nil),
	"mss":                  testMSS,
	"thin_linear_timeouts": number(1, unix.SOL_TCP, unix.TCP_THIN_LINEAR_TIMEOUTS, nil),
	"tos":                  testTOS,
	"traffic_class":        testTrafficClass,
	"auto_flow_label":      testAutoFlowLabel,
	"flow_label":           testFlowLabel,
}

func TestOptions(t *testing.T) {
	k := newTuning(t, "")
	for _, o := range config.TuneOptions {
		t.Run(o.Name, func(t *testing.T) {
			k := &tuning{Tune: k.Tune, t: t}
			test := optionTests[o.Name]
			if test == nil {
				t.Fatal("option without a test")
			}
			needs(t, o.Name)
			test(t, k, o)
			if failed := k.failed(); len(failed) > 0 {
				t.Errorf("failures: %v", failed)
			}
		})
	}
	for name := range optionTests {
		if _, ok := config.FindTuneOption(name); !ok {
			t.Errorf("test of %s, which is not an option", name)
		}
	}
}

// hz is the frequency of the kernel's tick (CONFIG_HZ).
func hz(t testing.TB) int64 {
	t.Helper()
	hz, err := clock.Hz()
	if err != nil {
		t.Fatal(err)
	}
	return int64(hz)
}

// rounded rounds a time in microseconds up to whole jiffies.
func rounded(t testing.TB, us int64) int64 {
	t.Helper()
	jiffy := 1000 * 1000 / hz(t)
	return (us + jiffy - 1) / jiffy * jiffy
}

// values returns the smallest, a middle and the largest value of an option.
func values(o config.TuneOption, middle int64) []int64 {
	switch o.Kind {
	case config.KindSwitch:
		return []int64{0, 1}
	default:
		return []int64{o.Min, middle, o.Max}
	}
}

// each opens connections with each value of an option, in both families, and checks both ends. A rule for the port
// sets the value.
func each(t *testing.T, k *tuning, o config.TuneOption, values []int64, look func(t *testing.T, n network, value int64, s ends), more ...config.Setting) {
	networks := newNetworks(t)
	type listener struct {
		fd int
		at netip.AddrPort
	}
	listeners, taken := make(map[int64][]listener), make(map[uint16]bool)
	var rules []config.TuneRule
	for _, v := range values {
		rule := config.TuneRule{Name: fmt.Sprintf("v%d", v), Set: []config.Setting{{Option: o.Name, Value: v}}}
		rule.Set = append(rule.Set, more...)
		for _, n := range networks {
			fd, at := listenSocket(t, n.domain, n.addr)
			for taken[at.Port()] { // by the other family, for another value
				fd, at = listenSocket(t, n.domain, n.addr)
			}
			taken[at.Port()] = true
			listeners[v] = append(listeners[v], listener{fd, at})
			rule.Match.Ports = append(rule.Match.Ports, config.PortRange{First: at.Port(), Last: at.Port()})
		}
		rules = append(rules, rule)
	}
	k.installRules(rules...)
	for _, v := range values {
		for i, n := range networks {
			t.Run(fmt.Sprintf("%d/%s", v, n.name), func(t *testing.T) {
				s := connectSockets(t, listeners[v][i].fd, listeners[v][i].at)
				look(t, n, v, s)
				if o.Name == "rcvlowat" {
					return // which keeps readers waiting
				}
				transfer(t, s.connected, s.accepted, 5000)
				transfer(t, s.accepted, s.connected, 5000)
			})
		}
	}
}

// number tests an option that both ends can read back. want returns the value that the kernel makes of it.
func number(middle int64, level, name int, want func(t testing.TB, v int64) int64) optionTest {
	return func(t *testing.T, k *tuning, o config.TuneOption) {
		each(t, k, o, values(o, middle), func(t *testing.T, _ network, value int64, s ends) {
			if want != nil {
				value = want(t, value)
			}
			for end, fd := range map[string]int{"connected": s.connected, "accepted": s.accepted} {
				// Values of 2^31 and more are read back as negative 32-bit numbers.
				if got := int64(uint32(sockopt(t, fd, level, name))); got != value {
					t.Errorf("%s socket has %d, want %d", end, got, value)
				}
			}
		})
	}
}

func in(unit time.Duration) func(testing.TB, int64) int64 {
	return func(_ testing.TB, us int64) int64 { return us / unit.Microseconds() }
}

// buffer expects twice the value, between the kernel's minimum and twice wmem_max or rmem_max.
func buffer(name int) func(testing.TB, int64) int64 {
	bound := func(t testing.TB, ask int) int64 {
		t.Helper()
		fd := testenv.TCPSocket(t, unix.AF_INET)
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, name, ask); err != nil {
			t.Fatal(os.NewSyscallError("setsockopt", err))
		}
		return int64(sockopt(t, fd, unix.SOL_SOCKET, name))
	}
	return func(t testing.TB, v int64) int64 {
		t.Helper()
		least, most := bound(t, 0), bound(t, 1<<30-1)
		return min(max(2*v, least), most)
	}
}

// testRcvlowat also checks when a socket becomes readable. The kernel limits the value to half of the largest receive
// buffer (tcp_set_rcvlowat), but not for a socket that has not been accepted, which has no file.
func testRcvlowat(t *testing.T, k *tuning, o config.TuneOption) {
	b, err := os.ReadFile("/proc/sys/net/ipv4/tcp_rmem")
	if err != nil {
		t.Fatal(err)
	}
	var least, normal, most int64
	if _, err := fmt.Sscan(string(b), &least, &normal, &most); err != nil {
		t.Fatal(err)
	}
	const middle = 1000
	each(t, k, o, values(o, middle), func(t *testing.T, _ network, value int64, s ends) {
		bounded := min(value, most/2)
		if olderThan(t, "6.1") {
			bounded = value // by BPF it could be anything
		}
		if got := sockopt(t, s.connected, unix.SOL_SOCKET, unix.SO_RCVLOWAT); int64(got) != bounded {
			t.Errorf("connected socket has %d, want %d", got, bounded)
		}
		if got := sockopt(t, s.accepted, unix.SOL_SOCKET, unix.SO_RCVLOWAT); int64(got) != value {
			t.Errorf("accepted socket has %d, want %d", got, value)
		}
		for _, ends := range [][2]int{{s.connected, s.accepted}, {s.accepted, s.connected}} {
			sent := int64(0)
			for _, n := range []int64{1, middle - 2, 1} {
				if err := send(ends[0], make([]byte, n)); err != nil {
					t.Fatal(err)
				}
				sent += n
				testenv.Within(t, "arrival", func() bool { return arrived(t, ends[1]) == sent })
				if got := readable(t, ends[1]); got != (sent >= value) {
					t.Errorf("with %d bytes, readable: %v", sent, got)
				}
			}
		}
	})
}

// arrived returns the number of bytes in a socket's receive queue.
func arrived(t testing.TB, fd int) int64 {
	t.Helper()
	n, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
	if err != nil {
		t.Fatal(os.NewSyscallError("ioctl", err))
	}
	return int64(n)
}

func readable(t testing.TB, fd int) bool {
	t.Helper()
	events := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := retry(func() (int, error) { return unix.Poll(events, 0) })
	if err != nil {
		t.Fatal(os.NewSyscallError("poll", err))
	}
	return n > 0
}

// retransmission measures the time between a segment and its first retransmission.
func (w *wire) retransmission(wanted func(s *segment) bool) time.Duration {
	w.t.Helper()
	first := w.next(wanted)
	return w.next(wanted).at.Sub(first.at)
}

// soon reports whether a timer of the given microseconds may have taken the measured time. The kernel's own initial
// timeout of a handshake is 1 s.
func soon(t testing.TB, got time.Duration, us int64) {
	t.Helper()
	jiffy := time.Second / time.Duration(hz(t))
	least := time.Duration(rounded(t, us))*time.Microsecond - jiffy
	if got < least || got > 900*time.Millisecond {
		t.Errorf("sent again after %v, want %v to 900ms", got, least)
	}
}

func testSynRTO(t *testing.T, k *tuning, o config.TuneOption) {
	networks := newNetworks(t)
	for _, v := range values(o, 30*1000*1000) {
		k.installRules(config.TuneRule{Name: "r", Set: []config.Setting{{Option: o.Name, Value: v}}})
		for _, n := range networks {
			_, at := listenSocket(t, n.domain, n.addr)
			w := watchWire(t, 0)
			fd := connectDeaf(t, at)
			if v == o.Min {
				soon(t, w.retransmission(func(s *segment) bool { return s.target == at && s.flags == flagSYN }), v)
			} else if got := int64(tcpInfo(t, fd).Rto); got != rounded(t, v) {
				t.Errorf("%s: timeout of the SYN is %d us, want %d", n.name, got, rounded(t, v))
			}
		}
	}
}

func testSynackRTO(t *testing.T, k *tuning, o config.TuneOption) {
	networks := newNetworks(t)
	for _, v := range values(o, 30*1000*1000) {
		k.installRules(config.TuneRule{Name: "r", Set: []config.Setting{{Option: o.Name, Value: v}}})
		for _, n := range networks {
			_, at := listenSocket(t, n.domain, n.addr)
			k.synackRTO(t, n, at, v)
		}
	}
}

// synackRTO leaves a handshake without its last segment. A timeout that is not shorter than the kernel's own is read
// back, not waited for.
func (k *tuning) synackRTO(t testing.TB, n network, at netip.AddrPort, want int64) {
	t.Helper()
	w := watchWire(t, 0)
	source := netip.AddrPortFrom(n.addr, testenv.Port(t, connectDeaf(t, at)))
	synack := func(s *segment) bool { return s.target == source && s.flags&flagSYN != 0 }
	if want < 500*1000 {
		soon(t, w.retransmission(synack), want)
		return
	}
	most := time.Duration(rounded(t, want)) * time.Microsecond
	if left := requestTimer(t, at, source); left > most || left < most-20*time.Second {
		t.Errorf("%s: the SYN-ACK is sent again in %v, want %v", n.name, left, most)
	}
}

// requestTimer returns the time until the SYN-ACK of a handshake is retransmitted. A connection of an earlier test in
// TIME_WAIT can have the same source with another destination port.
func requestTimer(t testing.TB, at, source netip.AddrPort) time.Duration {
	t.Helper()
	for _, family := range []uint8{unix.AF_INET, unix.AF_INET6} {
		found, err := netlink.SocketDiagTCP(family)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range found {
			addr, _ := netip.AddrFromSlice(s.ID.Destination)
			if s.State == netlink.TCP_SYN_RECV && s.ID.SourcePort == at.Port() && addr.Unmap() == source.Addr() && s.ID.DestinationPort == source.Port() {
				return time.Duration(s.Expires) * time.Millisecond
			}
		}
	}
	t.Fatalf("no handshake with %s", source)
	return 0
}

// testInitialRwnd reads the windows of the SYN and the SYN-ACK.
func testInitialRwnd(t *testing.T, k *tuning, o config.TuneOption) {
	w := watchWire(t, 0)
	each(t, k, o, values(o, 10), func(t *testing.T, n network, value int64, s ends) {
		w := w.on(t)
		for _, end := range []struct {
			name string
			fd   int
			mss  int64
		}{{"SYN", s.connected, int64(n.mss)}, {"SYN-ACK", s.accepted, int64(n.mss - timestamps)}} {
			got := int64(w.syn(end.fd).window)
			switch {
			case value == o.Max:
				// The receive buffer and the 16 bits of the field limit the window.
				if got < 40*end.mss || got > 65535 {
					t.Errorf("window of the %s is %d, want what the buffer allows", end.name, got)
				}
			case got != value*end.mss:
				t.Errorf("window of the %s is %d, want %d * %d", end.name, got, value, end.mss)
			}
		}
	})
	// A window that needs a larger buffer and more than 16 bits.
	const large = 2 * 1000 * 1000
	segments := min(1000, buffer(unix.SO_RCVBUF)(t, large)/2/1500)
	each(t, k, o, []int64{segments}, func(t *testing.T, n network, value int64, s ends) {
		if !tellsWindow(t) {
			t.Skip("kernel: TCP_INFO does not tell the window")
		}
		for name, end := range map[string]struct {
			fd  int
			mss int64
		}{"connected": {s.connected, int64(n.mss)}, "accepted": {s.accepted, int64(n.mss - timestamps)}} {
			if got := int64(tcpInfo(t, end.fd).Rcv_wnd); got != value*end.mss {
				t.Errorf("window of the %s socket is %d, want %d * %d", name, got, value, end.mss)
			}
		}
	}, config.Setting{Option: "rcvbuf", Value: large})
}

func testECN(t *testing.T, k *tuning, o config.TuneOption) {
	// A connection without a rule.
	sysctl(t, "net/ipv4/tcp_ecn", "0")
	each(t, k, o, values(o, 1), func(t *testing.T, _ network, value int64, s ends) {
		for end, fd := range map[string]int{"connected": s.connected, "accepted": s.accepted} {
			if got := tcpInfo(t, fd).Options & tcpiOptECN / tcpiOptECN; int64(got) != value {
				t.Errorf("%s socket has ECN %d, want %d", end, got, value)
			}
		}
	})
}

// TestECNOfOneSide leaves the peer to the sysctl.
func TestECNOfOneSide(t *testing.T) {
	sysctl(t, "net/ipv4/tcp_ecn", "0")
	k := newTuning(t, "")
	on := []config.Setting{{Option: "ecn", Value: 1}}
	for _, test := range []struct {
		name         string
		rules        []config.TuneRule
		asks, agrees bool
	}{
		{"connect", []config.TuneRule{{Name: "r", Match: config.Match{Role: config.RoleConnect}, Set: on}}, true, false},
		{"accept", []config.TuneRule{{Name: "r", Match: config.Match{Role: config.RoleAccept}, Set: on}}, false, false},
		{"both", []config.TuneRule{{Name: "r", Set: on}}, true, true},
	} {
		k.installRules(test.rules...)
		for _, n := range newNetworks(t) {
			fd, at := listenSocket(t, n.domain, n.addr)
			w := watchWire(t, 0)
			s := connectSockets(t, fd, at)
			if asks := w.syn(s.connected).flags&flagECE != 0; asks != test.asks {
				t.Errorf("%s, rule for %s: the SYN asks for ECN: %v", n.name, test.name, asks)
			}
			if agrees := w.syn(s.accepted).flags&flagECE != 0; agrees != test.agrees {
				t.Errorf("%s, rule for %s: the SYN-ACK agrees to ECN: %v", n.name, test.name, agrees)
			}
		}
	}
}

// testBaseRTT checks only that the rule has the option: the only congestion control that reads it does not show it.
func testBaseRTT(t *testing.T, k *tuning, o config.TuneOption) {
	for _, v := range values(o, 20*1000) {
		k.installRules(config.TuneRule{Name: "r", Set: []config.Setting{{Option: o.Name, Value: v}}})
		rules, err := k.Rules()
		if err != nil {
			t.Fatal(err)
		}
		if got := int64(rules[k.id("r")].BaseRtt); got != v {
			t.Errorf("the program would answer %d us, want %d", got, v)
		}
	}
	if !slices.Contains(availableCongestion(t), "nv") {
		t.Skip("kernel: no tcp_nv")
	}
	each(t, k, o, values(o, 20*1000), func(t *testing.T, _ network, _ int64, s ends) {
		if name := congestionOf(t, s.connected); name != "nv" {
			t.Errorf("congestion control is %s", name)
		}
	}, config.Setting{Option: "congestion", Text: "nv"})
}

func availableCongestion(t testing.TB) []string {
	t.Helper()
	b, err := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(b))
}

func congestionOf(t testing.TB, fd int) string {
	t.Helper()
	name, err := unix.GetsockoptString(fd, unix.SOL_TCP, unix.TCP_CONGESTION)
	if err != nil {
		t.Fatal(os.NewSyscallError("getsockopt", err))
	}
	return name
}

func testBindIfindex(t *testing.T, k *tuning, o config.TuneOption) {
	networks := newNetworks(t)
	for _, v := range []int64{0, 1} { // 1 is lo
		k.installRules(config.TuneRule{Name: "r", Set: []config.Setting{{Option: o.Name, Value: v}}})
		for _, n := range networks {
			fd, at := listenSocket(t, n.domain, n.addr)
			s := connectSockets(t, fd, at)
			if got := sockopt(t, s.connected, unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX); int64(got) != v {
				t.Errorf("%s: interface is %d, want %d", n.name, got, v)
			}
			transfer(t, s.connected, s.accepted, 20000)
		}
	}
	// The interface does not exist, so no route leads through it.
	k.installRules(config.TuneRule{Name: "r", Set: []config.Setting{{Option: o.Name, Value: o.Max}}})
	for _, n := range networks {
		_, at := listenSocket(t, n.domain, n.addr)
		if err := unix.Connect(testenv.TCPSocket(t, n.domain), sockaddr.Of(at)); !errors.Is(err, unix.EHOSTUNREACH) {
			t.Errorf("%s: connect through interface %d: %v, want EHOSTUNREACH", n.name, o.Max, err)
		}
	}
}

func testCongestion(t *testing.T, k *tuning, o config.TuneOption) {
	networks := newNetworks(t)
	available := availableCongestion(t)
	if len(available) < 2 {
		t.Skipf("kernel: it has no congestion control but %s", available[0])
	}
	for _, name := range available {
		rule := config.TuneRule{Name: "r", Set: []config.Setting{{Option: o.Name, Text: name}}}
		if name == "dctcp" {
			// Without the option, the connection uses reno.
			rule.Set = append(rule.Set, config.Setting{Option: "ecn", Value: 1})
		}
		k.installRules(rule)
		for _, n := range networks {
			fd, at := listenSocket(t, n.domain, n.addr)
			s := connectSockets(t, fd, at)
			for end, fd := range map[string]int{"connected": s.connected, "accepted": s.accepted} {
				if got := congestionOf(t, fd); got != name {
					t.Errorf("%s: %s socket has %s, want %s", n.name, end, got, name)
				}
			}
			transfer(t, s.connected, s.accepted, 200000)
		}
	}
}

func testInitialCwnd(t *testing.T, k *tuning, o config.TuneOption) {
	each(t, k, o, values(o, 40), func(t *testing.T, _ network, value int64, s ends) {
		for end, fd := range map[string]int{"connected": s.connected, "accepted": s.accepted} {
			if got := int64(tcpInfo(t, fd).Snd_cwnd); got != value {
				t.Errorf("%s socket has a window of %d, want %d", end, got, value)
			}
		}
	})
}

// testCwndClamp sends until a window without a clamp would have grown above the middle value. A window grows only
// while it is fully used, which depends on scheduling.
func testCwndClamp(t *testing.T, k *tuning, o config.TuneOption) {
	const middle = 20
	for _, congestion := range availableCongestion(t) {
		t.Run(congestion, func(t *testing.T) {
			each(t, k, o, values(o, middle), func(t *testing.T, _ network, value int64, s ends) {
				bytes := clampedBytes
				if value == o.Min {
					bytes = 5000 // each segment waits for a delayed acknowledgement
				}
				send := func(from, to int) int64 {
					largest := make(chan int64)
					go func() { largest <- largestWindow(t, from, bytes) }()
					if err := receive(to, make([]byte, bytes)); err != nil {
						t.Error(err)
					}
					return <-largest
				}
				for _, ends := range [][2]int{{s.connected, s.accepted}, {s.accepted, s.connected}} {
					before := tcpInfo(t, ends[0])
					// bbr does not use it.
					if got := int64(before.Snd_ssthresh); got != value && congestion != "bbr" {
						t.Errorf("ssthresh is %d, want %d", got, value)
					}
					if got := int64(before.Snd_cwnd); got > value {
						t.Errorf("window is %d before anything is sent, want at most %d", got, value)
					}
					got := send(ends[0], ends[1])
					if value == o.Max {
						testenv.Within(t, "a window above the middle value", func() bool {
							if got <= middle && !t.Failed() {
								got = send(ends[0], ends[1])
							}
							return got > middle || t.Failed()
						})
					}
					if got > value {
						t.Errorf("window grew to %d, want at most %d", got, value)
					}
				}
			}, config.Setting{Option: "congestion", Text: congestion})
		})
	}
}

// largestWindow sends bytes and returns the largest congestion window seen meanwhile.
func largestWindow(t testing.TB, fd, bytes int) (largest int64) {
	for rest := bytes; rest > 0; rest -= min(rest, clampedWrite) {
		if err := send(fd, make([]byte, min(rest, clampedWrite))); err != nil {
			t.Error(err)
			return largest
		}
		info, err := unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
		if err != nil {
			t.Error(os.NewSyscallError("getsockopt", err))
			return largest
		}
		largest = max(largest, int64(info.Snd_cwnd))
	}
	return largest
}

// testDelackMax reads the value back if the kernel has a getsockopt for it, and compares delays of acknowledgements.
// The kernel starts with 40 ms.
func testDelackMax(t *testing.T, k *tuning, o config.TuneOption) {
	const delayed = 30 * time.Millisecond
	least := 2 * 1000 * 1000 / hz(t)
	delays := make(map[string]map[int64][]time.Duration)
	w := watchWire(t, 0)
	each(t, k, o, []int64{least, 100 * 1000, o.Max}, func(t *testing.T, n network, value int64, s ends) {
		readBack(t, s, tcpDelackMaxUs, value)
		if delays[n.name] == nil {
			delays[n.name] = make(map[int64][]time.Duration)
		}
		long := time.Duration(0)
		if value == o.Max {
			long = delayed
		}
		delays[n.name][value] = []time.Duration{
			w.on(t).acknowledgement(s.connected, s.accepted, long), w.on(t).acknowledgement(s.accepted, s.connected, long),
		}
	})
	for name, d := range delays {
		for i, short := range d[least] {
			if long := d[o.Max][i]; short >= long || long < delayed {
				t.Errorf("%s: acknowledgements take %v, and %v with the largest delay", name, short, long)
			}
		}
	}
}

// readBack reads a time in microseconds that only newer kernels report.
func readBack(t testing.TB, s ends, name int, want int64) {
	t.Helper()
	for end, fd := range map[string]int{"connected": s.connected, "accepted": s.accepted} {
		got, err := unix.GetsockoptInt(fd, unix.SOL_TCP, name)
		if errors.Is(err, unix.ENOPROTOOPT) {
			return // before 6.15
		}
		if err != nil {
			t.Fatal(os.NewSyscallError("getsockopt", err))
		}
		if int64(got) != want {
			t.Errorf("%s socket has %d us, want %d", end, got, want)
		}
	}
}

// acknowledgement returns the shortest of several delays until a byte that is not read is acknowledged, or the first one that is
// not shorter than long. The first segments, which are acknowledged at once, are not counted; so are up to 16 after a pause of this
// host that is longer than the retransmission timeout (tcp_event_data_recv, net/ipv4/tcp_input.c).
func (w *wire) acknowledgement(from, to int, long time.Duration) time.Duration {
	w.t.Helper()
	port := testenv.Port(w.t, to)
	shortest := time.Hour
	for i := range 240 {
		if err := send(from, []byte{1}); err != nil {
			w.t.Fatal(err)
		}
		data := w.data(from)
		ack := w.next(func(s *segment) bool { return s.source.Port() == port && s.ack == data.seq+1 })
		delay := ack.at.Sub(data.at)
		if err := receive(to, make([]byte, 1)); err != nil {
			w.t.Fatal(err)
		}
		if i >= 20 {
			shortest = min(shortest, delay)
			switch {
			case long > 0 && delay >= long:
				return delay
			case long == 0 && i == 23:
				return shortest
			}
		}
	}
	return shortest
}

// testRTOMin reads the timeout once there are samples of the RTT, which is short. The timeout exceeds the minimum by
// the variance of the RTT, which is large until there are enough samples without a delay of this host.
func testRTOMin(t *testing.T, k *tuning, o config.TuneOption) {
	const middle = 100 * 1000
	least := 2 * 1000 * 1000 / hz(t)
	below := map[int64]int64{least: middle, middle: o.Max, o.Max: 1000 * 1000}
	each(t, k, o, []int64{least, middle, o.Max}, func(t *testing.T, _ network, value int64, s ends) {
		readBack(t, s, tcpRTOMinUs, value)
		exchanges := func() {
			for range 20 {
				transfer(t, s.connected, s.accepted, 1)
				transfer(t, s.accepted, s.connected, 1)
			}
		}
		exchanges()
		for end, fd := range map[string]int{"connected": s.connected, "accepted": s.accepted} {
			var got int64
			testenv.Within(t, fmt.Sprintf("a timeout of the %s socket of less than %d us", end, below[value]), func() bool {
				if got = int64(tcpInfo(t, fd).Rto); got >= below[value] {
					exchanges()
				}
				return got < below[value]
			})
			if got < value {
				t.Errorf("timeout of the %s socket is %d us, want %d and less than %d", end, got, value, below[value])
			}
		}
	})
}

// testWindowClamp reads the clamp before data arrives: the kernel changes the clamp when it measures the peer's
// segment size (tcp_measure_rcv_mss, since 6.11), and when it enlarges the receive buffer.
func testWindowClamp(t *testing.T, k *tuning, o config.TuneOption) {
	bounded := testenv.TCPSocket(t, unix.AF_INET)
	if err := unix.SetsockoptInt(bounded, unix.SOL_TCP, unix.TCP_WINDOW_CLAMP, 1); err != nil {
		t.Fatal(os.NewSyscallError("setsockopt", err))
	}
	least := int64(sockopt(t, bounded, unix.SOL_TCP, unix.TCP_WINDOW_CLAMP))
	const middle = 20000
	each(t, k, o, values(o, middle), func(t *testing.T, _ network, value int64, s ends) {
		for end, fd := range map[string]int{"connected": s.connected, "accepted": s.accepted} {
			got := int64(sockopt(t, fd, unix.SOL_TCP, unix.TCP_WINDOW_CLAMP))
			switch want := max(value, least); {
			case value == o.Max && (got <= middle || got >= value):
				t.Errorf("%s socket has %d, want what the buffer allows", end, got)
			case value != o.Max && got != want:
				t.Errorf("%s socket has %d, want %d", end, got, want)
			}
		}
		// The window in the SYN-ACK was computed before the clamp of the accepted socket was set.
		if got := int64(tcpInfo(t, s.accepted).Snd_wnd); got > max(value, least) || value == o.Max && got <= middle {
			t.Errorf("the peer may send %d bytes, want at most %d", got, max(value, least))
		}
	})
}

// testSynRetries retransmits the SYN at short intervals.
func testSynRetries(t *testing.T, k *tuning, o config.TuneOption) {
	networks := newNetworks(t)
	for _, v := range values(o, 3) {
		k.installRules(config.TuneRule{Name: "r", Set: []config.Setting{{Option: "syn_rto", Value: 1000}, {Option: o.Name, Value: v}}})
		for _, n := range networks {
			_, at := listenSocket(t, n.domain, n.addr)
			w := watchWire(t, 0)
			fd := connectDeaf(t, at)
			if got := sockopt(t, fd, unix.SOL_TCP, unix.TCP_SYNCNT); int64(got) != v {
				t.Errorf("%s: retries are %d, want %d", n.name, got, v)
			}
			if v == o.Max {
				continue
			}
			for range v + 1 {
				w.syn(fd)
			}
			events := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
			if _, err := retry(func() (int, error) { return unix.Poll(events, 60000) }); err != nil {
				t.Fatal(os.NewSyscallError("poll", err))
			}
			if got := unix.Errno(sockopt(t, fd, unix.SOL_SOCKET, unix.SO_ERROR)); got != unix.ETIMEDOUT {
				t.Errorf("%s: connect ended with %v, want ETIMEDOUT", n.name, got)
			}
		}
	}
}

// timestamps is the length of the timestamps option in a segment.
const timestamps = 12

// testMSS checks the MSS in the SYN and the segments of both sides: the peer obeys it.
func testMSS(t *testing.T, k *tuning, o config.TuneOption) {
	w := watchWire(t, 0)
	each(t, k, o, values(o, 1000), func(t *testing.T, n network, value int64, s ends) {
		want := min(value, int64(n.mss))
		if got := w.on(t).syn(s.connected).mss; int64(got) != want {
			t.Errorf("the SYN has an MSS of %d, want %d", got, want)
		}
		for end, fd := range map[string]int{"connected": s.connected, "accepted": s.accepted} {
			if got := int64(tcpInfo(t, fd).Snd_mss); got != want-timestamps {
				t.Errorf("%s socket sends segments of %d, want %d", end, got, want-timestamps)
			}
		}
	})
}

// on returns the check for another test.
func (w *wire) on(t testing.TB) *wire { return &wire{t, w.fd} }

// syn returns the next SYN or SYN-ACK of a socket.
func (w *wire) syn(fd int) *segment {
	w.t.Helper()
	port := testenv.Port(w.t, fd)
	return w.next(func(s *segment) bool { return s.source.Port() == port && s.flags&flagSYN != 0 })
}

// data returns the next segment with data of a socket.
func (w *wire) data(fd int) *segment {
	w.t.Helper()
	port := testenv.Port(w.t, fd)
	return w.next(func(s *segment) bool { return s.source.Port() == port && s.data > 0 })
}

// sent sends from both ends and checks the segments.
func (w *wire) sent(s ends, look func(end string, s *segment)) {
	w.t.Helper()
	transfer(w.t, s.connected, s.accepted, 100)
	look("connected", w.data(s.connected))
	transfer(w.t, s.accepted, s.connected, 100)
	look("accepted", w.data(s.accepted))
}

// TCP sets the ECN bits of the octet itself.
const dscp = 0xfc

func testTOS(t *testing.T, k *tuning, o config.TuneOption) {
	w := watchWire(t, 0)
	each(t, k, o, values(o, 0x2e<<2), func(t *testing.T, n network, value int64, s ends) {
		want := value & dscp
		if n.domain == unix.AF_INET6 {
			want = 0
		}
		w.on(t).sent(s, func(end string, s *segment) {
			if int64(s.class) != want {
				t.Errorf("%s socket sends %#x, want %#x", end, s.class, want)
			}
		})
	})
}

func testTrafficClass(t *testing.T, k *tuning, o config.TuneOption) {
	w := watchWire(t, 0)
	each(t, k, o, values(o, 0x2e<<2), func(t *testing.T, n network, value int64, s ends) {
		want := value & dscp
		if n.domain == unix.AF_INET {
			want = 0
		}
		w.on(t).sent(s, func(end string, s *segment) {
			if int64(s.class) != want {
				t.Errorf("%s socket sends %#x, want %#x", end, s.class, want)
			}
		})
	})
}

func testAutoFlowLabel(t *testing.T, k *tuning, o config.TuneOption) {
	w := watchWire(t, 0)
	each(t, k, o, values(o, 1), func(t *testing.T, n network, value int64, s ends) {
		w.on(t).sent(s, func(end string, s *segment) {
			if labelled := s.label != 0; labelled != (value == 1 && n.domain == unix.AF_INET6) {
				t.Errorf("%s socket sends label %#x", end, s.label)
			}
		})
	})
}

// testFlowLabel reads the flow labels of IPv6. With IPv4, the option sets the hash of the packets in the kernel only,
// which a packet filter with a known hash can select.
func testFlowLabel(t *testing.T, k *tuning, o config.TuneOption) {
	const middle = 0xabcde
	// The label is the middle of the hash, in network byte order.
	hashed := watchWire(t, bits.RotateLeft32(bits.ReverseBytes32(middle), -16))
	w := watchWire(t, 0)
	drawn := make(map[uint32]bool)
	each(t, k, o, values(o, middle), func(t *testing.T, n network, value int64, s ends) {
		if n.domain == unix.AF_INET {
			if value == middle {
				hashed.on(t).sent(s, func(string, *segment) {})
			}
			return
		}
		w.on(t).sent(s, func(end string, s *segment) {
			switch {
			case value == 0:
				drawn[s.label] = true
			case int64(s.label) != value:
				t.Errorf("%s socket sends label %#x, want %#x", end, s.label, value)
			}
		})
	})
	if len(drawn) != 2 || drawn[0] {
		t.Errorf("labels of two sockets are %v, want two random ones", drawn)
	}
}
