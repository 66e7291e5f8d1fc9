// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
	"sockeye/internal/gateway/packet"
)

// fewFiles sets the descriptor limit of the process until the test ends.
func fewFiles(t testing.TB, n uint64) {
	t.Helper()
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
			t.Error(err)
		}
	})
}

// device returns one of many addresses of a prefix that the host owns.
func device(v6 bool, i int) netip.Addr {
	if v6 {
		return netip.AddrFrom16([16]byte{0xfd, 0x99, 13: 1, 14: byte(i >> 8), 15: byte(i)})
	}
	return netip.AddrFrom4([4]byte{10, 99, byte(i >> 8), byte(i)})
}

// devices is a socket of the host that receives and sends for the addresses of all devices.
type devices struct {
	*net.UDPConn
	v6 bool
}

func (j *joined) devices(v6 bool) *devices {
	j.Helper()
	d := &devices{v6: v6}
	at, level, option := netip.IPv4Unspecified(), unix.IPPROTO_IP, unix.IP_PKTINFO
	if v6 {
		at, level, option = netip.IPv6Unspecified(), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO
	}
	d.UDPConn = j.listenUDP(netip.AddrPortFrom(at, 0))
	raw, err := d.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) {
			if err := unix.SetsockoptInt(int(fd), level, option, 1); err != nil {
				j.Error(err)
			}
		})
	}
	if err != nil {
		j.Fatal(err)
	}
	return d
}

// receive returns the number in a datagram, its source and its destination.
func (d *devices) receive(until time.Time) (number int, from netip.AddrPort, to netip.Addr, err error) {
	if err := d.SetReadDeadline(until); err != nil {
		return 0, from, to, err
	}
	b, control := make([]byte, 10), make([]byte, 256)
	n, controls, _, from, err := d.ReadMsgUDPAddrPort(b, control)
	if err != nil {
		return 0, from, to, err
	}
	messages, err := unix.ParseSocketControlMessage(control[:controls])
	if err != nil || len(messages) != 1 || n != 4 {
		return 0, from, to, fmt.Errorf("%d bytes, %d messages: %w", n, len(messages), err)
	}
	if to = netip.AddrFrom4([4]byte(messages[0].Data[8:])); d.v6 {
		to = netip.AddrFrom16([16]byte(messages[0].Data))
	}
	return int(binary.BigEndian.Uint32(b)), from, to, nil
}

// answer sends a number from the address of a device.
func (d *devices) answer(number int, from netip.Addr, to netip.AddrPort) error {
	control := unix.PktInfo6(&unix.Inet6Pktinfo{Addr: from.As16()})
	if !d.v6 {
		control = unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: from.As4()})
	}
	_, _, err := d.WriteMsgUDPAddrPort(binary.BigEndian.AppendUint32(nil, uint32(number)), control, to)
	return err
}

// TestUDPManyDestinations checks that a program that queries 20,000 devices from one port, before the first reply
// arrives, receives all replies, and that the gateway needs far fewer descriptors.
func TestUDPManyDestinations(t *testing.T) {
	const (
		files  = 300
		window = 50 // datagrams in flight, few enough for all queues
	)
	own(t, "10.99.0.0/16")
	own(t, "fd99::/64")
	if err := os.WriteFile("/proc/sys/net/ipv6/ip_nonlocal_bind", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		network string
		v6      bool
		all     int
	}{{"udp4", false, 20_000}, {"udp6", true, 2_000}} {
		t.Run(test.network, func(t *testing.T) {
			fewFiles(t, files)
			j := join(t, 1500, everywhere)
			server := j.devices(test.v6)
			port := server.LocalAddr().(*net.UDPAddr).AddrPort().Port()
			poller := j.inside(func() (*net.UDPConn, error) { return net.ListenUDP(test.network, nil) })
			before := descriptors(t)
			asked := make([]netip.AddrPort, test.all) // source addresses on the host
			end := time.Now().Add(patience)
			for first := 0; first < test.all; first += window {
				// The gateway drops datagrams if the guest opens flows too fast. The program retransmits them.
				for batch := asked[first:][:window]; slices.Contains(batch, netip.AddrPort{}); {
					if time.Now().After(end) {
						t.Fatalf("after %d devices: %v", first, j.g.Counts())
					}
					sent := 0
					for i := range batch {
						if batch[i].IsValid() {
							continue
						}
						to := netip.AddrPortFrom(device(test.v6, first+i), port)
						if _, err := poller.WriteToUDPAddrPort(binary.BigEndian.AppendUint32(nil, uint32(first+i)), to); err != nil {
							t.Fatal(err)
						}
						sent++
					}
					for range sent {
						number, from, to, err := server.receive(time.Now().Add(100 * time.Millisecond))
						if errors.Is(err, os.ErrDeadlineExceeded) {
							break
						}
						if err != nil || to != device(test.v6, number) {
							t.Fatalf("device %v got number %d, %v", to, number, err)
						}
						asked[number] = from
					}
				}
			}
			b := make([]byte, 10)
			if err := poller.SetReadDeadline(end); err != nil {
				t.Fatal(err)
			}
			for first := 0; first < test.all; first += window {
				got := map[int]bool{}
				for i := range window {
					if err := server.answer(first+i, device(test.v6, first+i), asked[first+i]); err != nil {
						t.Fatal(err)
					}
				}
				for range window {
					n, from, err := poller.ReadFromUDPAddrPort(b)
					if err != nil || n != 4 {
						t.Fatalf("%d bytes, %v after %d replies: %v", n, err, first+len(got), j.g.Counts())
					}
					number := int(binary.BigEndian.Uint32(b))
					if from != netip.AddrPortFrom(device(test.v6, number), port) || number/window != first/window || got[number] {
						t.Fatalf("reply %d of %v, in the batch from %d", number, from, first)
					}
					got[number] = true
				}
			}
			if n := descriptors(t) - before; n > test.all/100 {
				t.Errorf("%d descriptors for %d destinations", n, test.all)
			}
		})
	}
}

// peer is a socket of the host to which a guest sends.
type peer struct {
	*net.UDPConn
	at netip.AddrPort
}

func (p *puppet) peer(at netip.Addr) *peer {
	p.Helper()
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(at, 0)))
	if err != nil {
		p.Fatal(err)
	}
	p.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		p.Fatal(err)
	}
	level, option := unix.IPPROTO_IP, unix.IP_RECVTTL
	if at.Is6() {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_RECVHOPLIMIT
	}
	raw, err := c.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) {
			if err := unix.SetsockoptInt(int(fd), level, option, 1); err != nil {
				p.Error(err)
			}
		})
	}
	if err != nil {
		p.Fatal(err)
	}
	return &peer{c, c.LocalAddr().(*net.UDPAddr).AddrPort()}
}

// hear receives a datagram, which must be available, and returns its source and its hop limit.
func (c *peer) hear(p *puppet, want []byte) (from netip.AddrPort, hops int) {
	p.Helper()
	b, control := make([]byte, 1<<16), make([]byte, 64)
	n, controls, _, from, err := c.ReadMsgUDPAddrPort(b, control)
	if err != nil || !bytes.Equal(b[:n], want) {
		p.Fatalf("%v received %d bytes, want %d, %v; %v", c.at, n, len(want), err, p.g.Counts())
	}
	messages, err := unix.ParseSocketControlMessage(control[:controls])
	if err != nil || len(messages) != 1 {
		p.Fatalf("%d messages, %v", len(messages), err)
	}
	return from, int(binary.NativeEndian.Uint32(messages[0].Data))
}

// sharing opens flows of one port of the guest until the maximum number of connected sockets is reached. It returns the
// port and two peers for further flows.
func sharing(p *puppet, host netip.Addr) (from netip.AddrPort, peers [2]*peer) {
	p.Helper()
	if from = netip.AddrPortFrom(guest4, 5000); host.Is6() {
		from = netip.AddrPortFrom(guest6, 5000)
	}
	ports := map[netip.AddrPort]bool{}
	for range maxConnectedFlows {
		c := p.peer(host)
		p.put(datagram(from, c.at, []byte("own")))
		p.turn(0)
		at, _ := c.hear(p, []byte("own"))
		ports[at] = true
	}
	if len(ports) != maxConnectedFlows {
		p.Fatalf("%d flows leave from %d ports", maxConnectedFlows, len(ports))
	}
	for i := range peers {
		peers[i] = p.peer(host)
	}
	return from, peers
}

// each runs a test with both address families.
func each(t *testing.T, test func(t *testing.T, host netip.Addr)) {
	for _, host := range []netip.Addr{host4, host6} {
		t.Run(host.String(), func(t *testing.T) { test(t, host) })
	}
}

// TestUDPSharedStranger checks that datagrams of the peers of a shared socket reach the guest, each with its own source
// address, and that those of other senders, and of peers whose flow has expired, do not.
func TestUDPSharedStranger(t *testing.T) {
	each(t, func(t *testing.T, host netip.Addr) {
		p := newPuppet(t, Config{Outbound: access.Outbound{All: true}})
		from, peers := sharing(p, host)
		var at [2]netip.AddrPort
		for i, c := range peers {
			p.put(datagram(from, c.at, []byte("?")))
			p.turn(0)
			at[i], _ = c.hear(p, []byte("?"))
		}
		if at[0] != at[1] {
			t.Fatalf("two flows leave from %v and %v", at[0], at[1])
		}
		say := func(c *peer, text string) {
			t.Helper()
			if _, err := c.WriteToUDPAddrPort([]byte(text), at[0]); err != nil {
				t.Fatal(err)
			}
		}
		stranger := p.peer(host)
		say(stranger, "psst")
		p.quiet()
		if n := p.g.Counts()[Unsolicited]; n != 1 {
			t.Errorf("Unsolicited counter: %d", n)
		}
		for _, c := range peers {
			say(c, "!")
			if s := p.next(); s.From != c.at || s.To != from || string(s.Payload) != "!" {
				t.Errorf("%q from %v to %v, want it from %v", s.Payload, s.From, s.To, c.at)
			}
		}
		// One of the two flows of the socket remains in use.
		p.wait(udpIdle / 2)
		p.put(datagram(from, peers[0].at, []byte("more")))
		p.turn(0)
		peers[0].hear(p, []byte("more"))
		p.wait(udpIdle/2 + time.Second)
		say(peers[1], "late")
		p.quiet()
		say(peers[0], "in time")
		if s := p.next(); s.From != peers[0].at {
			t.Errorf("%q from %v", s.Payload, s.From)
		}
	})
}

// TestUDPSharedErrors checks that an ICMP error is reported for its destination only, and that datagrams to other
// destinations of the shared socket are not lost.
func TestUDPSharedErrors(t *testing.T) {
	each(t, func(t *testing.T, host netip.Addr) {
		p := newPuppet(t, Config{Outbound: access.Outbound{All: true}})
		from, peers := sharing(p, host)
		gone := peers[1].at
		peers[1].Close()
		const rounds = 100
		for i := range rounds {
			text := fmt.Append(nil, i)
			p.put(datagram(from, gone, []byte("?")))
			p.put(datagram(from, peers[0].at, text))
			p.put(datagram(from, peers[0].at, append(text, '+')))
			p.turn(100)
			peers[0].hear(p, text)
			peers[0].hear(p, append(text, '+'))
		}
		for range rounds {
			s := p.next()
			kind, code := uint8(icmpUnreachable), failures[noPort].code4
			if host.Is6() {
				kind, code = failures[noPort].type6, failures[noPort].code6
			}
			if s.Protocol == unix.IPPROTO_UDP || s.Payload[0] != kind || s.Payload[1] != code {
				t.Fatalf("protocol %d: % x", s.Protocol, s.Payload[:icmpHeader])
			}
			if about, ok := packet.Parse(s.Payload[icmpHeader:]); !ok || about.From != from || about.To != gone {
				t.Fatalf("ICMP error for a datagram from %v to %v, want %v to %v", about.From, about.To, from, gone)
			}
		}
		p.quiet()
		// A socket with pending errors of other flows must still receive.
		text := []byte("!")
		at := p.g.flows.all[endpoints{from, peers[0].at}]
		p.put(datagram(from, peers[0].at, text))
		p.turn(0)
		back, _ := peers[0].hear(p, text)
		p.put(datagram(from, gone, []byte("?")))
		if _, err := peers[0].WriteToUDPAddrPort(text, back); err != nil {
			t.Fatal(err)
		}
		heard := false
		for range 2 {
			s := p.next()
			heard = heard || s.Protocol == unix.IPPROTO_UDP && s.From == peers[0].at
		}
		if !heard || p.g.flows.all[endpoints{from, peers[0].at}] != at {
			t.Error("the reply to the other flow is lost")
		}
	})
}

// TestUDPSharedHops checks that each datagram has the guest's hop limit, also if one socket sends to several peers, and
// with one or several datagrams per call.
func TestUDPSharedHops(t *testing.T) {
	const usual = 64 // net.ipv4.ip_default_ttl and net.ipv6.conf.default.hop_limit
	each(t, func(t *testing.T, host netip.Addr) {
		p := newPuppet(t, Config{Outbound: access.Outbound{All: true}})
		from, peers := sharing(p, host)
		place := 8 // offset of the hop limit in the header
		if host.Is6() {
			place = 7
		}
		for _, train := range []int{1, 5} {
			limits := []int{10, 20, 20, usual, 30, usual, 10} // alternating between the peers
			for i, limit := range limits {
				for n := range train {
					b := datagram(from, peers[i%2].at, append(random(100), byte(i), byte(n)))
					b[place] = byte(limit)
					p.put(b)
				}
			}
			p.turn(0)
			for i, limit := range limits {
				for n := range train {
					if _, got := peers[i%2].hear(p, append(random(100), byte(i), byte(n))); got != limit {
						t.Errorf("datagram %d of %d to peer %d has hop limit %d, want %d", n, train, i%2, got, limit)
					}
				}
			}
		}
		for range 3 {
			s, ok := packet.Parse(datagram(from, peers[0].at, []byte("together")))
			if !ok {
				t.Fatal("no datagram")
			}
			p.g.udpArrives(&s)
		}
		if !p.g.gso.sendSegmented() {
			t.Error("the GSO batch was not sent")
		}
		p.g.gso.segments = p.g.gso.segments[:0]
		for _, c := range peers {
			if u := p.g.flows.all[endpoints{from, c.at}]; u.shared == nil || u.noGSO {
				t.Errorf("%v shared socket: %v, noGSO: %v", c.at, u.shared != nil, u.noGSO)
			}
		}
	})
}

// TestUDPSharedForgotten checks that flows of a shared socket expire independently, and that the socket is closed with
// the last flow.
func TestUDPSharedForgotten(t *testing.T) {
	each(t, func(t *testing.T, host netip.Addr) {
		p := newPuppet(t, Config{Outbound: access.Outbound{All: true}})
		from, peers := sharing(p, host)
		empty := descriptors(t) - maxConnectedFlows
		send := func(c *peer) {
			p.put(datagram(from, c.at, []byte("?")))
			p.turn(0)
			c.hear(p, []byte("?"))
		}
		expect := func(flows, files int) {
			t.Helper()
			if n := descriptors(t) - empty; n != files || len(p.g.flows.all) != flows || p.g.timers.Len() != flows {
				t.Errorf("%d flows, %d descriptors, %d timers, want %d flows and %d descriptors", len(p.g.flows.all), n, p.g.timers.Len(), flows, files)
			}
		}
		send(peers[0])
		send(peers[1])
		expect(maxConnectedFlows+2, maxConnectedFlows+1)
		p.wait(udpIdle / 2)
		send(peers[0])
		p.wait(udpIdle/2 + time.Second)
		expect(1, 1)
		p.wait(udpIdle)
		expect(0, 0)
		if n := len(p.g.flows.sources) + p.g.flows.sockets; n != 0 {
			t.Errorf("%d sources and shared sockets at the end", n)
		}
		send(peers[0])
		expect(1, 1)
	})
}

// TestUDPSharedFull checks that flows use another shared socket when the first one is full, and use the first one again
// when it has space.
func TestUDPSharedFull(t *testing.T) {
	each(t, func(t *testing.T, host netip.Addr) {
		p := newPuppet(t, Config{Outbound: access.Outbound{All: true}})
		from, _ := sharing(p, host)
		empty := descriptors(t) - maxConnectedFlows
		keep := slices.Collect(maps.Keys(p.g.flows.all)) // kept in use, so that further flows share sockets
		send := func(port uint16) *sharedSocket {
			t.Helper()
			f := endpoints{from, netip.AddrPortFrom(host, port)}
			p.put(datagram(f.guest, f.remote, []byte("?")))
			p.turn(0)
			return p.g.flows.all[f].shared
		}
		wait := func(d time.Duration) {
			p.wait(d)
			for _, f := range keep {
				p.put(datagram(f.guest, f.remote, []byte("own")))
			}
			p.turn(0)
		}
		first := send(1)
		first.limit = 3
		if first == nil || send(2) != first || send(3) != first {
			t.Fatal("three flows do not share a socket")
		}
		second := send(4)
		if second == nil || second == first || send(5) != second {
			t.Fatal("further flows do not share another socket")
		}
		wait(udpIdle / 2)
		for _, port := range []uint16{2, 3, 4, 5} {
			send(port)
		}
		wait(udpIdle/2 + time.Second) // the first flow expires
		if send(6) != first || send(7) != second {
			t.Error("the space of the expired flow is not reused")
		}
		if n := descriptors(t) - empty - maxConnectedFlows; n != 2 {
			t.Errorf("%d shared sockets", n)
		}
		p.wait(udpIdle + time.Second)
		p.wait(udpIdle + time.Second)
		if n := descriptors(t) - empty; n != 0 || len(p.g.flows.sources) != 0 {
			t.Errorf("%d sockets, %d sources at the end", n, len(p.g.flows.sources))
		}
	})
}

// TestUDPSharedNot checks that queries to name servers, and destinations that have the same address on the host's side,
// do not share sockets.
func TestUDPSharedNot(t *testing.T) {
	dns := netip.MustParseAddr("169.254.53.53")
	loop := netip.MustParseAddr("127.0.0.1")
	aliases := []netip.Addr{netip.MustParseAddr("169.254.53.1"), netip.MustParseAddr("169.254.53.2")}
	o := access.Outbound{All: true, DNS: []access.NameServer{{Alias: dns, Server: netip.AddrPortFrom(host4, access.DNSPort)}}, Host: aliases}
	for _, a := range aliases {
		o.Rules = append(o.Rules, access.Rule{Prefix: netip.PrefixFrom(a, 32), First: 1, Last: 65535})
	}
	p := newPuppet(t, Config{Outbound: o})
	from, peers := sharing(p, host4)
	server := p.peer(loop)
	to := []netip.AddrPort{peers[0].at, netip.AddrPortFrom(dns, access.DNSPort), netip.AddrPortFrom(host4, access.DNSPort)}
	for _, a := range aliases {
		to = append(to, netip.AddrPortFrom(a, server.at.Port()))
	}
	for i, shared := range []bool{true, false, false, true, false} {
		p.put(datagram(from, to[i], []byte("?")))
		p.turn(0)
		if u := p.g.flows.all[endpoints{from, to[i]}]; u == nil || (u.shared != nil) != shared {
			t.Errorf("flow to %v: %+v, shares a socket: want %v", to[i], u, shared)
		}
	}
	for i := range aliases {
		at, _ := server.hear(p, []byte("?"))
		if _, err := server.WriteToUDPAddrPort([]byte{byte(i)}, at); err != nil {
			t.Fatal(err)
		}
	}
	got := map[netip.AddrPort]byte{}
	for len(got) < len(aliases) {
		if s := p.next(); s.Protocol == unix.IPPROTO_UDP { // ICMP errors, because no name server listens
			got[s.From] = s.Payload[0]
		}
	}
	for i, a := range aliases {
		if n, ok := got[netip.AddrPortFrom(a, server.at.Port())]; !ok || int(n) != i {
			t.Errorf("answers %v", got)
		}
	}
}

// TestUDPSharedBounds checks that the number of flows on shared sockets is limited, that they do not evict flows with
// connected sockets, and that shared sockets leave most ports to connected sockets.
func TestUDPSharedBounds(t *testing.T) {
	const outgoing = 40
	own(t, "10.99.0.0/16")
	own(t, "10.98.0.0/16")
	p := newPuppet(t, Config{Outbound: access.Outbound{All: true}, Outgoing: outgoing})
	p.g.now = time.Now()
	p.g.clock = func() time.Time { return p.g.now } // stops the clock, so that openBudget refuses no flow
	send := func(port, i int) netip.AddrPort {
		t.Helper()
		to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(99 - i>>16), byte(i >> 8), byte(i)}), 9)
		s, ok := packet.Parse(datagram(netip.AddrPortFrom(guest4, uint16(port)), to, []byte("?")))
		if !ok {
			t.Fatal("no datagram")
		}
		p.g.udpArrives(&s)
		return to
	}
	l := &p.g.flows
	var last netip.AddrPort
	const more = 100
	for i := range maxConnectedFlows + maxSharing + more {
		last = send(1000, i)
	}
	p.g.gso.send()
	if l.shared.n != maxSharing || l.connected.n != maxConnectedFlows || p.g.Counts()[Evicted] != more {
		t.Errorf("%d flows on shared sockets, %d with connected sockets; %v", l.shared.n, l.connected.n, p.g.Counts())
	}
	if l.all[endpoints{netip.AddrPortFrom(guest4, 1000), last}] == nil {
		t.Error("the last flow does not exist")
	}
	for port := range 3 * outgoing {
		for i := range 2 * maxConnectedFlows {
			send(2000+port, i)
		}
		if l.sockets > outgoing/sharedDivisor || l.connected.n+l.sockets > outgoing {
			t.Fatalf("%d shared and %d connected sockets, limit %d", l.sockets, l.connected.n, outgoing)
		}
	}
	p.g.gso.send()
	if l.sockets != outgoing/sharedDivisor || l.connected.n != outgoing-l.sockets {
		t.Errorf("%d shared and %d connected sockets, limit %d", l.sockets, l.connected.n, outgoing)
	}
	// Without free descriptors all shared sockets are closed, those with one flow first.
	for n := outgoing; p.g.freeDescriptor(); n-- {
		if l.connected.n+l.sockets != n-1 || l.connected.n > 0 && l.sockets != outgoing/sharedDivisor {
			t.Fatalf("%d shared and %d connected sockets, want %d", l.sockets, l.connected.n, n-1)
		}
	}
	if n := len(l.all) + l.connected.n + l.shared.n + l.sockets + len(l.sources) + p.g.timers.Len(); n != 0 {
		t.Errorf("%d flows remain", n)
	}
}
