// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A lab's cgroup has the name of a slice, at the place that systemd gives a slice of this name: units are
// looked for there.
const (
	cgroupPrefix = "sockeye_lab_"
	cgroupSuffix = ".slice"
)

var cgroupSeq atomic.Int32 // several labs in one process

// cgroup2Mount returns where the cgroup v2 hierarchy is mounted: on hybrid hosts not at /sys/fs/cgroup.
func cgroup2Mount() (string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("find cgroup2 mount: %w", err)
	}
	// proc(5): 36 35 98:0 /root MOUNTPOINT options [optional fields] - TYPE source options
	for line := range strings.Lines(string(b)) {
		before, after, _ := strings.Cut(line, " - ")
		if f := strings.Fields(before); strings.HasPrefix(after, "cgroup2 ") && len(f) > 4 {
			return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\134`, `\`).Replace(f[4]), nil
		}
	}
	return "", errors.New("find cgroup2 mount: none in /proc/self/mountinfo")
}

func makeCgroup(mount string) (string, error) {
	name := cgroupPrefix + strconv.Itoa(os.Getpid())
	if n := cgroupSeq.Add(1); n > 1 {
		name += "_" + strconv.Itoa(int(n))
	}
	dir := filepath.Join(mount, name+cgroupSuffix)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", fmt.Errorf("make cgroup: %w", err)
	}
	return dir, nil
}

// removeStaleCgroups removes what labs left whose watchdog was killed as well. Groups with processes stay.
func removeStaleCgroups(mount string) {
	dirs, _ := filepath.Glob(filepath.Join(mount, cgroupPrefix+"*"))
	for _, dir := range dirs {
		name := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(dir), cgroupPrefix), cgroupSuffix)
		owner, _, _ := strings.Cut(name, "_")
		pid, err := strconv.Atoi(owner)
		if err != nil || pid <= 0 || !errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			continue
		}
		if pids, err := cgroupPIDs(dir); err == nil && len(pids) == 0 {
			_ = removeCgroup(dir) // another lab may be doing the same
		}
	}
}

// cgroupPIDs returns the processes of a cgroup and of all groups below it.
func cgroupPIDs(dir string) ([]int, error) {
	var pids []int
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.Name() != "cgroup.procs" {
			return nil
		}
		b, err := os.ReadFile(path)
		for f := range strings.FieldsSeq(string(b)) {
			if pid, err := strconv.Atoi(f); err == nil && pid > 0 { // 0: a process of another pid namespace
				pids = append(pids, pid)
			}
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) { // removed while we read
		return pids, nil
	}
	return pids, err
}

// killCgroup kills all processes of a cgroup and waits until there is none. It does without cgroup.kill, which is Linux 5.14.
func killCgroup(dir string) error {
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		pids, err := cgroupPIDs(dir)
		if err != nil {
			return fmt.Errorf("kill processes of cgroup %s: %w", dir, err)
		}
		if len(pids) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("kill processes of cgroup %s: still there: %v", dir, pids)
		}
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL) // it may be gone by now
		}
	}
}

// removeCgroup removes an empty cgroup and the groups below it.
func removeCgroup(dir string) error {
	var dirs []string
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return nil
	})
	var errs []error
	for _, d := range slices.Backward(dirs) {
		err := unix.Rmdir(d)
		// Processes leave cgroup.procs a moment before they leave the group.
		for deadline := time.Now().Add(10 * time.Second); errors.Is(err, unix.EBUSY) && time.Now().Before(deadline); err = unix.Rmdir(d) {
			time.Sleep(5 * time.Millisecond)
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("remove cgroup %s: %w", d, err))
		}
	}
	return errors.Join(errs...)
}
