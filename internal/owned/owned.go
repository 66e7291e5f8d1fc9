// SPDX-License-Identifier: Apache-2.0

// Package owned makes and checks directories that no ordinary user can have
// prepared or can exchange: what the agent pins, stores and listens on lies in
// such directories only.
package owned

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
)

// UntrustedError says that somebody other than root decides what a path is.
type UntrustedError struct {
	Path   string
	Reason string
}

func (e *UntrustedError) Error() string { return fmt.Sprintf("%s %s", e.Path, e.Reason) }

// Explain returns the hint and the exit code of the error.
func (e *UntrustedError) Explain() (hint string, code int) {
	return "somebody else than root could put files there: remove it, or name a directory that only root may write, with all above it", fault.CodeConflict
}

// Check walks to an absolute path from the root directory, and tells whether
// only root, or the caller's own effective user, decides what is there: each
// directory and symbolic link on the way belongs to one of these two, and no
// directory is writable for others. A directory with the sticky bit may be, if
// it is not the last, because nobody else can rename what is in it. It returns
// an *UntrustedError if not, and fs.ErrNotExist if the path does not exist.
func Check(path string) error {
	return check(path, false)
}

// Open is Check that returns the directory.
func Open(path string) (*os.File, error) {
	fd, err := walk(path, false)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	// What walk found by O_PATH, for reading; no name is looked up again.
	dir, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open directory %s: %w", path, err)
	}
	return os.NewFile(uintptr(dir), path), nil
}

// Make makes a directory and its missing parents with a mode, as os.MkdirAll
// does, and refuses what Check refuses.
func Make(path string, mode fs.FileMode) error { return makeAll(path, mode, false) }

func makeAll(path string, mode fs.FileMode, parent bool) error {
	err := check(path, parent)
	if !errors.Is(err, fs.ErrNotExist) || filepath.Dir(path) == path {
		return err
	}
	if err := makeAll(filepath.Dir(path), mode, true); err != nil {
		return err
	}
	if err := os.Mkdir(path, mode); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("create directory: %w", err)
	}
	return check(path, parent) // whoever made it meanwhile
}

func check(path string, parent bool) error {
	fd, err := walk(path, parent)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// maxLinks bounds the symbolic links of one path, as path_resolution(7) does.
const maxLinks = 40

// walk returns a descriptor (O_PATH) of the directory. A parent may have the
// sticky bit and be writable for others.
func walk(path string, parent bool) (fd int, err error) {
	if !filepath.IsAbs(path) {
		return -1, fmt.Errorf("check directory %s: the path is not absolute", path)
	}
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC
	if fd, err = unix.Open("/", flags, 0); err != nil {
		return -1, fmt.Errorf("check directory /: %w", err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	rest := components(path)
	at, links := "/", 0
	if err := trusted(fd, at, len(rest) == 0 && !parent); err != nil {
		return fd, err
	}
	for len(rest) > 0 {
		name := rest[0]
		rest = rest[1:]
		if name == ".." { // of a link's target; at has no links left
			next, err := unix.Open("/", flags, 0)
			if err != nil {
				return fd, fmt.Errorf("check directory /: %w", err)
			}
			unix.Close(fd)
			fd, rest, at = next, append(components(filepath.Dir(at)), rest...), "/"
			continue
		}
		var stat unix.Stat_t
		if err := unix.Fstatat(fd, name, &stat, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fd, fmt.Errorf("check directory %s: %w", filepath.Join(at, name), err)
		}
		if stat.Mode&unix.S_IFMT == unix.S_IFLNK {
			here := filepath.Join(at, name)
			if links++; links > maxLinks {
				return fd, fmt.Errorf("check directory %s: %w", path, unix.ELOOP)
			}
			if !byUs(stat.Uid) {
				return fd, &UntrustedError{here, fmt.Sprintf("is a symbolic link of user %d", stat.Uid)}
			}
			target := make([]byte, unix.PathMax)
			n, err := unix.Readlinkat(fd, name, target)
			if err != nil {
				return fd, fmt.Errorf("check directory %s: %w", here, err)
			}
			to := components(string(target[:n]))
			if target[0] != '/' {
				to = append(components(at), to...)
			}
			next, err := unix.Open("/", flags, 0)
			if err != nil {
				return fd, fmt.Errorf("check directory /: %w", err)
			}
			unix.Close(fd)
			fd, at, rest = next, "/", append(to, rest...)
			continue
		}
		next, err := unix.Openat(fd, name, flags, 0)
		if err != nil {
			return fd, fmt.Errorf("check directory %s: %w", filepath.Join(at, name), err)
		}
		unix.Close(fd)
		fd, at = next, filepath.Join(at, name)
		if err := trusted(fd, at, len(rest) == 0 && !parent); err != nil {
			return fd, err
		}
	}
	return fd, nil
}

func components(path string) []string {
	return slices.DeleteFunc(strings.Split(path, "/"), func(c string) bool { return c == "" || c == "." })
}

func byUs(uid uint32) bool { return uid == 0 || uid == uint32(os.Geteuid()) }

func trusted(fd int, path string, last bool) error {
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return fmt.Errorf("check directory %s: %w", path, err)
	}
	open := stat.Mode&0o022 != 0
	switch {
	case !byUs(stat.Uid):
		return &UntrustedError{path, fmt.Sprintf("belongs to user %d, not to root", stat.Uid)}
	case open && last:
		return &UntrustedError{path, fmt.Sprintf("is writable for others than root (mode %#o)", stat.Mode&0o7777)}
	case open && stat.Mode&unix.S_ISVTX == 0:
		return &UntrustedError{path, fmt.Sprintf("is writable for others than root (mode %#o) and has no sticky bit", stat.Mode&0o7777)}
	}
	return nil
}
