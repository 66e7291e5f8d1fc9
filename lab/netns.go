// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/netns"
)

// Addresses of the collector namespace.
var (
	CollectorIPv4 = netip.MustParseAddr("10.77.0.254")
	CollectorIPv6 = netip.MustParseAddr("fd77::fe")
)

// Namespace is a network namespace of a lab without a name in the file system.
type Namespace struct {
	lab  *Lab
	name string
	file *os.File
	nl   *netlink.Handle
}

// Name returns the name for Lab.Namespace.
func (n *Namespace) Name() string { return n.name }

// Path returns the path of the namespace in /proc, valid as long as this process and the lab exist.
func (n *Namespace) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.file.Fd()) }

// Netlink returns a netlink handle of the namespace. The lab closes it.
func (n *Namespace) Netlink() *netlink.Handle { return n.nl }

// Do runs f on a thread in the namespace. Goroutines and processes that f starts are not in the namespace; use Command
// for processes. Do is safe for concurrent use.
func (n *Namespace) Do(f func() error) error {
	return netns.Thread(func() error { return netns.Do(n.file, f) })
}

// Sysctl sets a network sysctl of the namespace. The name is relative to net, with dots or slashes, such as
// ipv4.tcp_migrate_req.
func (n *Namespace) Sysctl(name, value string) error {
	return n.Do(func() error { return sysctl(strings.ReplaceAll(name, ".", "/"), value) })
}

// UnlimitErrors lets the namespace send all ICMP errors.
func (n *Namespace) UnlimitErrors() error {
	for name, value := range map[string]string{
		"ipv4.icmp_ratelimit": "0", "ipv4.icmp_msgs_per_sec": "1000000", "ipv4.icmp_msgs_burst": "100000", "ipv6.icmp.ratelimit": "0",
	} {
		// On older kernels, the limits of messages per second are not settings of a network namespace.
		if err := n.Sysctl(name, value); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// AddRoute adds a route through a gateway, or replaces it.
func (n *Namespace) AddRoute(to netip.Prefix, gateway netip.Addr) error {
	return n.AddRouteFrom(to, gateway, netip.Addr{})
}

// AddRouteFrom is AddRoute with the source address of unbound sockets, unless it is the zero Addr.
func (n *Namespace) AddRouteFrom(to netip.Prefix, gateway, source netip.Addr) error {
	if err := n.nl.RouteReplace(&netlink.Route{Dst: ipNet(to.Masked()), Gw: gateway.AsSlice(), Src: source.AsSlice()}); err != nil {
		return fmt.Errorf("add route to %v via %v in %s: %w", to, gateway, n.name, err)
	}
	return nil
}

// PreferSource sets the source address of unbound sockets for a neighbour on eth0, also for programs that cannot set
// their source address, such as bgpd for BMP.
func (n *Namespace) PreferSource(to, source netip.Addr) error {
	dev, err := n.nl.LinkByName("eth0")
	if err == nil {
		err = n.nl.RouteReplace(&netlink.Route{
			Dst: ipNet(netip.PrefixFrom(to, to.BitLen())), LinkIndex: dev.Attrs().Index, Src: source.AsSlice(), Scope: unix.RT_SCOPE_LINK,
		})
	}
	if err != nil {
		return fmt.Errorf("prefer source %v to %v in %s: %w", source, to, n.name, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

const bridge = "br0"

func (l *Lab) buildNetwork(ctx context.Context, routers int) error {
	sw, err := l.Namespace("switch")
	if err != nil {
		return err
	}
	if err := sw.Bridge(bridge); err != nil {
		return err
	}
	if _, err := l.Attach("collector", netip.PrefixFrom(CollectorIPv4, 24), netip.PrefixFrom(CollectorIPv6, 64)); err != nil {
		return err
	}
	for i := range routers {
		if err := ctx.Err(); err != nil {
			return err
		}
		r := newRouter(l, i)
		if r.Namespace, err = l.Attach(r.Name, netip.PrefixFrom(r.IPv4, 24), netip.PrefixFrom(r.IPv6, 64),
			netip.PrefixFrom(r.BGP4, 24), netip.PrefixFrom(r.BGP6, 64)); err != nil {
			return err
		}
		if err := errors.Join(r.Namespace.Own(r.Prefix4), r.Namespace.Own(r.Prefix6)); err != nil {
			return err
		}
		l.routers = append(l.routers, r)
	}
	return nil
}

// Own adds a local route for a prefix, so that the namespace replies for every address of the prefix, and sockets can
// bind to these addresses. Other namespaces need a route to the prefix (AddRoute).
func (n *Namespace) Own(prefix netip.Prefix) error {
	lo, err := n.nl.LinkByName("lo")
	if err == nil {
		err = n.nl.RouteReplace(&netlink.Route{
			Dst: ipNet(prefix.Masked()), LinkIndex: lo.Attrs().Index, Table: unix.RT_TABLE_LOCAL,
			Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST,
		})
	}
	if err == nil && prefix.Addr().Is6() {
		err = n.Sysctl("ipv6.ip_nonlocal_bind", "1") // for IPv4, the route is sufficient
	}
	if err != nil {
		return fmt.Errorf("own %v in %s: %w", prefix, n.name, err)
	}
	return nil
}

// Attach creates a namespace with an interface "eth0" on the lab's bridge and adds the addresses. Free addresses:
// 10.77.0.201 to .253, and fd77::100 and higher.
func (l *Lab) Attach(name string, addresses ...netip.Prefix) (*Namespace, error) {
	sw, err := l.Namespace("switch")
	if err != nil {
		return nil, err
	}
	n, err := l.Namespace(name)
	if err != nil {
		return nil, err
	}
	if err := sw.Port(bridge, fmt.Sprintf("port%d", l.ports.Add(1)), n, "eth0"); err != nil {
		return nil, fmt.Errorf("attach %s: %w", name, err)
	}
	for _, a := range addresses {
		if err := n.AddAddress("eth0", a); err != nil {
			return nil, fmt.Errorf("attach %s: %w", name, err)
		}
	}
	return n, nil
}

// Namespace returns the namespace with that name ("switch", "collector", "router-0" ...), or creates one with only lo,
// which is up.
func (l *Lab) Namespace(name string) (*Namespace, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := l.namespaces[name]; n != nil {
		return n, nil
	}
	if l.closed {
		return nil, fmt.Errorf("make namespace %s: lab is closed", name)
	}
	n := &Namespace{lab: l, name: name}
	var err error
	if n.file, err = netns.NewSmall(); err != nil {
		return nil, fmt.Errorf("make namespace %s: %w", name, err)
	}
	err = n.Do(func() (err error) {
		// Without duplicate address detection, addresses are usable immediately.
		for _, s := range []string{"all", "default"} {
			if err := sysctl("ipv6/conf/"+s+"/accept_dad", "0"); err != nil {
				return err
			}
		}
		n.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE) // other families may not be supported
		return err
	})
	if err == nil {
		err = n.up("lo")
	}
	if err != nil {
		return nil, fmt.Errorf("make namespace %s: %w", name, errors.Join(err, n.close()))
	}
	l.namespaces[name] = n
	return n, nil
}

func (n *Namespace) close() error {
	if n.nl != nil {
		n.nl.Close()
	}
	return n.file.Close()
}

// sysctl sets a sysctl of the calling thread's network namespace.
func sysctl(name, value string) error {
	if err := os.WriteFile(filepath.Join("/proc/sys/net", name), []byte(value), 0); err != nil {
		return fmt.Errorf("set sysctl net/%s: %w", name, err)
	}
	return nil
}

// Bridge creates a bridge, and sets it up. Port connects further namespaces to it. The bridge keeps its link-layer address:
// otherwise the kernel gives it the lowest one of its ports (br_stp_recalculate_bridge_id), and the neighbors send to the
// former address for up to a minute after a new port.
func (n *Namespace) Bridge(link string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr = link, make(net.HardwareAddr, 6)
	_, _ = rand.Read(attrs.HardwareAddr)                 // cannot fail
	attrs.HardwareAddr[0] = attrs.HardwareAddr[0]&^1 | 2 // unicast, locally administered
	if err := n.nl.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		return fmt.Errorf("make bridge %s in %s: %w", link, n.name, err)
	}
	return n.up(link)
}

// Port connects another namespace to a bridge of this one.
func (n *Namespace) Port(on, link string, peer *Namespace, peerLink string) error {
	br, err := n.nl.LinkByName(on)
	if err != nil {
		return fmt.Errorf("connect %s to %s: find bridge: %w", peer.name, n.name, err)
	}
	return n.connect(link, br.Attrs().Index, peer, peerLink)
}

// VethEnd is one end of a veth pair.
type VethEnd struct {
	Namespace *Namespace
	Name      string // of the interface
	Addresses []netip.Prefix
}

// ConnectVeth connects two namespaces by a veth pair, sets the interfaces up, and adds the addresses. A packet is received on
// the CPU that sent it.
func ConnectVeth(a, b VethEnd) error {
	if err := a.Namespace.connect(a.Name, 0, b.Namespace, b.Name); err != nil {
		return err
	}
	for _, end := range []VethEnd{a, b} {
		for _, address := range end.Addresses {
			if err := end.Namespace.AddAddress(end.Name, address); err != nil {
				return err
			}
		}
	}
	return nil
}

// AddAddress adds an address to an interface of the namespace, without duplicate address detection. If the interface is
// up and has a carrier, packets to the address are delivered when AddAddress returns.
func (n *Namespace) AddAddress(link string, address netip.Prefix) error {
	dev, err := n.nl.LinkByName(link)
	if err == nil {
		a := &netlink.Addr{IPNet: ipNet(address)}
		if address.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		err = n.nl.AddrAdd(dev, a)
	}
	const ready = unix.IFF_UP | unix.IFF_LOWER_UP
	if err == nil && address.Addr().Is6() && dev.Attrs().RawFlags&ready == ready {
		err = netns.AwaitLocal(n.nl, address.Addr(), time.Minute)
	}
	if err != nil {
		return fmt.Errorf("add address %v to %s in %s: %w", address, link, n.name, err)
	}
	return nil
}

// connect creates a veth pair, whose ends are in this namespace and in another one, and sets both ends up. master is the index of a
// bridge for the end in this namespace, or 0.
func (n *Namespace) connect(link string, master int, peer *Namespace, peerLink string) error {
	// The netlink handle creates the pair, with the peer in the other namespace. No interface is ever in the host's namespace.
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MasterIndex = link, master
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: peerLink, PeerNamespace: netlink.NsFd(int(peer.file.Fd()))}
	if err := n.nl.LinkAdd(veth); err != nil {
		return fmt.Errorf("connect %s to %s: %w", n.name, peer.name, err)
	}
	return errors.Join(n.up(link), peer.up(peerLink))
}

func (n *Namespace) up(link string) error {
	dev, err := n.nl.LinkByName(link)
	if err == nil {
		err = n.nl.LinkSetUp(dev)
	}
	if err != nil {
		return fmt.Errorf("set %s in %s up: %w", link, n.name, err)
	}
	return nil
}
