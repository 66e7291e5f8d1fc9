// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// AwaitLocal waits until packets to an address of the network namespace of a netlink handle are delivered, at most for a
// limit. The kernel adds the local route of an IPv6 address in a work queue (addrconf_dad_begin, net/ipv6/addrconf.c, Linux
// 6.18), also without duplicate address detection: on a busy host after tens of milliseconds, in which its packets are
// dropped, although sockets can bind to it. The interface must be up and have a carrier.
func AwaitLocal(nl *netlink.Handle, address netip.Addr, limit time.Duration) error {
	for end := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
		routes, err := nl.RouteGet(address.AsSlice())
		if err == nil && len(routes) == 1 && routes[0].Type == unix.RTN_LOCAL {
			return nil
		}
		if time.Now().After(end) {
			return errors.Join(fmt.Errorf("the kernel has added no local route for %v within %v, but %v", address, limit, routes), err)
		}
	}
}
