// SPDX-License-Identifier: Apache-2.0

package netif_test

import (
	"testing"

	"sockeye/internal/bigtcp/netif"
)

func TestVerdict(t *testing.T) {
	both := netif.Support{IPv6: true, IPv4: true}
	only6 := netif.Support{IPv6: true}
	all := netif.Offloads{GSO: true, TSO: true, GRO: true}
	sizes := func(gso, gro, gso4, gro4 uint32) netif.Sizes {
		return netif.Sizes{GSO: gso, GRO: gro, GSOIPv4: gso4, GROIPv4: gro4}
	}
	nic := func(s netif.Sizes) netif.Interface {
		return netif.Interface{Name: "eth0", Driver: "mlx5_core", MTU: 1500, TSOMaxSize: 524280, TSOMaxSegs: 65535, Sizes: s, Offloads: all}
	}
	with := func(i netif.Interface, change func(*netif.Interface)) netif.Interface {
		change(&i)
		return i
	}
	virtio := func(s netif.Sizes) netif.Interface {
		return with(nic(s), func(i *netif.Interface) { i.Driver, i.TSOMaxSize = "virtio_net", 65536 })
	}
	vlan := func(s netif.Sizes, tso uint32, lower ...netif.Related) netif.Interface {
		return with(nic(s), func(i *netif.Interface) {
			i.Name, i.Kind, i.Driver, i.TSOMaxSize, i.Related = "eth0.5", "vlan", "802.1Q VLAN Support", tso, lower
		})
	}
	lower := func(name, driver string, tso, size uint32) netif.Related {
		return netif.Related{Relation: netif.Lower, Name: name, Driver: driver, TSOMaxSize: tso, Sizes: sizes(size, size, size, size)}
	}
	elsewhere := func(r netif.Related) netif.Related { r.Netns = "/run/netns/x"; return r }
	on := sizes(192000, 192000, 192000, 192000)

	for name, c := range map[string]struct {
		i       netif.Interface
		support netif.Support
		state   netif.State
		upTo    uint32
		text    string
	}{
		"off":              {nic(legacy), both, netif.Off, 524280, "off, possible up to 524280 bytes"},
		"less than before": {nic(sizes(20000, 20000, 20000, 20000)), both, netif.Off, 524280, "off, possible up to 524280 bytes"},
		"on":               {nic(on), both, netif.On, 524280, "on: IPv6 192000 bytes, IPv4 192000 bytes"},
		"one byte more":    {nic(sizes(65537, 65537, 65537, 65537)), both, netif.On, 524280, "on: IPv6 65537 bytes, IPv4 65537 bytes"},
		"on, received more": {nic(sizes(192000, 524280, 192000, 192000)), both, netif.On, 524280,
			"on: IPv6 192000 bytes sent, 524280 received, IPv4 192000 bytes"},
		"IPv6": {nic(sizes(192000, 192000, 65536, 65536)), both, netif.Partly, 524280, "partly: IPv6 only: 192000 bytes"},
		"IPv4": {nic(sizes(65536, 65536, 192000, 192000)), both, netif.Partly, 524280, "partly: IPv4 only: 192000 bytes"},
		"IPv6 sent": {nic(sizes(192000, 65536, 65536, 65536)), both, netif.Partly, 524280,
			"partly: IPv6 only: 192000 bytes sent, 65536 received"},
		"received": {nic(sizes(65536, 192000, 65536, 192000)), both, netif.Partly, 524280,
			"partly: IPv6 65536 bytes sent, 192000 received, IPv4 65536 bytes sent, 192000 received"},

		"virtio": {virtio(legacy), both, netif.Impossible, 0,
			"impossible: eth0 (virtio_net) supports packets of at most 65536 bytes"},
		"virtio that receives": {virtio(sizes(65536, 192000, 65536, 65536)), both, netif.Partly, 0,
			"partly: IPv6 only: 65536 bytes sent, 192000 received; but eth0 (virtio_net) supports packets of at most 65536 bytes"},
		"no driver": {with(virtio(legacy), func(i *netif.Interface) { i.Driver = "" }), both, netif.Impossible, 0,
			"impossible: eth0 supports packets of at most 65536 bytes"},
		"kind only": {with(virtio(legacy), func(i *netif.Interface) { i.Kind, i.Driver = "tun", "" }), both, netif.Impossible, 0,
			"impossible: eth0 (tun) supports packets of at most 65536 bytes"},
		"above virtio": {vlan(legacy, 65536, lower("eth0", "virtio_net", 65536, 65536)), both, netif.Impossible, 0,
			"impossible: its lower interface eth0 (virtio_net) supports packets of at most 65536 bytes"},
		"above virtio elsewhere": {vlan(legacy, 524280, elsewhere(lower("eth0", "virtio_net", 65536, 65536))), both, netif.Impossible, 0,
			"impossible: its lower interface eth0 in /run/netns/x (virtio_net) supports packets of at most 65536 bytes"},
		"above an unknown one": {vlan(legacy, 524280, netif.Related{Relation: netif.Lower, Index: 2, Netns: "unknown"}), both, netif.Off, 524280,
			"off, possible up to 524280 bytes"},
		"peer of a small one": {with(nic(legacy), func(i *netif.Interface) {
			i.Related = []netif.Related{{Relation: netif.Peer, Name: "small", TSOMaxSize: 65536}, {Relation: netif.Upper, Name: "br", TSOMaxSize: 65536}}
		}), both, netif.Off, 524280, "off, possible up to 524280 bytes"},
		"the smallest of several": {vlan(legacy, 524280, lower("bond0", "bonding", 524280, 65536), lower("eth0", "a", 185000, 65536), lower("eth1", "b", 300000, 65536)),
			both, netif.Off, 185000, "off, possible up to 185000 bytes, the tso_max_size of eth0"},

		"cut below": {vlan(on, 524280, lower("eth0", "mlx5_core", 524280, 65536)), both, netif.Partly, 524280,
			"partly: IPv6 192000 bytes, IPv4 192000 bytes; but the kernel segments packets above 65536 bytes to the MTU at eth0"},
		"cut at many": {vlan(on, 524280, lower("p1", "a", 524280, 100000), lower("p2", "a", 524280, 192000), lower("p3", "a", 524280, 1), lower("p4", "a", 524280, 1)),
			both, netif.Partly, 524280,
			"partly: IPv6 192000 bytes, IPv4 192000 bytes; but the kernel segments packets above 100000 bytes to the MTU at p1 and 2 others"},
		"not cut below": {vlan(on, 524280, lower("eth0", "mlx5_core", 524280, 192000)), both, netif.On, 524280,
			"on: IPv6 192000 bytes, IPv4 192000 bytes"},
		"no TSO": {with(nic(on), func(i *netif.Interface) { i.Offloads.TSO = false }), both, netif.Partly, 524280,
			"partly: IPv6 192000 bytes, IPv4 192000 bytes; but TSO is off: the kernel segments packets to the MTU before the driver"},
		"off without TSO": {with(nic(legacy), func(i *netif.Interface) { i.Offloads.TSO = false }), both, netif.Off, 524280,
			"off, possible up to 524280 bytes; but TSO is off: the kernel segments packets to the MTU before the driver"},
		"no GRO": {with(nic(on), func(i *netif.Interface) { i.Offloads.GRO = false }), both, netif.Partly, 524280,
			"partly: IPv6 192000 bytes, IPv4 192000 bytes; but GRO is off: received packets are not merged"},
		"veth, which needs no GRO": {with(nic(on), func(i *netif.Interface) { i.Kind, i.Driver, i.Offloads.GRO = "veth", "veth", false }), both, netif.On, 524280,
			"on: IPv6 192000 bytes, IPv4 192000 bytes"},
		"few segments": {with(nic(on), func(i *netif.Interface) { i.TSOMaxSegs = 64 }), both, netif.Partly, 524280,
			"partly: IPv6 192000 bytes, IPv4 192000 bytes; but it supports at most 64 segments per packet, 96000 bytes at an MTU of 1500"},

		"Linux 6.1, off": {nic(sizes(65536, 65536, 0, 0)), only6, netif.Off, 524280, "off, possible up to 524280 bytes (IPv4 needs Linux 6.3)"},
		"Linux 6.1, on":  {nic(sizes(192000, 192000, 0, 0)), only6, netif.On, 524280, "on: IPv6 192000 bytes (IPv4 needs Linux 6.3)"},
		"Linux 6.1, virtio": {virtio(sizes(65536, 65536, 0, 0)), only6, netif.Impossible, 0,
			"impossible: eth0 (virtio_net) supports packets of at most 65536 bytes"},
		"Linux 5.15": {with(nic(sizes(65536, 0, 0, 0)), func(i *netif.Interface) { i.TSOMaxSize, i.TSOMaxSegs = 0, 0 }), netif.Support{},
			netif.Impossible, 0, "impossible: needs Linux 5.19 for IPv6, 6.3 for IPv4"},
	} {
		t.Run(name, func(t *testing.T) {
			got := c.i.Verdict(c.support)
			if want := (netif.Verdict{State: c.state, UpTo: c.upTo, Text: c.text}); got != want {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
		})
	}
}

func TestBound(t *testing.T) {
	i := netif.Interface{Name: "bond0", TSOMaxSize: 65536, Related: []netif.Related{
		{Relation: netif.Lower, Name: "eth0", TSOMaxSize: 524280},
		{Relation: netif.Lower, Name: "eth1", TSOMaxSize: 65536},
	}}
	if size, by := i.Bound(); size != 65536 || by != "eth1" {
		t.Errorf("got %d by %s", size, by)
	}
	i.Related = nil
	if size, by := i.Bound(); size != 65536 || by != "bond0" {
		t.Errorf("got %d by %s", size, by)
	}
	if size, _ := (&netif.Interface{Name: "old0"}).Bound(); size != 0 {
		t.Errorf("got %d where the kernel does not say", size)
	}
}
