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

	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/nlattr"
)

// Support is the support of the kernel for BIG TCP.
type Support struct {
	IPv6 bool `json:"ipv6"` // Linux 5.19
	IPv4 bool `json:"ipv4"` // Linux 6.3
}

// Support returns the support of the kernel, as the netlink attributes of lo show it.
func (n *Namespace) Support() Support { return n.support }

func (n *Namespace) readSupport() (Support, error) {
	lo, err := n.link(1) // in every namespace
	if err != nil {
		return Support{}, fmt.Errorf("read interface lo: %w", err)
	}
	return Support{IPv6: lo.TSOMaxSize > 0, IPv4: lo.Sizes.GSOIPv4 > 0}, nil
}

// Interfaces returns all interfaces with their relations, sorted by index. The
// namespaces of peers and lower interfaces are searched among the named namespaces and
// those of processes.
func (n *Namespace) Interfaces() ([]Interface, error) {
	here, err := n.snapshot()
	if err != nil {
		return nil, err
	}
	elsewhere := n.foreignSnapshots(here.links)
	list := make([]Interface, len(here.links))
	for i := range here.links {
		list[i] = here.describe(&here.links[i], elsewhere)
	}
	return list, nil
}

// Interface returns the interface with a name or an alternative name. An unknown name
// is a [fault.Error] with CodeUsage.
func (n *Namespace) Interface(name string) (*Interface, error) {
	here, err := n.snapshot()
	if err != nil {
		return nil, err
	}
	var names []string
	for i := range here.links {
		l := &here.links[i]
		if l.Name == name || slices.Contains(l.names, name) {
			found := here.describe(l, n.foreignSnapshots(here.foreignLinks(l)))
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
	return nil, fault.Usage(fmt.Errorf("there is no interface %q%s", name, where), hint)
}

// link is an interface with the netlink attributes that describe its relations.
type link struct {
	Interface
	names []string // alternative names
	// lower is the index of the lower interface or of the peer (IFLA_LINK); 0 for
	// none. If foreign, the index is of another namespace, with the nsid netnsid.
	lower   int
	foreign bool
	netnsid int32 // of the namespace of the lower interface; -1 for none
	master  int   // index; 0 for none
}

// maxRetries bounds repeated reads of interfaces that change during a read.
const maxRetries = 10

// links returns all interfaces without driver and offloads, sorted by index.
func (n *Namespace) links() ([]link, error) {
	var messages [][]byte
	var err error
	for range maxRetries {
		r := n.request(unix.RTM_GETLINK, unix.NLM_F_DUMP)
		r.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		r.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(skipStatistics)))
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

// link returns one interface without driver and offloads. Returns ENODEV if there is
// no such interface.
func (n *Namespace) link(index int) (link, error) {
	r := n.request(unix.RTM_GETLINK, 0)
	wanted := nl.NewIfInfomsg(unix.AF_UNSPEC)
	wanted.Index = int32(index)
	r.AddData(wanted)
	messages, err := r.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	if err != nil {
		return link{}, err
	}
	if len(messages) != 1 {
		return link{}, fmt.Errorf("%d replies for interface %d", len(messages), index)
	}
	return parseLink(messages[0])
}

// skipStatistics is RTEXT_FILTER_SKIP_STATS of <linux/rtnetlink.h>.
const skipStatistics = 1 << 3

// parseLink parses the payload of a message RTM_NEWLINK.
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
			l.MTU = int(uint32Value(value))
		case unix.IFLA_LINK:
			l.lower = int(uint32Value(value))
		case unix.IFLA_LINK_NETNSID:
			l.foreign, l.netnsid = true, int32(uint32Value(value))
		case unix.IFLA_MASTER:
			l.master = int(uint32Value(value))
		case unix.IFLA_TSO_MAX_SIZE:
			l.TSOMaxSize = uint32Value(value)
		case unix.IFLA_TSO_MAX_SEGS:
			l.TSOMaxSegs = uint32Value(value)
		case unix.IFLA_GSO_MAX_SIZE:
			l.Sizes.GSO = uint32Value(value)
		case unix.IFLA_GRO_MAX_SIZE:
			l.Sizes.GRO = uint32Value(value)
		case unix.IFLA_GSO_IPV4_MAX_SIZE:
			l.Sizes.GSOIPv4 = uint32Value(value)
		case unix.IFLA_GRO_IPV4_MAX_SIZE:
			l.Sizes.GROIPv4 = uint32Value(value)
		}
	}
	switch l.Kind {
	case "vxlan":
		l.lower = 0
		for kind, value := range vxlan.All {
			if kind == unix.IFLA_VXLAN_LINK {
				l.lower = int(uint32Value(value))
			}
		}
	case "geneve", "bareudp", "gtp", "amt", "wireguard":
		// These have no lower interface. The kernel reports their own index if they were
		// moved to another namespace.
		l.lower = 0
	}
	if !l.foreign && l.lower == l.Index {
		l.lower = 0
	}
	return l, nil
}

// linkInfo returns IFLA_INFO_KIND and IFLA_INFO_DATA.
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

// uint32Value returns the value of an attribute of 32 bits, or 0 if the attribute is
// shorter.
func uint32Value(value []byte) uint32 {
	if len(value) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(value)
}
