// SPDX-License-Identifier: Apache-2.0

package sizing

import (
	"errors"
	"testing"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/netif/netiftest"
	"sockeye/internal/fault"
)

// TestLegacyTunnel checks that a tunnel that damages large packets never receives them, neither directly nor below a
// bridge.
func TestLegacyTunnel(t *testing.T) {
	both := netif.Support{IPv6: true, IPv4: true}
	legacy := netiftest.Sizes(netif.Legacy, netif.Legacy, netif.Legacy, netif.Legacy)
	tunnel := netif.Interface{Index: 2, Name: "vx0", Kind: "vxlan", TSOMaxSize: netif.MaxSize, Sizes: legacy, LegacyTunnel: true}
	bridge := netif.Interface{Index: 3, Name: "br0", Kind: "bridge", TSOMaxSize: netif.MaxSize, Sizes: legacy, Related: []netif.Related{
		{Relation: netif.Lower, Index: 2, Name: "vx0", Kind: "vxlan", TSOMaxSize: netif.MaxSize, Sizes: legacy, LegacyTunnel: true},
	}}
	ifaces := []netif.Interface{tunnel, bridge}
	for _, name := range []string{"vx0", "br0"} {
		_, err := plan(ifaces, both, []Target{{name, Want{IPv6: 192000}}}, nil)
		if e, ok := errors.AsType[*fault.Error](err); !ok || e.Code != fault.CodeUnsupported {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, i := range ifaces {
		if v := i.Verdict(both); v.State != netif.Impossible {
			t.Errorf("%s is %s: %s", i.Name, v.State, v.Text)
		}
	}
	if tunnel.LegacyTunnel = false; tunnel.Verdict(both).State != netif.Off {
		t.Error("a tunnel that takes large packets is refused")
	}
}
