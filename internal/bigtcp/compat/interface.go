// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/linux"
)

// checkIPv4Alone reports an IPv4 size above the IPv6 size on kernels that compare packets
// of both families with the GSO size of IPv6.
func checkIPv4Alone(i *netif.Interface, s netif.Support, kernel linux.Version, netns string) []Incompatibility {
	if !s.IPv4 || i.Sizes.GSOIPv4 <= netif.Legacy || i.Sizes.GSOIPv4 <= i.Sizes.GSO || !comparesIPv4WithIPv6Size(kernel) {
		return nil
	}
	command := fmt.Sprintf("sockeye bigtcp apply %s --ipv6 %d --ipv4 %[2]d", i.Name, i.Sizes.GSOIPv4)
	if netns != "" {
		command += " --netns " + netns
	}
	return []Incompatibility{{
		Name: ipv4Alone,
		Detail: fmt.Sprintf("IPv4 has %d bytes and IPv6 %d: Linux %s segments packets of both families above the size of IPv6 in software, before the driver",
			i.Sizes.GSOIPv4, i.Sizes.GSO, kernel),
		Hint: command + "; fixed in Linux 6.12, 6.11.3, 6.10.14 and 6.6.55",
	}}
}

// comparesIPv4WithIPv6Size reports whether gso_features_check compares IPv4 packets with
// gso_max_size: since commit 24ab059d2ebd (6.7, 6.6.9) and until e609c959a939 (6.12,
// 6.11.3, 6.10.14, 6.6.55).
func comparesIPv4WithIPv6Size(v linux.Version) bool {
	for _, r := range []struct{ from, until linux.Version }{
		{linux.Version{6, 6, 9}, linux.Version{6, 6, 55}},
		{linux.Version{6, 7, 0}, linux.Version{6, 10, 14}},
		{linux.Version{6, 11, 0}, linux.Version{6, 11, 3}},
	} {
		if !v.Before(r.from) && v.Before(r.until) {
			return true
		}
	}
	return false
}

// checkDriver reports an interface whose driver does not support large packets.
// Interfaces that inherit the limit from a lower interface are not reported.
func checkDriver(i *netif.Interface) []Incompatibility {
	if netif.IsTunnel(i.Kind) || i.TSOMaxSize == 0 {
		return nil
	}
	who := cmp.Or(i.Driver, i.Kind)
	if i.TSOMaxSize <= netif.Legacy {
		if slices.ContainsFunc(i.Related, func(r netif.Related) bool { return r.Relation == netif.Lower && r.TSOMaxSize == i.TSOMaxSize }) {
			return nil
		}
		return []Incompatibility{{
			Name: driver,
			Detail: strings.TrimSpace(fmt.Sprintf("%s supports packets of at most %d bytes (tso_max_size): larger packets cannot be sent; "+
				"received packets may be merged to larger ones", who, i.TSOMaxSize)),
			Hint: "drivers with larger packets are mlx5, mlx4, bnxt, ice, gve and mana, and lo, veth and netkit; later kernels may have others",
		}}
	}
	// IPv4 and TCP with timestamps.
	const headers = 52
	if maxSize := uint64(i.TSOMaxSegs) * uint64(max(i.MTU-headers, 0)); i.TSOMaxSegs > 0 && maxSize <= netif.Legacy {
		return []Incompatibility{{
			Name:   driver,
			Detail: fmt.Sprintf("%s supports at most %d segments per packet (tso_max_segs), %d bytes at an MTU of %d", who, i.TSOMaxSegs, maxSize, i.MTU),
			Hint:   "a larger MTU allows larger packets",
		}}
	}
	return nil
}

// checkOffloads reports offloads that are off. GSO is not checked: TCP builds large
// packets without GSO (sk_setup_caps in net/core/sock.c) and passes them to an interface
// with TSO.
func checkOffloads(i *netif.Interface) []Incompatibility {
	var found []Incompatibility
	if !i.Offloads.TSO {
		hint := fmt.Sprintf("ethtool -K %s sg on tso on", i.Name)
		if i.Kind == "veth" {
			hint += "; a native XDP program on the peer turns TSO off while it is attached"
		}
		found = append(found, Incompatibility{
			Name:   offloadOff,
			Detail: "TSO is off: the kernel segments packets to the MTU in software, before the driver",
			Hint:   hint,
		})
	}
	if !i.Offloads.GRO && i.Kind != "veth" && i.Sizes.GRO > netif.Legacy {
		found = append(found, Incompatibility{
			Name:   offloadOff,
			Detail: "GRO is off: received packets are not merged, whatever gro_max_size is",
			Hint:   fmt.Sprintf("ethtool -K %s gro on", i.Name),
		})
	}
	return found
}
