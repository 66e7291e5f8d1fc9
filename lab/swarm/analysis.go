// SPDX-License-Identifier: Apache-2.0

package swarm

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Analysis judges the records of a swarm. Records are added in any order. Judge judges those before an instant, in the
// order of their times.
//
// A connection is open from the time at which the device or a member noted that it was opened, whichever is earlier, to
// the time at which the device or the member noted that it was closed, whichever is earlier: a connection that the
// kernel has reset is closed, although its member may not have noticed.
//
// Only events from Begin to End are counted; End 0 means no end. A device is not split while no member receives its
// datagrams, for example because its slot has no member: if none arrives for the time Silence, a split ends that long
// after the last one. Silence 0 means no limit.
type Analysis struct {
	Begin, End time.Duration
	Silence    time.Duration
	// Period is the time between two datagrams of a UDP port, for Missing; 0: Missing is not wanted.
	Period time.Duration
	Result
	// Undecoded is the longest time in which no member decoded a datagram of a UDP port.
	Undecoded Gap

	unrouted  map[place]*Unrouted
	devices   map[uint32]*device
	waiting   []datagramAt
	numbers   map[exporter]map[uint32]time.Duration // sequence numbers of datagrams, and times, with Period
	sent      map[exporter]map[uint32]time.Duration // the same of datagrams that were sent, with Load.Noted
	datagrams uint64                                // added
	latest    map[int]time.Duration                 // time of the last datagram of each member
	judged    time.Duration                         // instant of the last call of Judge
	last      time.Duration                         // time of the last record
	dumped    time.Duration                         // time of the last record of a dump
}

// Result contains what was counted.
type Result struct {
	Received      uint64 // datagrams
	Late          uint64 // datagrams that were added after their time was judged; they are only counted
	WithoutRoutes uint64 // datagrams at a member that had not the device's initial dump in an open session
	Undecodable   uint64 // datagrams at a member that had not their template
	Opened        int    // connections that a member accepted
	Closed        int    // of these, closed
	Refused       int    // attempts of devices to connect
	Splits        []Split
	Needless      []Closing
	Gaps          []Gap
	// Overtook are datagrams that a member received after the host of another one had closed the connection of their device, and before the
	// device had received the RST: one for each datagram, until the RST.
	Overtook []Gap
	Stalls   []Interval // times in which the devices' process did not run although it was due
}

// Interval is a time.
type Interval struct{ From, To time.Duration }

// Split is a time in which the datagrams of a device were at another member than one of its connections. It begins with
// the first such datagram. It ends when the connection is closed, or with the last such datagram if the datagrams of all
// UDP ports of the device return to the member of the connection, or when no datagrams arrive any more.
type Split struct {
	Device int
	Interval
	Datagrams, Connection int // members
	Count                 int // datagrams
}

func (s Split) String() string {
	return fmt.Sprintf("device %d (%v): for %v, %d datagrams at member %d, connection at member %d",
		s.Device, Address(s.Device), (s.To - s.From).Round(100*time.Microsecond), s.Count, s.Datagrams, s.Connection)
}

// place is a device, a member, and the number of open connections that the device has, at this member or another one.
type place struct{ Device, Member, Open int }

// Unrouted are the datagrams of a device at a member that had not the routes of the device.
type Unrouted struct {
	place
	Interval
	Count int
}

func (u Unrouted) String() string {
	return fmt.Sprintf("device %d: %d at member %d from %v to %v, open connections: %d", u.Device, u.Count, u.Member, u.From, u.To, u.Open)
}

// Seen is an event of a device that was judged: a Datagram, or a connection that was Accepted or Closed. Member is
// FromDevices if there was no datagram.
type Seen struct {
	Kind   Kind
	Member int
	At     time.Duration
	Port   uint16
}

type datagramAt struct {
	Record
	member int
}

// connection is a TCP connection of a device.
type connection struct {
	device         uint32
	port           uint16
	member         int // -1: not accepted
	opened, dumped time.Duration
	closed         time.Duration // 0: open
	noticed        time.Duration // the device has noted that it is closed; 0: not yet
	judgedOpen     bool
	judgedClosed   bool
}

type device struct {
	connections []*connection // not yet judged completely
	open        []*connection // at the instant that is judged
	split       *Split
	last        time.Duration            // last datagram of the split
	decoded     map[uint16]time.Duration // time of the last decoded datagram by UDP port
	apart       map[uint16]bool          // UDP ports whose last datagram was at another member than a connection
	gap         time.Duration            // begin of the gap; 0: none
	previous    *connection              // closed last
	elsewhere   bool                     // since then a datagram reached another member
	seen        Seen
	history     []Seen // unordered if records were late
}

// Add adds records of a member, or of the devices (FromDevices).
func (a *Analysis) Add(from int, records []Record) {
	if a.latest == nil {
		a.latest = map[int]time.Duration{}
	}
	for _, r := range records {
		a.last = max(a.last, r.At)
		switch r.Kind {
		case Datagram, Undecodable:
			a.waiting = append(a.waiting, datagramAt{r, from})
			a.datagrams++
			a.latest[from] = max(a.latest[from], r.At)
			a.number(&a.numbers, r)
		case Sent:
			a.number(&a.sent, r)
		case Connected:
			c := a.connection(r)
			c.opened = min(c.opened, r.At)
		case Accepted:
			c := a.connection(r)
			c.opened, c.member = min(c.opened, r.At), from
		case Dumped:
			a.connection(r).dumped, a.dumped = r.At, max(a.dumped, r.At)
		case Closed:
			c := a.connection(r)
			if c.closed == 0 || r.At < c.closed {
				c.closed = r.At
			}
			if from == FromDevices && (c.noticed == 0 || r.At < c.noticed) {
				c.noticed = r.At
			}
		case Refused:
			if a.counts(r.At) && unix.Errno(r.Value) == unix.ECONNREFUSED {
				a.Refused++
			}
		case Stalled:
			a.Stalls = append(a.Stalls, Interval{r.At - time.Duration(r.Value)*time.Microsecond, r.At})
		}
	}
}

// connection returns the connection of a record.
func (a *Analysis) connection(r Record) *connection {
	d := a.device(r.Device)
	for _, c := range d.connections {
		if c.port == r.Port {
			return c
		}
	}
	c := &connection{device: r.Device, port: r.Port, member: FromDevices, opened: r.At}
	d.connections = append(d.connections, c)
	return c
}

// exporter is a UDP port of a device.
type exporter struct {
	device uint32
	port   uint16
}

// number notes the sequence number of a datagram, for Missing.
func (a *Analysis) number(in *map[exporter]map[uint32]time.Duration, r Record) {
	if a.Period == 0 {
		return
	}
	e := exporter{r.Device, r.Port}
	if *in == nil {
		*in = map[exporter]map[uint32]time.Duration{}
	}
	if (*in)[e] == nil {
		(*in)[e] = map[uint32]time.Duration{}
	}
	(*in)[e][r.Value] = r.At
}

// Missing returns the times at which datagrams were sent that no member has received, except those after the last received
// one of their port: the recorded time, or else the time of the datagram before, and Period for each since then. The second is
// as late as the datagram before was.
func (a *Analysis) Missing() (times []time.Duration) {
	for from, received := range a.numbers {
		at, missing := a.Begin, time.Duration(0)
		for number, left := uint32(0), len(received); left > 0; number++ {
			if arrived, ok := received[number]; ok {
				at, missing = arrived, 0
				left--
				continue
			}
			missing++
			sent, recorded := a.sent[from][number]
			if !recorded {
				sent = at + missing*a.Period
			}
			times = append(times, sent)
		}
	}
	return times
}

func (a *Analysis) counts(at time.Duration) bool {
	return at >= a.Begin && (a.End == 0 || at <= a.End)
}

// Unrouted explains Result.WithoutRoutes.
func (a *Analysis) Unrouted() (list []Unrouted) {
	for _, u := range a.unrouted {
		list = append(list, *u)
	}
	slices.SortFunc(list, func(x, y Unrouted) int { return cmp.Or(cmp.Compare(x.From, y.From), cmp.Compare(x.Device, y.Device)) })
	return list
}

// Finish judges all remaining events, and ends the splits and gaps that last. Without an End, these end with the last
// record.
func (a *Analysis) Finish() {
	a.Judge(a.last + 1)
	last := a.last
	if a.End != 0 {
		last = a.End
	}
	for number, d := range a.devices {
		if d.split != nil {
			a.endSplit(d, max(last, d.split.From))
		}
		if d.gap != 0 {
			a.addGap(number, Interval{d.gap, last})
			d.gap = 0
		}
		for _, at := range d.decoded {
			a.addUndecoded(number, Interval{at, last})
		}
	}
}

// keepClosed is the time for which a closed connection is remembered, so that later records of the same connection do
// not look like those of a new one.
const keepClosed = 20 * time.Second

// Judge judges all events before an instant. All records of this time must have been added.
func (a *Analysis) Judge(until time.Duration) {
	type event struct {
		at       time.Duration
		order    int // of events at one instant: opened, datagram, closed
		datagram *datagramAt
		c        *connection
	}
	var events []event
	for _, d := range a.devices {
		for _, c := range d.connections {
			if c.member == FromDevices {
				continue // nobody has accepted it yet
			}
			if !c.judgedOpen && c.opened < until {
				c.judgedOpen = true
				events = append(events, event{at: c.opened, order: 0, c: c})
			}
			if c.judgedOpen && !c.judgedClosed && c.closed != 0 && c.closed < until {
				c.judgedClosed = true
				events = append(events, event{at: max(c.opened, c.closed), order: 2, c: c})
			}
		}
	}
	var later []datagramAt
	for i, w := range a.waiting {
		if w.At >= until {
			later = append(later, w)
			continue
		}
		if w.At < a.judged {
			if a.counts(w.At) {
				a.Received++
				a.Late++
			}
			continue
		}
		events = append(events, event{at: w.At, order: 1, datagram: &a.waiting[i]})
	}
	slices.SortStableFunc(events, func(x, y event) int {
		return cmp.Or(cmp.Compare(x.at, y.at), cmp.Compare(x.order, y.order))
	})
	for _, e := range events {
		switch e.order {
		case 0:
			a.openedAt(e.c)
		case 1:
			a.datagram(*e.datagram)
		case 2:
			a.closedAt(e.c, e.at)
		}
	}
	a.waiting, a.judged = later, until
	for _, d := range a.devices {
		d.connections = slices.DeleteFunc(d.connections, func(c *connection) bool { return c.closed != 0 && c.closed < until-keepClosed })
	}
}

// Closing is a connection that was closed, although the next connection of the device reached the same process, and no
// datagram in between reached another one.
type Closing struct {
	Device int
	At     time.Duration
	Member int
}

func (a *Analysis) openedAt(c *connection) {
	d := a.device(c.device)
	if a.counts(c.opened) {
		a.Opened++
	}
	if p := d.previous; p != nil && p.member == c.member && !d.elsewhere && a.counts(p.closed) {
		a.Needless = append(a.Needless, Closing{int(c.device), p.closed, c.member})
	}
	d.previous = nil
	if d.gap != 0 {
		a.addGap(c.device, Interval{d.gap, max(d.gap, c.opened)})
		d.gap = 0
	}
	d.open = append(d.open, c)
	d.note(Seen{Kind: Accepted, Member: c.member, At: c.opened, Port: c.port})
}

// Gap is a time without an open connection of a device.
type Gap struct {
	Device int
	Interval
}

// addGap counts the part of a gap within the counted time.
func (a *Analysis) addGap(device uint32, i Interval) {
	i.From = max(i.From, a.Begin)
	if a.End != 0 {
		i.To = min(i.To, a.End)
	}
	if i.To > i.From {
		a.Gaps = append(a.Gaps, Gap{int(device), i})
	}
}

func (a *Analysis) closedAt(c *connection, at time.Duration) {
	d := a.device(c.device)
	if a.counts(at) {
		a.Closed++
	}
	d.open = slices.DeleteFunc(d.open, func(o *connection) bool { return o == c })
	d.previous, d.elsewhere = c, false
	if len(d.open) == 0 {
		d.gap = at
	}
	if d.split != nil && !slices.ContainsFunc(d.open, func(o *connection) bool { return o.member != d.split.Datagrams }) {
		a.endSplit(d, at)
	}
	d.note(Seen{Kind: Closed, Member: c.member, At: at, Port: c.port})
}

func (a *Analysis) datagram(g datagramAt) {
	d := a.device(g.Device)
	d.seen = Seen{Datagram, g.member, g.At, g.Port}
	d.note(d.seen)
	if d.split != nil && a.Silence != 0 && g.At > d.last+a.Silence {
		a.endSplit(d, g.At)
	}
	if d.previous != nil && d.previous.member != g.member {
		d.elsewhere = true
	}
	routes, other := false, FromDevices
	for _, c := range d.open {
		if c.member != g.member {
			other = c.member
		} else if c.dumped != 0 && c.dumped <= g.At {
			routes = true
		}
	}
	counted := a.counts(g.At)
	if p := d.previous; counted && len(d.open) == 0 && p != nil && p.member != g.member && g.At < p.noticed {
		a.Overtook = append(a.Overtook, Gap{int(g.Device), Interval{g.At, p.noticed}})
	}
	if counted {
		a.Received++
		if !routes {
			a.WithoutRoutes++
			a.addUnrouted(d, g)
		}
		a.decode(d, g.Record)
	}
	switch {
	case other == FromDevices:
		delete(d.apart, g.Port)
		if d.split != nil && len(d.apart) == 0 {
			a.endSplit(d, d.last)
		}
	case counted:
		if d.split == nil {
			d.split = &Split{Device: int(g.Device), Interval: Interval{From: g.At}}
			d.apart = map[uint16]bool{}
		}
		d.apart[g.Port] = true
		d.split.Datagrams, d.split.Connection = g.member, other
		d.split.Count++
		d.last = g.At
	}
}

// historyLen is the number of events that an Analysis remembers of a device.
const historyLen = 300

func (d *device) note(s Seen) {
	if len(d.history) >= 2*historyLen {
		d.history = slices.Clone(d.history[historyLen:])
	}
	d.history = append(d.history, s)
}

// addUnrouted adds a datagram without routes to those before at the same member.
func (a *Analysis) addUnrouted(d *device, g datagramAt) {
	at := place{int(g.Device), g.member, len(d.open)}
	u := a.unrouted[at]
	if u == nil {
		if a.unrouted == nil {
			a.unrouted = map[place]*Unrouted{}
		}
		u = &Unrouted{place: at, Interval: Interval{g.At, g.At}}
		a.unrouted[at] = u
	}
	u.From, u.To = min(u.From, g.At), max(u.To, g.At)
	u.Count++
}

// decode counts a datagram by whether its member has decoded it.
func (a *Analysis) decode(d *device, r Record) {
	if d.decoded == nil {
		d.decoded = map[uint16]time.Duration{}
	}
	last, seen := d.decoded[r.Port]
	if !seen {
		last = a.Begin
		d.decoded[r.Port] = last
	}
	if r.Kind == Undecodable {
		a.Undecodable++
		return
	}
	a.addUndecoded(r.Device, Interval{last, r.At})
	d.decoded[r.Port] = r.At
}

func (a *Analysis) addUndecoded(device uint32, i Interval) {
	if i.To-i.From > a.Undecoded.To-a.Undecoded.From {
		a.Undecoded = Gap{int(device), i}
	}
}

func (a *Analysis) endSplit(d *device, at time.Duration) {
	if a.Silence != 0 {
		at = min(at, d.last+a.Silence)
	}
	d.split.To = at
	if a.End != 0 {
		d.split.To = min(at, a.End)
	}
	a.Splits = append(a.Splits, *d.split)
	d.split = nil
}

// Open returns the splits that last, up to the instant of the last call of Judge.
func (a *Analysis) Open() (open []Split) {
	for _, d := range a.devices {
		if d.split != nil {
			s := *d.split
			s.To = max(a.judged, s.From)
			if a.Silence != 0 {
				s.To = min(s.To, d.last+a.Silence)
			}
			open = append(open, s)
		}
	}
	slices.SortFunc(open, func(x, y Split) int { return cmp.Compare(x.Device, y.Device) })
	return open
}

// Datagrams returns the number of datagrams that were added, at any time.
func (a *Analysis) Datagrams() uint64 { return a.datagrams }

// LastDatagram returns the time at which the kernel received the last datagram that a member has recorded, or 0.
func (a *Analysis) LastDatagram(member int) time.Duration { return a.latest[member] }

// LastSeen returns the last datagram of a device that was judged.
func (a *Analysis) LastSeen(number int) Seen { return a.device(uint32(number)).seen }

// History returns the last events of a device that were judged.
func (a *Analysis) History(number int) []Seen { return slices.Clone(a.device(uint32(number)).history) }

func (a *Analysis) device(number uint32) *device {
	if a.devices == nil {
		a.devices = map[uint32]*device{}
	}
	d := a.devices[number]
	if d == nil {
		d = &device{seen: Seen{Member: FromDevices}}
		a.devices[number] = d
	}
	return d
}

// LastDump returns the time at which a member had read an initial dump (see Dumped), the last one of all members.
func (a *Analysis) LastDump() time.Duration { return a.dumped }

// Connected returns the number of devices with an open connection at members of which living is true, as far as records were added.
func (a *Analysis) Connected(living func(member int) bool) (n int) {
	for _, d := range a.devices {
		if slices.ContainsFunc(d.connections, func(c *connection) bool { return c.member != FromDevices && c.closed == 0 && living(c.member) }) {
			n++
		}
	}
	return n
}

// SentWithin returns the number of datagrams that devices sent in an interval, with Load.Noted and Period.
func (a *Analysis) SentWithin(i Interval) (n int) {
	for _, numbers := range a.sent {
		for _, at := range numbers {
			if at >= i.From && at < i.To {
				n++
			}
		}
	}
	return n
}

// LongestSilence returns the longest time between two received datagrams of one UDP port, of which the second one was due, by Period,
// within an interval.
func (a *Analysis) LongestSilence(i Interval) (longest time.Duration) {
	for _, numbers := range a.numbers {
		times := slices.Sorted(maps.Values(numbers))
		for k := 1; k < len(times); k++ {
			if due := times[k-1] + a.Period; due >= i.From && due < i.To {
				longest = max(longest, times[k]-times[k-1])
			}
		}
	}
	return longest
}

// LongestWithout returns the longest time from the death of members until a device with a connection there had one at another
// member, as far as records were added.
func (a *Analysis) LongestWithout(died time.Duration, dead func(member int) bool) (longest time.Duration) {
	for _, d := range a.devices {
		first := time.Duration(0)
		had := false
		for _, c := range d.connections {
			switch {
			case c.member == FromDevices:
			case dead(c.member):
				had = had || c.opened < died && (c.closed == 0 || c.closed > died)
			case c.opened > died && (first == 0 || c.opened < first):
				first = c.opened
			}
		}
		if had && first > 0 {
			longest = max(longest, first-died)
		}
	}
	return longest
}

// Dumped returns the number of devices with an open connection whose initial dump its member has read, as far as
// records were added.
func (a *Analysis) Dumped() (n int) {
	for _, d := range a.devices {
		if slices.ContainsFunc(d.connections, func(c *connection) bool { return c.dumped != 0 && c.closed == 0 }) {
			n++
		}
	}
	return n
}

// SplitDevices returns the number of devices with a split that was longer than limit, and the longest split. Times of
// the intervals do not count.
func (r *Result) SplitDevices(limit time.Duration, without ...Interval) (devices int, longest time.Duration) {
	long := map[int]bool{}
	for _, s := range r.Splits {
		length := s.Length(without...)
		longest = max(longest, length)
		if length > limit {
			long[s.Device] = true
		}
	}
	return len(long), longest
}

// Length returns the length of the interval outside the other intervals.
func (i Interval) Length(without ...Interval) time.Duration {
	var sorted []Interval
	for _, o := range without {
		if o.To > i.From && o.From < i.To {
			sorted = append(sorted, o)
		}
	}
	slices.SortFunc(sorted, func(a, b Interval) int { return cmp.Compare(a.From, b.From) })
	length, at := time.Duration(0), i.From
	for _, o := range sorted {
		if o.From > at {
			length += min(o.From, i.To) - min(at, i.To)
		}
		at = max(at, o.To)
	}
	return length + max(0, i.To-at)
}

// LongestGap returns the longest time without an open connection of a device.
func (r *Result) LongestGap() (longest time.Duration) {
	for _, g := range r.Gaps {
		longest = max(longest, g.To-g.From)
	}
	return longest
}
