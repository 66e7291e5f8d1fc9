// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"fmt"

	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/cap"
)

// User is the user and group to which root's gateway and program change.
type User struct{ UID, GID int }

// setupCaps are the capabilities that root's gateway keeps until the program starts: for ports below 1024, for receive buffers beyond
// net.core.rmem_max, and for user namespaces on hosts that deny them to other users.
var setupCaps = []cap.Value{cap.NET_BIND_SERVICE, cap.NET_ADMIN, cap.SYS_ADMIN}

// become changes the user and group of all threads of this process and drops the supplementary groups. Sockets that are opened
// from then on belong to the user. Of the capabilities, setupCaps remain. Without CAP_SETUID and CAP_SETGID the error is a
// StepError.
func (u *User) become() error {
	if err := cap.SetGroups(u.GID); err != nil {
		return &StepError{StepUser, fmt.Errorf("become user %d: set group: %w", u.UID, err)}
	}
	if err := cap.SetUID(u.UID); err != nil {
		return &StepError{StepUser, fmt.Errorf("become user %d: set user: %w", u.UID, err)}
	}
	permitted, kept := cap.GetProc(), cap.NewSet()
	for _, v := range setupCaps {
		has, err := permitted.GetFlag(cap.Permitted, v)
		if err == nil && has {
			err = kept.SetFlag(cap.Permitted, true, v)
		}
		if err == nil && has {
			err = kept.SetFlag(cap.Effective, true, v)
		}
		if err != nil {
			return fmt.Errorf("become user %d: keep %s: %w", u.UID, v, err)
		}
	}
	if err := kept.SetProc(); err != nil {
		return fmt.Errorf("become user %d: keep capabilities: %w", u.UID, err)
	}
	// After the change of the user, the kernel made the process undumpable, and root the owner of its files in /proc. The parent must
	// write the mapping of the user namespace there.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become user %d: %w", u.UID, err)
	}
	return nil
}
