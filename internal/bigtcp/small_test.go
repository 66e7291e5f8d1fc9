// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"errors"
	"testing"
)

// TestSmallTunnel never has a tunnel that damages large packets send them, itself or
// below a bridge.
func TestSmallTunnel(t *testing.T) {
	both := Support{IPv6: true, IPv4: true}
	legacy := Sizes{Legacy, Legacy, Legacy, Legacy}
	tunnel := Interface{Index: 2, Name: "vx0", Kind: "vxlan", TSOMaxSize: Most, Sizes: legacy, LegacyTunnel: true}
	bridge := Interface{Index: 3, Name: "br0", Kind: "bridge", TSOMaxSize: Most, Sizes: legacy, Related: []Related{
		{Relation: Lower, Index: 2, Name: "vx0", Kind: "vxlan", TSOMaxSize: Most, Sizes: legacy, LegacyTunnel: true},
	}}
	ifaces := []Interface{tunnel, bridge}
	for _, name := range []string{"vx0", "br0"} {
		_, err := plan(ifaces, both, []Target{{name, Want{IPv6: 192000}}}, nil)
		if e, ok := errors.AsType[*Error](err); !ok || e.Kind != KindUnsupported {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, i := range ifaces {
		if v := Judge(&i, both); v.State != Impossible {
			t.Errorf("%s is %s: %s", i.Name, v.State, v.Text)
		}
	}
	if tunnel.LegacyTunnel = false; Judge(&tunnel, both).State != Off {
		t.Error("a tunnel that takes large packets is refused")
	}
}
