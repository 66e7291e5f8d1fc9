// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"fmt"
	"net/netip"

	"sockeye/lab"
)

func traceHost(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 83, 0, byte(1 + i)}) }

// connectedHosts creates two namespaces with a link.
func connectedHosts(l *lab.Lab) (hosts [2]*lab.Namespace, err error) {
	for i := range hosts {
		if hosts[i], err = l.Namespace(fmt.Sprintf("host-%d", i)); err != nil {
			return hosts, err
		}
		if err := hosts[i].Sysctl("ipv4.tcp_no_metrics_save", "1"); err != nil {
			return hosts, err
		}
	}
	end := func(i int) lab.VethEnd {
		return lab.VethEnd{Namespace: hosts[i], Name: "eth0", Addresses: []netip.Prefix{netip.PrefixFrom(traceHost(i), 24)}}
	}
	return hosts, lab.ConnectVeth(end(0), end(1))
}
