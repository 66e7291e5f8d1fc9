// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// CgroupTree is a root for cgroups, laid out as systemd does below its own. Folders
// are removed at the end, in whatever order they were made.
func CgroupTree(t *testing.T) (root string, mkdir func(path string) string) {
	t.Helper()
	root = filepath.Join(Cgroup(), "tree")
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
