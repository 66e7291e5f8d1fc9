// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"log/slog"
	"path/filepath"
	"strings"
	"sync"

	"sockeye/internal/watch"
)

// Watch notifies its subscribers, in the order of their subscription, when cgroups of the policy are created
// or removed.
type Watch struct {
	Tree Tree
	Log  *slog.Logger

	mu          sync.Mutex
	folders     *watch.Folders // nil while no cgroup is watched
	closed      bool
	subscribers []subscriber
}

// subscriber is a domain: names lists its cgroups, and renew attaches to cgroups that were created again.
type subscriber struct {
	names func() []string
	renew func()
}

// Subscribe adds a subscriber. Call Subscribe before the first Look. The functions must not call Look.
func (w *Watch) Subscribe(names func() []string, renew func()) {
	w.subscribers = append(w.subscribers, subscriber{names, renew})
}

// Look watches the directories in which cgroups of the policy can be created or removed: the ancestors of a
// path or a slice, and all slices for any other unit. Then Look calls the subscribers, because inotify
// reports no changes from before the watch.
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
			w.Log.Warn("cgroups not watched: units that restart will be neither tuned nor traced", "error", err)
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

// Close ends the watch. Close waits for a Look in progress.
func (w *Watch) Close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.closed = true
	if w.folders != nil {
		w.folders.Close()
	}
}
