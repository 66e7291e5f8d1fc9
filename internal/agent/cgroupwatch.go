// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// folderWatch tells when files and folders, such as cgroups, come and go.
type folderWatch struct {
	inotify *os.File
	fd      int
}

const folderEvents = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_ONLYDIR

// newFolderWatch calls changed after every change in the folders that are
// added, from one goroutine, until it is closed.
func newFolderWatch(changed func()) (*folderWatch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch folders: %w", err)
	}
	w := &folderWatch{os.NewFile(uintptr(fd), "inotify"), fd}
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

// add watches a folder; again is once. A folder that is gone is no error.
func (w *folderWatch) add(dir string) error {
	_, err := unix.InotifyAddWatch(w.fd, dir, folderEvents)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("watch folder %s: %w", dir, err)
	}
	return nil
}

func (w *folderWatch) close() { w.inotify.Close() }

// watchCgroups watches where the cgroups of the policy may come and go: the
// folders on the way to a path or a slice, and all slices for another unit. Then it
// looks whether they did.
func (a *Agent) watchCgroups() {
	if len(a.tuners) == 0 && len(a.tracers) == 0 {
		return
	}
	if a.watch == nil {
		w, err := newFolderWatch(a.renewCgroups)
		if err != nil {
			a.log.Warn("cgroups not watched: a unit that is started again is neither tuned nor traced", "error", err)
			return
		}
		a.watch = w
	}
	for _, name := range slices.Concat(slices.Collect(maps.Keys(a.tuners)), slices.Collect(maps.Keys(a.tracers))) {
		if err := a.watchCgroup(name); err != nil {
			a.log.Warn("cgroup not watched", "cgroup", name, "error", err)
		}
	}
	// What came before the watch is heard of in no other way.
	var all []tuneChange
	for name := range a.tuners {
		all = append(all, tuneChange{name: name})
	}
	for _, t := range a.tuners {
		t.renew(all)
	}
	// After those that tune, as groups may ask for their rules.
	for _, t := range a.tracers {
		t.renew()
	}
}

func (a *Agent) watchCgroup(name string) error {
	path := name
	switch {
	case isUnit(name) && !strings.HasSuffix(name, ".slice"):
		return a.host.eachSlice(a.watch.add)
	case isUnit(name):
		path = slicePath(name)
	}
	dir := a.host.cgroups
	if err := a.watch.add(dir); err != nil {
		return err
	}
	for part := range strings.SplitSeq(strings.Trim(filepath.Dir(path), "/"), "/") {
		dir = filepath.Join(dir, part)
		if err := a.watch.add(dir); err != nil {
			return err
		}
	}
	return nil
}

// renewCgroups looks whether cgroups of the policy were made anew.
func (a *Agent) renewCgroups() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.watch != nil {
		a.watchCgroups()
	}
}
