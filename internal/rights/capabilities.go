// SPDX-License-Identifier: Apache-2.0

package rights

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// kept lists the capabilities that the agent keeps, and their purpose.
var kept = []struct {
	Number uintptr
	Name   string
	Why    string
}{
	{unix.CAP_BPF, "CAP_BPF", "load programs, make maps"},
	{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN", "attach programs to sockets, cgroups and network namespaces, set sizes of interfaces"},
	{unix.CAP_PERFMON, "CAP_PERFMON", "let the verifier follow pointers in programs"},
	{unix.CAP_SYS_PTRACE, "CAP_SYS_PTRACE", "take members' sockets by pidfd_getfd"},
	{unix.CAP_DAC_READ_SEARCH, "CAP_DAC_READ_SEARCH", "read /proc/PID/fd of members"},
	{unix.CAP_CHOWN, "CAP_CHOWN", "give keeper sockets to the members' user"},
}

// Drop drops all capabilities except those in kept, the extra ones, and CAP_NET_BIND_SERVICE, which a later policy may
// need. Drop applies to all threads and to programs started afterwards.
func Drop(extra ...uintptr) error {
	mask := uint64(1) << unix.CAP_NET_BIND_SERVICE
	for _, c := range kept {
		mask |= 1 << c.Number
	}
	for _, c := range extra {
		mask |= 1 << c
	}
	return limitCapabilities(mask)
}

// DropAll drops all capabilities.
func DropAll() error { return limitCapabilities(0) }

// limitCapabilities restricts the permitted, effective and inheritable sets to a mask, and sets no_new_privs. The
// bounding set stays: with no_new_privs, no program that this process starts gains a capability, not even as root
// (cap_bprm_creds_from_file in security/commoncap.c).
func limitCapabilities(mask uint64) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var has [2]unix.CapUserData
	if err := unix.Capget(&header, &has[0]); err != nil {
		return fmt.Errorf("read capabilities: %w", err)
	}
	for i := range has {
		part := uint32(mask >> (32 * i))
		has[i].Permitted &= part
		has[i].Effective = has[i].Permitted
		has[i].Inheritable &= part
	}
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET,
		uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&has[0])), 0)
	if errno != 0 {
		return fmt.Errorf("limit capabilities: %w", errno)
	}
	_, _, errno = syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0)
	if errno != 0 {
		return fmt.Errorf("set no_new_privs: %w", errno)
	}
	return nil
}

// Missing returns the names of the capabilities that the agent needs and lacks.
func Missing() ([]string, error) {
	effective, err := effectiveCapabilities()
	if err != nil {
		return nil, err
	}
	var missing []string
	for _, c := range kept {
		if effective&(1<<c.Number) == 0 {
			missing = append(missing, c.Name)
		}
	}
	return missing, nil
}

func effectiveCapabilities() (uint64, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var has [2]unix.CapUserData
	if err := unix.Capget(&header, &has[0]); err != nil {
		return 0, fmt.Errorf("read capabilities: %w", err)
	}
	return uint64(has[1].Effective)<<32 | uint64(has[0].Effective), nil
}

// Has reports whether this process has a capability in its effective set.
func Has(c uintptr) bool {
	effective, err := effectiveCapabilities()
	return err == nil && effective&(1<<c) != 0
}
