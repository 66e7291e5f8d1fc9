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
	traceSlices = 360 // an hour
)

// traceHistory keeps what was measured in the last hour, in slices. It begins
// anew with the agent; the counts since the beginning do not.
type traceHistory struct {
	mu     sync.Mutex
	last   map[*tracer]traceReading // at the end of the last slice
	slices []packedPeriod
	stop   chan struct{}
}

// traceReading are the counts of a tracer, since its rules are in force.
type traceReading struct {
	since  time.Time
	period measure.Period
	absent bool // there is no cgroup now; its counts go on with the next
}

// packedPeriod is a period, compressed: histograms are mostly zeros.
type packedPeriod struct {
	from, to time.Time
	data     []byte
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
		return packedPeriod{}, fmt.Errorf("keep history: %w", err)
	}
	return packedPeriod{p.From, p.To, bytes.Clone(b.Bytes())}, nil
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

// recordTrace begins the history, or ends it where nothing is traced.
func (d *Domain) recordTrace() {
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

// sliceNow ends a slice, if there is a history.
func (d *Domain) sliceNow() {
	if d.history == nil {
		return
	}
	if err := d.endSlice(d.history); err != nil {
		d.log.Warn("history of trace not kept", "error", err)
	}
}

// close ends the keeping. The caller may hold the agent's lock, which the
// keeper may wait for: it is not waited for.
func (h *traceHistory) close() { close(h.stop) }

// endSlice ends a slice, and begins the next.
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

// sinceLast is what was measured since the last slice ended.
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
			before = traceReading{period: t.adopted()}
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

// adopted is what was counted before this agent began with the rules.
func (t *tracer) adopted() measure.Period {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.before
}

// read reads the counts. Without a cgroup there are none.
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
	// Groups that differed by what is gone now have one name.
	r.period = measure.Merge([]measure.Period{r.period})
	return r, nil
}

// window gives the slices of a time, the one that has not ended included.
// Partial: they do not go back that far.
func (d *Domain) window(from, to time.Time) (periods []measure.Period, partial bool, err error) {
	packed, current, oldest, err := d.remembered()
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

// remembered gives the slices that have ended, the one that has not, and when
// the first of them began; nil if nothing is traced.
func (d *Domain) remembered() (ended []packedPeriod, current *measure.Period, oldest time.Time, err error) {
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
