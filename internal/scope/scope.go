// SPDX-License-Identifier: Apache-2.0

// Package scope finds the cgroups that a policy names, creates those that do not exist, and records with the
// pins what is to be removed again. A policy names a cgroup by its path, or a systemd unit.
package scope

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/cgroup"
	"sockeye/internal/fault"
	"sockeye/internal/rights"
)

// PinName is a cgroup's name as a folder's. Names in a bpffs have no dots.
func PinName(cgroup string) string {
	readable := strings.Trim(strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' {
			return r
		}
		return '_'
	}, cgroup), "_")
	sum := sha256.Sum256([]byte(cgroup))
	return readable[:min(len(readable), 40)] + "_" + hex.EncodeToString(sum[:4])
}

// Tree is the cgroup v2 hierarchy of the host.
type Tree struct {
	Mount string // its mount point
}

// Scope is kept with the pins: what to undo, whoever does it.
type Scope struct {
	Cgroup string `json:"cgroup"` // as in the policy
	Path   string `json:"path"`   // absolute
	// Created are the folders that were made for it, outermost first.
	Created []string `json:"created,omitempty"`

	opened bool // in this agent's life
}

// Scopes reads the records of all that is pinned of cgroups.
func Scopes(pins string) []Scope {
	var scopes []Scope
	for _, prefix := range []string{bpf.TunePins, bpf.TracePins} {
		names, err := bpf.PinnedNames(pins, prefix)
		if err != nil {
			return nil
		}
		for _, name := range names {
			var s Scope
			if data, err := bpf.ReadScope(filepath.Join(pins, prefix+name)); err == nil && json.Unmarshal(data, &s) == nil {
				scopes = append(scopes, s)
			}
		}
	}
	return scopes
}

// Open finds the cgroup of a policy, or makes it. A unit that is not there is
// fs.ErrNotExist, and so is a cgroup that was there: whoever has removed it may make it
// again, which fails if it is there already.
func (s *Scope) Open(tree Tree, name string) error {
	path, err := tree.Find(name)
	if errors.Is(err, fs.ErrNotExist) && !isUnit(name) && !s.opened {
		path = filepath.Join(tree.Mount, name)
		var created []string
		created, err = makeCgroup(tree.Mount, path)
		// Some may have been made before, and removed by others.
		s.Created = slices.Compact(slices.Sorted(slices.Values(append(s.Created, created...))))
	}
	if errors.Is(err, fs.ErrNotExist) {
		s.Created = slices.DeleteFunc(s.Created, func(dir string) bool {
			_, err := os.Stat(dir)
			return errors.Is(err, fs.ErrNotExist)
		})
	}
	if err != nil {
		return err
	}
	s.Cgroup, s.Path, s.opened = name, path, true
	return nil
}

// Absent is the problem of a cgroup that is not there, with what is done to it once it is.
func Absent(name, done string) error {
	if isUnit(name) {
		return fault.WithHint(fmt.Errorf("there is no unit %s", name), done+" from the moment it starts")
	}
	return fault.WithHint(fmt.Errorf("there is no cgroup %s", name), done+" from the moment it is made again")
}

// Below is the path below the cgroup v2 mount.
func (s *Scope) Below(tree Tree) string { return tree.Below(s.Path) }

// Below is the path of a folder below the mount point.
func (t Tree) Below(dir string) string {
	return "/" + strings.TrimPrefix(strings.TrimPrefix(dir, t.Mount), "/")
}

// RemoveCreated removes the cgroups that were made, unless somebody uses them.
func RemoveCreated(scopes []Scope) error {
	var errs []error
	for _, s := range scopes {
		for _, dir := range slices.Backward(s.Created) {
			err := unix.Rmdir(dir)
			if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOTEMPTY) {
				break
			}
			if err != nil && !errors.Is(err, unix.ENOENT) {
				errs = append(errs, fmt.Errorf("remove cgroup %s: %w", dir, err))
			}
		}
	}
	return fault.Join(errs...)
}

// makeCgroup makes a cgroup and those above it, and returns what it made.
func makeCgroup(mount, path string) (created []string, err error) {
	below, err := filepath.Rel(mount, path)
	if err != nil {
		return nil, err
	}
	dir := mount
	for part := range strings.SplitSeq(below, "/") {
		dir = filepath.Join(dir, part)
		err := os.Mkdir(dir, 0o755)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if errors.Is(err, unix.EROFS) || errors.Is(err, fs.ErrPermission) {
			return created, &fault.Error{Err: fmt.Errorf("create cgroup: %w", err), Code: fault.CodeNotPermitted,
				Hint: rights.MissingHint(unix.CAP_DAC_OVERRIDE, "create it, or restart the agent: it keeps that right if the policy names such a cgroup then")}
		}
		if err != nil {
			return created, fmt.Errorf("create cgroup: %w", err)
		}
		created = append(created, dir)
	}
	return created, nil
}

// isTop tells whether a cgroup is right below the root, where only those may
// make one who may write everywhere.
func isTop(name string) bool { return filepath.Dir(name) == "/" && name != "/" }

// MayCreate fails if the cgroup of a policy is to be made and this process has
// no right to.
func (t Tree) MayCreate(name string) error {
	if isUnit(name) {
		return nil
	}
	dir := filepath.Join(t.Mount, name)
	for {
		_, err := os.Stat(dir)
		if err == nil {
			break
		}
		if !errors.Is(err, fs.ErrNotExist) || dir == t.Mount {
			return err
		}
		dir = filepath.Dir(dir)
	}
	if dir == filepath.Join(t.Mount, name) {
		return nil
	}
	if err := unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK, unix.AT_EACCESS); err != nil {
		return &fault.Error{Err: fmt.Errorf("create cgroup %s: %w", name, err), Code: fault.CodeNotPermitted,
			Hint: rights.MissingHint(unix.CAP_DAC_OVERRIDE, "create it, or restart the agent: it keeps that right if the policy names such a cgroup then")}
	}
	return nil
}

func isUnit(name string) bool { return !strings.HasPrefix(name, "/") }

// Find finds the folder of a cgroup of the policy: a path, or the name
// of a systemd unit. It fails with fs.ErrNotExist if there is none.
//
// A unit's cgroup is where the system's service manager makes it, and nowhere else:
// a slice at the path that its name gives, any other unit in a slice. What is below
// a service or a scope is another's, such as all units of a user's own service
// manager, which may have any name.
func (t Tree) Find(name string) (string, error) {
	if !isUnit(name) {
		path := filepath.Join(t.Mount, name)
		_, err := os.Stat(path)
		return path, err
	}
	if strings.HasSuffix(name, ".slice") {
		path := filepath.Join(t.Mount, slicePath(name))
		_, err := os.Stat(path)
		return path, err
	}
	var found []string
	err := t.eachSlice(func(dir string) error {
		path := filepath.Join(dir, cgroupName(name))
		info, err := os.Stat(path)
		if err == nil && info.IsDir() {
			found = append(found, path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		return err
	})
	switch {
	case err != nil:
		return "", fmt.Errorf("find unit %s: %w", name, err)
	case len(found) == 0:
		return "", fmt.Errorf("find unit %s: %w", name, fs.ErrNotExist)
	case len(found) > 1:
		return "", fault.Conflict(fmt.Errorf("find unit %s: there are %d: %s", name, len(found), strings.Join(found, ", ")), "name one by its path")
	}
	return found[0], nil
}

// eachSlice calls f with the folder of each slice of the system, the root first.
func (t Tree) eachSlice(f func(dir string) error) error {
	var visit func(path string) error
	visit = func(path string) error {
		dir := filepath.Join(t.Mount, path)
		if err := f(dir); err != nil {
			return err
		}
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			below := filepath.Join(path, e.Name())
			if e.IsDir() && strings.HasSuffix(e.Name(), ".slice") && slicePath(e.Name()) == below {
				if err := visit(below); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return visit("/")
}

// cgroupName is what systemd calls the folder of a unit: one that could be taken for
// a file of the kernel has a _ before it (cg_escape in src/basic/cgroup-util.c).
func cgroupName(unit string) string {
	first, _, _ := strings.Cut(unit, ".")
	switch first {
	case "", "cgroup", "cpu", "cpuacct", "cpuset", "io", "blkio", "memory", "devices", "pids":
		return "_" + unit
	}
	if unit[0] == '_' {
		return "_" + unit
	}
	return unit
}

// slicePath is where systemd puts a slice: a-b.slice is in a.slice
// (systemd.slice(5)).
func slicePath(name string) string {
	if name == "-.slice" {
		return "/"
	}
	var path strings.Builder
	base := strings.TrimSuffix(name, ".slice")
	for i, r := range base {
		if r == '-' {
			path.WriteString("/" + base[:i] + ".slice")
		}
	}
	return path.String() + "/" + name
}

// CheckNested refuses cgroups of which one holds another: the programs of both
// would run, and the outer one's would have the last word. Where a unit is that has
// not started is not known, unless it is a slice.
func (t Tree) CheckNested(names ...string) error {
	paths := make(map[string]string)
	for _, name := range names {
		path, err := t.Find(name)
		switch {
		case err == nil:
		case !errors.Is(err, fs.ErrNotExist):
			return fmt.Errorf("cgroup %s: %w", name, err)
		case strings.HasSuffix(name, ".slice") && isUnit(name):
			path = filepath.Join(t.Mount, slicePath(name))
		case isUnit(name):
			continue
		default:
			path = filepath.Join(t.Mount, name)
		}
		paths[name] = path
	}
	for _, outer := range slices.Sorted(maps.Keys(paths)) {
		for _, inner := range slices.Sorted(maps.Keys(paths)) {
			if outer == inner || !Within(paths[inner], paths[outer]) {
				continue
			}
			return fault.Conflict(fmt.Errorf("cgroup %s is in cgroup %s, whose rules would override its own", inner, outer),
				"write all rules for one of them, or for cgroups beside each other")
		}
	}
	return nil
}

// Added says what beginning with a cgroup does to it. Done is what it will
// be.
func (t Tree) Added(name, done string) []api.Change {
	_, err := t.Find(name)
	switch {
	case !errors.Is(err, fs.ErrNotExist):
		return nil
	case isUnit(name):
		return []api.Change{{Cgroup: name, Action: "add", What: "unit", Effect: "there is none now: it is " + done + " from the moment it starts"}}
	}
	return []api.Change{{Cgroup: name, Action: "add", What: "cgroup", Effect: "it is created, and removed when the policy names it no more"}}
}

// MaxBelow bounds how many cgroups below one are looked at.
const MaxBelow = 4096

// Names are the cgroups at or below a folder, by their id, which is the
// inode of their folder (cgroup_id in include/linux/cgroup.h, Linux 6.18).
func (t Tree) Names(dir string) map[uint64]string {
	names := make(map[uint64]string)
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil // gone meanwhile
		}
		if len(names) == MaxBelow {
			return filepath.SkipAll
		}
		var stat unix.Stat_t
		if unix.Stat(path, &stat) == nil {
			names[stat.Ino] = "/" + strings.TrimPrefix(strings.TrimPrefix(path, t.Mount), "/")
		}
		return nil
	})
	return names
}

// Within tells whether a folder is at or below another.
func Within(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

// Creates tells whether the agent may have to create a cgroup of a policy, with a right to write
// at the root: a reboot removes one that is at the root.
func Creates(name string) bool {
	mount, err := cgroup.Mount()
	if err != nil || isUnit(name) {
		return false
	}
	_, err = os.Stat(filepath.Join(mount, name))
	return err != nil || isTop(name)
}
