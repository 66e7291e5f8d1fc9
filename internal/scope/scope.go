// SPDX-License-Identifier: Apache-2.0

// Package scope finds or creates the cgroups that a policy names, and watches for them. A policy names a
// cgroup by its path or by a systemd unit. A record beside the pins lists the cgroups that Sockeye created
// and has to remove.
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
	"sockeye/internal/bpf/pin"
	"sockeye/internal/cgroup"
	"sockeye/internal/fault"
	"sockeye/internal/rights"
)

// Tree is the cgroup v2 hierarchy of the host.
type Tree struct {
	Mount string // its mount point
}

// Scope is the record of a cgroup that is stored with the pins, so that any later process can undo the setup.
type Scope struct {
	Cgroup string `json:"cgroup"` // as in the policy
	Path   string `json:"path"`   // absolute
	// Created lists the directories that Sockeye created for the cgroup, outermost first.
	Created []string `json:"created,omitempty"`

	opened bool // by this process
}

// Scopes returns the records of all pinned tune and trace programs. Missing and damaged records are omitted.
func Scopes(pins string) []Scope {
	var scopes []Scope
	for _, prefix := range []string{bpf.TunePins, bpf.TracePins} {
		names, err := bpf.PinnedNames(pins, prefix)
		if err != nil {
			return nil
		}
		for _, name := range names {
			var s Scope
			if data, err := pin.ReadScope(filepath.Join(pins, prefix+name)); err == nil && json.Unmarshal(data, &s) == nil {
				scopes = append(scopes, s)
			}
		}
	}
	return scopes
}

// Open finds the cgroup that a policy names, or creates it. The error wraps
// fs.ErrNotExist if the name is a unit that does not run. The error also wraps
// fs.ErrNotExist for a cgroup that was open before and was removed since: Open does
// not create it again, because mkdir(2) of its owner would fail with EEXIST.
func (s *Scope) Open(tree Tree, name string) error {
	path, err := tree.Find(name)
	if errors.Is(err, fs.ErrNotExist) && !isUnit(name) && !s.opened {
		path = filepath.Join(tree.Mount, name)
		var created []string
		created, err = createCgroup(tree.Mount, path)
		// An earlier call may have created some of them, which others removed since.
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

// Below returns the cgroup's path relative to the cgroup v2 mount, with a leading slash.
func (s *Scope) Below(tree Tree) string { return tree.Below(s.Path) }

// createHint goes with a denied attempt to create a cgroup. At start, the agent keeps CAP_DAC_OVERRIDE only if the policy needs it.
const createHint = "create the cgroup, or restart the agent: at start it keeps the capability that the policy needs"

// createCgroup creates a cgroup and its missing ancestors, and returns the directories that it created.
func createCgroup(mount, path string) (created []string, err error) {
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
				Hint: rights.MissingHint(unix.CAP_DAC_OVERRIDE, createHint)}
		}
		if err != nil {
			return created, fmt.Errorf("create cgroup: %w", err)
		}
		created = append(created, dir)
	}
	return created, nil
}

// RemoveCreated removes the cgroups that Sockeye created. Cgroups that contain processes or other cgroups stay.
func RemoveCreated(scopes []Scope) error {
	var errs []error
	for _, s := range scopes {
		for _, dir := range slices.Backward(s.Created) {
			err := unix.Rmdir(dir)
			if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOTEMPTY) {
				break
			}
			if errors.Is(err, unix.EROFS) || errors.Is(err, fs.ErrPermission) {
				err = &fault.Error{Err: fmt.Errorf("remove cgroup %s, which Sockeye created: %w", dir, err), Code: fault.CodeNotPermitted, Hint: "run: rmdir " + dir}
				errs = append(errs, err)
				break
			}
			if err != nil && !errors.Is(err, unix.ENOENT) {
				errs = append(errs, fmt.Errorf("remove cgroup %s: %w", dir, err))
			}
		}
	}
	return fault.Join(errs...)
}

func isUnit(name string) bool { return !strings.HasPrefix(name, "/") }

// CheckNested returns a conflict if one of the cgroups contains another: the kernel
// would run the programs of both, and the outer program would override the inner one.
// Units that do not run are not checked, except slices, whose names imply their paths.
func (t Tree) CheckNested(names ...string) error {
	paths := make(map[string]string)
	for _, name := range names {
		if _, err := t.Find(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("cgroup %s: %w", name, err)
		}
		if path := t.Directory(name); path != "" {
			paths[name] = path
		}
	}
	return CheckPaths(paths)
}

// Directory returns the directory that a cgroup has, or will have when it exists. Directory returns "" for a unit that does not run
// and is not a slice.
func (t Tree) Directory(name string) string {
	path, err := t.Find(name)
	switch {
	case err == nil:
		return path
	case strings.HasSuffix(name, ".slice") && isUnit(name):
		return filepath.Join(t.Mount, slicePath(name))
	case isUnit(name):
		return ""
	}
	return filepath.Join(t.Mount, name)
}

// CheckPaths is CheckNested for cgroups whose absolute paths are known. paths has them by name.
func CheckPaths(paths map[string]string) error {
	for _, outer := range slices.Sorted(maps.Keys(paths)) {
		for _, inner := range slices.Sorted(maps.Keys(paths)) {
			if outer == inner || !Within(paths[inner], paths[outer]) {
				continue
			}
			return fault.Conflict(fmt.Errorf("cgroup %s is inside cgroup %s, whose rules would override the rules of the inner cgroup", inner, outer),
				"use one of the two cgroups for all rules, or use cgroups of which none contains another")
		}
	}
	return nil
}

// MayCreate returns an error with fault.CodeNotPermitted if the cgroup does not
// exist and this process may not create it. Units are not checked.
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
			Hint: rights.MissingHint(unix.CAP_DAC_OVERRIDE, createHint)}
	}
	return nil
}

// Added returns the changes for the plan when a policy names a cgroup for the first
// time. done is the participle for the effect, such as "tuned".
func (t Tree) Added(name, done string) []api.Change {
	_, err := t.Find(name)
	switch {
	case !errors.Is(err, fs.ErrNotExist):
		return nil
	case isUnit(name):
		return []api.Change{{Cgroup: name, Action: "add", What: "unit", Effect: "the unit does not run now; it is " + done + " as soon as it starts"}}
	}
	return []api.Change{{Cgroup: name, Action: "add", What: "cgroup", Effect: "the cgroup is created, and removed when the policy no longer names it"}}
}

// Find returns the directory of a cgroup that the policy names by a path or by a
// systemd unit. The error wraps fs.ErrNotExist if there is no such cgroup.
//
// Find accepts only the places where the system's service manager creates cgroups: the
// path that a slice's name implies, and the children of slices for all other units.
// Cgroups below a service or a scope are delegated. For example, a user's service
// manager can give the units below it any name.
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

// eachSlice calls f with the directory of each slice of the system, the root first.
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

// slicePath returns a slice's path below the mount: systemd nests a-b.slice in
// a.slice (systemd.slice(5)).
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

// cgroupName returns the name of the directory that systemd creates for a unit. systemd
// prefixes names that collide with cgroup control files by "_" (cg_escape in
// src/basic/cgroup-util.c).
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

type absent string

// Absent returns the error for a cgroup that does not exist. The error wraps fs.ErrNotExist. The hint says what happens
// once the cgroup exists; effect is a clause such as "its connections are tuned".
func Absent(name, effect string) error {
	if isUnit(name) {
		return fault.WithHint(absent("there is no unit "+name), effect+" as soon as the unit starts")
	}
	return fault.WithHint(absent("there is no cgroup "+name), effect+" as soon as the cgroup exists again")
}

func (a absent) Error() string { return string(a) }

func (absent) Unwrap() error { return fs.ErrNotExist }

// Creates reports whether the agent may have to create the cgroup. That is so for a missing cgroup and for
// any child of the root: after a reboot, it is missing and creating it needs CAP_DAC_OVERRIDE.
func Creates(name string) bool {
	mount, err := cgroup.Mount()
	if err != nil || isUnit(name) {
		return false
	}
	_, err = os.Stat(filepath.Join(mount, name))
	return err != nil || isTop(name)
}

// isTop reports whether a cgroup is a child of the root, where creating one needs CAP_DAC_OVERRIDE or root.
func isTop(name string) bool { return filepath.Dir(name) == "/" && name != "/" }

// MaxBelow limits how many descendants of a cgroup are visited.
const MaxBelow = 4096

// Names maps cgroup ids to paths below the mount, for dir and up to MaxBelow
// cgroups below it. A cgroup's id is the inode number of its directory (cgroup_id in
// include/linux/cgroup.h, Linux 6.18).
func (t Tree) Names(dir string) map[uint64]string {
	names := make(map[uint64]string)
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil // removed during the walk
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

// Below returns the path of dir relative to the mount point, with a leading slash.
func (t Tree) Below(dir string) string {
	return "/" + strings.TrimPrefix(strings.TrimPrefix(dir, t.Mount), "/")
}

// Within reports whether path is dir or below it.
func Within(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}

// PinName returns the name of the directory with a cgroup's pins: up to 40 characters of the cgroup's name
// and a hash of the whole name. Names in a bpffs cannot contain dots.
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
