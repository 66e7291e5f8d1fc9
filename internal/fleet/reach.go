// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
	"sockeye/internal/fleet/forward"
	"sockeye/internal/fleet/table"
)

// nic is an interface of the fleet.
type nic struct {
	name      string
	index     int
	mac       net.HardwareAddr
	addresses []netip.Addr
}

var errMissing = errors.New("no such interface")

// findInterfaces returns the interfaces with some names that exist. missing is the error of the first one that does not exist
// or cannot be used. An interface that could not be read, because interfaces or addresses changed meanwhile, is that of before;
// unread is the error.
func findInterfaces(names []string, before []nic) (found []nic, missing, unread error) {
	for _, name := range names {
		one, err := findInterface(name)
		if err == nil {
			found = append(found, one)
			continue
		}
		if i := slices.IndexFunc(before, func(n nic) bool { return n.name == name }); i >= 0 && !errors.Is(err, errMissing) {
			found, unread = append(found, before[i]), err
			continue
		}
		if missing == nil {
			missing = err
		}
	}
	return found, missing, unread
}

// absentAddress returns an error for the first address of the services that is not local: the kernel would forward or drop the packets.
func absentAddress(addresses []netip.Addr) error {
	for _, a := range addresses {
		routes, err := netlink.RouteGet(a.AsSlice())
		unreachable := errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH)
		if unreachable || err == nil && len(routes) > 0 && routes[0].Type != unix.RTN_LOCAL {
			return fmt.Errorf("this host does not have the address %s of the services: ip addr add %s/%d dev lo", a, a, a.BitLen())
		}
	}
	return nil
}

// unusableError is the error of an interface that does not exist, or that a fleet cannot use.
type unusableError struct{ text string }

// findInterface returns the interface with a name. The error wraps errMissing if there is none, or if a fleet cannot use it.
func findInterface(name string) (one nic, err error) {
	unusable := func(text, hint string) error {
		return fault.WithHint(&unusableError{text}, hint)
	}
	link, err := netlink.LinkByName(name)
	if _, none := errors.AsType[netlink.LinkNotFoundError](err); none {
		return one, unusable(fmt.Sprintf("there is no interface %q", name), "ip link lists the interfaces")
	} else if err != nil {
		return one, fmt.Errorf("find interface %q: %w", name, err)
	}
	a := link.Attrs()
	if a.EncapType != "ether" || len(a.HardwareAddr) != 6 {
		return one, unusable(fmt.Sprintf("interface %q is not an Ethernet interface", name), "a fleet recognizes the packets of its hosts by their MAC addresses")
	}
	one = nic{name: name, index: a.Index, mac: a.HardwareAddr}
	var addresses []netlink.Addr
	for range 5 { // a list is interrupted by any change of an address of the host
		if addresses, err = netlink.AddrList(link, netlink.FAMILY_ALL); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return one, fmt.Errorf("read addresses of interface %q: %w", name, err)
	}
	for _, address := range addresses {
		ip, ok := netip.AddrFromSlice(address.IP)
		if ip = ip.Unmap(); ok && address.Scope == unix.RT_SCOPE_UNIVERSE && address.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DEPRECATED|unix.IFA_F_TEMPORARY) == 0 {
			one.addresses = append(one.addresses, ip)
		}
	}
	return one, nil
}

func (e *unusableError) Error() string { return e.text }

func (e *unusableError) Unwrap() error { return errMissing }

// ownAddresses returns the addresses at which the other hosts reach this one: the first of each family that is not one of
// the services.
func ownAddresses(nics []nic, services []netip.Addr) (own []netip.Addr) {
	for _, v4 := range []bool{true, false} {
	families:
		for _, n := range nics {
			for _, a := range n.addresses {
				if a.Is4() == v4 && !slices.Contains(services, a) {
					own = append(own, a)
					break families
				}
			}
		}
	}
	return own
}

// ownMACs returns the addresses of the interfaces as text.
func ownMACs(nics []nic) (macs []string) {
	for _, n := range nics {
		if text := n.mac.String(); !slices.Contains(macs, text) {
			macs = append(macs, text)
		}
	}
	return macs
}

// links are the links of the interfaces of the fleet, with their neighbors at the first question.
type links struct {
	nics      []nic
	neighbors map[neighborTable]map[netip.Addr][6]byte
}

// neighborTable is a neighbor table of the kernel: that of an interface and a family.
type neighborTable struct {
	index  int
	family int
}

func newLinks(nics []nic) *links {
	return &links{nics: nics, neighbors: make(map[neighborTable]map[netip.Addr][6]byte)}
}

// path is how this host reaches another one.
type path struct {
	forward.Next
	kind    string // link, tunnel or none
	problem string
}

// leastRoom is the least size of packets for a tunnel, in bytes. A route can be as narrow for a time, by an ICMP message about its MTU
// (net.ipv4.route.min_pmtu, 552 by default): large packets are dropped then.
const leastRoom = 128

// origin is this host as the beginning of paths.
type origin struct {
	*links
	silent    func(a netip.Addr) bool // the kernel has looked for an address of a host in vain, for a while
	services  []netip.Addr            // addresses of the services
	addresses []netip.Addr            // of this host in the table: the other hosts accept packets from them in the tunnel
	routers   map[[6]byte]netip.Addr  // defaultRouters
	tunnel    func() (index int, vni uint32, err error)
}

// findPath finds the path to a host: on the link of one of the interfaces, or through a tunnel. A host says itself which MAC
// addresses it has, so the neighbor table of the kernel decides which of them forwards packets. The packets of a router were not
// forwarded by a host.
func (o *origin) findPath(h *table.Host) path {
	on := path{kind: "link"}
	var silent []netip.Addr // on the link, and unknown to the kernel
	for _, a := range h.Addresses {
		index, ok := o.interfaceTo(a)
		if !ok || on.Interface != 0 && index != on.Interface {
			continue
		}
		mac, ok := o.neighbor(index, a)
		if !ok && o.silent(a) {
			silent = append(silent, a)
			continue
		}
		on.Interface, on.Addresses = index, append(on.Addresses, a)
		switch {
		case !ok:
		case !slices.Contains(h.MACs, net.HardwareAddr(mac[:]).String()):
			if len(h.MACs) == 0 {
				return path{kind: "none", problem: fmt.Sprintf("host %s has no macs: packets to the host are dropped; the kernel knows %s at %s", h.Name, net.HardwareAddr(mac[:]), a)}
			}
			return path{kind: "none", problem: fmt.Sprintf("host %s says that its MAC addresses are %v, and the kernel knows %s at %s: packets to the host are dropped (ip neigh shows what the kernel knows)",
				h.Name, h.MACs, net.HardwareAddr(mac[:]), a)}
		case o.routers[mac].IsValid():
			on.problem = fmt.Sprintf("host %s has the MAC address %s, which is that of the router %v: packets that the host forwards count as packets of the router",
				h.Name, net.HardwareAddr(mac[:]), o.routers[mac])
		default:
			on.MAC = mac
		}
	}
	switch {
	case on.Interface != 0 && len(silent) > 0:
		on.problem = cmp.Or(on.problem, fmt.Sprintf("host %s does not answer on the link at %s (ip neigh)", h.Name, silent[0]))
		return on
	case on.Interface != 0:
		if at := slices.IndexFunc(o.services, netip.Addr.Is6); at >= 0 && !slices.ContainsFunc(on.Addresses, netip.Addr.Is6) {
			whose := "host " + h.Name
			if slices.ContainsFunc(h.Addresses, netip.Addr.Is6) {
				whose = "this host"
			}
			on.problem = cmp.Or(on.problem, fmt.Sprintf("%s has no IPv6 address on the link: packets to %s for devices of host %s are dropped", whose, o.services[at], h.Name))
		}
		return on
	case len(silent) > 0:
		return path{kind: "none", problem: fmt.Sprintf("host %s does not answer on the link at %s (ip neigh): packets to the host are dropped", h.Name, silent[0])}
	}
	narrow := ""
	for _, a := range h.Addresses { // IPv4 comes first
		mtu, source, ok := routed(a)
		if !ok {
			continue
		}
		index, vni, err := o.tunnel()
		if err != nil {
			return path{kind: "none", problem: fmt.Sprintf("no tunnel to host %s: %v", h.Name, err)}
		}
		p := path{kind: "tunnel", Next: forward.Next{Addresses: []netip.Addr{a}, Sources: h.Addresses, Interface: index, VNI: vni, Room: mtu - forward.TunnelOverhead4}}
		if a.Is6() {
			p.Room = mtu - forward.TunnelOverhead6
		}
		switch {
		case p.Room < leastRoom:
			narrow = fmt.Sprintf("the route to host %s at %s has MTU %d, too little for a tunnel: packets to the host are dropped", h.Name, a, mtu)
			continue
		case source.IsValid() && len(o.addresses) > 0 && !slices.Contains(o.addresses, source):
			p.problem = fmt.Sprintf("packets to host %s leave with the address %s, which is none of those of this host in the table, %v: host %s drops them; give the route to %s another source address (ip route ... src)",
				h.Name, source, o.addresses, h.Name, a)
		case a.Is6() && mtu < forward.TunnelMTU+forward.TunnelOverhead6:
			p.problem = fmt.Sprintf("the tunnel to host %s is over IPv6, on a link with MTU %d: packets of more than %d bytes are dropped", h.Name, mtu, mtu-forward.TunnelOverhead6)
		}
		return p
	}
	return path{kind: "none", problem: cmp.Or(narrow, fmt.Sprintf("there is no route to host %s at %v", h.Name, h.Addresses))}
}

func (l *links) has(index int) bool {
	return slices.ContainsFunc(l.nics, func(n nic) bool { return n.index == index })
}

// unresolved are the addresses of hosts that the kernel has not found on the link, since when.
type unresolved map[netip.Addr]time.Time

// silentTime is the time after which a host counts as absent from the link. The kernel asks three times, a second apart
// (net.ipv4.neigh.default.mcast_solicit).
const silentTime = 4 * time.Second

// silent reports whether the kernel has looked for an address in vain for silentTime. It is called for addresses that the kernel does not know
// now.
func (u unresolved) silent(a netip.Addr, now time.Time) bool {
	since, ok := u[a]
	if !ok {
		u[a] = now
		return false
	}
	return now.Sub(since) >= silentTime
}

// routed returns the MTU of the route to an address, if there is one, and the address from which the kernel sends there: on a host
// with several interfaces or addresses, it may be another one than the other hosts know.
func routed(a netip.Addr) (mtu int, from netip.Addr, ok bool) {
	routes, err := netlink.RouteGet(a.AsSlice())
	if err != nil || len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST {
		return 0, from, false
	}
	from, _ = netip.AddrFromSlice(routes[0].Src)
	from = from.Unmap()
	if routes[0].MTU != 0 {
		return routes[0].MTU, from, true
	}
	link, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return 0, from, false
	}
	return link.Attrs().MTU, from, true
}

// holders returns the hosts of a table by address. An address of several hosts belongs to one that lives, to the one that the
// kernel knows at the address, to the one that had it before, or else to the first one, in this order.
func (l *links) holders(t *table.Table, dead map[string]bool, before map[netip.Addr]string) map[netip.Addr]string {
	claims := make(map[netip.Addr][]*table.Host)
	for i := range t.Hosts {
		for _, a := range t.Hosts[i].Addresses {
			claims[a] = append(claims[a], &t.Hosts[i])
		}
	}
	now := make(map[netip.Addr]string, len(claims))
	for a, hosts := range claims {
		prefer := func(ok func(*table.Host) bool) {
			if some := slices.DeleteFunc(slices.Clone(hosts), func(h *table.Host) bool { return !ok(h) }); len(some) > 0 {
				hosts = some
			}
		}
		if len(hosts) > 1 {
			prefer(func(h *table.Host) bool { return !dead[h.Name] })
			if index, ok := l.interfaceTo(a); ok {
				mac, known := l.neighbor(index, a)
				prefer(func(h *table.Host) bool { return known && slices.Contains(h.MACs, net.HardwareAddr(mac[:]).String()) })
			}
			prefer(func(h *table.Host) bool { return before[a] == h.Name })
		}
		now[a] = hosts[0].Name
	}
	return now
}

// interfaceTo returns the interface whose link has an address.
func (l *links) interfaceTo(a netip.Addr) (index int, ok bool) {
	routes, err := netlink.RouteGet(a.AsSlice())
	if err != nil || len(routes) != 1 || routes[0].Type != unix.RTN_UNICAST || routes[0].Gw != nil {
		return 0, false
	}
	index = routes[0].LinkIndex
	return index, l.has(index)
}

// defaultRouters returns the next hops of the default routes by their MAC addresses on the links.
func (l *links) defaultRouters() map[[6]byte]netip.Addr {
	routers := make(map[[6]byte]netip.Addr)
	for _, far := range []net.IP{{198, 18, 0, 1}, net.ParseIP("2001:2::1")} { // addresses for benchmarks (RFC 2544, RFC 5180), which have no other route
		routes, err := netlink.RouteGet(far)
		if err != nil || len(routes) != 1 || routes[0].Gw == nil {
			continue
		}
		gateway, _ := netip.AddrFromSlice(routes[0].Gw)
		if !l.has(routes[0].LinkIndex) {
			continue
		}
		if mac, ok := l.neighbor(routes[0].LinkIndex, gateway.Unmap()); ok {
			routers[mac] = gateway.Unmap()
		}
	}
	return routers
}

// neighbor returns the MAC address that the kernel knows for an address, or else lets the kernel ask for it.
func (l *links) neighbor(index int, a netip.Addr) (mac [6]byte, ok bool) {
	of := neighborTable{index, unix.AF_INET6}
	if a.Is4() {
		of.family = unix.AF_INET
	}
	known, read := l.neighbors[of]
	if !read {
		list, err := netlink.NeighList(index, of.family)
		if err != nil {
			return mac, false
		}
		known = make(map[netip.Addr][6]byte)
		const valid = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE | netlink.NUD_PERMANENT
		for _, n := range list {
			if ip, _ := netip.AddrFromSlice(n.IP); n.State&valid != 0 && len(n.HardwareAddr) == 6 {
				known[ip.Unmap()] = [6]byte(n.HardwareAddr)
			}
		}
		l.neighbors[of] = known
	}
	if mac, ok = known[a]; ok {
		return mac, true
	}
	// After an error, the address stays unknown, and the next refresh asks again.
	_ = netlink.NeighSet(&netlink.Neigh{LinkIndex: index, Family: of.family, State: netlink.NUD_NONE, Flags: netlink.NTF_USE, IP: a.AsSlice()})
	return mac, false
}

// conflict returns why a host cannot be reached at its addresses: another host, this one or the services have one of them. Hosts
// say themselves which addresses they have.
func conflict(h *table.Host, taken, holders map[netip.Addr]string) string {
	for _, a := range h.Addresses {
		by := taken[a]
		if holder := holders[a]; by == "" && holder != h.Name {
			by = "host " + holder
		}
		if by != "" {
			return fmt.Sprintf("host %s says that its address is %s, which is that of %s: packets to the host are dropped; compare the interfaces of the hosts with ADDRESSES", h.Name, a, by)
		}
	}
	return ""
}
