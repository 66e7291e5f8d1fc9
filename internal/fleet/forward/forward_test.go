// SPDX-License-Identifier: Apache-2.0

package forward_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/fleet/forward"
	"sockeye/internal/fleet/table"
	"sockeye/internal/netns"
	"sockeye/internal/placement"
	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { testenv.MainWithMaps(m) }

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

const port = 4739

var (
	service4 = netip.MustParseAddr("192.0.2.53")
	service6 = netip.MustParseAddr("2001:db8::53")
)

// node is a network namespace that a switch connects with the others: the router, or a host of the fleet.
type node struct {
	name   string
	file   *os.File
	nl     *netlink.Handle
	index  int // of eth0
	mac    [6]byte
	v4, v6 netip.Addr
	path   *forward.Path
	udp    []*net.UDPConn // at the addresses of the service
	tcp    []*net.TCPListener
}

func (n *node) do(t testing.TB, f func() error) {
	t.Helper()
	check(t, netns.Do(n.file, f))
}

// fleet is a router, and hosts with data paths on the same link.
type fleet struct {
	router *node
	hosts  []*node
	nonce  uint64
	epoch  uint64
	pins   string
	dead   map[string]bool // hosts that have died for the others
}

func prefix(a netip.Addr, bits int) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, a.BitLen())}
}

func addNode(t *testing.T, name string, number int) *node {
	t.Helper()
	n := &node{name: name, v4: netip.AddrFrom4([4]byte{10, 0, 0, byte(number)}),
		v6: netip.MustParseAddr(fmt.Sprintf("fd00::%d", number))}
	var err error
	n.file, err = netns.NewSmall()
	check(t, err)
	t.Cleanup(func() { n.file.Close() })
	n.do(t, func() (err error) {
		for _, s := range []string{"all", "default"} {
			if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+s+"/accept_dad", []byte("0"), 0); err != nil {
				return err
			}
		}
		n.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	t.Cleanup(n.nl.Close)
	outside, inside := "sw-"+name, "in-"+name
	check(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: outside}, PeerName: inside}))
	t.Cleanup(func() {
		if l, err := netlink.LinkByName(outside); err == nil {
			check(t, netlink.LinkDel(l))
		}
	})
	bridge, err := netlink.LinkByName("br0")
	check(t, err)
	out, err := netlink.LinkByName(outside)
	check(t, err)
	check(t, netlink.LinkSetMaster(out, bridge))
	check(t, netlink.LinkSetUp(out))
	in, err := netlink.LinkByName(inside)
	check(t, err)
	check(t, netlink.LinkSetNsFd(in, int(n.file.Fd())))
	eth, err := n.nl.LinkByName(inside)
	check(t, err)
	check(t, n.nl.LinkSetName(eth, "eth0"))
	check(t, n.nl.LinkSetUp(eth))
	lo, err := n.nl.LinkByName("lo")
	check(t, err)
	check(t, n.nl.LinkSetUp(lo))
	for a, bits := range map[netip.Addr]int{n.v4: 24, n.v6: 64} {
		check(t, n.nl.AddrAdd(eth, &netlink.Addr{IPNet: prefix(a, bits)}))
		check(t, netns.AwaitLocal(n.nl, a, time.Minute))
	}
	n.index = eth.Attrs().Index
	eth, err = n.nl.LinkByIndex(n.index)
	check(t, err)
	n.mac = [6]byte(eth.Attrs().HardwareAddr)
	return n
}

func newFleet(t *testing.T, hosts int) *fleet {
	t.Helper()
	return newFleetBy(t, hosts, false)
}

// newFleetBy connects a router and hosts a, b, c ... and opens the sockets of the service on each host. The programs are
// attached by filters if the kernel has no TCX links, or if filters is set.
func newFleetBy(t *testing.T, hosts int, filters bool) *fleet {
	t.Helper()
	check(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}))
	bridge, err := netlink.LinkByName("br0")
	check(t, err)
	t.Cleanup(func() { check(t, netlink.LinkDel(bridge)) })
	check(t, netlink.LinkSetUp(bridge))
	f := &fleet{router: addNode(t, "router", 1), nonce: 7, pins: testenv.BPFFS(t)}
	for i := range hosts {
		n := addNode(t, string(rune('a'+i)), 11+i)
		f.hosts = append(f.hosts, n)
		lo, err := n.nl.LinkByName("lo")
		check(t, err)
		eth, err := n.nl.LinkByName("eth0")
		check(t, err)
		for _, a := range []netip.Addr{service4, service6} {
			check(t, n.nl.AddrAdd(lo, &netlink.Addr{IPNet: prefix(a, a.BitLen())}))
			check(t, netns.AwaitLocal(n.nl, a, time.Minute))
			n.do(t, func() error {
				udp, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(a, port)))
				if err != nil {
					return err
				}
				tcp, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, port)))
				n.udp, n.tcp = append(n.udp, udp), append(n.tcp, tcp)
				return err
			})
			t.Cleanup(func() {
				for _, s := range n.udp {
					s.Close()
				}
				for _, s := range n.tcp {
					s.Close()
				}
			})
		}
		// The devices are behind the router.
		for _, r := range []*netlink.Route{
			{Dst: prefix(netip.MustParseAddr("172.16.0.0"), 12), Gw: f.router.v4.AsSlice(), LinkIndex: eth.Attrs().Index},
			{Dst: prefix(netip.MustParseAddr("fd01::"), 16), Gw: f.router.v6.AsSlice(), LinkIndex: eth.Attrs().Index},
		} {
			check(t, n.nl.RouteAdd(r))
		}
		n.do(t, func() (err error) {
			if n.path, err = forward.Open(filepath.Join(f.pins, "fleet_"+n.name)); err == nil && filters {
				err = n.path.UseFilters()
			}
			return err
		})
		t.Cleanup(func() {
			check(t, n.path.Close())
			check(t, forward.Remove(filepath.Join(f.pins, "fleet_"+n.name)))
		})
		check(t, n.path.SetListeners(listeners(port)))
		n.do(t, func() error { return n.path.Attach([]int{n.index}, 0) })
	}
	lo, err := f.router.nl.LinkByName("lo")
	check(t, err)
	for i := range 200 {
		for _, a := range []netip.Addr{device(4, i), device(6, i)} {
			check(t, f.router.nl.AddrAdd(lo, &netlink.Addr{IPNet: prefix(a, a.BitLen())}))
		}
	}
	check(t, netns.AwaitLocal(f.router.nl, device(6, 199), time.Minute))
	return f
}

func listeners(ports ...uint16) (list []forward.Listener) {
	for _, a := range []netip.Addr{service4, service6} {
		entry := forward.Listener{}
		entry.Address.Word = placement.Address(a).Word
		list = append(list, entry)
		for _, p := range ports {
			for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
				entry.Port, entry.Protocol = p>>8|p<<8, protocol
				list = append(list, entry)
			}
		}
	}
	return list
}

// device returns the address of a device behind the router.
func device(family, i int) netip.Addr {
	if family == 4 {
		return netip.AddrFrom4([4]byte{172, 16, 0, byte(i)})
	}
	return netip.MustParseAddr(fmt.Sprintf("fd01::%x", i+1))
}

// table returns a table in which bucket b belongs to host b % len(hosts).
func (f *fleet) table() *table.Table {
	f.epoch++
	t := &table.Table{Epoch: f.epoch, Nonce: f.nonce}
	for _, n := range f.hosts {
		t.Hosts = append(t.Hosts, table.Host{Name: n.name, Weight: 1, Addresses: []netip.Addr{n.v4, n.v6}})
	}
	for b := range table.Buckets {
		t.Owner[b], t.Previous[b], t.Next[b] = uint16(b%len(f.hosts)), table.None, table.None
	}
	return t
}

// set installs a table on a host.
func (f *fleet) set(t testing.TB, n *node, to *table.Table, devices *placement.DeviceMap) {
	t.Helper()
	f.flip(t, n, to, devices, forward.Flip{})
}

// flip is set with what happens at the flip.
func (f *fleet) flip(t testing.TB, n *node, to *table.Table, devices *placement.DeviceMap, flip forward.Flip) {
	t.Helper()
	n.do(t, func() error {
		return n.path.Set(to, n.name, func(h *table.Host) forward.Next {
			for _, other := range f.hosts {
				if other.name == h.Name {
					return forward.Next{Addresses: h.Addresses, Interface: n.index, MAC: other.mac, Dead: f.dead[h.Name]}
				}
			}
			return forward.Next{}
		}, devices, flip)
	})
}

func (f *fleet) setAll(t testing.TB, to *table.Table) {
	t.Helper()
	for _, n := range f.hosts {
		f.set(t, n, to, nil)
	}
}

// owner returns the host of a device by the tables of table.
func (f *fleet) owner(a netip.Addr) *node { return f.hosts[f.bucket(a)%len(f.hosts)] }

func (f *fleet) bucket(a netip.Addr) int {
	return int(placement.Hash(placement.Address(a), f.nonce) % table.Buckets)
}

// route makes the router send packets to the service to a host.
func (f *fleet) route(t testing.TB, to *node) {
	t.Helper()
	eth, err := f.router.nl.LinkByName("eth0")
	check(t, err)
	for service, gateway := range map[netip.Addr]netip.Addr{service4: to.v4, service6: to.v6} {
		check(t, f.router.nl.RouteReplace(&netlink.Route{Dst: prefix(service, service.BitLen()), Gw: gateway.AsSlice(), LinkIndex: eth.Attrs().Index}))
	}
}

// send sends a datagram from a device.
func (f *fleet) send(t testing.TB, from netip.Addr, data []byte, options ...func(fd uintptr) error) {
	t.Helper()
	to := service4
	if from.Is6() {
		to = service6
	}
	f.router.do(t, func() error {
		d := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), Control: func(_, _ string, c syscall.RawConn) (err error) {
			return errors.Join(c.Control(func(fd uintptr) {
				for _, o := range options {
					err = errors.Join(err, o(fd))
				}
			}), err)
		}}
		c, err := d.Dial("udp", netip.AddrPortFrom(to, port).String())
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write(data)
		return err
	})
}

// connect opens a connection from a device to the service.
func (f *fleet) connect(t testing.TB, from netip.Addr) (client net.Conn) {
	t.Helper()
	to := service4
	if from.Is6() {
		to = service6
	}
	f.router.do(t, func() (err error) {
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), Timeout: 10 * time.Second}
		client, err = d.Dial("tcp", netip.AddrPortFrom(to, port).String())
		return err
	})
	return client
}

// receive returns the host that receives a datagram from a device, or nil after a moment without one.
func (f *fleet) receive(t testing.TB, from netip.Addr, want []byte) *node {
	t.Helper()
	buffer := make([]byte, 1<<16)
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); {
		for _, n := range f.hosts {
			for _, s := range n.udp {
				check(t, s.SetReadDeadline(time.Now().Add(2*time.Millisecond)))
				size, source, err := s.ReadFromUDPAddrPort(buffer)
				if errors.Is(err, os.ErrDeadlineExceeded) {
					continue
				}
				check(t, err)
				if source.Addr().Unmap() != from || !bytes.Equal(buffer[:size], want) {
					t.Fatalf("%s: %d bytes from %v, want %d from %v", n.name, size, source, len(want), from)
				}
				return n
			}
		}
	}
	return nil
}

func counts(t testing.TB, n *node) [forward.Outcomes]uint64 {
	t.Helper()
	c, err := n.path.Counts()
	check(t, err)
	return c
}

func dontFragment(fd uintptr) error {
	return unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
}

// TestDatagrams is that datagrams reach the owner of their device from whichever host the router chooses, with their source
// address: small ones, ones that fill the link, and fragments.
func TestDatagrams(t *testing.T) {
	f := newFleet(t, 3)
	f.setAll(t, f.table())
	number := 0
	for _, chosen := range f.hosts {
		f.route(t, chosen)
		for i := range 30 {
			for _, family := range []int{4, 6} {
				for _, size := range []int{20, 1452, 4000} {
					number++
					data := make([]byte, size)
					binary.BigEndian.PutUint64(data, uint64(number))
					from := device(family, i)
					f.send(t, from, data)
					if at := f.receive(t, from, data); at != f.owner(from) {
						t.Fatalf("%d bytes from %v to %s: at %v, want %s", size, from, chosen.name, at, f.owner(from).name)
					}
				}
			}
		}
	}
	f.send(t, device(4, 1), make([]byte, 1472), dontFragment)
	if at := f.receive(t, device(4, 1), make([]byte, 1472)); at != f.owner(device(4, 1)) {
		t.Errorf("1472 bytes with DF: at %v", at)
	}
	var local, forwarded, others uint64
	for _, n := range f.hosts {
		c := counts(t, n)
		for outcome, packets := range c {
			switch forward.Outcome(outcome) {
			case forward.Local:
				local += packets
			case forward.Forwarded:
				forwarded += packets
			default:
				others += packets
			}
		}
	}
	if forwarded == 0 || local < forwarded || others != 0 {
		t.Errorf("%d local, %d forwarded and %d others", local, forwarded, others)
	}
}

// TestConnections is that connections survive when the router chooses other hosts.
func TestConnections(t *testing.T) {
	f := newFleet(t, 3)
	f.setAll(t, f.table())
	for _, family := range []int{4, 6} {
		for i := range 6 {
			from := device(family, i)
			f.route(t, f.hosts[i%3])
			client := f.connect(t, from)
			defer client.Close()
			owner := f.owner(from)
			l := owner.tcp[0]
			if family == 6 {
				l = owner.tcp[1]
			}
			check(t, l.SetDeadline(time.Now().Add(10*time.Second)))
			server, err := l.Accept()
			if err != nil {
				t.Fatalf("%v is not at %s: %v", from, owner.name, err)
			}
			defer server.Close()
			go func() {
				for range 20 {
					_, _ = client.Write(make([]byte, 100_000))
					time.Sleep(2 * time.Millisecond)
				}
				_ = client.(*net.TCPConn).CloseWrite()
			}()
			read, buffer := 0, make([]byte, 1<<16)
			check(t, server.SetDeadline(time.Now().Add(30*time.Second)))
			for {
				n, err := server.Read(buffer)
				before := read
				read += n
				if read/200_000 != before/200_000 {
					f.route(t, f.hosts[read/200_000%3])
				}
				if errors.Is(err, io.EOF) {
					break
				}
				check(t, err)
			}
			if read != 2_000_000 {
				t.Errorf("%v: %d bytes arrived", from, read)
			}
		}
	}
}

// TestLeaving is that the datagrams of a device whose bucket moves reach its former host until that host has closed the device's
// connection, also those of its other address, and the next host from then on.
func TestLeaving(t *testing.T) {
	f := newFleet(t, 3)
	a, b, c := f.hosts[0], f.hosts[1], f.hosts[2]
	named := netip.MustParseAddr("fd01::1000")
	lo, err := f.router.nl.LinkByName("lo")
	check(t, err)
	check(t, f.router.nl.AddrAdd(lo, &netlink.Addr{IPNet: prefix(named, 128)}))
	check(t, netns.AwaitLocal(f.router.nl, named, time.Minute))
	for i, from := range []netip.Addr{device(4, 0), device(6, 0)} {
		other := named
		devices, err := placement.ParseDeviceMap(strings.NewReader(fmt.Sprintf("%v,core1\n%v,core1\n", from, other)), "devices")
		check(t, err)
		m, err := placement.NewMapping(1, bpf.NoSlot, f.nonce, devices)
		check(t, err)
		bucket := m.Locate(from).Bucket
		tables := [3]*table.Table{f.table(), f.table(), f.table()}
		for i, to := range tables {
			to.Owner[bucket] = 0
			switch i {
			case 1:
				to.Next[bucket] = 1
			case 2:
				to.Owner[bucket], to.Previous[bucket] = 1, 0
			}
		}
		for _, n := range f.hosts {
			f.set(t, n, tables[0], devices)
			f.set(t, n, tables[1], devices)
		}
		f.route(t, a)
		client := f.connect(t, from)
		check(t, a.tcp[i].SetDeadline(time.Now().Add(10*time.Second)))
		server, err := a.tcp[i].Accept()
		check(t, err)
		reach := func(what string, want *node) {
			t.Helper()
			for _, n := range f.hosts {
				f.route(t, n)
				for _, address := range []netip.Addr{from, other} {
					f.send(t, address, []byte(what))
					if at := f.receive(t, address, []byte(what)); at != want {
						t.Errorf("%v, %s, by way of %s: at %v, want %s", address, what, n.name, at, want.name)
					}
				}
			}
		}
		reach("prepared", a)
		f.set(t, c, tables[2], devices)
		reach("prepared at a, not at c", a)
		local := server.LocalAddr().(*net.TCPAddr).AddrPort()
		remote := server.RemoteAddr().(*net.TCPAddr).AddrPort()
		f.flip(t, a, tables[2], devices, forward.Flip{
			Leaving: func() []forward.Connection {
				return []forward.Connection{{Hash: m.Hash(from), Device: netip.AddrPortFrom(from, remote.Port()), Local: netip.AddrPortFrom(local.Addr().Unmap(), local.Port())}}
			},
			After: func() {
				reach("connected", a)
				check(t, server.(*net.TCPConn).SetLinger(0))
				check(t, server.Close())
				reach("closed", b)
			},
		})
		if n, err := a.path.Leaving(); n > 0 || err != nil {
			t.Errorf("%d connections are left, %v", n, err)
		}
		f.set(t, b, tables[2], devices)
		reach("at b", b)
		client.Close()
	}
}

// TestDisagreement is that what a peer has forwarded is not forwarded again, but for the others it is.
func TestDisagreement(t *testing.T) {
	f := newFleet(t, 3)
	a, b, c := f.hosts[0], f.hosts[1], f.hosts[2]
	from := device(4, 1)
	first, second := f.table(), f.table()
	first.Owner[f.bucket(from)], second.Owner[f.bucket(from)] = 1, 2
	f.set(t, a, first, nil)
	f.set(t, b, second, nil)
	f.set(t, c, second, nil)
	f.route(t, a)
	f.send(t, from, []byte("through a"))
	if at := f.receive(t, from, []byte("through a")); at != b {
		t.Errorf("at %v, want b", at)
	}
	if n := counts(t, b); n[forward.Disagreed] != 1 || n[forward.Forwarded] != 0 {
		t.Errorf("b counts %v", n)
	}
	f.route(t, b)
	f.send(t, from, []byte("to b"))
	if at := f.receive(t, from, []byte("to b")); at != c {
		t.Errorf("at %v, want c", at)
	}
	// Host a has died for the others, and its program still forwards by its table.
	f.dead = map[string]bool{"a": true}
	f.set(t, b, second, nil)
	f.route(t, a)
	f.send(t, from, []byte("through a dead host"))
	if at := f.receive(t, from, []byte("through a dead host")); at != c || counts(t, b)[forward.Disagreed] != 1 {
		t.Errorf("through a dead host: at %v, want c; b counts %v", at, counts(t, b))
	}
}

// TestRouterLikePeer is that the packets of a router are forwarded if its MAC address has the same bit as that of a peer in the
// filter of peers.
func TestRouterLikePeer(t *testing.T) {
	f := newFleet(t, 2)
	f.setAll(t, f.table())
	from := device(4, 0)
	for i := 0; f.owner(from) != f.hosts[1]; i++ {
		from = device(4, i)
	}
	eth, err := f.router.nl.LinkByName("eth0")
	check(t, err)
	mac := f.hosts[1].mac
	mac[3]++
	mac[4], mac[5] = mac[5], mac[4]
	check(t, f.router.nl.LinkSetHardwareAddr(eth, mac[:]))
	f.route(t, f.hosts[0])
	f.send(t, from, []byte("like a peer"))
	if at := f.receive(t, from, []byte("like a peer")); at != f.hosts[1] {
		t.Errorf("at %v, want b", at)
	}
	if n := counts(t, f.hosts[0]); n[forward.Forwarded] != 1 || n[forward.Disagreed] != 0 {
		t.Errorf("a counts %v", n)
	}
}

// TestFlooded is that frames to other MAC addresses, which a switch floods when a host has died, are left alone: forwarding them
// would duplicate packets.
func TestFlooded(t *testing.T) {
	f := newFleet(t, 3)
	f.setAll(t, f.table())
	from := device(4, 0)
	for i := 0; f.owner(from) != f.hosts[2]; i++ {
		from = device(4, i)
	}
	f.route(t, f.hosts[1])
	neighbor := &netlink.Neigh{LinkIndex: f.router.index, State: netlink.NUD_PERMANENT, IP: f.hosts[1].v4.AsSlice(), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 0x99}}
	check(t, f.router.nl.NeighSet(neighbor))
	f.send(t, from, []byte("flooded"))
	f.route(t, f.hosts[0])
	f.send(t, from, []byte("forwarded"))
	if at := f.receive(t, from, []byte("forwarded")); at != f.hosts[2] {
		t.Errorf("at %v, want c", at)
	}
	for _, n := range f.hosts {
		want := [forward.Outcomes]uint64{}
		switch n {
		case f.hosts[0]:
			want[forward.Forwarded] = 1
		case f.hosts[2]:
			want[forward.Local] = 1
		}
		if got := counts(t, n); got != want {
			t.Errorf("host %s counts %v, want %v", n.name, got, want)
		}
	}
}

// TestDrops is that packets that no host serves are dropped and counted.
func TestDrops(t *testing.T) {
	f := newFleet(t, 2)
	a, b := f.hosts[0], f.hosts[1]
	mine, others := device(4, 0), device(4, 0)
	for i := 0; f.owner(mine) != a || f.owner(others) != b; i++ {
		if f.owner(device(4, i)) == a {
			mine = device(4, i)
		} else {
			others = device(4, i)
		}
	}
	f.route(t, a)
	ttl := func(n int) func(uintptr) error {
		return func(fd uintptr) error { return unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TTL, n) }
	}
	drops := func(what string, want forward.Outcome, from netip.Addr, options ...func(uintptr) error) {
		t.Helper()
		before := counts(t, a)
		f.send(t, from, []byte(what), options...)
		testenv.Within(t, what, func() bool { return counts(t, a)[want] == before[want]+1 })
	}
	drops("no table", forward.NoTable, mine)
	to := f.table()
	to.Owner[f.bucket(mine)] = table.None
	f.setAll(t, to)
	drops("no owner", forward.NoOwner, mine)
	drops("TTL", forward.Expired, others, ttl(1))
	f.setAll(t, f.table())
	f.send(t, mine, []byte("own"), ttl(1))
	if at := f.receive(t, mine, []byte("own")); at != a {
		t.Errorf("own packet with TTL 1: at %v", at)
	}
	a.do(t, func() error {
		return a.path.Set(f.table(), "a", func(*table.Host) forward.Next { return forward.Next{} }, nil, forward.Flip{})
	})
	drops("unreachable", forward.Unreachable, others)
	// What is not to a service does not reach the decision.
	before := counts(t, a)
	check(t, a.path.SetListeners(listeners(port+1)))
	f.send(t, others, []byte("other port"))
	if at := f.receive(t, others, []byte("other port")); at != a {
		t.Errorf("other port: at %v", at)
	}
	if after := counts(t, a); after != before {
		t.Errorf("counts %v, before %v", after, before)
	}
}

// openTunnel opens the tunnel of a host, and attaches its program.
func (n *node) openTunnel(t testing.TB) (index int) {
	t.Helper()
	n.do(t, func() (err error) {
		if index, err = n.path.OpenTunnel([]netip.Addr{service4, service6}); err != nil {
			return err
		}
		return n.path.Attach([]int{n.index}, index)
	})
	return index
}

// TestTunnel forwards packets to hosts that are reached through a tunnel, over IPv4 and IPv6: the device's address stays, and
// packets that fill the link arrive in fragments over IPv4. What no peer has sent into the tunnel is dropped.
func TestTunnel(t *testing.T) {
	const room = 1430
	for _, outer := range []string{"IPv4", "IPv6"} {
		t.Run("over "+outer, func(t *testing.T) {
			f := newFleet(t, 2)
			to := f.table()
			vni := forward.VNI(to.Nonce)
			for _, n := range f.hosts {
				index := n.openTunnel(t)
				n.do(t, func() error {
					return n.path.Set(to, n.name, func(h *table.Host) forward.Next {
						far := h.Addresses[0]
						if outer == "IPv6" {
							far = h.Addresses[1]
						}
						return forward.Next{Addresses: []netip.Addr{far}, Interface: index, Sources: []netip.Addr{far}, VNI: vni, Room: room}
					}, nil, forward.Flip{})
				})
			}
			a, b := f.hosts[0], f.hosts[1]
			f.route(t, a)
			sizes := []int{20, 1452, 1472, 4000} // 1472 fill an MTU of 1500, so that the outer packet is sent in two fragments
			if outer == "IPv6" {
				sizes = []int{20, 1300} // the kernel does not send packets of a tunnel over IPv6 in fragments
			}
			number := 0
			for i := range 20 {
				for _, family := range []int{4, 6} {
					for _, size := range sizes {
						number++
						data := make([]byte, size)
						binary.BigEndian.PutUint64(data, uint64(number))
						from := device(family, i)
						f.send(t, from, data)
						if at := f.receive(t, from, data); at != f.owner(from) {
							t.Fatalf("%d bytes from %v: at %v, want %s; a counts %v, b %v", size, from, at, f.owner(from).name, counts(t, a), counts(t, b))
						}
					}
				}
			}
			for family, most := range map[int]int{4: room - 40, 6: room - 60} {
				client := f.connect(t, device(family, 3))
				raw, err := client.(*net.TCPConn).SyscallConn()
				check(t, err)
				mss := 0
				check(t, raw.Control(func(fd uintptr) { mss, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG) }))
				check(t, err)
				if mss > most || mss < most-20 { // without the options of each segment
					t.Errorf("IPv%d: segments of %d bytes, want %d", family, mss, most)
				}
				client.Close()
			}
			if n := counts(t, a); n[forward.Forwarded] == 0 || n[forward.Unreachable]+n[forward.Untrusted] > 0 {
				t.Errorf("a counts %v", n)
			}
			mine := device(4, 0)
			for i := 0; f.owner(mine) != b; i++ {
				mine = device(4, i)
			}
			// A peer sends into another virtual network.
			n := counts(t, b)
			b.do(t, func() error {
				return b.path.Set(to, "b", func(*table.Host) forward.Next {
					far := a.v4
					if outer == "IPv6" {
						far = a.v6
					}
					return forward.Next{Addresses: []netip.Addr{far}, Interface: b.index, Sources: []netip.Addr{far}, VNI: vni + 1, Room: room}
				}, nil, forward.Flip{})
			})
			f.send(t, mine, []byte("of another fleet"))
			testenv.Within(t, "untrusted", func() bool { return counts(t, b)[forward.Untrusted] == n[forward.Untrusted]+1 })
			// Packets of a host that has left the table are accepted, also if no other host is in the table, and are treated as
			// those of a router.
			alone := func(next forward.Next) {
				b.do(t, func() error {
					if err := b.path.Set(to, "b", func(*table.Host) forward.Next { return next }, nil, forward.Flip{}); err != nil {
						return err
					}
					return b.path.Attach([]int{b.index}, 0)
				})
			}
			alone(forward.Next{})
			n = counts(t, b)
			f.send(t, mine, []byte("of a former host"))
			if at := f.receive(t, mine, []byte("of a former host")); at != b || counts(t, b)[forward.Local] != n[forward.Local]+1 {
				t.Errorf("of a former host: at %v, counts %v, before %v", at, counts(t, b), n)
			}
			// A host that b does not know sends into the tunnel.
			b.path.EndFormer()
			alone(forward.Next{})
			n = counts(t, b)
			f.send(t, mine, []byte("of a stranger"))
			testenv.Within(t, "untrusted", func() bool { return counts(t, b)[forward.Untrusted] > n[forward.Untrusted] })
			// A dead host of the table is known, too.
			far := a.v4
			if outer == "IPv6" {
				far = a.v6
			}
			for range 2 {
				alone(forward.Next{Addresses: []netip.Addr{far}, Interface: b.index, Sources: []netip.Addr{far}, VNI: vni, Room: room, Dead: true})
				n = counts(t, b)
				f.send(t, mine, []byte("of a dead host"))
				if at := f.receive(t, mine, []byte("of a dead host")); at != b || counts(t, b)[forward.Local] != n[forward.Local]+1 {
					t.Errorf("of a dead host: at %v, counts %v, before %v", at, counts(t, b), n)
				}
			}
		})
	}
}

// TestTunnelOfBothFamilies is that a host recognizes the packets of another one by all of its addresses: host a sends over IPv4, and
// host b over IPv6, as with routes of one family in one direction. While a bucket moves, b does not send back what a has sent.
func TestTunnelOfBothFamilies(t *testing.T) {
	f := newFleet(t, 2)
	a, b := f.hosts[0], f.hosts[1]
	indexes := make(map[*node]int)
	for _, n := range f.hosts {
		indexes[n] = n.openTunnel(t)
	}
	set := func(to *table.Table, sources func(h *table.Host, far netip.Addr) []netip.Addr) {
		t.Helper()
		for _, n := range f.hosts {
			n.do(t, func() error {
				return n.path.Set(to, n.name, func(h *table.Host) forward.Next {
					far := h.Addresses[0]
					if n == b {
						far = h.Addresses[1]
					}
					return forward.Next{Addresses: []netip.Addr{far}, Interface: indexes[n], Sources: sources(h, far), VNI: forward.VNI(to.Nonce), Room: 1400}
				}, nil, forward.Flip{})
			})
		}
	}
	all := func(h *table.Host, _ netip.Addr) []netip.Addr { return h.Addresses }
	to := f.table()
	set(to, all)
	f.route(t, a)
	from := device(4, 0)
	for i := 0; f.owner(from) != b; i++ {
		from = device(4, i)
	}
	f.send(t, from, []byte("over IPv4"))
	if at := f.receive(t, from, []byte("over IPv4")); at != b || counts(t, b)[forward.Untrusted] > 0 {
		t.Errorf("at %v, b counts %v", at, counts(t, b))
	}
	// The bucket has moved from a to b. A segment without a socket: a sends it to b, where it stays.
	moving := f.table()
	for bucket := range moving.Owner {
		moving.Owner[bucket], moving.Previous[bucket] = 1, 0
	}
	set(moving, all)
	before := counts(t, b)
	f.sendTagged(t, a, 0, segment4(from))
	testenv.Within(t, "a segment at b", func() bool { return counts(t, b)[forward.Local] > before[forward.Local] })
	if n := counts(t, b); n[forward.Chance] != before[forward.Chance] {
		t.Errorf("b counts %v, before %v: b has sent the segment back", n, before)
	}
	// Without the other address, b drops the packets of a.
	b.path.EndFormer()
	set(to, func(_ *table.Host, far netip.Addr) []netip.Addr { return []netip.Addr{far} })
	b.path.EndFormer()
	set(to, func(_ *table.Host, far netip.Addr) []netip.Addr { return []netip.Addr{far} })
	before = counts(t, b)
	f.send(t, from, []byte("of a stranger"))
	testenv.Within(t, "untrusted", func() bool { return counts(t, b)[forward.Untrusted] > before[forward.Untrusted] })
}

// TestOthers is that packets to no service are left alone, and that ICMP errors follow the packet that they quote.
func TestOthers(t *testing.T) {
	f := newFleet(t, 2)
	f.setAll(t, f.table())
	others := device(4, 0)
	for i := 0; f.owner(others) != f.hosts[1]; i++ {
		others = device(4, i)
	}
	f.route(t, f.hosts[0])
	// ICMP echo is answered by the host that the router has chosen.
	before := counts(t, f.hosts[0])
	f.router.do(t, func() error {
		c, err := net.ListenPacket("ip4:icmp", others.String())
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := c.WriteTo([]byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0}, &net.IPAddr{IP: service4.AsSlice()}); err != nil {
			return err
		}
		if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			return err
		}
		_, _, err = c.ReadFrom(make([]byte, 100))
		return err
	})
	if after := counts(t, f.hosts[0]); after != before {
		t.Errorf("an echo request counts: %v, before %v", after, before)
	}
	// Errors about packets of a service reach the host of the device.
	f.router.do(t, func() error {
		c, err := net.ListenPacket("ip4:icmp", device(4, 199).String())
		if err != nil {
			return err
		}
		defer c.Close()
		quoted := []byte{3, 3, 0, 0, 0, 0, 0, 0, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, unix.IPPROTO_UDP, 0, 0}
		quoted = append(append(quoted, service4.AsSlice()...), others.AsSlice()...)
		quoted = append(quoted, port>>8, port&255, 0x80, 0, 0, 8, 0, 0)
		sum := uint32(0)
		for i := 0; i < len(quoted); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(quoted[i:]))
		}
		sum = sum&0xffff + sum>>16
		binary.BigEndian.PutUint16(quoted[2:], ^uint16(sum+sum>>16))
		_, err = c.WriteTo(quoted, &net.IPAddr{IP: service4.AsSlice()})
		return err
	})
	testenv.Within(t, "the error to be forwarded", func() bool { return counts(t, f.hosts[0])[forward.Forwarded] == before[forward.Forwarded]+1 })
}
