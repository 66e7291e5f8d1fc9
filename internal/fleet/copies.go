// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"time"

	"sockeye/internal/fleet/table"
)

// A host that dies hands no templates over. So each host keeps copies of the templates of its devices in the store, and a host that gets
// devices of a dead host, or without preparation, reads those of their former host. Anybody can send templates in the name of an address, so only
// devices with an established TCP connection have copies. What a host writes is bounded: the size of its copies, and how often it copies a device that
// changes its templates again and again.

const (
	copyInterval = 5 * time.Second
	// leastCopyPause is the time between the first two copies of a device. It doubles with each copy, up to mostCopyPause.
	leastCopyPause, mostCopyPause = time.Second, 10 * time.Minute
	// copyRefresh is the age of a copy that is written again if the device has sent the same templates since: a copy ends with the lifetime of its
	// templates.
	copyRefresh = 90 * time.Minute
	// mostCopied is the number of devices that are copied in copyInterval, mostCopySize the size of a copy in bytes, and mostCopies that of all
	// copies of a host. The quota of etcd is 2 GiB by default, and includes the history that is not compacted yet.
	mostCopied, mostCopySize, mostCopies = 500, 64 << 10, 16 << 20
	// copiesWanted is the time for which a host tries to read the copies of another one.
	copiesWanted = time.Minute
)

// copies is what a participation knows about copies of templates.
type copies struct {
	// These belong to the goroutine of exchange.
	number int64                 // of the store, to which these devices were copied
	of     map[netip.Addr]copied // by device
	size   int                   // of all copies, in bytes
	pass   uint64
	next   time.Time // of the next pass

	devices int    // that have copies
	problem string // why templates are not copied

	wanted map[string]*wantedCopies // by former host
	due    chan struct{}            // there are wanted copies
}

// copied is the last copy of a device.
type copied struct {
	at    time.Time
	pause time.Duration // until the next one
	size  int
	pass  uint64 // in which the device was seen last
}

// wantedCopies are the copies of a former host that this host wants for buckets that it has got.
type wantedCopies struct {
	buckets map[int]bool
	until   time.Time
	from    string // where the next call begins; of the goroutine of exchange
}

func newCopies() copies {
	return copies{of: make(map[netip.Addr]copied), wanted: make(map[string]*wantedCopies), due: make(chan struct{}, 1)}
}

// gained notes that a host has got devices when a table followed the one before, or nil.
func (c *copies) gained(before, t *table.Table, host string, dead map[string]bool, now time.Time) {
	for name, buckets := range unprepared(before, t, host, dead) {
		if earlier := c.wanted[name]; earlier != nil {
			maps.Copy(buckets, earlier.buckets)
		}
		c.wanted[name] = &wantedCopies{buckets: buckets, until: now.Add(copiesWanted)}
		signal(c.due)
	}
}

// unprepared returns the buckets that come to a host without preparation, or from a dead host, when a table follows the one before, or nil: by
// the name of the former host.
func unprepared(before, t *table.Table, host string, dead map[string]bool) map[string]map[int]bool {
	is := t.Index(host)
	if before == nil || is == table.None {
		return nil
	}
	was, found := before.Index(host), make(map[string]map[int]bool)
	for b := range t.Owner {
		owner := before.Owner[b]
		if t.Owner[b] != is || owner == table.None || owner == was {
			continue
		}
		name := before.Hosts[owner].Name
		if was != table.None && before.Next[b] == was && !dead[name] {
			continue
		}
		if found[name] == nil {
			found[name] = make(map[int]bool)
		}
		found[name][b] = true
	}
	return found
}

// copyTemplates writes copies of the templates of the devices of this host, if there are new ones.
func (p *participation) copyTemplates(ctx context.Context) {
	now := time.Now()
	p.mu.Lock()
	t, mapping, name, connected := p.table, p.mapping, p.self(), p.state.Snapshot != nil && p.state.Connected
	p.mu.Unlock()
	c := &p.copies
	if !connected || t == nil || t.Index(name) == table.None || now.Before(c.next) {
		return
	}
	c.next = now.Add(copyInterval)
	problem := ""
	if err := p.writeCopies(ctx, now, func(device netip.Addr) bool { return t.Owner[mapping.Locate(device).Bucket] == t.Index(name) }); err != nil && ctx.Err() == nil {
		problem = "templates are not copied to etcd: " + err.Error()
	}
	devices := 0
	for _, last := range c.of {
		if last.size > 0 { // otherwise its templates are too large
			devices++
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	c.problem, c.devices = problem, devices
}

// writeCopies copies devices, and removes the copies of others if there are too many.
func (p *participation) writeCopies(ctx context.Context, now time.Time, isHere func(netip.Addr) bool) error {
	c := &p.copies
	number, err := p.store.RenewCopies(ctx)
	if err != nil || number == 0 { // 0: a file
		return err
	}
	if number != c.number {
		c.number, c.size = number, 0
		clear(c.of)
	}
	c.pass++
	full := false
	all, err := p.services.CopyTemplates(func(device netip.Addr) (since time.Time, refreshed, wanted bool) {
		if !isHere(device) {
			return since, false, false
		}
		last, has := c.of[device]
		if !has {
			full = full || c.size >= mostCopies
			return since, false, c.size < mostCopies
		}
		last.pass = c.pass
		c.of[device] = last
		age := now.Sub(last.at)
		return last.at, age >= copyRefresh, age >= last.pause
	}, mostCopied)
	if err != nil {
		return err
	}
	size := c.size
	for device, data := range all {
		last, has := c.of[device]
		fits := size+len(data)-last.size <= mostCopies
		switch {
		case len(data) > mostCopySize, !fits && has: // an earlier copy would be wrong
			all[device], data = nil, nil
		case !fits:
			delete(all, device)
			data = nil
		}
		full = full || !fits
		size += len(data) - last.size
	}
	gone := make(map[netip.Addr]bool)
	if full {
		for device, last := range c.of { // others that are here now need the space
			if last.pass != c.pass {
				all[device], gone[device] = nil, true
			}
		}
	}
	if len(all) > 0 {
		if err := p.store.CopyTemplates(ctx, number, all); err != nil {
			return err
		}
	}
	for device, data := range all {
		last := c.of[device]
		c.size += len(data) - last.size
		if gone[device] {
			delete(c.of, device)
		} else {
			c.of[device] = copied{now, min(max(2*last.pause, leastCopyPause), mostCopyPause), len(data), c.pass}
		}
	}
	if full && len(gone) == 0 {
		return fmt.Errorf("the copies of this host have reached their limit of %d MiB", mostCopies>>20)
	}
	return nil
}

// takeCopies gives copies of the devices that have come from dead hosts, or without preparation, to the services.
func (p *participation) takeCopies(ctx context.Context) {
	p.mu.Lock()
	wanted := maps.Clone(p.copies.wanted)
	p.mu.Unlock()
	for name, w := range wanted {
		var err error
		w.from, err = p.store.Copies(ctx, name, w.from, func(copies map[netip.Addr][]byte) {
			p.mu.Lock()
			maps.DeleteFunc(copies, func(device netip.Addr, _ []byte) bool {
				b := p.mapping.Locate(device).Bucket
				return p.self() == "" || !w.buckets[b] || !isHere(p.table, p.self(), b)
			})
			p.mu.Unlock()
			if len(copies) > 0 {
				p.services.TakeOver(copies, true)
			}
		})
		if ctx.Err() != nil {
			return
		}
		if (err != nil || w.from != "") && time.Now().Before(w.until) {
			if err == nil {
				signal(p.copies.due)
			}
			continue
		}
		if err != nil || w.from != "" {
			p.log.Warn("copies of templates not read: the exporters of the host must send theirs again", "host", name, "error", err)
		}
		p.mu.Lock()
		if p.copies.wanted[name] == w {
			delete(p.copies.wanted, name)
		}
		p.mu.Unlock()
	}
}
