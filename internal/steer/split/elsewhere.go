// SPDX-License-Identifier: Apache-2.0

package split

import (
	"maps"
	"slices"

	"sockeye/internal/events"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/session"
)

// closeElsewhere closes the connections of devices that another host of the fleet serves, and returns the others. The
// packets of the devices already reach the other host, so on_move does not matter.
func (c *Checks) closeElsewhere(list []session.Session) []session.Session {
	fleet := c.Host.Fleet.Load()
	if fleet == nil {
		return list
	}
	list, left := divide(fleet, list)
	c.closeLeft(fleet, left)()
	return list
}

// FindLeaving finds the connections of devices that leave this host when a fleet is in force. closing closes them, in their order, and returns
// a function that logs this. The caller does not hold the lock of the service.
func (c *Checks) FindLeaving(fleet *core.Fleet) (connections []sockdiag.Socket, closing func() (log func())) {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	var left []session.Session
	if c.CheckOpen() == nil && !c.Restoring {
		list, err := c.ReadSessions()
		if err != nil {
			c.Log.Warn("connections not checked", "error", err)
		}
		_, left = divide(fleet, list)
	}
	for i := range left {
		connections = append(connections, left[i].Socket)
	}
	return connections, func() func() {
		c.Mu.Lock()
		defer c.Mu.Unlock()
		if c.CheckOpen() != nil {
			left = nil
		}
		return c.closeLeft(fleet, left)
	}
}

// divide returns the connections of devices that this host serves, and those of devices of other hosts: the connections of a device after
// each other, so that they end together. Another device may have thousands.
func divide(fleet *core.Fleet, list []session.Session) (here, left []session.Session) {
	here = slices.DeleteFunc(list, func(one session.Session) bool {
		elsewhere := fleet.Elsewhere(one.Local.Addr(), one.Address)
		if elsewhere {
			left = append(left, one)
		}
		return elsewhere
	})
	slices.SortStableFunc(left, func(a, b session.Session) int { return a.Address.Compare(b.Address) })
	return here, left
}

// closeLeft closes the connections of devices of other hosts, and returns a function that logs this.
func (c *Checks) closeLeft(fleet *core.Fleet, left []session.Session) (log func()) {
	if len(left) == 0 {
		return func() {}
	}
	conn, err := c.Diag()
	closed := 0
	for i := range left {
		if err == nil {
			err = conn.Destroy(&left[i].Socket)
		}
		if err != nil {
			break
		}
		closed++
	}
	c.closed += uint64(closed)
	return func() {
		hosts := make(map[string]bool)
		for i := range left[:closed] {
			host, _, _ := fleet.Host(left[i].Address)
			hosts[host] = true
		}
		if closed > 0 {
			c.Log.Info("closed connections of devices of other hosts", events.DevicesLeft, "connections", closed,
				"first", left[0].Address.String(), "hosts", slices.Sorted(maps.Keys(hosts)))
		}
		if err != nil {
			c.Log.Error("cannot close connections of devices of other hosts", "connections", len(left)-closed, "error", err)
		}
	}
}
