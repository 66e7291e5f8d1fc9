// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/domain"
	"sockeye/internal/events"
	"sockeye/internal/fault"
)

const (
	// eventsDir is the directory of the events in the state directory.
	eventsDir = "events"
	// mostEvents is the maximum of the parameter last.
	mostEvents = 100_000
	// eventBatch is the number of old events that are read at once.
	eventBatch = 500
	// mostEventReaders is the number of requests that may read old events at the same time, which costs CPU time.
	mostEventReaders = 2
)

// eventReaders has a token for each request that reads old events.
var eventReaders = make(chan struct{}, mostEventReaders)

// eventQuery selects events. An empty field selects all.
type eventQuery struct {
	since           time.Time
	service, device string
	kinds           []string // names, or prefixes of names up to an underscore
	slot            *int
	last            int // number of old events; 0: all
	follow          bool
}

// tail keeps the last n events.
type tail struct {
	n    int
	list []api.Event
}

// last returns the events, the oldest one first.
func (t *tail) last() []api.Event { return t.list[max(0, len(t.list)-t.n):] }

// streamEvents sends the recorded events of a query, and with follow those that are added until the client disconnects.
func (a *Agent) streamEvents(w http.ResponseWriter, r *http.Request) error {
	q, err := parseEventQuery(r.URL.Query())
	if err != nil {
		return err
	}
	reader, err := a.events.Read(q.since)
	if err != nil {
		return err
	}
	defer reader.Close()
	s, stop, err := domain.NewStream(w)
	if err != nil {
		return err
	}
	defer stop()
	for more := true; more; {
		// A client that does not read must not keep others from reading: nothing is written inside readOld.
		kept, most := tail{n: q.last}, 0
		if q.last == 0 {
			kept.n, most = eventBatch, eventBatch
		}
		more, err = readOld(r.Context(), reader, func(e *api.Event) bool {
			if q.selects(e) {
				kept.add(*e)
			}
			return most == 0 || len(kept.list) < most
		})
		if err != nil {
			return err
		}
		for _, e := range kept.last() {
			if s.Line(e) != nil {
				return nil // the client has disconnected
			}
		}
	}
	for q.follow {
		e, err := reader.Next(r.Context(), true)
		if errors.Is(err, io.EOF) || errors.Is(err, context.Canceled) {
			return nil // the agent exits, or the client has disconnected
		}
		if err != nil {
			return err
		}
		if q.selects(&e) && s.Line(e) != nil {
			return nil
		}
	}
	return nil
}

func parseEventQuery(q url.Values) (e eventQuery, err error) {
	if text := q.Get("since"); text != "" {
		if e.since, err = time.Parse(time.RFC3339Nano, text); err != nil {
			return e, fault.Usage(fmt.Errorf("since is %q", text), "a time, as in 2026-01-02T15:04:05Z")
		}
	}
	if text := q.Get("slot"); text != "" {
		slot, err := strconv.Atoi(text)
		if err != nil || slot < 0 {
			return e, fault.Usage(fmt.Errorf("slot is %q", text), "a number of a slot")
		}
		e.slot = &slot
	}
	if text := q.Get("last"); text != "" {
		if e.last, err = strconv.Atoi(text); err != nil || e.last < 1 || e.last > mostEvents {
			return e, fault.Usage(fmt.Errorf("last is %q", text), fmt.Sprintf("1 to %d", mostEvents))
		}
	}
	e.service, e.device, e.kinds, e.follow = q.Get("service"), q.Get("device"), q["kind"], q.Get("follow") != ""
	return e, nil
}

// selects reports whether an event is among those of the query. Events about missing events are, at any time of the query.
func (q *eventQuery) selects(e *api.Event) bool {
	if e.Time.Before(q.since) {
		return false
	}
	return e.Kind == api.EventsMissing ||
		(q.service == "" || e.Service == q.service) &&
			(q.device == "" || e.Device == q.device || e.Address == q.device) &&
			(q.slot == nil || e.Slot != nil && *e.Slot == *q.slot) &&
			(len(q.kinds) == 0 || slices.ContainsFunc(q.kinds, func(kind string) bool {
				return e.Kind == kind || strings.HasPrefix(e.Kind, kind+"_")
			}))
}

// lastEvents returns the last n events that each of the selections selects, the oldest one first. It reads the newest
// segment first, and no more segments than it needs.
func (a *Agent) lastEvents(ctx context.Context, n int, selections ...func(*api.Event) bool) ([][]api.Event, error) {
	last := make([][]api.Event, len(selections))
	for before := uint64(math.MaxUint64); ; {
		reader, number, err := a.events.ReadBefore(before)
		if reader == nil || errors.Is(err, fs.ErrNotExist) {
			return last, nil // older segments are removed first
		}
		if err != nil {
			return last, err
		}
		kept := make([]tail, len(selections))
		_, err = readOld(ctx, reader, func(e *api.Event) bool {
			for i, selects := range selections {
				if kept[i].n = n; selects(e) {
					kept[i].add(*e)
				}
			}
			return true
		})
		reader.Close()
		enough := true
		for i := range kept {
			all := append(kept[i].last(), last[i]...)
			last[i] = all[max(0, len(all)-n):]
			enough = enough && len(last[i]) == n
		}
		if err != nil || enough {
			return last, err
		}
		before = number
	}
}

func (t *tail) add(e api.Event) {
	if t.list = append(t.list, e); len(t.list) >= 2*t.n {
		t.list = append(t.list[:0], t.list[len(t.list)-t.n:]...)
	}
}

// readOld calls f with old events until it returns false, at the end, or after an error. more is true if f returned false.
func readOld(ctx context.Context, reader *events.Reader, f func(*api.Event) bool) (more bool, err error) {
	select {
	case eventReaders <- struct{}{}:
		defer func() { <-eventReaders }()
	case <-ctx.Done():
		return false, ctx.Err()
	}
	for {
		e, err := reader.Next(ctx, false)
		if errors.Is(err, io.EOF) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		if !f(&e) {
			return true, nil
		}
	}
}
