// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// Events reads the events of the member hooks.
type Events struct {
	reader *ringbuf.Reader
}

// Events opens the ring buffer. There is one reader at a time.
func (s *Steer) Events() (*Events, error) {
	reader, err := ringbuf.NewReader(s.events)
	if err != nil {
		return nil, fmt.Errorf("open event ring: %w", err)
	}
	return &Events{reader}, nil
}

// Next waits for an event. The error is os.ErrClosed after Close.
func (e *Events) Next() (Event, error) {
	var record ringbuf.Record
	err := os.ErrDeadlineExceeded
	for errors.Is(err, os.ErrDeadlineExceeded) {
		// Go 1.26 (seen with 1.26.8) sometimes misses a thread that enters a system call while the world
		// stops, for AllThreadsSyscall or the garbage collector, and then waits for the end of the system
		// call.
		e.reader.SetDeadline(time.Now().Add(time.Second))
		record, err = e.reader.Read()
	}
	if err != nil {
		return Event{}, err
	}
	if len(record.RawSample) < 16 {
		return Event{}, fmt.Errorf("read event: %d bytes, want 16", len(record.RawSample))
	}
	return Event{
		Cookie: binary.LittleEndian.Uint64(record.RawSample),
		Kind:   binary.LittleEndian.Uint32(record.RawSample[8:]),
		Pid:    binary.LittleEndian.Uint32(record.RawSample[12:]),
	}, nil
}

// ExitStatus returns how the process that closed the socket of a release event has ended. ok is false if it goes on, or if
// the kernel does not tell.
func ExitStatus(e Event) (status unix.WaitStatus, ok bool) {
	if EventKind(e.Kind) != EventRelease || e.Pid&exits == 0 {
		return 0, false
	}
	return unix.WaitStatus(e.Pid &^ exits), true
}

// Close ends Next.
func (e *Events) Close() error { return e.reader.Close() }

// LostEvents returns the number of events that were lost because the ring buffer was full.
func (s *Steer) LostEvents() (uint64, error) {
	var lost uint64
	if err := s.lost.Lookup(uint32(0), &lost); err != nil {
		return 0, fmt.Errorf("read lost events: %w", err)
	}
	return lost, nil
}
