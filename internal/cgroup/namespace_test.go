// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// inside has this binary report, from another cgroup namespace, the cgroups of the processes in its value. mounted has it
// mount the hierarchy of that namespace first: "instead" of the others, or "beside" them. moved has it move to a cgroup.
const inside, mounted, moved = "SOCKEYE_TEST_INSIDE", "SOCKEYE_TEST_MOUNTED", "SOCKEYE_TEST_MOVED"

// RunTests runs the tests, or reports from another namespace.
func RunTests(run func() int) {
	if pids, ok := os.LookupEnv(inside); ok {
		report(strings.Fields(pids), os.Getenv(mounted), os.Getenv(moved))
		os.Exit(0)
	}
	os.Exit(run())
}

func report(pids []string, how, dir string) {
	fail := func(err error) {
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	if how != "" {
		host, err := Mount()
		fail(err)
		fail(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
		point := host
		if how == "beside" {
			point = os.TempDir()
		} else {
			fail(unix.Unmount(host, unix.MNT_DETACH))
		}
		fail(unix.Mount("cgroup2", point, "cgroup2", 0, ""))
	}
	if dir != "" {
		fail(Move(dir, 0))
	}
	mount, err := Mount()
	fail(err)
	fmt.Println(mount)
	for _, text := range pids {
		pid, err := strconv.Atoi(text)
		fail(err)
		path, err := Of(pid)
		fail(err)
		fmt.Println(path)
	}
}

func TestTranslate(t *testing.T) {
	n := namespace{"kubepods.slice", "pod.slice", "agent.scope"}
	for path, want := range map[string]string{
		"/":                              "/kubepods.slice/pod.slice/agent.scope",
		"/below":                         "/kubepods.slice/pod.slice/agent.scope/below",
		"/..":                            "/kubepods.slice/pod.slice",
		"/../other.scope":                "/kubepods.slice/pod.slice/other.scope",
		"/../../..":                      "/",
		"/../../../system.slice/a b":     "/system.slice/a b",
		"/../../../gone.slice (deleted)": "/gone.slice (deleted)",
		"/../../../..":                   "/../../../..",
		"/../../../../system.slice/x":    "/../../../../system.slice/x",
		"/..hidden":                      "/kubepods.slice/pod.slice/agent.scope/..hidden",
		"/../..hidden/...":               "/kubepods.slice/pod.slice/..hidden/...",
		"/../../../..hidden":             "/..hidden",
		"":                               "",
	} {
		if got := n.translate(path); got != want {
			t.Errorf("%s: got %s, want %s", path, got, want)
		}
	}
	for _, path := range []string{"", "/", "/a", "/../a"} {
		if got := (namespace{}).translate(path); got != path {
			t.Errorf("at the root %s becomes %s", path, got)
		}
	}
	for path, want := range map[string]bool{"/": false, "/a/b": false, "/..a": false, "/..": true, "/../a": true} {
		if Outside(path) != want {
			t.Errorf("%s is outside: %t", path, !want)
		}
	}
}

func TestWidest(t *testing.T) {
	own, host, node, part := mount{1, "/", "/own"}, mount{2, "/../../..", "/host"}, mount{3, "/..", "/node"}, mount{4, "/../../../system.slice", "/part"}
	for _, c := range []struct {
		mounts []mount
		want   mount
	}{
		{[]mount{own, host, node, part}, host},
		{[]mount{part, own}, own},
		{[]mount{own, {5, "/", "/second"}}, own},
		{[]mount{part}, part},
	} {
		if got, ok := widest(c.mounts); !ok || got != c.want {
			t.Errorf("%v: got %v", c.mounts, got)
		}
	}
	if m, ok := widest(nil); ok {
		t.Errorf("got %v of no mounts", m)
	}
}

// TestNamespace runs a process in a cgroup namespace of its own, as the agent in a container: it must name the cgroups of
// all processes as the host does, if the mount shows them.
func TestNamespace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make cgroups")
	}
	mount, err := Mount()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := Make(mount, "sockeye-cgroup-test-", ".namespace")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := Destroy(dir); err != nil {
			t.Error(err)
		}
	})
	var pids []string
	wait := func(group string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(dir, group), 0o755); err != nil {
			t.Fatal(err)
		}
		child := exec.Command("sleep", "60")
		start(t, child, filepath.Join(dir, group))
		t.Cleanup(func() { child.Process.Kill(); child.Wait() })
		pids = append(pids, strconv.Itoa(child.Process.Pid))
	}
	for _, group := range []string{"pod/agent", "pod/agent/below", "pod", "pod/agent2", "pod2/agent", "..odd"} {
		wait(group)
	}
	pids = append(pids, strconv.Itoa(os.Getpid()))
	own, err := Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	name := "/" + filepath.Base(dir)
	host := []string{name + "/pod/agent", name + "/pod/agent/below", name + "/pod", name + "/pod/agent2", name + "/pod2/agent", name + "/..odd", own}
	tmp := t.TempDir()
	outside := []string{"/", "/below", "/..", "/../agent2", "/../../pod2/agent", "/../../..odd", "/../../.." + strings.TrimSuffix(own, "/")}
	for _, c := range []struct {
		name, group, mounted, moved string
		want                        []string
	}{
		{"the host's mount", "pod/agent", "", "", host},
		{"the cgroup of others", "pod", "", "", host},
		{"both mounts", "pod/agent", "beside", "", host},
		{"below the root of the namespace", "pod/agent", "", "pod/agent/below", host},
		{"only its own mount", "pod/agent", "instead", "", outside},
		// The kernel shows nothing from which the names of "pod" and "agent" follow.
		{"moved out of the namespace", "pod/agent", "", "pod2/agent", outside},
	} {
		t.Run(c.name, func(t *testing.T) {
			child := exec.Command("/proc/self/exe")
			child.Env = append(os.Environ(), inside+"="+strings.Join(pids, " "), mounted+"="+c.mounted, "TMPDIR="+tmp)
			if c.moved != "" {
				child.Env = append(child.Env, moved+"="+filepath.Join(dir, c.moved))
			}
			child.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Unshareflags: unix.CLONE_NEWCGROUP}
			var out bytes.Buffer
			child.Stdout = &out
			start(t, child, filepath.Join(dir, c.group))
			if err := child.Wait(); err != nil {
				t.Fatalf("%v: %s", err, out.String())
			}
			if want := strings.Join(append([]string{mount}, c.want...), "\n") + "\n"; out.String() != want {
				t.Errorf("got\n%swant\n%s", out.String(), want)
			}
		})
	}
}

// start starts a process in a cgroup.
func start(t *testing.T, cmd *exec.Cmd, dir string) {
	t.Helper()
	group, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer group.Close()
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(group.Fd())
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
}

func TestFindProcess(t *testing.T) {
	mount, err := Mount()
	if err != nil {
		t.Fatal(err)
	}
	if own, err := findProcess(mount, 1<<30, 1); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("found a process that does not exist in %s, %v", own, err)
	}
	if _, err := findProcess("/nonexistent", os.Getpid(), 1); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("found a cgroup that does not exist: %v", err)
	}
}
