// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bytes"
	"compress/flate"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"sockeye/internal/trace/measure"
)

const (
	traceSlice  = 10 * time.Second
	traceSlices = 360 // 1 hour
)

// traceHistory contains the measurements of the last hour in slices. It starts with the agent; the counts in the kernel
// may be older.
type traceHistory struct {
	mu     sync.Mutex
	last   map[*tracer]traceReading // counts at the end of the last slice
	slices []packedPeriod
	stop   chan struct{}
}

// traceReading contains the counts of a tracer since its rules came into force.
type traceReading struct {
	since  time.Time
	period measure.Period
	absent bool // the cgroup does not exist; the counts continue when it is created again
}

// packedPeriod is a compressed period: histograms are mostly zeros.
type packedPeriod struct {
	from, to time.Time
	data     []byte
}

// startOrStopHistory starts the history, or stops it if no cgroup is traced.
func (d *Domain) startOrStopHistory() {
	switch {
	case len(d.tracers) > 0 && d.history == nil:
		d.history = &traceHistory{stop: make(chan struct{})}
		go d.keepHistory(d.history)
	case len(d.tracers) == 0 && d.history != nil:
		d.history.close()
		d.history = nil
	}
}

func (d *Domain) keepHistory(h *traceHistory) {
	ticker := time.NewTicker(traceSlice)
	defer ticker.Stop()
	for {
		select {
		case <-h.stop:
			return
		case <-ticker.C:
		}
		d.mu.Lock()
		if d.history == h {
			d.sliceNow()
			for _, t := range d.tracers {
				t.setClock()
			}
		}
		d.mu.Unlock()
	}
}

// sliceNow ends the current slice, if there is a history.
func (d *Domain) sliceNow() {
	if d.history == nil {
		return
	}
	if err := d.endSlice(d.history); err != nil {
		d.log.Warn("cannot record the trace history", "error", err)
	}
}

// close stops the goroutine of the history without waiting for it, because the caller may hold the lock that the
// goroutine waits for.
func (h *traceHistory) close() { close(h.stop) }

// endSlice ends the current slice and starts the next.
func (d *Domain) endSlice(h *traceHistory) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	slice, last, err := d.sinceLast(h)
	if err != nil {
		return err
	}
	h.last = last
	packed, err := pack(slice)
	if err != nil {
		return err
	}
	if len(h.slices) == traceSlices {
		h.slices = h.slices[1:]
	}
	h.slices = append(h.slices, packed)
	return nil
}

func pack(p measure.Period) (packedPeriod, error) {
	var b bytes.Buffer
	w, err := flate.NewWriter(&b, flate.BestSpeed)
	if err == nil {
		err = json.NewEncoder(w).Encode(p)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		return packedPeriod{}, fmt.Errorf("compress history: %w", err)
	}
	return packedPeriod{p.From, p.To, bytes.Clone(b.Bytes())}, nil
}

// periodsBetween returns the measurements of the slices between two times, including the current slice. partial is true if the
// history begins after the first time.
func (d *Domain) periodsBetween(from, to time.Time) (periods []measure.Period, partial bool, err error) {
	packed, current, oldest, err := d.timeSlices()
	if err != nil || current == nil {
		return nil, false, err
	}
	for _, s := range packed {
		if s.to.After(from) && s.from.Before(to) {
			p, err := s.unpack()
			if err != nil {
				return nil, false, err
			}
			periods = append(periods, p)
		}
	}
	if current.To.After(from) && current.From.Before(to) {
		periods = append(periods, *current)
	}
	return periods, from.Before(oldest), nil
}

func (p packedPeriod) unpack() (measure.Period, error) {
	var period measure.Period
	r := flate.NewReader(bytes.NewReader(p.data))
	defer r.Close()
	data, err := io.ReadAll(r)
	if err == nil {
		err = json.Unmarshal(data, &period)
	}
	if err != nil {
		return period, fmt.Errorf("read history: %w", err)
	}
	return period, nil
}

// timeSlices returns the completed slices, the current one, and the start of the first one; nil if no cgroup is traced.
func (d *Domain) timeSlices() (ended []packedPeriod, current *measure.Period, oldest time.Time, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	h := d.history
	if h == nil {
		return nil, nil, oldest, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	slice, _, err := d.sinceLast(h)
	if err != nil {
		return nil, nil, oldest, err
	}
	oldest = slice.From
	if len(h.slices) > 0 {
		oldest = h.slices[0].from
	}
	return slices.Clone(h.slices), &slice, oldest, nil
}

// sinceLast returns the measurements since the end of the last slice.
func (d *Domain) sinceLast(h *traceHistory) (measure.Period, map[*tracer]traceReading, error) {
	now := time.Now()
	slice := measure.Period{From: now, To: now, Results: []measure.Result{}}
	last := make(map[*tracer]traceReading)
	for _, t := range d.tracers {
		reading, err := t.read()
		if err != nil {
			return slice, nil, err
		}
		before, known := h.last[t]
		switch {
		case reading.absent && !known:
			continue
		case reading.absent:
			reading.period.Results = before.period.Results
		case !known || !before.since.Equal(reading.since):
			before = traceReading{period: t.baseline()}
		}
		last[t] = reading
		part := measure.Diff(before.period, reading.period)
		if before.period.To.Before(slice.From) {
			slice.From = before.period.To
		}
		slice.Results = append(slice.Results, part.Results...)
	}
	return slice, last, nil
}

// baseline returns the counts before this agent.
func (t *tracer) baseline() measure.Period {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.baselinePeriod
}

// read reads the counts. Without a cgroup, the counts are empty.
func (t *tracer) read() (traceReading, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.readLocked()
}

func (t *tracer) readLocked() (traceReading, error) {
	r := traceReading{since: t.scope.Since, absent: t.trace == nil,
		period: measure.Period{From: t.scope.Since, To: time.Now(), Results: []measure.Result{}}}
	if r.absent {
		return r, nil
	}
	results, err := t.names().Results(t.trace, t.compiled.Rules)
	if err != nil {
		return r, ofTraced(t.name, err)
	}
	r.period.Results = results
	// Groups that differed only by a removed cgroup or rule have the same name now.
	r.period = measure.Merge([]measure.Period{r.period})
	return r, nil
}
