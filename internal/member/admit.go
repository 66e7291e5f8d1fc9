// SPDX-License-Identifier: Apache-2.0

package member

import (
	"errors"
	"fmt"
	"io/fs"
	"os/user"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
)

// Host contains the namespaces of the host. The owner of a process in other namespaces controls the names and paths
// that the process shows.
type Host struct {
	user   FileID
	mounts []FileID // mount namespaces of this process (a hardened unit has its own) and of process 1
	roots  []string // paths to the root directories of these namespaces
	// firstUnknown is set if this process may not read the mount namespace of process 1.
	firstUnknown bool
}

// ReadHost reads the namespaces of this process, and of process 1 if that is permitted.
func ReadHost() (*Host, error) {
	h := &Host{}
	var stat unix.Stat_t
	if err := unix.Stat("/proc/self/ns/user", &stat); err != nil {
		return nil, fmt.Errorf("read own user namespace: %w", err)
	}
	h.user = fileID(&stat)
	if err := unix.Stat("/proc/self/ns/mnt", &stat); err != nil {
		return nil, fmt.Errorf("read own mount namespace: %w", err)
	}
	h.mounts, h.roots = append(h.mounts, fileID(&stat)), append(h.roots, "/")
	switch err := unix.Stat("/proc/1/ns/mnt", &stat); {
	case err == nil:
		if first := fileID(&stat); first != h.mounts[0] {
			h.mounts, h.roots = append(h.mounts, first), append(h.roots, "/proc/1/root")
		}
	case errors.Is(err, fs.ErrPermission):
		h.firstUnknown = true
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("read mount namespace of process 1: %w", err)
	}
	return h, nil
}

// A Refusal is the reason why a process that matches a rule is not admitted as a member.
type Refusal struct {
	Reason string
	Hint   string
}

func (r *Refusal) Error() string { return r.Reason }

// Admit checks the user, the namespaces and the executable of a process that matches the rule. service contains the
// users of the service. The error is a Refusal.
func (r *Rule) Admit(p *Process, service []uint32, h *Host) error {
	if err := AdmitUser(p, r.Users(service)); err != nil {
		return err
	}
	if r.Namespaces != config.AnyNamespaces {
		const hint = "if it is meant to be a member, add namespaces: any to the rule"
		if p.UserNS != h.user {
			return &Refusal{"it is in a user namespace of its own", hint}
		}
		// systemd gives sandboxed system units mount namespaces, in which no other user can start a process.
		unit, _ := p.Unit()
		sandboxed := r.Match.SystemdUnit != "" && unit != "" && !isUserControlled(p.Cgroup)
		if !sandboxed && !slices.Contains(h.mounts, p.MountNS) {
			why := hint
			if h.firstUnknown {
				why += "; the agent may not read the mount namespace of process 1, which may be that of the process"
			}
			return &Refusal{"it is in a mount namespace of its own", why}
		}
	}
	if r.Match.Executable != "" && !p.exeVerified {
		p.exeVerified = h.hasFile(p.Exe, p.File)
	}
	if r.Match.Executable != "" && !p.exeVerified {
		return &Refusal{fmt.Sprintf("its executable is not the host's %s", p.Exe),
			"restart it if the file was replaced; a program of another file system is named by systemd_unit or cgroup"}
	}
	return nil
}

// AdmitUser checks that all user ids of a process are in users. The error is a Refusal.
func AdmitUser(p *Process, users []uint32) error {
	if p.UIDs.Within(users) {
		return nil
	}
	return &Refusal{fmt.Sprintf("it runs as user %s, not as %s", describeUIDs(p.UIDs), UserNames(users)),
		"run it as that user, or name its user in the policy"}
}

// describeUIDs returns one user name, or the real, effective and saved user if they differ.
func describeUIDs(u UIDs) string {
	if u.Within(u[:1]) {
		return UserName(u[0])
	}
	return fmt.Sprintf("%s (effective %s, saved %s)", UserName(u[0]), UserName(u[1]), UserName(u[2]))
}

// UserNames returns the names of users in the form a, b or c.
func UserNames(uids []uint32) string {
	names := make([]string, len(uids))
	for i, uid := range uids {
		names[i] = UserName(uid)
	}
	if len(names) < 2 {
		return strings.Join(names, "")
	}
	return strings.Join(names[:len(names)-1], ", ") + " or " + names[len(names)-1]
}

// UserName returns the name of a user, or its number if it has no name.
func UserName(uid uint32) string {
	number := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(number); err == nil {
		return u.Username
	}
	return number
}

// hasFile returns whether a path refers to a file on the host.
func (h *Host) hasFile(path string, file FileID) bool {
	return slices.ContainsFunc(h.roots, func(root string) bool {
		dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return false
		}
		defer unix.Close(dir)
		fd, err := openInRoot(dir, path)
		if err != nil {
			return false
		}
		defer unix.Close(fd)
		found, err := identify(fd, "", unix.AT_EMPTY_PATH)
		return err == nil && found == file
	})
}

const (
	mostLinks = 40  // symbolic links of a path, as in path_resolution(7)
	mostDirs  = 256 // directories that are open at a time
)

// openInRoot opens a path below a directory. It resolves absolute links and ".." in that directory, not in the root of this
// process, as openat2(2) does with RESOLVE_IN_ROOT. That call is not possible in the unit of the agent: systemd rejects it for
// RestrictSUIDSGID.
func openInRoot(root int, path string) (fd int, err error) {
	var dirs []int // below root, to the present one
	up := func(to int) {
		for _, dir := range dirs[to:] {
			unix.Close(dir)
		}
		dirs = dirs[:to]
	}
	defer func() { up(0) }()
	links := 0
	for rest := strings.Split(path, "/"); len(rest) > 0; {
		name := rest[0]
		rest = rest[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			up(max(0, len(dirs)-1))
			continue
		}
		at := root
		if len(dirs) > 0 {
			at = dirs[len(dirs)-1]
		}
		next, err := unix.Openat(at, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return -1, err
		}
		dirs = append(dirs, next)
		var target [unix.PathMax]byte
		n, err := unix.Readlinkat(next, "", target[:])
		if err != nil { // no link
			if len(dirs) == mostDirs {
				return -1, unix.ENAMETOOLONG
			}
			continue
		}
		if links++; links > mostLinks {
			return -1, unix.ELOOP
		}
		up(len(dirs) - 1)
		if target[0] == '/' {
			up(0)
		}
		rest = append(strings.Split(string(target[:n]), "/"), rest...)
	}
	if len(dirs) == 0 {
		return -1, unix.EISDIR
	}
	fd = dirs[len(dirs)-1]
	dirs = dirs[:len(dirs)-1]
	return fd, nil
}
