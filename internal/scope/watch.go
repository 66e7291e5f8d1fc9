// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"log/slog"
	"path/filepath"
	"strings"
	"sync"

	"sockeye/internal/watch"
)

// Watch notices when cgroups of the policy come and go, and tells those who subscribed, in the
// order in which they subscribed.
type Watch struct {
	Tree Tree
	Log  *slog.Logger

	mu          sync.Mutex
	folders     *watch.Folders // nil while no cgroup is watched
	closed      bool
	subscribers []subscriber
}

// subscriber names the cgroups of the policy, and opens those that were made anew.
type subscriber struct {
	names func() []string
	renew func()
}

// Subscribe is to be called before the first look. The functions must not call look.
func (w *Watch) Subscribe(names func() []string, renew func()) {
	w.subscribers = append(w.subscribers, subscriber{names, renew})
}

// Look watches the folders in which the cgroups of the policy may come and go: those on the way to a
// path or a slice, and all slices for another unit. Then it calls the subscribers, as no event tells of
// what came before the watch.
func (w *Watch) Look() {
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
		folders, err := watch.NewFolders(w.Look)
		if err != nil {
			w.Log.Warn("cgroups not watched: a unit that is started again is neither tuned nor traced", "error", err)
			return
		}
		w.folders = folders
	}
	for _, name := range names {
		if err := w.add(name); err != nil {
			w.Log.Warn("cgroup not watched", "cgroup", name, "error", err)
		}
	}
	for _, s := range w.subscribers {
		s.renew()
	}
}

func (w *Watch) add(name string) error {
	path := name
	switch {
	case isUnit(name) && !strings.HasSuffix(name, ".slice"):
		return w.Tree.eachSlice(w.folders.Add)
	case isUnit(name):
		path = slicePath(name)
	}
	dir := w.Tree.Mount
	if err := w.folders.Add(dir); err != nil {
		return err
	}
	for part := range strings.SplitSeq(strings.Trim(filepath.Dir(path), "/"), "/") {
		dir = filepath.Join(dir, part)
		if err := w.folders.Add(dir); err != nil {
			return err
		}
	}
	return nil
}

// Close ends the watch. It waits for a look that has begun.
func (w *Watch) Close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	if w.folders != nil {
		w.folders.Close()
	}
}
