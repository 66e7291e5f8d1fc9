// SPDX-License-Identifier: Apache-2.0

// Package tun creates a TUN interface, through which a program reads and writes the IP packets of a network
// namespace.
package tun

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/netns"
)

// Interface is a TUN interface.
type Interface struct {
	Name string
	MTU  int // 1280 to 65520 bytes
	// Addresses are the addresses of the guest, at most one per family.
	Addresses []netip.Addr
}

// DeviceError is the error of opening /dev/net/tun. All other errors of Open are about the interface.
type DeviceError struct{ Err error }

func (e *DeviceError) Error() string { return fmt.Sprintf("open /dev/net/tun: %v", e.Err) }

// Unwrap returns the error of open(2).
func (e *DeviceError) Unwrap() error { return e.Err }

// Open creates the interface in the network namespace of the calling thread, brings the interface and lo up, and adds
// a default route for each address family of Addresses. The descriptor does not block and has IFF_NO_PI and
// IFF_VNET_HDR set: each packet starts with a struct virtio_net_hdr. Open needs CAP_NET_ADMIN in the user namespace
// of the network namespace.
func Open(i Interface) (_ int, err error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1, &DeviceError{err}
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	request, err := unix.NewIfreq(i.Name)
	if err != nil {
		return -1, fmt.Errorf("name interface %q: %w", i.Name, err)
	}
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return -1, fmt.Errorf("make interface %s: %w", i.Name, err)
	}
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, unix.TUN_F_CSUM|unix.TUN_F_TSO4|unix.TUN_F_TSO6); err != nil {
		return -1, fmt.Errorf("set offloads of %s: %w", i.Name, err)
	}
	if err := i.configure(); err != nil {
		return -1, fmt.Errorf("set up interface %s: %w", i.Name, err)
	}
	return fd, nil
}

// queueLength is the maximum number of packets that wait for the gateway. It exceeds the windows of several hundred
// connections. With a shorter queue, the guest's kernel would drop packets within the window.
const queueLength = 10000

// routeTime is the longest time for which Open waits for the local route of an IPv6 address: a second is too little for a host with a load of 30
// on two CPUs.
const routeTime = 10 * time.Second

func (i Interface) configure() error {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer nl.Close()
	lo, err := nl.LinkByName("lo")
	if err == nil {
		err = nl.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	dev, err := nl.LinkByName(i.Name)
	if err != nil {
		return err
	}
	// No link-local address: the gateway is the only other host on the link.
	mode := "/proc/sys/net/ipv6/conf/" + i.Name + "/addr_gen_mode"
	if err := os.WriteFile(mode, []byte("1"), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := errors.Join(nl.LinkSetMTU(dev, i.MTU), nl.LinkSetTxQLen(dev, queueLength), nl.LinkSetUp(dev)); err != nil {
		return err
	}
	for _, a := range i.Addresses {
		err := i.address(nl, dev, a)
		switch {
		case err == nil:
		case a.Is6() && (errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.EAFNOSUPPORT)):
			// If the host does not support IPv6, the guest has no IPv6 addresses.
		default:
			return err
		}
	}
	return nil
}

// address adds an address to the interface, and a default route that prefers it.
func (i Interface) address(nl *netlink.Handle, dev netlink.Link, a netip.Addr) error {
	address := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
	everything := &net.IPNet{IP: make(net.IP, a.BitLen()/8), Mask: net.CIDRMask(0, a.BitLen())}
	scope := netlink.Scope(unix.RT_SCOPE_LINK)
	if a.Is6() {
		address.Flags, scope = unix.IFA_F_NODAD, unix.RT_SCOPE_UNIVERSE
	}
	if err := nl.AddrAdd(dev, address); err != nil {
		return fmt.Errorf("add address %v: %w", a, err)
	}
	if a.Is6() {
		// The first answers to the program would be dropped. TCP would send them again after a second.
		_ = netns.AwaitLocal(nl, a, routeTime)
	}
	route := &netlink.Route{LinkIndex: dev.Attrs().Index, Dst: everything, Src: a.AsSlice(), Scope: scope}
	if err := nl.RouteAdd(route); err != nil {
		return fmt.Errorf("add default route: %w", err)
	}
	return nil
}
