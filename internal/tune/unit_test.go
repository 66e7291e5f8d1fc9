// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package tune

import (
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/domain/domaintest"
	"sockeye/internal/fault"
	"sockeye/internal/scope"
	"sockeye/internal/testenv"
	"sockeye/internal/trace"
)

// tuneAndTrace runs tune and trace with cgroups below a root.
func tuneAndTrace(t *testing.T, root string) *domaintest.Runner {
	h := domaintest.Host(t, t.TempDir(), testenv.BPFFS(t)+"/sockeye", slog.DiscardHandler)
	h.Cgroups, h.Watch.Tree = scope.Tree{Mount: root}, scope.Tree{Mount: root}
	d := New(h)
	d.kernel.probed = map[string]error{}
	return domaintest.New(h, d, trace.New(h, d))
}

const userUnit = "user.slice/user-1000.slice/user@1000.service/"

// attachedAt returns the directories below a root that have a sock_ops program.
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

// TestUnitsOfUser starts units of a user's service manager with the names of units in the policy: nothing is attached
// to them, and the system units of these names are still tuned and traced.
func TestUnitsOfUser(t *testing.T) {
	root, mkdir := testenv.CgroupTree(t)
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
	a := tuneAndTrace(t, root)
	defer a.Stop()
	a.Start(t, policy)
	defer a.Retire(t)
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
	// More units of the user, after the system units have started.
	mkdir(userUnit + "more.slice/nfacctd@1.service")
	a.Host.Watch.Look()
	status := a.Status(t)
	for _, s := range status.Tune {
		if !s.Attached || s.Problem != "" {
			t.Errorf("tune %s: attached %v, %s", s.Cgroup, s.Attached, s.Problem)
		}
	}
	if list = attachedAt(t, root); !slices.Equal(list, want) {
		t.Errorf("attached to %q, want %q", list, want)
	}
}

// TestCheckNested compares the errors of check without an agent with those of plan.
func TestCheckNested(t *testing.T) {
	root, mkdir := testenv.CgroupTree(t)
	mkdir("system.slice/here.service")
	h := scope.Tree{Mount: root}
	rules := func(names ...string) (all []cgroupRules) {
		for _, name := range names {
			all = append(all, cgroupRules{Cgroup: name, Rules: []config.TuneRule{{}}})
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

// TestUnitStartsInTuned starts a unit in a tuned slice again and again while the domain looks for units: the unit never
// gets a program.
func TestUnitStartsInTuned(t *testing.T) {
	root, mkdir := testenv.CgroupTree(t)
	outer := mkdir("outer.slice")
	unit := filepath.Join(outer, "collector.service")
	a := tuneAndTrace(t, root)
	defer a.Stop()
	a.Start(t, "tune:\n  - {name: a, cgroup: outer.slice, set: {sndbuf: 100KB}}\n  - {name: b, cgroup: collector.service, set: {sndbuf: 100KB}}\n")
	defer a.Retire(t)
	var looking sync.WaitGroup
	stop := make(chan struct{})
	looking.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				a.Host.Watch.Look()
			}
		}
	})
	defer looking.Wait()
	defer close(stop)
	for range 300 {
		mkdir("outer.slice/collector.service")
		a.Host.Watch.Look()
		status := a.Status(t)
		if s := status.Tune[0]; s.Attached || !strings.Contains(s.Problem, "is inside cgroup outer.slice") || s.Hint == "" {
			t.Fatalf("the unit: %+v", s)
		}
		if list := attachedAt(t, root); !slices.Equal(list, []string{"outer.slice"}) {
			t.Fatalf("attached to %q", list)
		}
		if err := unix.Rmdir(unit); err != nil {
			t.Fatal(err)
		}
		a.Host.Watch.Look()
	}
}

// TestRetry checks that a policy without a change tries again what has failed, and sets options that the kernel has learned since.
func TestRetry(t *testing.T) {
	const policy = `
tune:
  - {name: base, cgroup: /a, set: {sndbuf: 100KB}}
  - {name: more, cgroup: /b, set: {sndbuf: 100KB, nodelay: true}, optional: true}
`
	root, mkdir := testenv.CgroupTree(t) // the watch of the host's cgroups would try again
	mkdir("a")
	mkdir("b")
	a := tuneAndTrace(t, root)
	defer a.Stop()
	d := tuningOf(a)
	d.kernel.mu.Lock()
	d.kernel.probed = map[string]error{"sndbuf": ebpf.ErrNotSupported, "nodelay": ebpf.ErrNotSupported}
	d.kernel.mu.Unlock()
	a.Start(t, policy)
	defer a.Retire(t)
	status := func() []api.TuneStatus {
		t.Helper()
		list, err := d.Cgroups("")
		if err != nil || len(list) != 2 {
			t.Fatalf("%+v, %v", list, err)
		}
		return list
	}
	if s := status(); s[0].Attached || !s[1].Attached || len(s[1].Rules[0].Skipped) != 2 {
		t.Fatalf("%+v", s)
	}
	plan := func() (list []string) {
		t.Helper()
		changes, err := a.Plan(policy)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range changes {
			list = append(list, c.Cgroup+" "+c.What+" ("+c.Effect+")")
		}
		return list
	}
	d.kernel.mu.Lock()
	d.kernel.probed = map[string]error{}
	d.kernel.mu.Unlock()
	want := []string{
		"/a tuning is tried again (not in force: rule base: this kernel cannot set sndbuf: it needs Linux 4.13 or later)",
		"/b rule more: options that the kernel cannot set: sndbuf, nodelay -> none (for new connections)",
	}
	if got := plan(); !slices.Equal(got, want) {
		t.Fatalf("got\n%q\nwant\n%q", got, want)
	}
	if _, err := a.Apply(policy); err != nil {
		t.Fatal(err)
	}
	if s := status(); !s[0].Attached || s[0].Problem != "" || !s[1].Attached || len(s[1].Rules[0].Skipped) != 0 {
		t.Errorf("%+v", s)
	}
	if got := plan(); got != nil {
		t.Errorf("after apply: %q", got)
	}
}

// TestUnitStartsAgain restarts a unit many times: the loaded programs are attached to each new cgroup. The test logs
// the time this takes.
func TestUnitStartsAgain(t *testing.T) {
	root, mkdir := testenv.CgroupTree(t)
	const unit = "system.slice/collector.service"
	dir := mkdir(unit)
	for i := range 200 {
		mkdir(fmt.Sprintf("system.slice/other-%d.service", i))
	}
	a := tuneAndTrace(t, root)
	defer a.Stop()
	a.Start(t, "tune:\n  - {name: b, cgroup: collector.service, set: {sndbuf: 100KB}}\ntrace:\n  - {name: c, cgroup: collector.service}\n")
	defer a.Retire(t)
	tuningOf(a).mu.Lock()
	loaded := tuningOf(a).tuners["collector.service"].tune
	tuningOf(a).mu.Unlock()
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
	tuningOf(a).mu.Lock()
	if tuner := tuningOf(a).tuners["collector.service"]; tuner.path() != dir || tuner.tune != loaded {
		t.Error("the program was loaded again")
	}
	tuningOf(a).mu.Unlock()
	slices.Sort(took)
	t.Logf("attached again after %v at the median, %v at most", took[len(took)/2], took[len(took)-1])
}

// TestRemovedCgroupIsNotMadeAgain removes a cgroup that the agent has created: the agent does not create it again,
// and tunes and traces it when somebody else does.
func TestRemovedCgroupIsNotMadeAgain(t *testing.T) {
	root, _ := testenv.CgroupTree(t)
	a := tuneAndTrace(t, root)
	defer a.Stop()
	a.Start(t, "tune:\n  - {name: b, cgroup: /lab, set: {sndbuf: 100KB}}\ntrace:\n  - {name: c, cgroup: /lab}\n")
	defer a.Retire(t)
	dir := filepath.Join(root, "lab")
	problems := func() []string {
		status := a.Status(t)
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
