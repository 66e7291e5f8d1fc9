// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/lab"
)

// network is a host with four nfacctd members and six routers, three with BMP and IPFIX over IPv4 and three over IPv6.
type network struct {
	*host
	home home
}

func newNetwork(t *testing.T, mode config.Steering) *network {
	t.Helper()
	return networkOf(newHostWith(t, mode, 6))
}

func networkOf(h *host) *network {
	h.Helper()
	h.setPolicy(4)
	h.startAgent()
	n := &network{h, h.homes(4)}
	for slot := range 4 {
		n.startCollector(slot, 10)
	}
	for i := range 6 {
		to := lab.CollectorIPv4
		if i%2 == 1 {
			to = lab.CollectorIPv6
		}
		_, err := h.lab.StartRouter(lab.RouterConfig{Router: i, Collector: netip.AddrPortFrom(to, bmpPort)})
		h.must(err)
	}
	_, err := h.lab.StartTraffic(lab.TrafficConfig{})
	h.must(err)
	n.collect(0, 1, 2, 3)
	for i := range 6 {
		for k := range 2 { // two sockets
			_, err := h.lab.StartExporter(lab.ExporterConfig{Router: i, Instance: k})
			h.must(err)
		}
	}
	return n
}

func (n *network) startCollector(slot, peers int) {
	n.Helper()
	c := lab.CollectorConfig{Slot: slot, MaxPeers: peers, User: n.user(slot)}
	if n.isolated {
		c.User, c.Wrap = "root", n.isolation(slot)
	}
	if n.ports > 0 { // a successor
		c.Records = fmt.Sprintf("nfacctd-%d-%d.json", slot, n.ports)
	}
	sockets := n.spec(slot).Sockets
	c.BMP, c.IPFIX = sockets[0].Address, sockets[1].Address
	// nfacctd may wait long for a CPU, because other tests run beside this one. The default receive buffer has space for the
	// datagrams of 0.2 s.
	c.Nice = -15
	c.Extra = []string{"nfacctd_pipe_size: 4194304"}
	p, err := n.lab.StartCollector(c)
	n.must(err)
	n.members[slot] = &member{Process: p.Process, slot: slot}
}

// collect waits until collectors are in their slots, and all routers whose slot is ready have their session there.
func (n *network) collect(slots ...int) {
	n.Helper()
	n.ready(slots...)
	n.eventually("the sessions of the routers", func() error {
		sessions, err := n.lab.Sessions()
		n.must(err)
		for _, r := range n.lab.Routers() {
			slot, ok := sessions[r.BMP]
			want := slices.Contains(slots, n.home(r.BMP))
			if ok != want || ok && slot != n.home(r.BMP) {
				return fmt.Errorf("session of %v: slot %d, %v; home slot %d", r.BMP, slot, ok, n.home(r.BMP))
			}
		}
		return nil
	})
}

// together measures whether both streams of each router reach its collector, after all programs have started.
func (n *network) together() {
	n.Helper()
	ctx, cancel := context.WithTimeout(n.Context(), 2*patience)
	defer cancel()
	n.must(n.lab.WaitBGP(ctx))
	var o lab.Outcome
	measure := func() {
		m, err := n.lab.NewMeter()
		n.must(err)
		if err := n.lab.WaitRecords(ctx); err != nil {
			n.Fatalf("%v; before that %+v", err, o)
		}
		o, err = m.Read()
		n.must(err)
		for _, r := range o.Routers {
			if !r.Together() || r.TCPSlot != n.home(r.Address) {
				n.Fatalf("%+v; home is %d", r, n.home(r.Address))
			}
		}
	}
	// Records lack the fields of BMP until the collector has the route, including records that it is writing at that
	// time.
	for whole := 0; whole < 2; whole++ {
		measure()
		if len(o.Routers) != 6 {
			n.Errorf("records of %d routers", len(o.Routers))
		}
		if o.CorrelatedShare != 1 {
			whole = -1
		}
	}
}

// established returns the connection of each router in the kernel's tables.
func (n *network) established() map[netip.Addr]uint32 {
	n.Helper()
	found := map[netip.Addr]uint32{}
	n.must(n.collectors.Do(func() error {
		for _, family := range []uint8{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			all, err := netlink.SocketDiagTCP(family)
			if err != nil {
				return err
			}
			for _, s := range all {
				if a, ok := netip.AddrFromSlice(s.ID.Destination); ok && s.State == 1 && s.INode != 0 {
					found[a.Unmap()] = s.INode
				}
			}
		}
		return nil
	}))
	return found
}

// crashes kills each collector in turn, then all collectors, then the agent. nfacctd overwrites its command line, which
// the rules match.
func (n *network) crashes() {
	n.Helper()
	for slot := range 4 {
		before := n.established()
		n.kill(slot)
		// The restart is immediate: nfacctd's plugin still has the BMP listener.
		n.refuses("it is dead", slot)
		n.startCollector(slot, 10)
		n.away(slot)
		n.collect(0, 1, 2, 3)
		after := n.established()
		for _, r := range n.lab.Routers() {
			if home := n.home(r.BMP); home != slot && (before[r.BMP] != after[r.BMP] || before[r.BMP] == 0) {
				n.Errorf("collector %d was killed: router %v of slot %d has another connection", slot, r.BMP, home)
			}
		}
	}
	n.kill(0, 1, 2, 3)
	n.refuses("all are dead", 0, 1, 2, 3)
	for _, slot := range rand.Perm(4) {
		n.startCollector(slot, 10)
	}
	n.away(0, 1, 2, 3)
	n.collect(0, 1, 2, 3)
	before := n.established()
	n.killAgent()
	n.startAgent()
	n.collect(0, 1, 2, 3)
	if after := n.established(); !maps.Equal(before, after) {
		n.Errorf("the agent was killed: connections %v, before %v", after, before)
	}
}

// refuses waits until both protocols are rejected for the routers of the slots.
func (n *network) refuses(when string, slots ...int) {
	n.Helper()
	for _, r := range n.lab.Routers() {
		if slices.Contains(slots, n.home(r.BMP)) {
			if l := n.knock(r); l != (landing{refused, refused}) {
				n.Errorf("collector %d, %s: router %v: %v", n.home(r.BMP), when, r.BMP, l)
			}
		}
	}
}

// knock sends from a router's address without establishing a connection. nfacctd never responds, and would interpret a
// connection as the router's session.
func (n *network) knock(r *lab.Router) (l landing) {
	const wait = time.Second
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(r.BMP, 0)), Timeout: wait, Control: hearResets}
	n.must(r.Namespace.Do(func() error {
		l = landing{silent, silent}
		for tries := 2; l.tcp == silent && tries > 0; tries-- {
			c, err := d.Dial("tcp", target(r.BMP, bmpPort).String())
			if err == nil {
				c.Close()
				return fmt.Errorf("a connection of %v was established", r.BMP)
			}
			l.tcp = answer(nil, err, 0)
		}
		for tries := 2; l.udp == silent && tries > 0; tries-- { // see probeUDP; a ready collector is silent
			l.udp = probeUDP(r.BMP, ipfixPort, wait)
		}
		return nil
	}))
	return l
}

// hearResets lets a TCP socket receive only RSTs, so that its SYN is refused or not answered.
func hearResets(_, _ string, raw syscall.RawConn) (err error) {
	const flags, rst = 13, 1 << 2
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_B | unix.BPF_ABS, K: flags},
		{Code: unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K, K: rst, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: 1<<32 - 1},
		{Code: unix.BPF_RET | unix.BPF_K},
	}
	failed := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
	})
	return errors.Join(failed, err)
}

// maxCrashes is how many collectors may crash by themselves while they start: nfacctd 1.7.7 does on a busy host
// (KNOWN-ISSUES.md).
const maxCrashes = 3

// away checks starting collectors. Until they are ready, with one or two open sockets, all traffic is rejected, and the
// routers have no sessions with other collectors.
func (n *network) away(slots ...int) {
	n.Helper()
	var left []int
	crashed := 0
	readiness := func() {
		left = nil
		for _, s := range n.slots() {
			if slices.Contains(slots, s.Slot) && !s.Ready {
				left = append(left, s.Slot)
			}
		}
	}
	n.eventually("collectors", func() error {
		landed := map[*lab.Router]landing{}
		for _, r := range n.lab.Routers() {
			if slices.Contains(left, n.home(r.BMP)) {
				landed[r] = n.knock(r)
			}
		}
		sessions, err := n.lab.Sessions()
		n.must(err)
		readiness() // collectors that are not ready now were not ready before
		for r, l := range landed {
			home := n.home(r.BMP)
			if !slices.Contains(left, home) || l == (landing{refused, refused}) {
				continue
			}
			if n.members[home].Err() == nil { // it has not crashed
				n.Fatalf("collector %d starts: router %v: %v", home, r.BMP, l)
			}
		}
		for _, slot := range left {
			if err := n.members[slot].Err(); err != nil && crashed < maxCrashes {
				n.Logf("collector %d: %v; it starts again", slot, err)
				crashed++
				n.startCollector(slot, 10)
			}
		}
		for a, slot := range sessions {
			if slot != n.home(a) {
				n.Fatalf("router %v of slot %d has a session with %d", a, n.home(a), slot)
			}
		}
		if len(left) > 0 {
			return fmt.Errorf("%v are not ready", left)
		}
		return nil
	})
}
