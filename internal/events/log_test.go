// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const megabyte = 1 << 20

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func atoi(t testing.TB, text string) int {
	t.Helper()
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Error(err)
	}
	return n
}

func openLog(t testing.TB, dir string, limit int64) *Log {
	t.Helper()
	l := New(dir, limit)
	check(t, l.Open())
	t.Cleanup(l.Close)
	return l
}

// all reads the events that a log has.
func all(t testing.TB, l *Log) (list []api.Event) {
	t.Helper()
	r, err := l.Read(time.Time{})
	check(t, err)
	defer r.Close()
	for {
		e, err := r.Next(t.Context(), false)
		if errors.Is(err, io.EOF) {
			return list
		}
		check(t, err)
		list = append(list, e)
	}
}

func event(kind string, i int) api.Event {
	return api.Event{Time: time.Unix(int64(i), 0), Kind: kind, Level: "info", Text: fmt.Sprintf("event %d", i)}
}

// TestBounded adds more events than fit, with agents that start again, and reads consecutive IDs.
func TestBounded(t *testing.T) {
	dir := t.TempDir()
	const each, agents = 4000, 5
	for a := range agents {
		l := openLog(t, dir, 256<<10)
		for i := range each {
			l.add(event("k", a*each+i))
		}
		l.Close()
	}
	l := openLog(t, dir, 256<<10)
	list := all(t, l)
	size := int64(0)
	names, err := os.ReadDir(dir)
	check(t, err)
	for _, n := range names {
		info, err := n.Info()
		check(t, err)
		size += info.Size()
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", n.Name(), info.Mode())
		}
	}
	if len(names) > segments || size > 256<<10 || size < 200<<10 {
		t.Errorf("%d files of %d bytes", len(names), size)
	}
	for i, e := range list {
		if want := uint64(agents*each - len(list) + i + 1); e.ID != want {
			t.Fatalf("event %d has ID %d, want %d", i, e.ID, want)
		}
	}
	if len(list) < 1000 {
		t.Errorf("%d events are left", len(list))
	}
	// The segments one by one, the newest first, have the same events.
	var backward []api.Event
	parts := 0
	for before := uint64(1 << 62); ; parts++ {
		r, number, err := l.ReadBefore(before)
		check(t, err)
		if r == nil {
			break
		}
		var part []api.Event
		for {
			e, err := r.Next(t.Context(), false)
			if errors.Is(err, io.EOF) {
				break
			}
			check(t, err)
			part = append(part, e)
		}
		r.Close()
		if number >= before {
			t.Fatalf("segment %d after segment %d", number, before)
		}
		backward, before = append(part, backward...), number
	}
	if parts != len(names) || len(backward) != len(list) || backward[0].ID != list[0].ID || backward[len(backward)-1].ID != list[len(list)-1].ID {
		t.Errorf("%d segments with %d events, want %d with %d", parts, len(backward), len(names), len(list))
	}
	if s := l.Stats(); s.Bytes != size || s.Recorded != 0 || s.Problem != nil {
		t.Errorf("statistics %+v, %d bytes", s, size)
	}
}

// TestDamaged reads files whose lines are incomplete, changed, or foreign.
func TestDamaged(t *testing.T) {
	dir := t.TempDir()
	l := openLog(t, dir, megabyte)
	for i := range 10 {
		l.add(event("k", i))
	}
	l.Close()
	path := filepath.Join(dir, "1"+suffix)
	data, err := os.ReadFile(path)
	check(t, err)
	lines := strings.SplitAfter(string(data), "\n")
	lines[3] = "garbage\n"
	lines[5] = strings.Repeat("x", 100<<10) + "\n"
	text := strings.Join(lines[:10], "")
	check(t, os.WriteFile(path, []byte(text[:len(text)-20]), 0o600)) // the agent was killed while it wrote
	check(t, os.Mkdir(filepath.Join(dir, "7"+suffix), 0o700))
	check(t, os.Symlink("/etc/passwd", filepath.Join(dir, "8"+suffix)))

	l = openLog(t, dir, megabyte)
	l.add(event("after", 11))
	var got []string
	for _, e := range all(t, l) {
		got = append(got, fmt.Sprintf("%d %s %s", e.ID, e.Kind, e.Details["count"]))
	}
	want := "1 k , 2 k , 3 k , 0 events_missing 1, 5 k , 0 events_missing 1, 7 k , 8 k , 9 k , 10 after "
	if text := strings.Join(got, ", "); text != want {
		t.Errorf("read  %s\nwant  %s", text, want)
	}
}

// TestFollow reads events while they are added and segments are removed. No event is read twice, and those that the
// reader was too slow for are counted.
func TestFollow(t *testing.T) {
	l := openLog(t, t.TempDir(), 64<<10)
	const count = 4000
	type result struct {
		seen, missing int
		last          uint64
	}
	results := make(chan result, 3)
	for slow := range 3 {
		r, err := l.Read(time.Time{})
		check(t, err)
		go func() {
			defer r.Close()
			var got result
			for got.last < count {
				e, err := r.Next(t.Context(), true)
				if err != nil {
					t.Error(err)
					break
				}
				var n int
				if e.Kind == api.EventsMissing {
					n = atoi(t, e.Details["count"])
					got.missing += n
					continue
				}
				if e.ID <= got.last {
					t.Errorf("event %d after %d", e.ID, got.last)
				}
				got.seen++
				got.last = e.ID
				if slow == 2 && got.seen == 10 {
					time.Sleep(200 * time.Millisecond)
				}
			}
			results <- got
		}()
	}
	for i := range count {
		l.add(event("k", i))
		if i%50 == 0 {
			time.Sleep(time.Millisecond)
		}
	}
	for range 3 {
		if got := <-results; got.seen+got.missing != count {
			t.Errorf("read %d, missing %d, want %d", got.seen, got.missing, count)
		}
	}
}

// TestFollowEnds ends readers that wait, by their context and by the end of the log.
func TestFollowEnds(t *testing.T) {
	l := openLog(t, t.TempDir(), megabyte)
	r, err := l.Read(time.Time{})
	check(t, err)
	defer r.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.Next(ctx, true); !errors.Is(err, context.Canceled) {
		t.Errorf("after cancel: %v", err)
	}
	ended := make(chan error)
	go func() {
		_, err := r.Next(t.Context(), true)
		ended <- err
	}()
	l.Close()
	if err := <-ended; !errors.Is(err, io.EOF) {
		t.Errorf("after Close: %v", err)
	}
	l.add(event("late", 1))
}

// TestSuppressed adds a flood of one kind: the burst is recorded, the rest counted, and other kinds are not affected.
func TestSuppressed(t *testing.T) {
	l := openLog(t, t.TempDir(), 8*megabyte)
	const flood = 100_000
	at := time.Unix(1000, 0)
	for range flood {
		l.add(api.Event{Time: at, Kind: "flood", Text: "x"})
	}
	l.add(api.Event{Time: at, Kind: "rare", Text: "y"})
	l.mu.Lock()
	l.countSuppressed(at.Add(suppressedInterval))
	l.mu.Unlock()
	counts := map[string]int{}
	suppressed := 0
	for _, e := range all(t, l) {
		counts[e.Kind]++
		if e.Kind == api.EventsSuppressed {
			suppressed = atoi(t, e.Details["count"])
		}
	}
	if counts["flood"] != kindBurst || counts["rare"] != 1 || counts["flood"]+suppressed != flood {
		t.Errorf("recorded %v, %d suppressed", counts, suppressed)
	}
	for i := range 100 {
		l.add(api.Event{Time: at.Add(time.Duration(i) * time.Second / kindRate), Kind: "flood", Text: "x"})
	}
	after := 0
	for _, e := range all(t, l) {
		if e.Kind == "flood" {
			after++
		}
	}
	if n := after - kindBurst; n < 98 || n > 100 {
		t.Errorf("%d of 100 events at the sustained rate are recorded", n)
	}
}

// TestFullDisk adds events on a full file system, which has space again later.
func TestFullDisk(t *testing.T) {
	dir := t.TempDir()
	check(t, unix.Mount("small", dir, "tmpfs", 0, "size=64k"))
	defer unix.Unmount(dir, unix.MNT_DETACH)
	filler := filepath.Join(dir, "filler")
	l := openLog(t, filepath.Join(dir, "events"), 8*megabyte)
	l.add(event("k", 1))
	check(t, os.WriteFile(filler, make([]byte, 32<<10), 0o600))
	for i := range 1000 {
		l.add(event("k", i))
	}
	s := l.Stats()
	if s.Lost == 0 || !errors.Is(s.Problem, unix.ENOSPC) {
		t.Fatalf("statistics on a full disk: %+v", s)
	}
	check(t, os.Remove(filler))
	l.add(event("again", 1))
	list := all(t, l)
	if last := list[len(list)-1]; last.Kind != "again" || uint64(len(list)) != l.Stats().Recorded || l.Stats().Problem != nil {
		t.Errorf("after the disk was full: %d events, the last one %+v, statistics %+v", len(list), last, l.Stats())
	}
}

// TestHandler converts log records.
func TestHandler(t *testing.T) {
	l := openLog(t, t.TempDir(), megabyte)
	var text strings.Builder
	log := slog.New(NewHandler(l, slog.NewTextHandler(&text, &slog.HandlerOptions{Level: slog.LevelWarn})))
	service := log.With("service", "telemetry")
	service.Info("member registered", Key, "member_registered", "slot", 3, "pid", 4711, "source", "rule 1")
	service.Info("member not ready", Key, "member_waiting", "slot", -1, "pid", 4712)
	service.Info("not an event", "slot", 3)
	service.Warn("not an event", "slot", 3)
	service.Debug("debug", Key, "debug")
	log.Warn("no kind", "slot", 1, "error", "why")
	log.Error("device split", Key, "device_split", "device", "192.0.2.1", "error", errors.New("why"))
	service.WithGroup("g").Info("grouped", Key, "grouped")
	var got []string
	for _, e := range all(t, l) {
		e.Time, e.ID = time.Time{}, 0
		line, err := json.Marshal(e)
		check(t, err)
		got = append(got, strings.ReplaceAll(string(line), `"time":"0001-01-01T00:00:00Z",`, ""))
	}
	want := []string{
		`{"id":0,"kind":"member_registered","level":"info","text":"member registered","service":"telemetry","slot":3,"pid":4711,"details":{"source":"rule 1"}}`,
		`{"id":0,"kind":"member_waiting","level":"info","text":"member not ready","service":"telemetry","pid":4712}`,
		`{"id":0,"kind":"problem","level":"warning","text":"not an event","service":"telemetry","slot":3}`,
		`{"id":0,"kind":"problem","level":"warning","text":"no kind","slot":1,"details":{"error":"why"}}`,
		`{"id":0,"kind":"device_split","level":"error","text":"device split","device":"192.0.2.1","details":{"error":"why"}}`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("events\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if lines := strings.Count(text.String(), "\n"); lines != 3 {
		t.Errorf("%d lines are logged, want 3:\n%s", lines, text.String())
	}
}

// TestSuppressedInJournal logs a flood: the next handler gets the burst and the number of the others.
func TestSuppressedInJournal(t *testing.T) {
	l := openLog(t, t.TempDir(), 8*megabyte)
	var text strings.Builder
	log := slog.New(NewHandler(l, slog.NewTextHandler(&text, nil)))
	const flood = kindBurst + 1000
	for range flood {
		log.Info("flooded", Key, "flood")
	}
	l.Close()
	passed, suppressed := strings.Count(text.String(), "msg=flooded"), 0
	if _, counts, ok := strings.Cut(text.String(), "count="); ok {
		suppressed = atoi(t, strings.TrimSpace(counts))
	}
	if passed < kindBurst || passed+suppressed != flood {
		t.Errorf("%d lines, %d suppressed, want %d in all", passed, suppressed, flood)
	}
}

// TestOpenLater opens a log on a full file system, which has space later: the events since the start are recorded.
func TestOpenLater(t *testing.T) {
	dir := t.TempDir()
	check(t, unix.Mount("small", dir, "tmpfs", 0, "size=16k,nr_inodes=2"))
	defer unix.Unmount(dir, unix.MNT_DETACH)
	check(t, os.WriteFile(filepath.Join(dir, "filler"), nil, 0o600))
	l := New(filepath.Join(dir, "events"), megabyte)
	t.Cleanup(l.Close)
	l.add(event("first", 1))
	if err := l.Open(); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("Open on a full file system: %v", err)
	}
	l.add(event("second", 1))
	check(t, unix.Mount("", dir, "", unix.MS_REMOUNT, "size=256k,nr_inodes=16"))
	l.mu.Lock()
	l.failed = l.failed.Add(-2 * retryInterval)
	l.mu.Unlock()
	l.add(event("third", 1))
	var kinds []string
	for _, e := range all(t, l) {
		kinds = append(kinds, e.Kind)
	}
	if want := []string{"first", "second", "third"}; !slices.Equal(kinds, want) || l.Stats().Problem != nil {
		t.Errorf("recorded %q, want %q; %+v", kinds, want, l.Stats())
	}
}

// TestKindsDocumented compares docs/events.md with the kinds.
func TestKindsDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/events.md")
	check(t, err)
	for _, k := range Kinds() {
		if row := fmt.Sprintf("| `%s` | %s |\n", k.Name, k.Doc); !strings.Contains(string(text), row) {
			t.Errorf("docs/events.md lacks the row %s", row)
		}
	}
	if rows := strings.Count(string(text), "\n| `"); rows != len(Kinds()) {
		t.Errorf("docs/events.md has %d kinds, want %d", rows, len(Kinds()))
	}
}

// TestConcurrent adds and reads in several goroutines.
func TestConcurrent(t *testing.T) {
	l := openLog(t, t.TempDir(), 128<<10)
	var group sync.WaitGroup
	for g := range 4 {
		group.Go(func() {
			for i := range 500 {
				l.add(event(fmt.Sprint("k", g), i))
			}
		})
		group.Go(func() {
			for range 5 {
				r, err := l.Read(time.Time{})
				if err != nil {
					t.Error(err)
					return
				}
				last := uint64(0)
				for {
					e, err := r.Next(t.Context(), false)
					if err != nil {
						break
					}
					if e.Kind != api.EventsMissing && e.ID <= last {
						t.Errorf("event %d after %d", e.ID, last)
					}
					last = max(last, e.ID)
				}
				r.Close()
			}
		})
	}
	group.Wait()
}

// FuzzRead reads files with any contents.
func FuzzRead(f *testing.F) {
	f.Add([]byte(`{"id":1,"kind":"k"}` + "\n" + `{"id":2`))
	f.Add([]byte("\n\n{}\n"))
	f.Add([]byte(strings.Repeat("a", 3*maxLine)))
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		check(t, os.WriteFile(filepath.Join(dir, "1"+suffix), data, 0o600))
		l := openLog(t, dir, megabyte)
		l.add(event("after", 1))
		list := all(t, l)
		if len(list) == 0 || list[len(list)-1].Kind != "after" {
			t.Errorf("the new event was not read: %+v", list)
		}
	})
}

// TestLongTexts adds events with texts that do not fit in a line.
func TestLongTexts(t *testing.T) {
	l := openLog(t, t.TempDir(), megabyte)
	rnd := rand.New(rand.NewPCG(1, 2))
	for i := range 50 {
		e := event("k", i)
		e.Text = strings.Repeat("ü\x00\"", rnd.IntN(20<<10))
		e.Details = map[string]string{}
		for d := range rnd.IntN(40) {
			e.Details[fmt.Sprint("key", d)] = strings.Repeat("<", rnd.IntN(10<<10))
		}
		l.add(e)
	}
	if list := all(t, l); len(list) != 50 || l.Stats().Lost != 0 {
		t.Errorf("%d of 50 events: %+v", len(list), l.Stats())
	}
	if size := l.Stats().Bytes; size > 50*maxLine {
		t.Errorf("%d bytes", size)
	}
}
