// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/domain/domaintest"
	"sockeye/internal/events"
	"sockeye/internal/fleet/follow"
	"sockeye/internal/fleet/forward"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/store"
	"sockeye/internal/fleet/table"
	"sockeye/internal/testenv"
)

// recorder records the events of a log.
type recorder struct {
	slog.Handler
	mu     sync.Mutex
	events []map[string]string
}

func (r *recorder) Enabled(context.Context, slog.Level) bool { return true }
func (r *recorder) WithAttrs([]slog.Attr) slog.Handler       { return r }
func (r *recorder) WithGroup(string) slog.Handler            { return r }

func (r *recorder) Handle(_ context.Context, record slog.Record) error {
	event := map[string]string{"level": record.Level.String()}
	record.Attrs(func(a slog.Attr) bool { event[a.Key] = a.Value.String(); return true })
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, event)
	return nil
}

// take returns the events of a kind since the last call, with the value of a key, and forgets all events.
func (r *recorder) take(kind slog.Attr, key string) (values []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		if e[kind.Key] == kind.Value.String() {
			values = append(values, e[key])
		}
	}
	r.events = nil
	return values
}

// TestProblems is that each bad input is one line of the status, one event, however often the host looks, and a metric, until it is mended; the
// last good table stays in force.
func TestProblems(t *testing.T) {
	plug(t)
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	check(t, os.WriteFile(filepath.Join(dir, "hosts.yaml"), []byte(hostsText), 0o644))
	log, s := new(recorder), new(services)
	h := domaintest.Host(t, dir, pins, log)
	d := New(h, s)
	r := domaintest.New(h, d)
	r.Start(t, policyText)
	defer r.Stop()
	defer r.Retire(t)
	testenv.Within(t, "health", func() bool { return d.Health().Healthy })
	p, err := d.current()
	check(t, err)
	p.cancel() // what follows is told by the test
	p.done.Wait()
	scrape := func() string {
		t.Helper()
		stop := r.Serve(t, "127.0.0.1:9733")
		defer stop()
		return domaintest.Scrape(t, "127.0.0.1:9733")
	}

	good := *p.state.Snapshot
	good.Leader, good.Leads, good.Hosts = "b", false, slices.Clone(good.Hosts)
	base := len(p.allProblems()) // there is no route to host c
	before := p.table
	with := func(change func(*store.Snapshot)) follow.State {
		bad := good
		bad.Hosts = slices.Clone(good.Hosts)
		change(&bad)
		return follow.State{Snapshot: &bad, Applied: p.table}
	}
	told := func(problem string) follow.State {
		return with(func(s *store.Snapshot) { s.Problems, s.Damaged = []string{problem}, true })
	}
	refused := func(problem string) follow.State {
		state := with(func(*store.Snapshot) {})
		state.Problem = problem
		return state
	}
	var counts [forward.Outcomes]uint64
	packets := func(outcome forward.Outcome) func() {
		return func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.drops.problems(counts, time.Now(), p.flipped)
			counts[outcome] += 3
			p.local = p.drops.problems(counts, time.Now(), p.flipped)
			p.report()
		}
	}
	changed := func(s follow.State) func() { return func() { p.changed(s) } }
	moved := with(func(*store.Snapshot) {})
	const misnamed = "another host's name in a file"
	for _, bad := range []struct {
		name, want string
		begin      func()
	}{
		{"two hosts of one name", "another process has registered host a", changed(with(func(s *store.Snapshot) {
			s.Taken, s.Leader, s.Problems = true, "a", []string{"another process has registered host a: each host needs a name of its own"}
		}))},
		{"no store", "not connected to etcd", changed(with(func(s *store.Snapshot) {
			s.Connected, s.Leader, s.Problems = false, "a", []string{"not connected to etcd: connection refused"}
		}))},
		{"rubbish", "the table in the store is refused: it is damaged", changed(told("the table in the store is refused: it is damaged"))},
		{"a registration", `the registration of host "b" is damaged`, changed(told(`the registration of host "b" is damaged`))},
		{"another nonce", "it belongs to another fleet", changed(refused("the table in the store has another nonce than the one in force: it belongs to another fleet"))},
		{"an earlier epoch", "epoch 2 is in force", changed(refused("the table in the store has epoch 1, and epoch 2 is in force"))},
		{"other listeners", "host b has other listeners", changed(with(func(s *store.Snapshot) { s.Hosts[1].Digests.Listeners = "others" }))},
		{"another device map", "host b has another device map", changed(with(func(s *store.Snapshot) { s.Hosts[1].Digests.Devices = "others" }))},
		{"few hosts", "no device moves", changed(refused("1 of at least 2 hosts (min_hosts) are alive: no device moves"))},
		{"a liar", "host b says that its address is 198.51.100.1, which is that of this host", func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.paths["b"] = path{kind: "none", problem: conflict(&table.Host{Name: "b", Addresses: []netip.Addr{netip.MustParseAddr("198.51.100.1")}},
				map[netip.Addr]string{netip.MustParseAddr("198.51.100.1"): "this host"}, nil)}
			p.report()
		}},
		{"packets of strangers", "(untrusted)", packets(forward.Untrusted)},
		{"a loop", "(ttl)", packets(forward.Expired)},
		{"disagreement", "(disagreed)", func() { p.flipped = time.Now().Add(-time.Hour); packets(forward.Disagreed)() }},
		{"another MAC address in a file", "says that host a has the MAC addresses [02:00:00:00:00:99], and this host has [", func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			other := *p.table
			other.Hosts = slices.Clone(other.Hosts)
			other.Hosts[0].MACs = []string{"02:00:00:00:00:99"}
			p.table = &other
			p.report()
		}},
		{misnamed, "says that host a has the addresses [203.0.113.9], and this host has [198.51.100.1", func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			other := *p.table
			other.Hosts = slices.Clone(other.Hosts)
			other.Hosts[0].Addresses = []netip.Addr{netip.MustParseAddr("203.0.113.9")}
			p.table = &other
			p.report()
		}},
	} {
		log.take(events.FleetProblem, "")
		bad.begin()
		p.mu.Lock()
		p.report() // a further look
		p.mu.Unlock()
		if got := log.take(events.FleetProblem, "problem"); len(got) != 1 || !strings.Contains(got[0], bad.want) {
			t.Errorf("%s: events of the problems %q, want %q", bad.name, got, bad.want)
		}
		st, text := status(t, r), scrape()
		if bad.name == misnamed && (st.Healthy || !strings.Contains(st.Reason, bad.want)) {
			t.Errorf("%s: healthy %v: %s", bad.name, st.Healthy, st.Reason)
		}
		if n := len(st.Problems); n != base+1 || !slices.ContainsFunc(st.Problems, func(s string) bool { return strings.Contains(s, bad.want) }) {
			t.Errorf("%s: the status has the problems %q", bad.name, st.Problems)
		}
		for _, line := range []string{fmt.Sprintf(`sockeye_fleet_problems{fleet="main"} %d`, base+1), `sockeye_fleet_epoch{fleet="main"} 1`, `sockeye_fleet_leader{fleet="main"} 0`} {
			if !strings.Contains(text, line+"\n") {
				t.Errorf("%s: the metrics lack %s", bad.name, line)
			}
		}
		if p.table.Epoch != before.Epoch || p.table.Owner != before.Owner {
			t.Errorf("%s: the table is another one", bad.name)
		}
		// The cause ends.
		p.mu.Lock()
		p.table, p.local, p.drops, p.paths["b"] = before, nil, drops{}, path{kind: "link"}
		p.mu.Unlock()
		p.changed(moved)
		if got := len(status(t, r).Problems); got != base {
			t.Errorf("%s is mended: %q", bad.name, status(t, r).Problems)
		}
	}

	// The event that there is no problem any more comes once.
	p.mu.Lock()
	p.paths["c"] = path{kind: "link"}
	log.take(events.FleetSolved, "")
	p.report()
	p.report()
	p.mu.Unlock()
	if got := log.take(events.FleetSolved, "level"); !slices.Equal(got, []string{"INFO"}) {
		t.Errorf("events at the end of all problems: %q", got)
	}
}

// TestHostEvents is that each change of a host is one event with its state.
func TestHostEvents(t *testing.T) {
	log := new(recorder)
	p := &participation{settings: &settings{Fleet: config.Fleet{Etcd: new(config.FleetEtcd)}, host: "a"}, log: slog.New(log), known: make(map[string]string), seen: make(map[string]bool), late: newLate()}
	look := func(change func(b *lead.Host)) []string {
		s := snapshot(7)
		change(&s.Hosts[1])
		p.changed(follow.State{Snapshot: s})
		return log.take(events.FleetHost, "state")
	}
	same := func(*lead.Host) {}
	if got := look(same); !slices.Equal(got, []string{"ready", "ready", "ready"}) {
		t.Errorf("at first: %q", got)
	}
	for _, step := range []struct {
		change func(b *lead.Host)
		want   []string
	}{
		{same, nil},
		{func(b *lead.Host) { b.State = lead.Drain }, []string{"drain"}},
		{func(b *lead.Host) { b.State = lead.Drain }, nil},
		{func(b *lead.Host) { b.Healthy = false }, []string{"unhealthy"}},
		{func(b *lead.Host) { b.Alive = false }, []string{"dead"}},
		{func(b *lead.Host) { b.Alive, b.Unknown = false, true }, nil}, // after an outage of etcd
		{same, []string{"ready"}},
	} {
		if got := look(step.change); !slices.Equal(got, step.want) {
			t.Errorf("%q, want %q", got, step.want)
		}
	}
}

// TestDeadHosts is that a host that has died stays visible, and is a problem, until it is back or the operator takes it out of the fleet; with
// on_host_death: next, it is in no table.
func TestDeadHosts(t *testing.T) {
	log := new(recorder)
	p := &participation{settings: &settings{Fleet: config.Fleet{Etcd: new(config.FleetEtcd)}, host: "a"}, log: slog.New(log), table: snapshot(7).Table,
		known: make(map[string]string), seen: make(map[string]bool), gone: make(map[string]lead.Host), late: newLate()}
	look := func(change func(s *store.Snapshot)) (states string, problems []string) {
		s := snapshot(7)
		change(s)
		p.changed(follow.State{Snapshot: s})
		return strings.Join(log.take(events.FleetHost, "state"), " "), p.allProblems()
	}
	dies := func(s *store.Snapshot) { s.Hosts[1].Alive = false }
	leaves := func(s *store.Snapshot) { s.Hosts = slices.Delete(s.Hosts, 1, 2) }
	for _, step := range []struct {
		name    string
		change  func(s *store.Snapshot)
		states  string
		problem string
		hosts   int
	}{
		{"at first", func(*store.Snapshot) {}, "ready ready ready", "", 3},
		{"b dies", dies, "dead", "host b is dead, and has devices: start it, or move them by sockeye host set b removed", 3},
		{"its devices have moved", leaves, "", "host b is dead, and the others have its devices: start it, or sockeye host set b removed", 3},
		{"again", leaves, "", "host b is dead, and the others have its devices: start it, or sockeye host set b removed", 3},
		{"it is back", func(*store.Snapshot) {}, "ready", "", 3},
		{"b dies again", dies, "dead", "host b is dead, and has devices: start it, or move them by sockeye host set b removed", 3},
		{"the operator takes it out", func(s *store.Snapshot) { s.Hosts[1].Alive, s.Hosts[1].State = false, lead.Removed }, "removed", "", 3},
		{"the setting is deleted", leaves, "", "", 2},
		{"it returns", func(*store.Snapshot) {}, "ready", "", 3},
		{"a host without devices comes", func(s *store.Snapshot) {
			s.Hosts = append(s.Hosts, lead.Host{Host: table.Host{Name: "d", Weight: 100}, State: lead.Ready, Alive: true})
		}, "unhealthy", "", 4},
		{"and leaves", func(*store.Snapshot) {}, "removed", "", 3},
		{"it dies unseen", leaves, "dead", "host b is dead, and the others have its devices: start it, or sockeye host set b removed", 3},
		{"a weight is set for it", func(s *store.Snapshot) {
			s.Hosts[1].Alive, s.Hosts[1].SetWeight = false, 200
			p.table.Hosts, p.table.Owner = slices.Delete(slices.Clone(p.table.Hosts), 1, 2), table.Column{}
		}, "dead", "host b is dead, and the others have its devices: start it, or sockeye host set b removed", 3},
	} {
		states, problems := look(step.change)
		if states != step.states {
			t.Errorf("%s: events %q, want %q", step.name, states, step.states)
		}
		if got := strings.Join(problems, "\n"); got != step.problem {
			t.Errorf("%s: problems %q, want %q", step.name, got, step.problem)
		}
		list := p.hostsStatus()
		at := slices.IndexFunc(list, func(h api.FleetHost) bool { return h.Name == "b" })
		if len(list) != step.hosts || at >= 0 && (list[at].Weight != 100 || step.problem != "" && list[at].Alive) {
			t.Errorf("%s: %+v", step.name, list)
		}
	}
}

// TestDeadHostsGoOn is that a change of the policy does not forget the hosts that have died.
func TestDeadHostsGoOn(t *testing.T) {
	plug(t)
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	check(t, os.WriteFile(filepath.Join(dir, "hosts.yaml"), []byte(hostsText), 0o644))
	r := runner(t, new(services), dir, pins)
	r.Start(t, policyText)
	defer r.Stop()
	defer r.Retire(t)
	d := r.Domains[0].(*Domain)
	testenv.Within(t, "health", func() bool { return d.Health().Healthy })
	before, err := d.current()
	check(t, err)
	before.mu.Lock()
	before.gone["d"], before.seen["d"] = lead.Host{Host: table.Host{Name: "d", Weight: 9}}, true
	before.mu.Unlock()
	if _, err := r.Apply(strings.Replace(policyText, "{host: a", "{host: a, weight: 50", 1)); err != nil {
		t.Fatal(err)
	}
	after, err := d.current()
	check(t, err)
	after.mu.Lock()
	defer after.mu.Unlock()
	if after == before || after.gone["d"].Weight != 9 || !after.seen["d"] || d.ended != nil {
		t.Errorf("gone are %v, seen %v", after.gone, after.seen)
	}
}

// TestProblemsGoOn is that a change of the policy neither ends problems that stand nor begins them again: the next participation waits until the
// store has told about the hosts.
func TestProblemsGoOn(t *testing.T) {
	log := new(recorder)
	p := &participation{settings: &settings{Fleet: config.Fleet{Etcd: new(config.FleetEtcd)}, host: "a"}, log: slog.New(log), late: newLate(), seen: make(map[string]bool),
		gone: map[string]lead.Host{"d": {}}, known: map[string]string{"a": "ready", "b": "dead", "c": "ready"}, problems: []string{"host d is dead, and the others have its devices: start it, or sockeye host set d removed", "another one"}}
	p.report() // by the first look at the interfaces
	p.changed(follow.State{Snapshot: &store.Snapshot{Table: snapshot(7).Table}})
	if got := log.take(events.FleetSolved, "level"); len(got) > 0 || len(p.problems) != 2 {
		t.Errorf("before the store has told: %q, %q", got, p.problems)
	}
	p.changed(follow.State{Snapshot: snapshot(7)})
	if got := log.take(events.FleetProblem, "problem"); len(got) > 0 || len(p.problems) != 1 {
		t.Errorf("afterwards: %q, %q", got, p.problems)
	}
	// A dead host is not known after a new connection, and stays a problem.
	s := snapshot(7)
	p.table = s.Table
	s.Hosts[1].Alive, s.Hosts[1].Unknown = false, true
	p.known["b"] = "dead"
	p.changed(follow.State{Snapshot: s})
	if got := log.take(events.FleetProblem, "problem"); len(got) != 1 || !strings.HasPrefix(got[0], "host b is dead, and has devices") {
		t.Errorf("%q", got)
	}
}
