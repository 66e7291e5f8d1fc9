// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"slices"

	"sockeye/internal/member"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/session"
	"sockeye/internal/steer/stored"
)

// adoptDevices assigns each split device under on_start whose connections are all with one member to the slot of that
// member, and reports whether there is one.
func (s *service) adoptDevices(split []splitDevice) bool {
	before := slices.Clone(s.State.Adopted)
	for _, d := range split {
		if d.partly || len(d.at) != 1 || s.Seats[d.at[0]] == nil ||
			slices.ContainsFunc(d.Sessions, func(one session.Session) bool { return !s.underOnStart(&one) }) {
			continue
		}
		a := stored.AdoptedDevice{ID: s.Seats[d.at[0]].ID(), Device: d.Name, Slot: d.at[0]}
		if d.Name == "" {
			a.Address = d.Address
		}
		s.State.Adopted = append(s.State.Adopted, a)
	}
	count := len(s.State.Adopted) - len(before)
	if count == 0 {
		return false
	}
	// The state is saved first: after a crash before place, the next agent installs the same mapping.
	err := s.State.Save(s.StatePath())
	if err == nil {
		s.Mapping = s.Mapping.WithPins(s.PinsInForce())
		err = s.InstallMapping()
	}
	if err != nil {
		s.Log.Error("cannot adopt devices", "devices", count, "error", err)
		s.State.Adopted = before
		return false
	}
	s.Log.Warn("devices adopted by the member that has their connections", "devices", count)
	return true
}

// pruneAdopted returns adopted devices to their own slots after the exit of their member, which has closed all their
// connections.
func (s *service) pruneAdopted() {
	kept := slices.DeleteFunc(slices.Clone(s.State.Adopted), func(a stored.AdoptedDevice) bool {
		if seat := s.Seats[a.Slot]; seat != nil {
			return seat.ID() != a.ID
		}
		return !member.Alive(a.PID, a.StartTime)
	})
	if len(kept) == len(s.State.Adopted) {
		return
	}
	s.Log.Info("devices returned to their own slot", "devices", len(s.State.Adopted)-len(kept))
	s.State.Adopted = kept
	if s.Path == nil {
		return
	}
	if err := errors.Join(s.moves.Place(), s.State.Save(s.StatePath())); err != nil {
		s.Log.Error("cannot return devices to their own slot", "error", err)
	}
}

// hasAdoptedDevices reports whether devices are adopted for a member.
func (s *service) hasAdoptedDevices(seat *core.Seat) bool {
	return slices.ContainsFunc(s.State.Adopted, func(a stored.AdoptedDevice) bool { return a.ID == seat.ID() })
}

// forgetAdopter releases the adopted devices of a member that has exited.
func (s *service) forgetAdopter(handle *member.Handle) {
	if s.adopters[handle] {
		delete(s.adopters, handle)
		handle.Close()
	}
	s.pruneAdopted()
}
