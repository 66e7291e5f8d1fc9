// SPDX-License-Identifier: Apache-2.0

// Package lead decides the next table of a fleet, on the host that is the leader.
//
// The decision depends on the present table, the hosts as the store shows them, and the times since which this leader has
// seen each host alive, and each living host unable to serve. A new leader has no other state, and continues where the last
// one has stopped. Only durations of a monotonic clock are used, so that the wall clock of no host matters.
package lead

import (
	"slices"
	"strings"
	"time"

	"sockeye/internal/fleet/table"
)

// State is what the operator wants of a host.
type State string

// The states of a host.
const (
	// Ready hosts have their share of the buckets.
	Ready State = "ready"
	// Drain hosts hand their buckets over, a few at a time.
	Drain State = "drain"
	// Maint hosts keep their buckets, and serve their devices, but get no others.
	Maint State = "maint"
	// Removed hosts are not part of the fleet any more: their buckets move, at once if the host does not run.
	Removed State = "removed"
)

// OnDeath is what happens to the buckets of a host that has died.
type OnDeath string

// The values of on_host_death.
const (
	// Next moves them to the hosts that come next.
	Next OnDeath = "next"
	// Wait leaves them until the host is back, or drains, or is removed.
	Wait OnDeath = "wait"
)

// Host is a host as the store shows it.
type Host struct {
	table.Host
	State State
	// SetWeight is the weight that the operator has set, or 0, and OwnWeight that of the registration.
	SetWeight, OwnWeight uint32
	// Alive is set while the host renews its lease.
	Alive bool
	// Unknown is set while it is not known whether a host that is not alive has died: the connection to the store is new, and
	// the host may not have registered again. No device moves to or from the host.
	Unknown bool
	// Healthy is set while the host can serve devices.
	Healthy bool
	// Refuses is set while the host refuses the table: no move waits for it.
	Refuses bool
	// Nonce is that of the table in force on the host, or 0.
	Nonce uint64
	// Applied is the epoch that the data path of the host has.
	Applied uint64
	// Handed is the last epoch whose templates the host has handed over to the next owners.
	Handed uint64
	// Prepared is the last epoch whose preparations the host has finished.
	Prepared uint64
	// Late changes whenever the host has handed over templates that were not part of a preparation.
	Late    uint64
	Digests Digests
}

// Digests describe what the policies of all hosts of a fleet have in common. Hosts of earlier versions, and those of a file, have
// none.
type Digests struct {
	Listeners string `json:"listeners,omitempty"` // at the addresses of the fleet
	Devices   string `json:"devices,omitempty"`   // device map
}

// Config has the rules of a fleet.
type Config struct {
	// MinHosts is the number of hosts without which no bucket moves, and no first table is written.
	MinHosts int
	// Settle is the time for which a host must be alive before it gets buckets.
	Settle time.Duration
	// OnDeath is what happens to the buckets of a host that has died.
	OnDeath OnDeath
	// Batch is the largest number of buckets that move at the same time, except from hosts that have died.
	Batch int
	// Nonce is the nonce of a first table.
	Nonce uint64
}

// mostSettle is the number of settle times after which a first table no longer waits for further hosts.
const mostSettle = 4

// Leader decides about tables.
type Leader struct {
	Config
	since   map[string]time.Duration // time since which each host is alive
	sick    map[string]time.Duration // time since which each living host cannot serve
	ranking table.Ranking            // of the hosts that have a share
	ranked  map[string]uint32        // their weights
}

// Weights returns the weights of the hosts that have a share, as of the last decision. The caller does not change them.
func (l *Leader) Weights() map[string]uint32 { return l.ranked }

// Decision is the result of Decide.
type Decision struct {
	// Table is the next table, or nil to keep the present one.
	Table *table.Table
	// Wait is the time after which the decision can be another one without a change of the hosts; 0: there is none.
	Wait time.Duration
	// Behind are the living hosts that have not applied the present table, by name. Planned moves wait for them.
	Behind []string
	// Few is set if fewer hosts than MinHosts are alive, or before the first table have settled and can serve.
	Few bool
}

// step is the work on one table.
type step struct {
	config  *Config
	next    *table.Table // with the hosts of the present table, and new ones
	hosts   map[string]*Host
	at      []*Host // by index of next.Hosts; nil: the store has no such host
	share   map[string]uint32
	takes   []bool // by index: the host may get buckets
	lost    []bool // by index: the buckets of the host move at once
	behind  []string
	applied bool // all living hosts have applied the present table, and all owners are known to live or not
	wait    time.Duration
	moving  int   // buckets that move after this step
	forced  []int // buckets that need another owner now, and have no preferred host that takes them
	changed bool  // a column differs
	members bool  // the hosts differ
}

// Decide returns the next table. now is a monotonic time. present is nil before the first table. Hosts are sorted by name.
func (l *Leader) Decide(now time.Duration, present *table.Table, hosts []Host) Decision {
	l.observe(now, hosts)
	if Living(hosts) < max(l.MinHosts, 1) {
		return Decision{Few: true}
	}
	if present == nil {
		return l.first(now, hosts)
	}
	return l.step(now, present, hosts)
}

// Living returns the number of hosts that are alive and part of the fleet, which must be MinHosts.
func Living(hosts []Host) (n int) {
	for i := range hosts {
		if hosts[i].Alive && hosts[i].State != Removed {
			n++
		}
	}
	return n
}

// observe records since when the hosts are alive, and since when living hosts cannot serve.
func (l *Leader) observe(now time.Duration, hosts []Host) {
	alive, sick := make(map[string]time.Duration, len(hosts)), make(map[string]time.Duration)
	for i := range hosts {
		if h := &hosts[i]; h.Alive {
			alive[h.Name] = now
			if since, known := l.since[h.Name]; known {
				alive[h.Name] = since
			}
			if since, known := l.sick[h.Name]; !h.Healthy && known {
				sick[h.Name] = since
			} else if !h.Healthy {
				sick[h.Name] = now
			}
		}
	}
	l.since, l.sick = alive, sick
}

// first returns the first table, once the last of the hosts has settled: hosts that start together share the buckets from
// the beginning, and none of them has all devices for a moment.
func (l *Leader) first(now time.Duration, hosts []Host) (d Decision) {
	var members []table.Host
	patient := true // a host that starts again and again does not hold up the others forever
	for i := range hosts {
		h := &hosts[i]
		if h.State != Ready || !h.Alive {
			continue
		}
		if ok, wait := l.settled(now, h); !ok {
			d.Wait = max(d.Wait, wait)
			continue
		}
		if h.Healthy && h.Check() == nil {
			members = append(members, h.Host)
		}
		patient = patient && now-l.since[h.Name] < mostSettle*l.Settle
	}
	if d.Wait > 0 && patient {
		return d
	}
	if len(members) < max(l.MinHosts, 1) {
		d.Few = true
		return d
	}
	t := &table.Table{Epoch: 1, Nonce: l.Nonce, Hosts: members}
	l.rank(weights(members))
	t.Owner = *l.ranking.Column(t.Index)
	for b := range table.Buckets {
		t.Previous[b], t.Next[b] = table.None, table.None
	}
	return Decision{Table: t}
}

func weights(members []table.Host) map[string]uint32 {
	w := make(map[string]uint32, len(members))
	for i := range members {
		w[members[i].Name] = members[i].Weight
	}
	return w
}

// step returns the table after the present one.
func (l *Leader) step(now time.Duration, present *table.Table, hosts []Host) (d Decision) {
	s := l.newStep(now, present, hosts)
	d.Wait, d.Behind = s.wait, s.behind
	l.rank(s.share)
	targets := l.ranking.Column(s.next.Index)
	for b, target := range targets {
		s.bucket(b, target)
	}
	s.replace()
	s.prepare(targets)
	s.compact()
	if s.changed || s.members {
		s.next.Epoch++
		d.Table = s.next
	}
	return d
}

func (l *Leader) newStep(now time.Duration, present *table.Table, hosts []Host) *step {
	next := *present
	next.Hosts = slices.Clone(present.Hosts)
	s := &step{config: &l.Config, next: &next, hosts: make(map[string]*Host, len(hosts)), share: make(map[string]uint32)}
	shares := present.Shares()
	var added []table.Host
	unknown := false
	for i := range hosts {
		h := &hosts[i]
		s.hosts[h.Name] = h
		owns := 0
		if at := present.Index(h.Name); at != table.None {
			owns = shares[at]
		}
		if h.Alive && !h.Refuses && h.Applied < present.Epoch {
			s.behind = append(s.behind, h.Name)
		}
		unknown = unknown || h.Unknown && owns > 0
		ok, wait := l.settled(now, h)
		if h.Alive && !ok && owns == 0 && (s.wait == 0 || wait < s.wait) {
			s.wait = wait
		}
		failing, patience := l.failing(now, h)
		if owns > 0 && patience > 0 && (s.wait == 0 || patience < s.wait) {
			s.wait = patience
		}
		if l.hasShare(h, owns > 0, ok) && !failing {
			s.share[h.Name] = h.Weight
			if present.Index(h.Name) == table.None {
				added = append(added, h.Host)
			}
		}
	}
	s.applied = len(s.behind) == 0 && !unknown
	s.addHosts(added)
	s.at, s.takes, s.lost = make([]*Host, len(next.Hosts)), make([]bool, len(next.Hosts)), make([]bool, len(next.Hosts))
	for i := range next.Hosts {
		h := s.hosts[next.Hosts[i].Name]
		s.at[i] = h
		s.lost[i] = h == nil || !h.Alive && (h.State == Removed || !h.Unknown && (h.State == Drain || l.OnDeath != Wait))
		if h == nil {
			continue
		}
		s.takes[i] = h.Alive && h.Healthy && h.State == Ready && s.share[h.Name] > 0
		// The addresses and the weight of a host are those of its registration; a host that has lost its addresses for a
		// moment is still at the last ones.
		if !same(&next.Hosts[i], &h.Host) && h.Alive && h.Check() == nil && (len(h.Addresses) > 0 || len(next.Hosts[i].Addresses) == 0) {
			next.Hosts[i], s.members = h.Host, true
		}
	}
	return s
}

// sickTime is the least time for which a living host may be unable to serve before its devices move to the others. Collectors
// that restart take less.
const sickTime = 10 * time.Second

// failing reports whether a living host has been unable to serve for long enough, or else how long it still may be.
func (l *Leader) failing(now time.Duration, h *Host) (yes bool, wait time.Duration) {
	since, sick := l.sick[h.Name]
	if !sick {
		return false, 0
	}
	wait = max(l.Settle, sickTime) - (now - since)
	return wait <= 0, max(wait, 0)
}

// settled reports whether a host has been alive for long enough, or else how long it still must be.
func (l *Leader) settled(now time.Duration, h *Host) (ok bool, wait time.Duration) {
	if !h.Alive {
		return false, 0
	}
	wait = l.Settle - (now - l.since[h.Name])
	return wait <= 0, max(wait, 0)
}

func same(a, b *table.Host) bool {
	return a.Name == b.Name && a.Weight == b.Weight && slices.Equal(a.Addresses, b.Addresses) && slices.Equal(a.MACs, b.MACs)
}

// addHosts adds hosts to the table. Their indices follow the order of the names, so those of others change.
func (s *step) addHosts(added []table.Host) {
	if len(added) == 0 {
		return
	}
	s.members = true
	s.renumber(append(slices.Clone(s.next.Hosts), added...))
}

// compact removes the hosts that have no bucket in any column and are not part of the fleet any more.
func (s *step) compact() {
	used := make([]bool, len(s.next.Hosts))
	for _, column := range []*table.Column{&s.next.Owner, &s.next.Previous, &s.next.Next} {
		for _, host := range column {
			if host != table.None {
				used[host] = true
			}
		}
	}
	kept := make([]table.Host, 0, len(s.next.Hosts))
	for i, h := range s.next.Hosts {
		if used[i] || s.at[i] != nil && s.at[i].Alive && s.at[i].State != Removed {
			kept = append(kept, h)
		}
	}
	if len(kept) < len(s.next.Hosts) {
		s.renumber(kept)
		s.members = true
	}
}

// renumber replaces the hosts of the table, and their indices in the columns.
func (s *step) renumber(hosts []table.Host) {
	slices.SortFunc(hosts, func(a, b table.Host) int { return strings.Compare(a.Name, b.Name) })
	before := s.next.Hosts
	s.next.Hosts = hosts
	index := make([]uint16, len(before))
	for i := range before {
		index[i] = s.next.Index(before[i].Name)
	}
	for _, column := range []*table.Column{&s.next.Owner, &s.next.Previous, &s.next.Next} {
		for b, host := range column {
			if host != table.None {
				column[b] = index[host]
			}
		}
	}
}

// bucket moves one bucket a step further, to its preferred host.
func (s *step) bucket(b int, target uint16) {
	owner, previous, next := &s.next.Owner[b], &s.next.Previous[b], &s.next.Next[b]
	switch {
	case *owner == table.None || s.lost[*owner]:
		s.force(b, target)
	case *previous != table.None:
		if s.applied {
			*previous, s.changed = table.None, true
			return
		}
		s.moving++
	case *next != table.None && (*next != target || !s.takes[*next]):
		*next, s.changed = table.None, true // the host that was prepared is not wanted any more
	case *next != table.None:
		s.moving++
		if s.applied && s.prepared(*owner) && s.prepared(*next) {
			*owner, *previous, *next, s.changed = *next, *owner, table.None, true
		}
	}
}

// prepared reports whether no move waits for the preparations of a host: they are finished, or the host does not make them.
func (s *step) prepared(host uint16) bool {
	h := s.at[host]
	return h == nil || !h.Alive || h.Refuses || h.Prepared >= s.next.Epoch
}

// replace gives the buckets that need another owner, and whose preferred host takes none, to the hosts that do.
func (s *step) replace() {
	if len(s.forced) == 0 {
		return
	}
	var others table.Ranking
	for i, h := range s.next.Hosts {
		if s.takes[i] {
			others.Set(h.Name, h.Weight)
		}
	}
	targets := others.Column(s.next.Index)
	for _, b := range s.forced {
		if targets[b] != table.None {
			s.force(b, targets[b])
		}
	}
}

// force gives a bucket another owner at once: the present one does not run.
func (s *step) force(b int, target uint16) {
	if target == table.None || !s.takes[target] {
		s.forced = append(s.forced, b)
		return
	}
	s.next.Owner[b], s.next.Previous[b], s.next.Next[b], s.changed = target, table.None, table.None, true
}

// prepare begins the next moves to the preferred hosts. At the same time, no host gives and gets buckets: at the flip, a host that gets
// some waits for those that give them, and two hosts would wait for each other.
func (s *step) prepare(targets *table.Column) {
	if !s.applied {
		return
	}
	gives, gets := make(map[uint16]bool), make(map[uint16]bool)
	for b, owner := range s.next.Owner {
		if next := s.next.Next[b]; next != table.None {
			gives[owner], gets[next] = true, true
		}
		if previous := s.next.Previous[b]; previous != table.None {
			gives[previous], gets[owner] = true, true
		}
	}
	for b, target := range targets {
		if s.moving >= max(s.config.Batch, 1) {
			return
		}
		owner := s.next.Owner[b]
		if owner == table.None || s.lost[owner] || s.next.Next[b] != table.None || s.next.Previous[b] != table.None {
			continue
		}
		if target == table.None || target == owner || !s.takes[target] || gets[owner] || gives[target] {
			continue
		}
		s.next.Next[b], s.changed = target, true
		gives[owner], gets[target] = true, true
		s.moving++
	}
}

// Moved returns the number of buckets that a leader would give to other hosts if the hosts were after instead of before, all for
// long enough. Moves that are under way without the change do not count.
func Moved(present *table.Table, before, after []Host, onDeath OnDeath) (moved int) {
	from, to := targetsOf(present, before, onDeath), targetsOf(present, after, onDeath)
	if from == nil || to == nil {
		return 0
	}
	for b := range to {
		if from[b] != to[b] {
			moved++
		}
	}
	return moved
}

// targetsOf returns the hosts that a leader would give the buckets: names, or nil without a host.
func targetsOf(present *table.Table, hosts []Host, onDeath OnDeath) []string {
	l := Leader{Config: Config{OnDeath: onDeath}}
	shares := present.Shares()
	weights := make(map[string]uint32)
	var names []string
	for i := range hosts {
		h := &hosts[i]
		at := present.Index(h.Name)
		if l.hasShare(h, at != table.None && shares[at] > 0, true) {
			weights[h.Name] = h.Weight
			names = append(names, h.Name)
		}
	}
	l.rank(weights)
	if l.ranking.Hosts() == 0 {
		return nil
	}
	var to []string
	for _, i := range l.ranking.Column(func(name string) uint16 { return uint16(slices.Index(names, name)) }) {
		to = append(to, names[i])
	}
	return to
}

// rank brings the ranking to the weights of the hosts that have a share.
func (l *Leader) rank(want map[string]uint32) {
	for name := range l.ranked {
		if want[name] == 0 {
			l.ranking.Set(name, 0)
		}
	}
	for name, weight := range want {
		l.ranking.Set(name, weight)
	}
	l.ranked = want
}

// hasShare reports whether a host has a share of the buckets, by the ranking.
func (l *Leader) hasShare(h *Host, owns, settled bool) bool {
	if h.State != Ready && h.State != Maint || h.Check() != nil {
		return false
	}
	if !h.Alive {
		return owns && (l.OnDeath == Wait || h.Unknown)
	}
	return owns || settled && h.Healthy && h.State == Ready
}
