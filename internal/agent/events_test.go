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
	"strings"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/events"
)

// TestEventReaders has more clients that do not read than may read old events at the same time: others get theirs.
func TestEventReaders(t *testing.T) {
	record := events.New(filepath.Join(t.TempDir(), "events"), 64_000_000)
	check(t, record.Open())
	t.Cleanup(record.Close)
	log := slog.New(events.NewHandler(record, slog.DiscardHandler))
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
