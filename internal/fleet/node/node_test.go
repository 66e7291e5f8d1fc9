// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

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

func (p *path) Prepare(*table.Table) error { return nil }

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
	f.etcd = exec.Command("etcd", "--data-dir", filepath.Join(f.dir, "data"), "--logger", "zap", "--log-level", "error")
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
	n := New(c)
	n.Changed = func(s State) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.state = s
	}
	ctx, cancel := context.WithCancel(f.Context())
	done := make(chan struct{})
	go func() { n.Run(ctx); close(done) }()
	h.stop = func() {
		cancel()
		<-done
		_ = etcd.Close(false)
	}
	f.Cleanup(h.stop)
	f.hosts[name] = h
	return h
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
	if err := f.hosts["c"].store.SetWish(t.Context(), "a", store.Wish{State: lead.Drain}); err != nil {
		t.Fatal(err)
	}
	f.rest("a drains", "b", "c")
	if err := f.hosts["c"].store.SetWish(t.Context(), "a", store.Wish{}); err != nil {
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
