// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
)

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// numbered is a frame with a number of devices.
func numbered(at time.Time, n, devices int) *api.Frame {
	s := api.LiveService{Name: fmt.Sprint(n), Slots: []api.LiveSlot{}}
	for i := range devices {
		s.Devices = append(s.Devices, api.LiveDevice{Address: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), Datagrams: float64(i)})
	}
	return &api.Frame{Time: at, Services: []api.LiveService{s}, Groups: []api.LiveGroup{}, Stuck: []api.LiveSocket{}, Fleet: &api.FleetStatus{Fleet: "main"}}
}

// replayed returns the frames since a time.
func (r *recording) replayed(t testing.TB, since time.Time) (frames []api.Frame) {
	t.Helper()
	check(t, r.each(since, func(line []byte) bool {
		var f api.Frame
		check(t, json.Unmarshal(line, &f))
		if f.Fleet != nil {
			t.Errorf("a recorded frame has the fleet %+v", f.Fleet)
		}
		frames = append(frames, f)
		return true
	}))
	return frames
}

func names(frames []api.Frame) (list []string) {
	for i := range frames {
		list = append(list, frames[i].Services[0].Name)
	}
	return list
}

// TestRecording records two hours: the last one is kept, in a bounded number of files, with the busiest devices.
func TestRecording(t *testing.T) {
	r := &recording{dir: filepath.Join(t.TempDir(), "frames")}
	begin := time.Unix(1_800_000_000, 0)
	const frames = 720
	for i := range frames {
		check(t, r.add(numbered(begin.Add(time.Duration(i)*recordInterval), i, 2)))
	}
	end := begin.Add((frames - 1) * recordInterval)
	got := names(r.replayed(t, end.Add(-recordedTime)))
	if len(got) != 361 || got[0] != "359" || got[len(got)-1] != "719" {
		t.Errorf("%d frames of the last hour, %q", len(got), got)
	}
	if got := names(r.replayed(t, end.Add(-35*time.Second))); !slices.Equal(got, []string{"716", "717", "718", "719"}) {
		t.Errorf("frames of 35 s: %q", got)
	}
	files, err := r.list()
	check(t, err)
	if most := int(recordedTime/recordedPart) + 2; len(files) > most {
		t.Errorf("%d files, want at most %d", len(files), most)
	}

	check(t, r.add(numbered(end.Add(recordInterval), frames, 3*recordedDevices)))
	last := r.replayed(t, end.Add(recordInterval))[0].Services[0]
	if len(last.Devices) != recordedDevices || last.Omitted != 2*recordedDevices || last.Devices[0].Datagrams != 2*recordedDevices {
		t.Errorf("%d devices, %d omitted, the first one %+v", len(last.Devices), last.Omitted, last.Devices[0])
	}

	// The clock is set back: files of the future are removed when the next file begins.
	check(t, r.add(numbered(begin, -1, 1)))
	if got := names(r.replayed(t, begin.Add(-time.Minute))); !slices.Equal(got, []string{"-1"}) {
		t.Errorf("after the clock was set back: %q", got)
	}
	r.close()
}

// TestRecordingDamaged reads files that are cut and overwritten, and that are not files.
func TestRecordingDamaged(t *testing.T) {
	r := &recording{dir: t.TempDir()}
	begin := time.Unix(1_800_000_000, 0)
	for i := range 5 {
		check(t, r.add(numbered(begin.Add(time.Duration(i)*recordInterval), i, 1)))
	}
	r.close()
	path := r.path(begin)
	info, err := os.Stat(path)
	check(t, err)
	check(t, os.Truncate(path, info.Size()-60))
	check(t, os.WriteFile(r.path(begin.Add(-time.Minute)), []byte("not gzip"), 0o600))
	check(t, os.Symlink("/etc/passwd", r.path(begin.Add(-2*time.Minute))))
	check(t, os.WriteFile(filepath.Join(r.dir, "x"+framesSuffix), nil, 0o600))
	if got := names(r.replayed(t, begin.Add(-recordedTime))); !slices.Equal(got, []string{"0", "1", "2", "3"}) {
		t.Errorf("frames of a cut file: %q", got)
	}
}

// TestRecordingFullDisk records on a full file system, which has space later.
func TestRecordingFullDisk(t *testing.T) {
	dir := t.TempDir()
	check(t, unix.Mount("small", dir, "tmpfs", 0, "size=64k"))
	defer unix.Unmount(dir, unix.MNT_DETACH)
	r := &recording{dir: filepath.Join(dir, "frames")}
	begin := time.Unix(1_800_000_000, 0)
	check(t, r.add(numbered(begin, 0, 1)))
	check(t, os.WriteFile(filepath.Join(dir, "filler"), make([]byte, 48<<10), 0o600))
	failed := 0
	for i := range 100 {
		if r.add(numbered(begin.Add(time.Duration(i+1)*time.Second), i+1, 500)) != nil {
			failed++
		}
	}
	if failed == 0 {
		t.Fatal("a full disk has space")
	}
	check(t, os.Remove(filepath.Join(dir, "filler")))
	check(t, r.add(numbered(begin.Add(200*time.Second), 200, 1)))
	got := names(r.replayed(t, begin))
	if len(got) != 102-failed || got[len(got)-1] != "200" {
		t.Errorf("%d frames of %d that were recorded: %q", len(got), 102-failed, got)
	}
	r.close()
}

// TestLiveView streams frames to several watchers, makes none without watchers, and refuses further ones.
func TestLiveView(t *testing.T) {
	made := make(chan struct{}, 1000)
	r := &recording{dir: t.TempDir()}
	v := newLiveView(func(f *api.Frame) {
		f.Problem = "p"
		made <- struct{}{}
	}, r, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		v.run(ctx)
	}()
	<-made // the first recorded frame
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := v.stream(w, r); err != nil {
			http.Error(w, err.Error(), http.StatusConflict)
		}
	}))
	defer server.Close()
	open := func() *http.Response {
		response, err := server.Client().Get(server.URL)
		check(t, err)
		return response
	}
	var all []*http.Response
	for range mostWatchers {
		all = append(all, open())
	}
	for _, response := range all {
		decoder := json.NewDecoder(response.Body)
		var first, second api.Frame
		check(t, decoder.Decode(&first))
		check(t, decoder.Decode(&second))
		if first.Problem != "p" || !second.Time.After(first.Time) || second.Seconds <= 0 {
			t.Fatalf("frames %+v, %+v", first, second)
		}
	}
	if refused := open(); refused.StatusCode != http.StatusConflict {
		t.Errorf("status of a watcher too many: %d", refused.StatusCode)
	} else {
		refused.Body.Close()
	}
	for _, response := range all {
		response.Body.Close()
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		v.mu.Lock()
		left := v.watchers
		v.mu.Unlock()
		if left == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d watchers have not left", left)
		}
	}
	cancel()
	<-ended
	if n := len(r.replayed(t, time.Now().Add(-time.Minute))); n == 0 {
		t.Error("no frame is recorded")
	}
}
