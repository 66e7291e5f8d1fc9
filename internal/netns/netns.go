// SPDX-License-Identifier: Apache-2.0

// Package netns enters network namespaces.
package netns

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
	"sockeye/internal/rights"
)

// Do runs f with the thread in the network namespace; nil is that of the
// caller.
func Do(netns *os.File, f func() error) error {
	if netns == nil {
		return f()
	}
	runtime.LockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("remember network namespace: %w", err)
	}
	defer home.Close()
	if err := unix.Setns(int(netns.Fd()), unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		err = fmt.Errorf("enter network namespace %s: %w", netns.Name(), err)
		if errors.Is(err, unix.EPERM) {
			err = &fault.Error{Err: err, Hint: rights.MissingHint(unix.CAP_SYS_ADMIN, "restart the agent; it keeps that right if a service names a netns then"), Code: fault.CodeNotPermitted}
		}
		return err
	}
	err = f()
	// A thread that cannot come back stays locked, and ends with its goroutine.
	if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
		return fault.Join(err, fmt.Errorf("leave network namespace %s: %w", netns.Name(), back))
	}
	runtime.UnlockOSThread()
	return err
}
