// SPDX-License-Identifier: Apache-2.0

package split

import (
	"slices"

	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/session"
	"sockeye/internal/steer/stored"
)

// adoptDevices assigns each split device under on_start whose connections are all with one member to the slot of that
// member, and reports whether there is one.
func (c *Checks) adoptDevices(split []splitDevice) bool {
	before := slices.Clone(c.State.Adopted)
	for _, d := range split {
		if d.partly || len(d.at) != 1 || c.Seats[d.at[0]] == nil ||
			slices.ContainsFunc(d.Sessions, func(one session.Session) bool { return !c.underOnStart(&one) }) {
			continue
		}
		a := stored.AdoptedDevice{ID: c.Seats[d.at[0]].ID(), Device: d.Name, Slot: d.at[0]}
		if d.Name == "" {
			a.Address = d.Address
		}
		c.State.Adopted = append(c.State.Adopted, a)
	}
	count := len(c.State.Adopted) - len(before)
	if count == 0 {
		return false
	}
	// The state is saved first: after a crash before the mapping is installed, the next agent installs the same mapping.
	err := c.State.Save(c.StatePath())
	if err == nil {
		c.Mapping = c.Mapping.WithPins(c.PinsInForce())
		err = c.Actions.InstallMapping()
	}
	if err != nil {
		c.Log.Error("cannot adopt devices", "devices", count, "error", err)
		c.State.Adopted = before
		return false
	}
	c.Log.Warn("devices adopted by the member that has their connections", events.DevicesAdopted, "devices", count)
	return true
}

// hasAdoptedDevices reports whether devices are adopted for a member.
func (c *Checks) hasAdoptedDevices(seat *core.Seat) bool {
	return slices.ContainsFunc(c.State.Adopted, func(a stored.AdoptedDevice) bool { return a.ID == seat.ID() })
}

// ForgetAdopter releases the adopted devices of a member that has exited.
func (c *Checks) ForgetAdopter(handle *member.Handle) {
	if c.adopters[handle] {
		delete(c.adopters, handle)
		handle.Close()
	}
	c.PruneAdopted()
}

// PruneAdopted returns adopted devices to their own slots after the exit of their member, which has closed all their
// connections.
func (c *Checks) PruneAdopted() {
	kept := slices.DeleteFunc(slices.Clone(c.State.Adopted), func(a stored.AdoptedDevice) bool {
		if seat := c.Seats[a.Slot]; seat != nil {
			return seat.ID() != a.ID
		}
		return !member.Alive(a.PID, a.StartTime)
	})
	if len(kept) == len(c.State.Adopted) {
		return
	}
	c.Log.Info("devices returned to their own slot", events.DevicesReturned, "devices", len(c.State.Adopted)-len(kept))
	c.State.Adopted = kept
	if c.Path == nil {
		return
	}
	if err := fault.Join(c.moves.Advance(), c.State.Save(c.StatePath())); err != nil {
		c.Log.Error("cannot return devices to their own slot", "error", err)
	}
}

// ReleaseHandle closes the handle of a former member, or keeps it open while devices are adopted for the member.
func (c *Checks) ReleaseHandle(seat *core.Seat) {
	if c.hasAdoptedDevices(seat) {
		c.adopters[seat.Handle] = true // a goroutine still waits for the exit
		return
	}
	seat.Handle.Close()
}
