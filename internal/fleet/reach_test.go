// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/fleet/table"
	"sockeye/internal/netns"
)

// TestSourceAddress is that a host tells that its packets in the tunnel have a source address that the other hosts do not know:
// they drop such packets, and nobody else sees why.
func TestSourceAddress(t *testing.T) {
	plug(t)
	// The host has a second interface in another network, which is none of the fleet.
	check(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "other0"}, PeerName: "other1"}))
	other, err := netlink.LinkByName("other0")
	check(t, err)
	t.Cleanup(func() { check(t, netlink.LinkDel(other)) })
	addresses := map[string]int{"192.0.2.129": 25, "2001:db8:1::1": 64, "2001:db8:1::2": 64}
	for text, bits := range addresses {
		a := netip.MustParseAddr(text)
		check(t, netlink.AddrAdd(other, &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, a.BitLen())}, Flags: unix.IFA_F_NODAD}))
	}
	for _, name := range []string{"other0", "other1", "fleet0", "fleet1"} {
		link, err := netlink.LinkByName(name)
		check(t, err)
		check(t, netlink.LinkSetUp(link))
	}
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	check(t, err)
	defer handle.Close()
	for text := range addresses {
		check(t, netns.AwaitLocal(handle, netip.MustParseAddr(text), time.Minute))
	}
	nics, err, _ := findInterfaces([]string{"fleet0"}, nil)
	check(t, err)
	fleet0 := nics[0].index
	opened := 0
	here := origin{links: newLinks(nics), silent: func(netip.Addr) bool { return false }, tunnel: func() (int, uint32, error) { opened++; return 7, 1, nil }}
	here.addresses = []netip.Addr{netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("2001:db8:1::2")}
	to := map[bool]*table.Host{
		true:  {Name: "b", Weight: 1, Addresses: []netip.Addr{netip.MustParseAddr("203.0.113.3")}},
		false: {Name: "b", Weight: 1, Addresses: []netip.Addr{netip.MustParseAddr("2001:db8:3::3")}},
	}
	for _, c := range []struct {
		name     string
		v4       bool
		link     int
		via, src string
		leaves   string // "": with an address of the table
	}{
		{"through the interface of the fleet", true, fleet0, "198.51.100.254", "", ""},
		{"through another interface", true, other.Attrs().Index, "192.0.2.254", "", "192.0.2.129"},
		{"through another interface with the right address", true, other.Attrs().Index, "192.0.2.254", "198.51.100.1", ""},
		{"through the interface of the fleet with another address", true, fleet0, "198.51.100.254", "192.0.2.129", "192.0.2.129"},
		{"IPv6 with the address of the table", false, other.Attrs().Index, "2001:db8:1::fe", "2001:db8:1::2", ""},
		{"IPv6 with another address", false, other.Attrs().Index, "2001:db8:1::fe", "2001:db8:1::1", "2001:db8:1::1"},
	} {
		route := &netlink.Route{Dst: &net.IPNet{IP: net.IP{203, 0, 113, 0}, Mask: net.CIDRMask(24, 32)}, Gw: net.ParseIP(c.via), LinkIndex: c.link, MTU: 9000}
		if !c.v4 {
			route.Dst = &net.IPNet{IP: net.ParseIP("2001:db8:3::"), Mask: net.CIDRMask(64, 128)}
		}
		if c.src != "" {
			route.Src = net.ParseIP(c.src)
		}
		check(t, netlink.RouteAdd(route))
		p := here.findPath(to[c.v4])
		check(t, netlink.RouteDel(route))
		if p.kind != "tunnel" || p.Interface != 7 {
			t.Errorf("%s: %+v", c.name, p)
		}
		if want := "packets to host b leave with the address " + c.leaves + ","; (p.problem != "") != (c.leaves != "") || !strings.HasPrefix(p.problem, want) && c.leaves != "" {
			t.Errorf("%s: problem %q", c.name, p.problem)
		}
	}
	if opened != 6 {
		t.Errorf("%d tunnels", opened)
	}
	narrow := &netlink.Route{Dst: &net.IPNet{IP: net.IP{203, 0, 113, 0}, Mask: net.CIDRMask(24, 32)}, Gw: net.ParseIP("198.51.100.254"), LinkIndex: fleet0, MTU: 150}
	check(t, netlink.RouteAdd(narrow))
	p := here.findPath(to[true])
	check(t, netlink.RouteDel(narrow))
	if p.kind != "none" || p.Interface != 0 || !strings.Contains(p.problem, "has MTU 150, too little for a tunnel") {
		t.Errorf("a narrow route: %+v", p)
	}
}

// TestSilent is that an address of a host that the kernel does not find counts as silent after a while, and again only after another while.
func TestSilent(t *testing.T) {
	a, now := netip.MustParseAddr("198.51.100.2"), time.Now()
	u := make(unresolved)
	for _, step := range []struct {
		after time.Duration
		want  bool
	}{{0, false}, {silentTime - 1, false}, {silentTime, true}, {time.Hour, true}} {
		if got := u.silent(a, now.Add(step.after)); got != step.want {
			t.Errorf("after %v: %v", step.after, got)
		}
	}
	delete(u, a) // the kernel knew the address meanwhile
	if u.silent(a, now.Add(2*time.Hour)) {
		t.Error("silent at once")
	}
}

// TestAbsentAddress is that an address of the services that this host does not have is found: the host would drop the packets.
func TestAbsentAddress(t *testing.T) {
	plug(t)
	here := netip.MustParseAddr("192.0.2.53")
	if err := absentAddress([]netip.Addr{here}); err != nil {
		t.Errorf("an address of lo: %v", err)
	}
	for _, absent := range []string{"192.0.2.54", "198.51.100.9", "2001:db8::54"} {
		if err := absentAddress([]netip.Addr{here, netip.MustParseAddr(absent)}); err == nil || !strings.Contains(err.Error(), "does not have the address "+absent) {
			t.Errorf("%s: %v", absent, err)
		}
	}
}
