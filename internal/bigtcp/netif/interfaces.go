// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/nlattr"
	"sockeye/internal/config"
)

// Support is what a kernel has BIG TCP for.
type Support struct {
	IPv6 bool `json:"ipv6"` // Linux 5.19
	IPv4 bool `json:"ipv4"` // Linux 6.3
}

// Support is what the kernel has, by the attributes that it gives of lo.
func (n *Network) Support() Support { return n.has }

func (n *Network) readSupport() (Support, error) {
	lo, err := n.link(1) // in every namespace
	if err != nil {
		return Support{}, fmt.Errorf("read interface lo: %w", err)
	}
	return Support{IPv6: lo.TSOMaxSize > 0, IPv4: lo.Sizes.GSOIPv4 > 0}, nil
}

// Interfaces reads all interfaces, sorted by index, with what they are bound to.
// The namespaces of peers are looked for among those that have names and those of
// processes.
func (n *Network) Interfaces() ([]Interface, error) {
	here, err := n.snapshot()
	if err != nil {
		return nil, err
	}
	elsewhere := n.elsewhere(here.links)
	list := make([]Interface, len(here.links))
	for i := range here.links {
		list[i] = here.describe(&here.links[i], elsewhere)
	}
	return list, nil
}

// Interface reads one interface by its name or an alternative one. If there is
// none, that is an [Error] of KindUsage.
func (n *Network) Interface(name string) (*Interface, error) {
	here, err := n.snapshot()
	if err != nil {
		return nil, err
	}
	var names []string
	for i := range here.links {
		l := &here.links[i]
		if l.Name == name || slices.Contains(l.names, name) {
			found := here.describe(l, n.elsewhere(here.abroad(l)))
			return &found, nil
		}
		names = append(names, l.Name)
	}
	where, list := "", "sockeye bigtcp --all"
	if n.path != "" {
		where, list = " in "+n.path, list+" --netns "+n.path
	}
	hint := list + " lists them"
	if near := config.Nearest(name, names); near != "" {
		hint = fmt.Sprintf("did you mean %s?", near)
	}
	return nil, Refuse(KindUsage, hint, "there is no interface %q%s", name, where)
}

// link is an interface, and the numbers that the kernel gives for its relations.
type link struct {
	Interface
	names []string // alternative ones
	// lower is the index of the device below or of the peer, 0 for none. Where
	// foreign, it is in another namespace, that of netnsid.
	lower   int
	foreign bool
	netnsid int32 // as namespaces have them for each other; -1 for none
	master  int   // index; 0 for none
}

// tries bounds how often is read again what changed meanwhile.
const tries = 10

// links reads all interfaces, sorted by index, without driver and offloads.
func (n *Network) links() ([]link, error) {
	var messages [][]byte
	var err error
	for range tries {
		r := n.request(unix.RTM_GETLINK, unix.NLM_F_DUMP)
		r.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		r.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(withoutStatistics)))
		if messages, err = r.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK); !errors.Is(err, nl.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("read interfaces: %w", err)
	}
	links := make([]link, 0, len(messages))
	for _, m := range messages {
		l, err := parseLink(m)
		if err != nil {
			return nil, fmt.Errorf("read interfaces: %w", err)
		}
		links = append(links, l)
	}
	slices.SortFunc(links, func(a, b link) int { return cmp.Compare(a.Index, b.Index) })
	return links, nil
}

// link reads one interface, without driver and offloads; ENODEV if there is none.
func (n *Network) link(index int) (link, error) {
	r := n.request(unix.RTM_GETLINK, 0)
	wanted := nl.NewIfInfomsg(unix.AF_UNSPEC)
	wanted.Index = int32(index)
	r.AddData(wanted)
	messages, err := r.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	if err != nil {
		return link{}, err
	}
	if len(messages) != 1 {
		return link{}, fmt.Errorf("%d answers about interface %d", len(messages), index)
	}
	return parseLink(messages[0])
}

// withoutStatistics is RTEXT_FILTER_SKIP_STATS of <linux/rtnetlink.h>.
const withoutStatistics = 1 << 3

// parseLink reads a message of RTM_NEWLINK, from behind its first header.
func parseLink(m []byte) (link, error) {
	if len(m) < unix.SizeofIfInfomsg {
		return link{}, fmt.Errorf("message of %d bytes", len(m))
	}
	header := nl.DeserializeIfInfomsg(m)
	l := link{Interface: Interface{Index: int(header.Index), Up: header.Flags&unix.IFF_UP != 0}, netnsid: -1}
	var vxlan nlattr.Attributes
	for kind, value := range nlattr.Attributes(m[unix.SizeofIfInfomsg:]).All {
		switch kind {
		case unix.IFLA_IFNAME:
			l.Name = unix.ByteSliceToString(value)
		case unix.IFLA_PROP_LIST:
			for kind, name := range nlattr.Attributes(value).All {
				if kind == unix.IFLA_ALT_IFNAME {
					l.names = append(l.names, unix.ByteSliceToString(name))
				}
			}
		case unix.IFLA_LINKINFO:
			l.Kind, vxlan = linkInfo(value)
		case unix.IFLA_MTU:
			l.MTU = int(number(value))
		case unix.IFLA_LINK:
			l.lower = int(number(value))
		case unix.IFLA_LINK_NETNSID:
			l.foreign, l.netnsid = true, int32(number(value))
		case unix.IFLA_MASTER:
			l.master = int(number(value))
		case unix.IFLA_TSO_MAX_SIZE:
			l.TSOMaxSize = number(value)
		case unix.IFLA_TSO_MAX_SEGS:
			l.TSOMaxSegs = number(value)
		case unix.IFLA_GSO_MAX_SIZE:
			l.Sizes.GSO = number(value)
		case unix.IFLA_GRO_MAX_SIZE:
			l.Sizes.GRO = number(value)
		case unix.IFLA_GSO_IPV4_MAX_SIZE:
			l.Sizes.GSOIPv4 = number(value)
		case unix.IFLA_GRO_IPV4_MAX_SIZE:
			l.Sizes.GROIPv4 = number(value)
		}
	}
	switch l.Kind {
	case "vxlan":
		l.lower = 0
		for kind, value := range vxlan.All {
			if kind == unix.IFLA_VXLAN_LINK {
				l.lower = int(number(value))
			}
		}
	case "geneve", "bareudp", "gtp", "amt", "wireguard":
		// They have no device below; the kernel gives their own index where they were
		// moved to another namespace.
		l.lower = 0
	}
	if !l.foreign && l.lower == l.Index {
		l.lower = 0
	}
	return l, nil
}

// linkInfo returns the kind of an interface and what is particular to it.
func linkInfo(info nlattr.Attributes) (kind string, data nlattr.Attributes) {
	for k, value := range info.All {
		switch k {
		case unix.IFLA_INFO_KIND:
			kind = unix.ByteSliceToString(value)
		case unix.IFLA_INFO_DATA:
			data = value
		}
	}
	return kind, data
}

// number is the value of an attribute of 32 bits; 0 if it is shorter.
func number(value []byte) uint32 {
	if len(value) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(value)
}
