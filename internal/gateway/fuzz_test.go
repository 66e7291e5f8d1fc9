// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
	"sockeye/internal/gateway/packet"
	"sockeye/room"
)

// workers is the prefix of the host addresses of the fuzzing processes, which share a network namespace.
var workers = netip.MustParsePrefix("10.98.0.0/16")

// tap receives all packets on lo except those of other fuzzing processes.
type tap struct {
	fd  int
	own netip.Addr
}

func newTap(t testing.TB, own netip.Addr) *tap {
	t.Helper()
	const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // in network byte order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, all)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return &tap{fd, own}
}

// strays returns the destinations of packets that are not allowed.
func (p *tap) strays(allowed func(protocol uint8, to netip.AddrPort) bool) (list []netip.AddrPort) {
	b := make([]byte, 1<<17)
	for {
		n, _, err := unix.Recvfrom(p.fd, b, 0)
		if err != nil {
			return list
		}
		s, ok := packet.Parse(b[:n])
		if !ok || s.Protocol == unix.IPPROTO_ICMP && s.Payload[0] == 3 { // of the host, for a closed port
			continue
		}
		if workers.Contains(s.From.Addr()) && workers.Contains(s.To.Addr()) && s.To.Addr() != p.own && s.From.Addr() != p.own {
			continue // of another fuzzing process
		}
		if s.From.Addr().IsLoopback() && s.To.Addr().IsLoopback() && min(s.From.Port(), s.To.Port()) >= 32768 {
			continue // of a starting fuzzing process: room.Calibrate
		}
		// Replies from allowed destinations.
		if !allowed(s.Protocol, s.To) && !allowed(s.Protocol, s.From) {
			list = append(list, s.To)
		}
	}
}

// FuzzGuest sends arbitrary packets to a gateway that allows one port. The input is a script: the first of each four
// bytes selects the packet, and the others its content; or the input is one packet.
func FuzzGuest(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 1, 1, 10, 0, 1, 9, 20, 0, 2, 1, 0, 0, 1, 4, 0, 0})
	f.Add([]byte{0, 2, 0, 0, 1, 16, 255, 255, 1, 17, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 1, 16, 0, 0})
	f.Add([]byte{5, 1, 2, 3, 5, 1, 2, 4, 6, 0, 0, 0, 7, 7, 7, 7})
	f.Add(append([]byte{255}, build(netip.AddrPortFrom(guest4, 5), netip.AddrPortFrom(host4, 6), 1, 2, packet.SYN, 3, nil, nil)...))
	everyRoute(f)
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		f.Fatal(err)
	}
	own := netip.AddrFrom4([4]byte{10, 98, byte(os.Getpid() >> 8), byte(os.Getpid())})
	if err := netlink.AddrReplace(lo, &netlink.Addr{IPNet: &net.IPNet{IP: own.AsSlice(), Mask: net.CIDRMask(32, 32)}}); err != nil {
		f.Fatal(err)
	}
	listener := listenOn(f, own)
	allowed := listener.Addr().(*net.TCPAddr).AddrPort()
	go func() { // sends a greeting and closes, or replies
		for i := 0; ; i++ {
			c, err := listener.AcceptTCP()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(time.Second))
				b := make([]byte, 1<<16)
				if i%2 == 0 {
					_, _ = c.Write(b) // fails if the guest resets the connection
					return
				}
				for {
					n, err := c.Read(b)
					if err != nil {
						return
					}
					if _, err := c.Write(b[:n]); err != nil {
						return
					}
				}
			}()
		}
	}()
	kernel, err := room.Calibrate()
	if err != nil {
		f.Fatal(err)
	}
	outbound := access.Outbound{Rules: []access.Rule{{Prefix: netip.PrefixFrom(own, 32), First: allowed.Port(), Last: allowed.Port()}}}
	watch := newTap(f, own)
	may := func(protocol uint8, to netip.AddrPort) bool {
		return to == allowed && protocol == unix.IPPROTO_TCP || protocol != unix.IPPROTO_TCP && outbound.Allowed(protocol, to)
	}
	f.Fuzz(func(t *testing.T, script []byte) {
		script = script[:min(len(script), 2000)]
		watch.strays(may) // discard the packets of the test itself
		forward, _ := forward(t)
		p := makePuppet(t, Config{Outbound: outbound, Kernel: kernel, Connections: 16, Forwards: []Forward{forward}})
		if len(script) > 0 && script[0] == 255 {
			p.play(script[1:])
		} else {
			p.script(script, allowed)
		}
		for range 3 {
			p.turn(0)
		}
		if n := len(p.g.conns); n > 16 {
			t.Errorf("%d connections", n)
		}
		backlog := 0
		for _, c := range p.g.conns {
			if c.fd < 0 && c.state != timeWait {
				t.Errorf("connection without a socket in state %d", c.state)
			}
			backlog += len(c.rcv.backlog)
		}
		if backlog != p.g.backlog {
			t.Errorf("%d bytes in backlogs, accounted: %d", backlog, p.g.backlog)
		}
		if n := p.g.timers.Len(); n > len(p.g.conns)+len(p.g.flows.all)+len(p.g.echoes)+len(p.g.bound)+8 {
			t.Errorf("%d timers", n)
		}
		if list := watch.strays(may); len(list) > 0 {
			t.Errorf("packets to forbidden destinations: %v", list)
		}
	})
}

// everyRoute routes all packets to lo, where the tap sees them.
func everyRoute(t testing.TB) {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	for _, everything := range []string{"0.0.0.0/0", "::/0"} {
		_, to, _ := net.ParseCIDR(everything)
		if err := netlink.RouteReplace(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: to}); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for _, everything := range []string{"0.0.0.0/0", "::/0"} {
			_, to, _ := net.ParseCIDR(everything)
			_ = netlink.RouteDel(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: to})
		}
	})
}

// play sends a packet unmodified, except for its source address.
func (p *puppet) play(raw []byte) {
	if len(raw) == 0 || len(raw) > packet.MaxSize {
		return
	}
	// The gateway drops packets with another source address.
	raw = slices.Clone(raw)
	switch {
	case raw[0]>>4 == 4 && len(raw) >= packet.IPv4Header:
		copy(raw[12:], guest4.AsSlice())
	case raw[0]>>4 == 6 && len(raw) >= packet.IPv6Header:
		copy(raw[8:], guest6.AsSlice())
	}
	p.put(raw)
	p.turn(0)
}

// script simulates a guest that more or less follows the protocols.
func (p *puppet) script(script []byte, allowed netip.AddrPort) {
	type side struct{ seq, ack uint32 }
	sides := map[netip.AddrPort]*side{}
	others := []netip.AddrPort{
		allowed, netip.AddrPortFrom(allowed.Addr(), allowed.Port()+1), netip.MustParseAddrPort("192.0.2.1:80"), netip.MustParseAddrPort("127.0.0.1:22"),
		netip.AddrPortFrom(guest4, allowed.Port()), netip.AddrPortFrom(alias4, allowed.Port()), netip.MustParseAddrPort("255.255.255.255:9"),
		netip.MustParseAddrPort("224.0.0.1:9"), netip.MustParseAddrPort("0.0.0.0:9"),
	}
	at := func(port byte) *side {
		local := netip.AddrPortFrom(guest4, 1000+uint16(port%8))
		if sides[local] == nil {
			sides[local] = &side{seq: uint32(port) << 24}
		}
		return sides[local]
	}
	for len(script) >= 4 {
		kind, a, b, c := script[0], script[1], script[2], script[3]
		script = script[4:]
		s := at(a)
		local, remote := netip.AddrPortFrom(guest4, 1000+uint16(a%8)), allowed
		payload := make([]byte, int(b)*int(c)%60_000)
		switch kind % 8 {
		case 0:
			if c%4 == 3 {
				remote = others[int(b)%len(others)]
			}
			p.put(build(local, remote, s.seq, 0, packet.SYN, 65535, guestOptions(b%2 == 0), nil))
			s.seq++
		case 1: // in order
			p.put(build(local, remote, s.seq, s.ack, packet.ACK|a&packet.FIN, uint16(c)<<8, nil, payload))
			s.seq += uint32(len(payload)) + uint32(a&packet.FIN)
		case 2: // out of order, with any flags
			p.put(build(local, remote, s.seq+uint32(int8(b))*100, s.ack+uint32(int8(c))*100, a, uint16(c), nil, payload))
		case 3: // receive the segments of the gateway
			for r, ok := p.receive(); ok; r, ok = p.receive() {
				if x := sides[r.To]; x != nil && r.Protocol == unix.IPPROTO_TCP && a%5 != 0 {
					x.ack = r.Seq + r.Length()
				}
			}
		case 4:
			p.wait(time.Duration(int(b)*int(c)) * time.Millisecond)
		case 5:
			p.turn(1)
		case 6: // datagrams and echo requests
			q := build(local, others[int(b)%len(others)], 0, 0, 0, 0, nil, payload)
			q[9] = []byte{unix.IPPROTO_UDP, unix.IPPROTO_ICMP}[c%2]
			binary.BigEndian.PutUint16(q[packet.IPv4Header+4:], uint16(len(q)-packet.IPv4Header))
			if c%2 == 1 {
				q[packet.IPv4Header], q[packet.IPv4Header+1] = echo4, 0
			}
			p.put(q)
		case 7:
			p.put([]byte{kind<<4 | a&15, b, c, a, b, c, a, b, c})
		}
		if kind&128 == 0 {
			p.turn(0)
		}
	}
}

// TestFloodOfSYNs checks that the gateway's memory and descriptors are bounded for a guest that floods it with SYNs.
func TestFloodOfSYNs(t *testing.T) {
	p := newPuppet(t, Config{Outbound: access.Outbound{All: true}, Connections: 50})
	listener := listenOn(t, host4)
	to := listener.Addr().(*net.TCPAddr).AddrPort()
	for i := range 5000 {
		p.put(build(netip.AddrPortFrom(guest4, uint16(1000+i)), to, uint32(i), 0, packet.SYN, 65535, nil, nil))
		p.turn(0)
		p.receive()
		if n := len(p.g.conns); n > 50 {
			t.Fatalf("%d connections", n)
		}
	}
	for i := range maxSynAckTimeouts + 1 { // the guest ignores all SYN-ACKs
		p.wait(initialRTO<<(i+1) + time.Second)
	}
	p.ended()
	if err := listener.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	for range 50 {
		c, err := listener.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("host reads %v", err)
		}
		c.Close()
	}
}
