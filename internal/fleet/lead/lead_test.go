// SPDX-License-Identifier: Apache-2.0

package lead

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"sockeye/internal/fleet/table"
)

// fleet is a fleet whose hosts apply each table at once, unless a test says otherwise.
type fleet struct {
	*testing.T
	leader *Leader
	now    time.Duration
	table  *table.Table
	hosts  map[string]*Host
	stuck  map[string]bool // hosts that apply nothing
	slow   map[string]bool // hosts that prepare nothing
	last   Decision
	moves  int // changes of an owner
	moved  map[[2]string]int
	epochs int
}

const settle = 10 * time.Second

func newFleet(t *testing.T, c Config, names ...string) *fleet {
	t.Helper()
	c.Settle, c.Nonce = settle, 99
	if c.Batch == 0 {
		c.Batch = 500
	}
	f := &fleet{T: t, leader: &Leader{Config: c}, hosts: map[string]*Host{}, stuck: map[string]bool{}, slow: map[string]bool{}, moved: map[[2]string]int{}}
	for _, name := range names {
		f.start(name)
	}
	return f
}

func (f *fleet) start(name string) *Host {
	h := f.hosts[name]
	if h == nil {
		h = &Host{Host: table.Host{Name: name, Weight: 100}, State: Ready}
		f.hosts[name] = h
	}
	h.Alive, h.Healthy = true, true
	return h
}

// list returns the hosts, sorted.
func (f *fleet) list() (list []Host) {
	for _, name := range slices.Sorted(maps.Keys(f.hosts)) {
		list = append(list, *f.hosts[name])
	}
	return list
}

// decide asks the leader once, and checks what holds for every table.
func (f *fleet) decide() bool {
	f.Helper()
	f.last = f.leader.Decide(f.now, f.table, f.list())
	next := f.last.Table
	if next == nil {
		return false
	}
	if err := next.Check(); err != nil {
		f.Fatalf("after %v: %v", f.now, err)
	}
	if f.last.Few {
		f.Fatal("a table of too few hosts")
	}
	f.epochs++
	if f.table == nil {
		if next.Epoch != 1 || next.Nonce != 99 {
			f.Fatalf("the first table has epoch %d and nonce %d", next.Epoch, next.Nonce)
		}
	} else {
		f.compare(next)
	}
	f.table = next
	for _, h := range f.hosts {
		if h.Alive && !f.stuck[h.Name] {
			h.Applied = next.Epoch
			if !f.slow[h.Name] {
				h.Prepared = next.Epoch
			}
		}
	}
	return true
}

// compare checks the change of the table.
func (f *fleet) compare(next *table.Table) {
	f.Helper()
	if next.Epoch != f.table.Epoch+1 || next.Nonce != f.table.Nonce {
		f.Fatalf("epoch %d and nonce %d after %d and %d", next.Epoch, next.Nonce, f.table.Epoch, f.table.Nonce)
	}
	moving := 0
	gives, gets := map[uint16]bool{}, map[uint16]bool{}
	for b, previous := range next.Previous {
		if previous != table.None {
			gives[previous], gets[next.Owner[b]] = true, true
		}
	}
	for host := range gives {
		if gets[host] {
			f.Fatalf("after %v: host %s gives and gets buckets in epoch %d", f.now, name(next, host), next.Epoch)
		}
	}
	for b := range table.Buckets {
		before, now := name(f.table, f.table.Owner[b]), name(next, next.Owner[b])
		if next.Next[b] != table.None || next.Previous[b] != table.None {
			moving++
		}
		if before == now {
			continue
		}
		f.moves++
		f.moved[[2]string{before, now}]++
		old := f.hosts[before]
		planned := name(f.table, f.table.Next[b]) == now && name(next, next.Previous[b]) == before
		if gone := old == nil || !old.Alive; !gone && !planned {
			f.Fatalf("bucket %d moves from %s, which is alive, to %s without a preparation", b, before, now)
		}
		if f.hosts[now].State != Ready && !planned || !f.hosts[now].Alive && !planned {
			f.Fatalf("bucket %d moves to %s, which is %s and alive: %t", b, now, f.hosts[now].State, f.hosts[now].Alive)
		}
	}
	if moving > f.leader.Batch {
		f.Fatalf("%d buckets move, at most %d may", moving, f.leader.Batch)
	}
}

func name(t *table.Table, host uint16) string {
	if host == table.None {
		return ""
	}
	return t.Hosts[host].Name
}

// rest asks the leader until nothing changes any more, and lets time pass where the leader waits.
func (f *fleet) rest() {
	f.Helper()
	for range 10_000 {
		if f.decide() {
			continue
		}
		if f.last.Wait == 0 {
			return
		}
		f.now += f.last.Wait
	}
	f.Fatal("the leader does not come to rest")
}

// shares returns the number of buckets of each host.
func (f *fleet) shares() map[string]int {
	shares := map[string]int{}
	for i, n := range f.table.Shares() {
		shares[f.table.Hosts[i].Name] = n
	}
	return shares
}

// expect checks that each bucket is at its preferred host of some hosts with weights, and that none moves.
func (f *fleet) expect(when string, weights map[string]uint32) {
	f.Helper()
	var r table.Ranking
	for name, weight := range weights {
		r.Set(name, weight)
	}
	wrong := 0
	for b := range table.Buckets {
		if name(f.table, f.table.Owner[b]) != r.Preferred(b) {
			wrong++
		}
	}
	if wrong > 0 || f.table.Moving() > 0 {
		f.Errorf("%s: %d buckets are at another host than the preferred one, %d move; shares %v, want those of %v", when, wrong, f.table.Moving(), f.shares(), weights)
	}
}

// TestFirstTable checks when the first table is written.
func TestFirstTable(t *testing.T) {
	f := newFleet(t, Config{MinHosts: 3}, "a", "b")
	if f.decide() || !f.last.Few {
		t.Fatalf("with two of three hosts: %+v", f.last)
	}
	f.start("c")
	f.now = 3 * time.Second
	if f.decide() || f.last.Wait != settle {
		t.Fatalf("before the last host has settled: %+v", f.last)
	}
	f.now += settle
	f.hosts["b"].Healthy = false
	if f.decide() || !f.last.Few {
		t.Fatalf("with two healthy hosts of three: %+v", f.last)
	}
	f.hosts["b"].Healthy = true
	f.start("d").State = Drain
	f.rest()
	f.expect("at first", map[string]uint32{"a": 100, "b": 100, "c": 100})
	if f.epochs != 1 {
		t.Errorf("%d epochs for the first table", f.epochs)
	}
}

// TestFirstTableDespiteFlapping checks that a host that starts again and again does not hold up the others.
func TestFirstTableDespiteFlapping(t *testing.T) {
	f := newFleet(t, Config{MinHosts: 2}, "a", "b", "flaps")
	for f.table == nil && f.now < time.Hour {
		f.hosts["flaps"].Alive = !f.hosts["flaps"].Alive
		f.now += settle / 3
		f.decide()
	}
	if f.table == nil {
		t.Fatal("no table within an hour")
	}
	f.expect("at first", map[string]uint32{"a": 100, "b": 100})
}

// TestFirstTableOfLateHosts checks that the first table is written when the last of MinHosts has settled, however late it
// starts: the leader decides again without a change of the hosts.
func TestFirstTableOfLateHosts(t *testing.T) {
	for _, late := range []time.Duration{0, settle, (mostSettle - 1) * settle, mostSettle * settle, time.Hour} {
		f := newFleet(t, Config{MinHosts: 2}, "a")
		f.decide()
		f.now += late
		f.start("b")
		if f.decide() || f.last.Wait != settle {
			t.Fatalf("host b starts after %v: %+v", late, f.last)
		}
		f.now += f.last.Wait
		if !f.decide() {
			t.Fatalf("host b starts after %v: no table when it has settled: %+v", late, f.last)
		}
		f.expect("at first", map[string]uint32{"a": 100, "b": 100})
	}
}

// TestJoin checks that a host gets its share, after it has settled, and that nothing else moves.
func TestJoin(t *testing.T) {
	f := newFleet(t, Config{MinHosts: 1, Batch: 64}, "a", "b", "c")
	f.rest()
	f.start("d").Weight = 200
	if f.decide() || f.last.Wait != settle {
		t.Fatalf("at once: %+v", f.last)
	}
	f.rest()
	f.expect("after the join", map[string]uint32{"a": 100, "b": 100, "c": 100, "d": 200})
	for pair, n := range f.moved {
		if pair[1] != "d" {
			t.Errorf("%d buckets moved from %s to %s", n, pair[0], pair[1])
		}
	}
	if f.moves != f.shares()["d"] {
		t.Errorf("%d moves for a share of %d", f.moves, f.shares()["d"])
	}
	before := f.epochs
	f.rest()
	if f.epochs != before {
		t.Error("a fleet at rest gets another table")
	}
}

// TestDrainAndReturn drains a host while another one returns: no host gives and gets buckets in the same table.
func TestDrainAndReturn(t *testing.T) {
	f := newFleet(t, Config{}, "a", "b", "c")
	f.hosts["c"].State = Drain
	f.rest()
	f.expect("at first", map[string]uint32{"a": 100, "b": 100})
	f.hosts["b"].State, f.hosts["c"].State = Drain, Ready
	f.rest()
	f.expect("after the exchange", map[string]uint32{"a": 100, "c": 100})
	for _, pair := range [][2]string{{"b", "c"}, {"b", "a"}, {"a", "c"}} {
		if f.moved[pair] == 0 {
			t.Errorf("nothing moved from %s to %s: %v", pair[0], pair[1], f.moved)
		}
	}
}

// TestDrain checks that a host hands over all its buckets and leaves, and gets the same ones when it is back.
func TestDrain(t *testing.T) {
	f := newFleet(t, Config{MinHosts: 2}, "a", "b", "c")
	f.rest()
	owner := f.table.Owner
	f.hosts["b"].State = Drain
	f.rest()
	f.expect("drained", map[string]uint32{"a": 100, "c": 100})
	if n := f.shares()["b"]; n != 0 {
		t.Errorf("the drained host has %d buckets", n)
	}
	f.hosts["b"].State = Ready
	f.rest()
	f.expect("ready again", map[string]uint32{"a": 100, "b": 100, "c": 100})
	if f.table.Owner != owner {
		t.Error("other buckets than before")
	}
}

// TestDeath checks both values of on_host_death, the return of the host, and its removal.
func TestDeath(t *testing.T) {
	all, rest := map[string]uint32{"a": 100, "b": 100, "c": 100}, map[string]uint32{"a": 100, "c": 100}
	for _, on := range []OnDeath{Next, Wait} {
		t.Run(string(on), func(t *testing.T) {
			f := newFleet(t, Config{MinHosts: 2, OnDeath: on}, "a", "b", "c")
			f.rest()
			before := f.epochs
			f.hosts["b"].Alive = false
			if on == Wait {
				f.rest()
				f.expect("while the host is dead", all)
				if f.epochs != before {
					t.Errorf("%d epochs for a host that others wait for", f.epochs-before)
				}
				f.start("b")
				f.rest()
				f.expect("after its return", all)
				f.hosts["b"].Alive, f.hosts["b"].State = false, Removed
				f.rest()
				f.expect("after its removal", rest)
				return
			}
			f.decide()
			f.expect("at once", rest)
			if f.table.Index("b") != table.None {
				t.Error("the dead host is in the table")
			}
			f.start("b").State = Maint
			f.rest()
			f.expect("as long as the host is in maint", rest)
			f.hosts["b"].State = Ready
			f.now += settle
			f.rest()
			f.expect("after its return", all)
		})
	}
}

// TestFew checks that nothing moves with fewer hosts than min_hosts: the others may live beyond a partition.
func TestFew(t *testing.T) {
	f := newFleet(t, Config{MinHosts: 2, OnDeath: Next}, "a", "b", "c")
	f.rest()
	f.hosts["b"].Alive, f.hosts["c"].Alive = false, false
	if f.decide() || !f.last.Few {
		t.Fatalf("with one host of at least two: %+v", f.last)
	}
	f.start("b")
	f.rest()
	f.expect("with two", map[string]uint32{"a": 100, "b": 100})
}

// TestUnknown is that nothing moves to or from a host of which it is not known whether it has died, except from a removed one.
func TestUnknown(t *testing.T) {
	for _, state := range []State{Ready, Drain} {
		f := newFleet(t, Config{MinHosts: 1, Batch: table.Buckets}, "a", "b", "c")
		f.rest()
		before := *f.table
		f.start("d")
		for _, name := range []string{"b", "c"} {
			f.hosts[name].Alive, f.hosts[name].Unknown = false, true
		}
		f.hosts["b"].State = state
		f.now += time.Hour
		for range 5 {
			f.decide()
		}
		if f.table.Moving() > 0 || f.moves > 0 {
			t.Fatalf("%s: %d buckets move, %d have moved", state, f.table.Moving(), f.moves)
		}
		for b := range before.Owner {
			if name(&before, before.Owner[b]) != name(f.table, f.table.Owner[b]) {
				t.Fatalf("%s: bucket %d is at another host", state, b)
			}
		}
		f.hosts["c"].Alive, f.hosts["c"].Unknown, f.hosts["c"].Applied, f.hosts["c"].Prepared = true, false, f.table.Epoch, f.table.Epoch
		f.hosts["b"].Unknown = false // it has died
		f.rest()
		f.expect("at the end", map[string]uint32{"a": 100, "c": 100, "d": 100})
	}
	f := newFleet(t, Config{MinHosts: 1}, "a", "b")
	f.rest()
	f.hosts["b"].Alive, f.hosts["b"].Unknown, f.hosts["b"].State = false, true, Removed
	f.rest()
	f.expect("without the removed host", map[string]uint32{"a": 100})
}

// TestMaint checks that a host in maint keeps its buckets and gets none.
func TestMaint(t *testing.T) {
	f := newFleet(t, Config{MinHosts: 1, OnDeath: Next}, "a", "b", "c")
	f.rest()
	f.hosts["a"].State = Maint
	f.rest()
	f.expect("in maint", map[string]uint32{"a": 100, "b": 100, "c": 100})
	had := f.shares()["a"]
	f.hosts["c"].Alive = false
	f.rest()
	if got := f.shares(); got["a"] != had || got["b"] != table.Buckets-had {
		t.Errorf("after the death of another host: %v", got)
	}
	f.hosts["a"].State = Ready
	f.rest()
	f.expect("ready again", map[string]uint32{"a": 100, "b": 100})
}

// TestWeight checks that a host with more weight gets buckets, and one with less gives some.
func TestWeight(t *testing.T) {
	f := newFleet(t, Config{MinHosts: 1}, "a", "b", "c")
	f.rest()
	for _, weight := range []uint32{300, 50} {
		f.moved = map[[2]string]int{}
		f.hosts["b"].Weight = weight
		f.rest()
		f.expect(fmt.Sprintf("with weight %d", weight), map[string]uint32{"a": 100, "b": weight, "c": 100})
		for pair := range f.moved {
			if (weight == 300) != (pair[1] == "b") {
				t.Errorf("weight %d: a move from %s to %s", weight, pair[0], pair[1])
			}
		}
	}
	f.hosts["b"].Weight = 0 // nonsense in a registration: the host hands its buckets over
	f.rest()
	f.expect("without a valid weight", map[string]uint32{"a": 100, "c": 100})
}

// TestBehind checks that planned moves wait for each living host, and for the preparations, and that a death does not.
func TestBehind(t *testing.T) {
	f := newFleet(t, Config{MinHosts: 1, OnDeath: Next}, "a", "b", "c")
	f.rest()
	f.stuck["c"] = true
	f.hosts["a"].State = Drain
	f.decide() // a host that has applied all: prepares
	if f.table.Moving() == 0 {
		t.Fatal("no move is prepared")
	}
	if f.decide(); f.moves > 0 || !slices.Equal(f.last.Behind, []string{"c"}) {
		t.Fatalf("%d moves while %v is behind", f.moves, f.last.Behind)
	}
	f.hosts["b"].Alive = false
	f.decide()
	if n := f.shares()["b"]; n > 0 {
		t.Errorf("a dead host keeps %d buckets because another one is behind", n)
	}
	f.moves, f.stuck["c"] = 0, false
	f.hosts["c"].Applied, f.hosts["c"].Prepared = f.table.Epoch, f.table.Epoch
	f.slow["a"] = true
	f.hosts["a"].Prepared = 0
	for range 5 {
		f.decide()
	}
	if f.moves > 0 {
		t.Errorf("%d moves before the owner has prepared them", f.moves)
	}
	f.slow["a"] = false
	f.hosts["a"].Prepared = f.table.Epoch
	f.rest()
	f.expect("at the end", map[string]uint32{"c": 100})
}

// TestSettleWaits checks that the former owner stays in the table until all hosts have applied it, and that no other move
// begins before.
func TestSettleWaits(t *testing.T) {
	f := newFleet(t, Config{MinHosts: 1, Batch: table.Buckets}, "a", "b", "c")
	f.rest()
	f.hosts["a"].State = Drain
	f.decide()
	f.stuck["c"] = true
	if f.decide(); f.moves == 0 {
		t.Fatal("nothing moves")
	}
	flipped := *f.table
	f.hosts["b"].State = Drain
	if f.decide() {
		t.Error("a further table although a host has not applied the last one")
	}
	f.hosts["b"].State = Ready
	f.stuck["c"] = false
	f.hosts["c"].Applied, f.hosts["c"].Prepared = f.table.Epoch, f.table.Epoch
	f.decide()
	for b, previous := range f.table.Previous {
		if previous != table.None && flipped.Previous[b] != table.None {
			t.Fatalf("bucket %d is not settled", b)
		}
	}
	f.rest()
	f.expect("at the end", map[string]uint32{"b": 100, "c": 100})
}

// TestTargetDies checks moves whose target dies or becomes unhealthy when it is prepared, and when it has just become the owner.
func TestTargetDies(t *testing.T) {
	for phase, steps := range map[string]int{"prepared": 1, "flipped": 2} {
		t.Run(phase, func(t *testing.T) {
			f := newFleet(t, Config{MinHosts: 1, OnDeath: Next}, "a", "b")
			f.rest()
			f.start("c")
			f.decide()
			f.now += settle
			for range steps + 1 { // the first one adds the host, if it prepares nothing
				f.decide()
			}
			if f.table.Moving() == 0 {
				t.Fatal("nothing moves")
			}
			f.hosts["c"].Alive = false
			f.rest()
			f.expect("after the death", map[string]uint32{"a": 100, "b": 100})
			f.start("c")
			f.now += settle
			f.decide()
			f.hosts["c"].Healthy = false
			f.rest()
			f.hosts["c"].Healthy = true
			f.rest()
			f.expect("after it was unhealthy", map[string]uint32{"a": 100, "b": 100, "c": 100})
		})
	}
}

// TestAddresses checks that a new address of a host leads to a new table, and moves nothing.
func TestAddresses(t *testing.T) {
	f := newFleet(t, Config{MinHosts: 1}, "a", "b")
	f.rest()
	f.hosts["a"].MACs = []string{"02:00:00:00:00:07"}
	f.rest()
	if f.moves != 0 || f.epochs != 2 || f.table.Hosts[0].MACs[0] != "02:00:00:00:00:07" {
		t.Errorf("%d moves, %d epochs, %+v", f.moves, f.epochs, f.table.Hosts[0])
	}
}

// TestNewLeader checks that another leader continues in the middle of a move.
func TestNewLeader(t *testing.T) {
	f := newFleet(t, Config{MinHosts: 1, OnDeath: Next}, "a", "b", "c")
	f.rest()
	f.hosts["a"].State = Drain
	for range 5 {
		f.decide()
	}
	f.leader = &Leader{Config: f.leader.Config}
	f.now = 0 // another host has another clock
	f.rest()
	f.expect("after the change of the leader", map[string]uint32{"b": 100, "c": 100})
}

// TestRandom changes hosts at random. The checks of compare hold for each table, and at the end each bucket is at its
// preferred host.
func TestRandom(t *testing.T) {
	for seed := range uint64(6) {
		r := rand.New(rand.NewPCG(seed, 7))
		f := newFleet(t, Config{MinHosts: 2, OnDeath: []OnDeath{Next, Wait}[seed%2], Batch: 1 + r.IntN(3000)}, "h0", "h1", "h2", "h3")
		f.rest()
		for range 120 {
			h := f.start(fmt.Sprintf("h%d", r.IntN(7)))
			switch r.IntN(8) {
			case 0:
				h.Alive = false
			case 1:
				h.State = []State{Ready, Drain, Maint, Removed}[r.IntN(4)]
			case 2:
				h.Healthy = false
			case 3:
				h.Weight = uint32(1 + r.IntN(500))
			case 4:
				f.stuck[h.Name] = r.IntN(2) == 0
			case 5:
				f.slow[h.Name] = r.IntN(2) == 0
			case 6:
				f.now += time.Duration(r.Int64N(int64(2 * settle)))
			case 7:
				f.leader = &Leader{Config: f.leader.Config}
			}
			for range r.IntN(6) {
				f.decide()
			}
		}
		clear(f.stuck)
		clear(f.slow)
		weights := map[string]uint32{}
		for name, h := range f.hosts {
			f.start(name).State = Ready
			h.Applied, h.Prepared = f.table.Epoch, f.table.Epoch
			weights[name] = h.Weight
		}
		f.now += settle
		f.rest()
		f.now += settle
		f.rest()
		f.expect(fmt.Sprintf("seed %d", seed), weights)
		if names := slices.Sorted(maps.Keys(f.shares())); strings.Join(names, " ") != strings.Join(slices.Sorted(maps.Keys(weights)), " ") {
			t.Errorf("seed %d: hosts %v", seed, names)
		}
	}
}

// TestFailing is that a host that is alive and cannot serve keeps its buckets for a while, and that they move as planned then,
// and return.
func TestFailing(t *testing.T) {
	f := newFleet(t, Config{MinHosts: 1, Settle: time.Second, OnDeath: Next, Batch: table.Buckets}, "a", "b", "c")
	f.rest()
	f.expect("at first", map[string]uint32{"a": 100, "b": 100, "c": 100})
	f.hosts["b"].Healthy = false
	for range 9 {
		f.decide()
		f.now += time.Second
	}
	if f.moves > 0 {
		t.Errorf("%d moves after %v", f.moves, 9*time.Second)
	}
	f.now += 2 * time.Second
	f.rest()
	f.expect("without b", map[string]uint32{"a": 100, "c": 100})
	f.hosts["b"].Healthy = true
	f.rest()
	f.expect("with b again", map[string]uint32{"a": 100, "b": 100, "c": 100})
	for _, h := range f.hosts {
		h.Healthy = false
	}
	f.moves = 0
	f.decide()
	f.now += time.Minute
	f.rest()
	if f.moves > 0 {
		t.Errorf("%d moves although no host can serve", f.moves)
	}
}
