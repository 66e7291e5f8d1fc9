// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"maps"
	"net/netip"
	"time"

	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/table"
)

// Templates are handed over before a device moves, in an epoch of its own. This file is about those that this does not cover: templates
// that a device sends between this and its move, those of devices that move without preparation because the host gets its first table,
// and those of a host that returns while others have its devices. copies.go is about those of a host that does not return. An agent that starts
// hands over what it has of devices of other hosts,
// because it does not know what the agent before it has handed over. The owner of a device keeps what it has received later itself.

const (
	// lateTime is the time after a move in which a host looks for such templates: the agent may read them some time after the members.
	lateTime = 5 * time.Second
	// heldTime is the time for which a host keeps templates of devices that it does not have yet: its table may be an earlier one.
	heldTime = 5 * time.Second
	// mostHeld is the number of such devices: whoever can write to etcd chooses how many there are.
	mostHeld = 20_000
	// mostLatePause is the longest pause before another attempt to hand over templates.
	mostLatePause = 5 * time.Second
)

// late is what a participation knows about late templates.
type late struct {
	prepared   uint64    // epoch whose templates were handed over last
	preparedAt time.Time // when that began

	until   time.Time // end of lateTime; zero: no device has left
	since   time.Time // templates before this time were handed over; zero: none
	problem string    // why they were not handed over
	retry   time.Time // of the next attempt
	pause   time.Duration

	counts  map[string]uint64 // Late of the other hosts, as of the last look
	arrived chan struct{}     // another host has handed late templates over
	due     chan struct{}     // the templates of all devices that have left are to be handed over

	held []held
}

// held are templates of devices that this host did not have when it took them over.
type held struct {
	templates map[netip.Addr][]byte
	until     time.Time
}

func newLate() late {
	return late{arrived: make(chan struct{}, 1), due: make(chan struct{}, 1)}
}

// left notes that devices have left a host when a table followed the one before, or nil.
func (l *late) left(before, t *table.Table, host string, now time.Time) {
	since := time.Time{}
	if before != nil && l.prepared == before.Epoch && isPrepared(before, t, host) {
		since = l.preparedAt
	} else {
		signal(l.due)
	}
	if l.until.IsZero() || since.Before(l.since) {
		l.since = since
	}
	l.until = now.Add(lateTime)
}

// isPrepared reports whether a table has prepared all moves of devices from a host that the next table makes.
func isPrepared(before, t *table.Table, host string) bool {
	was, is := before.Index(host), t.Index(host)
	name := func(t *table.Table, i uint16) string {
		if i == table.None {
			return ""
		}
		return t.Hosts[i].Name
	}
	for b := range t.Owner {
		if was != table.None && before.Owner[b] == was && t.Owner[b] != is && name(before, before.Next[b]) != name(t, t.Owner[b]) {
			return false
		}
	}
	return true
}

// noteHosts notes which hosts other than this one have handed late templates over.
func (l *late) noteHosts(hosts []lead.Host, self string) {
	counts := make(map[string]uint64)
	for i := range hosts {
		h := &hosts[i]
		if h.Name == self || !h.Alive {
			continue
		}
		if counts[h.Name] = h.Late; h.Late != l.counts[h.Name] {
			signal(l.arrived)
		}
	}
	l.counts = counts
}

// signal signals something, unless that was signalled already and not received.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// exchange hands late templates over, takes over those of other hosts, and copies templates, until ctx is done.
func (p *participation) exchange(ctx context.Context) {
	ticker := time.NewTicker(refreshInterval)
	defer ticker.Stop()
	var taken time.Time
	for arrived := false; ; {
		select {
		case <-ctx.Done():
			return
		case <-p.late.arrived:
			arrived = true
		case <-p.late.due:
			p.handOverLate(ctx)
		case <-p.copies.due:
			p.takeCopies(ctx)
		case <-ticker.C:
			p.handOverLate(ctx)
			p.deliverHeld()
			p.takeCopies(ctx)
			p.copyTemplates(ctx)
		}
		// Whoever can write to etcd chooses how often a host registers.
		if arrived && time.Since(taken) >= refreshInterval {
			arrived, taken = !p.takeOverLate(ctx), time.Now()
		}
	}
}

// handOverLate hands late templates over to the hosts that have the devices.
func (p *participation) handOverLate(ctx context.Context) {
	begun := time.Now()
	p.mu.Lock()
	t, mapping, name, since, until, retry := p.table, p.mapping, p.self(), p.late.since, p.late.until, p.late.retry
	connected := p.state.Snapshot != nil && p.state.Connected
	p.mu.Unlock()
	if !connected || until.IsZero() || t == nil || name == "" || begun.Before(retry) {
		return
	}
	all, err := p.services.HandOver(func(device netip.Addr) bool {
		b := mapping.Locate(device).Bucket
		return t.Owner[b] != table.None && !isHere(t, name, b)
	}, since)
	if err == nil {
		err = p.handOver(ctx, true, all, func(device netip.Addr) string { return t.Hosts[t.Owner[mapping.Locate(device).Bucket]].Name })
	}
	if err == nil && len(all) > 0 {
		p.follower.HandedLate()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	l := &p.late
	if err != nil {
		if ctx.Err() == nil && l.pause > 0 { // at the start, this host may not be registered yet
			l.problem = "templates are not handed over to other hosts: " + err.Error()
		}
		l.pause = min(max(2*l.pause, refreshInterval), mostLatePause)
		l.retry = begun.Add(l.pause)
		return
	}
	l.problem, l.pause = "", 0
	if !l.until.Equal(until) {
		return // further devices have left
	}
	l.since = begun
	if begun.After(until) {
		l.until = time.Time{}
	}
}

// takeOverLate takes over the templates that other hosts have handed over late. done is false if it must be called again.
func (p *participation) takeOverLate(ctx context.Context) (done bool) {
	p.mu.Lock()
	ready := p.table != nil && p.self() != ""
	p.mu.Unlock()
	if !ready {
		return false
	}
	handed, more, err := p.store.TakeOver(ctx, true)
	if err != nil {
		p.log.Debug("late templates not taken over", "error", err)
	}
	if len(handed) > 0 {
		p.mu.Lock()
		for _, templates := range handed {
			p.late.held = append(p.late.held, held{templates, time.Now().Add(heldTime)})
		}
		p.mu.Unlock()
		p.deliverHeld()
	}
	return !more && err == nil
}

// deliverHeld gives the templates of the devices of this host to the services.
func (p *participation) deliverHeld() {
	p.mu.Lock()
	var mine []map[netip.Addr][]byte
	var left []held
	devices := 0
	for _, one := range p.late.held {
		here := make(map[netip.Addr][]byte)
		maps.DeleteFunc(one.templates, func(device netip.Addr, value []byte) bool {
			if p.self() == "" || !isHere(p.table, p.self(), p.mapping.Locate(device).Bucket) {
				return false
			}
			here[device] = value
			return true
		})
		if len(here) > 0 {
			mine = append(mine, here)
		}
		if devices += len(one.templates); len(one.templates) > 0 && devices <= mostHeld && time.Now().Before(one.until) {
			left = append(left, one)
		}
	}
	p.late.held = left
	p.mu.Unlock()
	for _, templates := range mine {
		p.services.TakeOver(templates, true)
	}
}

// isHere reports whether a bucket belongs to a host by a table, or moves to it.
func isHere(t *table.Table, host string, bucket int) bool {
	self := t.Index(host)
	return self != table.None && (t.Owner[bucket] == self || t.Next[bucket] == self)
}
