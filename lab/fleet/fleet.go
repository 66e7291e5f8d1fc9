// SPDX-License-Identifier: Apache-2.0

// Package fleet adds a fleet to a lab: etcd servers, a router in front ("front"), and collector hosts behind it, which serve
// the same addresses. The router chooses a host for each flow (ECMP), from static routes or by BGP with BFD.
//
// The front router is on the lab's bridge, where the routers of the lab, or the devices of a swarm, send to the addresses of the
// service through it. The hosts are behind it, on one link or each on its own:
//
//	front       10.77.0.250/24   fd77::fa/64      on the lab's bridge
//	etcd i      10.77.0.(231+i)/24
//	one link    10.79.0.1/24     fd79::1/64       front; host n: 10.79.0.(11+n), fd79::(11+n)
//	routed      10.79.(1+n).1/24 fd79:0:0:(1+n)::1/64   front; host n: .2, ::2
//	service     192.0.2.53       2001:db8::53     on lo of each host
package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/netns"
	"sockeye/lab"
)

// Addresses of the service and of the front router on the lab's bridge.
var (
	Service4 = netip.MustParseAddr("192.0.2.53")
	Service6 = netip.MustParseAddr("2001:db8::53")
	Front4   = netip.MustParseAddr("10.77.0.250")
	Front6   = netip.MustParseAddr("fd77::fa")
)

const (
	// BMP is the TCP port of the service.
	BMP = 1790
	// IPFIX is the UDP port of the service.
	IPFIX = 4739
	// Lease is the time after which a host that does not renew its lease is dead.
	Lease = 3 * time.Second
)

// Options configures New.
type Options struct {
	// Binary is the path of the sockeye binary.
	Binary string
	// Pins returns the directory of the agent's pinned objects of a host, in a bpffs.
	Pins func(host string) string
	// Servers is the number of etcd servers. Default: 1.
	Servers int
	// Routed hosts have a link each; forwarded packets take a tunnel. Otherwise, all hosts are on one link.
	Routed bool
	// Daemon announces the addresses of the service by BGP to the front router, which runs FRR, while sockeye health succeeds: as in
	// the example fleet. Without a daemon, Route chooses the hosts.
	Daemon Daemon
	// Examples is the directory examples of the sources. It is needed with Daemon.
	Examples string
	// Slots is the number of slots of each host. Default: 2.
	Slots int
	// Service and Fleet are further lines of the service and of the fleet in the policy.
	Service, Fleet []string
}

// Fleet is a fleet in a lab. Its methods are not safe for concurrent use, except Status and Command of hosts.
type Fleet struct {
	*lab.Lab
	Front *lab.Namespace
	Etcd  []*Server
	Hosts []*Host

	o       Options
	routing []*lab.Process // daemons and scripts that announce routes
	vtys    []string       // directories of vtysh(1), one for each FRR
}

// New makes the front router and the etcd servers, and starts them. Reach lets
// namespaces on the lab's bridge send to the service.
func New(ctx context.Context, l *lab.Lab, o Options) (*Fleet, error) {
	o.Servers, o.Slots = cmp.Or(o.Servers, 1), cmp.Or(o.Slots, 2)
	f := &Fleet{Lab: l, o: o}
	var err error
	if f.Front, err = l.Attach("front", netip.PrefixFrom(Front4, 24), netip.PrefixFrom(Front6, 64)); err != nil {
		return nil, err
	}
	for name, value := range map[string]string{"ipv4.ip_forward": "1", "ipv6.conf.all.forwarding": "1", "ipv4.conf.all.send_redirects": "0"} {
		if err := f.Front.Sysctl(name, value); err != nil {
			return nil, err
		}
	}
	if err := f.Front.UnlimitErrors(); err != nil {
		return nil, err
	}
	if err := f.Hash(ByPorts); err != nil {
		return nil, err
	}
	if !o.Routed {
		if err := f.Front.Bridge(hostsLink); err != nil {
			return nil, err
		}
		for _, a := range gateway(0, false) {
			if err := f.Front.AddAddress(hostsLink, a); err != nil {
				return nil, err
			}
		}
	}
	if o.Daemon != "" {
		text, err := f.example(nil, "frr", "router.conf")
		if err != nil {
			return nil, err
		}
		if err := f.makeDirectories("front"); err != nil {
			return nil, err
		}
		if _, err = f.startFRR(ctx, f.Front, "front", text); err != nil {
			return nil, err
		}
	}
	if err := f.makeEtcd(); err != nil {
		return nil, err
	}
	for _, s := range f.Etcd {
		if err := s.Start(); err != nil {
			return nil, err
		}
	}
	if o.Daemon != "" {
		if err := f.settleFRR(ctx, f.vtys[0]); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// makeDirectories makes the directory and the cgroup of the processes whose names begin with a name and a slash.
func (f *Fleet) makeDirectories(name string) error {
	return errors.Join(os.Mkdir(filepath.Join(f.Dir(), name), 0o755), os.Mkdir(filepath.Join(f.Cgroup(), name), 0o755))
}

// Reach lets a namespace on the lab's bridge send to the service from these addresses, through the front router. A zero source
// leaves the choice to the kernel.
func (f *Fleet) Reach(sender *lab.Namespace, source4, source6 netip.Addr) error {
	return errors.Join(sender.AddRouteFrom(netip.PrefixFrom(Service4, 32), Front4, source4),
		sender.AddRouteFrom(netip.PrefixFrom(Service6, 128), Front6, source6))
}

// Hash is what the front router hashes to choose a host.
type Hash int

const (
	// ByPorts hashes addresses and ports, as routers do.
	ByPorts Hash = iota
	// BySource hashes the source address alone.
	BySource
)

// Hash sets what the front router hashes.
func (f *Fleet) Hash(by Hash) error {
	policy := "1" // L4 (Documentation/networking/ip-sysctl.rst)
	if by == BySource {
		policy = "3" // the fields of fib_multipath_hash_fields
	}
	for _, family := range []string{"ipv4", "ipv6"} {
		if by == BySource {
			if err := f.Front.Sysctl(family+".fib_multipath_hash_fields", "1"); err != nil { // source address
				return err
			}
		}
		if err := f.Front.Sysctl(family+".fib_multipath_hash_policy", policy); err != nil {
			return err
		}
	}
	return nil
}

// Route makes the front router choose among hosts, by static routes, which precede those of BGP. Without hosts, it removes these
// routes.
func (f *Fleet) Route(hosts ...*Host) error {
	for i, a := range []netip.Addr{Service4, Service6} {
		route := &netlink.Route{Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
		if len(hosts) == 0 {
			if err := f.Front.Netlink().RouteDel(route); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("remove the route to the hosts: %w", err)
			}
			continue
		}
		for _, h := range hosts {
			link, err := f.Front.Netlink().LinkByName(h.frontLink())
			if err != nil {
				return fmt.Errorf("route to host %s: %w", h.Name, err)
			}
			route.MultiPath = append(route.MultiPath, &netlink.NexthopInfo{Gw: h.addresses()[i].Addr().AsSlice(), LinkIndex: link.Attrs().Index})
		}
		if err := f.Front.Netlink().RouteReplace(route); err != nil {
			return fmt.Errorf("route to the hosts: %w", err)
		}
	}
	return nil
}

// RouteResilient is Route with a resilient group of next hops (Documentation/networking/nexthop-group-resilient.rst): the flows of
// hosts that remain in the group keep their host.
func (f *Fleet) RouteResilient(ctx context.Context, hosts ...*Host) error {
	for i, a := range []netip.Addr{Service4, Service6} {
		family, group, members := []string{"-4", "-6"}[i], strconv.Itoa(100+i), []string{}
		for _, h := range hosts {
			id := strconv.Itoa(10*(i+1) + h.Number)
			if err := f.ip(ctx, family, "nexthop", "replace", "id", id, "via", h.addresses()[i].Addr().String(), "dev", h.frontLink()); err != nil {
				return err
			}
			members = append(members, id)
		}
		if err := errors.Join(
			f.ip(ctx, "nexthop", "replace", "id", group, "group", strings.Join(members, "/"), "type", "resilient", "buckets", "64", "idle_timer", "0"),
			f.ip(ctx, family, "route", "replace", netip.PrefixFrom(a, a.BitLen()).String(), "nhid", group),
		); err != nil {
			return err
		}
	}
	return nil
}

// ip runs ip(8) on the front router.
func (f *Fleet) ip(ctx context.Context, args ...string) error {
	p := f.Front.Command(ctx, append([]string{"ip"}, args...)...)
	p.Name = "ip"
	if err := p.Start(); err != nil {
		return err
	}
	if err := p.Wait(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, p.LogTail(3))
	}
	return nil
}

// Routes returns the names of the hosts to which the front router sends packets of the service over IPv4, and whether those over
// IPv6 are the same.
func (f *Fleet) Routes() (hosts []string, same bool, err error) {
	var found [2][]string
	for i, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := f.Front.Netlink().RouteListFiltered(family, &netlink.Route{}, 0)
		if err != nil {
			return nil, false, fmt.Errorf("list routes: %w", err)
		}
		for _, h := range f.Hosts {
			for _, r := range routes {
				if r.Dst == nil || !r.Dst.IP.Equal([]netip.Addr{Service4, Service6}[i].AsSlice()) {
					continue
				}
				gateways := []net.IP{r.Gw}
				for _, hop := range r.MultiPath {
					gateways = append(gateways, hop.Gw)
				}
				for _, gw := range gateways {
					if gw.Equal(h.addresses()[i].Addr().AsSlice()) {
						found[i] = append(found[i], h.Name)
					}
				}
			}
		}
	}
	return found[0], strings.Join(found[0], " ") == strings.Join(found[1], " "), nil
}

// Agree returns nil if hosts have the same epoch, no bucket moves, and a condition holds at each of them.
func Agree(ctx context.Context, hosts []*Host, condition func(s *api.FleetStatus) error) error {
	epoch := uint64(0)
	for _, h := range hosts {
		s, err := h.Status(ctx)
		switch {
		case err != nil:
			return fmt.Errorf("host %s: %w", h.Name, err)
		case s.Moving > 0:
			return fmt.Errorf("host %s: %d buckets move", h.Name, s.Moving)
		case epoch != 0 && epoch != s.Epoch:
			return fmt.Errorf("host %s has epoch %d, host %s %d", hosts[0].Name, epoch, h.Name, s.Epoch)
		case s.Epoch == 0:
			return fmt.Errorf("host %s has no table: %v %s", h.Name, s.Problems, s.Reason)
		}
		if err := condition(&s); err != nil {
			return fmt.Errorf("host %s: %w", h.Name, err)
		}
		epoch = s.Epoch
	}
	return nil
}

// Shared returns the condition that the hosts with these names share the devices, each between 0.8 and 1.2 of its part, and the
// others have none.
func Shared(names ...string) func(s *api.FleetStatus) error {
	return func(s *api.FleetStatus) error {
		found := 0
		for _, h := range s.Hosts {
			want, fair := slices.Contains(names, h.Name), 1/float64(len(names))
			if want {
				found++
			}
			if want && (h.Share < 0.8*fair || h.Share > 1.2*fair) || !want && h.Share > 0 {
				return fmt.Errorf("host %s has %.3f of the devices", h.Name, h.Share)
			}
		}
		if found < len(names) {
			return fmt.Errorf("%d of the hosts %v are known", found, names)
		}
		return nil
	}
}

// Alive returns the condition that the hosts with these names renew their leases and are healthy.
func Alive(names ...string) func(s *api.FleetStatus) error {
	return func(s *api.FleetStatus) error {
		if !s.Connected {
			return errors.New("the store does not answer")
		}
		for _, name := range names {
			i := slices.IndexFunc(s.Hosts, func(h api.FleetHost) bool { return h.Name == name })
			if i < 0 {
				return fmt.Errorf("host %s is not known", name)
			}
			if h := &s.Hosts[i]; !h.Alive || !h.Healthy {
				return fmt.Errorf("host %s: alive %v, healthy %v", h.Name, h.Alive, h.Healthy)
			}
		}
		return nil
	}
}

// hostsLink is the interface of the front router to the hosts that share a link.
const hostsLink = "hosts"

// gateway returns the addresses of the front router on the link of a host.
func gateway(number int, routed bool) []netip.Prefix {
	subnet := 0
	if routed {
		subnet = 1 + number
	}
	return []netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 79, byte(subnet), 1}), 24),
		netip.PrefixFrom(netip.MustParseAddr(fmt.Sprintf("fd79:0:0:%x::1", subnet)), 64),
	}
}

// awaitAddresses waits until the IPv6 addresses of an interface that came up are usable.
func awaitAddresses(n *lab.Namespace, addresses []netip.Prefix) error {
	for _, a := range addresses {
		if a.Addr().Is6() {
			if err := netns.AwaitLocal(n.Netlink(), a.Addr(), time.Minute); err != nil {
				return err
			}
		}
	}
	return nil
}
