// SPDX-License-Identifier: Apache-2.0

package follow

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/store"
	"sockeye/internal/fleet/table"
	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const patience = 90 * time.Second

// path is a data path that records the tables. All hosts of a test share one history.
type path struct {
	history *history
	name    string
	fail    error
}

// history has the tables that all hosts have applied.
type history struct {
	mu     sync.Mutex
	tables map[uint64]*table.Table // by epoch
	epoch  map[string]uint64       // of each host
	faults []string
}

func (p *path) Apply(t *table.Table) error {
	h := p.history
	h.mu.Lock()
	defer h.mu.Unlock()
	if p.fail != nil {
		return p.fail
	}
	if before := h.tables[t.Epoch]; before != nil && (before.Owner != t.Owner || before.Previous != t.Previous || before.Next != t.Next) {
		h.faults = append(h.faults, fmt.Sprintf("two tables have epoch %d", t.Epoch))
	}
	if last := h.epoch[p.name]; last >= t.Epoch {
		h.faults = append(h.faults, fmt.Sprintf("%s applies epoch %d after %d", p.name, t.Epoch, last))
	}
	h.tables[t.Epoch], h.epoch[p.name] = t, t.Epoch
	return nil
}

func (p *path) HandOver(context.Context, *table.Table) error { return nil }
func (p *path) TakeOver(context.Context, *table.Table) error { return nil }

// host is a host of a test.
type host struct {
	*path
	store *store.Etcd
	stop  func()

	mu    sync.Mutex
	state State
}

func (h *host) last() State {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state
}

// fleet is a fleet with a server of etcd.
type fleet struct {
	*testing.T
	history *history
	hosts   map[string]*host
	etcd    *exec.Cmd
	dir     string
	lead    lead.Config
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	f := &fleet{T: t, dir: t.TempDir(), hosts: map[string]*host{},
		history: &history{tables: map[uint64]*table.Table{}, epoch: map[string]uint64{}},
		lead:    lead.Config{MinHosts: 2, Settle: 500 * time.Millisecond, OnDeath: lead.Next, Batch: 3000, Nonce: 7}}
	f.serve()
	t.Cleanup(func() {
		_ = f.etcd.Process.Kill()
		_ = f.etcd.Wait()
	})
	return f
}

// serve starts the server.
func (f *fleet) serve() {
	f.Helper()
	f.etcd = exec.Command("etcd", "--data-dir", filepath.Join(f.dir, "data"), "--logger", "zap", "--log-level", "error", "--unsafe-no-fsync")
	if err := f.etcd.Start(); err != nil {
		f.Fatalf("%v\nhint: tools/setup etcd-server", err)
	}
}

// start starts a host.
func (f *fleet) start(name string, last *table.Table) *host {
	f.Helper()
	c := Config{Lead: f.lead, Last: last, Log: slog.New(slog.DiscardHandler),
		Host: store.Registration{Host: table.Host{Name: name, Weight: 100}, Healthy: true}}
	etcd, err := store.OpenEtcd(store.EtcdConfig{Endpoints: []string{"127.0.0.1:2379"}, Fleet: "test", Host: c.Host, Lease: 2 * store.DefaultLease, Log: c.Log})
	if err != nil {
		f.Fatal(err)
	}
	h := &host{path: &path{history: f.history, name: name}, store: etcd}
	c.Store, c.Path = etcd, h.path
	follower := New(c)
	follower.Changed = func(s State) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.state = s
	}
	ctx, cancel := context.WithCancel(f.Context())
	done := make(chan struct{})
	go func() { follower.Run(ctx); close(done) }()
	h.stop = func() {
		cancel()
		<-done
		_ = etcd.Close(false)
	}
	f.Cleanup(h.stop)
	f.hosts[name] = h
	return h
}

// endedPair returns the table of the hosts a and b, which have ended.
func (f *fleet) endedPair() *table.Table {
	f.Helper()
	f.start("a", nil)
	f.start("b", nil)
	t := f.rest("two hosts", "a", "b")
	f.end("a")
	f.end("b")
	return t
}

// end ends a host without notice.
func (f *fleet) end(name string) {
	f.hosts[name].stop()
	delete(f.hosts, name)
	f.history.mu.Lock()
	defer f.history.mu.Unlock()
	delete(f.history.epoch, name) // it applies its last table again
}

// rest waits until all hosts have applied one table, in which each bucket is at its preferred host of those with a weight, and
// nothing moves.
func (f *fleet) rest(when string, names ...string) *table.Table {
	f.Helper()
	var r table.Ranking
	for _, name := range names {
		r.Set(name, 100)
	}
	why := ""
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		var t *table.Table
		for name, h := range f.hosts {
			s := h.last()
			switch {
			case s.Applied == nil:
				why = name + " has no table"
			case t != nil && s.Applied.Epoch != t.Epoch:
				why = fmt.Sprintf("epochs %d and %d", s.Applied.Epoch, t.Epoch)
			default:
				t = s.Applied
				continue
			}
			t = nil
			break
		}
		if t == nil {
			continue
		}
		if why = differs(t, &r); why == "" {
			f.check()
			return t
		}
	}
	f.Fatalf("%s: not at rest: %s", when, why)
	return nil
}

// differs says why a table is not the one at rest.
func differs(t *table.Table, r *table.Ranking) string {
	if n := t.Moving(); n > 0 {
		return fmt.Sprintf("%d buckets move in epoch %d", n, t.Epoch)
	}
	target := r.Column(t.Index)
	wrong := 0
	for b, owner := range t.Owner {
		if owner != target[b] {
			wrong++
		}
	}
	if wrong > 0 {
		return fmt.Sprintf("%d buckets are elsewhere in epoch %d, with shares %v", wrong, t.Epoch, t.Shares())
	}
	return ""
}

// check reports what the hosts have seen that must not be.
func (f *fleet) check() {
	f.Helper()
	f.history.mu.Lock()
	defer f.history.mu.Unlock()
	for _, fault := range f.history.faults {
		f.Error(fault)
	}
}

// TestFleet lets hosts join, drain, die, and lose the server. No host goes back in epochs, no epoch has two tables, and the
// buckets come to their preferred hosts each time.
func TestFleet(t *testing.T) {
	f := newFleet(t)
	f.start("a", nil)
	time.Sleep(time.Second)
	if s := f.hosts["a"].last(); s.Applied != nil {
		t.Fatalf("one host of two makes a table: %+v", s.Applied.Shares())
	}
	f.start("b", nil)
	f.rest("two hosts", "a", "b")
	f.start("c", nil)
	f.rest("a third one", "a", "b", "c")
	if err := f.hosts["c"].store.ChangeSetting(t.Context(), "a", to(store.Setting{State: lead.Drain})); err != nil {
		t.Fatal(err)
	}
	f.rest("a drains", "b", "c")
	if err := f.hosts["c"].store.ChangeSetting(t.Context(), "a", to(store.Setting{})); err != nil {
		t.Fatal(err)
	}
	before := f.rest("a is back", "a", "b", "c")

	// Without the server nothing moves, also when hosts end and start with the table that they had.
	if err := f.etcd.Process.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = f.etcd.Wait()
	f.end("b")
	f.start("b", before)
	testenv.Within(t, "the table of the start", func() bool { return f.hosts["b"].last().Applied != nil })
	time.Sleep(time.Second)
	for name, h := range f.hosts {
		if s := h.last(); s.Applied == nil || s.Applied.Epoch != before.Epoch {
			t.Errorf("%s without a server: %+v", name, s.Applied)
		}
	}
	f.serve()
	f.rest("the server is back", "a", "b", "c")

	f.end("c")
	f.rest("c is dead", "a", "b")
	f.start("c", nil)
	f.rest("c is back", "a", "b", "c")

	// A host that cannot apply a table holds up planned moves, and says why.
	h := f.hosts["b"]
	f.history.mu.Lock()
	h.fail = errors.New("no memory")
	f.history.mu.Unlock()
	f.start("d", nil)
	for end := time.Now().Add(patience); h.last().Problem != "no memory"; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the problem of a host is not known: %+v", h.last())
		}
	}
	f.history.mu.Lock()
	h.fail = nil
	f.history.mu.Unlock()
	f.rest("a fourth host", "a", "b", "c", "d")
}

// fixed is a store with one snapshot, in which this host leads.
type fixed struct {
	snapshot *store.Snapshot
	written  chan *table.Table
}

func (f *fixed) Run(ctx context.Context, snapshots chan *store.Snapshot) {
	snapshots <- f.snapshot
	<-ctx.Done()
}
func (f *fixed) Update(store.Registration) {}
func (f *fixed) Write(_ context.Context, _ *store.Snapshot, t *table.Table) error {
	f.written <- t
	return nil
}
func (f *fixed) ChangeSetting(context.Context, string, func(store.Setting) (store.Setting, error)) error {
	return nil
}

// to returns a change to a setting.
func to(s store.Setting) func(store.Setting) (store.Setting, error) {
	return func(store.Setting) (store.Setting, error) { return s, nil }
}
func (f *fixed) Close(bool) error { return nil }

func (f *fixed) Ask(context.Context, string, json.RawMessage) (json.RawMessage, error) {
	return nil, nil
}
func (f *fixed) HandOver(context.Context, string, bool, map[netip.Addr][]byte) error { return nil }
func (f *fixed) TakeOver(context.Context, bool) ([]map[netip.Addr][]byte, bool, error) {
	return nil, false, nil
}
func (f *fixed) RenewCopies(context.Context) (int64, error)                        { return 0, nil }
func (f *fixed) CopyTemplates(context.Context, int64, map[netip.Addr][]byte) error { return nil }
func (f *fixed) Copies(context.Context, string, string, func(map[netip.Addr][]byte)) (string, error) {
	return "", nil
}

// TestRestoredStore starts a host with a table that is later than that of the store, and with one of another fleet: the host
// keeps its table, names the problem, and writes nothing, although it leads. With the same epoch, it writes.
func TestRestoredStore(t *testing.T) {
	of := func(epoch, nonce uint64) *table.Table {
		one := &table.Table{Epoch: epoch, Nonce: nonce, Hosts: []table.Host{{Name: "a", Weight: 1}}}
		for b := range table.Buckets {
			one.Previous[b], one.Next[b] = table.None, table.None
		}
		return one
	}
	type start struct {
		last    *table.Table
		problem string
	}
	// Many times, because the snapshot of the store comes at any time of the start.
	for _, c := range slices.Repeat([]start{{of(9, 7), "an earlier state of the store was restored"}, {of(5, 8), "it belongs to another fleet"}, {of(5, 7), ""}}, 30) {
		s := &fixed{written: make(chan *table.Table, 10), snapshot: &store.Snapshot{Table: of(5, 7), Connected: true, Leads: true,
			Hosts: []lead.Host{{Host: table.Host{Name: "a", Weight: 2}, State: lead.Ready, Alive: true, Healthy: true, Applied: 5, Prepared: 5}}}}
		p := &path{name: "a", history: &history{tables: map[uint64]*table.Table{}, epoch: map[string]uint64{}}}
		follower := New(Config{Store: s, Path: p, Last: c.last, Log: slog.New(slog.DiscardHandler), Lead: lead.Config{MinHosts: 1, Batch: 1},
			Host: store.Registration{Host: table.Host{Name: "a", Weight: 2}}})
		ctx, cancel := context.WithCancel(t.Context())
		states, done := make(chan State, 100), make(chan struct{})
		follower.Changed = func(s State) { states <- s }
		go func() { follower.Run(ctx); close(done) }()
		for end := time.After(patience); ; {
			var state State
			select {
			case state = <-states:
			case <-end:
				t.Fatalf("%q: not seen", c.problem)
			}
			if !state.Connected || !strings.Contains(state.Problem, c.problem) || (c.problem == "") != (state.Problem == "") {
				continue // the table of the last start
			}
			if state.Applied.Epoch != c.last.Epoch || state.Applied.Nonce != c.last.Nonce {
				t.Errorf("%q: epoch %d of nonce %d is in force", c.problem, state.Applied.Epoch, state.Applied.Nonce)
			}
			break
		}
		cancel()
		<-done
		if n := len(s.written); (n > 0) != (c.problem == "") {
			t.Errorf("%q: %d tables were written", c.problem, n)
		}
	}
}

// TestDeletedTable restores an earlier table, which all hosts refuse, and deletes it: the leader writes the one in force.
func TestDeletedTable(t *testing.T) {
	f := newFleet(t)
	before := f.endedPair()
	later := *before
	later.Epoch += 100
	for _, name := range []string{"a", "b"} {
		h := f.start(name, &later)
		testenv.Within(t, name+" to refuse the table", func() bool { return strings.Contains(h.last().Problem, "an earlier state of the store was restored") })
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"127.0.0.1:2379"}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if _, err := client.Delete(t.Context(), "sockeye/test/table"); err != nil {
		t.Fatal(err)
	}
	testenv.Within(t, "the table in the store", func() bool { s := f.hosts["a"].last(); return s.Table != nil && s.Table.Epoch > later.Epoch })
	if after := f.rest("the table is deleted", "a", "b"); after.Nonce != before.Nonce || after.Epoch != later.Epoch+1 || after.Owner != before.Owner {
		t.Errorf("nonce %d and epoch %d after %d and %d", after.Nonce, after.Epoch, later.Nonce, later.Epoch)
	}
	for name, h := range f.hosts {
		testenv.Within(t, name+" to have no problem", func() bool { s := h.last(); return s.Problem == "" && len(s.Problems) == 0 })
	}
}

// TestLostRegistrations is that the leader does not take hosts for dead that have not registered again at a store that was
// emptied or restored while they ran.
func TestLostRegistrations(t *testing.T) {
	present := &table.Table{Epoch: 5, Nonce: 7, Hosts: []table.Host{{Name: "a", Weight: 1}, {Name: "b", Weight: 1}}}
	for b := range table.Buckets {
		present.Owner[b], present.Previous[b], present.Next[b] = uint16(b%2), table.None, table.None
	}
	follower := New(Config{Lead: lead.Config{MinHosts: 1, OnDeath: lead.Next, Batch: 100}, Log: slog.New(slog.DiscardHandler)})
	follower.applied = present
	s := &store.Snapshot{Table: present, Damaged: true, Connected: true, Leads: true, Hosts: []lead.Host{
		{Host: present.Hosts[0], State: lead.Ready, Alive: true, Healthy: true, Applied: 5, Handed: 5, Prepared: 5}, {Host: present.Hosts[1], State: lead.Ready}}}
	if next, wait := follower.next(s); next != nil || wait != retryPause {
		t.Fatalf("with one of two hosts: %+v after %v", next, wait)
	}
	s.Hosts[1].Alive, s.Hosts[1].Healthy, s.Hosts[1].Nonce, s.Hosts[1].Applied = true, true, 7, 6
	next, _ := follower.next(s)
	if next == nil || next.Epoch != 7 || next.Owner != present.Owner {
		t.Fatalf("with both hosts: %+v", next)
	}
	if next, wait := follower.next(s); next != nil || wait != retryPause {
		t.Errorf("another table at once, or %v", wait)
	}
	s.Hosts[1].Alive = false
	follower.lost, follower.healed = follower.lost-lostTime, follower.healed-retryPause
	if next, _ := follower.next(s); next == nil || next.Owner != present.Owner {
		t.Errorf("no table after %v, or another one", lostTime)
	}
	s.Hosts[1].Alive, s.Hosts[1].Applied = true, table.MostEpoch-1 // a lie
	follower.healed -= retryPause
	if next, _ := follower.next(s); next == nil || next.Epoch != 6 {
		t.Error("an epoch that no host has had, or no table")
	}
}

// TestEarlierStore gives a host tables that are earlier than those of others: it decides nothing, and leaves it to the others to
// write theirs into a store that has lost it.
func TestEarlierStore(t *testing.T) {
	at := func(epoch uint64) *table.Table {
		one := &table.Table{Epoch: epoch, Nonce: 7, Hosts: []table.Host{{Name: "a", Weight: 1}, {Name: "b", Weight: 1}}}
		for b := range table.Buckets {
			one.Owner[b], one.Previous[b], one.Next[b] = uint16(b%2), table.None, table.None
		}
		return one
	}
	for _, c := range []struct {
		name           string
		last           *table.Table
		store          *table.Table
		damaged        bool
		nonce, other   uint64 // of the table of host b
		problem        string
		refuses, write bool
	}{
		{"restored", nil, at(5), false, 7, 9, "and host b has epoch 9: an earlier state of the store was restored", false, false},
		{"restored, and deleted", nil, at(5), true, 7, 9, "another host must write it again, as host b", true, false},
		{"lost", at(5), nil, false, 7, 9, "another host must write it again, as host b", true, false},
		{"of another fleet", nil, at(5), false, 8, 9, "", false, true},
		{"the same", nil, at(5), false, 7, 5, "", false, true},
		{"lies", nil, at(5), false, 7, 5 + store.MostEpochs, "", false, true},
	} {
		s := &fixed{written: make(chan *table.Table, 10)}
		follower := New(Config{Store: s, Log: slog.New(slog.DiscardHandler), Lead: lead.Config{MinHosts: 1, Batch: 1}, Host: store.Registration{Host: table.Host{Name: "a", Weight: 2}},
			Path: &path{name: "a", history: &history{tables: map[uint64]*table.Table{}, epoch: map[string]uint64{}}}})
		if c.last != nil {
			if _, err := follower.follow(t.Context(), &store.Snapshot{Table: c.last}); err != nil {
				t.Fatal(err)
			}
		}
		_, err := follower.follow(t.Context(), &store.Snapshot{Table: c.store, Damaged: c.damaged, Connected: true, Leads: true, Hosts: []lead.Host{
			{Host: table.Host{Name: "a", Weight: 2}, State: lead.Ready, Alive: true, Healthy: true, Applied: 5, Prepared: 5},
			{Host: table.Host{Name: "b", Weight: 1}, State: lead.Ready, Alive: true, Healthy: true, Refuses: true, Nonce: c.nonce, Applied: c.other}}})
		if c.problem == "" && err != nil || c.problem != "" && (err == nil || !strings.Contains(err.Error(), c.problem)) {
			t.Errorf("%s: %v", c.name, err)
		}
		if r := follower.registered(); r.Refuses != c.refuses || (len(s.written) > 0) != c.write {
			t.Errorf("%s: refuses %v, %d tables written", c.name, r.Refuses, len(s.written))
		}
	}
	// Other tables with the epoch of the one in force.
	for name, change := range map[string]func(*table.Table){
		"owners":  func(t *table.Table) { t.Owner[0] = 1 },
		"address": func(t *table.Table) { t.Hosts[1].Addresses = []netip.Addr{netip.MustParseAddr("192.0.2.2")} },
		"MAC":     func(t *table.Table) { t.Hosts[1].MACs = []string{"02:00:00:00:00:02"} },
		"host":    func(t *table.Table) { t.Hosts = append(t.Hosts, table.Host{Name: "c", Weight: 1}) },
	} {
		follower := New(Config{Store: &fixed{written: make(chan *table.Table, 10)}, Log: slog.New(slog.DiscardHandler), Host: store.Registration{Host: table.Host{Name: "a", Weight: 1}}})
		follower.applied = at(5)
		other := at(5)
		change(other)
		if _, err := follower.follow(t.Context(), &store.Snapshot{Table: other, Connected: true, Leads: true}); err == nil || !strings.Contains(err.Error(), "and other hosts or owners") || !follower.registered().Refuses {
			t.Errorf("another table with the same epoch (%s): %v", name, err)
		}
	}
}

// slowPath prepares moves until it is told to end.
type slowPath struct {
	*path
	begun, ended chan uint64 // epochs
}

func (p *slowPath) TakeOver(ctx context.Context, t *table.Table) error {
	p.begun <- t.Epoch
	<-ctx.Done()
	p.ended <- t.Epoch
	return ctx.Err()
}

// shown is a store with several snapshots.
type shown struct {
	fixed
	snapshots chan *store.Snapshot
}

func (s *shown) Run(ctx context.Context, to chan *store.Snapshot) {
	for {
		select {
		case one := <-s.snapshots:
			to <- one
		case <-ctx.Done():
			return
		}
	}
}

// TestDeathDuringPreparation is that a host applies a later table at once while it prepares the moves of a table.
func TestDeathDuringPreparation(t *testing.T) {
	at := func(epoch uint64) *store.Snapshot {
		one := &table.Table{Epoch: epoch, Nonce: 7, Hosts: []table.Host{{Name: "a", Weight: 1}, {Name: "b", Weight: 1}}}
		for b := range table.Buckets {
			one.Owner[b], one.Previous[b], one.Next[b] = 1, table.None, table.None
		}
		one.Next[0] = 0 // b to a
		return &store.Snapshot{Table: one, Connected: true, Hosts: []lead.Host{{Host: one.Hosts[1], Alive: true, Applied: epoch, Handed: epoch, Prepared: epoch}}}
	}
	s := &shown{snapshots: make(chan *store.Snapshot)}
	p := &slowPath{&path{name: "a", history: &history{tables: map[uint64]*table.Table{}, epoch: map[string]uint64{}}}, make(chan uint64, 10), make(chan uint64, 10)}
	follower := New(Config{Store: s, Path: p, Log: slog.New(slog.DiscardHandler), Host: store.Registration{Host: table.Host{Name: "a", Weight: 1}}})
	var mu sync.Mutex
	var state State
	follower.Changed = func(now State) {
		mu.Lock()
		defer mu.Unlock()
		state = now
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { follower.Run(ctx); close(done) }()
	for epoch := uint64(3); epoch < 6; epoch++ {
		s.snapshots <- at(epoch)
		testenv.Within(t, "the table in force", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return state.Applied != nil && state.Applied.Epoch == epoch
		})
		if r := follower.registered(); r.Applied != epoch || r.Handed != epoch || r.Prepared != 0 {
			t.Errorf("epoch %d: %+v", epoch, r)
		}
		if got := <-p.begun; got != epoch {
			t.Errorf("epoch %d is prepared, want %d", got, epoch)
		}
	}
	s.snapshots <- at(4) // refused while the preparation of epoch 5 runs
	cancel()
	<-done
	if len(p.ended) != 3 {
		t.Errorf("%d of 3 preparations have ended", len(p.ended))
	}
}

// failingPath cannot prepare moves.
type failingPath struct {
	*path
	begun chan bool
}

func (p *failingPath) TakeOver(context.Context, *table.Table) error {
	p.begun <- true
	return errors.New("no space")
}

// TestFailingPreparation is that the problem of a preparation that fails again and again stays.
func TestFailingPreparation(t *testing.T) {
	one := &table.Table{Epoch: 3, Nonce: 7, Hosts: []table.Host{{Name: "a", Weight: 1}, {Name: "b", Weight: 1}}}
	for b := range table.Buckets {
		one.Owner[b], one.Previous[b], one.Next[b] = 1, table.None, table.None
	}
	one.Next[0] = 0 // b to a
	s := &store.Snapshot{Table: one, Connected: true, Hosts: []lead.Host{{Host: one.Hosts[1], Alive: true, Applied: 3, Handed: 3, Prepared: 3}}}
	p := &failingPath{&path{name: "a", history: &history{tables: map[uint64]*table.Table{}, epoch: map[string]uint64{}}}, make(chan bool, 10)}
	follower := New(Config{Store: &fixed{}, Path: p, Log: slog.New(slog.DiscardHandler), Host: store.Registration{Host: table.Host{Name: "a", Weight: 1}}})
	if _, err := follower.follow(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	for attempt := range 3 {
		<-p.begun
		<-follower.preparing.ended
		follower.finished, follower.preparing = follower.preparing, nil
		for range 2 { // after the end, and when the next attempt begins
			if _, err := follower.follow(t.Context(), s); err == nil || err.Error() != "no space" {
				t.Fatalf("attempt %d: %v", attempt, err)
			}
		}
	}
	later := *one
	later.Epoch, later.Next[0] = 4, table.None
	s.Table = &later
	if _, err := follower.follow(t.Context(), s); err != nil {
		t.Errorf("the next table: %v", err)
	}
}

// TestMutual is that two hosts that get devices from each other in one table, as after two deaths, do not wait for each other.
func TestMutual(t *testing.T) {
	both := &table.Table{Epoch: 5, Nonce: 7, Hosts: []table.Host{{Name: "a", Weight: 1}, {Name: "b", Weight: 1}}}
	for b := range table.Buckets {
		both.Owner[b], both.Previous[b], both.Next[b] = uint16(b%2), table.None, table.None
	}
	both.Next[0], both.Next[1] = 1, 0
	hosts := []lead.Host{{Host: both.Hosts[0], Alive: true, Applied: 5}, {Host: both.Hosts[1], Alive: true, Applied: 5}}
	if handedOver(both, "a", hosts) || handedOver(both, "b", hosts) {
		t.Error("nobody has handed anything over")
	}
	hosts[0].Handed, hosts[1].Handed = 5, 5
	if !handedOver(both, "a", hosts) || !handedOver(both, "b", hosts) {
		t.Error("both have handed over")
	}
	hosts[0].Handed, hosts[0].Alive = 4, false
	if !handedOver(both, "b", hosts) {
		t.Error("b waits for a dead host")
	}
	if !handedOver(both, "c", hosts) {
		t.Error("a host that is not in the table waits")
	}
}

// TestFormerOwnerFirst is that a host applies a table that gives it devices after their former owners, unless these cannot apply it.
func TestFormerOwnerFirst(t *testing.T) {
	hosts := []table.Host{{Name: "a", Weight: 1}, {Name: "b", Weight: 1}, {Name: "c", Weight: 1}}
	at := func(epoch uint64) *table.Table {
		one := &table.Table{Epoch: epoch, Nonce: 7, Hosts: hosts}
		for b := range table.Buckets {
			one.Owner[b], one.Previous[b], one.Next[b] = 1, table.None, table.None
		}
		return one
	}
	prepared, flipped, mutual, death, earlier := at(4), at(5), at(5), at(5), at(5)
	prepared.Next[0] = 0 // b to a
	flipped.Owner[0], flipped.Previous[0] = 0, 1
	mutual.Owner[0], mutual.Previous[0], mutual.Previous[1] = 0, 1, 0
	death.Owner[0], death.Previous[0], death.Owner[1] = 0, 1, 0
	prepared.Owner[2] = 0
	for _, one := range []*table.Table{flipped, mutual, death, earlier} {
		one.Owner[2] = 0
	}
	earlier.Previous[2] = 1 // that flip is in force here
	b := lead.Host{Host: hosts[1], Alive: true, Applied: 4, Handed: 4, Prepared: 4}
	applied, dead, refusing := b, b, b
	applied.Applied, dead.Alive, refusing.Refuses = 5, false, true
	for name, c := range map[string]struct {
		host  string
		table *table.Table
		hosts []lead.Host
		waits bool
	}{
		"the former owner has not applied it":          {"a", flipped, []lead.Host{b}, true},
		"the former owner has applied it":              {"a", flipped, []lead.Host{applied}, false},
		"the former owner is dead":                     {"a", flipped, []lead.Host{dead}, false},
		"the former owner refuses it":                  {"a", flipped, []lead.Host{refusing}, false},
		"the former owner is unknown":                  {"a", flipped, nil, false},
		"devices of a dead host come, too":             {"a", death, []lead.Host{b}, false},
		"the devices are here already":                 {"a", earlier, []lead.Host{b}, false},
		"the former owner gets devices, too":           {"a", mutual, []lead.Host{b}, false},
		"the former owner":                             {"b", flipped, []lead.Host{{Host: hosts[0], Alive: true, Applied: 4}}, false},
		"neither of them":                              {"c", flipped, []lead.Host{b}, false},
		"a host that is not in the table":              {"d", flipped, []lead.Host{b}, false},
		"the former owner had not even the one before": {"a", flipped, []lead.Host{{Host: hosts[1], Alive: true, Applied: 3}}, true},
	} {
		p := &path{name: c.host, history: &history{tables: map[uint64]*table.Table{}, epoch: map[string]uint64{}}}
		follower := New(Config{Store: &fixed{}, Path: p, Log: slog.New(slog.DiscardHandler), Host: store.Registration{Host: table.Host{Name: c.host, Weight: 1}}})
		follower.applied = prepared
		wait, err := follower.follow(t.Context(), &store.Snapshot{Table: c.table, Connected: true, Hosts: c.hosts})
		if waits := follower.applied == prepared; err != nil || waits != c.waits || waits != (wait > 0) || wait > flipTime {
			t.Errorf("%s: waits %v for %v, %v", name, waits, wait, err)
		}
		if !c.waits {
			continue
		}
		// A former owner with many connections needs more than a second, and the lease of a dead one ends after 3 s.
		follower.postponed -= 4 * time.Second
		if wait, err := follower.follow(t.Context(), &store.Snapshot{Table: c.table, Connected: true, Hosts: c.hosts}); err != nil || follower.applied != prepared || wait <= 0 {
			t.Errorf("%s: after 4s: waits %v, %v", name, wait, err)
		}
		if r := follower.registered(); r.Applied == 5 {
			t.Errorf("%s: %+v", name, r)
		}
		// The time goes on with the next table.
		follower.postponed -= flipTime
		next := *c.table
		next.Epoch++
		if wait, err = follower.follow(t.Context(), &store.Snapshot{Table: &next, Connected: true, Hosts: c.hosts}); err != nil || follower.applied != &next || follower.postponed != 0 {
			t.Errorf("%s: after %v: %v, %v", name, flipTime, wait, err)
		}
	}
}

// TestEmptiedStore starts hosts with their last table at a store that has lost everything: the leader writes the table again,
// and the devices of a host that dies afterwards move.
func TestEmptiedStore(t *testing.T) {
	f := newFleet(t)
	before := f.endedPair()
	_ = f.etcd.Process.Kill()
	_ = f.etcd.Wait()
	if err := os.RemoveAll(filepath.Join(f.dir, "data")); err != nil {
		t.Fatal(err)
	}
	f.lead.Nonce = 99
	f.serve()
	a := f.start("a", before)
	f.start("b", before)
	testenv.Within(t, "the table in the store", func() bool {
		s := a.last()
		return s.Snapshot != nil && s.Connected && s.Table != nil && s.Table.Epoch > before.Epoch
	})
	after := f.rest("an emptied store", "a", "b")
	if after.Nonce != before.Nonce || after.Epoch <= before.Epoch || after.Owner != before.Owner {
		t.Errorf("nonce %d and epoch %d after %d and %d", after.Nonce, after.Epoch, before.Nonce, before.Epoch)
	}
}

// TestNewHostAtEmptiedStore starts a host without a table first, at a store that has lost everything: the host leaves it to the
// others to write their table, instead of a new one with another nonce.
func TestNewHostAtEmptiedStore(t *testing.T) {
	f := newFleet(t)
	before := &table.Table{Epoch: 7, Nonce: 99, Hosts: []table.Host{{Name: "a", Weight: 100}, {Name: "b", Weight: 100}}}
	for b := range table.Buckets {
		before.Owner[b], before.Previous[b], before.Next[b] = uint16(b%2), table.None, table.None
	}
	c := f.start("c", nil)
	testenv.Within(t, "c to lead", func() bool { s := c.last(); return s.Snapshot != nil && s.Leader == "c" })
	f.start("a", before)
	f.start("b", before)
	if after := f.rest("a new host at an emptied store", "a", "b", "c"); after.Nonce != before.Nonce || after.Epoch <= before.Epoch {
		t.Errorf("nonce %d and epoch %d after %d and %d", after.Nonce, after.Epoch, before.Nonce, before.Epoch)
	}
}

// TestFew is that a host reports that devices of a dead host do not move, because there are fewer hosts than min_hosts.
func TestFew(t *testing.T) {
	f := newFleet(t)
	a := f.start("a", nil)
	f.start("b", nil)
	f.rest("two hosts", "a", "b")
	if problem := a.last().Problem; problem != "" {
		t.Errorf("problem with two hosts: %s", problem)
	}
	f.end("b")
	testenv.Within(t, "the problem", func() bool { return strings.HasPrefix(a.last().Problem, "1 of at least 2 hosts (min_hosts) are alive") })
	f.start("b", nil)
	testenv.Within(t, "the end of the problem", func() bool { return a.last().Problem == "" })
}

// TestForeignOwner gives a host that has devices the table of another fleet: its devices move, though the host does not hand them
// over.
func TestForeignOwner(t *testing.T) {
	f := newFleet(t)
	f.lead.OnDeath = lead.Wait
	a := f.start("a", nil)
	f.start("b", nil)
	before := f.rest("two hosts", "a", "b")
	f.end("b")
	foreign := *before
	foreign.Nonce = 5
	f.start("b", &foreign)
	testenv.Within(t, "the devices of b to move", func() bool {
		s := a.last()
		if s.Applied == nil || s.Applied.Moving() > 0 {
			return false
		}
		at := s.Applied.Index("b")
		return at == table.None || s.Applied.Shares()[at] == 0
	})
}

// TestForeignTable starts a host with the table of another fleet, first as the only one, then beside the fleet: the host does not
// lead, gets no devices, and does not stop the others.
func TestForeignTable(t *testing.T) {
	f := newFleet(t)
	before := f.endedPair()
	foreign := *before
	foreign.Nonce, foreign.Epoch = 5, 500
	x := f.start("x", &foreign)
	testenv.Within(t, "x to refuse the table", func() bool {
		s := x.last()
		return s.Foreign && s.Leader == "" && strings.Contains(s.Problem, "another fleet")
	})
	a := f.start("a", before)
	f.start("b", before)
	testenv.Within(t, "a and b to lead", func() bool {
		s := a.last()
		return s.Snapshot != nil && (s.Leader == "a" || s.Leader == "b")
	})
	f.end("b")
	f.start("c", nil) // the fleet has two hosts at least
	testenv.Within(t, "the devices of b and the share of c to move", func() bool {
		s := a.last()
		if s.Applied == nil || s.Applied.Moving() > 0 {
			return false
		}
		shares := s.Applied.Shares()
		of := func(name string) int {
			if at := s.Applied.Index(name); at != table.None {
				return shares[at]
			}
			return 0
		}
		return of("a") > 0 && of("c") > 0 && of("b") == 0 && of("x") == 0
	})
}
