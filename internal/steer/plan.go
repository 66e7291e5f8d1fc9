// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/member"
	"sockeye/internal/placement"
	"sockeye/internal/rights"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/moves"
	"sockeye/internal/steer/rooms"
	"sockeye/internal/steer/stored"
)

// target is the state of a service that a policy leads to: its configuration with all users, rules and device maps
// resolved, so that only the kernel can make applyTarget fail.
type target struct {
	config         config.Service
	rules          []member.Rule
	users          []uint32
	mapping        *placement.Mapping
	settings       stored.State   // state with the settings of the slots and the pins
	pendingDevices builtDeviceMap // the built device map, if it differs from the installed one
}

// resolveTarget resolves the names in a configuration, and checks the cgroup and the network namespace. resolveTarget
// changes nothing.
func (s *service) resolveTarget(c config.Service, devices *placement.DeviceMap) (*target, error) {
	t := &target{config: c}
	var err error
	if t.rules, t.users, err = core.ResolveMembers(c); err != nil {
		return nil, err
	}
	if err := core.CheckExists(s.Host.Cgroups.Mount, c); err != nil {
		return nil, err
	}
	if c.Netns != "" && c.Steering == config.Reuseport && !rights.Has(unix.CAP_SYS_ADMIN) {
		return nil, &fault.Error{Err: errors.New("the agent has no right to enter network namespaces"),
			Hint: rights.MissingHint(unix.CAP_SYS_ADMIN, "restart the agent; it keeps that right if a service names a netns then"), Code: fault.CodeNotPermitted}
	}
	s.Mu.Lock() // commands change the settings concurrently
	defer s.Mu.Unlock()
	nonce, err := s.nonceFor(c)
	if err != nil {
		return nil, err
	}
	if err := s.resolveMapping(t, nonce, devices); err != nil {
		return nil, err
	}
	return t, nil
}

// resolveMapping sets the settings and the mapping of a target by the present settings of the slots.
func (s *service) resolveMapping(t *target, nonce uint64, devices *placement.DeviceMap) (err error) {
	shared := &service{Service: core.Service{Host: s.Host, State: s.State}}
	if err := shared.shareSettings(t.config); err != nil {
		return err
	}
	t.settings = shared.State
	t.mapping, err = stored.NewMapping(t.config, &t.settings, nonce, devices)
	return err
}

// plan lists the changes that a target makes, in the order of the policy keys.
func (s *service) plan(t *target) []api.Change {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if err := s.CheckOpen(); err != nil {
		return []api.Change{{Service: s.Name, Action: "change", What: "data path", Effect: "opened again"}}
	}
	var changes []api.Change
	add := func(what, effect string) {
		changes = append(changes, api.Change{Service: s.Name, Action: "change", What: what, Effect: effect})
	}
	from, to := s.Config, t.config
	if from.Steering != to.Steering {
		add(fmt.Sprintf("steering: %s -> %s", from.Steering, to.Steering),
			"all traffic is refused until the members are registered again, immediately")
	}
	if from.Slots != to.Slots {
		effect := s.targetEffect(t)
		var empty []int
		for slot := from.Slots; slot < to.Slots; slot++ {
			if s.Seats[slot] == nil {
				empty = append(empty, slot)
			}
		}
		switch {
		case len(empty) == 0:
		case to.SharesSlots: // the services move their devices together
			effect += fmt.Sprintf("; the devices of %s %s until a member is registered there", moves.SlotNames(empty), rooms.WhenEmptyEffect(to.WhenEmpty))
		default:
			effect += fmt.Sprintf("; the devices of %s stay until a member is registered there", moves.SlotNames(empty))
		}
		if lost := s.countSeatsFrom(to.Slots); lost > 0 {
			effect += "; " + format.Count(lost, "member loses its slot", "members lose their slots")
		}
		add(fmt.Sprintf("slots: %d -> %d", from.Slots, to.Slots), effect)
	}
	if from.SlotsAs != to.SlotsAs {
		effect := ""
		if from.Slots == to.Slots {
			effect = s.targetEffect(t)
		}
		add(fmt.Sprintf("slots_as: %s -> %s", cmp.Or(from.SlotsAs, "unset"), cmp.Or(to.SlotsAs, "unset")), effect)
	}
	if a, b := from.WhenEmpty.String(), to.WhenEmpty.String(); a != b {
		effect := ""
		if from.WhenEmpty.Room != nil && to.WhenEmpty.Room == nil {
			effect = s.waitingEffect()
		}
		add(fmt.Sprintf("when_empty: %s -> %s", a, b), effect)
	}
	if from.Takeover != to.Takeover {
		effect := ""
		if to.Takeover && len(s.waiting) > 0 {
			effect = "processes that wait for an occupied slot take the slot over, which closes its sessions"
		}
		add(fmt.Sprintf("takeover: %t -> %t", from.Takeover, to.Takeover), effect)
	}
	if from.Templates != to.Templates {
		effect := ""
		if n := s.rooms.Exporters(); n > 0 {
			effect = fmt.Sprintf("the templates of %s are discarded", format.Count(n, "exporter", "exporters"))
		}
		add(fmt.Sprintf("templates: %s -> %s", from.Templates, to.Templates), effect)
	}
	if a, b := moves.PaceText(from.Pace), moves.PaceText(to.Pace); a != b {
		add(fmt.Sprintf("pace: %s -> %s", a, b), "")
	}
	if from.OnMove != to.OnMove {
		effect, sessions := "", s.checks.SplitSessions()
		if sessions > 0 && to.OnMove == config.CloseMoved {
			effect = format.Count(sessions, "session of a split device is closed", "sessions of split devices are closed")
		}
		add(fmt.Sprintf("on_move: %s -> %s", from.OnMove, to.OnMove), effect)
	}
	if from.OnStart != to.OnStart {
		add(fmt.Sprintf("on_start: %s -> %s", from.OnStart, to.OnStart), "")
	}
	for _, l := range to.Listeners {
		if !slices.Contains(from.Listeners, l) {
			changes = append(changes, api.Change{Service: s.Name, Action: "add", What: "listener " + l.String(), Effect: "slots are not ready until their members listen on it"})
		}
	}
	for _, l := range from.Listeners {
		if !slices.Contains(to.Listeners, l) {
			changes = append(changes, api.Change{Service: s.Name, Action: "remove", What: "listener " + l.String(), Effect: "the kernel's hash decides there from then on"})
		}
	}
	if !s.Mapping.Devices.Equal(t.mapping.Devices) {
		effect := ""
		if from.Slots == to.Slots {
			effect = s.targetEffect(t)
		}
		if overridden := s.overridden(t.mapping.Devices, s.State.Overridden(s.Mapping.Devices)); overridden != "" {
			effect = strings.TrimPrefix(effect+"; "+overridden, "; ")
		}
		add(fmt.Sprintf("device_map: %s -> %s", deviceMapSummary(s.Mapping.Devices), deviceMapSummary(t.mapping.Devices)), effect)
	}
	if from.Backlog != to.Backlog {
		add(fmt.Sprintf("backlog: %d -> %d", from.Backlog, to.Backlog), "")
	}
	for _, field := range []struct {
		name, from, to string
		effect         func(*target) string
	}{
		{"user", strings.Join(from.Users, ", "), strings.Join(to.Users, ", "), s.userEffect},
		{"netns", from.Netns, to.Netns, func(*target) string { return "members in the old namespace lose their slots" }},
		{"cgroup", from.Cgroup, to.Cgroup, s.lostSlotsEffect},
	} {
		if field.from != field.to {
			add(fmt.Sprintf("%s: %s -> %s", field.name, cmp.Or(field.from, "unset"), cmp.Or(field.to, "unset")), field.effect(t))
		}
	}
	if from.TrackDevices != to.TrackDevices {
		add(fmt.Sprintf("track_devices: %d -> %d", from.TrackDevices, to.TrackDevices), "the devices seen so far are forgotten")
	}
	if !reflect.DeepEqual(from.Members, to.Members) {
		add("members", s.lostSlotsEffect(t))
	}
	return changes
}

func (s *service) userEffect(t *target) string {
	if s.UsesLookup() {
		return s.lostSlotsEffect(t)
	}
	return s.lostSlotsEffect(t) + "; the ports are held for that user"
}

// lostSlotsEffect describes how many members lose their slot under the target.
func (s *service) lostSlotsEffect(t *target) string {
	then := &service{Service: core.Service{Name: s.Name, Config: t.config, Users: t.users, State: s.State}, rules: t.rules, memberHost: s.memberHost, firstSeen: maps.Clone(s.firstSeen)}
	lost := 0
	for slot, now := range s.Seats {
		want, err := then.membership(now.Process, &core.Seat{})
		if err != nil || want != member.AnySlot && want != slot {
			lost++
		}
	}
	if lost == 0 {
		return "no member loses its slot"
	}
	return format.Count(lost, "member loses its slot", "members lose their slots")
}

// waitingEffect describes what waits now, and is discarded without a waiting room.
func (s *service) waitingEffect() string {
	var waiting uint64
	slots := 0
	for slot := range s.Config.Slots {
		room, err := s.rooms.Status(slot)
		if err != nil || room == nil || room.Until == nil || room.Filling { // a member receives what waits there
			continue
		}
		waiting += room.Waiting
		slots++
	}
	if slots == 0 {
		return ""
	}
	return format.Count(waiting, "datagram that waits is", "datagrams that wait are") + " discarded, and connections that wait are closed"
}

func (s *service) countSeatsFrom(slots int) (n int) {
	for slot := range s.Seats {
		if slot >= slots {
			n++
		}
	}
	return n
}

// targetEffect describes the devices that get another slot under a target. Devices of slots without a member stay.
func (s *service) targetEffect(t *target) string {
	return s.moves.Effect(s.moves.Settled(), t.mapping.WithPins(t.settings.PinsFor(t.config.Slots, nil)))
}

func deviceMapSummary(m *placement.DeviceMap) string {
	if m == nil {
		return "none"
	}
	return fmt.Sprintf("%s of %s", format.Count(m.Len(), "prefix", "prefixes"), format.Count(len(m.Devices()), "device", "devices"))
}
