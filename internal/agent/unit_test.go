// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/scope"
	"sockeye/internal/testenv"
)

// newTree is a root for cgroups, laid out as systemd does below its own. Folders
// are removed at the end, in whatever order they were made.
func newTree(t *testing.T) (root string, mkdir func(path string) string) {
	t.Helper()
	root = filepath.Join(testenv.Cgroup(), "tree")
	t.Cleanup(func() {
		var dirs []string
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return err
		})
		for _, dir := range slices.Backward(dirs) {
			err = errors.Join(err, unix.Rmdir(dir))
		}
		if err != nil {
			t.Error(err)
		}
	})
	mkdir = func(path string) string {
		t.Helper()
		dir := filepath.Join(root, path)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	mkdir("")
	return root, mkdir
}

const userUnit = "user.slice/user-1000.slice/user@1000.service/"

// attachedAt lists the folders below a root that have a sock_ops program.
func attachedAt(t *testing.T, root string) (list []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		ids, err := bpf.SockOps(path)
		if len(ids) > 0 {
			below, _ := filepath.Rel(root, path)
			list = append(list, below)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// TestUnitsOfUser has a user start units, below its own service manager, that have
// the names of those in the policy: nothing is attached to them, and they keep
// nothing from being attached to the system's.
func TestUnitsOfUser(t *testing.T) {
	root, mkdir := newTree(t)
	theirs := []string{
		userUnit + "telemetry.slice", userUnit + "app.slice/nfacctd@1.service", userUnit + "system.slice/nfacctd@1.service",
		"user.slice/user-1000.slice/session-1.scope/nfacctd@1.service", "system.slice/docker.service/telemetry.slice",
		"machine.slice/machine-x.scope/payload/nfacctd@1.service", "a.slice/telemetry.slice",
	}
	for _, path := range theirs {
		mkdir(path)
	}
	const policy = "tune:\n  - {name: a, cgroup: telemetry.slice, set: {sndbuf: 100KB}}\n  - {name: b, cgroup: nfacctd@1.service, set: {sndbuf: 100KB}}\n" +
		"trace:\n  - {name: c, cgroup: telemetry.slice}\n"
	a := testAgent(t, t.TempDir(), testenv.BPFFS(t)+"/sockeye")
	defer a.stop()
	a.moveTo(root)
	a.tuning().kernel.probed = map[string]error{}
	a.begin(t, policy)
	defer a.endTuning(t)
	if list := attachedAt(t, root); len(list) > 0 {
		t.Errorf("attached to the units of others: %q", list)
	}
	mkdir("telemetry.slice")
	mkdir("system.slice/system-nfacctd.slice/nfacctd@1.service")
	want := []string{"system.slice/system-nfacctd.slice/nfacctd@1.service", "telemetry.slice"}
	var list []string
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline) && !slices.Equal(list, want); time.Sleep(5 * time.Millisecond) {
		list = attachedAt(t, root)
	}
	if !slices.Equal(list, want) {
		t.Errorf("attached to %q, want %q", list, want)
	}
	// More of theirs, now that the system's are there.
	mkdir(userUnit + "more.slice/nfacctd@1.service")
	a.host.Watch.Look()
	status, err := a.Status()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range status.Tune {
		if !s.Attached || s.Problem != "" {
			t.Errorf("tune %s: attached %v, %s", s.Cgroup, s.Attached, s.Problem)
		}
	}
	if list = attachedAt(t, root); !slices.Equal(list, want) {
		t.Errorf("attached to %q, want %q", list, want)
	}
}

func TestFindUnit(t *testing.T) {
	root, mkdir := newTree(t)
	h := scope.Tree{Mount: root}
	for _, path := range []string{
		"a.slice/a-b.slice/x.service", "a-b.slice/y.service", "a.slice/b.slice/y.service", "_cpu.service", "one.slice/twice.service", "two.slice/twice.service",
		"-.slice/z.service", "system.slice/x.service.d/z.service",
	} {
		mkdir(path)
	}
	for name, want := range map[string]string{
		"a.slice": "a.slice", "a-b.slice": "a.slice/a-b.slice", "b.slice": "", "x.service": "a.slice/a-b.slice/x.service", "y.service": "",
		"cpu.service": "_cpu.service", "z.service": "", "-.slice": ".", "/a-b.slice": "a-b.slice",
	} {
		path, err := h.Find(name)
		if want == "" && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if below, failed := filepath.Rel(root, path); err != nil || failed != nil || below != want {
			t.Errorf("%s: %s, %v, want %q", name, path, err, want)
		}
	}
	if path, err := h.Find("twice.service"); fault.Code(err) != fault.CodeConflict || fault.Hint(err) == "" {
		t.Errorf("a unit in two slices: %s, %v", path, err)
	}
}

// TestCheckNested is what check says without an agent, and plan with one.
func TestCheckNested(t *testing.T) {
	root, mkdir := newTree(t)
	mkdir("system.slice/here.service")
	h := scope.Tree{Mount: root}
	rules := func(names ...string) (all []tuneChange) {
		for _, name := range names {
			all = append(all, tuneChange{name: name, rules: []config.TuneRule{{}}})
		}
		return all
	}
	for _, c := range []struct {
		names  []string
		nested bool
	}{
		{[]string{"a.slice", "a-b.slice"}, true}, {[]string{"a.slice", "/a.slice"}, true}, {[]string{"-.slice", "a.slice"}, true},
		{[]string{"/", "/x"}, true}, {[]string{"/x/y", "/x"}, true}, {[]string{"here.service", "system.slice"}, true},
		{[]string{"a.slice", "ab.slice"}, false}, {[]string{"/x", "/xy"}, false}, {[]string{"there.service", "system.slice"}, false},
	} {
		if err := checkNested(h, rules(c.names...)); (fault.Code(err) == fault.CodeConflict) != c.nested {
			t.Errorf("%v: %v, want nested %v", c.names, err, c.nested)
		}
	}
}

// TestUnitStartsAgain restarts a unit many times: its cgroup is made anew, and tuned
// and traced again by the programs that are loaded. It logs how long that takes.
func TestUnitStartsAgain(t *testing.T) {
	root, mkdir := newTree(t)
	const unit = "system.slice/collector.service"
	dir := mkdir(unit)
	for i := range 200 {
		mkdir(fmt.Sprintf("system.slice/other-%d.service", i))
	}
	a := testAgent(t, t.TempDir(), testenv.BPFFS(t)+"/sockeye")
	defer a.stop()
	a.moveTo(root)
	a.tuning().kernel.probed = map[string]error{}
	a.begin(t, "tune:\n  - {name: b, cgroup: collector.service, set: {sndbuf: 100KB}}\ntrace:\n  - {name: c, cgroup: collector.service}\n")
	defer a.endTuning(t)
	loaded := a.tuning().tuners["collector.service"].tune
	var took []time.Duration
	for range 20 {
		if err := unix.Rmdir(dir); err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond)
		mkdir(unit)
		began := time.Now()
		for ids := []uint32(nil); len(ids) < 2; time.Sleep(100 * time.Microsecond) {
			var err error
			if ids, err = bpf.SockOps(dir); err != nil {
				t.Fatal(err)
			}
			if time.Since(began) > 30*time.Second {
				t.Fatalf("attached %d programs in 30 s", len(ids))
			}
		}
		took = append(took, time.Since(began))
	}
	a.mu.Lock()
	if tuner := a.tuning().tuners["collector.service"]; tuner.path() != dir || tuner.tune != loaded {
		t.Error("the program was loaded again")
	}
	a.mu.Unlock()
	slices.Sort(took)
	t.Logf("attached again after %v at the median, %v at most", took[len(took)/2], took[len(took)-1])
}

// TestRemovedCgroupIsNotMadeAgain removes a cgroup that the agent has made: whoever
// makes it again can, and finds it tuned and traced.
func TestRemovedCgroupIsNotMadeAgain(t *testing.T) {
	root, _ := newTree(t)
	a := testAgent(t, t.TempDir(), testenv.BPFFS(t)+"/sockeye")
	defer a.stop()
	a.moveTo(root)
	a.tuning().kernel.probed = map[string]error{}
	a.begin(t, "tune:\n  - {name: b, cgroup: /lab, set: {sndbuf: 100KB}}\ntrace:\n  - {name: c, cgroup: /lab}\n")
	defer a.endTracing(t)
	defer a.endTuning(t)
	dir := filepath.Join(root, "lab")
	problems := func() []string {
		status, err := a.Status()
		if err != nil {
			t.Fatal(err)
		}
		return []string{status.Tune[0].Problem, status.Trace[0].Problem}
	}
	eventually := func(want string) {
		t.Helper()
		for began := time.Now(); ; time.Sleep(time.Millisecond) {
			got := problems()
			if slices.Equal(got, []string{want, want}) {
				return
			}
			if time.Since(began) > 30*time.Second {
				t.Fatalf("problems %q, want %q", got, want)
			}
		}
	}
	eventually("")
	for range 5 {
		if err := unix.Rmdir(dir); err != nil {
			t.Fatal(err)
		}
		eventually("there is no cgroup /lab")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		eventually("")
		if ids, err := bpf.SockOps(dir); err != nil || len(ids) != 2 {
			t.Errorf("programs %v, %v", ids, err)
		}
	}
}
