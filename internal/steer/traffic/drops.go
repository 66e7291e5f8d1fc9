// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/clock"
	"sockeye/internal/config"
	"sockeye/internal/member"
	"sockeye/internal/placement"
	"sockeye/internal/sysctl"
)

const (
	// recentDropTime is the time for which the status names a member after a drop.
	recentDropTime = 10 * time.Minute
	// dropsInterval is the minimum time between two readings of the members' sockets for the status.
	dropsInterval = time.Second
	// mostDroppedDevices is the number of devices that the status names for a member.
	mostDroppedDevices = 5
)

// memberDrops finds the members at whose sockets the kernel drops packets now. The kernel has totals only.
type memberDrops struct {
	begun time.Time // first reading
	at    time.Time // last reading
	last  map[dropKey]drop
}

type dropKey struct {
	slot     int
	protocol config.Protocol
}

// drop is the last known number of drops of a member, and the time of the reading that found new ones; zero: none.
type drop struct {
	member member.ID
	queue  Queue
	at     time.Time
}

// RecentDrops returns the members at whose sockets the kernel has dropped packets lately.
func (t *Traffic) RecentDrops(now time.Time) (list []api.DropStatus) {
	t.noteDrops(now)
	for key, d := range t.drops.last {
		seat := t.Seats[key.slot]
		if seat == nil || seat.ID() != d.member || d.at.IsZero() || now.Sub(d.at) > recentDropTime {
			continue
		}
		one := api.DropStatus{
			Slot: key.slot, PID: seat.Process.PID, Protocol: string(key.protocol), Dropped: d.queue.Dropped, Last: d.at, Limit: d.queue.Smallest,
			Hint: dropHint(key.protocol, d.queue.Smallest, coreLimit("rmem_max"), coreLimit("rmem_default"), coreLimit("somaxconn")),
		}
		if key.protocol == config.UDP {
			one.Devices = t.droppedDevices(key.slot)
		}
		list = append(list, one)
	}
	slices.SortFunc(list, func(a, b api.DropStatus) int {
		return cmp.Or(cmp.Compare(a.Slot, b.Slot), cmp.Compare(a.Protocol, b.Protocol))
	})
	return list
}

// noteDrops reads the sockets of the members unless the last reading is recent.
func (t *Traffic) noteDrops(now time.Time) {
	if now.Sub(t.drops.at) < dropsInterval {
		return
	}
	t.drops.at = now
	if t.drops.begun.IsZero() {
		t.drops.begun = now
	}
	boot := clock.BootTime()
	for _, protocol := range []config.Protocol{config.UDP, config.TCP} {
		queues, err := t.Queues(protocol)
		if err != nil {
			t.Log.Debug("sockets of members not read", "error", err) // metrics report the error
			continue
		}
		for slot, q := range queues {
			seat := t.Seats[slot]
			t.drops.note(now, dropKey{slot, protocol}, seat.ID(), clock.StartedAt(seat.Process.StartTime, boot), q)
		}
	}
}

// note compares a reading with the one before. A member that has started after the first reading has had no drops before.
func (d *memberDrops) note(now time.Time, key dropKey, id member.ID, started time.Time, q *Queue) {
	before, known := d.last[key]
	if !known || before.member != id {
		before = drop{member: id}
		if !started.After(d.begun) {
			before.queue.Dropped = q.Dropped // of unknown age
		}
	}
	if q.Dropped > before.queue.Dropped {
		before.at = now
	}
	before.queue = *q
	if d.last == nil {
		d.last = make(map[dropKey]drop)
	}
	d.last[key] = before
}

// openDrops begins to count the dropped datagrams by source.
func (t *Traffic) openDrops() {
	if !t.hasStream(config.UDP) {
		return
	}
	var err error
	if t.dropsBySource, err = t.Path.Drops(); err != nil && !errors.Is(err, bpf.ErrNoDrops) {
		t.Log.Warn("dropped datagrams are not counted by device", "error", err) // they are by member
	}
}

func (t *Traffic) closeDrops() {
	if t.dropsBySource != nil {
		t.dropsBySource.Close()
		t.dropsBySource = nil
	}
}

// droppedDevices returns the addresses of a slot with the most dropped datagrams.
func (t *Traffic) droppedDevices(slot int) (list []api.DroppedDevice) {
	counts, err := t.DroppedBySource()
	if err != nil {
		t.Log.Debug("dropped datagrams not read", "error", err)
		return nil
	}
	for address, n := range counts {
		addr := placement.Addr(address)
		if at := t.Mapping.Locate(addr); at.Slot == slot {
			list = append(list, api.DroppedDevice{Address: addr, Device: at.Device, Dropped: n})
		}
	}
	slices.SortFunc(list, func(a, b api.DroppedDevice) int {
		return cmp.Or(cmp.Compare(b.Dropped, a.Dropped), a.Address.Compare(b.Address))
	})
	return list[:min(len(list), mostDroppedDevices)]
}

// DroppedBySource returns the dropped datagrams of all addresses, or nil if they are not known.
func (t *Traffic) DroppedBySource() (map[bpf.Address]uint64, error) {
	if t.dropsBySource == nil {
		return nil, nil
	}
	return t.dropsBySource.BySource()
}

// Dropped returns the dropped datagrams of an address, or nil if they are not known.
func (t *Traffic) Dropped(address bpf.Address) *uint64 {
	if t.dropsBySource == nil {
		return nil
	}
	n := t.dropsBySource.Source(address)
	return &n
}

// coreLimit returns net.core.NAME, or 0 if the network namespace has no such setting.
func coreLimit(name string) uint64 {
	n, _ := sysctl.Number("net.core." + name)
	return uint64(max(n, 0))
}

// dropHint says which buffer is too small. limit is the receive buffer or the backlog of a member's socket. A program that
// sets SO_RCVBUF to n gets 2n, and n is limited to rmem_max; a program that does not has rmem_default.
func dropHint(protocol config.Protocol, limit, rmemMax, rmemDefault, somaxconn uint64) string {
	const slow = "; if its CPU is busy, more slots or sockeye rebalance help instead"
	switch {
	case protocol == config.TCP && limit >= somaxconn && somaxconn > 0:
		return fmt.Sprintf("raise the sysctl net.core.somaxconn (%d); the program accepts connections too slowly for this backlog", somaxconn)
	case protocol == config.TCP:
		return "raise backlog of the service, or remove it: the default is net.core.somaxconn"
	case rmemMax > 0 && limit >= 2*rmemMax:
		return fmt.Sprintf("the buffer is as large as the sysctl net.core.rmem_max (%d) allows: raise the sysctl, and the setting of the program (nfacctd_pipe_size of nfacctd, SO_RCVBUF)", rmemMax) + slow
	case limit == rmemDefault:
		return fmt.Sprintf("the program uses the default buffer: set its receive buffer (nfacctd_pipe_size of nfacctd, SO_RCVBUF), up to the sysctl net.core.rmem_max (%d)", rmemMax) + slow
	}
	return fmt.Sprintf("enlarge the receive buffer of the program (nfacctd_pipe_size of nfacctd, SO_RCVBUF), up to the sysctl net.core.rmem_max (%d)", rmemMax) + slow
}
