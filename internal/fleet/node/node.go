// SPDX-License-Identifier: Apache-2.0

// Package node is one host of a fleet: it applies the tables of the store, says so, and leads the fleet when the store
// decides so.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"sockeye/internal/clock"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/store"
	"sockeye/internal/fleet/table"
)

// retryPause is the pause before a table that could not be applied or written is tried again.
const retryPause = time.Second

// Path is the data path of a host.
type Path interface {
	// Apply puts a table in force.
	Apply(t *table.Table) error
	// Prepare makes the moves of a table possible that concern this host: as the owner, it hands over templates; as the next
	// one, it is ready for the devices. Prepare is called after Apply, and again until it returns nil. The error is ErrWait
	// while another host must prepare something first.
	Prepare(ctx context.Context, t *table.Table, hosts []lead.Host) error
}

// ErrWait is the error of Path.Prepare while the preparations of another host are not finished.
var ErrWait = errors.New("another host prepares")

// Config describes a host.
type Config struct {
	Store store.Store
	Path  Path
	// Lead has the rules of the fleet, the same on all hosts.
	Lead lead.Config
	// Host is the registration of this host.
	Host store.Registration
	// Last is the table that was in force when the agent ended, or nil. It is applied again, and stays in force until the store
	// has a later one.
	Last *table.Table
	Log  *slog.Logger
}

// Node is a host of a fleet.
type Node struct {
	config  Config
	leader  lead.Leader
	applied *table.Table // in force
	problem string       // that was logged last

	mu           sync.Mutex
	registration store.Registration
	// Changed is called with the state after each change, from the goroutine of Run.
	Changed func(State)
}

// State is what a host knows.
type State struct {
	*store.Snapshot
	// Applied is the table in force on this host, or nil.
	Applied *table.Table
	// Problem is why the newest table is not in force, or was not written; "": neither.
	Problem string
}

// New returns a host.
func New(c Config) *Node {
	return &Node{config: c, leader: lead.Leader{Config: c.Lead}, registration: c.Host}
}

// Describe changes what this host says about itself.
func (n *Node) Describe(h table.Host, healthy bool) {
	n.update(func(r *store.Registration) { r.Host, r.Healthy = h, healthy })
}

// update changes the registration of this host, and publishes a change.
func (n *Node) update(change func(*store.Registration)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	before := n.registration
	change(&n.registration)
	if !reflect.DeepEqual(n.registration, before) {
		n.config.Store.Update(n.registration)
	}
}

// Run follows the store until ctx is done.
func (n *Node) Run(ctx context.Context) {
	snapshots := make(chan *store.Snapshot, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		n.config.Store.Run(ctx, snapshots)
	}()
	defer func() { <-ended }()
	last := &store.Snapshot{Table: n.config.Last}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case last = <-snapshots:
		case <-timer.C:
		}
		wait, err := n.follow(ctx, last)
		problem := ""
		if err != nil {
			problem, wait = err.Error(), retryPause
		}
		if problem != n.problem && problem != "" {
			n.config.Log.Warn("fleet", "problem", problem)
		}
		n.problem = problem
		if n.Changed != nil {
			n.Changed(State{last, n.applied, problem})
		}
		if wait > 0 {
			timer.Reset(wait)
		}
	}
}

// follow applies the table of a snapshot, and decides about the next one if this host leads. It returns the time after which
// to call it again with the same snapshot; 0: never.
func (n *Node) follow(ctx context.Context, s *store.Snapshot) (wait time.Duration, err error) {
	if err := n.apply(ctx, s); err != nil {
		return 0, err
	}
	if !s.Connected || !s.Leads {
		// Another leader has other times: those of this host begin when it leads again.
		n.leader = lead.Leader{Config: n.config.Lead}
		return 0, nil
	}
	d := n.leader.Decide(clock.Monotonic(), s.Table, s.Hosts)
	next := d.Table
	if next == nil && s.Damaged && s.Table != nil { // the store has lost its table: the last good one heals it
		healed := *s.Table
		healed.Epoch++
		next = &healed
	}
	if next == nil {
		return d.Wait, nil
	}
	switch err := n.config.Store.Write(ctx, s, next); {
	case errors.Is(err, store.ErrNotLeader), ctx.Err() != nil:
		return 0, nil // the next snapshot says who leads, and what the table is
	case err != nil:
		return 0, err
	}
	return 0, nil
}

// apply puts a table in force, unless it is the one in force. A store with an earlier table, or one of another fleet, was
// replaced or restored: this host keeps its table, and does not lead.
func (n *Node) apply(ctx context.Context, s *store.Snapshot) error {
	t := s.Table
	switch {
	case t == nil:
		return nil
	case n.applied != nil && t.Nonce != n.applied.Nonce:
		return errors.New("the table in the store has another nonce than the one in force: it belongs to another fleet")
	case n.applied != nil && t.Epoch < n.applied.Epoch:
		return fmt.Errorf("the store has epoch %d, and epoch %d is in force: an earlier state of the store was restored", t.Epoch, n.applied.Epoch)
	}
	applied, prepared := n.registered()
	defer func() { // one message for both
		n.update(func(r *store.Registration) { r.Applied, r.Prepared = applied, prepared })
	}()
	if n.applied == nil || t.Epoch > n.applied.Epoch {
		if err := n.config.Path.Apply(t); err != nil {
			return err
		}
		n.applied, applied = t, t.Epoch
	}
	if prepared < t.Epoch {
		switch err := n.config.Path.Prepare(ctx, t, s.Hosts); {
		case err == nil:
			prepared = t.Epoch
		case !errors.Is(err, ErrWait): // otherwise the next snapshot shows when the other host is ready
			return err
		}
	}
	return nil
}

// registered returns the epochs of the registration.
func (n *Node) registered() (applied, prepared uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.registration.Applied, n.registration.Prepared
}
