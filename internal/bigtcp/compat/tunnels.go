// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"fmt"
	"slices"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/linux"
)

// tunnelsByLower returns the names of the tunnels that do not encapsulate large packets,
// by the index of their lower interfaces.
func tunnelsByLower(ifaces []netif.Interface, kernel linux.Version) map[int][]string {
	tunnels := map[int][]string{}
	for _, i := range ifaces {
		if !netif.LegacyTunnel(&i, kernel) {
			continue
		}
		for _, r := range i.Related {
			if r.Relation == netif.Lower && r.Netns == "" && !slices.Contains(tunnels[r.Index], i.Name) {
				tunnels[r.Index] = append(tunnels[r.Index], i.Name)
			}
		}
	}
	return tunnels
}

// checkTunnels reports tunnels, and lower interfaces of tunnels.
func checkTunnels(i *netif.Interface, tunnels []string, kernel linux.Version) []Incompatibility {
	var found []Incompatibility
	switch {
	case !netif.LegacyTunnel(i, kernel):
	case i.Sizes.GSO > netif.Legacy || i.Sizes.GSOIPv4 > netif.Legacy:
		hint := fmt.Sprintf("ip link set %s gso_max_size %d", i.Name, netif.Legacy)
		if i.Sizes.GSO <= netif.Legacy {
			// The kernel resets this size only if gso_max_size changes.
			hint = fmt.Sprintf("ip link set %s gso_ipv4_max_size %d", i.Name, netif.Legacy)
		}
		found = append(found, Incompatibility{
			Name: tunnel,
			Detail: fmt.Sprintf("%s has sizes above %d bytes: the outer headers have lengths of 16 bits, which are truncated for larger packets; "+
				"the receiver drops these, so that connections can be many times slower", i.Kind, netif.Legacy),
			Hint: hint,
		})
	default:
		found = append(found, Incompatibility{
			Name:   tunnel,
			Detail: fmt.Sprintf("%s encapsulates packets of at most %d bytes", i.Kind, netif.Legacy),
			Hint:   "do not raise its sizes, even where the kernel accepts larger ones, as for VXLAN before Linux 7.3",
		})
	}
	if len(tunnels) > 0 {
		found = append(found, Incompatibility{
			Name:   tunnel,
			Detail: fmt.Sprintf("it is the lower interface of tunnels (%s), which encapsulate packets of at most %d bytes", joinFirst(tunnels, ", "), netif.Legacy),
			Hint:   "connections outside the tunnels have large packets",
		})
	}
	return found
}
