// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/placement"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/stored"
)

// prebuildDeviceMap builds the device map of a configuration for the kernel if it differs from the installed one.
// The lock is not held during the build.
func (s *service) prebuildDeviceMap(c config.Service, devices *placement.DeviceMap) (builtDeviceMap, error) {
	s.Mu.Lock()
	nonce, err := s.nonceFor(c)
	pins := s.State.PinsFor(c.Slots, nil)
	installed := s.installedEntries
	s.Mu.Unlock()
	if err != nil {
		return builtDeviceMap{}, err
	}
	m, err := stored.NewMapping(c, &stored.State{}, nonce, devices)
	if err != nil {
		return builtDeviceMap{}, err
	}
	m = m.WithPins(pins)
	if entries := m.Entries(); installed == nil || !installed.Equal(entries) {
		return buildDeviceMap(entries)
	}
	return builtDeviceMap{}, nil
}

// currentTarget returns what is in force as a target.
func (s *service) currentTarget() *target {
	return &target{config: s.Config, rules: s.rules, users: s.Users, mapping: s.Target, settings: s.State}
}

// applyTarget switches the service to a target and returns the previous one. If that fails, applyTarget switches back to
// the previous target.
func (s *service) applyTarget(t *target) (before *target, err error) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	before = s.currentTarget()
	s.pendingDevices, t.pendingDevices = t.pendingDevices, builtDeviceMap{}
	defer s.pendingDevices.close()
	// Commands and the ends of pins have changed the settings since the target was resolved: a large device map takes
	// seconds.
	if err := s.resolveMapping(t, t.mapping.Table.Nonce, t.mapping.Devices); err != nil {
		return nil, err
	}
	if err := s.switchTo(t); err != nil {
		if back := s.switchTo(before); back != nil {
			return nil, fault.Join(err, fmt.Errorf("restore the previous policy: %w", back))
		}
		return nil, err
	}
	return before, nil
}

// switchTo switches the service to a target. Pinned maps are reused unless the network namespace or the kind of steering
// changes.
func (s *service) switchTo(t *target) error {
	s.moves.CloseGateSockets()
	if s.Events == nil || s.Config.Netns != t.config.Netns || s.Config.Steering != t.config.Steering {
		return s.recreate(t)
	}
	old := s.Rows
	s.setTarget(t)
	s.State.MovesStopped = false
	s.moves.Begin("policy", "policy")
	s.assignRows(old)
	if err := s.removeListeners(old); err != nil {
		return err
	}
	if err := s.saveState(); err != nil {
		return err
	}
	if err := s.openPath(); err != nil {
		return err
	}
	// The mapping in force stays until the members of new slots are registered, so that no device moves twice.
	s.Restoring = true
	defer func() { s.Restoring = false }()
	for slot, seat := range s.Seats {
		want, err := s.membership(seat.Process, seat)
		if err == nil {
			err = s.verifySockets(seat)
		}
		switch {
		case err != nil:
			s.VacateSlot(slot, err.Error())
		case want != member.AnySlot && want != slot:
			s.VacateSlot(slot, "another slot by the policy")
		case !s.loadSeatSockets(seat):
			s.VacateSlot(slot, "another listener by the policy")
		default:
			s.raiseBacklog(seat)
		}
	}
	// The rooms come first, because the slots of members that are found now may be filling.
	if s.rooms.Exist() {
		if err := s.reconcileKeeper(); err != nil {
			return err
		}
	}
	if err := s.scan(); err != nil {
		return err
	}
	s.Restoring = false
	s.checks.Soon()
	if err := fault.Join(s.rooms.WriteWaits(), s.moves.Advance(), s.reconcileKeeper()); err != nil {
		return err
	}
	s.rooms.DeliverWaiting()
	return nil
}

// recreate replaces the data path, for changes that the pinned maps cannot represent. The old data path refuses all
// traffic, with all slots closed, until the new one is attached.
func (s *service) recreate(t *target) error {
	s.installedEntries = nil
	for pid := range s.waiting {
		s.forgetWaiting(pid)
	}
	// Their timers do nothing while the service is closed.
	s.scannedRecently, s.scanPending = false, false
	clear(s.inspected)
	if s.Path == nil {
		if err := bpf.Remove(s.Host.Root.Service(s.Name)); err != nil {
			return err
		}
		return s.reopen(t, nil)
	}
	old, groups := s.Path, s.groupSockets()
	s.emptying = true
	for slot := range s.Seats {
		s.VacateSlot(slot, "service restarted")
	}
	s.emptying = false
	if s.Events != nil {
		s.Events.Close()
	}
	s.traffic.End()
	s.Events, s.Path = nil, nil
	err := bpf.Unpin(s.Host.Root.Service(s.Name))
	if err == nil {
		err = s.reopen(t, groups)
	}
	for _, fd := range groups {
		unix.Close(fd)
	}
	return fault.Join(err, old.DetachLinks())
}

// reopen opens the new data path, detaches the programs from the groups of the old one, and registers the members again.
func (s *service) reopen(t *target, groups []int) error {
	s.setTarget(t)
	if err := s.saveState(); err != nil {
		return err
	}
	if s.Netns != nil {
		s.Netns.Close()
		s.Netns = nil
	}
	if s.Conn != nil {
		s.Conn.Close()
		s.Conn = nil
	}
	s.rooms.LeaveNetns()
	if err := s.OpenNetns(); err != nil {
		return err
	}
	s.assignRows(s.Rows)
	if err := s.openPath(); err != nil {
		return err
	}
	var errs []error
	for _, fd := range groups {
		errs = append(errs, bpf.Detach(fd))
	}
	if err := fault.Join(append(errs, s.killKeeper())...); err != nil {
		return err
	}
	return s.restore()
}

// setTarget makes a target the configuration of the service.
func (s *service) setTarget(t *target) {
	s.Config, s.rules, s.Users, s.Target = t.config, t.rules, t.users, t.mapping
	s.State.Nonce = t.mapping.Table.Nonce
	for i := range s.State.Pins {
		if s.State.Pins[i].Slot >= t.config.Slots {
			s.State.Pins[i].InForce = false // the pin waits until the policy has the slot again
		}
	}
	if t.config.SlotsAs != "" {
		s.State.Slots, s.State.Pins = t.settings.Slots, t.settings.Pins
	}
}

// saveState saves the state. A policy that names users overrides the user of the first claim.
func (s *service) saveState() error {
	if len(s.Users) > 0 {
		s.State.ClaimedUID = nil
	}
	return s.State.Save(s.StatePath())
}

// removeListeners removes the listeners of old that the policy no longer has. The keeper sockets of a listener are
// closed before its program is detached.
func (s *service) removeListeners(old [bpf.MaxListeners]bpf.Listener) error {
	var errs []error
	var dropped []int
	for row, l := range old {
		if l == (bpf.Listener{}) || l == s.Rows[row] {
			continue
		}
		if fd, ok := s.KeeperSockets[row]; ok {
			dropped = append(dropped, fd)
			delete(s.KeeperSockets, row)
		}
		for _, seat := range s.Seats {
			errs = append(errs, s.Path.Delete(row, seat.Place))
			delete(seat.Sockets, row)
		}
	}
	if len(dropped) > 0 {
		errs = append(errs, s.replaceKeeper())
	}
	for _, fd := range dropped {
		errs = append(errs, bpf.Detach(fd))
		unix.Close(fd)
	}
	return fault.Join(errs...)
}

func (s *service) raiseBacklog(seat *core.Seat) {
	sockets, err := seat.Handle.Sockets(s.matchesListener)
	if err != nil {
		return
	}
	defer member.CloseAll(sockets)
	for _, socket := range sockets {
		if socket.Protocol == unix.IPPROTO_TCP && socket.Listening {
			if err := socket.Listen(s.Backlog()); err != nil {
				s.Log.Warn("backlog not set", "slot", seat.Slot, "pid", seat.Process.PID, "error", err)
			}
		}
	}
}
