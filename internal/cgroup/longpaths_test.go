// SPDX-License-Identifier: Apache-2.0

package cgroup_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/cgroup"
	"sockeye/internal/testenv"
)

// TestLongPaths lists the processes of a cgroup in which a user has made cgroups at paths that are too long to open.
func TestLongPaths(t *testing.T) {
	const procs = "cgroup.procs"
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, procs), []byte("12\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	testenv.DeepDirectory(t, dir, func(fd int) error {
		file, err := unix.Openat(fd, procs, unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
		if err == nil {
			_, err = unix.Write(file, []byte("13\n"))
			unix.Close(file)
		}
		return err
	})
	if pids, err := cgroup.Processes(dir); err != nil || len(pids) < 15 || !slices.Contains(pids, 12) {
		t.Errorf("%v, %v", pids, err)
	}
}
