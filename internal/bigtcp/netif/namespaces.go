// SPDX-License-Identifier: Apache-2.0

package netif

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// AllNamespaces returns the paths of all network namespaces that have a name or a
// process.
func AllNamespaces() []string {
	var paths []string
	for path, netns := range namespaces {
		netns.Close()
		paths = append(paths, path)
	}
	return paths
}

// maxNamespaces bounds the namespaces of a search.
const maxNamespaces = 1 << 14

// namespaces yields all network namespaces that have a name or a process, each once:
// by name, otherwise by the process with the lowest PID. The namespaces are open,
// because a process may change to another one meanwhile.
func namespaces(yield func(path string, netns *os.File) bool) {
	seen := map[uint64]bool{}
	// If the names cannot be read, the processes remain.
	paths, _ := NamedNamespaces()
	for _, path := range append(paths, processPaths()...) {
		var stat unix.Stat_t
		if unix.Stat(path, &stat) != nil || seen[stat.Ino] {
			continue
		}
		netns, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			continue
		}
		seen[stat.Ino] = true
		if !yield(path, netns) || len(seen) == maxNamespaces {
			return
		}
	}
}

// namedDirs are the directories of ip-netns(8). Usually one is a link to the other.
var namedDirs = []string{"/run/netns", "/var/run/netns"}

// NamedNamespaces returns the sorted paths of the network namespaces with a name of
// ip-netns(8), each namespace once.
func NamedNamespaces() ([]string, error) {
	var paths []string
	seen := map[uint64]bool{}
	for _, dir := range namedDirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("list network namespaces: %w", err)
		}
		for _, e := range entries {
			path := filepath.Join(dir, e.Name())
			if inode, ok := namespaceInode(path); ok && !seen[inode] {
				seen[inode] = true
				paths = append(paths, path)
			}
		}
	}
	slices.Sort(paths)
	return paths, nil
}

// processPaths returns the network namespaces of all processes, sorted by PID.
func processPaths() []string {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer proc.Close()
	// An incomplete list is used as it is.
	names, _ := proc.Readdirnames(-1)
	var pids []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	paths := make([]string, len(pids))
	for i, pid := range pids {
		paths[i] = fmt.Sprintf("/proc/%d/ns/net", pid)
	}
	return paths
}

// namespaceInode returns the inode of the namespace at a path, or false if there is
// none.
func namespaceInode(path string) (uint64, bool) {
	var fs unix.Statfs_t
	var stat unix.Stat_t
	if unix.Statfs(path, &fs) != nil || fs.Type != unix.NSFS_MAGIC || unix.Stat(path, &stat) != nil {
		return 0, false
	}
	return stat.Ino, true
}
