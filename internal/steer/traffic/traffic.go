// SPDX-License-Identifier: Apache-2.0

// Package traffic reads what the devices of a service send, and what is missing: devices without one of the streams,
// refused packets, drops at the sockets of members, queues, and rates.
package traffic

import (
	"sockeye/internal/bpf"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/rooms"
)

// Traffic holds the previous counter readings of a service, from which rates and changes are computed.
type Traffic struct {
	*core.Service
	rooms *rooms.Rooms

	streams       streams
	learned       learned
	drops         memberDrops
	dropsBySource *bpf.Drops    // nil: not known
	refusals      *refusalWatch // nil: not watched
	before        *liveCounts   // totals at the time of the last frame
}

// New returns the traffic of a service, with the devices that an earlier agent has learned.
func New(s *core.Service, r *rooms.Rooms) *Traffic {
	t := &Traffic{Service: s, rooms: r}
	if err := t.learned.load(t.learnedPath()); err != nil {
		t.Log.Warn("learned devices discarded", "error", err)
	}
	return t
}

// Begin records the refusals of the data path, and counts the dropped datagrams by source. The caller holds the lock, and
// has called End for an earlier data path.
func (t *Traffic) Begin() error {
	if err := t.watchRefusals(); err != nil {
		return err
	}
	t.openDrops()
	return nil
}

// Close saves the learned devices, and ends what Begin has begun. The caller holds the lock.
func (t *Traffic) Close() {
	if len(t.learned.devices) > 0 || t.learned.fresh {
		t.writeLearned()
	}
	t.End()
}

// End ends what Begin has begun. The caller holds the lock.
func (t *Traffic) End() {
	t.endRefusals()
	t.closeDrops()
}
