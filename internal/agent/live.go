// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
)

const (
	// frameInterval is the time between two frames while somebody watches.
	frameInterval = time.Second
	// recordInterval is the time between two frames that are recorded.
	recordInterval = 10 * time.Second
	// mostWatchers is the number of live views at the same time.
	mostWatchers = 64
)

// liveView makes the frames for live views. One frame at a time is made and encoded, for all that watch.
type liveView struct {
	fill     func(*api.Frame)
	recorded *recording
	log      *slog.Logger

	mu       sync.Mutex
	watchers int
	frame    *api.Frame    // the newest one; nobody changes it
	line     []byte        // the newest frame, encoded
	changed  chan struct{} // closed and replaced with each frame
	wake     chan struct{} // a first watcher
}

func newLiveView(fill func(*api.Frame), recorded *recording, log *slog.Logger) *liveView {
	return &liveView{fill: fill, recorded: recorded, log: log, changed: make(chan struct{}), wake: make(chan struct{}, 1)}
}

// run makes frames until ctx is done.
func (v *liveView) run(ctx context.Context) {
	var last, recorded time.Time
	tick := time.NewTicker(frameInterval)
	defer tick.Stop()
	defer v.recorded.close()
	failed := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-v.wake:
		case <-tick.C:
		}
		now := time.Now()
		v.mu.Lock()
		watched := v.watchers > 0
		v.mu.Unlock()
		due := now.Sub(recorded) >= recordInterval-frameInterval/2
		if !watched && !due {
			continue
		}
		frame := api.Frame{Time: now, Services: []api.LiveService{}, Groups: []api.LiveGroup{}, Stuck: []api.LiveSocket{}}
		if !last.IsZero() {
			frame.Seconds = now.Sub(last).Seconds()
		}
		v.fill(&frame)
		last = now
		if due {
			recorded = now
			err := v.recorded.add(&frame)
			if err != nil && !failed {
				v.log.Warn("frames for sockeye top --replay are not recorded", "error", err) // a full disk
			}
			failed = err != nil
		}
		if !watched {
			continue
		}
		line, err := json.Marshal(&frame)
		if err != nil {
			continue // no field can fail
		}
		v.mu.Lock()
		v.frame, v.line = &frame, append(line, '\n')
		close(v.changed)
		v.changed = make(chan struct{})
		v.mu.Unlock()
	}
}

// stream sends each frame as a line until the client disconnects, or the recorded frames. A slow client skips frames.
func (v *liveView) stream(w http.ResponseWriter, r *http.Request) error {
	if text := r.URL.Query().Get("replay"); text != "" {
		back, err := time.ParseDuration(text)
		if err != nil || back <= 0 {
			return fault.Usage(fmt.Errorf("replay is %q", text), "a duration, as in 1h")
		}
		return v.replay(w, time.Now().Add(-back))
	}
	if !v.admit() {
		return fault.Conflict(fmt.Errorf("%d live views are open", mostWatchers), "close other ones")
	}
	defer v.removeWatcher()
	s, stop, err := domain.NewStream(w)
	if err != nil {
		return err
	}
	defer stop()
	for {
		line, changed := v.newest()
		if line != nil {
			if s.Line(json.RawMessage(line)) != nil || s.Flush() != nil {
				return nil // the client has disconnected
			}
		}
		select {
		case <-r.Context().Done():
			return nil
		case <-changed:
		}
	}
}

// newest returns the newest frame and a channel that is closed with the next one.
func (v *liveView) newest() ([]byte, <-chan struct{}) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.line, v.changed
}

// admit counts a watcher until leave, unless there are too many.
func (v *liveView) admit() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.watchers == mostWatchers {
		return false
	}
	if v.watchers++; v.watchers == 1 {
		v.frame, v.line = nil, nil // old
		select {
		case v.wake <- struct{}{}:
		default:
		}
	}
	return true
}

func (v *liveView) removeWatcher() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.watchers--
}

// replay sends the recorded frames since a time.
func (v *liveView) replay(w http.ResponseWriter, since time.Time) error {
	s, stop, err := domain.NewStream(w)
	if err != nil {
		return err
	}
	defer stop()
	return v.recorded.each(since, func(frame []byte) bool { return s.Line(json.RawMessage(frame)) == nil })
}

// fillFrame fills a frame with the state of all domains.
func (a *Agent) fillFrame(frame *api.Frame) {
	frame.Problem, _ = a.policyProblem()
	for _, d := range a.domains {
		if err := d.Frame(frame); err != nil && frame.Problem == "" {
			frame.Problem = fault.Message(err)
		}
	}
	frame.SetReaderLags()
}
