// SPDX-License-Identifier: Apache-2.0

package tune_test

import (
	"testing"

	"golang.org/x/sys/unix"
)

func TestSmoke(t *testing.T) {
	k := newTuning(t, oneRule("sndbuf: 150KB, rcvbuf: 150KB, cwnd_clamp: 100, syn_rto: 10ms, synack_rto: 10ms, congestion: reno, initial_cwnd: 40, nodelay: false, initial_rwnd: 40, ecn: true"))
	for family, address := range families {
		l := listen(t, address)
		p := connect(t, l)
		for _, c := range []struct{ name string }{{family}} {
			t.Log(c.name, k.ruleOf(p.connected), k.ruleOf(p.accepted),
				option(t, p.connected, unix.SOL_SOCKET, unix.SO_SNDBUF), option(t, p.accepted, unix.SOL_SOCKET, unix.SO_SNDBUF))
		}
		for _, c := range []struct {
			n string
		}{} {
			_ = c
		}
		control(t, p.accepted, func(fd int) {
			i, _ := unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
			t.Logf("%+v", i)
		})
		control(t, p.connected, func(fd int) {
			i, _ := unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
			t.Logf("%+v", i)
		})
	}
	f, _ := k.Failures()
	t.Log(f)
	s := k.stats("r", 0)
	t.Logf("%d %d %d opts %d", s.Connections, s.Established, s.Closed, s.Options)
	// dual stack
	l := listen(t, "[::]:0")
	_, port, _ := splitPort(l.Addr().String())
	p := connectTo(t, l, "127.0.0.1:"+port)
	t.Log(k.ruleOf(p.accepted), option(t, p.accepted, unix.SOL_SOCKET, unix.SO_SNDBUF))
}

func splitPort(s string) (string, string, error) {
	for i := len(s) - 1; i >= 0; i-- {
		if s[i] == ':' {
			return s[:i], s[i+1:], nil
		}
	}
	return s, "", nil
}
