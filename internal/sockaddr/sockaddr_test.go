// SPDX-License-Identifier: Apache-2.0

package sockaddr_test

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/sockaddr"
)

func TestBothWays(t *testing.T) {
	for from, want := range map[string]string{
		"192.0.2.1:1":          "192.0.2.1:1",
		"[2001:db8::1]:65535":  "[2001:db8::1]:65535",
		"[::ffff:192.0.2.1]:7": "192.0.2.1:7",
		"[fe80::1%3]:7":        "[fe80::1]:7",
	} {
		if got := sockaddr.AddrPort(sockaddr.Of(netip.MustParseAddrPort(from))); got != netip.MustParseAddrPort(want) {
			t.Errorf("%s: got %v, want %s", from, got, want)
		}
	}
}

func TestZone(t *testing.T) {
	for zone, want := range map[string]uint32{"": 0, "%3": 3, "%eth0": 0} {
		to := sockaddr.Of(netip.MustParseAddrPort("[fe80::1" + zone + "]:7")).(*unix.SockaddrInet6)
		if to.ZoneId != want {
			t.Errorf("%q: got zone %d, want %d", zone, to.ZoneId, want)
		}
	}
}

func TestOtherFamily(t *testing.T) {
	for _, a := range []unix.Sockaddr{nil, &unix.SockaddrUnix{Name: "/run/x"}} {
		if got := sockaddr.AddrPort(a); got.IsValid() {
			t.Errorf("%v: got %v", a, got)
		}
	}
}
