// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestUDPSegmented checks that datagrams of equal and different sizes and hop limits arrive unmodified and in order,
// over paths with and without UDP_SEGMENT.
func TestUDPSegmented(t *testing.T) {
	for _, mtu := range []int{65536, 1400} { // of the host
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = netlink.LinkSetMTU(lo, mtu)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := netlink.LinkSetMTU(lo, 65536); err != nil {
				t.Error(err)
			}
		})
		for _, host := range []netip.Addr{host4, host6} {
			t.Run(fmt.Sprintf("%d/%v", mtu, host), func(t *testing.T) {
				j, run := joinLater(t, 65520, everywhere)
				server := j.listenUDP(netip.AddrPortFrom(host, 0))
				if err := server.SetReadBuffer(receiveBuffer); err != nil {
					t.Fatal(err)
				}
				network, level, option := "udp4", unix.IPPROTO_IP, unix.IP_TTL
				if host.Is6() {
					network, level, option = "udp6", unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS
				}
				var clients [2]*net.UDPConn
				for i := range clients {
					clients[i] = j.inside(func() (*net.UDPConn, error) {
						return net.DialUDP(network, nil, server.LocalAddr().(*net.UDPAddr))
					})
				}
				raw, err := clients[0].SyscallConn()
				if err != nil {
					t.Fatal(err)
				}
				var sent [][]byte
				number := 0
				send := func(c *net.UDPConn, size int) {
					t.Helper()
					p := random(size)
					for i := 0; i < min(2, size); i++ {
						p[i] = byte(number >> (8 * i))
					}
					number++
					sent = append(sent, p)
					if _, err := c.Write(p); err != nil {
						t.Fatal(err)
					}
				}
				for range 150 {
					send(clients[0], 700)
				}
				for _, size := range []int{1300, 1300, 10, 10, 10, 0, 0, 20, 3000, 3000, 3000, 1, 1, 65000, 65000} {
					send(clients[0], size)
				}
				for i := range 20 {
					send(clients[i%2], 100)
				}
				for i := range 20 {
					if err := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, 10+i/5) }); err != nil {
						t.Fatal(err)
					}
					send(clients[0], 100)
				}
				run() // all datagrams are queued when the gateway starts
				b := make([]byte, 1<<16)
				for i, want := range sent {
					n, err := server.Read(b)
					if err != nil {
						t.Fatalf("datagram %d of %d: %v; %v", i, len(sent), err, j.g.Counts())
					}
					if !bytes.Equal(b[:n], want) {
						t.Fatalf("datagram %d has %d bytes, want %d", i, n, len(want))
					}
				}
			})
		}
	}
}
