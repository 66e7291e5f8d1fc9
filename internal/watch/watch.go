// SPDX-License-Identifier: Apache-2.0

// Package watch reports the creation and removal of files and folders, such as cgroups, by inotify(7).
package watch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Folders watches a set of folders.
type Folders struct {
	inotify *os.File
	fd      int
}

const folderEvents = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_ONLYDIR

// NewFolders returns an empty set of folders. A goroutine calls changed after every change in an added folder, until
// Close.
func NewFolders(changed func()) (*Folders, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch folders: %w", err)
	}
	w := &Folders{os.NewFile(uintptr(fd), "inotify"), fd}
	go func() {
		events := make([]byte, 64<<10)
		for {
			// changed reads the folders, so the content of the event does not matter.
			if _, err := w.inotify.Read(events); err != nil {
				return
			}
			changed()
		}
	}()
	return w, nil
}

// Close closes the inotify descriptor and ends the goroutine.
func (w *Folders) Close() { w.inotify.Close() }

// AddWay watches all parent folders of a path, starting at /, so that no parent can appear unnoticed.
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

// Add watches a folder. A second Add of a folder has no effect, and a folder that does not exist is not an error.
func (w *Folders) Add(dir string) error {
	_, err := unix.InotifyAddWatch(w.fd, dir, folderEvents)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("watch folder %s: %w", dir, err)
	}
	return nil
}
