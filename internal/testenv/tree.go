// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
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

// DeepDirectory makes directories in each other until their path has more bytes than a path may have, and calls each with the descriptor
// of every one of them.
func DeepDirectory(t testing.TB, dir string, each func(fd int) error) {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	name := strings.Repeat("d", 200)
	for length := len(dir); err == nil && length < 2*unix.PathMax; length += 1 + len(name) {
		next := -1
		if err = unix.Mkdirat(fd, name, 0o755); err == nil {
			next, err = unix.Openat(fd, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		}
		if err == nil {
			err = each(next)
		}
		unix.Close(fd)
		fd = next
	}
	if err == nil {
		err = unix.Close(fd)
	}
	if err != nil {
		t.Fatal(err)
	}
}
