// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"errors"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func TestSet(t *testing.T) {
	h := newChangeHost(t)
	index := h.veth("big0").Attrs().Index
	start := Sizes{70000, 80000, 90000, 100000}
	tests := map[string]struct {
		set  Sizes
		want Sizes
		err  error
	}{
		"all":               {Sizes{Most, large, 100000, Legacy}, Sizes{Most, large, 100000, Legacy}, nil},
		"IPv6 alone":        {Sizes{GSO: large, GRO: large}, Sizes{large, large, 90000, 100000}, nil},
		"IPv4 alone":        {Sizes{GSOIPv4: large, GROIPv4: large}, Sizes{70000, 80000, large, large}, nil},
		"IPv6 off, IPv4 on": {Sizes{Legacy, Legacy, large, Most}, Sizes{Legacy, Legacy, large, Most}, nil},
		"too large GSO":     {Sizes{Most + 1, large, large, large}, start, unix.EINVAL},
		"too large GRO":     {Sizes{large, Most + 1, large, large}, start, unix.EINVAL},
		"too large IPv4":    {Sizes{large, large, Most + 1, large}, start, unix.EINVAL},
		"too large GRO4":    {Sizes{large, large, large, Most + 1}, start, unix.EINVAL},
		"too small":         {Sizes{large, large, 1, large}, start, unix.ERANGE},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			h.T = t
			if err := h.network.Set(index, start); err != nil {
				t.Fatal(err)
			}
			h.is(start, "big0")
			err := h.network.Set(index, test.set)
			if !errors.Is(err, test.err) {
				t.Errorf("error is %v, not %v", err, test.err)
			}
			if err != nil && !strings.Contains(err.Error(), "set sizes of big0: ") {
				t.Errorf("error %q does not name the interface", err)
			}
			h.is(test.want, "big0")
		})
	}
}

func TestSetNone(t *testing.T) {
	h := newChangeHost(t)
	err := h.network.Set(1<<20, sizesOn)
	if !errors.Is(err, unix.ENODEV) || !strings.Contains(err.Error(), "interface 1048576") {
		t.Errorf("error is %v", err)
	}
}

// TestSetElsewhere sets sizes in another namespace, where another interface has the
// same index.
func TestSetElsewhere(t *testing.T) {
	h := newChangeHost(t)
	there := openTestNetwork(t, newNamespace(t))
	if err := there.Set(1, sizesOn); err != nil {
		t.Fatal(err)
	}
	h.is(sizesOff, "lo")
	err := there.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err == nil && attributesOf(lo) != sizesOn {
			t.Errorf("sizes of the other lo are %v", attributesOf(lo))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
