// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"net/netip"
	"slices"
	"testing"

	"sockeye/internal/bpf"
	"sockeye/internal/fleet/forward"
	"sockeye/internal/placement"
	"sockeye/internal/sockdiag"
)

// TestEstablished is that no handshake stands for the connection of a device.
func TestEstablished(t *testing.T) {
	mapping, err := placement.NewMapping(1, bpf.NoSlot, 7, nil)
	check(t, err)
	local, device := netip.MustParseAddrPort("192.0.2.53:1790"), netip.MustParseAddrPort("10.0.0.1:40000")
	handshake := netip.AddrPortFrom(device.Addr(), 40001)
	got := established([]sockdiag.Socket{
		{State: sockdiag.Established, Local: local, Remote: device},
		{State: sockdiag.SynRecv, Local: local, Remote: handshake},
	}, mapping)
	want := []forward.Connection{{Hash: placement.Hash(placement.Address(device.Addr()), 7), Device: device, Local: local}}
	if !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}
