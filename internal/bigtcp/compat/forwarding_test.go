// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"os"
	"testing"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/linux"
)

// TestForwarding checks routers for large IPv6 packets, with kernels that insert the
// hop-by-hop option and kernels that do not.
func TestForwarding(t *testing.T) {
	n, err := netif.OpenNamespace("")
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	large := []netif.Interface{{Name: "eth0", Sizes: netif.Sizes{GSO: netif.Legacy, GRO: 192000}}}
	small := []netif.Interface{{Name: "eth0", Sizes: netif.Sizes{GSO: netif.Legacy, GRO: netif.Legacy}}, {Name: "lo", Sizes: netif.Sizes{GSO: netif.MaxSize}}}
	old, fixed := linux.Version{6, 18, 0}, firstWithoutJumbograms
	for _, test := range []struct {
		name       string
		forwarding string
		ifaces     []netif.Interface
		kernel     linux.Version
		want       int
	}{
		{"a host", "0", large, old, 0},
		{"a router", "1", large, old, 1},
		{"a router with small packets", "1", small, old, 0},
		{"a router of a kernel that does not mark", "1", large, fixed, 0},
	} {
		setSysctl(t, "net/ipv6/conf/all/forwarding", test.forwarding)
		found, err := checkForwarding(n, test.ifaces, test.kernel)
		if err != nil || len(found) != test.want {
			t.Errorf("%s: %v, %v", test.name, found, err)
		}
	}
}

// setSysctl sets a sysctl of the tests' namespace until the test ends.
func setSysctl(t *testing.T, name, value string) {
	t.Helper()
	path := "/proc/sys/" + name
	before, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, []byte(value), 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(path, before, 0); err != nil {
			t.Error(err)
		}
	})
}
