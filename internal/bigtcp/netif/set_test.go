// SPDX-License-Identifier: Apache-2.0

package netif_test

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/netif/netiftest"
)

// large is the size that the tests set, in bytes.
const large = 196608

var (
	sizesOff = netiftest.Sizes(netif.Legacy, netif.Legacy, netif.Legacy, netif.Legacy)
	sizesOn  = netiftest.Sizes(large, large, large, large)
)

func TestSet(t *testing.T) {
	n := netiftest.Open(t, "")
	if !n.Support().IPv4 {
		t.Skip("kernel: no sizes of IPv4 before Linux 6.3")
	}
	netiftest.AddVeth(t, netiftest.Kernel(t, ""), "big0", "big0p", nil)
	before, err := n.Interface("big0")
	if err != nil {
		t.Fatal(err)
	}
	index := before.Index
	start := netiftest.Sizes(70000, 80000, 90000, 100000)
	tests := map[string]struct {
		set  netif.Sizes
		want netif.Sizes
		err  error
	}{
		"all":               {netiftest.Sizes(netif.MaxSize, large, 100000, netif.Legacy), netiftest.Sizes(netif.MaxSize, large, 100000, netif.Legacy), nil},
		"IPv6 alone":        {netif.Sizes{GSO: large, GRO: large}, netiftest.Sizes(large, large, 90000, 100000), nil},
		"IPv4 alone":        {netif.Sizes{GSOIPv4: large, GROIPv4: large}, netiftest.Sizes(70000, 80000, large, large), nil},
		"IPv6 off, IPv4 on": {netiftest.Sizes(netif.Legacy, netif.Legacy, large, netif.MaxSize), netiftest.Sizes(netif.Legacy, netif.Legacy, large, netif.MaxSize), nil},
		"too large GSO":     {netiftest.Sizes(netif.MaxSize+1, large, large, large), start, unix.EINVAL},
		"too large GRO":     {netiftest.Sizes(large, netif.MaxSize+1, large, large), start, unix.EINVAL},
		"too large IPv4":    {netiftest.Sizes(large, large, netif.MaxSize+1, large), start, unix.EINVAL},
		"too large GRO4":    {netiftest.Sizes(large, large, large, netif.MaxSize+1), start, unix.EINVAL},
		"too small":         {netiftest.Sizes(large, large, 1, large), start, unix.ERANGE},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if err := n.Set(index, start); err != nil {
				t.Fatal(err)
			}
			checkSizes(t, n, "big0", start)
			err := n.Set(index, test.set)
			if !errors.Is(err, test.err) {
				t.Errorf("error is %v, not %v", err, test.err)
			}
			if err != nil && !strings.Contains(err.Error(), "set sizes of big0: ") {
				t.Errorf("error %q does not name the interface", err)
			}
			checkSizes(t, n, "big0", test.want)
		})
	}
}

func TestSetNone(t *testing.T) {
	err := netiftest.Open(t, "").Set(1<<20, sizesOn)
	if !errors.Is(err, unix.ENODEV) || !strings.Contains(err.Error(), "interface 1048576") {
		t.Errorf("error is %v", err)
	}
}

// TestSetElsewhere sets sizes in another namespace, where another interface has the
// same index.
func TestSetElsewhere(t *testing.T) {
	here, there := netiftest.Open(t, ""), netiftest.Open(t, netiftest.NamedNetns(t, "set"))
	if err := there.Set(1, sizesOn); err != nil {
		t.Fatal(err)
	}
	checkSizes(t, here, "lo", sizesOff)
	checkSizes(t, there, "lo", sizesOn)
}

func checkSizes(t *testing.T, n *netif.Namespace, name string, want netif.Sizes) {
	t.Helper()
	i, err := n.Interface(name)
	if err != nil {
		t.Fatal(err)
	}
	if i.Sizes != want {
		t.Errorf("%s has sizes %v, not %v", name, i.Sizes, want)
	}
}
