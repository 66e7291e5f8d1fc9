// SPDX-License-Identifier: Apache-2.0

package transfers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/fault"
	"sockeye/internal/linux"
)

// A lab has the namespaces of the client, of the server, and of what connects them, if
// anything.
type lab struct {
	path string
	size uint32
	// segmentation is that of the options.
	segmentation bool
	namespaces   []*namespace
}

type namespace struct {
	network *netif.Namespace
	nl      *netlink.Handle
	fd      netns.NsHandle
}

// Local measures between two network namespaces that it creates. It changes nothing
// else on the host and removes the namespaces when it returns. Needs root.
func Local(ctx context.Context, o Options) (result *Result, err error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	if !slices.Contains(Paths, o.Path) {
		return nil, usage("bridge, veth or router", "there is no path %q", o.Path)
	}
	last, other, err := lastCPUs()
	if err != nil {
		return nil, err
	}
	l := &lab{size: o.Size, segmentation: o.Segmentation}
	defer func() { err = joined(err, l.close()) }()
	if err := l.build(o.Path); err != nil {
		return nil, fmt.Errorf("create namespaces: %w", err)
	}
	result = &Result{
		Path: o.Path, Kernel: linux.Release(), ClientCPU: last, ServerCPU: last,
		Message: o.Message, Size: o.Size, Segmentation: o.Segmentation, Rounds: o.Rounds, ForNS: o.For.Nanoseconds(), Families: []Family{},
	}
	if o.TwoCPUs {
		result.ServerCPU = other
	}
	support := l.namespaces[0].network.Support()
	var families []string
	for _, family := range Families {
		if err := unsupported(support, family); err != nil {
			result.Notes = append(result.Notes, fmt.Sprintf("%s was not measured: %v", familyName(family), err))
			continue
		}
		families = append(families, family)
	}
	if len(families) == 0 {
		return nil, unsupported(support, IPv6)
	}
	runs := o.Rounds * runsPerRound
	for i, family := range families {
		m := &measurement{
			Options: o, lab: l, family: family, clientCPU: result.ClientCPU, serverCPU: result.ServerCPU,
			done: i * runs, runs: len(families) * runs,
		}
		f, err := m.measure(ctx)
		if err != nil {
			return nil, err
		}
		result.Families = append(result.Families, *f)
	}
	return result, nil
}

// unsupported returns an error if the kernel has no BIG TCP for a family.
func unsupported(s netif.Support, family string) error {
	switch {
	case family == IPv6 && !s.IPv6:
		return fault.Unsupported(errors.New("this kernel has no BIG TCP for IPv6, which needs Linux 5.19"), "")
	case family == IPv4 && !s.IPv4:
		return fault.Unsupported(errors.New("this kernel has no BIG TCP for IPv4, which needs Linux 6.3"), "")
	}
	return nil
}

func (s *namespace) close() (err error) {
	if s.nl != nil {
		s.nl.Close()
	}
	if s.network != nil {
		err = s.network.Close()
	}
	if s.fd.IsOpen() {
		err = joined(err, s.fd.Close())
	}
	return err
}

// address returns the address of the server.
func (l *lab) address(family string) netip.Addr { return l.prefix(family, 1).Addr() }

// interfaceName is that of both ends.
const interfaceName = "eth0"

func (l *lab) build(path string) error {
	l.path = path
	count := 3
	if path == PathVeth {
		count = 2
	}
	for range count {
		s, err := newNamespace()
		if err != nil {
			return err
		}
		l.namespaces = append(l.namespaces, s)
	}
	if err := l.connect(); err != nil {
		return err
	}
	for host := range 2 {
		for _, family := range Families {
			if err := l.namespaces[host].addAddress(interfaceName, l.prefix(family, host)); err != nil {
				return err
			}
			if path == PathRouter {
				if err := l.route(family, host); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// newNamespace creates a network namespace with lo up.
func newNamespace() (*namespace, error) {
	s := &namespace{fd: netns.None()}
	err := s.open()
	if err != nil {
		return nil, joined(err, s.close())
	}
	return s, nil
}

func (s *namespace) open() error {
	made := make(chan error)
	go func() {
		runtime.LockOSThread()
		home, err := netns.Get()
		if err != nil {
			made <- err
			return
		}
		if s.fd, err = netns.New(); err == nil {
			err = sysctls()
		}
		// A thread that cannot return stays locked and ends with its goroutine.
		if back := netns.Set(home); back == nil {
			runtime.UnlockOSThread()
		}
		home.Close()
		made <- err
	}()
	err := <-made
	if err != nil {
		return err
	}
	if s.network, err = netif.OpenNamespace(fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), int(s.fd))); err != nil {
		return err
	}
	if s.nl, err = netlink.NewHandleAt(s.fd, unix.NETLINK_ROUTE); err != nil {
		return fmt.Errorf("open route socket: %w", err)
	}
	return s.up("lo")
}

// sysctls makes addresses usable at once, gives all connections the same initial
// state, and disables slow start after idle periods, as is common in data centres.
func sysctls() error {
	for name, value := range map[string]string{
		"ipv6/conf/all/accept_dad": "0", "ipv6/conf/default/accept_dad": "0",
		"ipv4/tcp_no_metrics_save": "1", "ipv4/tcp_slow_start_after_idle": "0",
	} {
		if err := os.WriteFile(filepath.Join("/proc/sys/net", name), []byte(value), 0); err != nil {
			return fmt.Errorf("set sysctl net/%s: %w", name, err)
		}
	}
	return nil
}

func port(host int) string { return fmt.Sprintf("port%d", host) }

func (l *lab) connect() error {
	if l.path == PathVeth {
		return addVeth(l.namespaces[0], interfaceName, l.namespaces[1], interfaceName)
	}
	middle := l.namespaces[2]
	for host := range 2 {
		if err := addVeth(middle, port(host), l.namespaces[host], interfaceName); err != nil {
			return err
		}
		if l.path == PathRouter {
			if err := middle.setRouterMTU(port(host)); err != nil {
				return err
			}
		}
	}
	if l.path == PathRouter {
		return middle.network.Do(func() error {
			for _, name := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
				if err := os.WriteFile(filepath.Join("/proc/sys/net", name), []byte("1"), 0); err != nil {
					return fmt.Errorf("enable forwarding: %w", err)
				}
			}
			return nil
		})
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "bridge"
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	if err := middle.nl.LinkAdd(bridge); err != nil {
		return fmt.Errorf("add bridge: %w", err)
	}
	for host := range 2 {
		link, err := middle.nl.LinkByName(port(host))
		if err == nil {
			err = middle.nl.LinkSetMaster(link, bridge)
		}
		if err != nil {
			return fmt.Errorf("add %s to the bridge: %w", port(host), err)
		}
	}
	return middle.up(attrs.Name)
}

// addVeth adds a veth pair between two namespaces.
func addVeth(a *namespace, nameA string, b *namespace, nameB string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = nameA
	pair := &netlink.Veth{LinkAttrs: attrs, PeerName: nameB, PeerNamespace: netlink.NsFd(b.fd)}
	if err := a.nl.LinkAdd(pair); err != nil {
		return fmt.Errorf("add veth pair: %w", err)
	}
	return joined(a.up(nameA), b.up(nameB))
}

func (s *namespace) up(names ...string) error {
	for _, name := range names {
		link, err := s.nl.LinkByName(name)
		if err == nil {
			err = s.nl.LinkSetUp(link)
		}
		if err != nil {
			return fmt.Errorf("set %s up: %w", name, err)
		}
	}
	return nil
}

// routerMTU is 8 bytes more than the MTU of the hosts.
const routerMTU = 1508

func (s *namespace) setRouterMTU(name string) error {
	link, err := s.nl.LinkByName(name)
	if err == nil {
		err = s.nl.LinkSetMTU(link, routerMTU)
	}
	if err != nil {
		return fmt.Errorf("set MTU of %s: %w", name, err)
	}
	return nil
}

// route adds a default route of a host through the router.
func (l *lab) route(family string, host int) error {
	gateway := l.gateway(family, host)
	if err := l.namespaces[2].addAddress(port(host), gateway); err != nil {
		return err
	}
	if err := l.namespaces[host].nl.RouteAdd(&netlink.Route{Gw: gateway.Addr().AsSlice()}); err != nil {
		return fmt.Errorf("add route through %s: %w", gateway.Addr(), err)
	}
	return nil
}

// gateway returns the address of the router in the network of a host.
func (l *lab) gateway(family string, host int) netip.Prefix {
	p := l.prefix(family, host)
	b := p.Addr().AsSlice()
	b[len(b)-1] = 254
	a, _ := netip.AddrFromSlice(b)
	return netip.PrefixFrom(a, p.Bits())
}

// prefix returns the address of a host. Without a router both hosts are in one
// network.
func (l *lab) prefix(family string, host int) netip.Prefix {
	network := byte(0)
	if l.path == PathRouter {
		network = byte(host)
	}
	if family == IPv4 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 84, network, byte(1 + host)}), 24)
	}
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x84, 7: network, 15: byte(1 + host)}), 64)
}

// addAddress adds an address without duplicate address detection.
func (s *namespace) addAddress(name string, p netip.Prefix) error {
	link, err := s.nl.LinkByName(name)
	if err == nil {
		a := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}}
		if p.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		err = s.nl.AddrAdd(link, a)
	}
	if err != nil {
		return fmt.Errorf("add address to %s: %s: %w", name, p, err)
	}
	return nil
}

// set sets the sizes of all interfaces on the path.
func (l *lab) set(on bool) error {
	size := uint32(netif.Legacy)
	if on && !l.segmentation {
		size = l.size
	}
	for _, s := range l.namespaces {
		links, err := s.nl.LinkList()
		if err != nil {
			return fmt.Errorf("list interfaces: %w", err)
		}
		support := s.network.Support()
		for _, link := range links {
			if link.Attrs().Name == "lo" {
				continue
			}
			sizes := netif.Sizes{GSO: size, GRO: size}
			if support.IPv4 {
				sizes.GSOIPv4, sizes.GROIPv4 = size, size
			}
			if err := s.network.Set(link.Attrs().Index, sizes); err != nil {
				return err
			}
			if !l.segmentation {
				continue
			}
			if err := s.network.Do(func() error { return setOffloads(link.Attrs().Name, on) }); err != nil {
				return err
			}
		}
	}
	return nil
}

// counters are of all packets that an interface has sent and received.
type counters struct{ sent, sentBytes, received uint64 }

// countPackets returns the counters of the client's interface, where a packet of any
// size counts once.
func (l *lab) countPackets() (counters, error) {
	link, err := l.namespaces[0].nl.LinkByName(interfaceName)
	if err != nil {
		return counters{}, fmt.Errorf("count packets: %w", err)
	}
	s := link.Attrs().Statistics
	return counters{s.TxPackets, s.TxBytes, s.RxPackets}, nil
}

func (l *lab) close() (err error) {
	for _, s := range l.namespaces {
		err = joined(err, s.close())
	}
	return err
}
