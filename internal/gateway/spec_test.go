// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway/access"
)

func TestParseForward(t *testing.T) {
	for text, want := range map[string]string{
		"80":                      "80:80/tcp",
		"80/tcp":                  "80:80/tcp",
		"4739/udp":                "4739:4739/udp",
		"8080:80":                 "8080:80/tcp",
		"1790:1790/tcp":           "1790:1790/tcp",
		"9000-9010":               "9000-9010:9000-9010/tcp",
		"9000-9010:80-90/udp":     "9000-9010:80-90/udp",
		"1-65535":                 "1-65535:1-65535/tcp",
		"127.0.0.1:80":            "127.0.0.1:80:80/tcp",
		"127.0.0.1:8080:80":       "127.0.0.1:8080:80/tcp",
		"[::1]:8080:80":           "[::1]:8080:80/tcp",
		"[::]:53/udp":             "[::]:53:53/udp",
		"0.0.0.0:53":              "0.0.0.0:53:53/tcp",
		"[::ffff:192.0.2.1]:53":   "192.0.2.1:53:53/tcp",
		"[2001:db8::1]:1-2:3-4":   "[2001:db8::1]:1-2:3-4/tcp",
		"192.0.2.1:65535-65535:1": "192.0.2.1:65535:1/tcp",
	} {
		if got, err := access.ParseForward(text); err != nil || got.String() != want {
			t.Errorf("%s: %v, %v, want %s", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"":                   `"" is not a port`,
		"0":                  `"0" is not a port`,
		"65536":              `"65536" is not a port`,
		"-1":                 `"" is not a port`,
		"http":               `"http" is not a port`,
		"80:":                `"" is not a port`,
		":80":                `"" is not a port`,
		"80/sctp":            "the protocol must be tcp or udp",
		"80/":                "the protocol must be tcp or udp",
		"80/tcp/udp":         "the protocol must be tcp or udp",
		"90-80":              "the last port is below the first",
		"80-90:80-91":        "80-91 and 80-90 have different numbers of ports",
		"80-90:80":           "80 and 80-90 have different numbers of ports",
		"127.0.0.1":          `"127.0.0.1" is not a port`,
		"300.0.0.1:80":       `"300.0.0.1" is not an address`,
		"[::1]":              "the port is missing after the address",
		"[::1:80":            "the port is missing after the address",
		"[fe80::1%eth0]:80":  "is not an address",
		"[nowhere]:80":       `"nowhere" is not an address`,
		"::1:80:80":          "is not a port",
		"1:2:3":              "is not a port",
		"127.0.0.1:80:80:80": "is not a port",
	} {
		if got, err := access.ParseForward(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v, want %s", text, got, err, want)
		}
	}
}

func FuzzParseForward(f *testing.F) {
	for _, text := range []string{"80", "[::1]:8080-8081:80-81/udp", "127.0.0.1:1:1", "[::ffff:1.2.3.4]:1"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		a, err := access.ParseForward(text)
		if err != nil {
			return
		}
		if a.First == 0 || a.Last < a.First || a.Guest == 0 || int(a.Guest)+int(a.Last-a.First) > 65535 {
			t.Errorf("%q: %+v", text, a)
		}
		if b, err := access.ParseForward(a.String()); err != nil || a != b {
			t.Errorf("%q: parsed %v, then %v, %v", text, a, b, err)
		}
		if access.Overlap([]access.ForwardSpec{a, a}) == nil {
			t.Errorf("%v does not overlap with itself", a)
		}
	})
}

func TestParseRule(t *testing.T) {
	for text, want := range map[string]string{
		"10.0.0.0/8:9092/tcp":    "10.0.0.0/8:9092-9092/tcp",
		"192.0.2.1":              "192.0.2.1/32",
		"0.0.0.0/0/udp":          "0.0.0.0/0/udp",
		"2001:db8::/32":          "2001:db8::/32",
		"[2001:db8::/32]:443":    "[2001:db8::/32]:443",
		"[2001:db8::1]:1-2/udp":  "[2001:db8::1/128]:1-2/udp",
		"2001:db8::1/tcp":        "2001:db8::1/128/tcp",
		"192.0.2.0/24/icmp":      "192.0.2.0/24/icmp",
		"2001:db8::/32/icmp":     "2001:db8::/32/icmp",
		"::ffff:192.0.2.1":       "192.0.2.1/32",
		"::ffff:192.0.2.0/120":   "192.0.2.0/24",
		"[::/0]":                 "::/0",
		"0.0.0.0/0":              "0.0.0.0/0",
		"[192.0.2.0/24]:80-90":   "192.0.2.0/24:80-90",
		"198.51.100.7:1-65535":   "198.51.100.7/32:1-65535",
		"198.51.100.7:53-53/udp": "198.51.100.7/32:53/udp",
	} {
		want = strings.Replace(want, "9092-9092", "9092", 1)
		if got, err := access.ParseRule(text); err != nil || got.String() != want {
			t.Errorf("%s: %v, %v, want %s", text, got, err, want)
		}
	}
	for _, text := range []string{
		"", "nowhere", "10.0.0.0/33", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:90-80", "[::1", "[::1]x", "[::1]:", "10.0.0.1/sctp",
		"10.0.0.1:80/icmp", "fe80::1%eth0", "10.0.0.0/8/tcp/udp", "2001:db8::/32:443/", ":80",
		"127.0.0.1:80", "127.0.0.0/8", "::1", "[::1]:80", "224.0.0.1", "ff02::/16", "fe80::/10", "0.0.0.0", "::", "255.255.255.255", "::ffff:127.0.0.1",
		"192.0.2.1/24", "[2001:db8::1/32]:443", "::ffff:192.0.2.1/120",
	} {
		if got, err := access.ParseRule(text); err == nil {
			t.Errorf("%s: %v", text, got)
		}
	}
}

func FuzzParseRule(f *testing.F) {
	for _, text := range []string{"10.0.0.0/8:9092/tcp", "[2001:db8::/32]:443-500", "192.0.2.1/icmp", "::ffff:1.2.3.4/120"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		a, err := access.ParseRule(text)
		if err != nil {
			return
		}
		if !a.Prefix.IsValid() || a.Prefix != a.Prefix.Masked() || a.Last < a.First {
			t.Errorf("%q: %+v", text, a)
		}
		if b, err := access.ParseRule(a.String()); err != nil || a != b {
			t.Errorf("%q: parsed %v, then %v, %v", text, a, b, err)
		}
	})
}

func TestOverlap(t *testing.T) {
	for texts, want := range map[string]bool{
		"80 81":                        false,
		"80 80/udp":                    false,
		"80 80":                        true,
		"80:1 80:2":                    true,
		"80:1 81:1":                    false,
		"80-90 90-100":                 true,
		"80-90 70-79 91":               false,
		"127.0.0.1:80 192.0.2.1:80":    false,
		"127.0.0.1:80 80":              true,
		"127.0.0.1:80 0.0.0.0:80":      true,
		"127.0.0.1:80 [::]:80":         true,
		"[::1]:80 0.0.0.0:80":          false,
		"[::1]:80 127.0.0.1:80":        false,
		"[::1]:80 [::]:80":             true,
		"0.0.0.0:80 [::]:80":           true,
		"[::ffff:127.0.0.1]:80 [::]:1": false,
		"[::1]:80 [::2]:80 127.0.0.1:1-1000 [::1]:80": true,
	} {
		var specs []access.ForwardSpec
		for _, text := range strings.Fields(texts) {
			f, err := access.ParseForward(text)
			if err != nil {
				t.Fatal(err)
			}
			specs = append(specs, f)
		}
		if err := access.Overlap(specs); (err != nil) != want {
			t.Errorf("%s: %v", texts, err)
		}
	}
}

// TestListenBuffer checks that a UDP socket has a receive buffer for bursts, up to the user's limit.
func TestListenBuffer(t *testing.T) {
	def, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(def)
	fd, err := listen(netip.MustParseAddrPort("127.0.0.1:7405"), unix.IPPROTO_UDP)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	usual, err := unix.GetsockoptInt(def, unix.SOL_SOCKET, unix.SO_RCVBUF)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF); err != nil || got <= usual {
		t.Errorf("%d bytes, %v; default %d", got, err, usual)
	}
}

// TestListen checks that no socket remains open if one of several ports is in use.
func TestListen(t *testing.T) {
	busy, err := access.ParseForward("127.0.0.1:7402")
	if err != nil {
		t.Fatal(err)
	}
	held, err := Listen([]access.ForwardSpec{busy})
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(held[0].FD)
	wanted, err := access.ParseForward("7400-7402:80-82")
	if err != nil {
		t.Fatal(err)
	}
	descriptors(t) // lets the runtime open its own descriptors
	before := descriptors(t)
	_, err = Listen([]access.ForwardSpec{wanted})
	failed := new(ListenError)
	if !errors.As(err, &failed) || failed.At.Port() != 7402 || !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("%v", err)
	}
	if now := descriptors(t); now != before {
		t.Errorf("%d descriptors before, %d after", before, now)
	}
	wanted.Last--
	list, err := Listen([]access.ForwardSpec{wanted})
	if err != nil || len(list) != 2 || list[1].Port != 81 {
		t.Errorf("%v, %v", list, err)
	}
	for _, f := range list {
		unix.Close(f.FD)
	}
}

func TestAllowed(t *testing.T) {
	rule := func(text string) access.Rule {
		r, err := access.ParseRule(text)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	dns := []access.NameServer{{Alias: netip.MustParseAddr("169.254.53.53"), Server: netip.MustParseAddrPort("[2001:db8::53]:53")}}
	everywhere := access.Outbound{All: true, DNS: dns}
	some := access.Outbound{DNS: dns, Rules: []access.Rule{rule("10.0.0.0/8:9092/tcp"), rule("[2001:db8::/32]:53"), rule("192.0.2.0/24/icmp"),
		{Prefix: netip.MustParsePrefix("127.0.0.1/32"), Last: 65535}}}
	const tcp, udp, icmp, icmp6 = unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6
	for _, test := range []struct {
		protocol    uint8
		to          string
		every, some bool
	}{
		{tcp, "10.1.2.3:9092", true, true},
		{udp, "10.1.2.3:9092", true, false},
		{tcp, "10.1.2.3:9093", true, false},
		{tcp, "11.0.0.1:9092", true, false},
		{tcp, "[2001:db8::1]:53", true, true},
		{udp, "[2001:db8::1]:53", true, true},
		{icmp6, "[2001:db8::1]:0", true, false},
		{icmp, "192.0.2.1:0", true, true},
		{tcp, "192.0.2.1:80", true, false},
		{tcp, "192.0.2.1:0", false, false},
		{tcp, "127.0.0.1:80", false, false},
		{tcp, "127.1.2.3:80", false, false},
		{tcp, "[::1]:80", false, false},
		{tcp, "[::ffff:127.0.0.1]:80", false, false},
		{tcp, "[::ffff:10.1.2.3]:9092", false, false},
		{udp, "0.0.0.0:80", false, false},
		{udp, "[::]:80", false, false},
		{udp, "255.255.255.255:67", false, false},
		{udp, "224.0.0.1:5353", false, false},
		{udp, "[ff02::1]:5353", false, false},
		{udp, "[fe80::1]:547", false, false},
		{udp, "169.254.53.53:53", true, true},
		{tcp, "169.254.53.53:53", true, true},
		{tcp, "169.254.53.53:80", false, false},
		{icmp, "169.254.53.53:0", false, false},
	} {
		to := netip.MustParseAddrPort(test.to)
		if got := everywhere.Allowed(test.protocol, to); got != test.every {
			t.Errorf("everywhere, %d %s: %v", test.protocol, to, got)
		}
		if got := some.Allowed(test.protocol, to); got != test.some {
			t.Errorf("with rules, protocol %d, %s: %v", test.protocol, to, got)
		}
		if nowhere := (access.Outbound{}); nowhere.Allowed(test.protocol, to) || !nowhere.None() || some.None() {
			t.Errorf("nowhere, %d %s", test.protocol, to)
		}
	}
	// The aliases of the host's loopback addresses need a rule with exactly the address.
	stands := []netip.Addr{netip.MustParseAddr("192.0.2.9"), netip.MustParseAddr("fd00::9")}
	for _, test := range []struct {
		rules, to, leads string
	}{
		{"", "192.0.2.9:80", ""},
		{"0.0.0.0/0 ::/0 192.0.2.0/24", "192.0.2.9:80", ""},
		{"0.0.0.0/0 ::/0", "[fd00::9]:80", ""},
		{"192.0.2.9:80/tcp", "192.0.2.9:80", "127.0.0.1:80"},
		{"192.0.2.9:80/tcp", "192.0.2.9:81", ""},
		{"192.0.2.9:80/udp", "192.0.2.9:80", ""},
		{"[fd00::9]:80", "[fd00::9]:80", "[::1]:80"},
	} {
		out := access.Outbound{All: test.rules == "", Host: stands}
		for _, text := range strings.Fields(test.rules) {
			out.Rules = append(out.Rules, rule(text))
		}
		to, leads := netip.MustParseAddrPort(test.to), ""
		if out.Allowed(tcp, to) {
			leads = out.Translate(to).String()
		}
		if leads != test.leads {
			t.Errorf("%s: %s is translated to %q, want %q", test.rules, test.to, leads, test.leads)
		}
		if out.Allowed(icmp, netip.AddrPortFrom(to.Addr(), 0)) {
			t.Errorf("%s: an echo request to %s is allowed", test.rules, test.to)
		}
	}
	if got := some.Translate(netip.MustParseAddrPort("169.254.53.53:53")); got != dns[0].Server {
		t.Errorf("name server: %v", got)
	}
	if to := netip.MustParseAddrPort("10.0.0.1:53"); some.Translate(to) != to {
		t.Errorf("%v is translated", to)
	}
}

func TestReasonNames(t *testing.T) {
	for reason, name := range reasonNames {
		if name == "" {
			t.Errorf("reason %d has no name", reason)
		}
	}
}
