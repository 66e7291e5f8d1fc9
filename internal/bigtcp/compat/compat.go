// SPDX-License-Identifier: Apache-2.0

// Package compat finds known incompatibilities of a host with packets above 64 KB:
// packet filters, shapers, captures, tunnels, drivers and defects of kernel versions.
package compat

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/linux"
)

// Incompatibility is a setting or a program of the host that fails with large packets,
// degrades them, or reports them wrongly.
type Incompatibility struct {
	// Name is a fixed identifier: length_filter, header_filter, queue, shaper, ipsec,
	// capture, ipv4_alone, ipv6_forwarding, small_frags, driver, tunnel, offload_off,
	// iptables_legacy.
	Name   string `json:"name"`
	Detail string `json:"detail"` // the finding and its consequence
	Hint   string `json:"hint,omitempty"`
}

// The names of incompatibilities.
const (
	lengthFilter   = "length_filter" // packet filters that match on the length
	headerFilter   = "header_filter" // packet filters that match on the next header of IPv6
	queueFilter    = "queue"         // packet filters that queue packets to programs
	capture        = "capture"
	ipsec          = "ipsec"
	smallFrags     = "small_frags"
	ipv6Forwarding = "ipv6_forwarding"
	ipv4Alone      = "ipv4_alone"
	driver         = "driver"
	offloadOff     = "offload_off"
	tunnel         = "tunnel"
	shaperQdisc    = "shaper"
	iptablesLegacy = "iptables_legacy"
)

// maxListed bounds the rules, processes and interfaces that an incompatibility names.
const maxListed = 5

// Find returns the known incompatibilities of a namespace and of its interfaces, the
// latter by name. Find changes nothing. It avoids requests that load kernel modules.
// ifaces must be all interfaces of the namespace, because tunnels are reported for
// their lower interfaces. A missing permission is reported as an incompatibility. Other
// failures are returned as an error together with the results of the remaining checks.
func Find(n *netif.Namespace, ifaces []netif.Interface, s netif.Support) (host []Incompatibility, byInterface map[string][]Incompatibility, err error) {
	kernel, err := linux.Running()
	if err != nil {
		return nil, nil, err
	}
	var failed []error
	found := func(t []Incompatibility, err error) {
		host = append(host, t...)
		failed = append(failed, err)
	}
	found(checkFilters(n, kernel))
	captures, err := captures(n)
	found(checkCaptures(captures[0], kernel), err)
	shapers, err := shapers(n)
	found(nil, err)
	found(checkIPsec(n))
	found(checkFragments(ifaces))
	found(checkForwarding(n, ifaces, kernel))
	byInterface = map[string][]Incompatibility{}
	tunnels := tunnelsByLower(ifaces, kernel)
	for k := range ifaces {
		i := &ifaces[k]
		ofInterface := slices.Concat(
			checkCaptures(captures[i.Index], kernel),
			checkIPv4Alone(i, s, kernel, n.Path()),
			checkDriver(i),
			checkOffloads(i),
			checkTunnels(i, tunnels[i.Index], kernel),
			checkShapers(i, shapers[i.Index]),
		)
		if len(ofInterface) > 0 {
			byInterface[i.Name] = ofInterface
		}
	}
	return host, byInterface, errors.Join(failed...)
}

// joinFirst joins the first maxListed words and counts the others.
func joinFirst(words []string, separator string) string {
	if len(words) <= maxListed {
		return strings.Join(words, separator)
	}
	return fmt.Sprintf("%s and %d more", strings.Join(words[:maxListed], separator), len(words)-maxListed)
}
