// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"io/fs"
	"strconv"
	"sync/atomic"

	"sockeye/internal/cgroup"
)

// A lab's cgroup has the name of a slice, at the place that systemd gives a slice of this name: units are
// looked for there.
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

// removeStaleCgroups removes what labs left whose watchdog was killed as well. Cgroups with processes stay.
func removeStaleCgroups(mount string) {
	for _, dir := range cgroup.Stale(mount, cgroupPrefix, cgroupSuffix) {
		if pids, err := cgroup.Processes(dir); err == nil && len(pids) == 0 {
			_ = cgroup.Remove(dir) // another lab may be doing the same
		}
	}
}

// cgroupPIDs returns the processes of a cgroup and of those below it: none of a cgroup that was removed.
func cgroupPIDs(dir string) ([]int, error) {
	pids, err := cgroup.Processes(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return pids, err
}
