// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/member"
)

const (
	// recentDropTime is the time for which the status names a member after a drop.
	recentDropTime = 10 * time.Minute
	// dropsInterval is the minimum time between two readings of the members' sockets for the status.
	dropsInterval = time.Second
)

// memberDrops finds the members at whose sockets the kernel drops packets now. The kernel has totals only.
type memberDrops struct {
	at   time.Time
	last map[dropKey]drop
}

type dropKey struct {
	slot     int
	protocol config.Protocol
}

// drop is the last known number of drops of a member, and the time of the reading that found new ones; zero: none.
type drop struct {
	member member.ID
	queue  queue
	at     time.Time
}

// note compares a reading with the one before. A young member has had no drops before the first reading.
func (d *memberDrops) note(now time.Time, key dropKey, id member.ID, started time.Time, q *queue) {
	before, known := d.last[key]
	if !known || before.member != id {
		before = drop{member: id}
		if now.Sub(started) > recentDropTime {
			before.queue.drops = q.drops // of unknown age
		}
	}
	if q.drops > before.queue.drops {
		before.at = now
	}
	before.queue = *q
	if d.last == nil {
		d.last = make(map[dropKey]drop)
	}
	d.last[key] = before
}

// noteDrops reads the sockets of the members unless the last reading is recent.
func (s *service) noteDrops(now time.Time) {
	if now.Sub(s.drops.at) < dropsInterval {
		return
	}
	s.drops.at = now
	boot := bootTime()
	for _, protocol := range []config.Protocol{config.UDP, config.TCP} {
		queues, err := s.readQueues(protocol)
		if err != nil {
			s.Log.Debug("sockets of members not read", "error", err) // metrics report the error
			continue
		}
		for slot, q := range queues {
			seat := s.Seats[slot]
			s.drops.note(now, dropKey{slot, protocol}, seat.ID(), startedAt(seat.Process.StartTime, boot), q)
		}
	}
}

// recentDrops returns the members at whose sockets the kernel has dropped packets lately.
func (s *service) recentDrops(now time.Time) (list []api.DropStatus) {
	s.noteDrops(now)
	for key, d := range s.drops.last {
		seat := s.Seats[key.slot]
		if seat == nil || seat.ID() != d.member || d.at.IsZero() || now.Sub(d.at) > recentDropTime {
			continue
		}
		list = append(list, api.DropStatus{
			Slot: key.slot, PID: seat.Process.PID, Protocol: string(key.protocol), Dropped: d.queue.drops, Last: d.at, Limit: d.queue.smallest,
			Hint: dropHint(key.protocol, d.queue.smallest, sysctl("rmem_max"), sysctl("rmem_default"), sysctl("somaxconn")),
		})
	}
	slices.SortFunc(list, func(a, b api.DropStatus) int {
		return cmp.Or(cmp.Compare(a.Slot, b.Slot), cmp.Compare(a.Protocol, b.Protocol))
	})
	return list
}

// sysctl returns net.core.NAME, or 0 if it cannot be read: network namespaces have no copy of some.
func sysctl(name string) uint64 {
	text, err := os.ReadFile("/proc/sys/net/core/" + name)
	if err != nil {
		return 0
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return 0
	}
	return n
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
