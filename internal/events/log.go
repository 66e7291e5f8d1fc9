// SPDX-License-Identifier: Apache-2.0

// Package events keeps the events of the host in a bounded set of files: which member took which slot, which device
// moved, which policy was applied. Log records are the only source of events ([Handler]), so that the journal and the files
// agree.
//
// The files are segments of JSON lines. A segment is never changed after the next one exists, and the oldest one is
// removed when there are too many. Readers follow the segments with descriptors of their own ([Reader]), so that a slow
// client costs the agent no memory.
package events

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/owned"
	"sockeye/internal/statedir"
)

const (
	// segments is the number of files that share the size limit.
	segments = 8
	suffix   = ".jsonl"
	// maxLine is the maximum length of a line in bytes. Longer texts are cut.
	maxLine = 8 << 10

	// Events of one kind that are recorded: sustained rate per second, and burst.
	kindRate, kindBurst = 50, 5000
	// suppressedInterval is the time between two counts of suppressed events.
	suppressedInterval = 10 * time.Second
	// retryInterval is the time between two attempts to open the files.
	retryInterval = 10 * time.Second
	// spaceInterval is the time between two readings of the free space.
	spaceInterval = time.Second
	// maxEarly is the number of events that wait for Open.
	maxEarly = 1000
)

// Log records events in a directory.
type Log struct {
	dir string

	mu       sync.Mutex
	limit    int64 // bytes of one segment
	file     *os.File
	size     int64
	numbers  []uint64    // segments, the oldest one first; the last one is open in file
	id       uint64      // of the next event
	early    []api.Event // added before Open
	closed   bool
	changed  chan struct{} // closed and replaced when an event is added
	budgets  map[string]*budget
	flush    *time.Timer
	next     slog.Handler // also gets the counts of suppressed events; nil for none
	failed   time.Time    // of the last attempt to open the files; zero: they are open, or Open was not called
	checked  time.Time    // of the last reading of the free space
	full     error        // at that time
	recorded uint64
	lost     uint64
	problem  error
}

// budget limits the events of a kind.
type budget struct {
	tokens     float64
	at         time.Time
	suppressed uint64
	since      time.Time // of the first suppressed event
}

// New returns a log in a directory. limit is the size of all files in bytes. The log keeps up to maxEarly events until
// Open.
func New(dir string, limit int64) *Log {
	return &Log{dir: dir, limit: limit / segments, id: 1, changed: make(chan struct{}), budgets: make(map[string]*budget)}
}

// Open creates the directory where it is missing, and opens the files. A line that a killed agent has left incomplete is
// damaged; events continue on the next line. If Open fails, the log tries again every retryInterval when there are events.
func (l *Log) Open() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.open()
	if err != nil {
		l.failed, l.problem = time.Now(), err
	}
	return err
}

func (l *Log) path(number uint64) string {
	return filepath.Join(l.dir, strconv.FormatUint(number, 10)+suffix)
}

// Resize changes the size of all files in bytes. Smaller files are in force after the next rotations.
func (l *Log) Resize(limit int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.limit = limit / segments
}

// Close closes the log. Readers end.
func (l *Log) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.countSuppressed(time.Now())
	l.closed = true
	if l.flush != nil {
		l.flush.Stop()
	}
	if l.file != nil {
		l.file.Close()
	}
	close(l.changed)
}

// add adds an event, or counts the event and returns false if there are too many of its kind.
func (l *Log) add(e api.Event) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return true
	}
	if !l.admit(e.Kind, e.Time) {
		if l.flush == nil {
			l.flush = time.AfterFunc(suppressedInterval, func() {
				l.mu.Lock()
				defer l.mu.Unlock()
				l.flush = nil
				if !l.closed {
					l.countSuppressed(time.Now())
				}
			})
		}
		return false
	}
	if l.file == nil && !l.failed.IsZero() && time.Since(l.failed) > retryInterval {
		if l.failed = time.Now(); l.open() == nil {
			l.problem = nil
		}
	}
	switch {
	case l.file != nil:
		l.write(e)
	case len(l.early) < maxEarly:
		l.early = append(l.early, e)
	default:
		l.lost++
	}
	return true
}

// open is Open for a caller that holds l.mu.
func (l *Log) open() error {
	if err := owned.Make(l.dir, 0o700); err != nil {
		return fmt.Errorf("open events: %w", err)
	}
	numbers, err := list(l.dir)
	if err != nil {
		return err
	}
	l.numbers = numbers
	for _, n := range slices.Backward(numbers) {
		if id := lastID(l.path(n)); id > 0 {
			l.id = id + 1
			break
		}
	}
	if len(numbers) == 0 {
		err = l.rotate()
	} else {
		l.prune()
		err = l.reopen(numbers[len(numbers)-1])
	}
	if err != nil {
		return err
	}
	l.failed = time.Time{}
	for _, e := range l.early {
		l.write(e)
	}
	l.early = nil
	return nil
}

// list returns the numbers of the segments of a directory, in ascending order.
func list(dir string) ([]uint64, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("open events: %w", err)
	}
	var numbers []uint64
	for _, e := range entries {
		text, ok := strings.CutSuffix(e.Name(), suffix)
		n, err := strconv.ParseUint(text, 10, 63)
		if ok && err == nil && e.Type().IsRegular() {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	return numbers, nil
}

// lastID returns the ID of the last event of a segment, or 0.
func lastID(path string) uint64 {
	f, err := os.Open(path)
	if err != nil {
		return 0
	}
	defer f.Close()
	// The last two lines: the last one may be incomplete.
	info, err := f.Stat()
	if err != nil {
		return 0
	}
	from := max(0, info.Size()-3*maxLine)
	tail, err := io.ReadAll(io.NewSectionReader(f, from, 3*maxLine))
	if err != nil {
		return 0
	}
	for _, line := range slices.Backward(bytes.Split(tail, []byte{'\n'})) {
		var e api.Event
		if json.Unmarshal(line, &e) == nil && e.ID > 0 {
			return e.ID
		}
	}
	return 0
}

const openFlags = os.O_RDWR | os.O_CREATE | os.O_APPEND | unix.O_NOFOLLOW | unix.O_CLOEXEC

// reopen continues a segment of an earlier agent. The caller holds l.mu.
func (l *Log) reopen(number uint64) error {
	f, err := os.OpenFile(l.path(number), openFlags, 0o600)
	if err != nil {
		return fmt.Errorf("open events: %w", err)
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err == nil && size > 0 {
		var last [1]byte
		if _, err = f.ReadAt(last[:], size-1); err == nil && last[0] != '\n' {
			_, err = f.Write([]byte{'\n'})
			size++
		}
	}
	if err != nil {
		f.Close()
		return fmt.Errorf("open events: %w", err)
	}
	l.file, l.size = f, size
	return nil
}

// admit takes a token of a kind.
func (l *Log) admit(kind string, now time.Time) bool {
	b := l.budgets[kind]
	if b == nil {
		b = &budget{tokens: kindBurst, at: now}
		l.budgets[kind] = b
	}
	b.tokens = min(kindBurst, b.tokens+kindRate*max(0, now.Sub(b.at).Seconds()))
	b.at = now
	if b.tokens >= 1 {
		b.tokens--
		return true
	}
	if b.suppressed == 0 {
		b.since = now
	}
	b.suppressed++
	return false
}

// countSuppressed records how many events of each kind were not recorded. The caller holds l.mu.
func (l *Log) countSuppressed(now time.Time) {
	for kind, b := range l.budgets {
		if b.suppressed == 0 {
			continue
		}
		n := strconv.FormatUint(b.suppressed, 10)
		e := api.Event{Time: now, Kind: api.EventsSuppressed, Level: "warning",
			Text:    fmt.Sprintf("%s events %s were too frequent and not recorded in %s", n, kind, now.Sub(b.since).Round(time.Second)),
			Details: map[string]string{"kind": kind, "count": n}}
		b.suppressed = 0
		if l.file != nil {
			l.write(e)
		}
		if l.next != nil {
			r := slog.NewRecord(now, slog.LevelWarn, e.Text, 0)
			r.AddAttrs(slog.String(Key, e.Kind), slog.String("kind", kind), slog.String("count", n))
			_ = l.next.Handle(context.Background(), r) // logging has no place for errors
		}
	}
}

// write appends an event to the file. The caller holds l.mu.
func (l *Log) write(e api.Event) {
	e.ID = l.id
	line := encode(&e)
	if l.size > 0 && l.size+int64(len(line)) > l.limit {
		if err := l.rotate(); err != nil {
			l.lose(err)
			return
		}
	}
	if err := l.checkSpace(); err != nil {
		l.lose(err)
		return
	}
	if _, err := l.file.Write(line); err != nil {
		// A part of the line may be in the file.
		l.lose(errors.Join(err, l.file.Truncate(l.size)))
		return
	}
	l.size += int64(len(line))
	l.id++
	l.recorded++
	l.problem = nil
	close(l.changed)
	l.changed = make(chan struct{})
}

// rotate begins the next segment. The caller holds l.mu.
func (l *Log) rotate() error {
	number := uint64(1)
	if len(l.numbers) > 0 {
		number = l.numbers[len(l.numbers)-1] + 1
	}
	f, err := os.OpenFile(l.path(number), openFlags|os.O_EXCL, 0o600)
	for errors.Is(err, fs.ErrExist) { // something else has the name
		number++
		f, err = os.OpenFile(l.path(number), openFlags|os.O_EXCL, 0o600)
	}
	if err != nil {
		return fmt.Errorf("open events: %w", err)
	}
	if l.file != nil {
		l.file.Close()
	}
	l.file, l.size = f, 0
	l.numbers = append(l.numbers, number)
	l.prune()
	return nil
}

// prune removes the oldest segments. The caller holds l.mu.
func (l *Log) prune() {
	for len(l.numbers) > segments {
		// The next rotation tries again.
		if err := os.Remove(l.path(l.numbers[0])); err != nil && !errors.Is(err, fs.ErrNotExist) {
			l.problem = err
			return
		}
		l.numbers = l.numbers[1:]
	}
}

// lose counts an event that cannot be written. The first one of several is logged. The caller holds l.mu.
func (l *Log) lose(err error) {
	l.lost++
	if l.problem == nil && l.next != nil {
		r := slog.NewRecord(time.Now(), slog.LevelError, "events are not recorded", 0)
		r.AddAttrs(slog.Any("error", err))
		_ = l.next.Handle(context.Background(), r) // logging has no place for errors
	}
	l.problem = err
}

// checkSpace returns an error if the file system is nearly full. The caller holds l.mu.
func (l *Log) checkSpace() error {
	if now := time.Now(); now.Sub(l.checked) >= spaceInterval {
		l.checked, l.full = now, statedir.CheckSpace(l.file)
	}
	return l.full
}

// encode returns an event as a line of at most maxLine bytes.
func encode(e *api.Event) []byte {
	for cut := maxLine; ; cut /= 2 {
		line, err := json.Marshal(e)
		if err == nil && len(line) < maxLine {
			return append(line, '\n')
		}
		shorten(&e.Text, cut/8)
		for k, v := range e.Details {
			shorten(&v, cut/16)
			e.Details[k] = v
		}
		if cut < 64 {
			e.Details = nil
		}
	}
}

func shorten(s *string, most int) {
	if len(*s) > most {
		*s = strings.ToValidUTF8((*s)[:most], "") + "…"
	}
}

// Stats are counts since the start of the agent.
type Stats struct {
	Recorded, Lost uint64
	Bytes          int64 // of all files
	Problem        error // of the last event, if it could not be written
}

// Stats returns the counts of the log.
func (l *Log) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Stats{Recorded: l.recorded, Lost: l.lost, Problem: l.problem}
	for _, n := range l.numbers {
		if info, err := os.Lstat(l.path(n)); err == nil {
			s.Bytes += info.Size()
		}
	}
	return s
}
