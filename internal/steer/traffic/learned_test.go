// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/placement"
	"sockeye/internal/steer/core"
)

// TestLearned checks which devices are learned as time passes, and that they outlive the agent.
func TestLearned(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	boot := now.Add(-time.Hour)
	table := make(map[bpf.Address]bpf.Seen)
	addr := netip.MustParseAddr
	key := func(a netip.Addr) deviceKey {
		if a == addr("192.0.2.9") {
			return deviceKey{name: "edge"}
		}
		return deviceKey{address: a}
	}
	connected := make(map[deviceKey]bool)
	var s streams
	var l learned
	update := func() {
		s.update(now, boot, maps.All(table), key, connected)
		l.update(&s, key)
	}
	expect := func(when string, want ...deviceKey) {
		t.Helper()
		update()
		for _, device := range want {
			if _, ok := l.devices[device]; !ok {
				t.Errorf("%s: %v is not learned", when, device)
			}
		}
		if len(l.devices) != len(want) {
			t.Errorf("%s: %v, want %v", when, l.devices, want)
		}
	}
	sends := func(text string) {
		a := placement.Address(addr(text))
		table[a] = bpf.Seen{Datagrams: table[a].Datagrams + 1, LastSeen: uint64(now.Sub(boot))}
	}
	named, session, sender, forged := deviceKey{name: "edge"}, key(addr("192.0.2.1")), key(addr("192.0.2.2")), key(addr("192.0.2.3"))
	connected[session] = true
	sends("192.0.2.2")
	sends("192.0.2.3")
	expect("at first", session)
	sends("192.0.2.9")
	expect("a device of the map sends", session, named)
	delete(connected, session)
	now = now.Add(learnTime - time.Second)
	sends("192.0.2.2")
	expect("before a sender is learned", session, named)
	now = now.Add(2 * time.Second)
	sends("192.0.2.2")
	expect("after it has sent for long", session, named, sender)
	if l.devices[forged] != (learnedDevice{}) {
		t.Error("a source that has sent once is learned")
	}
	if one := l.devices[sender]; one.udp != uint32(now.Unix()) || one.tcp != 0 {
		t.Errorf("the sender: %+v", one)
	}
	if one := l.devices[session]; one.tcp != 1_700_000_000 || one.udp != 0 {
		t.Errorf("the device with a closed connection: %+v", one)
	}
	if sending := s.sending(key, l.devices); !sending[sender] || len(sending) != 1 {
		t.Errorf("sending: %v", sending)
	}

	path := filepath.Join(t.TempDir(), "telemetry.devices")
	if !l.due(now) {
		t.Error("new devices are not due to be saved")
	}
	if err := l.save(path); err != nil {
		t.Fatal(err)
	}
	var next learned
	if err := next.load(path); err != nil || !maps.Equal(next.devices, l.devices) {
		t.Errorf("loaded: %v, %v, want %v", next.devices, err, l.devices)
	}
	if err := os.WriteFile(path, []byte("[{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := (&learned{}).load(path); err == nil {
		t.Error("a damaged file is loaded")
	}

	clear(table)
	now = now.Add(forgetTime - learnTime - 2*time.Second)
	expect("before the first one is forgotten", session, named, sender)
	now = now.Add(10 * time.Second)
	expect("after the first ones are forgotten", sender)
	now = now.Add(learnTime)
	expect("after all are forgotten")
}

// TestLearnedBound checks that a flood of connections cannot replace learned devices.
func TestLearnedBound(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	key := func(a netip.Addr) deviceKey { return deviceKey{address: a} }
	first := deviceKey{address: netip.MustParseAddr("192.0.2.1")}
	s := streams{at: now, connected: map[deviceKey]bool{first: true}}
	var l learned
	l.update(&s, key)
	for i := range mostLearned + 10 {
		s.connected[deviceKey{name: fmt.Sprint(i)}] = true
	}
	s.at = now.Add(time.Minute)
	l.update(&s, key)
	if one, ok := l.devices[first]; len(l.devices) != mostLearned || !ok || one.tcp != uint32(s.at.Unix()) {
		t.Errorf("%d devices, the first one %+v (%t)", len(l.devices), one, ok)
	}
}

// TestMissingSince checks the time since which streams are missing.
func TestMissingSince(t *testing.T) {
	mapping, err := placement.NewMapping(1, bpf.NoSlot, 7, nil)
	if err != nil {
		t.Fatal(err)
	}
	s := &Traffic{Service: &core.Service{Mapping: mapping}}
	device := deviceKey{address: netip.MustParseAddr("192.0.2.1")}
	for _, one := range []struct {
		times learnedDevice
		lacks string
		since uint32
	}{
		{learnedDevice{tcp: 5, udp: 9}, "tcp", 5}, {learnedDevice{tcp: 5, udp: 9}, "udp", 9}, {learnedDevice{tcp: 5, udp: 9}, "tcp,udp", 9},
		{learnedDevice{tcp: 9, udp: 5}, "tcp,udp", 9}, {learnedDevice{tcp: 9}, "udp", 0},
	} {
		s.learned.devices = map[deviceKey]learnedDevice{device: one.times}
		got := s.missingDevice(device, strings.Split(one.lacks, ","), "")
		if (got.Since == nil) != (one.since == 0) || got.Since != nil && *got.Since != unixTime(one.since) {
			t.Errorf("%+v without %s: since %v, want %d", one.times, one.lacks, got.Since, one.since)
		}
	}
}

// TestMissingElsewhere checks that a host of a fleet does not expect the devices of other hosts.
func TestMissingElsewhere(t *testing.T) {
	devices, err := placement.ParseDeviceMap(strings.NewReader("192.0.2.0/25,near\n198.51.100.0/24,near\n203.0.113.0/24,far\n"), "devices.csv")
	if err != nil {
		t.Fatal(err)
	}
	mapping, err := placement.NewMapping(1, bpf.NoSlot, 7, devices)
	if err != nil {
		t.Fatal(err)
	}
	far, otherFar, unknown := netip.MustParseAddr("203.0.113.0"), netip.MustParseAddr("192.0.2.200"), netip.MustParseAddr("10.0.0.1")
	service := netip.MustParseAddr("192.0.2.53")
	s := &Traffic{Service: &core.Service{Mapping: mapping, Host: &core.Host{}}}
	s.Config.Listeners = []config.Listener{{Protocol: config.TCP, Address: netip.AddrPortFrom(service, 1790)}}
	s.learned.devices = map[deviceKey]learnedDevice{{address: otherFar}: {}, {address: unknown}: {}, {name: "near"}: {}, {address: far}: {}}
	expected := func() (list []string) {
		for device := range s.expected() {
			list = append(list, cmp.Or(device.name, device.address.String()))
		}
		slices.Sort(list)
		return list
	}
	all, here := []string{"10.0.0.1", "192.0.2.200", "far", "near"}, []string{"10.0.0.1", "near"}
	if list := expected(); !slices.Equal(list, all) {
		t.Errorf("without a fleet: %v, want %v", list, all)
	}
	s.Host.Fleet.Store(&core.Fleet{Addresses: []netip.Addr{service}, Host: func(a netip.Addr) (string, int, bool) {
		if a == unknown {
			return "", 0, false // no host has the device
		}
		isFar := a == far || a == otherFar
		return map[bool]string{true: "other", false: "this"}[isFar], 0, !isFar
	}})
	if list := expected(); !slices.Equal(list, here) {
		t.Errorf("a host of a fleet expects %v, want %v", list, here)
	}
	s.Host.Fleet.Store(&core.Fleet{Addresses: []netip.Addr{service}})
	if list := expected(); !slices.Equal(list, all) {
		t.Errorf("before the first table: %v, want %v", list, all)
	}
}
