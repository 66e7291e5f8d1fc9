// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/bpf/probe"
	"sockeye/internal/testenv"
)

// subgroup creates a cgroup below the tests' cgroup.
func subgroup(t testing.TB, name string) string {
	t.Helper()
	dir := filepath.Join(testenv.Cgroup(), name)
	check(t, os.Mkdir(dir, 0o755))
	t.Cleanup(func() { check(t, os.Remove(dir)) })
	return dir
}

// traceAll is one rule for all messages of all TCP connections.
func traceAll() *bpf.TraceRules {
	rules := &bpf.TraceRules{Groups: 3, Rules: []bpf.TraceRule{{
		Connections: 1, Messages: 1, Groups: 2, Flags: bpf.TraceRuleTCP | bpf.TraceRuleTX,
	}}}
	rules.Ruleset.Terms = 1
	rules.Ruleset.Rule[0] = 1
	for role := range rules.Ruleset.Role {
		rules.Ruleset.Role[role].Word[0] = 1
	}
	rules.Ruleset.Untagged.Word[0] = 1
	return rules
}

func openTrace(t testing.TB, c bpf.TraceConfig) *bpf.Trace {
	t.Helper()
	trace, err := bpf.OpenTrace(c)
	if err != nil {
		t.Fatalf("%+v", err)
	}
	return trace
}

// timestamps skips a test on a kernel without BPF timestamps.
func timestamps(t testing.TB) {
	t.Helper()
	if err := probe.HaveTimestamps(); errors.Is(err, ebpf.ErrNotSupported) {
		t.Skipf("kernel: %v", err)
	}
}

// pair opens a connection over loopback.
func tracedPair(t testing.TB) (connected, accepted int) {
	t.Helper()
	listener, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	defer unix.Close(listener)
	check(t, unix.Bind(listener, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	check(t, unix.Listen(listener, 1))
	at, err := unix.Getsockname(listener)
	check(t, err)
	connected, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	check(t, err)
	t.Cleanup(func() { unix.Close(connected) })
	check(t, unix.Connect(connected, at))
	accepted, _, err = unix.Accept4(listener, unix.SOCK_CLOEXEC)
	check(t, err)
	t.Cleanup(func() { unix.Close(accepted) })
	return connected, accepted
}

// answered sends messages one after the other, each when the one before has arrived, and waits until they have ended.
func answered(t testing.TB, trace *bpf.Trace, from, to, messages int) {
	t.Helper()
	before := ended(t, trace)
	b := make([]byte, 100)
	for range messages {
		_, err := unix.Write(from, b)
		check(t, err)
		_, err = unix.Read(to, b)
		check(t, err)
	}
	for deadline := time.Now().Add(patience); ended(t, trace) < before+uint64(messages); {
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d messages have ended", ended(t, trace)-before, messages)
		}
	}
}

// ended returns the number of messages that have ended, of all groups.
func ended(t testing.TB, trace *bpf.Trace) (sum uint64) {
	t.Helper()
	for group := range uint32(3) {
		stats, err := trace.Stats(group)
		check(t, err)
		for _, n := range stats.Outcome {
			sum += n
		}
	}
	return sum
}

// TestTraceOpens loads and attaches the programs on every kernel, opens them again, and checks that nothing is left.
func TestTraceOpens(t *testing.T) {
	dir := filepath.Join(testenv.BPFFS(t), "trace_test")
	c := bpf.TraceConfig{Dir: dir, Cgroup: subgroup(t, "trace"), Rules: traceAll()}
	use := func() {
		first := openTrace(t, c)
		adopted := c
		adopted.Adopt = true
		check(t, first.Close())
		again := openTrace(t, adopted)
		if !again.Attached() {
			t.Error("not attached")
		}
		live, err := again.Live()
		switch {
		case errors.Is(err, ebpf.ErrNotSupported):
			t.Logf("no live hook: %v", err)
		case err != nil:
			t.Errorf("%+v", err)
		default:
			check(t, live.Close())
		}
		kept := kernelObjects(t, again)
		check(t, bpf.RemoveTrace(dir))
		if again.Attached() {
			t.Error("still attached")
		}
		check(t, again.Close())
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("pins: %v", err)
		}
		for what, gone := range kept {
			await(t, "the end of "+what, gone)
		}
	}
	use() // what is opened once for all
	opened := testenv.Opened(t)
	for range opens {
		use()
	}
	opened()
}

// kernelObjects are the program, the link and the maps of a tracing, by their ids, which show whether they still
// exist.
func kernelObjects(t testing.TB, trace *bpf.Trace) map[string]func() bool {
	t.Helper()
	gone := make(map[string]func() bool)
	for name, m := range trace.Maps() {
		info, err := m.Info()
		check(t, err)
		id, _ := info.ID()
		gone["map "+name] = func() bool {
			m, err := ebpf.NewMapFromID(id)
			if err == nil {
				m.Close()
			}
			return errors.Is(err, os.ErrNotExist)
		}
	}
	for name, l := range trace.Links() {
		info, err := l.Info()
		check(t, err)
		gone["link "+name] = func() bool {
			l, err := link.NewFromID(info.ID)
			if err == nil {
				l.Close()
			}
			return errors.Is(err, os.ErrNotExist)
		}
		gone["program of "+name] = func() bool {
			p, err := ebpf.NewProgramFromID(info.Program)
			if err == nil {
				p.Close()
			}
			return errors.Is(err, os.ErrNotExist)
		}
	}
	return gone
}

// await waits until f returns true, and fails the test after a timeout.
func await(t testing.TB, what string, f func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !f(); <-tick.C {
		if time.Now().After(deadline) {
			t.Errorf("%s does not come about", what)
			return
		}
	}
}

// TestTraceGoesOn checks that a restarted agent finds the counts and messages in flight, and that its program
// replaces the previous one. The previous subscriber of samples is gone.
func TestTraceGoesOn(t *testing.T) {
	timestamps(t)
	c := bpf.TraceConfig{Dir: filepath.Join(testenv.BPFFS(t), "trace_test"), Cgroup: testenv.Cgroup(), Rules: traceAll()}
	first := openTrace(t, c)
	t.Cleanup(func() { check(t, bpf.RemoveTrace(c.Dir)) })
	connected, accepted := tracedPair(t)
	answered(t, first, connected, accepted, 10)
	if _, err := first.Samples(1 << 16); err != nil {
		t.Fatal(err)
	}
	before, err := first.ProgramID()
	check(t, err)
	check(t, first.Close())

	c.Adopt = true
	again := openTrace(t, c)
	defer again.Close()
	after, err := again.ProgramID()
	check(t, err)
	if before == after {
		t.Error("the program is the one before")
	}
	if n := ended(t, again); n != 10 {
		t.Errorf("%d messages were counted, want 10", n)
	}
	if state := again.State(t); state.Samples != 0 || state.Seed == 0 {
		t.Errorf("state %+v", state)
	}
	answered(t, again, connected, accepted, 10)
	connected, accepted = tracedPair(t)
	answered(t, again, connected, accepted, 10)
	if n := ended(t, again); n != 30 {
		t.Errorf("%d messages were counted, want 30", n)
	}
	check(t, again.Close())

	c.Adopt = false
	anew := openTrace(t, c)
	defer anew.Close()
	if n := ended(t, anew); n != 0 {
		t.Errorf("%d messages were counted before", n)
	}
}

// TestTraceSlowestMinutes checks that the slowest messages of a minute replace those of the minute that had the same
// entry, which are no longer shown even if nothing replaces them.
func TestTraceSlowestMinutes(t *testing.T) {
	timestamps(t)
	c := bpf.TraceConfig{Dir: filepath.Join(testenv.BPFFS(t), "trace_test"), Cgroup: testenv.Cgroup(), Rules: traceAll()}
	trace := openTrace(t, c)
	defer trace.Close()
	defer func() { check(t, bpf.RemoveTrace(c.Dir)) }()
	connected, accepted := tracedPair(t)
	answered(t, trace, connected, accepted, 1)
	groups, err := trace.Groups()
	check(t, err)
	for group := range groups {
		var now unix.Timespec
		check(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
		minute := uint64(now.Nano()) >> bpf.TraceMinuteShift
		// The entries of the minutes since then, and the next one if this minute ends meanwhile.
		trace.AgeSlowest(t, group, minute-uint64(bpf.TraceMinutes))
		if slowest, err := trace.Slowest(group); err != nil || len(slowest) > 0 {
			t.Errorf("%d messages of minutes that are past, %v", len(slowest), err)
		}
		answered(t, trace, connected, accepted, bpf.TraceSlowestOf)
		slowest, err := trace.Slowest(group)
		check(t, err)
		if len(slowest) != bpf.TraceSlowestOf || slices.ContainsFunc(slowest, func(s bpf.TraceSample) bool { return s.Total > uint64(time.Minute) }) {
			t.Errorf("%d messages, want the %d that were sent", len(slowest), bpf.TraceSlowestOf)
			for _, s := range slowest {
				t.Logf("%v at %v", time.Duration(s.Total), time.Duration(s.Ended))
			}
		}
	}
}

// TestTraceCost bounds the work during an apply: the number of instructions that the verifier processes, and one
// decoding of the kernel's BTF.
func TestTraceCost(t *testing.T) {
	timestamps(t)
	c := bpf.TraceConfig{Dir: filepath.Join(testenv.BPFFS(t), "trace_test"), Cgroup: subgroup(t, "cost"), Rules: traceAll()}
	first := openTrace(t, c)
	check(t, first.Close())
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	trace := openTrace(t, c)
	runtime.ReadMemStats(&after)
	if bytes := after.TotalAlloc - before.TotalAlloc; bytes > 6<<20 {
		t.Errorf("tracing a cgroup again takes %d KiB", bytes>>10)
	} else {
		t.Logf("tracing a cgroup again takes %d KiB", bytes>>10)
	}
	defer trace.Close()
	defer func() { check(t, bpf.RemoveTrace(c.Dir)) }()
	id, err := trace.ProgramID()
	check(t, err)
	p, err := ebpf.NewProgramFromID(ebpf.ProgramID(id))
	check(t, err)
	defer p.Close()
	info, err := p.Info()
	check(t, err)
	n, ok := info.VerifiedInstructions()
	if !ok || n > 40_000 {
		t.Errorf("the verifier looks at %d instructions of trace_sockops", n)
	}
	t.Logf("the verifier looks at %d instructions of trace_sockops; maps take %d KiB", n, trace.Memory()>>10)
}
