// SPDX-License-Identifier: Apache-2.0

// Package templates keeps the templates of IPFIX (RFC 7011) and NetFlow v9 (RFC 3954) exporters that send by UDP, and
// encodes messages that teach them to a collector that has missed them.
//
// [Store.Learn] takes the datagrams with template sets that [HasTemplates] selects. [Store.Replay] returns messages with
// the templates of a device, byte by byte as the device sent them, to be sent from the address and port of the device.
//
// # Trust
//
// UDP source addresses can be forged, so all input is hostile. A forged datagram with the address of a device can change
// the templates of this device, as it can at any collector. It cannot change those of another device:
//
//   - Each source address has a bound of bytes and of sessions. What exceeds it is refused, or replaces templates of the
//     same address that have not been refreshed for a quarter of the lifetime.
//   - A source is proven if the caller says so, because it has an established TCP connection. Unproven sources share
//     Limits.TotalBytes less Limits.ReservedBytes. When they use this up, new templates of unproven sources are refused
//     until others expire: a flood of forged addresses removes nothing.
//   - A proven source may use all of Limits.TotalBytes, and removes the unproven sources that were refreshed least
//     recently if it must. Nothing removes a proven source but its lifetime.
//
// A Store has no lock, no clock and no goroutine: the caller serialises the calls, and passes the time. All times are
// wall-clock times, because they outlive the process: a step forward by more than the lifetime expires all templates.
package templates

import (
	"cmp"
	"container/list"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"time"
)

// Default limits.
const (
	DefaultDeviceBytes = 64 << 10 // bytes
	DefaultTotalBytes  = 64 << 20 // bytes
	DefaultSessions    = 64

	// DefaultLifetime is 12 times the usual refresh interval of 30 minutes. RFC 7011 section 8.4 asks for at least 3
	// times. A template kept too long costs memory only, since a redefinition replaces it; a template dropped too early
	// costs the data until the next refresh, and some exporters refresh every hour or even less often.
	DefaultLifetime = 6 * time.Hour
)

// Limits bound a Store. A value of zero or less means the default. Bytes count the records and a surcharge that covers
// the memory of the Store. Learn takes time in proportion to the datagram, and for hostile datagrams also to
// DeviceBytes.
type Limits struct {
	DeviceBytes   int           // of one source address
	TotalBytes    int           // of all source addresses
	ReservedBytes int           // part of TotalBytes that only proven sources may use
	Sessions      int           // of one source address, at most 65,535
	Lifetime      time.Duration // after the last refresh
}

// Session is an observation domain of an exporting process, seen at a listener: the scope of template IDs.
type Session struct {
	Source  netip.AddrPort // not IPv4-mapped, without a zone
	Row     int            // of the listener; opaque, and must fit into 32 bits
	Version uint16         // NetFlow9 or IPFIX
	Domain  uint32         // observation domain ID, or source ID of NetFlow v9
}

func (k Session) compare(o Session) int {
	return cmp.Or(k.Source.Compare(o.Source), cmp.Compare(k.Row, o.Row), cmp.Compare(k.Version, o.Version), cmp.Compare(k.Domain, o.Domain))
}

// Stats contains counters since the Store was made, and the present contents. A template counter counts templates.
type Stats struct {
	Datagrams uint64             // passed to Learn
	Malformed [numReasons]uint64 // datagrams by Malformed

	Learned   uint64 // new
	Refreshed uint64 // received again without a change
	Redefined uint64 // replaced by another template with the same ID
	Withdrawn uint64 // by RFC 7011 section 8.1

	Expired   uint64 // not refreshed for the lifetime
	Stale     uint64 // not refreshed for a quarter of the lifetime, and removed for others of the same source
	Displaced uint64 // of unproven sources, removed for a proven source
	Restarted uint64 // removed because the NetFlow v9 exporter restarted

	RefusedDevice uint64 // by the bounds of the source address, or too large to be replayed
	RefusedTotal  uint64 // by the bounds of all source addresses

	Sources, ProvenSources, Sessions, Templates, Bytes, UnprovenBytes int
}

// Store contains the templates of all devices.
type Store struct {
	limits   Limits
	isProven func(netip.Addr) bool
	devices  map[netip.Addr]*device
	// Devices, least recently refreshed first.
	provenOrder, unprovenOrder *list.List
	stats                      Stats
	revision                   uint64
	revised                    int64 // time of the last increment
}

// device has at least one session.
type device struct {
	addr      netip.Addr
	element   *list.Element // in provenOrder or unprovenOrder
	sessions  []*session    // sorted
	bytes     int
	refreshed int64 // when a template was refreshed last
	proven    bool
}

// session has at least one template. Times are in nanoseconds since 1970; 0 is never.
type session struct {
	domain    uint32
	row       int32
	port      uint16
	version   uint16
	next      uint32 // expected sequence number of the next message
	seconds   uint32 // export time of the last message
	uptime    uint32 // of the last message; version 9 only
	seen      int64  // when the last message arrived
	replayed  int64  // last time
	replays   uint64
	templates []template // sorted by ID
}

type template struct {
	record    string
	learned   int64 // by this Store, as it is now
	refreshed int64
	minLength int32 // see record
	id        uint16
	options   bool
	variable  bool
}

// NewStore returns an empty Store. isProven tells whether a source address has an established TCP connection, which
// cannot be forged; nil means that none has. Learn asks for the source of the datagram, and for each source that a
// proven one is about to remove, with an address that is not IPv4-mapped and has no zone.
func NewStore(limits Limits, isProven func(netip.Addr) bool) *Store {
	if isProven == nil {
		isProven = func(netip.Addr) bool { return false }
	}
	return &Store{limits: limits.orDefaults(), isProven: isProven, devices: make(map[netip.Addr]*device),
		provenOrder: list.New(), unprovenOrder: list.New()}
}

const maxSessions = 65535 // of a source address, for the format of a state

func (l Limits) orDefaults() Limits {
	def := func(value *int, to int) {
		if *value <= 0 {
			*value = to
		}
	}
	def(&l.DeviceBytes, DefaultDeviceBytes)
	def(&l.TotalBytes, DefaultTotalBytes)
	def(&l.ReservedBytes, l.TotalBytes/2)
	def(&l.Sessions, DefaultSessions)
	l.DeviceBytes = min(l.DeviceBytes, l.TotalBytes)
	l.Sessions = min(l.Sessions, maxSessions)
	if l.Lifetime <= 0 {
		l.Lifetime = DefaultLifetime
	}
	return l
}

// Stats returns the counters and the present contents.
func (s *Store) Stats() Stats {
	stats := s.stats
	stats.Sources, stats.ProvenSources = len(s.devices), s.provenOrder.Len()
	return stats
}

// Revision returns a number that grows with each change of the templates. The caller saves the Store if the number is
// not that of the last save, at most once in an interval of its choice: a device can change it with every datagram. A
// refresh alone advances the number at most once in a quarter of the lifetime, which keeps the saved times fresh enough.
func (s *Store) Revision() uint64 { return s.revision }

// Template is a template in a listing.
type Template struct {
	Session
	ID          uint16
	Options     bool
	Fields      int // scope fields included
	ScopeFields int
	Length      int       // of the record in bytes
	Learned     time.Time // or redefined
	Refreshed   time.Time
	Replayed    time.Time // of the session; zero for never
	Replays     uint64    // of the session
	Proven      bool      // the source address was proven at its last datagram
	record      string
}

// FieldList returns the fields in the order of the record.
func (t Template) FieldList() []Field { return parseFields(t.Version, t.Options, []byte(t.record)) }

// List yields all templates, sorted by address, port, row, version, domain and ID. Templates whose lifetime is over are
// included until [Store.Expire] removes them. The Store must not change meanwhile.
func (s *Store) List() iter.Seq[Template] {
	return func(yield func(Template) bool) {
		addrs := make([]netip.Addr, 0, len(s.devices))
		for addr := range s.devices {
			addrs = append(addrs, addr)
		}
		slices.SortFunc(addrs, netip.Addr.Compare)
		for _, addr := range addrs {
			d := s.devices[addr]
			for _, e := range d.sessions {
				for i := range e.templates {
					t := &e.templates[i]
					r, _ := parseRecord(e.version, t.options, []byte(t.record))
					if !yield(Template{
						Session: e.key(addr), ID: t.id, Options: t.options, Fields: r.fields, ScopeFields: r.scope, Length: len(t.record),
						Learned: fromNano(t.learned), Refreshed: fromNano(t.refreshed), Replayed: fromNano(e.replayed), Replays: e.replays,
						Proven: d.proven, record: t.record,
					}) {
						return
					}
				}
			}
		}
	}
}

// Expire removes the templates that have not been refreshed for the lifetime. It visits all templates; once a minute is
// often enough. Without it, templates expire when their memory is needed, and Replay skips expired ones.
func (s *Store) Expire(now time.Time) {
	n := now.UnixNano()
	for _, d := range s.devices {
		s.stats.Expired += s.prune(d, n, s.limits.Lifetime)
	}
}

// Forget removes the templates of a row.
func (s *Store) Forget(row int, now time.Time) {
	for _, d := range s.devices {
		for i := len(d.sessions) - 1; i >= 0; i-- {
			if e := d.sessions[i]; int(e.row) == row {
				s.filter(d, e, now.UnixNano(), func(template) bool { return true })
			}
		}
	}
}

// prune removes the templates of a device that have not been refreshed for an age, and the device if no template is
// left. It returns their number. A time in the future, after a step of the clock, becomes now.
func (s *Store) prune(d *device, now int64, age time.Duration) (n uint64) {
	for i := len(d.sessions) - 1; i >= 0; i-- {
		e := d.sessions[i]
		for j := range e.templates {
			e.templates[j].refreshed = min(e.templates[j].refreshed, now)
		}
		n += s.filter(d, e, now, func(t template) bool { return now-t.refreshed >= int64(age) })
	}
	d.refreshed = min(d.refreshed, now)
	return n
}

func (s *Store) expired(d *device, now int64) bool {
	return now-d.refreshed >= int64(s.limits.Lifetime)
}

// setProven moves a device between the proven and the unproven sources.
func (s *Store) setProven(d *device, proven bool) {
	if d.proven == proven {
		return
	}
	n := d.bytes
	s.account(d, -n)
	s.order(d).Remove(d.element)
	d.proven = proven
	d.element = s.order(d).PushBack(d)
	s.account(d, n)
}

// Surcharges in bytes, which cover structs, map entries, list elements and the spare capacity of slices.
const (
	deviceCost   = 256
	sessionCost  = 128
	templateCost = 96
)

// drop removes the template with an index, as filter does.
func (s *Store) drop(d *device, e *session, i int, now int64) {
	freed := len(e.templates[i].record) + templateCost
	e.templates = slices.Delete(e.templates, i, i+1)
	s.removed(d, e, 1, freed, now)
}

// remove removes a device and returns the number of its templates.
func (s *Store) remove(d *device, now int64) (n uint64) {
	for len(d.sessions) > 0 {
		n += s.filter(d, d.sessions[len(d.sessions)-1], now, func(template) bool { return true })
	}
	return n
}

// filter removes the templates of a session that drop selects, the session if no template is left, and the device if
// no session is left. It returns the number of templates.
func (s *Store) filter(d *device, e *session, now int64, drop func(template) bool) (n uint64) {
	freed := 0
	e.templates = slices.DeleteFunc(e.templates, func(t template) bool {
		if !drop(t) {
			return false
		}
		n++
		freed += len(t.record) + templateCost
		return true
	})
	if n > 0 {
		s.removed(d, e, int(n), freed, now)
	}
	return n
}

// removed accounts for n templates with a number of bytes that a session has lost.
func (s *Store) removed(d *device, e *session, n, freed int, now int64) {
	e.templates = shrink(e.templates)
	s.stats.Templates -= n
	if len(e.templates) == 0 {
		freed += sessionCost
		s.stats.Sessions--
		d.sessions = shrink(slices.DeleteFunc(d.sessions, func(o *session) bool { return o == e }))
	}
	if len(d.sessions) == 0 {
		freed += deviceCost
		s.order(d).Remove(d.element)
		delete(s.devices, d.addr)
	}
	s.account(d, -freed)
	s.changed(now)
}

func (s *Store) changed(now int64) {
	s.revision++
	s.revised = now
}

// account adds n bytes to a device.
func (s *Store) account(d *device, n int) {
	d.bytes += n
	s.stats.Bytes += n
	if !d.proven {
		s.stats.UnprovenBytes += n
	}
}

func (s *Store) order(d *device) *list.List {
	if d.proven {
		return s.provenOrder
	}
	return s.unprovenOrder
}

// shrink returns a slice without the capacity that removed elements leave, which is not accounted for.
func shrink[T any](s []T) []T {
	if cap(s) > 2*len(s)+2 {
		return slices.Clone(s)
	}
	return s
}

func (e *session) key(addr netip.Addr) Session {
	return Session{Source: netip.AddrPortFrom(addr, e.port), Row: int(e.row), Version: e.version, Domain: e.domain}
}

// session returns the session with a key, or nil, and its index.
func (d *device) session(k Session) (*session, int) {
	i, ok := slices.BinarySearchFunc(d.sessions, k, func(e *session, k Session) int { return e.key(d.addr).compare(k) })
	if !ok {
		return nil, i
	}
	return d.sessions[i], i
}

func (e *session) template(id uint16) (i int, ok bool) {
	return slices.BinarySearchFunc(e.templates, id, func(t template, id uint16) int { return cmp.Compare(t.id, id) })
}

// Addresses yields the source addresses that have templates, in no order. The Store must not change meanwhile.
func (s *Store) Addresses() iter.Seq[netip.Addr] { return maps.Keys(s.devices) }

// LearnedSince reports whether a source address has a template that is new, or another one, since a time.
func (s *Store) LearnedSince(addr netip.Addr, since time.Time) bool {
	d := s.devices[normalize(addr)]
	if d == nil {
		return false
	}
	for _, e := range d.sessions {
		if slices.ContainsFunc(e.templates, func(t template) bool { return !fromNano(t.learned).Before(since) }) {
			return true
		}
	}
	return false
}

// RefreshedSince reports whether a source address has sent one of its templates since a time.
func (s *Store) RefreshedSince(addr netip.Addr, since time.Time) bool {
	d := s.devices[normalize(addr)]
	return d != nil && !fromNano(d.refreshed).Before(since)
}

func fromNano(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n)
}

// Has reports whether a source address has templates.
func (s *Store) Has(addr netip.Addr) bool { return s.devices[normalize(addr)] != nil }
