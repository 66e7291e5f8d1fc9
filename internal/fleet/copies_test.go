// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"sockeye/internal/fleet/table"
)

func (k *keeping) CopyTemplates(wanted func(netip.Addr) (since time.Time, refreshed, wanted bool), most int) (map[netip.Addr][]byte, error) {
	all := make(map[netip.Addr][]byte)
	for _, device := range slices.SortedFunc(maps.Keys(k.learned), netip.Addr.Compare) {
		since, refreshed, is := wanted(device)
		if is && (!k.learned[device].Before(since) || refreshed && k.refreshed[device]) && len(all) < most {
			all[device] = make([]byte, max(1, k.size))
		}
	}
	return all, nil
}

func (e *exchange) RenewCopies(context.Context) (number int64, err error) { return e.number, e.broken }

func (e *exchange) CopyTemplates(_ context.Context, number int64, templates map[netip.Addr][]byte) error {
	if e.broken != nil || number != e.number {
		return e.broken
	}
	for _, device := range slices.SortedFunc(maps.Keys(templates), netip.Addr.Compare) {
		if templates[device] == nil {
			e.removed = append(e.removed, device)
		} else {
			e.copied = append(e.copied, device)
		}
	}
	return nil
}

func (e *exchange) Copies(_ context.Context, host, from string, take func(map[netip.Addr][]byte)) (next string, err error) {
	e.read = append(e.read, host+from)
	if e.broken != nil {
		return from, e.broken
	}
	if from == "" {
		return "more", nil
	}
	take(maps.Clone(e.copies[host]))
	return "", nil
}

// expectCopies makes a pass, and checks which devices are copied, and of which the copies are removed.
func (h *lateHost) expectCopies(t *testing.T, what string, copied, removed []netip.Addr) {
	t.Helper()
	h.participation.copies.next = time.Time{}
	h.copyTemplates(t.Context())
	if !slices.Equal(h.copied, copied) || !slices.Equal(h.removed, removed) {
		t.Errorf("%s: %v copied and %v removed, want %v and %v", what, h.copied, h.removed, copied, removed)
	}
	h.copied, h.removed = nil, nil
}

// aged lets the copy of a device be of an earlier time.
func (h *lateHost) aged(device netip.Addr, age time.Duration) {
	last := h.participation.copies.of[device]
	last.at = time.Now().Add(-age)
	h.participation.copies.of[device] = last
}

// TestCopyTemplates is that a host copies the templates of its devices, and again those that change, not too often, those that are old, and all of
// them when the store has lost them.
func TestCopyTemplates(t *testing.T) {
	h := newLateHost(t, 1)
	mine := h.devices["a"]
	expect := func(what string, want ...netip.Addr) {
		t.Helper()
		h.expectCopies(t, what, want, nil)
	}
	expect("a store without copies")
	h.number = 1
	h.broken = errors.New("no quorum")
	expect("store out of order")
	if problems := h.allProblems(); len(problems) != 1 || !strings.Contains(problems[0], "no quorum") {
		t.Errorf("problems: %q", problems)
	}
	h.broken = nil
	if h.copyTemplates(t.Context()); h.copied != nil {
		t.Error("no pause after a pass")
	}
	expect("all", mine...)
	if problems := h.allProblems(); len(problems) > 0 || h.participation.copies.devices != 2 {
		t.Errorf("%d devices, problems: %q", h.participation.copies.devices, problems)
	}
	expect("the same templates")
	h.learned[mine[0]], h.learned[h.devices["b"][0]] = time.Now().Add(time.Hour), time.Now().Add(time.Hour)
	expect("too soon")
	for want := leastCopyPause; want <= 4*mostCopyPause; want *= 2 {
		last := h.participation.copies.of[mine[0]]
		if last.pause != min(want, mostCopyPause) {
			t.Errorf("pause %v, want %v", last.pause, want)
		}
		h.aged(mine[0], last.pause)
		expect("a new template", mine[0])
	}
	h.learned[mine[1]] = time.Now().Add(-2 * copyRefresh)
	h.aged(mine[1], copyRefresh)
	expect("an old copy of a device that is silent")
	h.refreshed = map[netip.Addr]bool{mine[0]: true, mine[1]: true}
	expect("an old copy of a device that has sent the same templates", mine[1])
	h.number = 2
	expect("another number", mine...)
	h.table.Owner[h.mapping.Locate(mine[1]).Bucket] = 1
	h.number = 3
	expect("a device that has left", mine[0])
	h.state.Connected, h.number = false, 4
	expect("no connection")
}

// TestCopiesBounds is that the size of the copies of a device and of all devices is limited, and that devices that are gone make room.
func TestCopiesBounds(t *testing.T) {
	h := newLateHost(t, 1)
	h.number = 1
	mine := h.devices["a"]
	c := &h.participation.copies
	h.size = mostCopySize
	h.expectCopies(t, "all", mine, nil)
	if c.size != 2*mostCopySize {
		t.Errorf("%d bytes", c.size)
	}
	h.size, h.learned[mine[0]] = mostCopySize+1, time.Now().Add(time.Hour)
	h.aged(mine[0], time.Hour)
	h.expectCopies(t, "a device with too many templates", nil, mine[:1])
	if c.size != mostCopySize || c.devices != 1 {
		t.Errorf("%d bytes of %d devices", c.size, c.devices)
	}
	// A device that is gone needs nearly all of the space.
	gone := netip.MustParseAddr("2001:db8::1")
	c.of[gone] = copied{size: mostCopies - mostCopySize - 9}
	c.size += c.of[gone].size
	delete(c.of, mine[0])
	h.size = 10
	h.expectCopies(t, "no space", nil, []netip.Addr{gone})
	if problems := h.allProblems(); len(problems) > 0 || c.size != mostCopySize {
		t.Errorf("%d bytes, problems: %q", c.size, problems)
	}
	h.expectCopies(t, "space", mine[:1], nil)
	c.of[mine[1]], c.size = copied{at: time.Now(), pause: time.Hour, size: mostCopies}, mostCopies
	delete(c.of, mine[0])
	h.expectCopies(t, "full", nil, nil)
	if problems := h.allProblems(); len(problems) != 1 || !strings.Contains(problems[0], "limit of 16 MiB") {
		t.Errorf("problems: %q", problems)
	}
}

// TestTakeCopies is that a host reads the copies of hosts whose devices have come without preparation, or that have died, until the store answers, and
// takes over those of the devices that have come.
func TestTakeCopies(t *testing.T) {
	h := newLateHost(t, 2)
	mine := h.devices["a"]
	all := make(map[netip.Addr][]byte)
	for device := range h.learned {
		all[device] = []byte{1}
	}
	h.exchange.copies = map[string]map[netip.Addr][]byte{"c": all}
	// Host c had all devices but the first one.
	before := *h.table
	before.Hosts = []table.Host{{Name: "a", Weight: 1}, {Name: "c", Weight: 1}}
	for b := range before.Owner {
		before.Owner[b], before.Next[b] = 1, table.None
	}
	before.Owner[h.mapping.Locate(mine[0]).Bucket] = 0
	prepared := before
	for b := range prepared.Next {
		prepared.Next[b] = 0
	}
	c := &h.participation.copies
	for what, from := range map[string]*table.Table{"no table": nil, "the same table": h.table, "a prepared move": &prepared} {
		if c.gained(from, h.table, "a", map[string]bool{"b": true}, time.Now()); len(c.wanted) > 0 || len(c.due) > 0 {
			t.Errorf("%s: %v", what, c.wanted)
		}
	}
	if c.gained(&prepared, h.table, "a", map[string]bool{"c": true}, time.Now()); len(c.due) != 1 || len(c.wanted) != 1 {
		t.Error("the death of a host during a prepared move does not count")
	}
	*c = newCopies()
	c.gained(&before, h.table, "a", nil, time.Now())
	if len(c.due) != 1 {
		t.Error("not due")
	}
	h.broken = errors.New("no quorum")
	h.takeCopies(t.Context())
	if len(h.taken) > 0 || len(c.wanted) != 1 {
		t.Errorf("%v taken over, wanted %v", h.taken, c.wanted)
	}
	h.broken = nil
	h.takeCopies(t.Context())
	if len(c.wanted) != 1 {
		t.Error("the store has more")
	}
	h.takeCopies(t.Context())
	if !slices.Equal(h.taken, mine[1:]) || !slices.Equal(h.read, []string{"c", "c", "cmore"}) || len(c.wanted) > 0 {
		t.Errorf("%v taken over, want %v; read %v, wanted %v", h.taken, mine[1:], h.read, c.wanted)
	}
	h.takeCopies(t.Context())
	if len(h.read) != 3 {
		t.Errorf("read again: %v", h.read)
	}
	h.broken = errors.New("no quorum")
	c.gained(&before, h.table, "a", nil, time.Now().Add(-copiesWanted))
	if h.takeCopies(t.Context()); len(c.wanted) > 0 {
		t.Errorf("wanted for ever: %v", c.wanted)
	}
	// Buckets that come while copies of their host are wanted add to them.
	c.gained(&before, h.table, "a", nil, time.Now())
	n := len(c.wanted["c"].buckets)
	other := before
	other.Owner[h.mapping.Locate(mine[0]).Bucket] = 1
	if c.gained(&other, h.table, "a", nil, time.Now()); len(c.wanted["c"].buckets) != n+1 {
		t.Errorf("%d buckets, before %d", len(c.wanted["c"].buckets), n)
	}
}
