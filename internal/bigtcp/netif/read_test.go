// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"encoding/binary"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

func openOwn(t testing.TB) *Namespace {
	t.Helper()
	n, err := OpenNamespace("")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

// addPair adds a veth pair in the namespace of the tests.
func addPair(t testing.TB, name, peer string) *netlink.Veth {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	v := &netlink.Veth{LinkAttrs: attrs, PeerName: peer}
	if err := netlink.LinkAdd(v); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netlink.LinkDel(v); err != nil {
			t.Error(err)
		}
	})
	return v
}

func openEvents(t testing.TB) *os.File {
	t.Helper()
	events, err := subscribe()
	if err != nil {
		t.Fatal(err)
	}
	return events
}

func expectChange(t *testing.T, changes <-chan struct{}) {
	t.Helper()
	select {
	case _, more := <-changes:
		if !more {
			t.Fatal("the watch ends")
		}
	case <-time.After(10 * time.Second):
		t.Fatal("no change is told")
	}
}

// The kernel sends no notification for a change of sizes.
func TestWatchSeesSizes(t *testing.T) {
	v := addPair(t, "sized0", "sized1")
	for name, set := range map[string]func(netlink.Link, int) error{
		"GSO":      netlink.LinkSetGSOMaxSize,
		"GRO":      netlink.LinkSetGROMaxSize,
		"GSO IPv4": netlink.LinkSetGSOIPv4MaxSize,
		"GRO IPv4": netlink.LinkSetGROIPv4MaxSize,
	} {
		t.Run(name, func(t *testing.T) {
			if strings.HasSuffix(name, "IPv4") && !openOwn(t).Support().IPv4 {
				t.Skip("kernel: no sizes of IPv4 before Linux 6.3")
			}
			changes, err := openOwn(t).follow(t.Context(), openEvents(t), 50*time.Millisecond)
			if err != nil {
				t.Fatal(err)
			}
			select {
			case <-changes:
				t.Fatal("a change is told of where there is none")
			case <-time.After(300 * time.Millisecond):
			}
			if err := set(v, 99999); err != nil {
				t.Fatal(err)
			}
			expectChange(t, changes)
		})
	}
}

// Notifications that the kernel dropped count as a change.
func TestWatchOverrun(t *testing.T) {
	events := openEvents(t)
	raw, err := events.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	control := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 1) })
	if control != nil || err != nil {
		t.Fatal(control, err)
	}
	v := addPair(t, "over0", "over1")
	for mtu := range 20 {
		if err := netlink.LinkSetMTU(v, 1400+mtu); err != nil {
			t.Fatal(err)
		}
	}
	changes, err := openOwn(t).follow(t.Context(), events, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	expectChange(t, changes)
	if err := netlink.LinkSetMTU(v, 1500); err != nil {
		t.Fatal(err)
	}
	expectChange(t, changes)
}

// linkMessage returns the payload of a message RTM_NEWLINK.
func linkMessage(attrs ...*nl.RtAttr) []byte {
	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index, header.Flags = 7, unix.IFF_UP
	m := header.Serialize()
	for _, a := range attrs {
		m = append(m, a.Serialize()...)
	}
	return m
}

func linkAttribute(kind int, value any) *nl.RtAttr {
	switch v := value.(type) {
	case string:
		return nl.NewRtAttr(kind, nl.ZeroTerminated(v))
	case int:
		return nl.NewRtAttr(kind, nl.Uint32Attr(uint32(v)))
	}
	a := nl.NewRtAttr(kind, nil)
	for _, child := range value.([]*nl.RtAttr) {
		a.AddChild(child)
	}
	return a
}

// Kinds that this kernel may not have.
func TestParseLink(t *testing.T) {
	info := func(kind string, data ...*nl.RtAttr) *nl.RtAttr {
		return linkAttribute(unix.IFLA_LINKINFO, []*nl.RtAttr{linkAttribute(unix.IFLA_INFO_KIND, kind), linkAttribute(unix.IFLA_INFO_DATA|unix.NLA_F_NESTED, data)})
	}
	lower := func(index int) *nl.RtAttr { return linkAttribute(unix.IFLA_LINK, index) }
	elsewhere := linkAttribute(unix.IFLA_LINK_NETNSID, 3)
	for name, c := range map[string]struct {
		message []byte
		want    link
	}{
		"hardware":                  {linkMessage(), link{netnsid: -1}},
		"its own index":             {linkMessage(lower(7)), link{netnsid: -1}},
		"vlan":                      {linkMessage(info("vlan"), lower(2)), link{Interface: Interface{Kind: "vlan"}, lower: 2, netnsid: -1}},
		"vlan moved":                {linkMessage(elsewhere, lower(7), info("vlan")), link{Interface: Interface{Kind: "vlan"}, lower: 7, foreign: true, netnsid: 3}},
		"gre without device":        {linkMessage(info("gre"), lower(0)), link{Interface: Interface{Kind: "gre"}, netnsid: -1}},
		"gre":                       {linkMessage(info("gre"), lower(2)), link{Interface: Interface{Kind: "gre"}, lower: 2, netnsid: -1}},
		"geneve moved":              {linkMessage(info("geneve"), lower(7), elsewhere), link{Interface: Interface{Kind: "geneve"}, foreign: true, netnsid: 3}},
		"vxlan":                     {linkMessage(info("vxlan", linkAttribute(unix.IFLA_VXLAN_LINK, 2))), link{Interface: Interface{Kind: "vxlan"}, lower: 2, netnsid: -1}},
		"vxlan moved":               {linkMessage(info("vxlan", linkAttribute(unix.IFLA_VXLAN_LINK, 7)), lower(7), elsewhere), link{Interface: Interface{Kind: "vxlan"}, lower: 7, foreign: true, netnsid: 3}},
		"vxlan without device":      {linkMessage(info("vxlan"), lower(7), elsewhere), link{Interface: Interface{Kind: "vxlan"}, foreign: true, netnsid: 3}},
		"port":                      {linkMessage(linkAttribute(unix.IFLA_MASTER, 9)), link{netnsid: -1, master: 9}},
		"number not assigned":       {linkMessage(info("veth"), lower(5), linkAttribute(unix.IFLA_LINK_NETNSID, -1)), link{Interface: Interface{Kind: "veth"}, lower: 5, foreign: true, netnsid: -1}},
		"too short a number":        {linkMessage(nl.NewRtAttr(unix.IFLA_LINK, []byte{1})), link{netnsid: -1}},
		"cut off":                   {append(linkMessage(), 9, 0, 1, 0, 'x'), link{netnsid: -1}},
		"an attribute of no length": {append(linkMessage(), 0, 0, 1, 0), link{netnsid: -1}},
	} {
		c.want.Index, c.want.Up = 7, true
		if got, err := parseLink(c.message); err != nil || !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: got %+v, %v", name, got, err)
		}
	}
	if _, err := parseLink(make([]byte, unix.SizeofIfInfomsg-1)); err == nil {
		t.Error("a message without header is taken")
	}
}

func FuzzParseLink(f *testing.F) {
	f.Add(linkMessage(linkAttribute(unix.IFLA_IFNAME, "eth0"), linkAttribute(unix.IFLA_MTU, 1500)))
	f.Add(linkMessage(linkAttribute(unix.IFLA_LINKINFO, []*nl.RtAttr{linkAttribute(unix.IFLA_INFO_KIND, "vxlan")})))
	f.Add(linkMessage(linkAttribute(unix.IFLA_PROP_LIST, []*nl.RtAttr{linkAttribute(unix.IFLA_ALT_IFNAME, "other")})))
	f.Fuzz(func(t *testing.T, m []byte) {
		l, err := parseLink(m)
		if err == nil && l.Index != int(int32(binary.NativeEndian.Uint32(m[4:]))) {
			t.Errorf("index %d of %x", l.Index, m)
		}
	})
}
