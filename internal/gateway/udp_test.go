// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
	"sockeye/internal/gateway/packet"
	"sockeye/internal/testenv"
	"sockeye/internal/tun"
	"sockeye/lab"
	"sockeye/room"
)

// joined is a guest with its own kernel whose gateway runs in the network namespace of the test.
type joined struct {
	testing.TB
	*lab.Namespace
	lab *lab.Lab
	g   *Gateway
}

// join creates a guest and starts its gateway.
func join(t testing.TB, mtu int, c Config) *joined {
	t.Helper()
	j, run := joinLater(t, mtu, c)
	run()
	return j
}

// joinLater creates a guest whose gateway starts with run.
func joinLater(t testing.TB, mtu int, c Config) (j *joined, run func()) {
	t.Helper()
	addHost(t)
	l, err := lab.New(t.Context(), lab.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	j = &joined{TB: t, lab: l}
	if j.Namespace, err = l.Namespace("guest"); err != nil {
		t.Fatal(err)
	}
	c.MTU, c.Guest4, c.Guest6, c.Host4, c.Host6 = mtu, guest4, guest6, alias4, alias6
	if c.Kernel, err = room.Calibrate(); err != nil {
		t.Fatal(err)
	}
	if err := j.Do(func() (err error) {
		c.TUN, err = tun.Open(tun.Interface{Name: "guest0", MTU: mtu, Addresses: []netip.Addr{guest4, guest6}})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	// A kernel worker configures IPv6 asynchronously.
	for begin := time.Now(); ; time.Sleep(testenv.Backoff(begin)) {
		routes, err := j.Netlink().RouteGet(guest6.AsSlice())
		if err == nil && len(routes) == 1 && routes[0].Type == unix.RTN_LOCAL {
			break
		}
		if time.Since(begin) > patience {
			t.Fatalf("IPv6 is not configured in the guest: %v, %v", routes, err)
		}
	}
	if j.g, err = New(c); err != nil {
		t.Fatal(err)
	}
	return j, func() {
		ctx, stop := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() { ended <- j.g.Run(ctx) }()
		t.Cleanup(func() {
			stop()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		})
	}
}

// inside opens a socket of the guest.
func (j *joined) inside(open func() (*net.UDPConn, error)) *net.UDPConn {
	j.Helper()
	var c *net.UDPConn
	if err := j.Do(func() (err error) {
		c, err = open()
		return err
	}); err != nil {
		j.Fatal(err)
	}
	return j.timed(c)
}

// timed sets timeouts on a socket.
func (j *joined) timed(c *net.UDPConn) *net.UDPConn {
	j.Helper()
	j.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		j.Fatal(err)
	}
	return c
}

// echoTo returns every datagram of a socket to its sender until the socket is closed.
func echoTo(c *net.UDPConn) {
	b := make([]byte, 1<<16)
	for {
		n, from, err := c.ReadFromUDPAddrPort(b)
		if err != nil {
			return
		}
		_, _ = c.WriteToUDPAddrPort(b[:n], from) // fails if the peer is closed
	}
}

func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(n)}).Read(b)
	return b
}

// most returns the largest payload of a datagram in bytes.
func most(a netip.Addr) int {
	if a.Is4() {
		return 65507
	}
	return 65527
}

// listenUDP opens a socket of the host.
func (j *joined) listenUDP(at netip.AddrPort) *net.UDPConn {
	j.Helper()
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	if err != nil {
		j.Fatal(err)
	}
	return j.timed(c)
}

// TestUDP checks that datagrams of all sizes reach a server, and that the replies are identical.
func TestUDP(t *testing.T) {
	for _, mtu := range []int{1500, 65520} {
		j := join(t, mtu, everywhere)
		for _, host := range []netip.Addr{host4, host6} {
			t.Run(fmt.Sprintf("%d/%v", mtu, host), func(t *testing.T) {
				server := j.listenUDP(netip.AddrPortFrom(host, 0))
				go echoTo(server)
				c := j.inside(func() (*net.UDPConn, error) {
					return net.DialUDP("udp", nil, server.LocalAddr().(*net.UDPAddr))
				})
				b := make([]byte, 1<<16)
				for _, size := range []int{0, 1, 1431, 1432, 1433, 1452, 1472, 1473, 8000, 65480, 65500, most(host)} {
					sent := random(size)
					if _, err := c.Write(sent); err != nil {
						t.Fatalf("%d bytes: %v", size, err)
					}
					n, err := c.Read(b)
					if err != nil {
						t.Fatalf("%d bytes: %v; %v", size, err, j.g.Counts())
					}
					if !bytes.Equal(b[:n], sent) {
						t.Errorf("sent %d bytes, received %d different bytes", size, n)
					}
				}
			})
		}
	}
}

// forwardUDP opens a socket of the host, for both families, that is forwarded to the guest's innerPort.
func forwardUDP(t testing.TB) (f Forward, port uint16) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer),
			unix.Bind(fd, &unix.SockaddrInet6{}))
	}
	if err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return Forward{FD: fd, Protocol: unix.IPPROTO_UDP, Port: innerPort}, uint16(name.(*unix.SockaddrInet6).Port)
}

// own makes all addresses of a prefix local to the host.
func own(t testing.TB, prefix string) {
	t.Helper()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	_, dst, err := net.ParseCIDR(prefix)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.RouteReplace(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: dst, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: unix.RT_SCOPE_HOST}); err != nil {
		t.Fatal(err)
	}
}

// TestUDPInbound checks that the guest sees the addresses of its peers, and that replies come from the address to
// which the peer sent.
func TestUDPInbound(t *testing.T) {
	own(t, "10.98.0.0/16")
	own(t, "fd98::/64")
	if err := os.WriteFile("/proc/sys/net/ipv6/ip_nonlocal_bind", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	f, port := forwardUDP(t)
	j := join(t, 1500, Config{Forwards: []Forward{f}}) // no outbound destination is allowed
	server := j.inside(func() (*net.UDPConn, error) { return net.ListenUDP("udp", &net.UDPAddr{Port: innerPort}) })
	go func() {
		b := make([]byte, 100)
		for {
			_, from, err := server.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = server.WriteToUDPAddrPort([]byte(netip.AddrPortFrom(from.Addr().Unmap(), from.Port()).String()), from)
		}
	}()
	ask := func(from, to netip.Addr, seen netip.Addr) {
		t.Helper()
		c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, port)))
		if err != nil {
			t.Fatal(err)
		}
		j.timed(c)
		if _, err := c.Write(nil); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 100)
		n, err := c.Read(b)
		if want := netip.AddrPortFrom(seen, c.LocalAddr().(*net.UDPAddr).AddrPort().Port()).String(); err != nil || string(b[:n]) != want {
			t.Errorf("%v to %v: reply %q, %v, want %q", from, to, b[:n], err, want)
		}
	}
	for i := range 200 {
		from := netip.AddrFrom4([4]byte{10, 98, byte(i), 7})
		ask(from, host4, from)
		// Send to an address that the host would not select as a source.
		ask(from, netip.AddrFrom4([4]byte{10, 98, 255, byte(i)}), from)
		from = netip.MustParseAddr(fmt.Sprintf("fd98::%x", i+1))
		ask(from, host6, from)
		ask(from, netip.MustParseAddr(fmt.Sprintf("fd98::ff:%x", i)), from)
	}
	ask(netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.1"), alias4)
	ask(netip.IPv6Loopback(), netip.IPv6Loopback(), alias6)
	// Other hosts must receive no datagrams of the guest.
	stranger := j.listenUDP(netip.AddrPortFrom(host4, 0))
	if _, err := server.WriteToUDPAddrPort([]byte("psst"), stranger.LocalAddr().(*net.UDPAddr).AddrPort()); err != nil {
		t.Fatal(err)
	}
	ask(host4, host4, host4)
	if err := stranger.SetReadDeadline(time.Now()); err != nil {
		t.Fatal(err)
	}
	if n, err := stranger.Read(make([]byte, 10)); err == nil {
		t.Errorf("another host received %d bytes", n)
	}
}

// TestUDPFromPublishedPort checks that a datagram that the guest sends from a published port has the host's port as
// its source, so that the peer can reply.
func TestUDPFromPublishedPort(t *testing.T) {
	f, port := forwardUDP(t)
	j := join(t, 1500, Config{Forwards: []Forward{f}, Outbound: access.Outbound{All: true}})
	server := j.inside(func() (*net.UDPConn, error) { return net.ListenUDP("udp", &net.UDPAddr{Port: innerPort}) })
	for _, host := range []netip.Addr{host4, host6} {
		peer := j.listenUDP(netip.AddrPortFrom(host, 0))
		if _, err := server.WriteToUDPAddrPort([]byte("hello"), peer.LocalAddr().(*net.UDPAddr).AddrPort()); err != nil {
			t.Fatal(err)
		}
		_, from, err := peer.ReadFromUDPAddrPort(make([]byte, 10))
		if err != nil || from.Port() != port {
			t.Errorf("from %v, %v; want port %d", from, err, port)
		}
		if _, err := peer.WriteToUDPAddrPort([]byte("hi"), from); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 10)
		if n, err := server.Read(b); err != nil || string(b[:n]) != "hi" {
			t.Errorf("answer %q, %v", b[:n], err)
		}
	}
}

// TestUDPRefused checks that the guest's socket receives the ICMP errors for its datagrams.
func TestUDPRefused(t *testing.T) {
	j := join(t, 65520, Config{Outbound: access.Outbound{Rules: []access.Rule{
		{Prefix: netip.MustParsePrefix("10.96.0.0/16"), Last: 65535}, {Prefix: netip.MustParsePrefix("fd96::/64"), Last: 65535},
		{Prefix: netip.MustParsePrefix("203.0.113.0/24"), Last: 65535},
	}}})
	for _, c := range []struct {
		to   string
		want error
	}{
		{"10.96.0.1:9", unix.ECONNREFUSED}, {"[fd96::1]:9", unix.ECONNREFUSED},
		{"203.0.113.1:9", unix.ENETUNREACH},                                     // the test's host has no route
		{"198.51.100.1:9", unix.EHOSTUNREACH}, {"[2001:db8::1]:9", unix.EACCES}, // not allowed
	} {
		s := j.inside(func() (*net.UDPConn, error) {
			return net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(c.to)))
		})
		enableErrors(t, s)
		for range 2 {
			if _, err := s.Write([]byte("?")); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Read(make([]byte, 10)); !errors.Is(err, c.want) {
				t.Errorf("%s: %v, want %v", c.to, err, c.want)
			}
		}
	}
}

// enableErrors sets IP_RECVERR and IPV6_RECVERR.
func enableErrors(t testing.TB, c *net.UDPConn) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		v4 := unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_RECVERR, 1)
		if v6 := unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1); v4 != nil && v6 != nil {
			t.Errorf("enable the error queue: %v, %v", v4, v6)
		}
	}); err != nil {
		t.Fatal(err)
	}
}

// TestUDPBurst checks that no datagram of a burst that fits into the guest's socket is lost.
func TestUDPBurst(t *testing.T) {
	f, port := forwardUDP(t)
	j := join(t, 65520, Config{Forwards: []Forward{f}})
	server := j.inside(func() (*net.UDPConn, error) { return net.ListenUDP("udp", &net.UDPAddr{Port: innerPort}) })
	raw, err := server.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) {
		if err := unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20); err != nil {
			t.Error(err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("udp", netip.AddrPortFrom(host4, port).String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const burst = 5000
	for range 4 {
		start := time.Now()
		for i := range burst {
			if _, err := c.Write(binary.BigEndian.AppendUint32(random(1400), uint32(i))); err != nil {
				t.Fatal(err)
			}
		}
		sent := time.Since(start)
		b := make([]byte, 2000)
		for i := range burst {
			n, err := server.Read(b)
			if err != nil {
				t.Fatalf("received %d of %d: %v", i, burst, err)
			}
			if got := binary.BigEndian.Uint32(b[n-4:]); got != uint32(i) {
				t.Fatalf("received number %d, want %d", got, i)
			}
		}
		t.Logf("%d datagrams sent in %v, received in %v", burst, sent, time.Since(start))
	}
}

// TestUDPForgotten checks that flows and peers expire.
func TestUDPForgotten(t *testing.T) {
	f, port := forwardUDP(t)
	p := newPuppet(t, Config{Forwards: []Forward{f}, Outbound: access.Outbound{All: true}})
	for i, remote := range []netip.AddrPort{netip.AddrPortFrom(host4, 9), netip.AddrPortFrom(host6, 9), netip.AddrPortFrom(host4, access.DNSPort)} {
		from := guest4
		if remote.Addr().Is6() {
			from = guest6
		}
		p.put(datagram(netip.AddrPortFrom(from, uint16(4000+i)), remote, []byte("?")))
	}
	p.until("three flows", func() bool { return len(p.g.flows.all) == 3 })
	c, err := net.Dial("udp", netip.AddrPortFrom(host4, port).String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("!")); err != nil {
		t.Fatal(err)
	}
	b := p.g.bound[innerPort][0]
	p.until("a peer", func() bool { return len(b.peers) == 1 })
	p.wait(dnsIdle + time.Second)
	if n := len(p.g.flows.all); n != 2 {
		t.Errorf("%d flows after the idle timeout", n)
	}
	p.wait(udpIdle + time.Second)
	p.wait(udpIdle + time.Second)
	if len(p.g.flows.all) != 0 || len(b.peers) != 0 || p.g.timers.Len() != 0 {
		t.Errorf("at the end: %d flows, %d peers, %d timers", len(p.g.flows.all), len(b.peers), p.g.timers.Len())
	}
}

// TestUDPPeersBounded checks that a sender with many forged source addresses does not prevent other peers from
// communicating.
func TestUDPPeersBounded(t *testing.T) {
	f, _ := forwardUDP(t)
	p := newPuppet(t, Config{Forwards: []Forward{f}})
	b := p.g.bound[innerPort][0]
	for i := range maxPeers + 1000 {
		b.addPeer(netip.AddrPortFrom(netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)}), 5), nil, nil)
	}
	if len(b.peers) > maxPeers {
		t.Errorf("%d peers", len(b.peers))
	}
	last := maxPeers + 999
	if b.peers[netip.AddrPortFrom(netip.AddrFrom4([4]byte{11, byte(last >> 16), byte(last >> 8), byte(last & 0xff)}), 5)] == nil {
		t.Error("the last peer is unknown")
	}
}

// datagram builds a datagram of the guest.
func datagram(from, to netip.AddrPort, payload []byte) []byte {
	ip := packet.IPv4Header
	if from.Addr().Is6() {
		ip = packet.IPv6Header
	}
	b := make([]byte, ip+packet.UDPHeader+len(payload))
	packet.WriteIP(b, from.Addr(), to.Addr(), unix.IPPROTO_UDP, packet.UDPHeader+len(payload))
	binary.BigEndian.PutUint16(b[ip:], from.Port())
	binary.BigEndian.PutUint16(b[ip+2:], to.Port())
	binary.BigEndian.PutUint16(b[ip+4:], uint16(packet.UDPHeader+len(payload)))
	copy(b[ip+packet.UDPHeader:], payload)
	return b
}
