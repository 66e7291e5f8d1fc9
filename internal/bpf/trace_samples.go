// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"os"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"

	"sockeye/internal/bpf/load"
)

// TraceReader reads samples.
type TraceReader struct {
	trace *Trace
	ring  *ringbuf.Reader
	lost  uint64 // lost samples at the start
}

// Samples makes the program emit a sample for each message that ends, through a ring buffer of a size in bytes: a
// power of two, at least a page. The error is a *load.BufferError for an invalid size. There is one reader at a time: a
// new one replaces it.
func (t *Trace) Samples(bytes int) (_ *TraceReader, err error) {
	m, err := load.NewRing(t.inner["rings"], bytes)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	ring, err := ringbuf.NewReader(m)
	if err != nil {
		return nil, fmt.Errorf("open ring buffer: %w", err)
	}
	r := &TraceReader{trace: t, ring: ring}
	counts, err := t.counts()
	if err == nil {
		r.lost = counts.Lost
		err = t.maps["rings"].Put(uint32(0), uint32(m.FD()))
	}
	if err == nil {
		err = t.setState(func(s *TraceState) { s.Samples = 1 })
	}
	if err != nil {
		ring.Close()
		return nil, fmt.Errorf("install ring buffer: %w", err)
	}
	return r, nil
}

// samplesEvery is the polling interval: the program wakes the reader only when the buffer fills up.
const samplesEvery = 50 * time.Millisecond

// Read waits for a sample. The error is os.ErrDeadlineExceeded at the deadline, and os.ErrClosed after Close.
func (r *TraceReader) Read(deadline time.Time) (*TraceSample, error) {
	var (
		record ringbuf.Record
		err    error
	)
	for {
		look := time.Now().Add(samplesEvery)
		last := !deadline.IsZero() && deadline.Before(look)
		if last {
			look = deadline
		}
		r.ring.SetDeadline(look)
		record, err = r.ring.Read()
		if last || !errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	var s TraceSample
	const size = int(unsafe.Sizeof(s))
	if len(record.RawSample) < size {
		return nil, fmt.Errorf("read sample: %d bytes, want %d", len(record.RawSample), size)
	}
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&s)), size), record.RawSample)
	return &s, nil
}

// Lost returns the number of samples that were lost because the buffer was full.
func (r *TraceReader) Lost() (uint64, error) {
	counts, err := r.trace.counts()
	if err != nil {
		return 0, err
	}
	return counts.Lost - r.lost, nil
}

// Close stops the samples.
func (r *TraceReader) Close() error {
	return errors.Join(r.trace.endSamples(), r.ring.Close())
}

// endSamples makes the program emit no more samples.
func (t *Trace) endSamples() error {
	err := t.maps["rings"].Delete(uint32(0))
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		err = nil
	}
	return errors.Join(err, t.setState(func(s *TraceState) { s.Samples = 0 }))
}
