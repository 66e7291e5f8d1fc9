// SPDX-License-Identifier: Apache-2.0

package forward

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"sockeye/internal/nlattr"
)

const (
	// TunnelName is the name of the interface of the tunnel.
	TunnelName = "sockeye-fleet"
	// tunnelPort is the UDP port of VXLAN (RFC 7348).
	tunnelPort = 4789
	// TunnelMTU is that of Ethernet: packets that do not fit with the outer headers of IPv4 are sent in fragments.
	TunnelMTU = 1500
	// TunnelOverhead4 is the size of the outer headers of IPv4, UDP and VXLAN, and of the inner one of Ethernet.
	TunnelOverhead4 = 20 + 8 + 8 + 14
	// TunnelOverhead6 is the same with IPv6. The kernel sends no packets of a tunnel over IPv6 in fragments (ip6_fragment, Linux
	// 6.18).
	TunnelOverhead6 = 40 + 8 + 8 + 14
)

// OpenTunnel returns the index of the interface of the tunnel, which it creates. The programs choose the far end of each
// packet. The interface gets an IPv4 address of the services: without an address, the filter of reverse paths drops all
// packets, in the loose mode too (__fib_validate_source, net/ipv4/fib_frontend.c, Linux 6.18).
//
// The interface is up only with its program: without it, anybody could send packets to this host in the tunnel. The program of an
// interface that is up stays until Attach: it may be one of another layout, whose table is in force.
func (p *Path) OpenTunnel(services []netip.Addr) (index int, err error) {
	link, err := netlink.LinkByName(TunnelName)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		device := &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: TunnelName, MTU: TunnelMTU, HardwareAddr: net.HardwareAddr(TunnelMAC[:])},
			FlowBased: true, Port: tunnelPort, Learning: false}
		if err := netlink.LinkAdd(device); err != nil {
			return 0, fmt.Errorf("create interface %s: %w", TunnelName, err)
		}
		link, err = netlink.LinkByName(TunnelName)
	}
	if err != nil {
		return 0, fmt.Errorf("open interface %s: %w", TunnelName, err)
	}
	if link.Type() != "vxlan" {
		return 0, fmt.Errorf("interface %s is not a VXLAN interface", TunnelName)
	}
	for _, a := range services {
		if a.Is4() {
			address := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(32, 32)}, Scope: unix.RT_SCOPE_HOST}
			if err := netlink.AddrReplace(link, address); err != nil {
				return 0, fmt.Errorf("set up interface %s: %w", TunnelName, err)
			}
			break
		}
	}
	index = link.Attrs().Index
	if err := setLooseReversePath(index); err != nil {
		return 0, fmt.Errorf("set up interface %s: %w", TunnelName, err)
	}
	if link.Attrs().Flags&net.FlagUp != 0 {
		return index, nil
	}
	return index, p.attachTunnel(index)
}

// attachTunnel attaches the program of the tunnel, and then sets the interface up, or down if that fails.
func (p *Path) attachTunnel(index int) error {
	link := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
	if err := p.ensure(p.tunnelHook(index)); err != nil {
		if downErr := netlink.LinkSetDown(link); downErr != nil && !errors.Is(downErr, unix.ENODEV) {
			err = errors.Join(err, fmt.Errorf("set down interface %s: %w", TunnelName, downErr))
		}
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("set up interface %s: %w", TunnelName, err)
	}
	return nil
}

// looseReversePath is the loose mode of RFC 3704 (net.ipv4.conf.*.rp_filter). The larger one of this value and that of all
// interfaces applies.
const looseReversePath = 2

// tunnelIndex returns the index of the interface of the tunnel, or 0 if there is none.
func tunnelIndex() (int, error) {
	link, err := netlink.LinkByName(TunnelName)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing || err == nil && link.Type() != "vxlan" {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("find interface %s: %w", TunnelName, err)
	}
	return link.Attrs().Index, nil
}

// setLooseReversePath lets an interface receive packets of devices, whose route does not lead through the interface. The systemd
// unit of the agent may not write sysctls, so the request is one of rtnetlink(7): inet_set_link_af of the kernel.
func setLooseReversePath(index int) error {
	const (
		inetConf = 1 // IFLA_INET_CONF of include/uapi/linux/if_link.h
		rpFilter = 8 // IPV4_DEVCONF_RP_FILTER of include/uapi/linux/ip.h
	)
	value := nlattr.Append(nil, rpFilter, binary.NativeEndian.AppendUint32(nil, looseReversePath))
	request := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	message := nl.NewIfInfomsg(unix.AF_UNSPEC)
	message.Index = int32(index)
	request.AddData(message)
	request.AddData(nl.NewRtAttr(unix.IFLA_AF_SPEC, nlattr.Append(nil, unix.AF_INET, nlattr.Append(nil, inetConf, value))))
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// removeTunnel removes the interface of the tunnel, and returns what it has removed.
func removeTunnel() ([]string, error) {
	link, err := netlink.LinkByName(TunnelName)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing || err == nil && link.Type() != "vxlan" {
		return nil, nil
	}
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil {
		return nil, fmt.Errorf("remove interface %s: %w", TunnelName, err)
	}
	return []string{"interface " + TunnelName}, nil
}

// VNI returns the virtual network of a fleet: 24 bits of a hash of its nonce, which only its hosts know. Every bit of the nonce counts: that of
// a file of hosts may be small.
func VNI(nonce uint64) uint32 {
	sum := sha256.Sum256(binary.BigEndian.AppendUint64(nil, nonce))
	return max(1, binary.BigEndian.Uint32(sum[:])>>8)
}
