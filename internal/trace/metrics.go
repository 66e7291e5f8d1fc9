// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"sockeye/internal/format"
	"sockeye/internal/histogram"
	"sockeye/internal/trace/measure"
)

// Counters start at 0 when a trace rule of the cgroup changes. Labels that a rule does not group by are empty.
var (
	traceLabels       = []string{"cgroup", "rule", "protocol", "remote", "port", "service", "group_cgroup", "tune_rule", "arm"}
	descTraceAttached = prometheus.NewDesc("sockeye_trace_attached", "1 while the cgroup is traced.", []string{"cgroup"}, nil)
	descTraceChosen   = prometheus.NewDesc("sockeye_trace_chosen_total",
		"Messages sent that were chosen to be traced.", traceLabels, nil)
	descTraceMessages = prometheus.NewDesc("sockeye_trace_messages_total",
		"Chosen messages by outcome; the rest is in flight.", append(slices.Clone(traceLabels), "outcome"), nil)
	descTraceInFlight = prometheus.NewDesc("sockeye_trace_in_flight",
		"Chosen messages in flight.", traceLabels, nil)
	descTraceBytes = prometheus.NewDesc("sockeye_trace_acked_bytes_total",
		"Bytes of the traced messages that were acknowledged.", traceLabels, nil)
	descTraceReceived = prometheus.NewDesc("sockeye_trace_received_total",
		"Chosen received segments and datagrams by outcome; the rest waits to be read.", append(slices.Clone(traceLabels), "outcome"), nil)
	descTraceWaiting = prometheus.NewDesc("sockeye_trace_reader_waiting",
		"Chosen segments and datagrams that wait in a socket.", traceLabels, nil)
	descTraceOldest = prometheus.NewDesc("sockeye_trace_reader_oldest_seconds",
		"Age of the oldest chosen segment or datagram that waits in a socket.", traceLabels, nil)
	descTraceStage = prometheus.NewDesc("sockeye_trace_stage_seconds",
		"Time of traced messages in a stage.", append(slices.Clone(traceLabels), "stage"), nil)
)

// traceBounds are the bounds of the classic histograms in nanoseconds: powers of two from 1 µs to 69 s, which are
// also bounds of the programs' buckets.
var traceBounds = func() (bounds []uint64) {
	for b := uint64(1 << 10); b <= 1<<36; b *= 2 {
		bounds = append(bounds, b)
	}
	return bounds
}()

// traceSchema is the schema of the native histograms: 8 buckets per power of two.
const traceSchema = 3

// stageMetric is a histogram with classic and native buckets.
type stageMetric struct {
	labels    []string
	histogram *measure.Histogram
}

func (m stageMetric) Desc() *prometheus.Desc { return descTraceStage }

func (m stageMetric) Write(out *dto.Metric) error {
	h := m.histogram
	out.Label = prometheus.MakeLabelPairs(descTraceStage, m.labels)
	sum := time.Duration(h.Sum).Seconds()
	native := &dto.Histogram{SampleCount: &h.Count, SampleSum: &sum}
	for i, n := range h.Cumulative(traceBounds...) {
		bound := time.Duration(traceBounds[i]).Seconds()
		native.Bucket = append(native.Bucket, &dto.Bucket{UpperBound: &bound, CumulativeCount: &n})
	}
	positive, zero := h.Native(traceSchema)
	schema, threshold := int32(traceSchema), histogram.NativeZero
	native.Schema, native.ZeroThreshold, native.ZeroCount = &schema, &threshold, &zero
	next, last := 0, int64(0)
	for _, index := range slices.Sorted(maps.Keys(positive)) {
		if len(native.PositiveSpan) == 0 || index != next {
			offset := int32(index - next)
			native.PositiveSpan = append(native.PositiveSpan, &dto.BucketSpan{Offset: &offset, Length: new(uint32)})
		}
		*native.PositiveSpan[len(native.PositiveSpan)-1].Length++
		native.PositiveDelta = append(native.PositiveDelta, positive[index]-last)
		next, last = index+1, positive[index]
	}
	out.Histogram = native
	return nil
}

// Collect sends the metrics of all traced cgroups.
func (d *Domain) Collect(out chan<- prometheus.Metric) {
	tracers, err := d.tracersOf("")
	if err != nil {
		d.log.Error("metrics failed", "error", err)
		return
	}
	for _, t := range tracers {
		if err := t.collect(out); err != nil {
			d.log.Error("metrics failed", "cgroup", t.name, "error", err)
		}
	}
}

func (t *tracer) collect(out chan<- prometheus.Metric) error {
	t.mu.Lock()
	attached := t.trace != nil && t.trace.Attached()
	t.mu.Unlock()
	out <- prometheus.MustNewConstMetric(descTraceAttached, prometheus.GaugeValue, format.Bool(attached), t.name)
	reading, err := t.read()
	if err != nil {
		return err
	}
	for _, r := range reading.period.Results {
		labels := t.labels(r.Group)
		counter := func(desc *prometheus.Desc, v uint64, more ...string) {
			out <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(v), slices.Concat(labels, more)...)
		}
		gauge := func(desc *prometheus.Desc, v float64) {
			out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, v, labels...)
		}
		counter(descTraceChosen, r.Chosen)
		counter(descTraceBytes, r.Bytes)
		gauge(descTraceInFlight, float64(r.InFlight))
		for outcome, n := range r.Outcomes {
			counter(descTraceMessages, n, string(outcome))
		}
		if r.RXChosen > 0 {
			gauge(descTraceWaiting, float64(r.RXWaiting))
			gauge(descTraceOldest, r.RXOldest.Seconds())
		}
		for outcome, n := range r.RXOutcomes {
			counter(descTraceReceived, n, string(outcome))
		}
		for stage, h := range r.Stages {
			out <- stageMetric{slices.Concat(labels, []string{string(stage)}), h}
		}
	}
	return nil
}

func (t *tracer) labels(g measure.Group) []string {
	remote, port := "", ""
	switch {
	case g.Other:
		remote = "other"
	case g.Remote.IsValid():
		remote = g.Remote.String()
	}
	if g.Port != 0 {
		port = strconv.Itoa(int(g.Port))
	}
	return []string{t.name, g.Rule, cmp.Or(string(g.Protocol), "any"), remote, port, g.Service, g.Cgroup, g.TuneRule, g.Arm}
}
