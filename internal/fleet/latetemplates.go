// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"net/netip"
	"time"

	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/table"
)

// Templates are handed over before a device moves, in an epoch of its own. This file is about those that this does not cover: templates
// that a device sends between this and its move, those of devices that move without preparation because the host gets its first table,
// and those of a host that returns while others have its devices.

// lateTime is the time after a move in which a host looks for such templates: the agent may read them some time after the members.
const lateTime = 5 * time.Second

// late is what a participation knows about late templates.
type late struct {
	prepared   uint64    // epoch whose templates were handed over last
	preparedAt time.Time // when that began

	until time.Time // end of lateTime; zero: no device has left
	since time.Time // templates before this time were handed over; zero: none

	counts  map[string]uint64 // Late of the other hosts, as of the last look
	arrived chan struct{}     // another host has handed late templates over
	due     chan struct{}     // the templates of all devices that have left are to be handed over
}

func newLate() late {
	return late{counts: make(map[string]uint64), arrived: make(chan struct{}, 1), due: make(chan struct{}, 1)}
}

// signal signals something, unless that was signalled already and not received.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// left notes that devices have left this host with the table of an epoch.
func (l *late) left(epoch uint64, now time.Time) {
	since := time.Time{} // the table was not prepared here
	if l.prepared > 0 && epoch == l.prepared+1 {
		since = l.preparedAt
	} else {
		signal(l.due)
	}
	if l.until.IsZero() || since.Before(l.since) {
		l.since = since
	}
	l.until = now.Add(lateTime)
}

// noteHosts notes which hosts other than this one have handed late templates over.
func (l *late) noteHosts(hosts []lead.Host, self string) {
	for i := range hosts {
		h := &hosts[i]
		if h.Name == self || h.Late == l.counts[h.Name] {
			continue
		}
		l.counts[h.Name] = h.Late
		signal(l.arrived)
	}
}

// exchangeLate hands late templates over, and takes over those of other hosts, until ctx is done.
func (p *participation) exchangeLate(ctx context.Context) {
	ticker := time.NewTicker(refreshInterval)
	defer ticker.Stop()
	for arrived := false; ; {
		select {
		case <-ctx.Done():
			return
		case <-p.late.arrived:
			arrived = true
		case <-p.late.due:
			p.handOverLate(ctx)
		case <-ticker.C:
			p.handOverLate(ctx)
		}
		if arrived {
			arrived = !p.takeOverLate(ctx)
		}
	}
}

// handOverLate hands late templates over to the hosts that have the devices.
func (p *participation) handOverLate(ctx context.Context) {
	begun := time.Now()
	p.mu.Lock()
	t, mapping, name, since, until := p.table, p.mapping, p.self(), p.late.since, p.late.until
	p.mu.Unlock()
	if until.IsZero() || t == nil || name == "" {
		return
	}
	self := t.Index(name)
	devices, err := p.handOver(ctx, t, since, func(device netip.Addr) uint16 {
		switch b := mapping.Locate(device).Bucket; {
		case self != table.None && (t.Owner[b] == self || t.Next[b] == self):
			return table.None
		default:
			return t.Owner[b]
		}
	})
	if err != nil {
		p.log.Debug("late templates not handed over", "error", err) // tried again
		return
	}
	if devices > 0 {
		p.node.HandedLate()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.late.until.Equal(until) { // otherwise, further devices have left
		p.late.since = begun
		if begun.After(until) {
			p.late.until = time.Time{}
		}
	}
}

// takeOverLate takes over the templates that other hosts have handed over late. done is false if it must be called again.
func (p *participation) takeOverLate(ctx context.Context) (done bool) {
	p.mu.Lock()
	t, mapping, name := p.table, p.mapping, p.self()
	p.mu.Unlock()
	if t == nil || name == "" {
		return false
	}
	self := t.Index(name)
	err := p.takeOver(ctx, func(device netip.Addr) bool {
		b := mapping.Locate(device).Bucket
		return self != table.None && (t.Owner[b] == self || t.Next[b] == self)
	})
	if err != nil {
		p.log.Debug("late templates not taken over", "error", err)
	}
	return err == nil
}
