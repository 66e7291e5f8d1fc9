// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"net"
	"net/netip"
	"strconv"
	"strings"

	"sockeye/internal/gateway/access"
)

// maxNameServers is the number of name servers of /etc/resolv.conf that resolvers use (MAXNS in resolv.h).
const maxNameServers = 3

// dnsPort is the port of DNS.
const dnsPort = 53

// NameServers parses a host's resolv.conf(5) and returns its name servers, and the guest's resolv.conf with their aliases. Like the C
// library, NameServers assumes 127.0.0.1:53 if there is none. There must be maxNameServers aliases.
func NameServers(conf string, aliases []netip.Addr) (list []access.NameServer, text string) {
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
			list = append(list, access.NameServer{Alias: aliases[len(list)], Server: netip.AddrPortFrom(numbered(a.Unmap()), dnsPort)})
		case "search", "domain", "options", "sortlist":
			rest.WriteString(strings.Join(fields, " ") + "\n")
		}
	}
	if len(list) == 0 {
		list = []access.NameServer{{Alias: aliases[0], Server: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), dnsPort)}}
	}
	for _, n := range list {
		text += "nameserver " + n.Alias.String() + "\n"
	}
	return list, text + rest.String()
}

// Resolvers returns all name servers in a resolv.conf(5).
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

// numbered replaces a zone by the index of the interface, because the sandbox does not allow looking up names.
func numbered(a netip.Addr) netip.Addr {
	if a.Zone() == "" {
		return a
	}
	if dev, err := net.InterfaceByName(a.Zone()); err == nil {
		return a.WithZone(strconv.Itoa(dev.Index))
	}
	return a
}
