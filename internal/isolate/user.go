// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// User is the user and group that root's gateway and program become.
type User struct{ UID, GID int }

// keptToPrepare are the capabilities that root's gateway keeps until the program starts: for ports below 1024, for receive
// buffers beyond net.core.rmem_max, and for user namespaces on hosts that forbid them to other users.
const keptToPrepare = 1<<unix.CAP_NET_BIND_SERVICE | 1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_SYS_ADMIN

// become changes the user and group of all threads of this process and drops the supplementary groups. Sockets that are opened
// from then on belong to the user. Of the capabilities, keptToPrepare remain. Without CAP_SETUID and CAP_SETGID the error is a
// StepError.
func (u *User) become() error {
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_KEEPCAPS, 1, 0, 0, 0, 0); errno != 0 {
		return fmt.Errorf("become user %d: keep capabilities: %w", u.UID, errno)
	}
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"drop groups", func() error { return syscall.Setgroups(nil) }},
		{"set group", func() error { return syscall.Setresgid(u.GID, u.GID, u.GID) }},
		{"set user", func() error { return syscall.Setresuid(u.UID, u.UID, u.UID) }},
	} {
		if err := step.do(); err != nil {
			return &StepError{StepUser, fmt.Errorf("become user %d: %s: %w", u.UID, step.name, err)}
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&header, &caps[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	kept := caps[0].Permitted & keptToPrepare
	caps = [2]unix.CapUserData{{Permitted: kept, Effective: kept}}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&caps[0])), 0); errno != 0 {
		return fmt.Errorf("become user %d: keep capabilities: %w", u.UID, errno)
	}
	// The kernel made the process undumpable, and its files in /proc root's: the parent writes the mapping of the user
	// namespace there.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become user %d: %w", u.UID, err)
	}
	return nil
}
