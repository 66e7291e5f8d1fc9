// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"net"
	"net/netip"
	"strconv"
	"strings"

	"sockeye/internal/gateway"
)

// maxNameServers is how many of /etc/resolv.conf count (MAXNS in resolv.h).
const maxNameServers = 3

// dnsPort is where name servers are asked.
const dnsPort = 53

// NameServers reads the text of a host's resolv.conf(5): its name servers, and the text
// for the guest, which has the aliases in their place. Where it names none, the host's own port
// 53 counts, as for the C library. There must be three aliases.
func NameServers(conf string, aliases []netip.Addr) (list []gateway.NameServer, text string) {
	var rest strings.Builder
	for line := range strings.Lines(conf) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		switch fields[0] {
		case "nameserver":
			a, err := netip.ParseAddr(fields[1])
			if err != nil || len(list) == maxNameServers {
				continue
			}
			list = append(list, gateway.NameServer{Alias: aliases[len(list)], Server: netip.AddrPortFrom(numbered(a.Unmap()), dnsPort)})
		case "search", "domain", "options", "sortlist":
			rest.WriteString(strings.Join(fields, " ") + "\n")
		}
	}
	if len(list) == 0 {
		list = []gateway.NameServer{{Alias: aliases[0], Server: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), dnsPort)}}
	}
	for _, n := range list {
		text += "nameserver " + n.Alias.String() + "\n"
	}
	return list, text + rest.String()
}

// Resolvers reads all name servers in the text of a resolv.conf(5).
func Resolvers(conf string) (list []netip.Addr) {
	for line := range strings.Lines(conf) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(fields[1]); err == nil {
			list = append(list, a.WithZone("").Unmap())
		}
	}
	return list
}

// numbered has the zone of an address be the number of its interface, which stays known
// when names cannot be looked up any more.
func numbered(a netip.Addr) netip.Addr {
	if a.Zone() == "" {
		return a
	}
	if dev, err := net.InterfaceByName(a.Zone()); err == nil {
		return a.WithZone(strconv.Itoa(dev.Index))
	}
	return a
}
