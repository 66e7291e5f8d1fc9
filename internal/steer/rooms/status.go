// SPDX-License-Identifier: Apache-2.0

package rooms

import (
	"fmt"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/clock"
	"sockeye/internal/config"
	"sockeye/internal/format"
	"sockeye/internal/steer/stored"
)

// Note describes the waiting room of a slot whose packets wait, or waited and were discarded.
func (r *Rooms) Note(slot int) string {
	room, err := r.Status(slot)
	if err != nil || room == nil || r.IsReady(slot) || r.SlotState(slot).State == stored.Maint || !r.HasDevices(slot) {
		return ""
	}
	waiting := format.Count(room.Waiting, "datagram waits", "datagrams wait")
	switch {
	case room.Filling && r.filling[slot].dumps != nil:
		return fmt.Sprintf("slot %d has a new member, which reads the connections first: %s", slot, waiting)
	case room.Filling:
		return fmt.Sprintf("slot %d sends the waiting packets to its new member: %s", slot, waiting)
	case room.Until != nil:
		left := max(0, time.Until(*room.Until)).Round(time.Second)
		note := fmt.Sprintf("slot %d waits for its next member, for another %s: %s", slot, left, waiting)
		if room.Waiting >= uint64(r.Room().Datagrams) {
			note += "; the room is full, and datagrams are refused"
		}
		return note
	case r.Seats[slot] == nil && r.Config.WhenEmpty.Room != nil:
		return fmt.Sprintf("slot %d has no member, and its wait is over: its devices are refused", slot)
	}
	return ""
}

// Status returns the state of the waiting room of a slot, or nil without waiting rooms.
func (r *Rooms) Status(slot int) (*api.RoomStatus, error) {
	if !r.Exist() {
		return nil, nil
	}
	wait, room, err := r.Path.Wait(slot)
	if err != nil {
		return nil, err
	}
	status := &api.RoomStatus{
		Filling: r.filling[slot] != nil, Waiting: room.Datagrams - wait.Left, Datagrams: room.Datagrams,
		Connections: room.Connections, Full: room.Full, Replayed: r.replayed[slot], Lost: r.lost[slot],
	}
	if r.IsReady(slot) {
		status.Waiting = 0
	} else if now := clock.Monotonic(); wait.Until > uint64(now) {
		until := time.Now().Add(time.Duration(wait.Until) - now)
		status.Until = &until
	}
	for row, p := range r.prepared {
		fd, open := r.KeeperSockets[row]
		if p == nil || !open || r.Listeners[row].Protocol != config.UDP {
			continue
		}
		info, err := socketMemory(fd)
		if err != nil {
			return nil, err
		}
		status.Dropped += uint64(info[droppedWord])
	}
	return status, nil
}

// WhenEmptyEffect describes what happens to the devices of a slot without a member.
func WhenEmptyEffect(w config.WhenEmpty) string {
	if w.Room != nil {
		return "wait"
	}
	return "are refused"
}
