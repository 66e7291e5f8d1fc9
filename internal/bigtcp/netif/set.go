// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Set sets the sizes of the interface with an index, all of them or none. Those of 0
// stay as they are. Needs CAP_NET_ADMIN; ENODEV if there is no such interface, EINVAL
// for sizes above what the device or the kernel takes.
func (n *Network) Set(index int, s Sizes) error {
	r := n.request(unix.RTM_SETLINK, unix.NLM_F_ACK)
	m := nl.NewIfInfomsg(unix.AF_UNSPEC)
	m.Index = int32(index)
	r.AddData(m)
	// The kernel checks all before it sets the first, and sets those of IPv4 last,
	// which the others reset.
	for _, a := range []struct {
		kind int
		size uint32
	}{
		{unix.IFLA_GSO_MAX_SIZE, s.GSO},
		{unix.IFLA_GRO_MAX_SIZE, s.GRO},
		{unix.IFLA_GSO_IPV4_MAX_SIZE, s.GSOIPv4},
		{unix.IFLA_GRO_IPV4_MAX_SIZE, s.GROIPv4},
	} {
		if a.size != 0 {
			r.AddData(nl.NewRtAttr(a.kind, nl.Uint32Attr(a.size)))
		}
	}
	if _, err := r.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("set sizes of %s: %w", n.nameOf(index), err)
	}
	return nil
}

// nameOf is the name of an interface, or its index in words if it has vanished.
func (n *Network) nameOf(index int) string {
	r := n.request(unix.RTM_GETLINK, 0)
	m := nl.NewIfInfomsg(unix.AF_UNSPEC)
	m.Index = int32(index)
	r.AddData(m)
	messages, err := r.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	if err == nil && len(messages) > 0 {
		if l, err := parseLink(messages[0]); err == nil {
			return l.Name
		}
	}
	return fmt.Sprintf("interface %d", index)
}
