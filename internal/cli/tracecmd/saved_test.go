// SPDX-License-Identifier: Apache-2.0

package tracecmd

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"sockeye/internal/trace/measure"
)

// savedFile writes a file of trace save with these slices.
func savedFile(t testing.TB, slices string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "saved.json")
	if err := os.WriteFile(file, []byte(`{"format":"sockeye-trace","format_version":1,"version":"1","host":"h","slices":[`+slices+"]}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// slice returns a slice with these results.
func slice(results string) string {
	return `{"from":"2026-03-14T11:58:00Z","to":"2026-03-14T11:58:10Z","results":[` + results + "]}"
}

// TestSavedMemory reads a file whose 80,000 empty histograms would take 320 MB.
func TestSavedMemory(t *testing.T) {
	var stages []string
	for _, s := range measure.Stages {
		stages = append(stages, fmt.Sprintf(`%q:{"count":0,"sum_ns":0,"max_ns":0,"buckets":[]}`, s))
	}
	var results []string
	for i := range 100 {
		results = append(results, fmt.Sprintf(`{"group":{"rule":"r%d"},"chosen":1,"stages":{%s}}`, i, strings.Join(stages, ",")))
	}
	file := savedFile(t, strings.Join(slices100(slice(strings.Join(results, ","))), ","))
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	runtime.GC()
	var most uint64
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			var now runtime.MemStats
			runtime.ReadMemStats(&now)
			most = max(most, now.HeapAlloc)
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	side, err := readSaved(file, "")
	close(stop)
	<-stopped
	if err != nil {
		t.Fatal(err)
	}
	if most >>= 20; most > 100 {
		t.Errorf("the heap had %d MB", most)
	}
	if found, err := side.find(); err != nil || len(found) != 100 || found[99].Chosen != 100 {
		t.Errorf("%d slices, %v", len(found), err)
	}
}

func slices100(s string) []string {
	var all []string
	for range 100 {
		all = append(all, s)
	}
	return all
}

// TestSavedLimits checks the limits of a file, and that the stages and outcomes of a later version are left out.
func TestSavedLimits(t *testing.T) {
	const one = `{"group":{"rule":"r"},"chosen":1,"outcomes":{"acked":1,"later":7},"stages":{"stack":{"count":1,"sum_ns":5,"max_ns":5,"buckets":[[0,1]]},"later":{"count":1,"sum_ns":5,"max_ns":5,"buckets":[[0,1]]}}}`
	side, err := readSaved(savedFile(t, slice(one)), "")
	if err != nil {
		t.Fatal(err)
	}
	found, err := side.find()
	if err != nil || len(found) != 1 || len(found[0].Stages) != 1 || len(found[0].Outcomes) != 1 {
		t.Errorf("%+v, %v", found, err)
	}
	for name, c := range map[string]struct{ slices, message string }{
		"large value":      {slice(`{"group":{"rule":"` + strings.Repeat("r", 2*savedValue) + `"},"chosen":1}`), ": a value is too large"},
		"large other":      {`{"later":"` + strings.Repeat("r", 2*savedValue) + `"}`, ": a value is too large"},
		"many slices":      {strings.TrimSuffix(strings.Repeat(slice(one)+",", savedSlices+1), ","), ": more than 1000 slices"},
		"many groups":      {slice(manyGroups(savedGroups + 1)), ": more than 65536 groups"},
		"many messages":    {slice(`{"group":{},"chosen":18446744073709551615}`), ": 18446744073709551615 messages in 10 s"},
		"many in stage":    {slice(`{"group":{},"chosen":1,"stages":{"stack":{"count":18446744073709551615,"sum_ns":5,"max_ns":5,"buckets":[[0,18446744073709551615]]}}}`), ": 18446744073709551615 messages in 10 s"},
		"no times":         {`{"results":[` + one + `]}`, ": a slice has no times"},
		"no slice":         {`7`, ": a slice is missing"},
		"results no array": {`{"from":"2026-03-14T11:58:00Z","to":"2026-03-14T11:58:10Z","results":{}}`, ": an array is missing"},
		"wrong type":       {slice(`{"group":7}`), ""},
	} {
		file := savedFile(t, c.slices)
		_, err := readSaved(file, "")
		if err == nil {
			t.Errorf("%s: no error", name)
			continue
		}
		want, got := file+" is damaged at byte ", err.Error()
		if !strings.HasPrefix(got, want) || strings.TrimLeft(got[min(len(want), len(got)):], "0123456789") != c.message {
			t.Errorf("%s: %s", name, got)
		}
	}
}

func manyGroups(n int) string {
	var b strings.Builder
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"group":{"rule":"r%d"},"chosen":1}`, i)
	}
	return b.String()
}

func FuzzSaved(f *testing.F) {
	for _, slices := range []string{"", "{}", slice(""), slice(`{"group":{"rule":"r"},"chosen":1,"stages":{"stack":{"count":1,"sum_ns":5,"max_ns":5,"buckets":[[0,1]]}}}`), "[[]]", `{"from":7`} {
		f.Add(slices)
	}
	f.Fuzz(func(t *testing.T, slices string) {
		side, err := readSaved(savedFile(t, slices), "")
		if (side == nil) == (err == nil) {
			t.Errorf("%+v, %v", side, err)
		}
		if side != nil {
			if _, err := side.find(); err != nil {
				t.Error(err)
			}
		}
	})
}
