// SPDX-License-Identifier: Apache-2.0

// Package watch tells when files and folders, such as cgroups, appear and vanish.
package watch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Folders tells when files and folders, such as cgroups, come and go.
type Folders struct {
	inotify *os.File
	fd      int
}

const folderEvents = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_ONLYDIR

// NewFolders calls changed after every change in the folders that are
// added, from one goroutine, until it is closed.
func NewFolders(changed func()) (*Folders, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch folders: %w", err)
	}
	w := &Folders{os.NewFile(uintptr(fd), "inotify"), fd}
	go func() {
		events := make([]byte, 64<<10)
		for {
			// Which change it was is found by looking.
			if _, err := w.inotify.Read(events); err != nil {
				return
			}
			changed()
		}
	}()
	return w, nil
}

// Add watches a folder; again is once. A folder that is gone is no error.
func (w *Folders) Add(dir string) error {
	_, err := unix.InotifyAddWatch(w.fd, dir, folderEvents)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("watch folder %s: %w", dir, err)
	}
	return nil
}

// Close closes the inotify descriptor.
func (w *Folders) Close() { w.inotify.Close() }

// AddWay watches the folders on the way to a file, from the top, so that none of them
// appears unseen.
func (w *Folders) AddWay(path string) error {
	dir := "/"
	for part := range strings.SplitSeq(strings.Trim(filepath.Dir(path), "/"), "/") {
		dir = filepath.Join(dir, part)
		if err := w.Add(dir); err != nil {
			return err
		}
	}
	return nil
}
