// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fleet/follow"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/store"
	"sockeye/internal/fleet/table"
	"sockeye/internal/placement"
)

// keeping are services that keep templates.
type keeping struct {
	services
	learned   map[netip.Addr]time.Time
	refreshed map[netip.Addr]bool
	size      int // of the templates of a device
	taken     []netip.Addr
}

func (k *keeping) HandOver(leaves func(netip.Addr) bool, since time.Time) (map[netip.Addr][]byte, error) {
	handed := make(map[netip.Addr][]byte)
	for device, at := range k.learned {
		if leaves(device) && !at.Before(since) {
			handed[device] = []byte{1}
		}
	}
	return handed, nil
}

func (k *keeping) TakeOver(handed map[netip.Addr][]byte, _ bool) {
	k.taken = append(k.taken, slices.Collect(maps.Keys(handed))...)
}

// exchange is a store that keeps templates only.
type exchange struct {
	store.Store
	broken  error
	handed  map[string][]netip.Addr // by host
	late    bool                    // these are late
	waiting []map[netip.Addr][]byte // for this host, one for each call
	own     store.Registration

	number  int64                            // of the copies
	copied  []netip.Addr                     // last
	removed []netip.Addr                     // last
	copies  map[string]map[netip.Addr][]byte // by host
	read    []string                         // hosts whose copies were read, and from where
}

func (e *exchange) Update(r store.Registration) { e.own = r }

func (e *exchange) HandOver(_ context.Context, to string, late bool, templates map[netip.Addr][]byte) error {
	if e.late = late; e.broken == nil {
		e.handed[to] = slices.SortedFunc(maps.Keys(templates), netip.Addr.Compare)
	}
	return e.broken
}

func (e *exchange) TakeOver(_ context.Context, late bool) (handed []map[netip.Addr][]byte, more bool, err error) {
	if e.broken != nil || len(e.waiting) == 0 || !late {
		return nil, false, e.broken
	}
	handed, e.waiting = e.waiting[:1], e.waiting[1:]
	return handed, len(e.waiting) > 0, nil
}

// lateHost is host a of a fleet of a and b.
type lateHost struct {
	*participation
	*exchange
	*keeping
	devices map[string][]netip.Addr // two of each host, in order
	seen    uint64                  // Late of the registration
}

// newLateHost returns a host whose last table is that of an epoch, and the templates of four devices, which are an hour old.
func newLateHost(t *testing.T, epoch uint64) *lateHost {
	t.Helper()
	h := &lateHost{exchange: &exchange{handed: make(map[string][]netip.Addr)}, keeping: &keeping{learned: make(map[netip.Addr]time.Time)}, devices: make(map[string][]netip.Addr)}
	one := &table.Table{Epoch: epoch, Nonce: 7, Hosts: []table.Host{{Name: "a", Weight: 1}, {Name: "b", Weight: 1}}}
	for b := range table.Buckets {
		one.Owner[b], one.Previous[b], one.Next[b] = uint16(b%2), table.None, table.None
	}
	mapping, err := placement.NewMapping(1, bpf.NoSlot, one.Nonce, nil)
	check(t, err)
	for device := netip.MustParseAddr("192.0.2.1"); len(h.devices["a"]) < 2 || len(h.devices["b"]) < 2; device = device.Next() {
		name := one.Hosts[one.Owner[mapping.Locate(device).Bucket]].Name
		if len(h.devices[name]) < 2 {
			h.devices[name] = append(h.devices[name], device)
			h.learned[device] = time.Now().Add(-time.Hour)
		}
	}
	h.participation = &participation{
		settings: &settings{Fleet: config.Fleet{Name: "main"}, host: "a"}, services: h.keeping, store: h.exchange, log: slog.New(slog.DiscardHandler),
		table: one, mapping: mapping, late: newLate(), copies: newCopies(), state: follow.State{Snapshot: &store.Snapshot{Connected: true}}, follower: follow.New(follow.Config{Store: h.exchange}),
	}
	return h
}

// expect checks what was handed over to host b, and whether the other hosts were told about late templates.
func (h *lateHost) expect(t *testing.T, what string, want []netip.Addr, late bool) {
	t.Helper()
	told := h.own.Late != h.seen
	if got := h.handed["b"]; !slices.Equal(got, want) || len(h.handed["a"]) > 0 || told != late || len(want) > 0 && h.exchange.late != late {
		t.Errorf("%s: %v handed over, told %v, want %v and %v", what, h.handed, told, want, late)
	}
	clear(h.handed)
	h.seen = h.own.Late
}

// TestHandOverLate is that a host hands over the templates that devices have sent after the preparation of their move, once, and all of
// those of devices that have moved without a preparation.
func TestHandOverLate(t *testing.T) {
	h := newLateHost(t, 5)
	ctx, theirs := t.Context(), h.devices["b"]
	h.handOverLate(ctx)
	h.expect(t, "no device has left", nil, false)

	// The devices of host b have left this host with a move that was prepared.
	preparing := *h.table
	preparing.Epoch, preparing.Owner = 4, table.Column{}
	for b := range preparing.Owner {
		if h.table.Owner[b] != 0 {
			preparing.Next[b] = h.table.Owner[b]
		}
	}
	left := func() { h.participation.late.left(&preparing, h.table, "a", time.Now()) }
	h.broken = errors.New("no quorum")
	if err := (*dataPath)(h.participation).HandOver(ctx, &preparing); err == nil {
		t.Error("prepared, although the store does not answer")
	}
	left()
	if len(h.participation.late.due) != 1 || !h.participation.late.since.IsZero() {
		t.Error("a move that the host could not prepare counts as prepared")
	}
	h.broken, h.participation.late = nil, newLate()
	check(t, (*dataPath)(h.participation).HandOver(ctx, &preparing))
	h.expect(t, "preparation", theirs, false)
	h.learned[theirs[0]] = time.Now()
	left()
	if len(h.participation.late.due) > 0 {
		t.Error("a prepared move counts as one that is not")
	}
	h.broken = errors.New("no quorum")
	h.handOverLate(ctx)
	h.expect(t, "store out of order", nil, false)
	if problems := h.allProblems(); len(problems) > 0 {
		t.Errorf("problems after the first failure: %q", problems)
	}
	h.participation.late.retry = time.Time{}
	h.handOverLate(ctx)
	if problems := h.allProblems(); len(problems) != 1 || !strings.Contains(problems[0], "no quorum") {
		t.Errorf("problems: %q", problems)
	}
	h.broken = nil
	h.handOverLate(ctx)
	h.expect(t, "pause after the failure", nil, false)
	h.participation.late.retry = time.Time{}
	h.handOverLate(ctx)
	h.expect(t, "new template", theirs[:1], true)
	if problems := h.allProblems(); len(problems) > 0 {
		t.Errorf("problems: %q", problems)
	}
	h.handOverLate(ctx)
	h.expect(t, "the same templates", nil, false)
	h.learned[theirs[1]], h.learned[h.devices["a"][0]] = time.Now(), time.Now()
	h.handOverLate(ctx)
	h.expect(t, "one more, and one of a device that stays", theirs[1:], true)
	h.participation.late.until = time.Now().Add(-time.Nanosecond)
	h.handOverLate(ctx)
	h.learned[theirs[0]] = time.Now()
	h.handOverLate(ctx)
	h.expect(t, "after the time for late templates", nil, false)

	// A table that moves more than the preparation, as after a failure of this host.
	preparing.Next[slices.Index(h.table.Owner[:], 1)] = table.None
	left()
	h.handOverLate(ctx)
	h.expect(t, "a move that this host has not prepared", theirs, true)
	h.participation.late = newLate()
	h.participation.late.left(nil, h.table, "a", time.Now())
	if len(h.participation.late.due) != 1 {
		t.Error("the first table does not count as a move that is not prepared")
	}
	h.handOverLate(ctx)
	h.expect(t, "first table", theirs, true)
}

// TestTakeOverLate is that a host takes over the templates that another one has handed over late, for its own devices, as soon as it has a
// table and the store answers, and those of devices that it gets a moment later.
func TestTakeOverLate(t *testing.T) {
	h := newLateHost(t, 1)
	noted := func() bool {
		select {
		case <-h.participation.late.arrived:
			return true
		default:
			return false
		}
	}
	host := func(name string, late uint64) lead.Host {
		return lead.Host{Host: table.Host{Name: name}, Alive: true, Late: late}
	}
	for i, test := range []struct {
		hosts []lead.Host
		want  bool
	}{
		{[]lead.Host{host("a", 1), host("b", 0)}, false}, {[]lead.Host{host("b", 1), host("c", 1)}, true}, {[]lead.Host{host("b", 1), host("c", 1)}, false},
		{[]lead.Host{host("b", 0), host("c", 1)}, true}, // its agent has restarted
		{[]lead.Host{host("c", 1)}, false}, {[]lead.Host{host("b", 9), host("c", 1)}, true},
	} {
		h.participation.late.noteHosts(test.hosts, "a")
		if got := noted(); got != test.want {
			t.Errorf("%d: noted %v", i, got)
		}
	}

	// Hosts b and c had the devices, one after the other.
	for range 2 {
		all := make(map[netip.Addr][]byte)
		for device := range h.learned {
			all[device] = []byte{1}
		}
		h.waiting = append(h.waiting, all)
	}
	mine, theirs := h.devices["a"], h.devices["b"]
	taken := func(what string, want ...netip.Addr) {
		t.Helper()
		slices.SortFunc(h.taken, netip.Addr.Compare)
		slices.SortFunc(want, netip.Addr.Compare)
		if !slices.Equal(h.taken, want) {
			t.Errorf("%s: %v taken over, want %v", what, h.taken, want)
		}
		h.taken = nil
	}
	one := h.table
	h.table = nil
	if h.takeOverLate(t.Context()) {
		t.Error("done without a table")
	}
	h.table, h.broken = one, errors.New("no quorum")
	if h.takeOverLate(t.Context()) {
		t.Error("done, although the store does not answer")
	}
	h.broken = nil
	taken("nothing")
	if h.takeOverLate(t.Context()) {
		t.Error("done, although the store has more")
	}
	taken("first host", mine...)
	if !h.takeOverLate(t.Context()) {
		t.Error("not done")
	}
	taken("second host", mine...)
	h.deliverHeld()
	taken("no other table")
	next := *one
	next.Owner[h.mapping.Locate(theirs[0]).Bucket] = 0
	h.table = &next
	h.deliverHeld()
	taken("a device that has come", theirs[0], theirs[0])
	for i := range h.participation.late.held {
		h.participation.late.held[i].until = time.Now().Add(-time.Nanosecond)
	}
	h.deliverHeld()
	if len(h.participation.late.held) > 0 {
		t.Errorf("%d are held", len(h.participation.late.held))
	}
	flood := make(map[netip.Addr][]byte)
	for device := netip.MustParseAddr("10.0.0.0"); len(flood) < 2*mostHeld; device = device.Next() {
		flood[device] = nil
	}
	h.waiting = []map[netip.Addr][]byte{flood}
	h.takeOverLate(t.Context())
	held := 0
	for _, one := range h.participation.late.held {
		held += len(one.templates)
	}
	if held > mostHeld {
		t.Errorf("%d devices are held", held)
	}
}

// TestChanges counts the buckets that move.
func TestChanges(t *testing.T) {
	one := newLateHost(t, 1).table
	other := *one
	other.Hosts = []table.Host{{Name: "_", Weight: 1}, {Name: "a", Weight: 1}, {Name: "b", Weight: 1}} // other indices
	for b, owner := range one.Owner {
		other.Owner[b] = owner + 1
	}
	const half = table.Buckets / 2
	moved := other
	moved.Owner[0], moved.Owner[2], moved.Owner[1] = 2, 2, 1
	for _, test := range []struct {
		before, after *table.Table
		host          string
		gained, lost  int
	}{
		{nil, one, "a", half, 0}, {one, one, "a", 0, 0}, {one, &other, "a", 0, 0}, {one, &moved, "a", 1, 2}, {one, &moved, "b", 2, 1},
		{one, &moved, "_", 0, 0}, {one, &moved, "", 0, 0}, {&moved, one, "c", 0, 0},
	} {
		if gained, lost := changes(test.before, test.after, test.host); gained != test.gained || lost != test.lost {
			t.Errorf("host %q: %d gained and %d lost, want %d and %d", test.host, gained, lost, test.gained, test.lost)
		}
	}
}
