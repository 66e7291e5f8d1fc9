// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/testenv"
)

// The programs load, attach, decide and go on every kernel.
func TestTuneOpens(t *testing.T) {
	dir := filepath.Join(testenv.BPFFS(t), "tune_test")
	cgroup := filepath.Join(testenv.Cgroup(), "tune")
	if err := os.Mkdir(cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(cgroup); err != nil {
			t.Error(err)
		}
	})
	open := func() *bpf.Tune {
		tune, err := bpf.OpenTune(bpf.TuneConfig{Dir: dir, Cgroup: cgroup})
		if err != nil {
			t.Fatalf("%+v", err)
		}
		return tune
	}
	rules := &bpf.TuneRules{Rules: []bpf.TuneRule{{Rwnd: 20}}}
	rules.Ruleset.Terms = 1
	rules.Ruleset.Rule[0] = 1
	for role := range rules.Ruleset.Role {
		rules.Ruleset.Role[role].Word[0] = 1
	}
	rules.Ruleset.Untagged.Word[0] = 1

	first := open()
	if err := first.Install(rules); err != nil {
		t.Fatal(err)
	}
	before, err := first.Decide(bpf.MatchQuestion{})
	if err != nil || before[0] == 0 {
		t.Fatalf("rule %v, %v", before, err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}

	adopted := open()
	defer adopted.Close()
	after, err := adopted.Decide(bpf.MatchQuestion{})
	if err != nil || after[0] != before[0] {
		t.Errorf("rule %v before, %v after, %v", before, after, err)
	}
	if !adopted.Attached() {
		t.Error("not attached")
	}
	live, err := adopted.Live()
	switch {
	case errors.Is(err, ebpf.ErrNotSupported):
		t.Logf("no live hook: %v", err)
	case err != nil:
		t.Errorf("%+v", err)
	default:
		if err := live.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := bpf.RemoveTune(dir); err != nil {
		t.Fatal(err)
	}
	if adopted.Attached() {
		t.Error("still attached")
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("pins: %v", err)
	}
}

// A cgroup that is made anew gets the tuning again, with what is known.
func TestTuneCgroupAgain(t *testing.T) {
	dir := filepath.Join(testenv.BPFFS(t), "tune_test")
	cgroup := filepath.Join(testenv.Cgroup(), "again")
	for range 2 {
		if err := os.Mkdir(cgroup, 0o755); err != nil {
			t.Fatal(err)
		}
		tune, err := bpf.OpenTune(bpf.TuneConfig{Dir: dir, Cgroup: cgroup})
		if err != nil {
			t.Fatalf("%+v", err)
		}
		if !tune.Attached() {
			t.Error("not attached")
		}
		if err := os.Remove(cgroup); err != nil {
			t.Fatal(err)
		}
		if tune.Attached() {
			t.Error("attached to a cgroup that is gone")
		}
		if err := tune.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := bpf.RemoveTune(dir); err != nil {
		t.Fatal(err)
	}
}

func TestLacksHelper(t *testing.T) {
	for _, c := range []struct {
		err  error
		want bool
	}{
		{&ebpf.VerifierError{Cause: unix.EINVAL, Log: []string{"0: (85) call 49", "unknown func bpf_setsockopt#49"}}, true},
		{fmt.Errorf("load: %w", &ebpf.VerifierError{Cause: unix.EINVAL, Log: []string{"program of this type cannot use helper bpf_setsockopt#49"}}), true},
		{&ebpf.VerifierError{Cause: unix.EACCES, Log: []string{"R1 invalid mem access 'scalar'"}}, false},
		{unix.EPERM, false},
		{errors.New("unknown func"), false},
	} {
		if got := bpf.LacksHelper(c.err); got != c.want {
			t.Errorf("%v: %v, want %v", c.err, got, c.want)
		}
	}
}
