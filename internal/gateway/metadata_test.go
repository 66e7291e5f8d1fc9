// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
)

// TestMetadataAddresses checks that neither the default nor a prefix allows the metadata service of a cloud, in any
// notation of its address, and that a rule with exactly the address does.
func TestMetadataAddresses(t *testing.T) {
	everything := []access.Rule{{Prefix: netip.MustParsePrefix("0.0.0.0/0"), Last: 65535}, {Prefix: netip.MustParsePrefix("::/0"), Last: 65535}}
	for _, text := range []string{
		"169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200", "168.63.129.16", "192.0.0.192", "169.254.0.23", "169.254.42.42",
		"fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "fd00:c1::a9fe:a9fe", "fd00:42::42", "fd00:a9fe:a9fe::1",
		"64:ff9b::169.254.169.254", "64:ff9b:1::169.254.169.254", "64:ff9b:1:a9fe:a9:fe00::", "64:ff9b:1:fa9:fe:a9fe::", "64:ff9b:1::a9:fea9:fe00:0",
		"2002:a9fe:a9fe::1", "::169.254.169.254", "::ffff:0:169.254.169.254", "64:ff9b::100.100.100.200",
	} {
		a := netip.MustParseAddr(text)
		near := netip.PrefixFrom(a, a.BitLen()-1)
		for name, o := range map[string]access.Outbound{
			"all": {All: true}, "everything": {Rules: everything}, "nearly": {All: true, Rules: []access.Rule{{Prefix: near.Masked(), Last: 65535}}},
			"its other form": {Rules: append(everything, access.Rule{Prefix: netip.MustParsePrefix("169.254.169.255/32"), Last: 65535})},
		} {
			for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6} {
				if o.Allowed(protocol, netip.AddrPortFrom(a, 80)) {
					t.Errorf("%s: protocol %d to %v is allowed", name, protocol, a)
				}
			}
		}
		r, err := access.ParseRule("[" + text + "]:80")
		if err != nil {
			t.Fatal(err)
		}
		o := access.Outbound{Rules: append(everything, r)}
		if !o.Allowed(unix.IPPROTO_TCP, netip.AddrPortFrom(a, 80)) || o.Allowed(unix.IPPROTO_TCP, netip.AddrPortFrom(a, 81)) {
			t.Errorf("rule with %v and port 80: port 80 allowed: %v, port 81: %v", a, o.Allowed(unix.IPPROTO_TCP, netip.AddrPortFrom(a, 80)), o.Allowed(unix.IPPROTO_TCP, netip.AddrPortFrom(a, 81)))
		}
	}
	// IPv4-mapped addresses are never allowed.
	if (&access.Outbound{All: true}).Allowed(unix.IPPROTO_TCP, netip.MustParseAddrPort("[::ffff:169.254.169.254]:80")) {
		t.Error("the IPv4-mapped address is allowed")
	}
	for _, text := range []string{"169.254.169.253", "10.0.0.1", "64:ff9b::10.0.0.1", "2001:db8::a9fe:a9fe", "fd00:ec2::1"} {
		if !(&access.Outbound{All: true}).Allowed(unix.IPPROTO_TCP, netip.AddrPortFrom(netip.MustParseAddr(text), 80)) {
			t.Errorf("%s is not allowed", text)
		}
	}
}

// TestResolversAreNamed checks that with --no-dns, neither the default nor a prefix allows the DNS ports of the host's
// name servers.
func TestResolversAreNamed(t *testing.T) {
	resolvers := []netip.Addr{
		netip.MustParseAddr("192.0.2.53"), netip.MustParseAddr("2001:db8::53"), netip.MustParseAddr("fe80::1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.4"),
	}
	everything := []access.Rule{{Prefix: netip.MustParsePrefix("0.0.0.0/0"), Last: 65535}, {Prefix: netip.MustParsePrefix("::/0"), Last: 65535}}
	itself := append([]access.Rule{{Prefix: netip.MustParsePrefix("192.0.2.53/32"), Last: 53}, {Prefix: netip.MustParsePrefix("2001:db8::53/128"), Last: 53}}, everything...)
	for _, test := range []struct {
		to      string
		allowed [3]bool // by the default, by prefixes, by a rule with the address and port 53
	}{
		{"192.0.2.53:53", [3]bool{false, false, true}},
		{"192.0.2.53:853", [3]bool{}},
		{"192.0.2.53:443", [3]bool{true, true, true}},
		{"192.0.2.4:53", [3]bool{}},
		{"[2001:db8::53]:53", [3]bool{false, false, true}},
		{"[2001:db8::53]:853", [3]bool{}},
		{"[64:ff9b::192.0.2.53]:53", [3]bool{}},
		{"192.0.2.54:53", [3]bool{true, true, true}},
	} {
		to := netip.MustParseAddrPort(test.to)
		for n, o := range []access.Outbound{{All: true}, {Rules: everything}, {Rules: itself}} {
			o.Resolvers = resolvers
			for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
				if got := o.Allowed(protocol, to); got != test.allowed[n] {
					t.Errorf("%v, protocol %d, outbound %d: %v, want %v", to, protocol, n, got, test.allowed[n])
				}
			}
		}
	}
}

// TestMetadataForgedPeer checks that a datagram with the forged source address of a metadata service does not permit
// replies.
func TestMetadataForgedPeer(t *testing.T) {
	own(t, "169.254.169.254/32")
	f, port := forwardUDP(t)
	j := join(t, 1500, Config{Forwards: []Forward{f}})
	server := j.inside(func() (*net.UDPConn, error) { return net.ListenUDP("udp", &net.UDPAddr{Port: innerPort}) })
	go echoTo(server)
	for from, answered := range map[string]bool{"169.254.169.254": false, host4.String(): true} {
		c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(from)}, net.UDPAddrFromAddrPort(netip.AddrPortFrom(host4, port)))
		if err != nil {
			t.Fatal(err)
		}
		j.timed(c)
		if _, err := c.Write([]byte("?")); err != nil {
			t.Fatal(err)
		}
		if !answered {
			if err := c.SetReadDeadline(time.Now().Add(300 * time.Millisecond)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := c.Read(make([]byte, 10)); (err == nil) != answered {
			t.Errorf("reply to a datagram from %s: %v, want a reply: %v", from, err, answered)
		}
	}
}
