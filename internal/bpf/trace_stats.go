// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"sockeye/internal/clock"
)

// Groups returns the groups by index, without the "other" group of each rule at TraceRule.First.
func (t *Trace) Groups() (map[uint32]TraceGroup, error) {
	groups := make(map[uint32]TraceGroup)
	var (
		key   TraceGroup
		index uint32
	)
	entries := t.maps["groups"].Iterate()
	for entries.Next(&key, &index) {
		groups[index] = key
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read groups: %w", err)
	}
	return groups, nil
}

// Stats returns the counts of a group, summed over all CPUs.
func (t *Trace) Stats(group uint32) (*TraceStats, error) {
	var each []TraceStats
	if err := t.maps["stats"].Lookup(group, &each); err != nil {
		return nil, fmt.Errorf("read counts of group %d: %w", group, err)
	}
	sum := &each[0]
	for i := range each[1:] {
		s := &each[i+1]
		sum.Chosen += s.Chosen
		sum.Bytes += s.Bytes
		sum.Undriven += s.Undriven
		sum.Unqueued += s.Unqueued
		for k := range s.Outcome {
			sum.Outcome[k] += s.Outcome[k]
		}
		for k := range s.Stage {
			addHistogram(&sum.Stage[k], &s.Stage[k])
		}
	}
	return sum, nil
}

// Slowest returns the slowest messages of a group in each of the last TraceMinutes minutes, unsorted.
func (t *Trace) Slowest(group uint32) ([]TraceSample, error) {
	var kept TraceSlowest
	if err := t.maps["slowest"].LookupWithFlags(group, &kept, ebpf.LookupLock); err != nil {
		return nil, fmt.Errorf("read slowest messages of group %d: %w", group, err)
	}
	now := clock.Monotonic()
	var samples []TraceSample
	for i := range kept.Minute {
		m := &kept.Minute[i]
		// A minute is overwritten only when a message ends in the minute that replaces it.
		if m.Minute+uint64(TraceMinutes) <= uint64(now)>>TraceMinuteShift {
			continue
		}
		samples = append(samples, m.Sample[:min(int(m.Count), len(m.Sample))]...)
	}
	return samples, nil
}

// Memory returns the approximate memory of the maps of fixed size in bytes. A chosen connection takes 7 KiB more.
func (t *Trace) Memory() int64 {
	var sum int64
	for _, m := range t.maps {
		info, err := m.Info()
		if err != nil {
			continue
		}
		// Without the right to read it, the map is not counted.
		if bytes, ok := info.Memlock(); ok {
			sum += int64(bytes)
		}
	}
	return sum
}

// RXStats returns the receive counts of a group, summed over all CPUs. The tracing must have receive rules
// (Receives).
func (t *Trace) RXStats(group uint32) (*TraceRXStats, error) {
	m := t.maps["rx_stats"]
	var each []TraceRXStats
	if err := m.Lookup(group, &each); err != nil {
		return nil, fmt.Errorf("read what group %d received: %w", group, err)
	}
	sum := &each[0]
	for i := range each[1:] {
		s := &each[i+1]
		sum.Chosen += s.Chosen
		sum.Unstamped += s.Unstamped
		for k := range s.Outcome {
			sum.Outcome[k] += s.Outcome[k]
		}
		for k := range s.Stage {
			addHistogram((*TraceHistogram)(&sum.Stage[k]), (*TraceHistogram)(&s.Stage[k]))
		}
	}
	return sum, nil
}

func addHistogram(to, from *TraceHistogram) {
	to.Sum += from.Sum
	to.Max = max(to.Max, from.Max)
	for i, n := range from.Bucket {
		to.Bucket[i] += n
	}
}

// TraceWaiting describes the samples of a group that wait for the application or for a driver.
type TraceWaiting struct {
	Count  uint64
	Oldest time.Duration // age of the oldest
}

// RXWaiting returns the chosen received data that is not read yet, by group.
func (t *Trace) RXWaiting() (map[uint32]TraceWaiting, error) {
	return readWaiting[traceRXTraceWaitingKey](t.maps["waiting"], func(w *traceRXTraceWaiting) (group uint32, since uint64) {
		return w.Group, w.Socket
	})
}

// Sending returns the chosen datagrams that no driver has got yet, by group.
func (t *Trace) Sending() (map[uint32]TraceWaiting, error) {
	return readWaiting[uint64](t.maps["sending"], func(d *traceUDPTraceSending) (group uint32, since uint64) {
		return d.Group, d.Sent
	})
}

// readWaiting reads a map of samples; nil is empty.
func readWaiting[K, V any](m *ebpf.Map, of func(*V) (group uint32, since uint64)) (map[uint32]TraceWaiting, error) {
	waiting := make(map[uint32]TraceWaiting)
	if m == nil {
		return waiting, nil
	}
	const batch = 512
	var (
		cursor ebpf.MapBatchCursor
		keys   = make([]K, batch)
		values = make([]V, batch)
	)
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, fmt.Errorf("read samples that wait: %w", err)
		}
		now := clock.Monotonic()
		for i := range values[:n] {
			group, since := of(&values[i])
			w := waiting[group]
			w.Count++
			w.Oldest = max(w.Oldest, now-time.Duration(since))
			waiting[group] = w
		}
		if err != nil {
			return waiting, nil
		}
	}
}
