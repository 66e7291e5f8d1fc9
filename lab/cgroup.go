// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"io/fs"
	"strconv"
	"sync/atomic"

	"sockeye/internal/cgroup"
)

// The cgroup of a lab has the name of a systemd slice, at the path that systemd uses for this name, because Sockeye
// searches for units there.
const (
	cgroupPrefix = "sockeye_lab_"
	cgroupSuffix = ".slice"
)

var cgroupSeq atomic.Int32 // several labs in one process

func makeCgroup(mount string) (string, error) {
	suffix := cgroupSuffix
	if n := cgroupSeq.Add(1); n > 1 {
		suffix = "_" + strconv.Itoa(int(n)) + suffix
	}
	return cgroup.Make(mount, cgroupPrefix, suffix)
}

// removeStaleCgroups removes the empty cgroups of labs whose watchdog was killed too.
func removeStaleCgroups(mount string) {
	for _, dir := range cgroup.Stale(mount, cgroupPrefix, cgroupSuffix) {
		if pids, err := cgroup.Processes(dir); err == nil && len(pids) == 0 {
			_ = cgroup.Remove(dir) // another lab may be doing the same
		}
	}
}

// cgroupPIDs returns the processes of a cgroup and its descendants, none if the cgroup does not exist.
func cgroupPIDs(dir string) ([]int, error) {
	pids, err := cgroup.Processes(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return pids, err
}
