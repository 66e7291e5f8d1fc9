// SPDX-License-Identifier: Apache-2.0

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
	"sync/atomic"

	"golang.org/x/sys/unix"

	"sockeye/internal/mountinfo"
)

// In a container, this process may have a cgroup namespace of its own. The kernel then shows the paths of cgroups from
// the root of that namespace, both in /proc/PID/cgroup and in the field ROOT of /proc/self/mountinfo
// (cgroup_namespaces(7)): a process of the host is in "/../../system.slice/x.service", and the root of the host's
// hierarchy, if it is mounted in the container, is "/../..". A policy names cgroups by their paths below the mount.

// mount is a mount of the cgroup v2 hierarchy.
type mount struct {
	id    uint64
	root  string // cgroup at the mount point, from the root of the cgroup namespace
	point string
}

// Mount returns where the cgroup v2 hierarchy is mounted: on hybrid hosts not at /sys/fs/cgroup. Of several mounts it
// returns the one that shows most of the hierarchy. It returns a NotMountedError if the hierarchy is not mounted in this
// mount namespace.
func Mount() (string, error) {
	m, err := findMount()
	return m.point, err
}

// Outside returns whether a path of Of or Parse is not below the mount.
func Outside(path string) bool {
	up, _ := splitUp(path)
	return up > 0
}

// namespace has the names of the cgroups on the way from the root of the mount to the root of the cgroup namespace of
// this process.
type namespace []string

// translate returns a path from the root of the mount, given one from the root of the namespace.
func (n namespace) translate(path string) string {
	up, below := splitUp(path)
	if len(n) == 0 || path == "" || up > len(n) {
		return path
	}
	outer := strings.Join(n[:len(n)-up], "/")
	if outer == "" {
		return below
	}
	return "/" + outer + strings.TrimSuffix(below, "/")
}

// found is the namespace of this process once it is known: neither the namespace of a Go program nor the names of
// cgroups change.
var found atomic.Pointer[namespace]

// current returns the namespace of this process. If the namespace cannot be found, paths stay those from its root.
func current() namespace {
	if n := found.Load(); n != nil {
		return *n
	}
	n, err := findNamespace()
	if err != nil {
		return nil
	}
	found.Store(&n)
	return n
}

// findNamespace finds the root of the cgroup namespace below the mount. The kernel tells how many levels it is down, but
// not the names. They are those of the cgroup of this process, which is the one whose cgroup.procs has its process id.
func findNamespace() (namespace, error) {
	m, err := findMount()
	if err != nil {
		return nil, err
	}
	levels := m.levels()
	if levels <= 0 {
		return nil, nil
	}
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, fmt.Errorf("find cgroup namespace: %w", err)
	}
	path, _ := parse(string(text))
	up, below := splitUp(path)
	if up > 0 {
		return nil, fmt.Errorf("find cgroup namespace: this process was moved out of it, to %s", path)
	}
	depth := levels + len(names(below))
	own, err := findProcess(m.point, os.Getpid(), depth)
	if err != nil {
		return nil, fmt.Errorf("find cgroup namespace: %w", err)
	}
	all := names(own)
	if !slices.Equal(all[levels:], names(below)) {
		return nil, fmt.Errorf("find cgroup namespace: this process is in %s, and in %s", own, path)
	}
	return all[:levels], nil
}

func findMount() (mount, error) {
	all, err := mountinfo.Read()
	if err != nil {
		return mount{}, fmt.Errorf("find cgroup v2: %w", err)
	}
	m, ok := widest(slices.DeleteFunc(ofType(all, "cgroup2"), func(m mount) bool { return !m.visible() }))
	if !ok {
		return mount{}, NotMountedError{V1: len(ofType(all, "cgroup")) > 0}
	}
	return m, nil
}

// ofType returns the mounts of a type of file system.
func ofType(all []mountinfo.Mount, fstype string) []mount {
	var mounts []mount
	for _, m := range all {
		if m.Type == fstype {
			mounts = append(mounts, mount{m.ID, m.Root, m.Point})
		}
	}
	return mounts
}

// visible returns whether the mount point still is this mount, and not a mount on top of it: a container runtime mounts
// the cgroup of the container where a volume may then mount those of the host.
func (m mount) visible() bool {
	var stat unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, m.point, unix.AT_NO_AUTOMOUNT, unix.STATX_MNT_ID, &stat)
	return err == nil && (stat.Mask&unix.STATX_MNT_ID == 0 || stat.Mnt_id == m.id)
}

// widest returns the mount that shows most of the hierarchy, the first one of several.
func widest(mounts []mount) (mount, bool) {
	if len(mounts) == 0 {
		return mount{}, false
	}
	return slices.MaxFunc(mounts, func(a, b mount) int { return a.levels() - b.levels() }), true
}

// levels returns how many levels the root of the mount is above the root of the cgroup namespace, or -1 if the mount
// does not contain the root of the namespace.
func (m mount) levels() int {
	up, below := splitUp(m.root)
	if below != "/" {
		return -1
	}
	return up
}

// splitUp cuts the leading ".." off a path, and returns their number and the path below.
func splitUp(path string) (up int, below string) {
	for strings.HasPrefix(path+"/", "/../") {
		path = strings.TrimPrefix(path, "/..")
		up++
	}
	if path == "" {
		path = "/"
	}
	return up, path
}

// names returns the components of a path.
func names(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
}

// findProcess returns the cgroup that has a process, depth levels below a mount point. The error wraps fs.ErrNotExist if
// there is none.
func findProcess(point string, pid, depth int) (string, error) {
	own := ""
	err := filepath.WalkDir(point, func(dir string, d fs.DirEntry, err error) error {
		switch {
		case err != nil && dir == point:
			return err
		case err != nil && removed(err):
			return nil
		case err != nil:
			return err
		case !d.IsDir():
			return nil
		}
		path := strings.TrimPrefix(dir, point)
		if len(names(path)) < depth {
			return nil
		}
		pids, err := os.ReadFile(filepath.Join(dir, procs))
		if err == nil && slices.Contains(strings.Fields(string(pids)), strconv.Itoa(pid)) {
			own = path
			return filepath.SkipAll
		}
		if err != nil && !removed(err) && !errors.Is(err, unix.EOPNOTSUPP) { // of a threaded cgroup
			return err
		}
		return filepath.SkipDir
	})
	if err != nil {
		return "", err
	}
	if own == "" {
		return "", fmt.Errorf("find process %d: %w", pid, fs.ErrNotExist)
	}
	return own, nil
}
