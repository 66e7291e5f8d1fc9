// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
)

// cgroupWatch notices when cgroups of the policy come and go, and tells those who subscribed, in the
// order in which they subscribed.
type cgroupWatch struct {
	tree cgroupTree
	log  *slog.Logger

	mu          sync.Mutex
	folders     *folderWatch // nil while no cgroup is watched
	closed      bool
	subscribers []cgroupSubscriber
}

// cgroupSubscriber names the cgroups of the policy, and opens those that were made anew.
type cgroupSubscriber struct {
	names func() []string
	renew func()
}

// subscribe is to be called before the first look. The functions must not call look.
func (w *cgroupWatch) subscribe(names func() []string, renew func()) {
	w.subscribers = append(w.subscribers, cgroupSubscriber{names, renew})
}

// look watches the folders in which the cgroups of the policy may come and go: those on the way to a
// path or a slice, and all slices for another unit. Then it calls the subscribers, as no event tells of
// what came before the watch.
func (w *cgroupWatch) look() {
	w.mu.Lock()
	defer w.mu.Unlock()
	var names []string
	for _, s := range w.subscribers {
		names = append(names, s.names()...)
	}
	if w.closed || len(names) == 0 {
		return
	}
	if w.folders == nil {
		folders, err := newFolderWatch(w.look)
		if err != nil {
			w.log.Warn("cgroups not watched: a unit that is started again is neither tuned nor traced", "error", err)
			return
		}
		w.folders = folders
	}
	for _, name := range names {
		if err := w.add(name); err != nil {
			w.log.Warn("cgroup not watched", "cgroup", name, "error", err)
		}
	}
	for _, s := range w.subscribers {
		s.renew()
	}
}

func (w *cgroupWatch) add(name string) error {
	path := name
	switch {
	case isUnit(name) && !strings.HasSuffix(name, ".slice"):
		return w.tree.eachSlice(w.folders.add)
	case isUnit(name):
		path = slicePath(name)
	}
	dir := w.tree.Mount
	if err := w.folders.add(dir); err != nil {
		return err
	}
	for part := range strings.SplitSeq(strings.Trim(filepath.Dir(path), "/"), "/") {
		dir = filepath.Join(dir, part)
		if err := w.folders.add(dir); err != nil {
			return err
		}
	}
	return nil
}

// close ends the watch. It waits for a look that has begun.
func (w *cgroupWatch) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	if w.folders != nil {
		w.folders.close()
	}
}
