// SPDX-License-Identifier: Apache-2.0

package load

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
	"sockeye/internal/rights"
)

// UnavailableError is the error of a process that cannot call bpf(2).
type UnavailableError struct {
	Err    error // EPERM, EACCES or ENOSYS
	Reason string
	hint   string
	code   int
}

func (e *UnavailableError) Error() string { return fmt.Sprintf("call bpf(2): %v: %s", e.Err, e.Reason) }

func (e *UnavailableError) Unwrap() error { return e.Err }

// Explain returns the hint and the exit code of the error.
func (e *UnavailableError) Explain() (hint string, code int) { return e.hint, e.code }

// Available creates a small map. It returns an *UnavailableError if the kernel has no bpf(2), or does not permit bpf(2) to
// this process, and any other error as it is.
func Available() error {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	switch {
	case err == nil:
		return m.Close()
	case errors.Is(err, unix.ENOSYS):
		return &UnavailableError{
			Err: unix.ENOSYS, Reason: "the kernel has no BPF, or a seccomp filter hides it",
			hint: "Sockeye needs Linux 5.10 or later with CONFIG_BPF_SYSCALL; a container needs a seccomp profile that allows bpf(2)",
			code: fault.CodeUnsupported,
		}
	case errors.Is(err, unix.EPERM):
		return Forbidden()
	}
	return fmt.Errorf("create a map: %w", err)
}

// Forbidden returns the error of a process to which bpf(2) is not permitted (EPERM), with the restriction of the process
// that explains it.
func Forbidden() *UnavailableError {
	e := &UnavailableError{Err: unix.EPERM, code: fault.CodeNotPermitted}
	switch {
	case !rights.Has(unix.CAP_BPF):
		e.Reason, e.hint = "this process lacks CAP_BPF", "run as root, or with the capabilities that sockeye doctor names"
	case inUserNamespace():
		e.Reason = "this process is in a user namespace of its own, as in a container"
		e.hint = "run the agent in the host's user namespace: bpf(2) needs its capabilities there"
	case hasSeccompFilter():
		e.Reason = "this process has a seccomp filter"
		e.hint = "allow bpf(2) in the seccomp profile of the container, or in SystemCallFilter= of the unit"
	default:
		e.Reason = "a security module, lockdown, or before Linux 5.11 the limit of locked memory forbids it"
		e.hint = "see the kernel's log, /sys/kernel/security/lsm, /sys/kernel/security/lockdown and ulimit -l"
	}
	return e
}

// inUserNamespace reports whether user ids of this process are not those of the host.
func inUserNamespace() bool {
	text, err := os.ReadFile("/proc/self/uid_map")
	return err == nil && strings.Join(strings.Fields(string(text)), " ") != "0 0 4294967295"
}

func hasSeccompFilter() bool {
	text, err := os.ReadFile("/proc/self/status")
	return err == nil && strings.Contains(string(text), "\nSeccomp:\t2\n")
}
