// SPDX-License-Identifier: Apache-2.0

package split

import (
	"net/netip"
	"testing"

	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/session"
)

// TestDivide is that the connections of a device that leaves follow each other, in the order of the kernel.
func TestDivide(t *testing.T) {
	local := netip.MustParseAddrPort("192.0.2.53:1790")
	a, b, stays := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1"), netip.MustParseAddr("10.0.0.9")
	fleet := &core.Fleet{Addresses: []netip.Addr{local.Addr()}, Host: func(device netip.Addr) (string, int, bool) { return "x", 0, device == stays }}
	var list []session.Session
	for cookie, device := range []netip.Addr{b, a, stays, b, b, a} {
		list = append(list, session.Session{Address: device, Socket: sockdiag.Socket{Local: local, Cookie: uint64(cookie)}})
	}
	here, left := divide(fleet, list)
	if len(here) != 1 || here[0].Address != stays {
		t.Errorf("here: %+v", here)
	}
	var order []uint64
	for _, s := range left {
		order = append(order, s.Cookie)
	}
	if want := [...]uint64{1, 5, 0, 3, 4}; len(order) != len(want) || [5]uint64(order) != want {
		t.Errorf("order %v, want %v", order, want)
	}
}
