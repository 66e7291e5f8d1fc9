// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/watch"
)

// namespaceWatch watches for network namespaces that appear or vanish, and for changes of
// the records of sizes.
type namespaceWatch struct {
	folders, records *watch.Folders
	mounts           *mountWatch
	retry            *time.Timer // nil until the first retry
}

// retryDelay is the time until a file that is not a network namespace is checked again, and until a namespace is opened again
// whose interfaces could not be watched. ip netns creates the file before it mounts the namespace.
const retryDelay = time.Second

func (w *namespaceWatch) close() {
	for _, folders := range []*watch.Folders{w.folders, w.records} {
		if folders != nil {
			folders.Close()
		}
	}
	if w.mounts != nil {
		w.mounts.close()
	}
	if w.retry != nil {
		w.retry.Stop()
	}
}

// retryNamespaces calls updateNamespaces after retryDelay.
func (d *Domain) retryNamespaces() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed && d.watch != nil {
		d.watch.retryAfterDelay(d.updateNamespaces)
	}
}

// updateNamespaces watches the paths of the network namespaces with rules, and opens or
// closes namespaces that have appeared or vanished. ip netns creates a file and then mounts
// the namespace on it; only the list of mounts shows the mount.
func (d *Domain) updateNamespaces() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || len(d.reconcilers) == 0 {
		return
	}
	if d.watch == nil {
		w, err := d.newNamespaceWatch()
		if err != nil {
			d.log.Warn("network namespaces not watched: those that appear later are not configured", "error", err)
			return
		}
		d.watch = w
	}
	if err := d.watch.records.Add(d.recordsDir()); err != nil {
		d.log.Warn("records of sizes not watched", "error", err)
	}
	for netns, s := range d.reconcilers {
		if netns != "" {
			if err := d.watch.folders.AddWay(netns); err != nil {
				d.log.Warn("network namespace not watched", "netns", netns, "error", err)
			}
		}
		s.updateNamespace()
		if _, err := statFile(netns); err == nil && !s.isOpen() {
			d.watch.retryAfterDelay(d.updateNamespaces)
		}
	}
}

// retryAfterDelay calls retry after retryDelay.
func (w *namespaceWatch) retryAfterDelay(retry func()) {
	if w.retry == nil {
		w.retry = time.AfterFunc(retryDelay, retry)
		return
	}
	w.retry.Reset(retryDelay)
}

func (d *Domain) newNamespaceWatch() (w *namespaceWatch, err error) {
	w = &namespaceWatch{}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if err := os.Mkdir(d.recordsDir(), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("create directory of records: %w", err)
	}
	if w.records, err = watch.NewFolders(d.recordsChanged); err != nil {
		return nil, err
	}
	if w.folders, err = watch.NewFolders(d.updateNamespaces); err != nil {
		return nil, err
	}
	w.mounts, err = newMountWatch(d.updateNamespaces)
	return w, err
}

// recordsChanged reconciles all namespaces after a command has written or removed records.
func (d *Domain) recordsChanged() {
	for _, s := range d.allReconcilers() {
		s.update()
	}
}

// mountWatch watches the list of mounts.
type mountWatch struct {
	mounts *os.File
	wake   int // eventfd(2)
}

// newMountWatch calls changed, from one goroutine, after each change of the list of mounts,
// until the watch is closed.
func newMountWatch(changed func()) (*mountWatch, error) {
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("watch mounts: %w", err)
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		mounts.Close()
		return nil, fmt.Errorf("watch mounts: %w", err)
	}
	w := &mountWatch{mounts, wake}
	go func() {
		defer unix.Close(wake)
		defer mounts.Close()
		// POLLPRI is set once for each change (proc_pid_mountinfo(5)).
		watched := []unix.PollFd{{Fd: int32(mounts.Fd()), Events: unix.POLLPRI}, {Fd: int32(wake), Events: unix.POLLIN}}
		for {
			// AllThreadsSyscall waits for the end of the call of each thread (see Events.Next of internal/bpf).
			n, err := unix.Poll(watched, 1000)
			switch {
			case err == nil && n == 0, errors.Is(err, unix.EINTR):
				continue
			case err != nil:
				time.Sleep(time.Second) // ENOMEM
				continue
			case watched[1].Revents != 0:
				return
			}
			changed()
		}
	}()
	return w, nil
}

func (w *mountWatch) close() {
	// The goroutine of newMountWatch closes the descriptors.
	one := slices.Repeat([]byte{1}, 8)
	_, _ = unix.Write(w.wake, one)
}
