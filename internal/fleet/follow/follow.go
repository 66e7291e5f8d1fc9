// SPDX-License-Identifier: Apache-2.0

// Package follow follows the store of a fleet on one host: it applies the tables of the store, says so, and leads the fleet when the store
// decides so.
package follow

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"sync"
	"time"

	"sockeye/internal/clock"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/store"
	"sockeye/internal/fleet/table"
)

// retryPause is the pause before a table that could not be applied or written is tried again.
const retryPause = time.Second

// DataPath is the data path of a host.
type DataPath interface {
	// Apply puts a table in force.
	Apply(t *table.Table) error
	// HandOver hands the templates of the devices over that a table prepares to leave this host. HandOver is called after Apply
	// for a table that prepares such moves, and again until it returns nil.
	HandOver(ctx context.Context, t *table.Table) error
	// TakeOver makes this host ready for the devices that a table prepares to come. It is called after HandOver for a table that
	// prepares such moves, when all the owners of the devices that live have handed them over, and again until it returns nil.
	TakeOver(ctx context.Context, t *table.Table) error
}

// Config describes a host.
type Config struct {
	Store store.Store
	Path  DataPath
	// Lead has the rules of the fleet, the same on all hosts.
	Lead lead.Config
	// Host is the registration of this host.
	Host store.Registration
	// Last is the table that was in force when the agent ended, or nil. It is applied again, and stays in force until the store
	// has a later one.
	Last *table.Table
	Log  *slog.Logger
}

// Follower is a host of a fleet that follows the store.
type Follower struct {
	config  Config
	leader  lead.Leader
	applied *table.Table // in force
	problem string       // that was logged last

	preparing *preparation // nil: none
	finished  *preparation // that has ended, and whose result is not registered
	failed    error        // of the last preparation, for failedIn
	failedIn  uint64       // epoch

	postponed time.Duration // time since which tables wait for the former owners of their devices; 0: none waits

	lost   time.Duration // time since which this leader sees a store without its table; 0: it has one
	healed time.Duration // time of the last table that was to heal the store

	mu           sync.Mutex
	registration store.Registration
	// Changed is called with the state after each change, from the goroutine of Run.
	Changed func(State)
}

// State is the state of the fleet as seen by a host.
type State struct {
	*store.Snapshot
	// Applied is the table in force on this host, or nil.
	Applied *table.Table
	// Problem is why the newest table is not in force, or was not written, or why there will be none; "": none of them.
	Problem string
	// Foreign is set if the table of the store is one of another fleet.
	Foreign bool
}

// New returns a host.
func New(c Config) *Follower {
	return &Follower{config: c, leader: lead.Leader{Config: c.Lead}, registration: c.Host}
}

// Describe changes what this host says about itself.
func (f *Follower) Describe(h table.Host, healthy bool) {
	f.update(func(r *store.Registration) { r.Host, r.Healthy = h, healthy })
}

// HandedLate tells the other hosts that this one has handed over templates that were not part of a preparation.
func (f *Follower) HandedLate() {
	// A count would be the same after a restart.
	f.update(func(r *store.Registration) { r.Late = max(r.Late+1, uint64(time.Now().UnixNano())) })
}

// Run follows the store until ctx is done.
func (f *Follower) Run(ctx context.Context) {
	snapshots := make(chan *store.Snapshot, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f.config.Store.Run(ctx, snapshots)
	}()
	defer func() { <-ended }()
	defer func() {
		if f.preparing != nil {
			<-f.preparing.ended
		}
	}()
	timer := time.NewTimer(0)
	<-timer.C
	defer timer.Stop()
	// The table of the last start comes first: a table of the store is compared with the one in force.
	for last := (&store.Snapshot{Table: f.config.Last}); ; {
		wait, err := f.follow(ctx, last)
		problem := ""
		if err != nil {
			problem, wait = err.Error(), retryPause
		} else if living := lead.Living(last.Hosts); last.Connected && last.Leader != "" && living < f.config.Lead.MinHosts {
			problem = fmt.Sprintf("%d of at least %d hosts (min_hosts) are alive: no device moves, also not from a dead host", living, f.config.Lead.MinHosts)
		}
		if problem != f.problem && problem != "" {
			f.config.Log.Debug("fleet", "problem", problem) // Changed tells the user
		}
		f.problem = problem
		if f.Changed != nil {
			f.Changed(State{last, f.applied, problem, last.Table != nil && f.applied != nil && last.Table.Nonce != f.applied.Nonce})
		}
		if wait > 0 {
			timer.Reset(wait)
		}
		select {
		case <-ctx.Done():
			return
		case last = <-snapshots:
		case <-f.prepared():
			f.finished, f.preparing = f.preparing, nil
		case <-timer.C:
		}
	}
}

// refusedError is why this host refuses the state of the store, and does not lead.
type refusedError string

// follow applies the table of a snapshot, and decides about the next one if this host leads. It returns the time after which
// to call it again with the same snapshot; 0: never.
func (f *Follower) follow(ctx context.Context, s *store.Snapshot) (wait time.Duration, err error) {
	// Somebody has deleted a table that was restored: the one in force counts.
	if s.Damaged && s.Table != nil && f.applied != nil && s.Table.Nonce == f.applied.Nonce && s.Table.Epoch <= f.applied.Epoch {
		present := *s
		present.Table = f.applied
		s = &present
	}
	postponed, err := f.apply(ctx, s)
	if err == nil && s.Table != nil && !s.Damaged {
		if host, epoch := latest(s.Hosts, s.Table.Nonce, s.Table.Epoch); host != "" {
			err = refusedError(fmt.Sprintf("the table in the store has epoch %d, and host %s has epoch %d: an earlier state of the store was restored", s.Table.Epoch, host, epoch))
		}
	}
	_, refused := errors.AsType[refusedError](err)
	if refused || !s.Connected || !s.Leads {
		// Another leader has other times: those of this host begin when it leads again.
		f.leader = lead.Leader{Config: f.config.Lead}
		f.lost = 0
		return postponed, err
	}
	// What fails on this host does not keep the devices of a dead host where they are.
	next, wait := f.next(s)
	if next == nil {
		if wait == 0 || postponed > 0 && postponed < wait {
			wait = postponed
		}
		return wait, err
	}
	switch failed := f.config.Store.Write(ctx, s, next); {
	case errors.Is(failed, store.ErrNotLeader), ctx.Err() != nil:
		return 0, err // the next snapshot says who leads, and what the table is
	case failed != nil:
		return 0, failed
	}
	return 0, err
}

// lostTime is the longest time for which the leader waits for the hosts of the last table before it writes the table into a
// store that has lost it, or has an earlier one. Such a store has not the registrations either, so the living hosts look dead.
const lostTime = 10 * time.Second

// next returns the table that this host writes as the leader, or nil and the time after which to ask again; 0: with the next
// snapshot.
func (f *Follower) next(s *store.Snapshot) (next *table.Table, wait time.Duration) {
	now := clock.Monotonic()
	last := s.Table
	if last == nil {
		last = f.applied
	}
	if last == nil || s.Table != nil && !s.Damaged {
		f.lost = 0
		d := f.leader.Decide(now, last, s.Hosts)
		return d.Table, d.Wait
	}
	if f.lost == 0 {
		f.lost = now
	}
	if now-f.lost < lostTime && !allAlive(last, s.Hosts) {
		return nil, retryPause
	}
	if f.healed != 0 && now-f.healed < retryPause {
		return nil, retryPause
	}
	f.healed = now
	// The last good table heals the store, with an epoch that is later than that of every host.
	healed := *last
	if _, epoch := latest(s.Hosts, last.Nonce, last.Epoch); epoch > 0 {
		healed.Epoch = epoch
	}
	healed.Epoch++
	return &healed, 0
}

// allAlive reports whether all hosts of a table are registered.
func allAlive(t *table.Table, hosts []lead.Host) bool {
	alive := make(map[string]bool)
	for i := range hosts {
		alive[hosts[i].Name] = hosts[i].Alive
	}
	return !slices.ContainsFunc(t.Hosts, func(h table.Host) bool { return !alive[h.Name] })
}

func (e refusedError) Error() string { return string(e) }

// apply puts a table in force, unless it is the one in force, or must wait for other hosts: then it returns the time that is left. A store
// with an earlier table, or one of another fleet, was replaced or restored: this host keeps its table, and does not lead.
func (f *Follower) apply(ctx context.Context, s *store.Snapshot) (postponed time.Duration, err error) {
	t := s.Table
	if t == nil || s.Damaged {
		// A host without the last table of the fleet leaves it to the others to write it.
		r := f.registered()
		epoch, nonce := r.Applied, r.Nonce
		if t != nil {
			epoch, nonce = max(epoch, t.Epoch), t.Nonce
		}
		if later, _ := latest(s.Hosts, nonce, epoch); later != "" {
			f.update(func(r *store.Registration) { r.Refuses = true })
			return 0, refusedError(fmt.Sprintf("the store has lost the table of the fleet, and another host must write it again, as host %s: the one of this host is not the last one", later))
		}
	}
	switch {
	case t == nil:
		f.update(func(r *store.Registration) { r.Refuses = false })
		return 0, nil
	case f.applied != nil && t.Nonce != f.applied.Nonce:
		f.update(func(r *store.Registration) { r.Refuses, r.Nonce, r.Applied, r.Handed, r.Prepared = true, 0, 0, 0, 0 })
		return 0, refusedError("the table in the store has another nonce than the one in force: it belongs to another fleet (see Troubleshooting in docs/fleet.md)")
	case f.applied != nil && t.Epoch < f.applied.Epoch:
		f.update(func(r *store.Registration) { r.Refuses = true })
		return 0, refusedError(fmt.Sprintf("the table in the store has epoch %d, and epoch %d is in force: an earlier state of the store was restored, or its file needs a higher epoch", t.Epoch, f.applied.Epoch))
	}
	if f.applied != nil && t.Epoch == f.applied.Epoch && !t.Equal(f.applied) {
		f.update(func(r *store.Registration) { r.Refuses = true })
		return 0, refusedError(fmt.Sprintf("the table in the store has epoch %d, as the one in force, and other hosts or owners: an earlier state of the store was restored, or its file has changed without another epoch", t.Epoch))
	}
	if f.applied == nil || t.Epoch > f.applied.Epoch {
		if wait := f.postpone(s, t); wait > 0 {
			return wait, nil
		}
		if err := f.config.Path.Apply(t); err != nil {
			return 0, err
		}
		f.applied, f.postponed = t, 0
	}
	return 0, f.prepare(ctx, s, t)
}

// latest returns the living host with the latest table of a nonce after an epoch, and the epoch of this table, or "". Epochs that no
// table of the fleet can have do not count. With nonce 0, the table of any fleet counts.
func latest(hosts []lead.Host, nonce, after uint64) (name string, epoch uint64) {
	for i := range hosts {
		if h := &hosts[i]; h.Alive && (nonce == 0 || h.Nonce == nonce) && h.Applied > max(after, epoch) && h.Applied < min(after+store.MostEpochs, table.MostEpoch) {
			name, epoch = h.Name, h.Applied
		}
	}
	return name, epoch
}

// flipTime is the longest time for which a host waits for the former owners of its devices to apply a table, in which they close the
// connections of these devices. The lease of a former owner whose agent has died ends before. A host that lives, and does not apply the table,
// keeps the devices for this time.
const flipTime = 10 * time.Second

// postpone returns the time for which this host does not apply a table yet that gives it devices: their former owners come first. Until a
// former owner applies the table, all packets of the devices reach it, and so do the connections; afterwards, it sends them here. If
// this host were first, it would have datagrams of devices whose connections are still at the former owner.
func (f *Follower) postpone(s *store.Snapshot, t *table.Table) time.Duration {
	if f.applied == nil || !awaitsOwners(f.applied, t, f.registered().Name, s.Hosts) {
		return 0
	}
	now := clock.Monotonic()
	if f.postponed == 0 {
		f.postponed = now // also for later tables, until one is applied
	}
	wait := max(0, flipTime-(now-f.postponed))
	if wait == 0 {
		f.config.Log.Warn("a former owner of devices has not applied the table: their datagrams may reach this host while their connections are there", "epoch", t.Epoch)
	}
	return wait
}

// awaitsOwners reports whether a living former owner of devices that a table gives to a host has not applied the table. Former owners that
// get devices themselves do not count: two hosts would wait for each other. The leader makes no such table (step.prepare of lead). A table that
// gives the host devices without a former owner, as after a death, does not wait.
func awaitsOwners(applied, t *table.Table, host string, hosts []lead.Host) bool {
	self, before := t.Index(host), applied.Index(host)
	gains, former := make(map[uint16]bool), make(map[uint16]bool)
	for b, previous := range t.Previous {
		if previous != table.None {
			gains[t.Owner[b]] = true
		}
		switch {
		case t.Owner[b] != self || self == table.None || before != table.None && applied.Owner[b] == before:
		case previous == table.None:
			return false
		default:
			former[previous] = true
		}
	}
	return slices.ContainsFunc(hosts, func(h lead.Host) bool {
		at := t.Index(h.Name)
		return at != table.None && former[at] && !gains[at] && h.Alive && !h.Refuses && h.Applied < t.Epoch
	})
}

// prepared returns a channel that is closed when the present preparation ends; nil: there is none.
func (f *Follower) prepared() <-chan struct{} {
	if f.preparing == nil {
		return nil
	}
	return f.preparing.ended
}

// prepare prepares the moves of the table in force, step by step, and registers what is done.
func (f *Follower) prepare(ctx context.Context, s *store.Snapshot, t *table.Table) error {
	r := f.registered()
	r.Refuses, r.Nonce, r.Applied = false, t.Nonce, t.Epoch
	if f.failedIn != t.Epoch {
		f.failed, f.failedIn = nil, t.Epoch
	}
	pause := false // before the next attempt
	if p := f.finished; p != nil && p.epoch == t.Epoch {
		f.failed = p.err // as long as the next attempt runs, too
		switch {
		case p.err != nil:
			pause = true
		case p.takes:
			r.Prepared = t.Epoch
		default:
			r.Handed = t.Epoch
		}
	}
	f.finished = nil
	if f.preparing != nil && f.preparing.epoch != t.Epoch {
		f.preparing.cancel()
	}
	leave, come := moves(t, r.Name)
	if r.Handed < t.Epoch && !leave {
		r.Handed = t.Epoch
	}
	if r.Handed == t.Epoch && r.Prepared < t.Epoch && !come {
		r.Prepared = t.Epoch
	}
	switch {
	case f.preparing != nil, pause:
	case r.Handed < t.Epoch:
		f.startPreparation(ctx, t, false)
	case r.Prepared < t.Epoch && handedOver(t, r.Name, s.Hosts): // two hosts may get devices from each other
		f.startPreparation(ctx, t, true)
	}
	f.update(func(now *store.Registration) { // one message for all
		now.Refuses, now.Nonce, now.Applied, now.Handed, now.Prepared = r.Refuses, r.Nonce, r.Applied, r.Handed, r.Prepared
	})
	return f.failed
}

// update changes the registration of this host, and publishes a change.
func (f *Follower) update(change func(*store.Registration)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := f.registration
	change(&f.registration)
	if !reflect.DeepEqual(f.registration, before) {
		f.config.Store.Update(f.registration)
	}
}

// preparation prepares moves of a table, in a goroutine of its own: a later table does not wait for it, as after a death.
type preparation struct {
	epoch  uint64
	takes  bool // TakeOver; otherwise HandOver
	cancel context.CancelFunc
	ended  chan struct{}
	err    error // set before ended is closed
}

// startPreparation begins a preparation.
func (f *Follower) startPreparation(ctx context.Context, t *table.Table, takes bool) {
	ctx, cancel := context.WithCancel(ctx)
	p := &preparation{epoch: t.Epoch, takes: takes, cancel: cancel, ended: make(chan struct{})}
	f.preparing = p
	work := f.config.Path.HandOver
	if takes {
		work = f.config.Path.TakeOver
	}
	go func() {
		defer close(p.ended)
		defer cancel()
		p.err = work(ctx, t)
	}()
}

// moves reports whether a table prepares moves from a host, and to it.
func moves(t *table.Table, host string) (leave, come bool) {
	self := t.Index(host)
	for b, next := range t.Next {
		leave = leave || next != table.None && t.Owner[b] == self
		come = come || next != table.None && next == self
	}
	return leave, come
}

// registered returns the registration.
func (f *Follower) registered() store.Registration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.registration
}

// handedOver reports whether all living owners of devices that a table prepares to come to a host have handed them over.
// Otherwise, a later snapshot shows that they have.
func handedOver(t *table.Table, to string, hosts []lead.Host) bool {
	self := t.Index(to)
	if self == table.None {
		return true
	}
	owners := make(map[string]bool)
	for b, next := range t.Next {
		if next == self {
			owners[t.Hosts[t.Owner[b]].Name] = true
		}
	}
	return !slices.ContainsFunc(hosts, func(h lead.Host) bool { return owners[h.Name] && h.Alive && !h.Refuses && h.Handed < t.Epoch })
}
