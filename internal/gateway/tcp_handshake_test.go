// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"sockeye/internal/gateway/access"
	"sockeye/internal/gateway/packet"
)

// TestSlowConnects is that packets of other flows do not wait for many connections whose connect(2) takes long, as with few free
// ports of the host, and that each connection is opened in the end, once.
func TestSlowConnects(t *testing.T) {
	l := listenOn(t, host4)
	udp, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(host4, 0)))
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	p := newPuppet(t, Config{Outbound: access.Outbound{All: true}})
	start := p.g.clock()
	p.g.clock = func() time.Time { // each connect(2) takes the time of a turn
		p.later += connectBudget
		return start.Add(p.later)
	}
	const connections = 40
	to := l.Addr().(*net.TCPAddr).AddrPort()
	for i := range uint16(connections) {
		syn := build(netip.AddrPortFrom(guest4, 20_000+i), to, 1, 0, packet.SYN, 65535, guestOptions(true), nil)
		p.put(syn)
		if i%2 == 1 {
			p.put(syn) // the guest repeats a SYN without a reply
		}
	}
	p.put(datagram(netip.AddrPortFrom(guest4, 20_000), udp.LocalAddr().(*net.UDPAddr).AddrPort(), []byte("other flow")))
	p.turn(100)
	if err := udp.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := udp.Read(make([]byte, 64)); err != nil {
		t.Fatal(err)
	}
	if n := len(p.g.conns); n > 4 {
		t.Errorf("%d connections were opened before the datagram of another flow was sent", n)
	}
	if p.g.timeout(time.Time{}) != 0 {
		t.Error("the loop would wait for events, although SYNs are deferred")
	}
	p.until("all SYNs", func() bool { return len(p.g.deferredSYNs) == 0 })
	if n := p.g.Counts()[Opened]; n != connections || len(p.g.conns) != connections {
		t.Errorf("%d connections were opened, and %d are open, want %d", n, len(p.g.conns), connections)
	}
}

// TestDeferredSYNs is that the number of deferred SYNs is bounded.
func TestDeferredSYNs(t *testing.T) {
	l := listenOn(t, host4)
	p := newPuppet(t, Config{Outbound: access.Outbound{All: true}})
	p.g.connecting = connectBudget
	to := l.Addr().(*net.TCPAddr).AddrPort()
	for i := range uint16(maxDeferredSYNs + 10) {
		s, ok := packet.Parse(build(netip.AddrPortFrom(guest4, 20_000+i), to, 1, 0, packet.SYN, 65535, guestOptions(true), nil))
		if !ok {
			t.Fatal("not a packet")
		}
		p.g.tcpArrives(&s)
	}
	if n, refused := len(p.g.deferredSYNs), p.g.Counts()[TooMany]; n != maxDeferredSYNs || refused != 10 {
		t.Errorf("%d deferred, %d counted, want %d and 10", n, refused, maxDeferredSYNs)
	}
	p.g.deferredSYNs = nil
}
