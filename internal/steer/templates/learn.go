// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"container/list"
	"errors"
	"net/netip"
	"slices"
	"time"
)

// maxReordering is how far the sysUptime of NetFlow v9 may go back without a restart of the exporter. Reordering in the
// network is much shorter, but the parts of a large router stamp their datagrams independently.
const maxReordering = 60 * 1000 // ms

// Learn keeps the templates of a datagram that arrived at the listener of a row.
//
// A template with a known ID replaces the older one. If there is no room for it, the older one is removed, because it
// is wrong. A record without fields withdraws a template, and an IPFIX record with the set's ID withdraws all of the kind
// (RFC 7011 section 8.1): exporters must not send withdrawals by UDP, but some do. If the sysUptime of NetFlow v9 goes
// back by more than a minute, and has not wrapped after 49.7 days, the exporter has restarted: its template IDs may have
// another meaning now, and the templates of the session are forgotten first. IPFIX has no such sign: the templates stay
// until they are redefined or expire.
//
// The error is a [Malformed] if the datagram was discarded. Templates that the bounds refuse are counted by
// [Store.Stats], and are no error.
func (s *Store) Learn(source netip.AddrPort, row int, datagram []byte, now time.Time) error {
	return s.learn(source, row, datagram, now, now, false)
}

// Insert keeps the templates of a message that [Store.Replay] of another Store has returned. refreshed is Message.Refreshed. Templates that
// this Store has received later stay. The error is that of Learn.
func (s *Store) Insert(source netip.AddrPort, row int, message []byte, refreshed, now time.Time) error {
	if now.Sub(refreshed) >= s.limits.Lifetime {
		return nil
	}
	if refreshed.After(now) {
		refreshed = now
	}
	return s.learn(source, row, message, refreshed, now, true)
}

// learner applies the template records of one session to the Store.
type learner struct {
	*Store
	key    Session
	proven bool
	now    int64
	stamp  int64 // when the records arrived; earlier than now for a state that is loaded, and for those of another Store
	swept  bool  // stale templates of the device have been removed
	// inserted is set if the records arrived at another Store: what this one has received later is newer.
	inserted bool
	// withdrawn tells for both kinds, options or not, whether all templates have been withdrawn and none was kept since.
	withdrawn map[bool]bool
}

// learn keeps the templates of a datagram that arrived at a time, here or, if inserted is set, at another Store.
func (s *Store) learn(source netip.AddrPort, row int, datagram []byte, arrived, now time.Time, inserted bool) error {
	s.stats.Datagrams++
	m, err := parseMessage(datagram)
	if err == nil {
		err = m.parse(func(record) {}, func(set) {}) // a message is either used or discarded as a whole
	}
	var reason Malformed
	if errors.As(err, &reason) {
		s.stats.Malformed[reason]++
		return err
	}
	addr := normalize(source.Addr())
	l := learner{Store: s, now: now.UnixNano(), stamp: arrived.UnixNano(), inserted: inserted, proven: s.isProven(addr),
		key: Session{Source: netip.AddrPortFrom(addr, source.Port()), Row: int(int32(row)), Version: m.version, Domain: m.domain}}
	l.prepare(&m)
	l.apply(&m)
	return nil
}

// normalize returns the address as the key of a device; an invalid one is ::.
func normalize(addr netip.Addr) netip.Addr {
	if !addr.IsValid() {
		return netip.IPv6Unspecified()
	}
	return addr.Unmap().WithZone("")
}

// prepare expires the device, updates its class, and notices restarts.
func (l *learner) prepare(m *message) {
	d, _ := l.find()
	if d == nil {
		return
	}
	if l.expired(d, l.now) {
		l.stats.Expired += l.remove(d, l.now)
		return
	}
	l.setProven(d, l.proven)
	if e, _ := d.session(l.key); e != nil && !l.outdated(e.seen) && e.restarted(m, l.now) {
		l.stats.Restarted += l.filter(d, e, l.now, func(template) bool { return true })
	}
}

// outdated reports whether the records are older than what this Store received at a time. Messages that are inserted at the same time, as
// those of one session, are not older than each other.
func (l *learner) outdated(received int64) bool {
	return l.inserted && l.stamp < received && received != l.now
}

// restarted reports whether the exporter has restarted since the last message.
func (e *session) restarted(m *message, now int64) bool {
	if m.version != NetFlow9 || int64(e.uptime)-int64(m.uptime) <= maxReordering {
		return false
	}
	elapsed := max(0, now-e.seen) / int64(time.Millisecond)
	wrapped := int64(e.uptime)+elapsed+maxReordering >= 1<<32
	return !wrapped
}

// apply applies a message that is known to be valid.
func (l *learner) apply(m *message) {
	var records uint32 // data records
	counted, budget := true, len(m.sets)
	template := func(r record) {
		if r.fields == 0 {
			l.withdraw(r)
		} else {
			l.put(r)
		}
	}
	data := func(s set) {
		if counted && m.version == IPFIX {
			var n int
			n, counted = l.count(s, &budget)
			records += uint32(n)
		}
	}
	_ = m.parse(template, data)
	_, e := l.find()
	if e == nil || l.outdated(e.seen) {
		return
	}
	e.seen, e.seconds, e.uptime = l.now, m.seconds, m.uptime
	switch { // see Replay
	case m.version == NetFlow9:
		e.next = m.sequence + 1
	case counted:
		e.next = m.sequence + records
	default:
		e.next = m.sequence
	}
}

// count returns the number of data records of a set, if the template is known.
func (l *learner) count(s set, budget *int) (n int, ok bool) {
	_, e := l.find()
	if e == nil {
		return 0, false
	}
	i, ok := e.template(s.id)
	if !ok {
		return 0, false
	}
	return countRecords(&e.templates[i], s.body, budget)
}

func (l *learner) withdraw(r record) {
	d, e := l.find()
	if e == nil {
		return
	}
	if r.id >= firstID {
		if i, ok := e.template(r.id); ok && e.templates[i].options == r.options {
			l.stats.Withdrawn++
			l.drop(d, e, i, l.now)
		}
		return
	}
	if l.withdrawn[r.options] {
		return // a datagram may have thousands of these records
	}
	l.stats.Withdrawn += l.filter(d, e, l.now, func(t template) bool { return t.options == r.options })
	if l.withdrawn == nil {
		l.withdrawn = make(map[bool]bool)
	}
	l.withdrawn[r.options] = true
}

// put keeps a template, or counts that it is refused.
func (l *learner) put(r record) {
	d, e := l.find()
	var i int // of the definition that is replaced, if known
	var known bool
	need, used := len(r.raw)+templateCost, 0
	if d == nil {
		need += deviceCost
	} else {
		used = d.bytes
	}
	if e == nil {
		need += sessionCost
	} else if i, known = e.template(r.id); known {
		old := &e.templates[i]
		if l.outdated(old.refreshed) {
			return
		}
		if old.options == r.options && old.record == string(r.raw) {
			l.refresh(d, old)
			return
		}
		need = len(r.raw) - len(old.record)
	}
	full := e == nil && d != nil && len(d.sessions) >= l.limits.Sessions
	switch {
	case len(r.raw) > maxRecord || used+need > l.limits.DeviceBytes || full:
		if d != nil && !l.swept {
			l.swept = true
			if n := l.prune(d, l.now, l.limits.Lifetime/4); n > 0 {
				l.stats.Stale += n
				l.put(r) // once only, because swept is set
				return
			}
		}
		l.stats.RefusedDevice++
	case !l.makeRoom(need): // removes neither d nor e
		l.stats.RefusedTotal++
	default:
		l.set(d, e, r, need)
		return
	}
	if known {
		l.drop(d, e, i, l.now)
	}
}

// find returns the device and the session, or nil.
func (l *learner) find() (d *device, e *session) {
	if d = l.devices[l.key.Source.Addr()]; d != nil {
		e, _ = d.session(l.key)
	}
	return d, e
}

func (l *learner) refresh(d *device, t *template) {
	l.stats.Refreshed++
	t.refreshed = l.stamp
	l.touch(d)
	if l.now-l.revised >= int64(l.limits.Lifetime/4) {
		l.changed(l.now)
	}
}

// set adds or replaces a template that fits, together with the device and the session if these are nil.
func (l *learner) set(d *device, e *session, r record, need int) {
	if d == nil {
		d = &device{addr: l.key.Source.Addr(), proven: l.proven, refreshed: l.stamp}
		d.element = l.order(d).PushBack(d)
		l.devices[d.addr] = d
	}
	if e == nil {
		_, at := d.session(l.key)
		e = &session{port: l.key.Source.Port(), row: int32(l.key.Row), version: l.key.Version, domain: l.key.Domain, seen: l.stamp}
		d.sessions = slices.Insert(d.sessions, at, e)
		l.stats.Sessions++
	}
	t := template{record: string(r.raw), learned: l.now, refreshed: l.stamp,
		minLength: int32(r.minLength), id: r.id, options: r.options, variable: r.variable}
	if i, known := e.template(r.id); known {
		e.templates[i] = t
		l.stats.Redefined++
	} else {
		e.templates = slices.Insert(e.templates, i, t)
		l.stats.Learned++
		l.stats.Templates++
	}
	delete(l.withdrawn, r.options)
	l.account(d, need)
	l.touch(d)
	l.changed(l.now)
}

// touch makes the device the most recently refreshed of its class.
func (l *learner) touch(d *device) {
	d.refreshed = max(d.refreshed, l.stamp)
	l.order(d).MoveToBack(d.element)
}

// makeRoom makes room for n more bytes of the device, and reports whether there is.
func (l *learner) makeRoom(n int) bool {
	if l.fits(n) {
		return true
	}
	for _, order := range []*list.List{l.unprovenOrder, l.provenOrder} {
		for front := order.Front(); front != nil; front = order.Front() {
			d := front.Value.(*device)
			if !l.expired(d, l.now) {
				break
			}
			l.stats.Expired += l.remove(d, l.now)
		}
	}
	for l.proven && !l.fits(n) {
		front := l.unprovenOrder.Front()
		if front == nil || l.stats.Bytes-l.stats.UnprovenBytes+n > l.limits.TotalBytes {
			break // even without unproven sources
		}
		d := front.Value.(*device)
		if l.isProven(d.addr) { // since its last datagram
			l.setProven(d, true)
			continue
		}
		l.stats.Displaced += l.remove(d, l.now)
	}
	return l.fits(n)
}

// fits reports whether n more bytes are within the bounds. A smaller definition always fits, even if a source is no
// longer proven and the unproven sources have more than their share.
func (l *learner) fits(n int) bool {
	if n <= 0 {
		return true
	}
	if l.stats.Bytes+n > l.limits.TotalBytes {
		return false
	}
	return l.proven || l.stats.UnprovenBytes+n <= l.limits.TotalBytes-l.limits.ReservedBytes
}
