// SPDX-License-Identifier: Apache-2.0

//go:build vm

package trace

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"sockeye/bench/harness"
	"sockeye/lab"
)

// TestOtherProbes measures the arms that many hosts forbid, on a kernel that permits them, for bench trace-vm. The clock of the machine counts
// instructions: its times are not those of hardware.
func TestOtherProbes(t *testing.T) {
	l, err := lab.New(t.Context(), lab.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	out := t.TempDir()
	t.Setenv("OUT", out)
	b := &bench{state: traceOff, options: options{For: 20 * time.Second, Slice: 100 * time.Millisecond, Warmup: 20 * time.Millisecond, Seed: 1,
		Arms: armStamping + "," + armCalled + "," + armMarking + "," + armFentry + "," + armReading + "," + armKprobe}}
	b.Lab = l
	if err := b.share(); err != nil {
		t.Fatal(err)
	}
	if err := b.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, a := range []string{fentry, fentryReading, kprobe} {
		if why := b.left[a]; why != "" {
			t.Errorf("%s: %s", a, why)
		}
	}
	figures, err := os.ReadFile(filepath.Join(out, "bench-"+command+".json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := harness.PrintFigures(figures); err != nil {
		t.Fatal(err)
	}
}
