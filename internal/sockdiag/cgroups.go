// SPDX-License-Identifier: Apache-2.0

package sockdiag

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Cgroups maps the ids of cgroups, the inodes of their directories, to their paths.
type Cgroups map[uint64]string

// ReadCgroups reads a cgroup directory and its descendants. Paths are relative to mount, as in /proc/PID/cgroup.
// Directories that disappear or are not readable are omitted, and so are those at paths of more than 4,095 bytes, which any user of
// a delegated cgroup can make.
func ReadCgroups(mount, folder string) (Cgroups, error) {
	found := make(Cgroups)
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil && path == folder:
			return err
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENAMETOOLONG):
			return nil
		case err != nil:
			return err
		case !d.IsDir():
			return nil
		}
		var stat unix.Stat_t
		if err := unix.Stat(path, &stat); err == nil {
			found[stat.Ino] = "/" + strings.TrimPrefix(strings.TrimPrefix(path, mount), "/")
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list cgroups: %w", err)
	}
	return found, nil
}
