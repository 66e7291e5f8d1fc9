// SPDX-License-Identifier: Apache-2.0

// Package model is a model of a fleet of hosts: hosts join, die, drain and lose the store, and the leader moves buckets with the
// code of the agent. It reports what moved, and where packets went.
package model

import (
	"container/heap"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/table"
	"sockeye/internal/stats"
)

const (
	// Day is the unit of the times between events.
	Day = 24 * time.Hour
	// lease is the time after which the store reports that a host is dead.
	lease = 3 * time.Second
	// settle is the time after which a new host gets buckets.
	settle = 10 * time.Second
	// samples is the number of packets that are followed for each table that gives buckets another owner.
	samples = 100
	// startTime is the time that a host needs to start.
	startTime = 2 * time.Minute
)

// Config is a simulation.
type Config struct {
	Hosts    int
	Devices  int
	Duration time.Duration
	Seed     uint64
	Batch    int // buckets that move at the same time
	// Deaths, Drains and Partitions are the mean times between these events of one host.
	Deaths, Drains, Partitions time.Duration
	// Leaders, Outages, Weights and Replacements are the mean times between these events of the fleet: another leader, a
	// store without a quorum, a new weight of a host, and a host that is replaced by a new one.
	Leaders, Outages, Weights, Replacements time.Duration
}

// Usual returns the events of a fleet that is looked after: a host dies every two months, is drained every month, and loses the
// store every three months.
func Usual(hosts int) Config {
	return Config{
		Hosts: hosts, Devices: 100_000, Duration: 365 * Day, Batch: 64,
		Deaths: 60 * Day, Drains: 30 * Day, Partitions: 90 * Day,
		Leaders: 7 * Day, Outages: 30 * Day, Weights: 14 * Day, Replacements: 14 * Day,
	}
}

// Result is what happened.
type Result struct {
	Hosts        int `json:"hosts"`
	Deaths       int `json:"deaths"`
	Drains       int `json:"drains"`
	Partitions   int `json:"partitions"`
	Leaders      int `json:"leaders"`
	Outages      int `json:"outages"`
	Weights      int `json:"weights"`
	Replacements int `json:"replacements"`

	Epochs int `json:"epochs"`
	// Moved is the number of buckets that got another owner, Ideal the sum over all changes of the share that had to move.
	Moved          int     `json:"moved"`
	Ideal          float64 `json:"ideal"`
	MovedOverIdeal float64 `json:"moved_over_ideal"`
	// PeakBuckets and PeakDevices are the largest ratios of the buckets and devices of a host to its share by weight, when
	// nothing moves.
	PeakBuckets float64 `json:"peak_buckets"`
	PeakDevices float64 `json:"peak_devices"`
	// Converged are the times from a change to the table in which nothing moves any more, in seconds.
	ConvergedP50 float64 `json:"converged_p50_s"`
	ConvergedP99 float64 `json:"converged_p99_s"`
	ConvergedMax float64 `json:"converged_max_s"`

	Packets Packets `json:"packets"`
}

// Packets are the packets that were followed: packets of devices whose bucket has just got another owner, at hosts of which
// some have applied the new table.
type Packets struct {
	Followed int `json:"followed"`
	// Local packets arrived at the host that served them, Once were forwarded once, and Twice by the second chance.
	Local int `json:"local"`
	Once  int `json:"once"`
	Twice int `json:"twice"`
	// Misdirected packets were served by a host that owns the bucket neither in the newest table nor in the one before.
	Misdirected int `json:"misdirected"`
	// Reset packets are segments of connections that live, at a host without their socket.
	Reset int `json:"reset"`
	// Lost packets of planned moves found no host that serves them.
	Lost int `json:"lost"`
	// Dead packets went to a host that does not run.
	Dead int `json:"dead"`
	// Partitioned packets arrived at a host that does not reach the store, and that serves the bucket by an older table.
	Partitioned int `json:"partitioned"`
	// Undecided packets arrived at, or were forwarded to, a host whose table is older than the two newest ones, and were dropped.
	Undecided int `json:"undecided"`
}

// host is a host of the simulation.
type host struct {
	lead.Host
	runs     bool // the process runs, and the router sends packets to it
	reaches  bool // it reaches the store
	applied  *table.Table
	next     *table.Table // applied from nextAt on
	nextAt   time.Duration
	draining bool
	removed  bool
	ends     uint64 // changes with each death or start, so that events of an earlier life are ignored
}

// fleet is the state of a simulation.
type fleet struct {
	Config
	random *rand.Rand
	now    time.Duration
	queue  queue
	events uint64 // that were ever scheduled
	hosts  map[string]*host
	names  []string // sorted
	joined int      // hosts that ever were part of the fleet

	leader   *lead.Leader
	elected  time.Duration // monotonic zero of the leader's host
	table    *table.Table
	before   *table.Table // the table before, as long as a host may use it
	lastSize map[string]uint32
	store    bool // the store has a quorum
	woken    time.Duration
	busy     time.Duration // time of the first change that the table does not reflect yet; negative: none
	result   Result
	times    []float64
	devices  [table.Buckets]int // by bucket
}

// event is an action at a time. Events of one time happen in the order of their numbers.
type event struct {
	at     time.Duration
	number uint64
	do     func()
}

type queue []event

// Run runs a simulation.
func Run(c Config) Result {
	f := &fleet{Config: c, random: rand.New(rand.NewPCG(c.Seed, 19)), hosts: make(map[string]*host), store: true, busy: -1}
	f.result.Hosts = c.Hosts
	for range c.Devices {
		f.devices[f.random.IntN(table.Buckets)]++
	}
	f.elect()
	for range c.Hosts {
		f.add()
	}
	f.every(c.Leaders, func() { f.elect(); f.result.Leaders++; f.decide() })
	f.every(c.Outages, f.outage)
	f.every(c.Weights, f.weigh)
	f.every(c.Replacements, f.replace)
	for f.queue.Len() > 0 && f.queue[0].at < c.Duration {
		e := heap.Pop(&f.queue).(event)
		f.now = e.at
		e.do()
	}
	r := &f.result
	if r.Ideal > 0 {
		r.MovedOverIdeal = float64(r.Moved) / r.Ideal
	}
	if len(f.times) > 0 {
		slices.Sort(f.times)
		r.ConvergedP50, r.ConvergedP99, r.ConvergedMax = stats.Quantile(f.times, 0.5), stats.Quantile(f.times, 0.99), f.times[len(f.times)-1]
	}
	return *r
}

// exp returns an exponentially distributed time.
func (f *fleet) exp(mean time.Duration) time.Duration {
	return time.Duration(f.random.ExpFloat64() * float64(mean))
}

// between returns a uniformly distributed time.
func (f *fleet) between(least, most time.Duration) time.Duration {
	return least + time.Duration(f.random.Int64N(int64(most-least)))
}

// replace removes a host, and adds another one.
func (f *fleet) replace() {
	h := f.hosts[f.names[f.random.IntN(len(f.names))]]
	if !h.runs || !h.reaches || h.draining || h.removed || len(f.names) > f.Hosts {
		return
	}
	f.result.Replacements++
	f.add()
	h.State, h.removed = lead.Removed, true
	f.changed()
	f.whenEmpty(h, func() {
		h.runs, h.Alive = false, false
		delete(f.hosts, h.Name)
		at, _ := slices.BinarySearch(f.names, h.Name)
		f.names = slices.Delete(f.names, at, at+1)
		f.changed()
	})
}

// add adds a new host, and the events of its life.
func (f *fleet) add() {
	name := fmt.Sprintf("host-%04d", f.joined)
	f.joined++
	h := &host{Host: lead.Host{Host: table.Host{Name: name, Weight: 100}, State: lead.Ready}}
	f.hosts[name] = h
	at, _ := slices.BinarySearch(f.names, name)
	f.names = slices.Insert(f.names, at, name)
	f.start(h)
	alive := func(do func(*host)) func() {
		return func() {
			if h.runs && h.reaches && !h.draining && !h.removed {
				do(h)
			}
		}
	}
	f.every(f.Deaths, alive(f.die))
	f.every(f.Drains, alive(f.drain))
	f.every(f.Partitions, alive(f.partition))
}

// every runs an action again and again, with exponentially distributed pauses of a mean; 0: never.
func (f *fleet) every(mean time.Duration, do func()) {
	if mean > 0 {
		f.after(f.exp(mean), func() { do(); f.every(mean, do) })
	}
}

// die ends a host without notice, for a while.
func (f *fleet) die(h *host) {
	f.result.Deaths++
	h.ends++
	h.runs = false
	f.lose(h, f.between(startTime, 30*time.Minute), func() { f.start(h) })
}

// partition cuts a host off from the store; its packets still arrive.
func (f *fleet) partition(h *host) {
	f.result.Partitions++
	h.ends++
	h.reaches = false
	f.lose(h, f.exp(2*time.Minute), func() {
		h.reaches, h.Alive = true, true
		f.apply(h)
		f.changed()
	})
}

// drain hands the buckets of a host over, restarts the host, and makes it ready again.
func (f *fleet) drain(h *host) {
	f.result.Drains++
	h.State, h.draining = lead.Drain, true
	f.changed()
	f.whenEmpty(h, func() {
		h.ends++
		h.runs = false
		f.lose(h, f.between(startTime, 10*time.Minute), func() {
			h.State, h.draining = lead.Ready, false
			f.start(h)
		})
	})
}

// start starts a host. It has the table of the store when it announces the service's addresses.
func (f *fleet) start(h *host) {
	h.ends++
	h.runs, h.reaches, h.Alive, h.Healthy = true, true, true, true
	h.applied, h.next = nil, nil
	f.apply(h)
	f.changed()
}

// lose lets the lease of a host expire, and runs an action after a time.
func (f *fleet) lose(h *host, d time.Duration, back func()) {
	life := h.ends
	f.after(lease+f.between(0, time.Second), func() {
		if h.ends == life {
			h.Alive = false
			f.changed()
		}
	})
	f.after(d, func() {
		if h.ends == life {
			back()
		}
	})
}

// whenEmpty runs an action when a host has no bucket any more in a table that all hosts have applied.
func (f *fleet) whenEmpty(h *host, do func()) {
	life := h.ends
	f.after(time.Second, func() {
		switch at := f.index(h.Name); {
		case h.ends != life:
		case f.table != nil && at != table.None && f.table.Shares()[at] > 0, f.busy >= 0:
			f.whenEmpty(h, do)
		default:
			do()
		}
	})
}

func (f *fleet) index(name string) uint16 {
	if f.table == nil {
		return table.None
	}
	return f.table.Index(name)
}

// weigh gives a host another weight.
func (f *fleet) weigh() {
	h := f.hosts[f.names[f.random.IntN(len(f.names))]]
	f.result.Weights++
	h.Weight = uint32(50 + f.random.IntN(151))
	f.changed()
}

// outage takes the quorum from the store: nobody writes, and no lease expires.
func (f *fleet) outage() {
	if !f.store {
		return
	}
	f.result.Outages++
	f.store = false
	f.after(f.exp(5*time.Minute), func() {
		f.store = true
		f.elect()
		f.changed()
	})
}

// elect makes another process the leader, whose clock has another zero.
func (f *fleet) elect() {
	f.leader = &lead.Leader{Config: lead.Config{MinHosts: max(1, f.Hosts/2), Settle: settle, OnDeath: lead.Next, Batch: f.Batch, Nonce: 1}}
	f.elected = f.now - f.exp(Day)
}

// changed lets the leader decide after a change of a host, which it hears of a moment later.
func (f *fleet) changed() {
	if f.busy < 0 {
		f.busy = f.now
	}
	f.after(f.delay(), f.decide)
}

// decide asks the leader, and sends its table to the hosts.
func (f *fleet) decide() {
	if !f.store {
		return
	}
	list := make([]lead.Host, 0, len(f.names))
	for _, name := range f.names {
		h := f.hosts[name]
		one := h.Host
		one.Applied = h.epoch(f.now)
		one.Prepared = one.Applied
		list = append(list, one)
	}
	d := f.leader.Decide(f.now-f.elected, f.table, list)
	f.measure()
	if d.Wait > 0 && (f.woken <= f.now || f.now+d.Wait < f.woken) {
		f.woken = f.now + d.Wait
		f.after(d.Wait, f.decide)
	}
	switch {
	case d.Table != nil:
		f.write(d.Table)
	case len(d.Behind) == 0 && d.Wait == 0 && f.busy >= 0 && f.table != nil && f.table.Moving() == 0 && !d.Few:
		f.times = append(f.times, (f.now - f.busy).Seconds())
		f.busy = -1
		f.peak()
	}
}

// epoch returns the epoch that a host uses.
func (h *host) epoch(now time.Duration) uint64 {
	if t := h.at(now); t != nil {
		return t.Epoch
	}
	return 0
}

// measure adds the share that a change of the hosts must move.
func (f *fleet) measure() {
	now := f.leader.Weights()
	if len(now) == 0 {
		return
	}
	if f.lastSize != nil {
		var sumBefore, sumNow float64
		for _, w := range f.lastSize {
			sumBefore += float64(w)
		}
		for _, w := range now {
			sumNow += float64(w)
		}
		difference := 0.0
		for _, name := range slices.Sorted(maps.Keys(now)) { // in one order: the sum depends on it
			difference += abs(float64(now[name])/sumNow - float64(f.lastSize[name])/sumBefore)
		}
		for _, name := range slices.Sorted(maps.Keys(f.lastSize)) {
			if now[name] == 0 {
				difference += float64(f.lastSize[name]) / sumBefore
			}
		}
		f.result.Ideal += difference / 2 * table.Buckets
	}
	f.lastSize = maps.Clone(now)
}

func abs(x float64) float64 { return max(x, -x) }

// write makes a table the present one.
func (f *fleet) write(t *table.Table) {
	if f.busy < 0 {
		f.busy = f.now
	}
	before := f.table
	f.table, f.before = t, before
	f.result.Epochs++
	last := f.now
	for _, name := range f.names {
		if h := f.hosts[name]; h.runs && h.reaches {
			f.apply(h)
			last = max(last, h.nextAt)
		}
	}
	f.after(last-f.now+f.delay(), f.decide)
	if before == nil {
		return
	}
	var flipped []int
	for b := range table.Buckets {
		if nameAt(before, before.Owner[b]) != nameAt(t, t.Owner[b]) {
			flipped = append(flipped, b)
		}
	}
	f.result.Moved += len(flipped)
	if len(flipped) > 0 {
		f.follow(flipped, last)
	}
}

// after runs an action after a time.
func (f *fleet) after(d time.Duration, do func()) {
	f.events++
	heap.Push(&f.queue, event{f.now + d, f.events, do})
}

// apply sends the present table to a host.
func (f *fleet) apply(h *host) {
	h.applied = h.at(f.now)
	if f.table == nil {
		return
	}
	h.next, h.nextAt = f.table, f.now+f.delay()
	if h.applied == nil { // a host that starts announces the addresses once it has a table
		h.applied = f.table
	}
}

// delay returns the time that a message of the store needs.
func (f *fleet) delay() time.Duration {
	if f.random.IntN(1000) == 0 {
		return f.between(0, 2*time.Second)
	}
	return 2*time.Millisecond + f.exp(20*time.Millisecond)
}

// peak records the largest ratio of a host's buckets and devices to its share, when nothing moves.
func (f *fleet) peak() {
	sum := 0.0
	for _, w := range f.lastSize {
		sum += float64(w)
	}
	buckets, devices := make(map[string]int), make(map[string]int)
	for b, owner := range f.table.Owner {
		name := nameAt(f.table, owner)
		buckets[name]++
		devices[name] += f.devices[b]
	}
	for name, w := range f.lastSize {
		share := float64(w) / sum
		f.result.PeakBuckets = max(f.result.PeakBuckets, float64(buckets[name])/(share*table.Buckets))
		f.result.PeakDevices = max(f.result.PeakDevices, float64(devices[name])/(share*float64(f.Devices)))
	}
}

// follow follows packets of buckets that have just got another owner, from before the table was written until the last host
// has applied it. The hosts are as they are now.
func (f *fleet) follow(flipped []int, until time.Duration) {
	var arrive []*host
	for _, name := range f.names {
		if h := f.hosts[name]; h.runs {
			arrive = append(arrive, h)
		}
	}
	for range samples {
		b := flipped[f.random.IntN(len(flipped))]
		at := f.between(f.now-5*time.Millisecond, until+5*time.Millisecond)
		f.packet(b, arrive[f.random.IntN(len(arrive))], at)
	}
}

// mostForwards is the maximum number of hosts that a packet passes: decide_moving sends no packet on more often.
const mostForwards = 3

// packet follows a packet of a bucket that arrives at a host, by the reference model of the program (table.Decide): a datagram, or a
// segment of a connection that the former owner closes when it applies the new table.
func (f *fleet) packet(b int, h *host, at time.Duration) {
	p := &f.result.Packets
	p.Followed++
	former := f.hosts[nameAt(f.before, f.before.Owner[b])]
	planned := former != nil && former.Alive
	packet := table.Packet{Bucket: b, Segment: f.random.IntN(2) == 0}
	for hop := range mostForwards + 1 {
		t := h.at(at)
		switch {
		case t != nil && t.Epoch+1 < f.table.Epoch && !h.reaches && nameAt(t, t.Owner[b]) == h.Name:
			// A host behind a partition has its own view.
			p.Partitioned++
			return
		case t == nil:
			p.Undecided++
			return
		}
		open := func(h *host) bool { t := h.at(at); return h == former && t != nil && t.Epoch < f.table.Epoch }
		packet.Socket = packet.Segment && open(h)
		verdict, to := t.Decide(h.Name, packet)
		switch verdict {
		case table.Serve, table.Disagree:
			owns := h.Name == nameAt(f.table, f.table.Owner[b]) || h == former
			switch {
			case !owns && !h.reaches:
				p.Partitioned++
			case !owns:
				p.Misdirected++
			case packet.Segment && !packet.Socket && planned && former.runs && open(former):
				p.Reset++
			case hop == 0:
				p.Local++
			case hop == 1:
				p.Once++
			default:
				p.Twice++
			}
			return
		case table.Drop:
			p.Undecided++
			return
		}
		next := f.hosts[to]
		if next == nil || !next.runs {
			p.Dead++
			return
		}
		packet.From, h = h.Name, next
	}
	if planned && h.reaches {
		p.Lost++
	} else {
		p.Undecided++
	}
}

// at returns the table that the host uses at a time.
func (h *host) at(now time.Duration) *table.Table {
	if h.next != nil && now >= h.nextAt {
		return h.next
	}
	return h.applied
}

func nameAt(t *table.Table, host uint16) string {
	if host == table.None {
		return ""
	}
	return t.Hosts[host].Name
}

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].number < q[j].number
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(event)) }
func (q *queue) Pop() any {
	last := len(*q) - 1
	e := (*q)[last]
	*q = (*q)[:last]
	return e
}

func (r *Result) String() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%d hosts: %d deaths, %d drains, %d partitions, %d replacements, %d weights, %d leaders, %d outages of the store; %d epochs\n",
		r.Hosts, r.Deaths, r.Drains, r.Partitions, r.Replacements, r.Weights, r.Leaders, r.Outages, r.Epochs)
	fmt.Fprintf(&text, "  moved %d buckets, %.3f of the ideal; peak %.2f of the share in buckets, %.2f in devices\n", r.Moved, r.MovedOverIdeal, r.PeakBuckets, r.PeakDevices)
	fmt.Fprintf(&text, "  at rest after %.2f s (median), %.2f s (99 %%), %.1f s (longest)\n", r.ConvergedP50, r.ConvergedP99, r.ConvergedMax)
	p := r.Packets
	fmt.Fprintf(&text, "  of %d packets during changes: %d local, %d forwarded once, %d twice, %d at dead hosts, %d at partitioned ones, %d dropped for an old table; reset %d, lost %d, misdirected %d\n",
		p.Followed, p.Local, p.Once, p.Twice, p.Dead, p.Partitioned, p.Undecided, p.Reset, p.Lost, p.Misdirected)
	return text.String()
}
