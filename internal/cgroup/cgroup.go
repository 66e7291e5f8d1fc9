// SPDX-License-Identifier: Apache-2.0

// Package cgroup finds the cgroup v2 hierarchy and the cgroup of a process, and makes, empties and removes
// cgroups. Unless a comment says otherwise, a cgroup is given by the absolute path of its directory.
package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	procs = "cgroup.procs"

	killTimeout   = 30 * time.Second
	removeTimeout = 10 * time.Second
	interval      = 5 * time.Millisecond
)

// NotMountedError is the error of a host without a mounted cgroup v2 hierarchy.
type NotMountedError struct {
	V1 bool // hierarchies of cgroup v1 are mounted
}

func (NotMountedError) Error() string { return "find cgroup v2: it is not mounted" }

// Explain returns the hint for the user, and the exit code of what the kernel cannot do.
func (e NotMountedError) Explain() (hint string, code int) {
	const unified = "/sys/fs/cgroup/unified" // beside the hierarchies of v1
	if _, err := os.Stat(unified); err == nil {
		return "mount -t cgroup2 none " + unified, 3
	}
	if e.V1 {
		// A mount at /sys/fs/cgroup would hide the hierarchies of v1, and systemd may have made that directory read-only.
		return "this host has cgroup v1 only: boot with systemd.unified_cgroup_hierarchy=1, or mkdir /run/cgroup2 && mount -t cgroup2 none /run/cgroup2", 3
	}
	return "mount -t cgroup2 none /sys/fs/cgroup", 3
}

// Of returns the path of the cgroup of a process below the mount of [Mount]. It returns fs.ErrNotExist if there is no
// such process, or if the process is in no cgroup v2.
func Of(pid int) (string, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", fmt.Errorf("read cgroup of process: %w", err)
	}
	path, ok := Parse(string(text))
	if !ok {
		return "", fmt.Errorf("read cgroup of process %d: it is in no cgroup v2: %w", pid, fs.ErrNotExist)
	}
	return strings.TrimSuffix(path, " (deleted)"), nil
}

// Parse returns the path of the cgroup v2 in the text of a /proc/PID/cgroup, below the mount of [Mount]. The path of a
// removed cgroup, which a zombie may be in, ends in " (deleted)". The path of a cgroup that is not below the mount
// starts with "/..".
func Parse(text string) (path string, ok bool) {
	path, ok = parse(text)
	return current().translate(path), ok
}

// parse is Parse with a path from the root of the cgroup namespace of this process.
func parse(text string) (path string, ok bool) {
	for line := range strings.Lines(text) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSuffix(path, "\n"), true
		}
	}
	return "", false
}

// Make makes the cgroup prefix PID suffix below the root of the hierarchy, where PID is the id of this process, and
// returns its path. Stale finds the cgroup by this name once the process has ended.
func Make(mount, prefix, suffix string) (string, error) {
	dir := filepath.Join(mount, prefix+strconv.Itoa(os.Getpid())+suffix)
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", fmt.Errorf("make cgroup: %w", err)
	}
	return dir, nil
}

// Stale lists the cgroups below the root that have a name of Make and whose process no longer exists. Between PID
// and suffix there may be an underscore and any text.
func Stale(mount, prefix, suffix string) []string {
	entries, err := os.ReadDir(mount)
	if err != nil {
		return nil
	}
	var stale []string
	for _, e := range entries {
		name, ok := strings.CutPrefix(e.Name(), prefix)
		if !ok || !e.IsDir() {
			continue
		}
		owner, _, _ := strings.Cut(strings.TrimSuffix(name, suffix), "_")
		if pid, err := strconv.Atoi(owner); err == nil && pid > 0 && errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
			stale = append(stale, filepath.Join(mount, e.Name()))
		}
	}
	return stale
}

// Move moves a process, or this one for pid 0, into a cgroup.
func Move(dir string, pid int) error {
	if err := os.WriteFile(filepath.Join(dir, procs), []byte(strconv.Itoa(pid)), 0); err != nil {
		return fmt.Errorf("move process %d into cgroup: %w", pid, err)
	}
	return nil
}

// removed returns whether the error is that of a cgroup that was removed while it was read.
func removed(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) }

// Destroy kills all processes of a cgroup and of those below it, and removes these cgroups.
func Destroy(dir string) error {
	if err := Kill(dir); err != nil {
		return err
	}
	return Remove(dir)
}

// Kill kills all processes of a cgroup and of those below it, and waits up to 30 seconds until there is none. A
// cgroup that does not exist has none. Kill does without cgroup.kill, which Linux 5.10 lacks and which also kills
// what is started in the cgroup later (Linux 6.18 compares kill counts).
func Kill(dir string) error {
	for deadline := time.Now().Add(killTimeout); ; time.Sleep(interval) {
		pids, err := Processes(dir)
		switch {
		case removed(err):
			return nil
		case err != nil:
			return fmt.Errorf("kill processes of cgroup %s: %w", dir, err)
		case len(pids) == 0:
			return nil
		case time.Now().After(deadline):
			return fmt.Errorf("kill processes of cgroup %s: still there: %v", dir, pids)
		}
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL) // the process may be gone by now
		}
	}
}

// Processes lists the processes of a cgroup and of those below it. It returns fs.ErrNotExist if the cgroup does not
// exist. Cgroups below that disappear meanwhile are left out, and so are those at paths of more than 4,095 bytes, and processes that this
// pid namespace does not show.
func Processes(dir string) ([]int, error) {
	var pids []int
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if path != dir && (removed(err) || errors.Is(err, unix.ENAMETOOLONG)) {
				return nil
			}
			return err
		}
		if d.Name() != procs {
			return nil
		}
		list, err := os.ReadFile(path)
		switch {
		case removed(err), errors.Is(err, unix.ENAMETOOLONG):
			return nil
		case errors.Is(err, unix.EOPNOTSUPP):
			// A threaded cgroup: its processes are listed above it.
			return nil
		case err != nil:
			return err
		}
		for field := range strings.FieldsSeq(string(list)) {
			// 0 is a process that this pid namespace does not show.
			if pid, err := strconv.Atoi(field); err == nil && pid > 0 {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list processes of cgroup: %w", err)
	}
	return pids, nil
}

// Remove removes a cgroup without processes, and those below it. It is not an error if the cgroup does not exist. A
// process leaves cgroup.procs a moment before it leaves the cgroup: Remove waits up to 10 seconds for that.
func Remove(dir string) error {
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
		for deadline := time.Now().Add(removeTimeout); errors.Is(err, unix.EBUSY) && time.Now().Before(deadline); err = unix.Rmdir(d) {
			time.Sleep(interval)
		}
		if err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("remove cgroup %s: %w", d, err))
		}
	}
	return errors.Join(errs...)
}
