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

func (k *keeping) CopyTemplates(wanted func(netip.Addr) (since time.Time, wanted bool), most int) (map[netip.Addr][]byte, error) {
	all := make(map[netip.Addr][]byte)
	for device, at := range k.learned {
		if since, is := wanted(device); is && !at.Before(since) && len(all) < most {
			all[device] = []byte{1}
		}
	}
	return all, nil
}

func (e *exchange) RenewCopies(context.Context) (number int64, err error) { return e.number, e.broken }

func (e *exchange) CopyTemplates(_ context.Context, number int64, templates map[netip.Addr][]byte) error {
	if e.broken == nil && number == e.number {
		e.copied = slices.SortedFunc(maps.Keys(templates), netip.Addr.Compare)
	}
	return e.broken
}

func (e *exchange) Copies(_ context.Context, host string, take func(map[netip.Addr][]byte)) error {
	e.read = append(e.read, host)
	if e.broken == nil {
		take(maps.Clone(e.copies[host]))
		take(map[netip.Addr][]byte{})
	}
	return e.broken
}

// TestCopyTemplates is that a host copies the templates of its devices, and again those that change, not too often, and all of them when the
// store has lost them.
func TestCopyTemplates(t *testing.T) {
	h := newLateHost(t, 1)
	mine := h.devices["a"]
	expect := func(what string, want ...netip.Addr) {
		t.Helper()
		h.copyTemplates(t.Context())
		if !slices.Equal(h.copied, want) {
			t.Errorf("%s: %v copied, want %v", what, h.copied, want)
		}
		h.copied = nil
	}
	expect("a store without copies")
	h.number = 1
	h.broken = errors.New("no quorum")
	expect("store out of order")
	if problems := h.allProblems(); len(problems) != 1 || !strings.Contains(problems[0], "no quorum") {
		t.Errorf("problems: %q", problems)
	}
	h.broken = nil
	expect("pause after the failure")
	h.participation.copies.retry = time.Time{}
	expect("all", mine...)
	if problems := h.allProblems(); len(problems) > 0 {
		t.Errorf("problems: %q", problems)
	}
	expect("the same templates")
	h.learned[mine[0]], h.learned[h.devices["b"][0]] = time.Now().Add(time.Second), time.Now().Add(time.Second)
	expect("too soon")
	for want := leastCopyPause; want <= 4*mostCopyPause; want *= 2 {
		last := h.participation.copies.of[mine[0]]
		if last.pause != min(want, mostCopyPause) {
			t.Errorf("pause %v, want %v", last.pause, want)
		}
		h.participation.copies.of[mine[0]] = copied{time.Now().Add(-last.pause), last.pause}
		expect("a new template", mine[0])
	}
	h.number = 2
	expect("another number", mine...)
	h.table.Owner[h.mapping.Locate(mine[1]).Bucket] = 1
	h.number = 3
	expect("a device that has left", mine[0])
	h.state.Connected, h.number = false, 4
	expect("no connection")
}

// TestTakeCopies is that a host reads the copies of hosts whose devices have come without preparation, until the store answers, and takes over
// those of its own devices.
func TestTakeCopies(t *testing.T) {
	h := newLateHost(t, 2)
	mine := h.devices["a"]
	all := make(map[netip.Addr][]byte)
	for device := range h.learned {
		all[device] = []byte{1}
	}
	h.exchange.copies = map[string]map[netip.Addr][]byte{"c": all}
	// Host c had all devices.
	before := *h.table
	before.Hosts = []table.Host{{Name: "a", Weight: 1}, {Name: "c", Weight: 1}}
	for b := range before.Owner {
		before.Owner[b], before.Next[b] = 1, table.None
	}
	prepared := before
	for b := range prepared.Next {
		prepared.Next[b] = 0
	}
	c := &h.participation.copies
	for what, from := range map[string]*table.Table{"no table": nil, "the same table": h.table, "a prepared move": &prepared} {
		if c.gained(from, h.table, "a", time.Now()); len(c.wanted) > 0 || len(c.due) > 0 {
			t.Errorf("%s: %v", what, c.wanted)
		}
	}
	c.gained(&before, h.table, "a", time.Now())
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
	slices.SortFunc(h.taken, netip.Addr.Compare)
	if !slices.Equal(h.taken, mine) || !slices.Equal(h.read, []string{"c", "c"}) || len(c.wanted) > 0 {
		t.Errorf("%v taken over, want %v; read %v, wanted %v", h.taken, mine, h.read, c.wanted)
	}
	h.takeCopies(t.Context())
	if len(h.read) != 2 {
		t.Errorf("read again: %v", h.read)
	}
	h.broken = errors.New("no quorum")
	c.gained(&before, h.table, "a", time.Now().Add(-copiesWanted))
	if h.takeCopies(t.Context()); len(c.wanted) > 0 {
		t.Errorf("wanted for ever: %v", c.wanted)
	}
}
