// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/clock"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/member"
	"sockeye/internal/placement"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/locate"
	"sockeye/internal/steer/stored"
)

func (s *service) status() api.ServiceStatus {
	s.past.Search()
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.reevaluateWaiting()
	status := api.ServiceStatus{
		Name: s.Name, Steering: string(s.Config.Steering), WhenEmpty: s.Config.WhenEmpty.String(),
		Slots: s.Config.Slots, SlotsAs: s.Config.SlotsAs, Ready: s.countReady(), Nonce: fmt.Sprintf("%#x", s.State.Nonce),
		PortsSteered: s.UsesLookup() || (s.keeperProblem == nil && len(s.KeeperSockets) == len(s.Listeners) && s.keeper != nil),
		Notes:        []string{}, Waiting: []api.WaitingStatus{}, Refused: []api.RefusedStatus{},
	}
	if s.keeper != nil {
		status.Keeper = s.keeper.Self.PID
	}
	for _, l := range s.Config.Listeners {
		status.Listeners = append(status.Listeners, l.String())
	}
	if s.Mapping.Devices != nil {
		status.DeviceMap = &api.DeviceMapStatus{
			Path: s.Config.DeviceMap, Prefixes: s.Mapping.Devices.Len(), Devices: len(s.Mapping.Devices.Devices()),
		}
	}
	if err := s.CheckOpen(); err != nil {
		status.PortsSteered, status.Problem, status.Hint = false, err.Error(), fault.Hint(err)
		return status
	}
	status.Notes = s.notes()
	status.SplitDevices, status.AdoptedDevices = s.checks.SplitDevices(), len(s.State.Adopted)
	s.past.WriteStatus(&status)
	past, split, duplicate := s.past.Problem(), s.checks.Problem(), s.duplicateProblem()
	switch {
	case s.keeperProblem != nil:
		status.Problem, status.Hint = s.keeperProblem.Error(), fault.Hint(s.keeperProblem)
	case !status.PortsSteered:
		status.Problem = "the members' user is not known before the first member; until then the ports are not held"
		status.Hint = "set user of the service"
	case past != nil:
		status.Problem, status.Hint = past.Error(), fault.Hint(past)
	case split != nil:
		status.Problem, status.Hint = split.Error(), fault.Hint(split)
	case duplicate != nil:
		status.Problem, status.Hint = duplicate.Error(), fault.Hint(duplicate)
	}
	status.Waiting = s.waitingStatus()
	for _, former := range slices.SortedFunc(maps.Values(s.Formers), func(a, b *core.Seat) int { return cmp.Compare(a.Process.PID, b.Process.PID) }) {
		status.Formers = append(status.Formers, api.FormerStatus{Slot: former.Slot, PID: former.Process.PID, Command: former.Process.Command()})
	}
	status.Refused = s.notAdmitted.List()
	status.Drops = s.traffic.RecentDrops(time.Now())
	return status
}

// waitingStatus returns the processes that are not members yet, sorted by process id.
func (s *service) waitingStatus() []api.WaitingStatus {
	list := []api.WaitingStatus{}
	for _, w := range slices.SortedFunc(maps.Values(s.waiting), func(a, b *waitingProcess) int {
		return cmp.Compare(a.process.PID, b.process.PID)
	}) {
		list = append(list, api.WaitingStatus{
			Slot: slotOrNil(w.slot), PID: w.process.PID, Command: w.process.Command(),
			Source: w.source, Problem: w.problem.Error(), Hint: cmp.Or(fault.Hint(w.problem), waitingHint(w.problem)),
		})
	}
	return list
}

// waitingHint returns the hint for a process that may wait forever.
func waitingHint(problem error) string {
	if errors.Is(problem, errNotOpen) {
		return "if this persists, compare the ports of its configuration with the listeners of the policy"
	}
	return ""
}

func (s *service) slots() ([]api.SlotStatus, error) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if err := s.CheckOpen(); err != nil {
		return nil, err
	}
	slots := s.Config.Slots
	for slot := range s.Seats {
		slots = max(slots, slot+1) // a slot that the policy no longer has, until its devices have moved
	}
	counters, err := s.Path.Counters(slots)
	if err != nil {
		return nil, err
	}
	shares, sessions := s.shares(), s.countSessions()
	list := make([]api.SlotStatus, slots)
	overridden := s.State.Overridden(s.Mapping.Devices)
	for slot := range list {
		set := s.SlotState(slot)
		status := api.SlotStatus{
			Service: s.Name, Slot: slot, State: string(set.State), Weight: set.Weight, Share: shares[slot],
			Pins: []api.PinStatus{}, Counts: counts(counters[slot]), Sockets: []api.SocketStatus{},
		}
		if slot >= s.Config.Slots {
			status.State, status.Weight = "removed", 0
		}
		if status.Room, err = s.rooms.Status(slot); err != nil {
			return nil, err
		}
		for _, p := range s.moves.PinsOf(slot) {
			why := overridden[p.Name()]
			inForce := why == "" && p.InForce && p.Slot < s.Config.Slots && s.SlotState(p.Slot).State != stored.Drain
			status.Pins = append(status.Pins, api.PinStatus{Device: p.Name(), Until: p.Until, InForce: inForce, Problem: why})
		}
		if seat := s.Seats[slot]; seat != nil {
			// The boot time is the difference of two clocks that are not read at the same time.
			since := clock.StartedAt(seat.Process.StartTime, clock.BootTime()).Round(time.Second)
			status.Sessions = sessions[seat.ID()]
			status.Ready, status.PID, status.Source = s.IsReady(slot), seat.Process.PID, seat.Source
			status.Command, status.Since = seat.Process.Command(), &since
			for _, row := range slices.Sorted(maps.Keys(seat.Sockets)) {
				socket := seat.Sockets[row]
				status.Sockets = append(status.Sockets, api.SocketStatus{Listener: s.Listeners[row].String(), Local: socket.Local, Cookie: socket.Cookie})
			}
		}
		list[slot] = status
	}
	return list, nil
}

func counts(c bpf.Counters) api.Counts {
	out := api.Counts{Connections: c.Connections, Datagrams: c.Datagrams, Diverted: c.Diverted, Refused: make(map[string]uint64)}
	for reason, name := range bpf.Reasons {
		out.Refused[name] = c.RefusedConnections[reason] + c.RefusedDatagrams[reason]
	}
	return out
}

func (s *service) devices() ([]api.DeviceStatus, error) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if err := s.CheckOpen(); err != nil {
		return nil, err
	}
	list := []api.DeviceStatus{}
	if s.Config.TrackDevices == 0 {
		return list, nil
	}
	sessions := s.sessionSlots()
	monotonic := clock.MonotonicZero()
	dropped, err := s.traffic.DroppedBySource()
	if err != nil {
		return nil, err
	}
	for address, seen := range s.Path.Devices() {
		addr := placement.Addr(address)
		at := s.Mapping.Locate(addr)
		status := api.DeviceStatus{
			Service: s.Name, Address: addr, Device: at.Device, Slot: at.Slot, Pinned: at.Pinned, LastSlot: slotOrNil(int(seen.Slot)),
			Datagrams: seen.Datagrams, Connections: seen.Connections, Refused: seen.Refused,
			LastSeen: monotonic.Add(time.Duration(seen.LastSeen)), SessionSlots: []int{},
		}
		if dropped != nil {
			n := dropped[address]
			status.Dropped = &n
		}
		if of := sessions[addr]; of != nil {
			status.Sessions, status.SessionSlots, status.Split = of.sessions, of.slots, of.split
		}
		if status.Split && s.Config.OnMove == config.CloseMoved {
			if err := s.CanClose(); err != nil {
				status.Problem = err.Error()
			}
		}
		list = append(list, status)
	}
	slices.SortFunc(list, func(a, b api.DeviceStatus) int { return a.Address.Compare(b.Address) })
	return list, nil
}

func slotOrNil(slot int) *int {
	if slot == member.AnySlot || slot == bpf.NoSlot {
		return nil
	}
	return &slot
}

// sessionsOf are the open sessions of an address.
type sessionsOf struct {
	sessions int
	slots    []int // of the members that have them; -1: no member
	split    bool  // a session is at another member than the one that serves the address
}

// sessionSlots returns the open sessions by address.
func (s *service) sessionSlots() map[netip.Addr]*sessionsOf {
	all := make(map[netip.Addr]*sessionsOf)
	list, err := s.ReadSessions()
	if err != nil {
		s.Log.Warn("sessions not read", "error", err)
		return all
	}
	seated := make(map[member.ID]int)
	for slot, seat := range s.Seats {
		seated[seat.ID()] = slot
	}
	now := s.Serving()
	for _, one := range list {
		if one.State != sockdiag.Established {
			continue
		}
		if !one.Owned {
			continue
		}
		of := all[one.Address]
		if of == nil {
			of = &sessionsOf{slots: []int{}}
			all[one.Address] = of
		}
		of.sessions++
		slot, ok := seated[one.OwnerID()]
		if !ok {
			slot = -1
		}
		if !slices.Contains(of.slots, slot) {
			of.slots = append(of.slots, slot)
		}
		server, served := now.Server(one.Address)
		of.split = of.split || served && server != one.OwnerID()
	}
	for _, of := range all {
		slices.Sort(of.slots)
	}
	return all
}

// countSessions returns the number of open sessions by member.
func (s *service) countSessions() map[member.ID]int {
	count := make(map[member.ID]int)
	list, err := s.ReadSessions()
	if err != nil {
		s.Log.Warn("sessions not read", "error", err)
	}
	for i := range list {
		if list[i].State == sockdiag.Established && list[i].Owned {
			count[list[i].OwnerID()]++
		}
	}
	return count
}

// notes describes the changes by commands that are in force, and the slots whose devices are not served.
func (s *service) notes() []string {
	notes := []string{}
	for _, slot := range slices.Sorted(maps.Keys(s.State.Slots)) {
		set := s.State.Slots[slot]
		if slot >= s.Config.Slots {
			notes = append(notes, fmt.Sprintf("slot %d, which the policy does not have, keeps its state and weight", slot))
			continue
		}
		var parts []string
		switch set.State {
		case stored.Drain:
			parts = append(parts, "drains")
		case stored.Maint:
			parts = append(parts, "is in maint")
		}
		if set.Weight != stored.DefaultSetting.Weight {
			parts = append(parts, fmt.Sprintf("has weight %d", set.Weight))
		}
		notes = append(notes, fmt.Sprintf("slot %d %s", slot, strings.Join(parts, " and ")))
	}
	var empty []int
	for slot := range s.Config.Slots {
		switch note := s.rooms.Note(slot); {
		case note != "":
			notes = append(notes, note)
		case !s.IsReady(slot) && s.SlotState(slot).State != stored.Maint && s.HasDevices(slot):
			empty = append(empty, slot)
		}
	}
	if len(empty) > 0 {
		notes = append(notes, s.emptyNote(empty))
	}
	closed := s.traffic.ClosedWindows()
	for _, slot := range slices.Sorted(maps.Keys(closed)) {
		notes = append(notes, fmt.Sprintf("the member of slot %d does not read from %s: the receive windows are closed", slot,
			format.Count(closed[slot], "connection", "connections")))
	}
	for _, former := range slices.SortedFunc(maps.Values(s.Formers), func(a, b *core.Seat) int { return cmp.Compare(a.Process.PID, b.Process.PID) }) {
		if by := s.Seats[former.Slot]; by != nil {
			notes = append(notes, fmt.Sprintf("process %d was the member of slot %d, which process %d has taken over; it may be stopped",
				former.Process.PID, former.Slot, by.Process.PID))
		}
	}
	if n := len(s.State.Pins); n > 0 {
		notes = append(notes, format.Count(n, "device or prefix is pinned", "devices or prefixes are pinned"))
	}
	if overridden := s.overridden(s.Mapping.Devices, nil); overridden != "" {
		notes = append(notes, overridden)
	}
	if removed := s.State.DescribeBeyond(s.Config.Slots); removed != "" {
		notes = append(notes, removed)
	}
	if s.ignoresSettings {
		notes = append(notes, "states and weights of the slots are ignored: no slot would be left for any device")
	}
	if n := s.moves.CountStopped(); n > 0 {
		notes = append(notes, fmt.Sprintf("moves are stopped, and %s not at the target slot", format.Count(n, "device is", "devices are")))
	}
	return notes
}

// overridden describes the pins that a device map makes ineffective, except for some. The result is "" for none.
func (s *service) overridden(devices *placement.DeviceMap, except map[string]string) string {
	why := s.State.Overridden(devices)
	for name := range except {
		delete(why, name)
	}
	if len(why) == 0 {
		return ""
	}
	first := slices.Min(slices.Collect(maps.Keys(why)))
	text := fmt.Sprintf("the pin of %s has no effect: %s", first, why[first])
	if n := len(why) - 1; n > 0 {
		text += fmt.Sprintf(" (and %s)", format.Count(n, "more pin", "more pins"))
	}
	return text
}

// mostEmptySlots is the number of empty slots that a note names.
const mostEmptySlots = 8

// emptyNote describes slots without a member, and what becomes of the packets of their devices.
func (s *service) emptyNote(slots []int) string {
	effect := "refused"
	if standby := s.Config.WhenEmpty.Standby; standby != nil && s.IsReady(*standby) {
		effect = fmt.Sprintf("diverted to slot %d", *standby)
	}
	if len(slots) == 1 {
		return fmt.Sprintf("slot %d is empty: the packets of its devices are %s", slots[0], effect)
	}
	var names []string
	for _, slot := range slots[:min(len(slots), mostEmptySlots)] {
		names = append(names, strconv.Itoa(slot))
	}
	if more := len(slots) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	return fmt.Sprintf("slots %s are empty: the packets of their devices are %s", strings.Join(names, ", "), effect)
}

// countReady returns the number of slots that receive traffic.
func (s *service) countReady() (n int) {
	for slot := range s.Seats {
		if s.IsReady(slot) {
			n++
		}
	}
	return n
}

// shares returns the share of the buckets in force by slot.
func (s *service) shares() map[int]float64 {
	shares := make(map[int]float64)
	for _, slot := range s.Mapping.Table.Bucket {
		shares[int(slot)] += 1 / float64(bpf.Buckets)
	}
	return shares
}

func (s *service) where(addresses []netip.Addr) []api.WhereStatus {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	list := locate.Where(s.Name, s.Mapping, addresses)
	for i := range list {
		by := s.Host.ServedBy(&s.Config, list[i].Address)
		list[i].Host, list[i].HostUnknown, list[i].FleetBucket = by.Host, by.Unknown, by.Bucket
		if by.Here {
			ready := s.IsReady(list[i].Slot)
			list[i].Ready = &ready
		}
	}
	return list
}
