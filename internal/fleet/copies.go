// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"time"

	"sockeye/internal/fleet/table"
)

// A host that dies hands no templates over. So each host keeps copies of the templates of its devices in the store, and a host that gets
// devices without preparation reads those of their former host. Anybody can send templates in the name of an address, so only devices with an
// established TCP connection have copies, and a device that changes its templates again and again is copied less and less often.

const (
	// leastCopyPause is the time between the first two copies of a device. It doubles with each copy, up to mostCopyPause.
	leastCopyPause, mostCopyPause = time.Second, 10 * time.Minute
	// mostCopied is the number of devices that are copied in a second, and mostCopies that of all devices with copies.
	mostCopied, mostCopies = 1000, 50_000
	// copiesWanted is the time for which a host tries to read the copies of another one.
	copiesWanted = time.Minute
)

// copies is what a participation knows about copies of templates.
type copies struct {
	number  int64                 // of the store, to which these devices were copied
	of      map[netip.Addr]copied // by device
	problem string                // why templates are not copied
	retry   time.Time             // of the next attempt

	wanted map[string]time.Time // hosts whose devices came without preparation, and when to give up
	due    chan struct{}        // wanted has a new host
}

// copied is the last copy of a device.
type copied struct {
	at    time.Time
	pause time.Duration // until the next one
}

func newCopies() copies {
	return copies{of: make(map[netip.Addr]copied), wanted: make(map[string]time.Time), due: make(chan struct{}, 1)}
}

// gained notes that a host has got devices when a table followed the one before, or nil.
func (c *copies) gained(before, t *table.Table, host string, now time.Time) {
	for _, name := range unprepared(before, t, host) {
		c.wanted[name] = now.Add(copiesWanted)
		signal(c.due)
	}
}

// unprepared returns the names of the hosts whose devices come to a host without preparation when a table follows the one before, or nil.
func unprepared(before, t *table.Table, host string) (names []string) {
	is := t.Index(host)
	if before == nil || is == table.None {
		return nil
	}
	was := before.Index(host)
	for b := range t.Owner {
		owner := before.Owner[b]
		if t.Owner[b] != is || owner == table.None || owner == was || was != table.None && before.Next[b] == was {
			continue
		}
		if name := before.Hosts[owner].Name; !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// copyTemplates writes copies of the templates of the devices of this host, if there are new ones.
func (p *participation) copyTemplates(ctx context.Context) {
	now := time.Now()
	p.mu.Lock()
	t, mapping, name, connected := p.table, p.mapping, p.self(), p.state.Snapshot != nil && p.state.Connected
	p.mu.Unlock()
	c := &p.copies
	if !connected || t == nil || name == "" || now.Before(c.retry) {
		return
	}
	self := t.Index(name)
	number, err := p.store.RenewCopies(ctx)
	if number == 0 && err == nil || self == table.None {
		return // a file
	}
	if err == nil && number != c.number {
		c.number = number
		clear(c.of)
	}
	var all map[netip.Addr][]byte
	if err == nil {
		all, err = p.services.CopyTemplates(func(device netip.Addr) (since time.Time, wanted bool) {
			last, has := c.of[device]
			return last.at, t.Owner[mapping.Locate(device).Bucket] == self && (has && now.Sub(last.at) >= last.pause || !has && len(c.of) < mostCopies)
		}, mostCopied)
	}
	if err == nil && len(all) > 0 {
		err = p.store.CopyTemplates(ctx, number, all)
	}
	problem := ""
	if err == nil {
		for device := range all {
			c.of[device] = copied{now, min(max(2*c.of[device].pause, leastCopyPause), mostCopyPause)}
		}
	} else if ctx.Err() == nil {
		problem, c.retry = "templates have no copies for the death of this host: "+err.Error(), now.Add(mostLatePause)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	c.problem = problem
}

// takeCopies gives the copies of the devices that have come without preparation to the services.
func (p *participation) takeCopies(ctx context.Context) {
	p.mu.Lock()
	wanted := maps.Clone(p.copies.wanted)
	p.mu.Unlock()
	for name, until := range wanted {
		err := p.store.Copies(ctx, name, func(copies map[netip.Addr][]byte) {
			p.mu.Lock()
			maps.DeleteFunc(copies, func(device netip.Addr, _ []byte) bool {
				return p.self() == "" || !isHere(p.table, p.self(), p.mapping.Locate(device).Bucket)
			})
			p.mu.Unlock()
			if len(copies) > 0 {
				p.services.TakeOver(copies, true)
			}
		})
		if err != nil && ctx.Err() == nil && time.Now().Before(until) {
			p.log.Debug("copies of templates not read", "host", name, "error", err)
			continue
		}
		p.mu.Lock()
		if p.copies.wanted[name].Equal(until) {
			delete(p.copies.wanted, name)
		}
		p.mu.Unlock()
	}
}
