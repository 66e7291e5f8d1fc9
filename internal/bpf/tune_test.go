// SPDX-License-Identifier: Apache-2.0

package bpf_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/bpf/load"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/testenv"
)

// TestTuneOpens loads and attaches the programs on every kernel, lets them decide on connections, and opens them
// again.
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

// TestTuneRestoresRules installs two policies in turn. A rule that comes back has its number, its seed and its
// counts, and its map element is not written again: programs may read the element meanwhile.
func TestTuneRestoresRules(t *testing.T) {
	cgroup := filepath.Join(testenv.Cgroup(), "restore")
	check(t, os.Mkdir(cgroup, 0o755))
	t.Cleanup(func() { check(t, os.Remove(cgroup)) })
	dir := filepath.Join(testenv.BPFFS(t), "tune_test")
	tune, err := bpf.OpenTune(bpf.TuneConfig{Dir: dir, Cgroup: cgroup})
	check(t, err)
	defer tune.Close()
	defer func() { check(t, bpf.RemoveTune(dir)) }()
	// A frozen map refuses writes from user space (kernel/bpf/syscall.c: map_freeze).
	layouts, err := pin.Layouts(dir)
	check(t, err)
	rules, err := ebpf.LoadPinnedMap(filepath.Join(layouts[0], "rules"), nil)
	check(t, err)
	defer rules.Close()

	install := func(window uint32) {
		t.Helper()
		r := &bpf.TuneRules{Rules: []bpf.TuneRule{{Rwnd: window}}}
		r.Ruleset.Terms, r.Ruleset.Rule[0] = 1, 1
		check(t, tune.Install(r))
	}
	install(20)
	install(40)
	check(t, rules.Freeze())
	first, err := tune.Rules()
	check(t, err)
	for i := range 4 {
		window := []uint32{20, 40}[i%2]
		install(window)
		now, err := tune.Rules()
		check(t, err)
		if len(now) != 2 {
			t.Errorf("%d rules, want 2", len(now))
		}
		for id, rule := range now {
			if before := first[id]; before == nil || before.TuneRule != rule.TuneRule {
				t.Errorf("rule %d changed", id)
			}
			if inForce := rule.Rwnd == window; inForce != (rule.Retired == 0) {
				t.Errorf("rule %d: in force %v, retired at %v", id, inForce, rule.Retired)
			}
		}
	}
}

// TestTuneCgroupAgain removes and creates a cgroup: the new cgroup is tuned with the learned values.
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

// TestRefusedByTheVerifier distinguishes the verifier's EACCES from the kernel's EPERM, which means missing
// capabilities.
func TestRefusedByTheVerifier(t *testing.T) {
	spec := func() *ebpf.CollectionSpec {
		return &ebpf.CollectionSpec{
			Maps: map[string]*ebpf.MapSpec{"small": {Name: "small", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}},
			Programs: map[string]*ebpf.ProgramSpec{"over": {Type: ebpf.SockOps, AttachType: ebpf.AttachCGroupSockOps, License: "GPL", Instructions: asm.Instructions{
				asm.StoreImm(asm.R10, -4, 0, asm.Word),
				asm.Mov.Reg(asm.R2, asm.R10),
				asm.Add.Imm(asm.R2, -4),
				asm.LoadMapPtr(asm.R1, 0).WithReference("small"),
				asm.FnMapLookupElem.Call(),
				asm.JEq.Imm(asm.R0, 0, "out"),
				asm.LoadMem(asm.R0, asm.R0, 4, asm.Word), // past the end
				asm.Mov.Imm(asm.R0, 1).WithSymbol("out"),
				asm.Return(),
			}}},
		}
	}
	_, err := load.Program(spec(), "over", nil)
	refused, ok := errors.AsType[*load.RefusedError](err)
	if !ok || !errors.Is(refused.Err.Cause, unix.EACCES) || !strings.Contains(err.Error(), "program over: refused by the kernel's verifier: ") ||
		strings.HasSuffix(err.Error(), ": ") || strings.Contains(err.Error(), "permission denied") ||
		strings.Contains(strings.Join(refused.Err.Log, "\n"), "invalid") && !strings.Contains(err.Error(), "invalid") {
		t.Errorf("%v", err)
	}
	testenv.WithoutRights(t, func() {
		_, err := load.Program(spec(), "over", nil)
		if _, ok := errors.AsType[*load.RefusedError](err); ok || !errors.Is(err, unix.EPERM) {
			t.Errorf("without rights: %v", err)
		}
	})
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
		if got := load.LacksHelper(c.err); got != c.want {
			t.Errorf("%v: %v, want %v", c.err, got, c.want)
		}
	}
}
