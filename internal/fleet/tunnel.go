// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"

	"sockeye/internal/fleet/forward"
)

const (
	// tunnelName is the name of the interface of the tunnel.
	tunnelName = "sockeye-fleet"
	// tunnelPort is the UDP port of VXLAN (RFC 7348).
	tunnelPort = 4789
	// tunnelMTU is that of Ethernet: packets that do not fit with the outer headers are sent in fragments.
	tunnelMTU = 1500
)

// openTunnel returns the index of the interface of the tunnel, which it creates. The programs choose the far end of each
// packet.
func openTunnel() (index int, err error) {
	link, err := netlink.LinkByName(tunnelName)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		device := &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: tunnelName, MTU: tunnelMTU, HardwareAddr: net.HardwareAddr(forward.TunnelMAC[:])},
			FlowBased: true, Port: tunnelPort, Learning: false}
		if err := netlink.LinkAdd(device); err != nil {
			return 0, fmt.Errorf("create interface %s: %w", tunnelName, err)
		}
		link, err = netlink.LinkByName(tunnelName)
	}
	if err != nil {
		return 0, fmt.Errorf("open interface %s: %w", tunnelName, err)
	}
	if link.Type() != "vxlan" {
		return 0, fmt.Errorf("interface %s is not a VXLAN interface", tunnelName)
	}
	// The kernel would look for the route to the device, which does not lead through the tunnel, and drop the packet. 2 is the loose
	// mode of RFC 3704: the larger one of this value and that of all interfaces applies.
	err = os.WriteFile("/proc/sys/net/ipv4/conf/"+tunnelName+"/rp_filter", []byte("2"), 0)
	if err := errors.Join(err, netlink.LinkSetUp(link)); err != nil {
		return 0, fmt.Errorf("set up interface %s: %w", tunnelName, err)
	}
	return link.Attrs().Index, nil
}

// removeTunnel removes the interface of the tunnel, if there is one.
func removeTunnel() error {
	_, err := revertTunnel()
	return err
}

// revertTunnel removes the interface of the tunnel, and returns its name if there was one.
func revertTunnel() ([]string, error) {
	link, err := netlink.LinkByName(tunnelName)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing || err == nil && link.Type() != "vxlan" {
		return nil, nil
	}
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil {
		return nil, fmt.Errorf("remove interface %s: %w", tunnelName, err)
	}
	return []string{"interface " + tunnelName}, nil
}

// vniOf returns the virtual network of a fleet: 24 bits of its nonce, which only its hosts know.
func vniOf(nonce uint64) uint32 {
	vni := uint32(nonce>>40) & 0xffffff
	if vni == 0 {
		return 1
	}
	return vni
}
