// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/stored"
	"sockeye/internal/testenv"
)

// follower is a service that shares the slots of the service telemetry.
func follower() string {
	return `
  syslog:
    slots: 2
    slots_as: telemetry
    steering: lookup
    listeners: [{protocol: tcp, address: "[::]:6514"}, {protocol: udp, address: "[::]:5514"}]
    user: root
    cgroup: ` + testenv.CgroupPath() + "\n"
}

func setSlot(slot int, state string, weight *int) *api.SlotChange {
	return &api.SlotChange{Service: "telemetry", Slot: &slot, State: state, Weight: weight}
}

// A command between the two parts of a change by the policy, which are seconds apart with a large device map, keeps its
// effect: in the mapping, and at a service that shares slots.
func TestCommandBeforeChange(t *testing.T) {
	d := startDomain(t)
	apply(t, d, parse(t, oneService("lookup", follower())))
	policy := parse(t, oneService("lookup", "    track_devices: 1000", follower(), "    track_devices: 1000\n"))
	var changes []serviceChange
	for i := range policy.Services {
		c := &policy.Services[i]
		changes = append(changes, serviceChange{name: c.Name, config: c})
	}
	targets, err := d.resolveTargets(policy, changes)
	if err != nil {
		t.Fatal(err)
	}
	one, device := 1, "192.0.2.1"
	if _, err := d.changeSlots(setSlot(0, "drain", nil)); err != nil {
		t.Fatal(err)
	}
	if _, err := d.moveDevice(&api.DeviceMove{Service: "telemetry", Device: device, Slot: &one}); err != nil {
		t.Fatal(err)
	}
	for _, c := range changes {
		if _, err := d.applyChange(c, targets[c.name]); err != nil {
			t.Fatal(err)
		}
	}
	for name, s := range d.services {
		if s.Config.TrackDevices != 1000 {
			t.Fatalf("%s: the policy is not in force: %+v", name, s.Config)
		}
		if s.SlotState(0).State != stored.Drain || len(s.State.Pins) != 1 {
			t.Errorf("%s: slots %+v, pins %+v", name, s.State.Slots, s.State.Pins)
		}
		if slices.Contains(s.Target.Table.Bucket[:], 0) {
			t.Errorf("%s: the devices of a slot in drain stay there", name)
		}
	}
}

// Commands that run at the same time change a group of services one after the other: otherwise the services could end with
// different settings.
func TestCommandsOfOneGroup(t *testing.T) {
	d := startDomain(t)
	apply(t, d, parse(t, oneService("lookup", follower())))
	var inside, calls atomic.Int32
	var all sync.WaitGroup
	for _, name := range []string{"telemetry", "syslog", "telemetry", "syslog"} {
		all.Go(func() {
			before := calls.Load()
			_, err := d.inGroup(name, false, func(*service, bool) (string, string, error) {
				if calls.Add(1); inside.Add(1) > 1 {
					t.Error("two commands change the group")
				}
				time.Sleep(10 * time.Millisecond)
				inside.Add(-1)
				return "", "", nil
			})
			if n := calls.Load() - before; err != nil || n < 4 {
				t.Errorf("%d calls for two services, %v", n, err)
			}
		})
	}
	all.Wait()
}

// refusing fails to write the mapping.
type refusing struct{ core.Actions }

var errNoSpace = errors.New("no space left")

func (refusing) InstallMapping() error { return errNoSpace }

// A command whose mapping cannot be written leaves the settings and the target as they were.
func TestSettingsNotWritten(t *testing.T) {
	// The devices of services that share slots move without waiting for a member.
	d := startDomain(t)
	apply(t, d, parse(t, oneService("lookup", follower())))
	s := d.services["telemetry"]
	before, actions := *s.Target, s.Actions
	s.Actions = refusing{actions}
	_, err := d.changeSlots(setSlot(0, "drain", nil))
	s.Actions = actions
	if !errors.Is(err, errNoSpace) {
		t.Fatal(err)
	}
	if s.SlotState(0).State != stored.Ready || s.Target.Table != before.Table || s.Mapping.Table != before.Table {
		t.Errorf("after an error: slots %+v, target changed %t, mapping changed %t", s.State.Slots, s.Target.Table != before.Table, s.Mapping.Table != before.Table)
	}
	if saved, _, err := stored.Load(s.StatePath()); err != nil || len(saved.Slots) > 0 {
		t.Errorf("saved: %+v, %v", saved.Slots, err)
	}
}

// The rooms of a listener without a keeper socket are empty: no other descriptor is taken for one.
func TestRoomWithoutKeeperSocket(t *testing.T) {
	_, s, _ := startService(t, "reuseport", "    when_empty: {wait: 30s}")
	s.Mu.Lock()
	defer s.Mu.Unlock()
	kept := maps.Clone(s.KeeperSockets)
	if len(kept) != 2 {
		t.Fatalf("keeper sockets: %v", kept)
	}
	clear(s.KeeperSockets)
	defer maps.Copy(s.KeeperSockets, kept)
	if status, err := s.rooms.Status(0); err != nil || status == nil {
		t.Errorf("status: %+v, %v", status, err)
	}
	s.rooms.DeliverWaiting()
}
