// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/clock"
	"sockeye/internal/config"
	"sockeye/internal/member"
	"sockeye/internal/placement"
	"sockeye/internal/sockdiag"
)

const (
	// mostLiveDevices is the number of devices of a frame.
	mostLiveDevices = 20_000
	// stuckTime is the time without data after which a closed window is reported.
	stuckTime = time.Second
)

// liveCounts are the totals of a service at the time of a frame.
type liveCounts struct {
	slots     []bpf.Counters
	drops     map[int]uint64                // by slot
	datagrams map[bpf.Address]addressCounts // by address
	bytes     map[uint64]uint64             // by socket cookie
	closed    map[int]int                   // connections with a closed window, by slot
	dropped   map[bpf.Address]uint64        // by address; nil: not known
}

// addressCounts are the totals of an address.
type addressCounts struct{ datagrams, refused uint64 }

// Frame returns the traffic of a service for a frame, with rates since the frame before, seconds ago, and the connections
// without progress. The caller holds the lock.
func (t *Traffic) Frame(seconds float64) (one api.LiveService, stuck []api.LiveSocket, err error) {
	one = api.LiveService{Name: t.Name, Slots: []api.LiveSlot{}, Devices: []api.LiveDevice{}}
	if err := t.CheckOpen(); err != nil {
		return one, nil, err
	}
	before := t.before
	now := &liveCounts{drops: make(map[int]uint64), datagrams: make(map[bpf.Address]addressCounts), bytes: make(map[uint64]uint64), closed: make(map[int]int)}
	if before == nil {
		seconds = 0
	}
	// rate returns a rate; a counter that was created anew has none.
	rate := func(now, before uint64) float64 {
		if seconds <= 0 || now < before {
			return 0
		}
		return float64(now-before) / seconds
	}
	slots := t.Config.Slots
	for slot := range t.Seats {
		slots = max(slots, slot+1)
	}
	if now.slots, err = t.Path.Counters(slots); err != nil {
		return one, nil, err
	}
	udp, err := t.Queues(config.UDP)
	if err != nil {
		return one, nil, err
	}
	tcp, err := t.Queues(config.TCP)
	if err != nil {
		return one, nil, err
	}
	if now.dropped, err = t.DroppedBySource(); err != nil {
		return one, nil, err
	}
	list, err := t.ReadSessions()
	if err != nil {
		return one, nil, err
	}
	for slot := range slots {
		set := t.SlotState(slot)
		v := api.LiveSlot{Slot: slot, State: string(set.State), Ready: t.IsReady(slot)}
		if seat := t.Seats[slot]; seat != nil {
			v.PID, v.Command, v.Cgroup = seat.Process.PID, seat.Process.Command(), seat.Process.Cgroup
		}
		if q := udp[slot]; q != nil {
			v.Queued, v.QueueLimit, now.drops[slot] = q.Used, q.Limit, q.Dropped
		}
		if q := tcp[slot]; q != nil {
			v.Backlog = q.Used
		}
		if room, err := t.rooms.Status(slot); err == nil && room != nil {
			v.Waiting, v.WaitUntil = room.Waiting, room.Until
		}
		if before != nil && slot < len(before.slots)-1 {
			is, was := &now.slots[slot], &before.slots[slot]
			v.Datagrams, v.Connections = rate(is.Datagrams, was.Datagrams), rate(is.Connections, was.Connections)
			v.Refused, v.Drops = rate(refusedBy(is), refusedBy(was)), rate(now.drops[slot], before.drops[slot])
		}
		one.Slots = append(one.Slots, v)
	}
	if before != nil {
		one.Refused = rate(refusedByAll(now.slots), refusedByAll(before.slots))
	}
	seated := make(map[member.ID]int)
	for slot, seat := range t.Seats {
		seated[seat.ID()] = slot
	}
	devices := make(map[netip.Addr]*api.LiveDevice)
	device := func(address netip.Addr) *api.LiveDevice {
		d := devices[address]
		if d == nil {
			at := t.Mapping.Locate(address)
			d = &api.LiveDevice{Address: address, Device: at.Device, Slot: at.Slot, Pinned: at.Pinned}
			devices[address] = d
		}
		return d
	}
	serving := t.Serving()
	for i := range list {
		x := &list[i]
		if x.State != sockdiag.Established {
			continue
		}
		socket, _ := t.Ask(x)
		if socket == nil {
			socket = new(sockdiag.Socket)
			if before != nil {
				socket.Info.Bytes_received = before.bytes[x.Cookie]
			}
		}
		now.bytes[x.Cookie] = socket.Info.Bytes_received
		d := device(x.Address)
		d.Sessions++
		bytes := 0.0
		if before != nil {
			bytes = rate(socket.Info.Bytes_received, before.bytes[x.Cookie]) // 0 for a new connection
		}
		d.Bytes += bytes
		if server, served := serving.Server(x.Address); served && x.Owned && server != x.OwnerID() {
			d.Split = true
		}
		slot, ok := seated[x.OwnerID()]
		if !ok || slot >= len(one.Slots) {
			continue
		}
		v := &one.Slots[slot]
		v.Sessions++
		v.Bytes += bytes
		v.Unread += uint64(x.Unread)
		idle := time.Duration(socket.Info.Last_data_recv) * time.Millisecond
		if !socket.ZeroWindow {
			continue
		}
		v.ZeroWindows++
		if idle >= stuckTime {
			now.closed[slot]++
			stuck = append(stuck, api.LiveSocket{Service: t.Name, Local: x.Local, Remote: x.Remote, Slot: &v.Slot, PID: v.PID,
				Reason: "zero_window", Bytes: uint64(x.Unread), Since: idle.Seconds()})
		}
	}
	recent := time.Now().Add(-silence)
	zero := clock.MonotonicZero()
	for address, seen := range t.Path.Devices() {
		addr, last := placement.Addr(address), zero.Add(time.Duration(seen.LastSeen))
		now.datagrams[address] = addressCounts{seen.Datagrams, seen.Refused}
		if last.Before(recent) && devices[addr] == nil {
			continue
		}
		d := device(addr)
		d.LastSeen = last
		if before == nil {
			continue
		}
		was := before.datagrams[address] // 0 for a new entry
		d.Datagrams, d.Refused = rate(seen.Datagrams, was.datagrams), rate(seen.Refused, was.refused)
	}
	for addr, d := range devices {
		if now.dropped != nil {
			address := placement.Address(addr)
			n := now.dropped[address]
			d.Dropped = &n
			if before != nil && before.dropped != nil {
				d.Drops = rate(n, before.dropped[address])
			}
		}
		if d.Slot < len(one.Slots) {
			one.Slots[d.Slot].Devices++
		}
		one.Devices = append(one.Devices, *d)
	}
	if len(one.Devices) > mostLiveDevices {
		slices.SortFunc(one.Devices, func(a, b api.LiveDevice) int {
			return cmp.Or(cmp.Compare(b.Total(), a.Total()), a.Address.Compare(b.Address))
		})
		one.Omitted = len(one.Devices) - mostLiveDevices
		one.Devices = one.Devices[:mostLiveDevices]
	}
	slices.SortFunc(one.Devices, func(a, b api.LiveDevice) int { return a.Address.Compare(b.Address) })
	t.before = now
	return one, stuck, nil
}

func refusedByAll(list []bpf.Counters) (n uint64) {
	for i := range list {
		n += refusedBy(&list[i])
	}
	return n
}

// refusedBy returns the refused packets of a slot.
func refusedBy(c *bpf.Counters) (n uint64) {
	for reason := range bpf.Reasons {
		n += c.RefusedConnections[reason] + c.RefusedDatagrams[reason]
	}
	return n
}

// ClosedWindows returns the number of connections with a closed receive window at the last frame, by slot.
func (t *Traffic) ClosedWindows() map[int]int {
	if t.before == nil {
		return nil
	}
	return t.before.closed
}
