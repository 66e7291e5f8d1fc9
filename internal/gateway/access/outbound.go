// SPDX-License-Identifier: Apache-2.0

// Package access defines which destinations a guest may reach, and which of its ports are published.
package access

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// Outbound describes the destinations to which the guest may open connections and send datagrams.
type Outbound struct {
	// All allows all destinations except Metadata and Resolvers. Without All, only Rules and DNS allow a destination. Metadata and
	// Resolvers always need a rule with exactly the address (a prefix of full length).
	All   bool
	Rules []Rule
	// DNS are the host's name servers, which are always allowed.
	DNS []NameServer
	// Resolvers are the host's name servers whose DNS ports are closed.
	Resolvers []netip.Addr
	// Host are the addresses that stand for the host's loopback address of their family. They need a rule with exactly the address.
	Host []netip.Addr
}

// NameServer is a name server of the host with its alias inside. The guest cannot reach the server's own address if
// that is a loopback address or an address of the guest.
type NameServer struct {
	Alias  netip.Addr
	Server netip.AddrPort
}

// Rule allows the ports First to Last of a prefix.
type Rule struct {
	Prefix      netip.Prefix
	Protocol    uint8 // unix.IPPROTO_*; 0: any
	First, Last uint16
}

// Ports of name servers.
const (
	DNSPort    = 53
	dnsTLSPort = 853 // over TLS (RFC 7858) and QUIC (RFC 9250)
)

// Allowed returns whether the guest may send to an address. For ICMP the port is 0.
func (o *Outbound) Allowed(protocol uint8, to netip.AddrPort) bool {
	a := to.Addr()
	if n := o.NameServer(a); n != nil {
		return to.Port() == DNSPort && (protocol == unix.IPPROTO_TCP || protocol == unix.IPPROTO_UDP)
	}
	if forbidden(a) {
		return false
	}
	echo := protocol == unix.IPPROTO_ICMP || protocol == unix.IPPROTO_ICMPV6
	if !echo && to.Port() == 0 {
		return false
	}
	host, named := slices.Contains(o.Host, a), o.Named(to)
	if o.All && !host && !named {
		return true
	}
	for _, r := range o.Rules {
		if host && echo || (host || named) && !r.Prefix.IsSingleIP() {
			continue
		}
		if r.Prefix.Contains(a) && (r.Protocol == 0 || r.Protocol == protocol) && r.First <= to.Port() && to.Port() <= r.Last {
			return true
		}
	}
	return false
}

// Named returns whether only a rule with exactly the address allows a destination.
func (o *Outbound) Named(to netip.AddrPort) bool { return Metadata(to.Addr()) || o.Resolver(to) }

// Resolver returns whether a destination is a DNS port of one of Resolvers, also embedded in an IPv6 address.
func (o *Outbound) Resolver(to netip.AddrPort) bool {
	if len(o.Resolvers) == 0 || to.Port() != DNSPort && to.Port() != dnsTLSPort {
		return false
	}
	return anyForm(to.Addr(), func(a netip.Addr) bool { return slices.Contains(o.Resolvers, a) })
}

// None returns whether no destination is allowed.
func (o *Outbound) None() bool { return !o.All && len(o.Rules) == 0 && len(o.DNS) == 0 }

// maxPorts is the maximum number of ports with landlock rules.
const maxPorts = 1024

// TCPPorts returns the TCP ports to which the guest may connect; false if they are too many to list.
func (o *Outbound) TCPPorts() (list []uint16, few bool) {
	if o.All {
		return nil, false
	}
	if len(o.DNS) > 0 {
		list = append(list, DNSPort)
	}
	for _, r := range o.Rules {
		if r.Protocol != 0 && r.Protocol != unix.IPPROTO_TCP {
			continue
		}
		if int(r.Last-r.First)+len(list) >= maxPorts {
			return nil, false
		}
		for n := range int(r.Last-r.First) + 1 {
			list = append(list, r.First+uint16(n))
		}
	}
	return list, true
}

// Translate returns the destination on the host's side, which may be of another address family.
func (o *Outbound) Translate(to netip.AddrPort) netip.AddrPort {
	if n := o.NameServer(to.Addr()); n != nil {
		return n.Server
	}
	switch {
	case !slices.Contains(o.Host, to.Addr()):
		return to
	case to.Addr().Is4():
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), to.Port())
	}
	return netip.AddrPortFrom(netip.IPv6Loopback(), to.Port())
}

// NameServer returns the name server that the guest reaches at an address; nil for none.
func (o *Outbound) NameServer(a netip.Addr) *NameServer {
	for i := range o.DNS {
		if o.DNS[i].Alias == a {
			return &o.DNS[i]
		}
	}
	return nil
}

// forbidden returns whether no rule can allow an address.
func forbidden(a netip.Addr) bool {
	return a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() || a.Is4In6() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}) ||
		a.Is6() && a.IsLinkLocalUnicast()
}
