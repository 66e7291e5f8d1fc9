// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"net/netip"
	"reflect"
	"testing"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/rooms"
)

// TestHandedTemplates is that rubbish in the store of a fleet costs the templates of its device only.
func TestHandedTemplates(t *testing.T) {
	a := netip.MustParseAddr("192.0.2.1")
	want := []rooms.Handed{{Listener: "udp [::]:4739", Source: netip.AddrPortFrom(a, 7), Data: []byte{0, 10}}}
	encoded, err := rooms.EncodeHanded(map[netip.Addr][]rooms.Handed{a: want})
	if err != nil {
		t.Fatal(err)
	}
	b, c, d := a.Next(), a.Next().Next(), a.Prev()
	got, damaged := rooms.DecodeHanded(map[netip.Addr][]byte{a: encoded[a], b: []byte("rubbish"), c: nil, d: encoded[a]})
	if !reflect.DeepEqual(got, want) || damaged != 3 {
		t.Errorf("got %+v and %d damaged", got, damaged)
	}
}

// TestElsewhere is that only connections to an address of the fleet can belong to another host.
func TestElsewhere(t *testing.T) {
	shared, own, device := netip.MustParseAddr("192.0.2.53"), netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("203.0.113.1")
	f := &core.Fleet{Addresses: []netip.Addr{shared}, Host: func(d netip.Addr) (string, int, bool) { return "b", 7, d != device }}
	for _, c := range []struct {
		fleet     *core.Fleet
		local     netip.Addr
		device    netip.Addr
		elsewhere bool
	}{
		{f, shared, device, true}, {f, netip.AddrFrom16(shared.As16()), device, true}, {f, own, device, false},
		{f, shared, own, false}, {nil, shared, device, false}, {&core.Fleet{Addresses: f.Addresses}, shared, device, false},
	} {
		if got := c.fleet.Elsewhere(c.local, c.device); got != c.elsewhere {
			t.Errorf("%v to %v: elsewhere %v", c.device, c.local, got)
		}
	}
}

// TestServedBy is that the services with an address of the fleet have hosts for their devices, and no other ones.
func TestServedBy(t *testing.T) {
	shared, device := netip.MustParseAddr("192.0.2.53"), netip.MustParseAddr("203.0.113.1")
	listens := func(address string) *config.Service {
		return &config.Service{Listeners: []config.Listener{{Protocol: config.TCP, Address: netip.MustParseAddrPort(address)}}}
	}
	of := func(name string, here bool) *core.Fleet {
		return &core.Fleet{Addresses: []netip.Addr{shared}, Host: func(netip.Addr) (string, int, bool) { return name, 7, here }}
	}
	seven := 7
	for name, c := range map[string]struct {
		fleet   *core.Fleet
		service *config.Service
		want    core.ServedBy
		effect  string
	}{
		"no fleet":      {nil, listens("[::]:1790"), core.ServedBy{Here: true}, "none yet"},
		"other service": {of("b", false), listens("198.51.100.1:1790"), core.ServedBy{Here: true}, "none yet"},
		"no table":      {&core.Fleet{Addresses: []netip.Addr{shared}}, listens("[::]:1790"), core.ServedBy{Unknown: "this host has no table of the fleet yet"}, "dropped"},
		"no owner":      {of("", false), listens("192.0.2.53:1790"), core.ServedBy{Unknown: "no host of the fleet serves the device", Bucket: &seven}, "dropped"},
		"here":          {of("a", true), listens("0.0.0.0:1790"), core.ServedBy{Here: true, Host: "a", Bucket: &seven}, "none yet"},
		"elsewhere":     {of("b", false), listens("0.0.0.0:1790"), core.ServedBy{Host: "b", Bucket: &seven}, "elsewhere"},
	} {
		var h core.Host
		h.Fleet.Store(c.fleet)
		got := h.ServedBy(c.service, device)
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
		w := api.Why{Effect: "none yet"}
		got.Explain(&w)
		if w.Effect != c.effect || w.Host != c.want.Host || w.FleetBucket != got.Bucket {
			t.Errorf("%s: %+v", name, w)
		}
	}
}
