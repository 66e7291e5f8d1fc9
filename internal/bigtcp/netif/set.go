// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Set sets the sizes of an interface, all of them or none. Sizes of 0 are not changed.
// Needs CAP_NET_ADMIN. Returns ENODEV if there is no such interface, and EINVAL for
// sizes above MaxSize or, for GSO, above tso_max_size.
func (n *Namespace) Set(index int, s Sizes) error {
	r := n.request(unix.RTM_SETLINK, unix.NLM_F_ACK)
	m := nl.NewIfInfomsg(unix.AF_UNSPEC)
	m.Index = int32(index)
	r.AddData(m)
	// One message: the kernel validates all sizes before it sets the first
	// (validate_linkmsg), and sets those of IPv4 last, because a GSO or GRO size of at
	// most Legacy resets them (do_setlink).
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

// nameOf returns the name of an interface, or "interface INDEX" if it has vanished.
func (n *Namespace) nameOf(index int) string {
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
