// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/lab"
)

// pingSocket opens a connected ICMP socket, as ping(8) does, with the error queue enabled.
func (j *joined) pingSocket(to netip.Addr) int {
	j.Helper()
	protocol := unix.IPPROTO_ICMP
	if to.Is6() {
		protocol = unix.IPPROTO_ICMPV6
	}
	var fd int
	if err := j.Do(func() (err error) {
		fd, err = unix.Socket(domain(to), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, protocol)
		return err
	}); err != nil {
		j.Fatal(err)
	}
	j.Cleanup(func() { unix.Close(fd) })
	wait := unix.NsecToTimeval(int64(patience))
	if err := errors.Join(connectWithErrorQueue(fd, netip.AddrPortFrom(to, 0)), unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait)); err != nil {
		j.Fatal(err)
	}
	return fd
}

func ask(to netip.Addr, sequence, size int) []byte {
	b := append(make([]byte, icmpHeader), random(size)...)
	if b[0] = echo4; to.Is6() {
		b[0] = echo6
	}
	binary.BigEndian.PutUint16(b[6:], uint16(sequence))
	return b
}

func allowPing(t *testing.T, j *joined, who string) {
	t.Helper()
	if err := os.WriteFile("/proc/sys/net/ipv4/ping_group_range", []byte(who), 0); err != nil {
		t.Fatal(err)
	}
	if err := j.Sysctl("ipv4.ping_group_range", "0 0"); err != nil {
		t.Fatal(err)
	}
}

// TestPing checks that echo replies of all sizes arrive complete, and that the guest receives an error if the host
// denies ping sockets.
func TestPing(t *testing.T) {
	for _, mtu := range []int{1500, 65520} {
		j := join(t, mtu, everywhere)
		for _, host := range []netip.Addr{host4, host6} {
			t.Run(fmt.Sprintf("%d/%v", mtu, host), func(t *testing.T) {
				allowPing(t, j, "0 0")
				fd := j.pingSocket(host)
				b := make([]byte, 1<<17)
				for i, size := range []int{0, 56, 1452, 1473, 60000} {
					sent := ask(host, i, size)
					if err := unix.Send(fd, sent, 0); err != nil {
						t.Fatal(err)
					}
					n, err := unix.Read(fd, b)
					if err != nil {
						t.Fatalf("%d bytes: %v", size, err)
					}
					if !bytes.Equal(b[icmpHeader:n], sent[icmpHeader:]) || binary.BigEndian.Uint16(b[6:]) != uint16(i) {
						t.Errorf("sent %d bytes, received %d different bytes", size, n)
					}
				}
			})
		}
	}
	j := join(t, 1500, everywhere)
	allowPing(t, j, "1 0")
	fd := j.pingSocket(host4)
	if err := unix.Send(fd, ask(host4, 1, 8), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Read(fd, make([]byte, 100)); !errors.Is(err, unix.EHOSTUNREACH) {
		t.Errorf("ping without permission: %v", err)
	}
}

// TestHops checks that the guest's hop limit is used, and that the guest receives the address of the router that
// dropped the datagram, as traceroute(8) needs.
func TestHops(t *testing.T) {
	s := newSite(t, 1500, lab.LinkOptions{}, 0)
	for prefix, by := range map[string][2]string{"10.99.0.0/24": {"10.97.0.2", "10.97.0.1"}, "fd99::/64": {"fd97::2", "fd97::1"}} {
		err := s.host.AddRoute(netip.MustParsePrefix(prefix), netip.MustParseAddr(by[0]))
		if back := s.far.AddRoute(netip.MustParsePrefix(prefix), netip.MustParseAddr(by[1])); err != nil || back != nil {
			t.Fatal(err, back)
		}
	}
	for _, name := range []string{"ipv4.ip_forward", "ipv6.conf.all.forwarding"} {
		if err := s.far.Sysctl(name, "1"); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct{ to, router string }{{"10.99.0.9:33434", "10.97.0.2"}, {"[fd99::9]:33434", "fd97::2"}} {
		to := netip.MustParseAddrPort(test.to)
		var c *net.UDPConn
		if err := s.guest.Do(func() (err error) {
			c, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
			return err
		}); err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		enableErrors(t, c)
		raw, err := c.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		if err := raw.Control(func(fd uintptr) {
			level, option := unix.IPPROTO_IP, unix.IP_TTL
			if to.Addr().Is6() {
				level, option = unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
			}
			if err := unix.SetsockoptInt(int(fd), level, option, 1); err != nil {
				t.Error(err)
			}
		}); err != nil {
			t.Fatal(err)
		}
		// The router does not guarantee the error: a kernel that is sending another one drops it (icmp_xmit_lock,
		// icmpv6_xmit_lock). traceroute(8) sends several datagrams, too.
		err = os.ErrDeadlineExceeded
		for begin := time.Now(); errors.Is(err, os.ErrDeadlineExceeded) && time.Since(begin) < patience; {
			if err := c.SetDeadline(time.Now().Add(500 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Write([]byte("?")); err != nil {
				t.Fatal(err)
			}
			_, err = c.Read(make([]byte, 1))
		}
		if !errors.Is(err, unix.EHOSTUNREACH) {
			t.Errorf("%v: %v; %v", to, err, s.g.Counts())
			continue
		}
		if err := raw.Control(func(fd uintptr) {
			control := make([]byte, 256)
			_, n, _, _, err := unix.Recvmsg(int(fd), make([]byte, 10), control, unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
			if err != nil {
				t.Error(err)
				return
			}
			messages, err := unix.ParseSocketControlMessage(control[:n])
			if err != nil || len(messages) != 1 {
				t.Errorf("%d messages, %v", len(messages), err)
				return
			}
			if e, ok := parseSocketError(&messages[0]); !ok || e.offender != netip.MustParseAddr(test.router) {
				t.Errorf("%v: ICMP error from %v, want %s", to, e.offender, test.router)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
}
