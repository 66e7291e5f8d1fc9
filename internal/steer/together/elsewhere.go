// SPDX-License-Identifier: Apache-2.0

package together

import (
	"maps"
	"slices"

	"sockeye/internal/events"
	"sockeye/internal/steer/session"
)

// closeElsewhere closes the connections of devices that another host of the fleet serves, and returns the others. The
// packets of the devices already reach the other host, so on_move does not matter.
func (c *Checks) closeElsewhere(list []session.Session) []session.Session {
	fleet := c.Host.Fleet.Load()
	if fleet == nil {
		return list
	}
	var left []session.Session
	list = slices.DeleteFunc(list, func(one session.Session) bool {
		elsewhere := fleet.Elsewhere(one.Local.Addr(), one.Address)
		if elsewhere {
			left = append(left, one)
		}
		return elsewhere
	})
	if len(left) == 0 {
		return list
	}
	conn, err := c.Diag()
	hosts, closed := make(map[string]bool), 0
	for i := range left {
		if err == nil {
			err = conn.Destroy(&left[i].Socket)
		}
		if err != nil {
			break
		}
		host, _, _ := fleet.Host(left[i].Address)
		hosts[host] = true
		closed++
	}
	c.closed += uint64(closed)
	if closed > 0 {
		c.Log.Info("closed connections of devices of other hosts", events.DevicesLeft, "connections", closed,
			"first", left[0].Address.String(), "hosts", slices.Sorted(maps.Keys(hosts)))
	}
	if err != nil {
		c.Log.Error("cannot close connections of devices of other hosts", "connections", len(left)-closed, "error", err)
	}
	return list
}
