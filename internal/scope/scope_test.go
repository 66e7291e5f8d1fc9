// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"errors"
	"io/fs"
	"path/filepath"
	"testing"

	"sockeye/internal/fault"
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
