// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
	"sockeye/internal/gateway/packet"
)

// fewPorts restricts the ephemeral ports of the test's host until the test ends.
func fewPorts(t testing.TB, n int) {
	t.Helper()
	const file = "/proc/sys/net/ipv4/ip_local_port_range"
	old, err := os.ReadFile(file)
	if err == nil {
		err = os.WriteFile(file, fmt.Appendf(nil, "%d %d", 40000, 40000+n-1), 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(file, old, 0); err != nil {
			t.Error(err)
		}
	})
}

// TestUDPFlowsLeavePorts checks that a guest that sends from many ports to many destinations occupies at most a quarter
// of the host's ephemeral ports, and keeps its established flow.
func TestUDPFlowsLeavePorts(t *testing.T) {
	const ports, most = 1200, 300
	fewPorts(t, ports)
	j := join(t, 65520, everywhere)
	server := j.listenUDP(netip.AddrPortFrom(host4, 7201))
	dial := func(to netip.AddrPort) *net.UDPConn {
		return j.inside(func() (*net.UDPConn, error) { return net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to)) })
	}
	old := dial(netip.AddrPortFrom(host4, 7201))
	ask := func() (port uint16) {
		t.Helper()
		if _, err := old.Write([]byte("?")); err != nil {
			t.Fatal(err)
		}
		_, from, err := server.ReadFromUDPAddrPort(make([]byte, 10))
		if err == nil {
			_, err = server.WriteToUDPAddrPort([]byte("!"), from)
		}
		if err == nil {
			_, err = old.Read(make([]byte, 10))
		}
		if err != nil {
			t.Fatal(err)
		}
		return from.Port()
	}
	before := ask()
	own(t, "10.99.0.0/16") // no sockets; their ICMP errors must not remove flows
	var flood *net.UDPConn
	for i := range 3 * ports {
		if i%maxConnectedFlows == 0 {
			if flood != nil {
				flood.Close()
			}
			flood = j.inside(func() (*net.UDPConn, error) { return net.ListenUDP("udp4", nil) })
		}
		if _, err := flood.WriteToUDPAddrPort([]byte("x"), netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 99, byte(i >> 8), byte(i)}), 9)); err != nil && !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatal(err)
		}
		if i%50 == 0 {
			time.Sleep(time.Millisecond) // avoids drops in the queue of the interface
		}
	}
	for end := time.Now().Add(patience); j.g.Counts()[Evicted] < ports; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Errorf("counted %v", j.g.Counts())
			break
		}
	}
	// The host can use the other three quarters.
	for i := range ports - most - 10 {
		c, err := net.ListenUDP("udp", nil)
		if err != nil {
			t.Fatalf("the host can bind only %d ports: %v", i, err)
		}
		defer c.Close()
	}
	if after := ask(); after != before {
		t.Errorf("the established flow has changed its port from %d to %d", before, after)
	}
}

// TestTCPConnectionsLeavePorts checks the same limit for TCP connections, and that inbound connections still work.
func TestTCPConnectionsLeavePorts(t *testing.T) {
	const ports, most = 200, 50
	f, port := forward(t)
	listener := listenOn(t, host4)
	fewPorts(t, ports)
	p := newPuppet(t, Config{Forwards: []Forward{f}, Outbound: access.Outbound{All: true}})
	var list []*link
	for range most {
		list = append(list, p.dial(listener))
	}
	to := listener.Addr().(*net.TCPAddr).AddrPort()
	if s := p.syn(to, true).next(); s.Flags != packet.RST|packet.ACK {
		t.Errorf("connection beyond the limit: %v", s)
	}
	list[0].say(packet.RST, nil)
	p.until("an end", func() bool { return p.g.outgoing == most-1 })
	list[0] = p.dial(listener)
	c := reach(t, netip.AddrPortFrom(host4, 0), netip.AddrPortFrom(host4, port))
	defer c.Close()
	p.until("a connection from outside", func() bool { return len(p.g.conns) == most+1 })
	for _, l := range list {
		l.say(packet.RST, nil)
	}
	p.until("all ends", func() bool { return p.g.outgoing == 0 })
}

// TestUDPEviction checks that flows to name servers have a separate limit, and that neither a flood of queries nor a
// scan evicts a flow in use, including a flow that only sends.
func TestUDPEviction(t *testing.T) {
	alias := netip.MustParseAddr("169.254.53.53")
	server := netip.AddrPortFrom(host4, 53)
	for _, c := range []struct {
		name  string
		flood func(i int) (from, to netip.AddrPort)
		most  int
	}{
		{"questions", func(i int) (from, to netip.AddrPort) {
			return netip.AddrPortFrom(guest4, uint16(10000+i)), netip.AddrPortFrom(alias, 53)
		}, 10},
		{"scan", func(i int) (from, to netip.AddrPort) {
			return netip.AddrPortFrom(guest4, uint16(10000+i/maxConnectedFlows)), netip.AddrPortFrom(host4, uint16(10000+i))
		}, 39},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := newPuppet(t, Config{Outbound: access.Outbound{All: true, DNS: []access.NameServer{{Alias: alias, Server: server}}}, Outgoing: 40})
			lasting := endpoints{netip.AddrPortFrom(guest4, 5000), netip.AddrPortFrom(host4, 9)}
			for range 2 { // this flow only sends
				p.put(datagram(lasting.guest, lasting.remote, []byte("?")))
			}
			p.until("a flow", func() bool { return p.g.flows.all[lasting] != nil })
			p.wait(dnsIdle)
			// Stop the clock during the opening of flows, so that openBudget refuses no flow on a busy host.
			clock := p.g.clock
			p.g.clock = func() time.Time { return p.g.now }
			for i := range 3000 {
				from, to := c.flood(i)
				p.put(datagram(from, to, []byte("x")))
				p.turn(0)
				if n := len(p.g.flows.all); n > c.most+1 {
					t.Fatalf("%d flows", n)
				}
			}
			p.g.clock = clock
			if p.g.flows.all[lasting] == nil {
				t.Error("the flow in use was evicted")
			}
			if n := p.g.Counts()[Evicted]; n != uint64(3000-c.most) {
				t.Errorf("%d evicted", n)
			}
			// The last flow must exist.
			from, to := c.flood(2999)
			if p.g.flows.all[endpoints{from, to}] == nil {
				t.Error("the last flow does not exist")
			}
			n := p.g.flows.connected.n
			if n != len(p.g.flows.all) || p.g.timers.Len() != n {
				t.Errorf("%d flows in the lists, %d in the map, %d timers", n, len(p.g.flows.all), p.g.timers.Len())
			}
			p.wait(udpIdle + time.Second)
			p.wait(udpIdle + time.Second)
			if len(p.g.flows.all) != 0 {
				t.Errorf("%d flows at the end", len(p.g.flows.all))
			}
		})
	}
}

// TestQuestionsKeepTheirFlows checks that the flow of an unanswered query to a name server is not evicted, while flows
// of answered queries evict each other.
func TestQuestionsKeepTheirFlows(t *testing.T) {
	alias, server := netip.MustParseAddr("169.254.53.53"), netip.AddrPortFrom(host4, 53)
	p := newPuppet(t, Config{Outbound: access.Outbound{All: true, DNS: []access.NameServer{{Alias: alias, Server: server}}}, Outgoing: 40})
	lasting := func(i int) {
		for range 2 {
			p.put(datagram(netip.AddrPortFrom(guest4, uint16(10000+i)), netip.AddrPortFrom(host4, 9), []byte("x")))
		}
		p.turn(0)
	}
	for i := range 60 {
		lasting(i)
	}
	question := endpoints{netip.AddrPortFrom(guest4, 5000), netip.AddrPortFrom(alias, 53)}
	p.put(datagram(question.guest, question.remote, []byte("?")))
	p.turn(0)
	for i := range 200 {
		lasting(100 + i)
		if p.g.flows.all[question] == nil {
			t.Fatalf("the flow of the unanswered query was evicted by flow %d", i)
		}
	}
	if n := len(p.g.flows.all); n > 41 {
		t.Errorf("%d flows", n)
	}
}

// TestFlowsLeaveTime checks that a guest that keeps sending to new destinations does not keep the gateway busy with
// opening flows: queries to name servers and existing flows continue.
func TestFlowsLeaveTime(t *testing.T) {
	alias, server := netip.MustParseAddr("169.254.53.53"), netip.AddrPortFrom(host4, 53)
	p := newPuppet(t, Config{Outbound: access.Outbound{All: true, DNS: []access.NameServer{{Alias: alias, Server: server}}}})
	// Each reading of the clock advances it by one millisecond, which makes opening a flow expensive.
	begin, looks := time.Now(), 0
	p.g.clock = func() time.Time { looks++; return begin.Add(time.Duration(looks) * time.Millisecond) }
	lasting := endpoints{netip.AddrPortFrom(guest4, 5000), netip.AddrPortFrom(host4, 9)}
	p.put(datagram(lasting.guest, lasting.remote, []byte("?")))
	p.turn(0)
	const flood = 2000
	for i := range flood {
		p.put(datagram(netip.AddrPortFrom(guest4, 9999), netip.AddrPortFrom(host4, uint16(10000+i)), []byte("x")))
		if i%50 == 49 {
			p.turn(0)
		}
	}
	p.until("all datagrams are processed", func() bool {
		return len(p.g.flows.all)+int(p.g.Counts()[TooMany]) > flood
	})
	opened, spent := len(p.g.flows.all), time.Duration(looks)*time.Millisecond
	if most := int((spent*openingPercent/100+openingBurst)/time.Millisecond) + 10; opened > most || opened < most/4 {
		t.Errorf("%d flows were opened in %v, want at most %d", opened, spent, most)
	}
	if p.g.flows.all[lasting] == nil {
		t.Error("the existing flow was removed")
	}
	question := endpoints{netip.AddrPortFrom(guest4, 10000), netip.AddrPortFrom(alias, 53)}
	p.put(datagram(question.guest, question.remote, []byte("?")))
	p.turn(0)
	if p.g.flows.all[question] == nil {
		t.Error("a query to a name server was dropped")
	}
	looks += 1000 // the flood is over
	after := endpoints{netip.AddrPortFrom(guest4, 9999), netip.AddrPortFrom(host4, 9998)}
	p.put(datagram(after.guest, after.remote, []byte("x")))
	p.turn(0)
	if p.g.flows.all[after] == nil {
		t.Error("no flow is opened after the flood")
	}
}

// TestFlowsAfterPause is that a gateway that waits for a CPU while it opens a flow opens the next one.
func TestFlowsAfterPause(t *testing.T) {
	p := newPuppet(t, Config{Outbound: access.Outbound{All: true}})
	begin, looks := time.Now(), 0
	p.g.clock = func() time.Time { looks++; return begin.Add(time.Duration(looks) * time.Minute / 100) }
	for i := range 5 {
		at := endpoints{netip.AddrPortFrom(guest4, 5000), netip.AddrPortFrom(host4, uint16(9000+i))}
		p.put(datagram(at.guest, at.remote, []byte("?")))
		p.turn(0)
		if p.g.flows.all[at] == nil {
			t.Fatalf("flow %d is refused: %v", i, p.g.Counts())
		}
		looks = 0 // no time passes between the openings
	}
}

// TestPinhole checks that a peer that has sent one datagram, possibly with a forged source address, does not remain a
// permitted destination forever.
func TestPinhole(t *testing.T) {
	for _, c := range []struct {
		name   string
		config Config
		again  bool // the peer sends from time to time
		want   bool
	}{
		{"silent peer", Config{}, false, false},
		{"peer that continues to send", Config{}, true, true},
		{"silent peer, allowed destination", everywhere, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, port := forwardUDP(t)
			c.config.Forwards = []Forward{f}
			p := newPuppet(t, c.config)
			peer, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(host4, port)))
			if err != nil {
				t.Fatal(err)
			}
			defer peer.Close()
			b := p.g.bound[innerPort][0]
			say := func() {
				t.Helper()
				if _, err := peer.Write([]byte("!")); err != nil {
					t.Fatal(err)
				}
				p.until("a datagram", func() bool {
					k := b.peers[peer.LocalAddr().(*net.UDPAddr).AddrPort()]
					return k != nil && k.lastSeen.Equal(p.g.now)
				})
			}
			say()
			got := 0
			buffer := make([]byte, 10)
			for range 40 { // ten minutes
				p.wait(15 * time.Second)
				if c.again {
					say()
				}
				p.put(datagram(netip.AddrPortFrom(guest4, innerPort), peer.LocalAddr().(*net.UDPAddr).AddrPort(), []byte("?")))
				p.turn(0)
				wait := 20 * time.Millisecond
				if c.want || got < 11 {
					wait = patience
				}
				if err := peer.SetReadDeadline(time.Now().Add(wait)); err != nil {
					t.Fatal(err)
				}
				if _, err := peer.Read(buffer); err != nil {
					break
				}
				got++
			}
			if all := got == 40; all != c.want || got < 11 {
				t.Errorf("%d of 40 replies", got)
			}
		})
	}
}
