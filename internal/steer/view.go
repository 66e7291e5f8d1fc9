// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/steer/placement"
)

func (s *service) status() api.ServiceStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reevaluateWaiting()
	status := api.ServiceStatus{
		Name: s.config.Name, Steering: string(s.config.Steering), WhenEmpty: "reject",
		Slots: s.config.Slots, SlotsAs: s.config.SlotsAs, Ready: len(s.seats), Nonce: fmt.Sprintf("%#x", s.state.Nonce),
		PortsSteered: s.usesLookup() || (s.keeperProblem == nil && len(s.keeperSockets) == len(s.listeners) && s.keeper != nil),
		Waiting:      []api.WaitingStatus{},
	}
	if s.config.Standby != nil {
		status.WhenEmpty = fmt.Sprintf("standby %d", *s.config.Standby)
	}
	if s.keeper != nil {
		status.Keeper = s.keeper.pid
	}
	for _, l := range s.config.Listeners {
		status.Listeners = append(status.Listeners, l.String())
	}
	if s.mapping.Devices != nil {
		status.DeviceMap = &api.DeviceMapStatus{
			Path: s.config.DeviceMap, Prefixes: s.mapping.Devices.Len(), Devices: len(s.mapping.Devices.Devices()),
		}
	}
	status.SplitDevices, status.AdoptedDevices = len(s.checks.split), len(s.state.Adopted)
	split, duplicate := s.splitProblem(), s.duplicateProblem()
	switch {
	case s.keeperProblem != nil:
		status.Problem, status.Hint = s.keeperProblem.Error(), fault.Hint(s.keeperProblem)
	case !status.PortsSteered:
		status.Problem = "the members' user is not known before the first member; until then the ports are not held"
		status.Hint = "set user of the service"
	case split != nil:
		status.Problem, status.Hint = split.Error(), fault.Hint(split)
	case duplicate != nil:
		status.Problem, status.Hint = duplicate.Error(), fault.Hint(duplicate)
	}
	for _, w := range slices.SortedFunc(maps.Values(s.waiting), func(a, b *waitingProcess) int {
		return cmp.Compare(a.process.PID, b.process.PID)
	}) {
		status.Waiting = append(status.Waiting, api.WaitingStatus{
			Slot: slotOrNil(w.slot), PID: w.process.PID, Command: w.process.Command(),
			Source: w.source, Problem: w.problem.Error(), Hint: cmp.Or(fault.Hint(w.problem), waitingHint(w.problem)),
		})
	}
	status.Refused = s.refusals.list()
	return status
}

// waitingHint returns the hint for a process that may wait forever.
func waitingHint(problem error) string {
	if errors.Is(problem, errNotOpen) {
		return "if this persists, compare the ports of its configuration with the listeners of the policy"
	}
	return ""
}

func slotOrNil(slot int) *int {
	if slot == member.AnySlot || slot == bpf.NoSlot {
		return nil
	}
	return &slot
}

func (s *service) slots() ([]api.SlotStatus, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	counters, err := s.path.Counters(s.config.Slots)
	if err != nil {
		return nil, err
	}
	list := make([]api.SlotStatus, s.config.Slots)
	for slot := range list {
		status := api.SlotStatus{Service: s.config.Name, Slot: slot, Counts: counts(counters[slot]), Sockets: []api.SocketStatus{}}
		if seat := s.seats[slot]; seat != nil {
			// The boot time is the difference of two clocks that are not read at the same time.
			since := startedAt(seat.process.StartTime, bootTime()).Round(time.Second)
			status.Ready, status.PID, status.Source = true, seat.process.PID, seat.source
			status.Command, status.Since = seat.process.Command(), &since
			for _, row := range slices.Sorted(maps.Keys(seat.sockets)) {
				socket := seat.sockets[row]
				status.Sockets = append(status.Sockets, api.SocketStatus{Listener: s.listeners[row].String(), Local: socket.local, Cookie: socket.cookie})
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

func bootTime() time.Time {
	return time.Now().Add(-since(unix.CLOCK_BOOTTIME))
}

func since(clock int32) time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(clock, &now); err != nil {
		return 0
	}
	return time.Duration(now.Nano())
}

func (s *service) devices() []api.DeviceStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := []api.DeviceStatus{}
	if s.config.TrackDevices == 0 {
		return list
	}
	monotonic := time.Now().Add(-since(unix.CLOCK_MONOTONIC))
	for address, seen := range s.path.Devices() {
		addr := placement.Addr(address)
		slot, name := s.mapping.Slot(addr)
		list = append(list, api.DeviceStatus{
			Service: s.config.Name, Address: addr, Device: name, Slot: slot, LastSlot: slotOrNil(int(seen.Slot)),
			Datagrams: seen.Datagrams, Connections: seen.Connections, Refused: seen.Refused,
			LastSeen: monotonic.Add(time.Duration(seen.LastSeen)),
		})
	}
	slices.SortFunc(list, func(a, b api.DeviceStatus) int { return a.Address.Compare(b.Address) })
	return list
}

func (s *service) where(addresses []netip.Addr) []api.WhereStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := Where(s.config.Name, s.mapping, addresses)
	for i := range list {
		ready := s.seats[list[i].Slot] != nil
		list[i].Ready = &ready
	}
	return list
}

// Where returns the slots of addresses in a mapping.
func Where(service string, mapping *placement.Mapping, addresses []netip.Addr) []api.WhereStatus {
	list := make([]api.WhereStatus, len(addresses))
	for i, addr := range addresses {
		list[i] = api.WhereStatus{Service: service, Address: addr.Unmap().WithZone("")}
		list[i].Slot, list[i].Device = mapping.Slot(addr)
		list[i].Bucket = mapping.Bucket(addr)
	}
	return list
}
