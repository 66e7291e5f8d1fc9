// SPDX-License-Identifier: Apache-2.0

package rights

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/cap"
)

// kept lists the capabilities that the agent keeps, and their purpose.
var kept = []struct {
	Value cap.Value
	Why   string
}{
	{cap.BPF, "load programs, make maps"},
	{cap.NET_ADMIN, "attach programs to sockets, cgroups and network namespaces, set sizes of interfaces"},
	{cap.NET_RAW, "send datagrams that waited, and templates, from the address of their device"},
	{cap.PERFMON, "let the verifier follow pointers in programs"},
	{cap.SYS_PTRACE, "take members' sockets by pidfd_getfd"},
	{cap.DAC_READ_SEARCH, "read /proc/PID/fd of members"},
	{cap.CHOWN, "give keeper sockets to the members' user"},
}

// Drop drops all capabilities except those in kept, the extra ones, and CAP_NET_BIND_SERVICE, which a later policy may
// need. Drop applies to all threads and to programs started afterwards.
func Drop(extra ...uintptr) error {
	keep := []cap.Value{cap.NET_BIND_SERVICE}
	for _, c := range kept {
		keep = append(keep, c.Value)
	}
	for _, c := range extra {
		keep = append(keep, cap.Value(c))
	}
	return limitCapabilities(keep...)
}

// DropAll drops all capabilities.
func DropAll() error { return limitCapabilities() }

// limitCapabilities restricts the permitted, effective and inheritable sets of all threads to the given capabilities, and
// sets no_new_privs. The bounding set stays: with no_new_privs, no program that this process starts gains a capability, not
// even as root (cap_bprm_creds_from_file in security/commoncap.c).
func limitCapabilities(keep ...cap.Value) error {
	has, err := cap.GetPID(0) // GetProc would panic
	if err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	limited := cap.NewSet()
	for _, v := range keep {
		// The only errors are about capabilities that the kernel does not know.
		if permitted, _ := has.GetFlag(cap.Permitted, v); permitted {
			err = errors.Join(err, limited.SetFlag(cap.Permitted, true, v), limited.SetFlag(cap.Effective, true, v))
		}
		if inheritable, _ := has.GetFlag(cap.Inheritable, v); inheritable {
			err = errors.Join(err, limited.SetFlag(cap.Inheritable, true, v))
		}
	}
	// Without cgo both calls are syscall.AllThreadsSyscall.
	if err := errors.Join(err, limited.SetProc()); err != nil {
		return fmt.Errorf("limit capabilities: %w", err)
	}
	if _, err := cap.Prctlw(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	return nil
}

// Missing returns the names of the capabilities that the agent needs and lacks.
func Missing() ([]string, error) {
	has, err := cap.GetPID(0)
	if err != nil {
		return nil, fmt.Errorf("read capabilities: %w", err)
	}
	var missing []string
	for _, c := range kept {
		if effective, _ := has.GetFlag(cap.Effective, c.Value); !effective {
			missing = append(missing, strings.ToUpper(c.Value.String()))
		}
	}
	return missing, nil
}

// Has reports whether this process has a capability in its effective set.
func Has(c uintptr) bool {
	has, err := cap.GetPID(0)
	if err != nil {
		return false
	}
	effective, err := has.GetFlag(cap.Effective, cap.Value(c))
	return err == nil && effective
}
