// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/events"
)

// newRecord returns an open record of events of a size in bytes, and a logger that writes to it.
func newRecord(t *testing.T, size int64) (*events.Log, *slog.Logger) {
	t.Helper()
	record := events.New(filepath.Join(t.TempDir(), "events"), size)
	check(t, record.Open())
	t.Cleanup(record.Close)
	return record, slog.New(events.NewHandler(record, slog.DiscardHandler))
}

// TestEventReaders has more clients that do not read than may read old events at the same time: others get theirs.
func TestEventReaders(t *testing.T) {
	record, log := newRecord(t, 64_000_000)
	const all = 4000 // more than fits into the buffers of a connection
	for i := range all {
		log.Info("event", events.Key, "kind", "slot", i%4, "long", strings.Repeat("x", 3000))
	}
	a := &Agent{events: record}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := a.streamEvents(w, r); err != nil {
			t.Error(err)
		}
	}))
	defer server.Close()
	get := func(ctx context.Context, query string) io.ReadCloser {
		t.Helper()
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+query, nil)
		check(t, err)
		response, err := server.Client().Do(r)
		check(t, err)
		return response.Body
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 3 * mostEventReaders {
		_, err := get(ctx, "").Read(make([]byte, 1))
		check(t, err)
	}
	limited, end := context.WithTimeout(t.Context(), time.Minute)
	defer end()
	for query, want := range map[string]int{"": all, "?slot=1": all / 4, "?last=7": 7, "?slot=1&last=600": 600} {
		body := get(limited, query)
		text, err := io.ReadAll(body)
		check(t, err)
		check(t, body.Close())
		if n := strings.Count(string(text), "\n"); n != want {
			t.Errorf("%q: %d events, want %d", query, n, want)
		}
		if last := fmt.Sprintf(`{"id":%d,`, all); !strings.Contains(query, "slot") && !strings.Contains(string(text), last) {
			t.Errorf("%q lacks the last event", query)
		}
	}
	last, err := a.lastEvents(limited, 3, func(e *api.Event) bool { return *e.Slot == 2 }, func(*api.Event) bool { return false })
	if err != nil || len(last[0]) != 3 || last[0][2].ID != all-1 || len(last[1]) != 0 {
		t.Errorf("last events %v, %v", last, err)
	}
}

// TestLastEvents finds the last events of several selections, which are in different segments.
func TestLastEvents(t *testing.T) {
	record, log := newRecord(t, 8*256<<10)
	const all = 1000 // in four segments
	for i := range all {
		slot := 1
		switch {
		case i%400 == 5: // in several segments
			slot = 0
		case i == 3: // in the first one
			slot = 2
		}
		log.Info("event", events.Key, "kind", "slot", slot, "long", strings.Repeat("x", 900))
	}
	ofSlot := func(slot int) func(*api.Event) bool {
		return func(e *api.Event) bool { return *e.Slot == slot }
	}
	last, err := (&Agent{events: record}).lastEvents(t.Context(), 2, ofSlot(0), ofSlot(1), ofSlot(2), ofSlot(3))
	check(t, err)
	for slot, want := range [][]uint64{{406, 806}, {all - 1, all}, {4}, nil} {
		var ids []uint64
		for _, e := range last[slot] {
			ids = append(ids, e.ID)
		}
		if !slices.Equal(ids, want) {
			t.Errorf("slot %d: events %d, want %d", slot, ids, want)
		}
	}
}
