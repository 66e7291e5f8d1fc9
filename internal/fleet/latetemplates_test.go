// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/node"
	"sockeye/internal/fleet/store"
	"sockeye/internal/fleet/table"
	"sockeye/internal/placement"
)

// keeping are services that keep templates.
type keeping struct {
	services
	learned map[netip.Addr]time.Time
	taken   []netip.Addr
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

func (k *keeping) TakeOver(handed map[netip.Addr][]byte) {
	k.taken = append(k.taken, slices.Collect(maps.Keys(handed))...)
}

// exchange is a store that keeps templates only.
type exchange struct {
	store.Store
	broken  error
	handed  map[string][]netip.Addr // by host
	waiting map[netip.Addr][]byte   // for this host
	own     store.Registration
}

func (e *exchange) Update(r store.Registration) { e.own = r }

func (e *exchange) HandOver(_ context.Context, to string, templates map[netip.Addr][]byte) error {
	if e.broken == nil {
		e.handed[to] = slices.SortedFunc(maps.Keys(templates), netip.Addr.Compare)
	}
	return e.broken
}

func (e *exchange) TakeOver(context.Context) (map[netip.Addr][]byte, error) {
	if e.broken != nil {
		return nil, e.broken
	}
	all := e.waiting
	e.waiting = nil
	return all, nil
}

// lateHost is host a of a fleet of a and b.
type lateHost struct {
	*participation
	*exchange
	*keeping
	devices map[string][]netip.Addr // two of each host, in order
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
		table: one, mapping: mapping, late: newLate(), node: node.New(node.Config{Store: h.exchange}),
	}
	return h
}

func (h *lateHost) expect(t *testing.T, what string, want []netip.Addr, late uint64) {
	t.Helper()
	if got := h.handed["b"]; !slices.Equal(got, want) || len(h.handed["a"]) > 0 || h.own.Late != late {
		t.Errorf("%s: %v handed over, %d times late, want %v and %d times", what, h.handed, h.own.Late, want, late)
	}
	clear(h.handed)
}

// TestHandOverLate is that a host hands over the templates that devices have sent after the preparation of their move, once, and all of
// those of devices that have moved without a preparation.
func TestHandOverLate(t *testing.T) {
	h := newLateHost(t, 5)
	ctx, theirs := t.Context(), h.devices["b"]
	h.handOverLate(ctx)
	h.expect(t, "no device has left", nil, 0)

	// The devices of host b have left this host with a move that was prepared.
	preparing := *h.table
	preparing.Epoch, preparing.Owner = 4, table.Column{}
	for b := range preparing.Owner {
		if preparing.Owner[b] = 0; h.table.Owner[b] != 0 {
			preparing.Next[b] = h.table.Owner[b]
		}
	}
	check(t, (*dataPath)(h.participation).HandOver(ctx, &preparing))
	h.expect(t, "preparation", theirs, 0)
	h.learned[theirs[0]] = time.Now()
	h.late.left(5, time.Now())
	h.broken = errors.New("no quorum")
	h.handOverLate(ctx)
	h.expect(t, "store out of order", nil, 0)
	h.broken = nil
	h.handOverLate(ctx)
	h.expect(t, "new template", theirs[:1], 1)
	h.handOverLate(ctx)
	h.expect(t, "the same templates", nil, 1)
	h.learned[theirs[1]], h.learned[h.devices["a"][0]] = time.Now(), time.Now()
	h.handOverLate(ctx)
	h.expect(t, "one more, and one of a device that stays", theirs[1:], 2)
	h.late.until = time.Now().Add(-time.Nanosecond)
	h.handOverLate(ctx)
	h.learned[theirs[0]] = time.Now()
	h.handOverLate(ctx)
	h.expect(t, "after the time for late templates", nil, 2)

	h.late.left(9, time.Now())
	h.handOverLate(ctx)
	h.expect(t, "a move that this host has not prepared", theirs, 3)
}

// TestTakeOverLate is that a host takes over the templates that another one has handed over late, for its own devices, as soon as it has a
// table and the store answers.
func TestTakeOverLate(t *testing.T) {
	h := newLateHost(t, 1)
	noted := func() bool {
		select {
		case <-h.late.arrived:
			return true
		default:
			return false
		}
	}
	host := func(name string, late uint64) lead.Host {
		return lead.Host{Host: table.Host{Name: name}, Late: late}
	}
	for _, test := range []struct {
		hosts []lead.Host
		want  bool
	}{
		{[]lead.Host{host("a", 1), host("b", 0)}, false}, {[]lead.Host{host("b", 1), host("c", 1)}, true}, {[]lead.Host{host("b", 1)}, false},
		{[]lead.Host{host("b", 0), host("c", 1)}, true}, // its agent has restarted
	} {
		h.late.noteHosts(test.hosts, "a")
		if got := noted(); got != test.want {
			t.Errorf("%+v: noted %v", test.hosts, got)
		}
	}

	h.waiting = make(map[netip.Addr][]byte)
	for device := range h.learned {
		h.waiting[device] = []byte{1}
	}
	one := h.table
	h.table = nil
	if h.takeOverLate(t.Context()) || len(h.taken) > 0 {
		t.Errorf("%v taken over without a table", h.taken)
	}
	h.table, h.broken = one, errors.New("no quorum")
	if h.takeOverLate(t.Context()) {
		t.Error("done, although the store does not answer")
	}
	h.broken = nil
	done := h.takeOverLate(t.Context())
	if slices.SortFunc(h.taken, netip.Addr.Compare); !done || !slices.Equal(h.taken, h.devices["a"]) {
		t.Errorf("%v taken over, want %v, done %v", h.taken, h.devices["a"], done)
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
