// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

var aliases = []netip.Addr{
	netip.MustParseAddr("169.254.53.53"), netip.MustParseAddr("169.254.53.54"), netip.MustParseAddr("169.254.53.55"),
}

func TestNameServers(t *testing.T) {
	for _, test := range []struct{ conf, servers, text string }{
		{"", "127.0.0.1:53", "nameserver 169.254.53.53\n"},
		{"# nameserver 1.2.3.4\n;nameserver 1.2.3.4\nnameserver\nnameserver x\n", "127.0.0.1:53", "nameserver 169.254.53.53\n"},
		{"nameserver 127.0.0.53\noptions edns0 trust-ad\nsearch a.example b.example\n", "127.0.0.53:53",
			"nameserver 169.254.53.53\noptions edns0 trust-ad\nsearch a.example b.example\n"},
		{"domain x.example\nnameserver 10.0.0.1\nnameserver 2001:db8::1\n  nameserver  ::ffff:10.0.0.3 # third\nnameserver 10.0.0.4",
			"10.0.0.1:53 [2001:db8::1]:53 10.0.0.3:53",
			"nameserver 169.254.53.53\nnameserver 169.254.53.54\nnameserver 169.254.53.55\ndomain x.example\n"},
		{"nameserver fe80::1%lo", "[fe80::1%1]:53", "nameserver 169.254.53.53\n"},
		{"nameserver fe80::1%nosuch0", "[fe80::1%nosuch0]:53", "nameserver 169.254.53.53\n"},
	} {
		list, text := NameServers(test.conf, aliases)
		var servers []string
		for i, n := range list {
			servers = append(servers, n.Server.String())
			if n.Alias != aliases[i] {
				t.Errorf("%q: %v", test.conf, list)
			}
		}
		if got := strings.Join(servers, " "); got != test.servers || text != test.text {
			t.Errorf("%q: %s, %q, want %s, %q", test.conf, got, text, test.servers, test.text)
		}
	}
}

func FuzzNameServers(f *testing.F) {
	f.Add("nameserver 10.0.0.1\nsearch example.net\noptions use-vc\nnameserver fe80::1%lo\n")
	f.Fuzz(func(t *testing.T, conf string) {
		list, text := NameServers(conf, aliases)
		if len(list) == 0 || len(list) > len(aliases) {
			t.Errorf("%q: %v", conf, list)
		}
		// In the text for the guest, the name servers are replaced with the aliases and the rest is unchanged.
		inside, again := NameServers(text, aliases)
		for i, n := range inside {
			if n.Server != netip.AddrPortFrom(aliases[i], 53) {
				t.Errorf("%q becomes %q", conf, text)
			}
		}
		if len(inside) != len(list) || again != text {
			t.Errorf("%q becomes %q, which becomes %q", conf, text, again)
		}
	})
}

func TestResolvers(t *testing.T) {
	resolvers := Resolvers("# nameserver 192.0.2.99\nnameserver 192.0.2.53\n\tnameserver 2001:db8::53\nnameserver fe80::1%lo\nnameserver 192.0.2.2\nnameserver 192.0.2.4\nnameserver x\noptions rotate\nnameserver\n")
	want := []netip.Addr{
		netip.MustParseAddr("192.0.2.53"), netip.MustParseAddr("2001:db8::53"), netip.MustParseAddr("fe80::1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.4"),
	}
	if !slices.Equal(resolvers, want) {
		t.Fatalf("resolvers %v, want %v", resolvers, want)
	}
}
