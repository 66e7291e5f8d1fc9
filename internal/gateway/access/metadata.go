// SPDX-License-Identifier: Apache-2.0

package access

import "net/netip"

// metadata contains the addresses of cloud metadata services, which give credentials and user data to any program of a
// host. The addresses are public.
var metadata = map[netip.Addr]bool{
	netip.MustParseAddr("169.254.169.254"):    true, // AWS, Azure, Google, Oracle, OpenStack and most others
	netip.MustParseAddr("fd00:ec2::254"):      true, // AWS
	netip.MustParseAddr("169.254.170.2"):      true, // AWS: ECS tasks
	netip.MustParseAddr("169.254.170.23"):     true, // AWS: EKS pods
	netip.MustParseAddr("fd00:ec2::23"):       true,
	netip.MustParseAddr("168.63.129.16"):      true, // Azure: WireServer
	netip.MustParseAddr("fd20:ce::254"):       true, // Google
	netip.MustParseAddr("100.100.100.200"):    true, // Alibaba
	netip.MustParseAddr("192.0.0.192"):        true, // Oracle: the older address
	netip.MustParseAddr("fd00:c1::a9fe:a9fe"): true, // Oracle
	netip.MustParseAddr("169.254.0.23"):       true, // Tencent
	netip.MustParseAddr("169.254.42.42"):      true, // Scaleway
	netip.MustParseAddr("fd00:42::42"):        true,
	netip.MustParseAddr("fd00:a9fe:a9fe::1"):  true, // Akamai (Linode)
}

// Metadata returns whether an address reaches a cloud's metadata service, directly or through an IPv6 transition mechanism.
func Metadata(a netip.Addr) bool { return anyForm(a, func(a netip.Addr) bool { return metadata[a] }) }

// anyForm returns whether a condition holds for an address, or for the IPv4 address embedded in an IPv6 address.
func anyForm(a netip.Addr, holds func(netip.Addr) bool) bool {
	a = a.WithZone("").Unmap()
	if holds(a) {
		return true
	}
	if a.Is4() {
		return false
	}
	b := a.As16()
	for _, t := range translated {
		if t.prefix.Contains(a) && holds(netip.AddrFrom4([4]byte{b[t.at[0]], b[t.at[1]], b[t.at[2]], b[t.at[3]]})) {
			return true
		}
	}
	return false
}

// translated contains the IPv6 prefixes with an embedded IPv4 address, and the positions of its bytes. Network-specific
// NAT64 prefixes are unknown.
var translated = []struct {
	prefix netip.Prefix
	at     [4]int
}{
	{netip.MustParsePrefix("64:ff9b::/96"), [4]int{12, 13, 14, 15}}, // NAT64 (RFC 6052)
	// NAT64 for local use (RFC 8215), with a prefix length that the network chooses. Byte 8 is 0 (RFC 6052, section 2.2).
	{netip.MustParsePrefix("64:ff9b:1::/48"), [4]int{6, 7, 9, 10}},
	{netip.MustParsePrefix("64:ff9b:1::/48"), [4]int{7, 9, 10, 11}},
	{netip.MustParsePrefix("64:ff9b:1::/48"), [4]int{9, 10, 11, 12}},
	{netip.MustParsePrefix("64:ff9b:1::/48"), [4]int{12, 13, 14, 15}},
	{netip.MustParsePrefix("2002::/16"), [4]int{2, 3, 4, 5}},           // 6to4 (RFC 3056)
	{netip.MustParsePrefix("::/96"), [4]int{12, 13, 14, 15}},           // IPv4-compatible (RFC 4291, section 2.5.5.1)
	{netip.MustParsePrefix("::ffff:0:0:0/96"), [4]int{12, 13, 14, 15}}, // IPv4-translated (RFC 2765)
}
