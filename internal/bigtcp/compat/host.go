// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/linux"
	"sockeye/internal/sysctl"
)

// firstWithoutJumbograms is the first kernel that does not insert a hop-by-hop option into
// IPv6 packets above 65535 bytes.
var firstWithoutJumbograms = linux.Version{7, 0, 0}

// checkForwarding reports IPv6 routers whose kernel counts the hop-by-hop option for
// each segment: forwarded packets whose segments fill the MTU are then 8 bytes too large
// and are dropped (ip6_forward, ip6_pkt_too_big).
// TestVerifyRefusedByRouter reproduces it.
func checkForwarding(n *netif.Namespace, ifaces []netif.Interface, kernel linux.Version) ([]Incompatibility, error) {
	enabled := slices.ContainsFunc(ifaces, func(i netif.Interface) bool { return i.Name != "lo" && max(i.Sizes.GSO, i.Sizes.GRO) > netif.Legacy })
	if !enabled || !kernel.Before(firstWithoutJumbograms) {
		return nil, nil
	}
	var forwarding string
	err := n.Do(func() (err error) {
		forwarding, err = sysctl.Read("net.ipv6.conf.all.forwarding")
		return err
	})
	if errors.Is(err, fs.ErrNotExist) || err == nil && forwarding == "0" {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return []Incompatibility{{
		Name: ipv6Forwarding,
		Detail: "this host forwards IPv6, and kernels before 7.0 count 8 bytes more for each segment of a packet above 65535 bytes: " +
			"on an interface with the MTU of the connection they drop the packet as too big",
		Hint: "raise the MTU of the outgoing interfaces by 8 bytes or more, or keep the IPv6 sizes of the incoming interfaces at 65536",
	}}, nil
}

// checkIPsec reports outbound IPsec policies: sk_setup_caps of net/core/sock.c turns GSO
// off for the sockets to which they apply.
func checkIPsec(n *netif.Namespace) ([]Incompatibility, error) {
	var policies []netlink.XfrmPolicy
	err := n.Do(func() error {
		loaded, err := moduleLoaded("xfrm_user")
		if err != nil || !loaded {
			return err
		}
		policies, err = netlink.XfrmPolicyList(netlink.FAMILY_ALL)
		return err
	})
	switch {
	// The kernel has no IPsec, or the caller has no permission.
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EINVAL), errors.Is(err, fs.ErrPermission):
		return nil, nil
	case err != nil && !errors.Is(err, netlink.ErrDumpInterrupted):
		return nil, fmt.Errorf("list IPsec policies: %w", err)
	}
	count := 0
	for _, p := range policies {
		if p.Dir == netlink.XFRM_DIR_OUT && len(p.Tmpls) > 0 {
			count++
		}
	}
	if count == 0 {
		return nil, nil
	}
	return []Incompatibility{{
		Name: ipsec,
		Detail: fmt.Sprintf("%d outbound IPsec policies: the connections that match send packets of one segment each, "+
			"unless the interface offloads the encryption", count),
		Hint: "only connections without IPsec have large packets",
	}}, nil
}

const maxSkbFrags = "net.core.max_skb_frags"

// checkFragments reports a small max_skb_frags: MAX_SKB_FRAGS in net/Kconfig,
// skb_splice_from_iter in net/core/skbuff.c.
func checkFragments(ifaces []netif.Interface) ([]Incompatibility, error) {
	text, err := sysctl.Read(maxSkbFrags)
	// The sysctl exists in the initial network namespace only.
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	frags, err := strconv.ParseUint(text, 10, 31)
	if err != nil {
		return nil, fmt.Errorf("read sysctl %s: %w", maxSkbFrags, err)
	}
	return compareFragments(frags, uint64(os.Getpagesize()), ifaces), nil
}

// compareFragments compares the capacity of a packet's fragments with the largest GSO
// size of all interfaces, or with 192 KB if BIG TCP is off.
func compareFragments(frags, page uint64, ifaces []netif.Interface) []Incompatibility {
	const defaultSize = 192000
	var largest uint32
	for _, i := range ifaces {
		largest = max(largest, i.Sizes.GSO, i.Sizes.GSOIPv4)
	}
	if largest <= netif.Legacy {
		largest = defaultSize
	}
	if frags*page >= uint64(largest) {
		return nil
	}
	return []Incompatibility{{
		Name: smallFrags,
		Detail: fmt.Sprintf("net.core.max_skb_frags is %d: a packet of zero-copy data (sendfile, splice, MSG_ZEROCOPY) "+
			"has as many pages of %d bytes, %d bytes, unless the pages are contiguous in memory; "+
			"ordinary writes are not affected, their fragments have 32768 bytes", frags, page, frags*page),
		Hint: "the maximum is the kernel's CONFIG_MAX_SKB_FRAGS: 17 by default, up to 45 from Linux 6.4",
	}}
}
