// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sockeye/internal/mountinfo"
)

func TestParseMounts(t *testing.T) {
	const hybrid = `25 30 0:23 / /sys rw,nosuid shared:7 - sysfs sysfs rw
31 25 0:26 / /sys/fs/cgroup ro shared:9 - tmpfs tmpfs ro,mode=755
33 31 0:28 / /sys/fs/cgroup/systemd rw shared:11 - cgroup cgroup rw,name=systemd
32 31 0:27 / /sys/fs/cgroup/a\040b\134c rw,nosuid - cgroup2 cgroup2 rw
34 31 0:27 / /later rw,nosuid shared:10 master:3 - cgroup2 cgroup2 rw,nsdelegate
`
	if got := ofType(mountinfo.Parse(hybrid), "cgroup2"); !slices.Equal(got, []mount{{32, "/", `/sys/fs/cgroup/a b\c`}, {34, "/", "/later"}}) {
		t.Errorf("got %v", got)
	}
	for _, text := range []string{"", "x", strings.ReplaceAll(hybrid, "cgroup2 ", "cgroup "), "1 - cgroup2 x"} {
		if got := ofType(mountinfo.Parse(text), "cgroup2"); len(got) > 0 {
			t.Errorf("found %v in %q", got, text)
		}
	}
}

func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		"0::/\n":                              "/",
		"0::/a.slice/b c\n":                   "/a.slice/b c",
		"12:cpu:/x\n1:name=systemd:/y\n0::/z": "/z",
		"0::/a (deleted)\n":                   "/a (deleted)",
	} {
		if got, ok := Parse(text); !ok || got != want {
			t.Errorf("%q: got %q, %t", text, got, ok)
		}
	}
	if got, ok := Parse("12:cpu:/x\n"); ok {
		t.Errorf("got %q", got)
	}
}

func TestNotMounted(t *testing.T) {
	var explained interface{ Explain() (string, int) }
	if !errors.As(error(NotMountedError{}), &explained) {
		t.Fatal("no hint")
	}
}

func TestLife(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make cgroups")
	}
	mount, err := Mount()
	if err != nil {
		t.Fatal(err)
	}
	const prefix, suffix = "sockeye-cgroup-test-", ".x"
	for _, left := range Stale(mount, prefix, suffix) {
		if err := Destroy(left); err != nil {
			t.Error(err)
		}
	}
	dir, err := Make(mount, prefix, suffix)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = Destroy(dir) }()
	if stale := Stale(mount, prefix, suffix); slices.Contains(stale, dir) {
		t.Errorf("a live process' cgroup is stale: %q", stale)
	}
	below := filepath.Join(dir, "one", "two")
	if err := os.MkdirAll(below, 0o755); err != nil {
		t.Fatal(err)
	}
	child := exec.Command("sleep", "60")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = child.Wait(); close(ended) }()
	if err := Move(below, child.Process.Pid); err != nil {
		t.Fatal(err)
	}
	if path, err := Of(child.Process.Pid); err != nil || filepath.Join(mount, path) != below {
		t.Errorf("moved to %s, is in %s, %v", below, path, err)
	}
	if pids, err := Processes(dir); err != nil || !slices.Equal(pids, []int{child.Process.Pid}) {
		t.Errorf("processes %v, %v", pids, err)
	}
	if err := Destroy(dir); err != nil {
		t.Error(err)
	}
	<-ended
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("still there: %v", err)
	}
	if _, err := Processes(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("processes of no cgroup: %v", err)
	}
	if err := Destroy(dir); err != nil {
		t.Errorf("destroy what is not there: %v", err)
	}
	if _, err := Of(1 << 30); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("cgroup of no process: %v", err)
	}
}
