// SPDX-License-Identifier: Apache-2.0

package stored_test

import (
	"maps"
	"net/netip"
	"strings"
	"testing"

	"sockeye/internal/placement"
	"sockeye/internal/steer/stored"
)

func TestOverridden(t *testing.T) {
	s := stored.State{Pins: []stored.Pin{
		{Prefix: netip.MustParsePrefix("192.0.2.7/32")}, {Prefix: netip.MustParsePrefix("192.0.2.8/32")},
		{Prefix: netip.MustParsePrefix("198.51.100.0/24")}, {Prefix: netip.MustParsePrefix("2001:db8::7/128")},
		{Device: "edge"}, {Device: "core"},
	}}
	devices, err := placement.ParseDeviceMap(strings.NewReader("192.0.2.7,192.0.2.7\n198.51.100.9,edge\n2001:db8::/64,edge\n"), "devices.csv")
	if err != nil {
		t.Fatal(err)
	}
	const none = "the device map has no such device"
	for _, c := range []struct {
		devices *placement.DeviceMap
		want    map[string]string
	}{
		{nil, map[string]string{"edge": none, "core": none}},
		// The longer prefix of the map leaves the rest of 198.51.100.0/24 to its pin.
		{devices, map[string]string{"192.0.2.7": "the device map names it 192.0.2.7", "2001:db8::7": "the device map names it edge", "core": none}},
	} {
		if got := s.Overridden(c.devices); !maps.Equal(got, c.want) {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
}

func TestDescribeBeyond(t *testing.T) {
	s := stored.State{Pins: []stored.Pin{{Device: "edge", Slot: 2}, {Prefix: netip.MustParsePrefix("192.0.2.7/32"), Slot: 4}}}
	for slots, want := range map[int]string{
		5: "",
		4: "1 pin is to a slot that the policy does not have: 192.0.2.7 (slot 4)",
		2: "2 pins are to slots that the policy does not have: edge (slot 2), 192.0.2.7 (slot 4)",
	} {
		if got := s.DescribeBeyond(slots); got != want {
			t.Errorf("%d slots: %q, want %q", slots, got, want)
		}
	}
	for range 8 {
		s.Pins = append(s.Pins, stored.Pin{Device: "core", Slot: 9})
	}
	if got := s.DescribeBeyond(2); strings.Count(got, "(slot") != 8 || !strings.HasSuffix(got, " and 2 more") {
		t.Errorf("10 pins: %q", got)
	}
}
