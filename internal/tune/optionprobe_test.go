// SPDX-License-Identifier: Apache-2.0

package tune_test

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
)

// TestRefusedValues sets values that a policy cannot express and the kernel refuses: each refusal is counted, and the
// connection works.
func TestRefusedValues(t *testing.T) {
	const connect, both = 1, 2 // ends of a connection that try
	refused := []struct {
		setting    config.Setting
		errno      string
		ipv4, ipv6 uint64
	}{
		{config.Setting{Option: "bind_ifindex", Value: -1}, "EINVAL", connect, connect},
		{config.Setting{Option: "txrehash", Value: 2}, "EINVAL", both, both},
		{config.Setting{Option: "congestion", Text: "nonesuch"}, "ENOENT", both, both},
		{config.Setting{Option: "congestion", Text: "cdg"}, "524", both, both}, // ENOTSUPP
		{config.Setting{Option: "initial_cwnd", Value: 0}, "EINVAL", both, both},
		{config.Setting{Option: "cwnd_clamp", Value: 0}, "EINVAL", both, both},
		{config.Setting{Option: "delack_max", Value: 1}, "EINVAL", both, both},
		{config.Setting{Option: "delack_max", Value: 300 * 1000}, "EINVAL", both, both},
		{config.Setting{Option: "rto_min", Value: 1}, "EINVAL", both, both},
		{config.Setting{Option: "rto_min", Value: 300 * 1000}, "EINVAL", both, both},
		{config.Setting{Option: "rto_max", Value: 999 * 1000}, "EINVAL", both, both},
		{config.Setting{Option: "rto_max", Value: 121 * 1000 * 1000}, "EINVAL", both, both},
		{config.Setting{Option: "window_clamp", Value: 0}, "EINVAL", both, both},
		{config.Setting{Option: "user_timeout", Value: -1000}, "EINVAL", both, both},
		{config.Setting{Option: "keepalive_idle", Value: 0}, "EINVAL", both, both},
		{config.Setting{Option: "keepalive_idle", Value: 32768 * 1000 * 1000}, "EINVAL", both, both},
		{config.Setting{Option: "keepalive_interval", Value: 0}, "EINVAL", both, both},
		{config.Setting{Option: "keepalive_interval", Value: 32768 * 1000 * 1000}, "EINVAL", both, both},
		{config.Setting{Option: "keepalive_probes", Value: 0}, "EINVAL", both, both},
		{config.Setting{Option: "keepalive_probes", Value: 128}, "EINVAL", both, both},
		{config.Setting{Option: "syn_retries", Value: 0}, "EINVAL", connect, connect},
		{config.Setting{Option: "syn_retries", Value: 128}, "EINVAL", connect, connect},
		{config.Setting{Option: "mss", Value: 87}, "EINVAL", connect, connect},
		{config.Setting{Option: "mss", Value: 32768}, "EINVAL", connect, connect},
		{config.Setting{Option: "thin_linear_timeouts", Value: 2}, "EINVAL", both, both},
		{config.Setting{Option: "traffic_class", Value: 256}, "EINVAL", 0, both},
	}
	k := newTuning(t, "")
	const before, after = 0x5eed, 5
	for _, r := range refused {
		name := r.setting.Option + " " + r.setting.Text
		if r.setting.Text == "" {
			name += fmt.Sprint(r.setting.Value)
		}
		t.Run(name, func(t *testing.T) {
			k := &tuning{Tune: k.Tune, t: t}
			// One setting precedes the refused ones, and one follows them.
			k.installRules(config.TuneRule{Name: "r", Set: []config.Setting{
				{Option: "mark", Value: before}, r.setting, {Option: "priority", Value: after},
			}})
			for _, n := range newNetworks(t) {
				fd, at := listenSocket(t, n.domain, n.addr)
				s := connectSockets(t, fd, at)
				transfer(t, s.connected, s.accepted, 20000)
				transfer(t, s.accepted, s.connected, 20000)
				for _, fd := range []int{s.connected, s.accepted} {
					if mark, priority := sockopt(t, fd, unix.SOL_SOCKET, unix.SO_MARK), sockopt(t, fd, unix.SOL_SOCKET, unix.SO_PRIORITY); mark != before || priority != after {
						t.Errorf("%s: the other options are %#x and %d", n.name, mark, priority)
					}
				}
			}
			if r.setting.Text == "cdg" && olderThan(t, "6.1") {
				r.errno = "ENOENT" // until then it is refused only if it is not there
			}
			expected := map[string]uint64{"r/" + r.setting.Option + "/" + r.errno: r.ipv4 + r.ipv6}
			if failed := k.failed(); !maps.Equal(failed, expected) {
				t.Errorf("failures are %v, want %v", failed, expected)
			}
			if got := k.stats("r", 0); got.Options != 8 || got.Connections != 4 {
				t.Errorf("%d options set on %d connections, want 8 on 4", got.Options, got.Connections)
			}
		})
	}
}

// TestDualStack connects IPv4 clients to an IPv6 listener: the requests have the listener's family, and the rules
// must use the IPv4 addresses.
func TestDualStack(t *testing.T) {
	sysctl(t, "net/ipv4/tcp_ecn", "0")
	k := newTuning(t, "")
	networks := newNetworks(t)
	set := func(mark, rwnd, synack, ecn int64) []config.Setting {
		return []config.Setting{
			{Option: "synack_rto", Value: synack}, {Option: "initial_rwnd", Value: rwnd}, {Option: "ecn", Value: ecn},
			{Option: "mark", Value: mark}, {Option: "tos", Value: 0x20}, {Option: "traffic_class", Value: 0x40},
		}
	}
	accept := func(prefix string) config.Match {
		return config.Match{Role: config.RoleAccept, Remote: []config.PrefixTerm{{Prefix: netip.MustParsePrefix(prefix)}}}
	}
	k.installRules(
		config.TuneRule{Name: "ipv4", Match: accept("127.0.0.0/8"), Set: set(4, 4, 40*1000*1000, 1)},
		config.TuneRule{Name: "ipv6", Match: accept("::/0"), Set: set(6, 6, 60*1000*1000, 0)},
		// Clients request ECN.
		config.TuneRule{Name: "clients", Match: config.Match{Role: config.RoleConnect}, Set: []config.Setting{{Option: "ecn", Value: 1}}},
	)
	for _, test := range []struct {
		listener netip.Addr
		clients  []network
	}{
		{netip.IPv6Unspecified(), networks},
		{networks[0].addr, networks[:1]},
		{networks[1].addr, networks[1:]},
	} {
		domain := unix.AF_INET6
		if test.listener.Is4() {
			domain = unix.AF_INET
		}
		fd, at := listenSocket(t, domain, test.listener)
		for _, n := range test.clients {
			t.Run(fmt.Sprintf("%s/%s", test.listener, n.name), func(t *testing.T) {
				want := map[string]struct {
					number int
					ecn    bool
				}{"ipv4": {4, true}, "ipv6": {6, false}}[n.name]
				to := netip.AddrPortFrom(n.addr, at.Port())
				(&tuning{Tune: k.Tune, t: t}).synackRTO(t, n, to, int64(want.number)*10*1000*1000)
				w := watchWire(t, 0)
				s := connectSockets(t, fd, to)
				synack := w.syn(s.accepted)
				if got := int(synack.window); got != want.number*(n.mss-timestamps) {
					t.Errorf("window of the SYN-ACK is %d, want %d * %d", got, want.number, n.mss-timestamps)
				}
				if got := synack.flags&flagECE != 0; got != want.ecn {
					t.Errorf("the SYN-ACK agrees to ECN: %v", got)
				}
				if got := sockopt(t, s.accepted, unix.SOL_SOCKET, unix.SO_MARK); got != want.number {
					t.Errorf("mark of the accepted socket is %d, want %d", got, want.number)
				}
				transfer(t, s.accepted, s.connected, 100)
				class := w.data(s.accepted).class & dscp
				switch {
				case domain == unix.AF_INET:
					if class != 0x20 {
						t.Errorf("type of service is %#x, want 0x20", class)
					}
				case n.domain == unix.AF_INET6:
					if class != 0x40 {
						t.Errorf("traffic class is %#x, want 0x40", class)
					}
				// The kernel applies tos to AF_INET sockets only, and does not write the traffic class of this socket
				// into IPv4 packets.
				case class != 0:
					t.Errorf("type of service is %#x, want 0", class)
				}
			})
		}
	}
	if failed := k.failed(); len(failed) > 0 {
		t.Errorf("failures: %v", failed)
	}
}

// TestMappedClient connects an IPv6 socket to an IPv4 address.
func TestMappedClient(t *testing.T) {
	k := newTuning(t, "")
	ipv4 := newNetworks(t)[0]
	set := []config.Setting{{Option: "syn_rto", Value: 30 * 1000 * 1000}, {Option: "initial_rwnd", Value: 4}, {Option: "mark", Value: 4}}
	k.installRules(
		config.TuneRule{Name: "ipv4", Match: config.Match{Role: config.RoleConnect, Remote: []config.PrefixTerm{{Prefix: netip.MustParsePrefix("127.0.0.0/8")}}}, Set: set},
	)
	fd, at := listenSocket(t, unix.AF_INET, ipv4.addr)
	mapped := netip.AddrPortFrom(netip.AddrFrom16(at.Addr().As16()), at.Port())
	w := watchWire(t, 0)
	s := connectSockets(t, fd, mapped)
	if got := int(w.syn(s.connected).window); got != 4*ipv4.mss {
		t.Errorf("window of the SYN is %d, want %d", got, 4*ipv4.mss)
	}
	if got := sockopt(t, s.connected, unix.SOL_SOCKET, unix.SO_MARK); got != 4 {
		t.Errorf("mark is %d, want 4", got)
	}
	if got := tcpInfo(t, connectDeaf(t, mapped)).Rto; int64(got) != rounded(t, 30*1000*1000) {
		t.Errorf("timeout of the SYN is %d us, want 30 s", got)
	}
}

// TestWithoutRule checks that connections without a rule keep the kernel's defaults, beside connections with a rule.
func TestWithoutRule(t *testing.T) {
	plain := func(n network) (options []int, info [3]uint32) {
		fd, at := listenSocket(t, n.domain, n.addr)
		s := connectSockets(t, fd, at)
		for _, fd := range []int{s.connected, s.accepted} {
			for _, o := range [][2]int{
				{unix.SOL_SOCKET, unix.SO_SNDBUF}, {unix.SOL_SOCKET, unix.SO_RCVBUF}, {unix.SOL_SOCKET, unix.SO_MARK},
				{unix.SOL_SOCKET, unix.SO_PRIORITY}, {unix.SOL_TCP, unix.TCP_NODELAY}, {unix.SOL_TCP, unix.TCP_SYNCNT},
			} {
				options = append(options, sockopt(t, fd, o[0], o[1]))
			}
		}
		i := tcpInfo(t, s.connected)
		return options, [3]uint32{i.Snd_cwnd, uint32(i.Options), i.Rcv_wnd}
	}
	networks := newNetworks(t)
	for _, n := range networks {
		before, infoBefore := plain(n)
		k := newTuning(t, "")
		k.installRules(config.TuneRule{
			Name:  "r",
			Match: config.Match{Ports: []config.PortRange{{First: 1, Last: 1}}},
			Set: []config.Setting{
				{Option: "syn_rto", Value: 1000}, {Option: "initial_rwnd", Value: 1}, {Option: "ecn", Value: 1}, {Option: "sndbuf", Value: 9000},
				{Option: "rcvbuf", Value: 9000}, {Option: "mark", Value: 1}, {Option: "nodelay", Value: 1}, {Option: "initial_cwnd", Value: 3},
			},
		})
		with, infoWith := plain(n)
		if !slices.Equal(before, with) || infoBefore != infoWith {
			t.Errorf("%s: without rules %v %v, with rules for others %v %v", n.name, before, infoBefore, with, infoWith)
		}
	}
}
