// SPDX-License-Identifier: Apache-2.0

package tracecmd

import (
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/cli/command"
	"sockeye/internal/config"
	"sockeye/internal/trace/measure"
)

// TestTraceScreen checks that a screen is no longer than the terminal; a longer one would scroll.
func TestTraceScreen(t *testing.T) {
	c := &commands{&command.Command{}}
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer terminal.Close()
	if err := unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 5, Col: 80}); err != nil {
		t.Fatal(err)
	}
	c.Out = terminal
	for n, want := range map[int]string{
		4: "1\x1b[K\n2\x1b[K\n3\x1b[K\n4\x1b[K\n",
		5: "1\x1b[K\n2\x1b[K\n3\x1b[K\n… 2 more lines, the terminal is too small\x1b[K\n",
	} {
		var l command.Text
		for i := range n {
			l.Line("%d", i+1)
		}
		if got := c.Fit(&l); got != want {
			t.Errorf("%d lines become %q, want %q", n, got, want)
		}
	}
}

func TestTook(t *testing.T) {
	for want, d := range map[string]time.Duration{
		"0 ns": 0, "850 ns": 850, "999 ns": 999, "1 µs": 1000, "12.3 µs": 12_345, "1.24 ms": 1_244_000, "1 ms": 999_600, "2.1 s": 2_100_000_000, "-12 µs": -12_000,
		"9223372037 s": math.MaxInt64, "-9223372037 s": math.MinInt64, "3600 s": time.Hour,
	} {
		if got := command.Duration(d); got != want {
			t.Errorf("%d is %q, want %q", d, got, want)
		}
	}
}

func TestTimes(t *testing.T) {
	for want, v := range map[string]*float64{"-": nil, "0": new(0.0), "< 0.01": new(0.004), "0.01": new(0.005), "1.5": new(1.5), "12346": new(12345.6)} {
		if got := Times(v); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	for want, v := range map[string][2]*float64{"-": {}, "0.5 to 2": {new(0.5), new(2.0)}, "0.5 and more": {new(0.5), nil}, "2 and less": {nil, new(2.0)}} {
		if got := RatioInterval(v[0], v[1]); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestBufferSize checks that sizes are rounded to sizes that the kernel accepts.
func TestBufferSize(t *testing.T) {
	for text, want := range map[string]int{"4KB": 4096, "4096B": 4096, "4097B": 8192, "1MB": 1 << 20, "1MiB": 1 << 20, "64KiB": 65536, "256MB": 256 << 20} {
		cmd := (&commands{&command.Command{}}).traceSamplesCommand()
		if err := cmd.ParseFlags([]string{"--buffer", text}); err != nil {
			t.Fatal(err)
		}
		if got, err := bufferSize(cmd, text); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", text, got, err, want)
		}
	}
}

// TestWayBar checks that the bar has room for each stage, whatever the durations are.
func TestWayBar(t *testing.T) {
	for _, c := range []struct {
		stages map[config.Stage]time.Duration
		want   string
	}{
		{map[config.Stage]time.Duration{config.StageStack: 50, config.StageNetwork: 50, measure.Total: 100}, "stack " + strings.Repeat("█", 20) + " network " + strings.Repeat("█", 20)},
		{map[config.Stage]time.Duration{config.StageStack: 1, measure.Total: 1 << 62}, "stack not known " + strings.Repeat("█", 40)},
		{map[config.Stage]time.Duration{config.StageStack: 1 << 62, measure.Total: 1}, "stack " + strings.Repeat("█", 40)},
		{map[config.Stage]time.Duration{config.StageStack: -5, measure.Total: 100}, "stack not known " + strings.Repeat("█", 40)},
		{nil, ""},
	} {
		if got := wayBar(&measure.Sample{Stages: c.stages}); got != c.want {
			t.Errorf("%v: %q, want %q", c.stages, got, c.want)
		}
	}
}
