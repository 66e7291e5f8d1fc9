// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/doctor"
	"sockeye/internal/fault"
)

// Examine reports the IP families for which the kernel supports BIG TCP.
func Examine(d *doctor.Report) {
	const ipv6, ipv4 = "BIG TCP for IPv6", "BIG TCP for IPv4"
	n, err := netif.OpenNamespace("")
	if err != nil {
		d.Add("kernel", ipv6, doctor.Warning, "not known: "+err.Error(), fault.Hint(err))
		return
	}
	defer n.Close()
	support := n.Support()
	for _, family := range []struct {
		check     string
		supported bool
		since     string
	}{{ipv6, support.IPv6, "5.19"}, {ipv4, support.IPv4, "6.3"}} {
		if family.supported {
			d.Add("kernel", family.check, doctor.OK, "", "")
		} else {
			d.Add("kernel", family.check, doctor.Note, "bigtcp, for packets above 64 KiB", "needs Linux "+family.since)
		}
	}
}
