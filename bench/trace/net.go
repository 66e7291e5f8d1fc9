// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/lab"
)

func traceHost(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 83, 0, byte(1 + i)}) }

// connectedHosts creates two namespaces with a link. A packet is received on the CPU that sent it.
func connectedHosts(l *lab.Lab) (hosts [2]*lab.Namespace, err error) {
	for i := range hosts {
		if hosts[i], err = l.Namespace(fmt.Sprintf("host-%d", i)); err != nil {
			return hosts, err
		}
		if err := hosts[i].Sysctl("ipv4.tcp_no_metrics_save", "1"); err != nil {
			return hosts, err
		}
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "eth0"
	fd, err := unix.Open(hosts[1].Path(), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return hosts, fmt.Errorf("connect hosts: %w", err)
	}
	defer unix.Close(fd)
	if err := hosts[0].Netlink().LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: attrs.Name, PeerNamespace: netlink.NsFd(fd)}); err != nil {
		return hosts, fmt.Errorf("connect hosts: make veth: %w", err)
	}
	for i, host := range hosts {
		dev, err := host.Netlink().LinkByName(attrs.Name)
		if err == nil {
			err = host.Netlink().LinkSetUp(dev)
		}
		if err != nil {
			return hosts, fmt.Errorf("connect hosts: set link up: %w", err)
		}
		if err := host.AddAddress(attrs.Name, netip.PrefixFrom(traceHost(i), 24)); err != nil {
			return hosts, err
		}
	}
	return hosts, nil
}
