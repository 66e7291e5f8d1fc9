// SPDX-License-Identifier: Apache-2.0

package events

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/fault"
	"sockeye/internal/format"
)

// Reader reads the events of a log in their order.
type Reader struct {
	log     *Log
	file    *os.File
	number  uint64
	lines   *bufio.Reader
	partial []byte // of the current line
	expect  uint64 // ID of the next event; 0: unknown
	pending *api.Event
	one     bool // segment is read, not the later ones
}

// Read returns a reader that begins with the oldest segment that can contain events since a time.
func (l *Log) Read(since time.Time) (*Reader, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := &Reader{log: l}
	for i, n := range l.numbers {
		info, err := os.Lstat(l.path(n))
		last := i == len(l.numbers)-1
		if !last && (err != nil || info.ModTime().Before(since)) {
			continue
		}
		return r, r.open(n)
	}
	return r, &fault.Error{Err: errors.New("the agent cannot record events"), Hint: "the agent's log says why, as in journalctl -u sockeye", Code: fault.CodeFailed}
}

// ReadBefore returns a reader of the newest segment whose number is below another one, and the number of the segment. It
// returns nil if there is none. Next does not continue with later segments.
func (l *Log) ReadBefore(number uint64) (*Reader, uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range slices.Backward(l.numbers) {
		if n < number {
			r := &Reader{log: l, one: true}
			return r, n, r.open(n)
		}
	}
	return nil, 0, nil
}

// Next returns the next event. At the end it returns io.EOF, or waits for an event if wait is set. An event of kind
// [api.EventsMissing] stands for events that were removed before they were read, and for damaged lines.
func (r *Reader) Next(ctx context.Context, wait bool) (api.Event, error) {
	if r.pending != nil {
		e := *r.pending
		r.pending = nil
		return e, nil
	}
	e, err := r.read(ctx, wait)
	if err != nil {
		return api.Event{}, err
	}
	missing := uint64(0)
	if r.expect > 0 && e.ID > r.expect {
		missing = e.ID - r.expect
	}
	r.expect = e.ID + 1
	if missing == 0 {
		return e, nil
	}
	r.pending = &e
	return api.Event{Time: e.Time, Kind: api.EventsMissing, Level: "warning",
		Text:    format.Count(missing, "event is missing: it was removed before it was read, or is", "events are missing: they were removed before they were read, or are") + " damaged",
		Details: map[string]string{"count": strconv.FormatUint(missing, 10)}}, nil
}

// read returns the next line that is an event.
func (r *Reader) read(ctx context.Context, wait bool) (api.Event, error) {
	for {
		// A segment is complete if there is a later one when its end is read.
		r.log.mu.Lock()
		changed, closed, next := r.log.changed, r.log.closed, uint64(0)
		if i := slices.IndexFunc(r.log.numbers, func(n uint64) bool { return n > r.number }); i >= 0 {
			next = r.log.numbers[i]
		}
		r.log.mu.Unlock()
		e, err := r.line()
		if err == nil {
			return e, nil
		}
		if !errors.Is(err, io.EOF) {
			return api.Event{}, fmt.Errorf("read events: %w", err)
		}
		if r.one {
			return api.Event{}, io.EOF
		}
		if next > 0 {
			r.number = next
			if err := r.open(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return api.Event{}, err
			}
			continue
		}
		if closed || !wait {
			return api.Event{}, io.EOF
		}
		select {
		case <-ctx.Done():
			return api.Event{}, ctx.Err()
		case <-changed:
		}
	}
}

func (r *Reader) open(number uint64) error {
	f, err := os.Open(r.log.path(number))
	if err != nil {
		return fmt.Errorf("read events: %w", err)
	}
	r.Close()
	r.file, r.number, r.lines, r.partial = f, number, bufio.NewReaderSize(f, 64<<10), nil
	return nil
}

// Close closes the file.
func (r *Reader) Close() {
	if r.file != nil {
		r.file.Close()
		r.file = nil
	}
}

// line reads lines until one is an event. It keeps an incomplete line for the next call.
func (r *Reader) line() (api.Event, error) {
	for {
		if r.file == nil {
			return api.Event{}, io.EOF
		}
		part, err := r.lines.ReadSlice('\n')
		// A line that is longer than those of the log is damaged, and only its end matters.
		if len(r.partial) < 2*maxLine {
			r.partial = append(r.partial, part...)
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if err != nil {
			return api.Event{}, err
		}
		var e api.Event
		err = json.Unmarshal(r.partial, &e)
		r.partial = r.partial[:0]
		if err == nil && e.ID > 0 {
			return e, nil
		}
	}
}
