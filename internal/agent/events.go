// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
)

const (
	// eventsDir is the directory of the events in the state directory.
	eventsDir = "events"
	// mostEvents is the maximum of the parameter last.
	mostEvents = 100_000
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

// streamEvents sends the recorded events of a query, and with follow those that are added until the client disconnects.
func (a *Agent) streamEvents(w http.ResponseWriter, r *http.Request) error {
	q, err := parseEventQuery(r.URL.Query())
	if err != nil {
		return err
	}
	select {
	case eventReaders <- struct{}{}:
	case <-r.Context().Done():
		return nil
	}
	reading := true
	release := func() {
		if reading {
			reading = false
			<-eventReaders
		}
	}
	defer release()
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
	var kept []api.Event // the last ones, if the query limits their number
	for {
		e, err := reader.Next(r.Context(), false)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		switch {
		case !q.selects(&e):
		case q.last > 0:
			if kept = append(kept, e); len(kept) >= 2*q.last {
				kept = append(kept[:0], kept[len(kept)-q.last:]...)
			}
		case s.Line(e) != nil:
			return nil // the client has disconnected
		}
	}
	for _, e := range kept[max(0, len(kept)-q.last):] {
		if s.Line(e) != nil {
			return nil
		}
	}
	release()
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

// lastEvents returns the last n events that each of the selections selects, the oldest one first.
func (a *Agent) lastEvents(ctx context.Context, n int, selections ...func(*api.Event) bool) ([][]api.Event, error) {
	select {
	case eventReaders <- struct{}{}:
		defer func() { <-eventReaders }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	reader, err := a.events.Read(time.Time{})
	if err != nil {
		return nil, err
	}
	defer reader.Close()
	last := make([][]api.Event, len(selections))
	for {
		e, err := reader.Next(ctx, false)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		for i, selects := range selections {
			if !selects(&e) {
				continue
			}
			if last[i] = append(last[i], e); len(last[i]) >= 2*n {
				last[i] = append(last[i][:0], last[i][len(last[i])-n:]...)
			}
		}
	}
	for i, list := range last {
		last[i] = list[max(0, len(list)-n):]
	}
	return last, nil
}
