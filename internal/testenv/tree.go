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

// CgroupTree creates a directory for a tree of cgroups. mkdir creates a cgroup in it,
// and its parents. All cgroups are removed at the end of the test.
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
