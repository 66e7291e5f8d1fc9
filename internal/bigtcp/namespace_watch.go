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

// networkWatch tells when network namespaces come and go, and when records of sizes
// do.
type networkWatch struct {
	folders, records *watch.Folders
	mounts           *mountWatch
	retry            *time.Timer // nil until it is needed
}

// retryAfter is when the agent looks again at a file that is no network namespace: it
// may just be about to become one.
const retryAfter = time.Second

func (w *networkWatch) close() {
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

// look watches where the network namespaces of the policy may come and go, and looks whether they did.
// ip netns makes a file and then mounts the namespace there, of which only the list of mounts tells.
func (d *Domain) look() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed || len(d.sizers) == 0 {
		return
	}
	if d.watch == nil {
		w, err := d.newNetworkWatch()
		if err != nil {
			d.log.Warn("network namespaces not watched: one that appears is left as it is", "error", err)
			return
		}
		d.watch = w
	}
	if err := d.watch.records.Add(d.recordsDir()); err != nil {
		d.log.Warn("records of sizes not watched", "error", err)
	}
	for netns, s := range d.sizers {
		if netns != "" {
			if err := d.watch.folders.AddWay(netns); err != nil {
				d.log.Warn("network namespace not watched", "netns", netns, "error", err)
			}
		}
		s.renew()
		if _, err := os.Stat(netns); netns != "" && err == nil && !s.entered() {
			d.watch.again(d.look)
		}
	}
}

// again calls look in a while.
func (w *networkWatch) again(look func()) {
	if w.retry == nil {
		w.retry = time.AfterFunc(retryAfter, look)
		return
	}
	w.retry.Reset(retryAfter)
}

func (d *Domain) newNetworkWatch() (w *networkWatch, err error) {
	w = &networkWatch{}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if err := os.Mkdir(d.recordsDir(), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("create folder of records: %w", err)
	}
	if w.records, err = watch.NewFolders(d.recordsChanged); err != nil {
		return nil, err
	}
	if w.folders, err = watch.NewFolders(d.look); err != nil {
		return nil, err
	}
	w.mounts, err = newMountWatch(d.look)
	return w, err
}

// recordsChanged looks whether a command has left interfaces to the policy, or taken
// some.
func (d *Domain) recordsChanged() {
	for _, s := range d.allSizers() {
		s.again()
	}
}

// mountWatch tells when something is mounted or unmounted.
type mountWatch struct {
	mounts *os.File
	wake   int // eventfd(2)
}

// newMountWatch calls changed after every change of the list of mounts, from one
// goroutine, until it is closed.
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
			_, err := unix.Poll(watched, -1)
			switch {
			case errors.Is(err, unix.EINTR):
				continue
			case err != nil || watched[1].Revents != 0:
				return
			}
			changed()
		}
	}()
	return w, nil
}

func (w *mountWatch) close() {
	// Its goroutine closes the descriptors.
	one := slices.Repeat([]byte{1}, 8)
	_, _ = unix.Write(w.wake, one)
}
