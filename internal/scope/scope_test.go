// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
	"sockeye/internal/netns"
	"sockeye/internal/testenv"
)

func TestFindUnit(t *testing.T) {
	root, mkdir := testenv.CgroupTree(t)
	h := Tree{Mount: root}
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

func TestSlicePath(t *testing.T) {
	for name, want := range map[string]string{
		"-.slice": "/", "a.slice": "/a.slice", "a-b.slice": "/a.slice/a-b.slice", "a-b-c.slice": "/a.slice/a-b.slice/a-b-c.slice",
	} {
		if got := slicePath(name); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

// TestRemoveCreatedReadOnly removes cgroups of a file system that is read-only since, as under the unit without cgroups.conf: the
// error names each of them.
func TestRemoveCreatedReadOnly(t *testing.T) {
	dir := t.TempDir()
	var scopes []Scope
	for _, name := range []string{"one", "two"} {
		path := filepath.Join(dir, name)
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatal(err)
		}
		scopes = append(scopes, Scope{Created: []string{path}})
	}
	err := netns.Thread(func() error {
		// The mounts belong to the thread, and are undone when it exits.
		if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		if err := unix.Mount(dir, dir, "", unix.MS_BIND, ""); err != nil {
			return os.NewSyscallError("mount", err)
		}
		if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
			return os.NewSyscallError("remount", err)
		}
		return RemoveCreated(scopes)
	})
	for _, s := range scopes {
		if err == nil || !strings.Contains(err.Error(), "remove cgroup "+s.Created[0]+", which Sockeye created") {
			t.Errorf("%v does not name %s", err, s.Created[0])
		}
	}
	if fault.Code(err) != fault.CodeNotPermitted || !strings.Contains(fault.Hint(err), "rmdir "+scopes[0].Created[0]) {
		t.Errorf("code %d, hint %q", fault.Code(err), fault.Hint(err))
	}
}
