// SPDX-License-Identifier: Apache-2.0

// Package sandbox irrevocably confines two processes: a gateway, whose system calls are known, and an arbitrary program. Both drop all
// capabilities and enter a Landlock domain and a filter of system calls (seccomp).
package sandbox

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/cap"

	"sockeye/internal/gateway/access"
)

// Gateway configures the confinement of a gateway's process.
type Gateway struct {
	// Child is the process that the gateway may signal; 0 for none.
	Child int
	// Outbound is the set of allowed destinations. If no destination is allowed, the process cannot open sockets; open sockets and
	// accept(2) still work.
	Outbound access.Outbound
	// Listens allows bind(2) and listen(2) for sockets that are open already; landlock denies bind(2) of TCP sockets.
	Listens bool
}

// Enter irrevocably confines all threads of this process. The process loses all capabilities, execve(2), the file system, system
// calls that are not in the filter, and sockets other than TCP, UDP and ICMP echo. A denied call fails with EPERM; a call that only
// an attacker would make (execve, ptrace, bpf, mount) kills the process with SIGSYS. Enter returns the names of restrictions that the
// kernel does not support in missing; the others are in force.
//
// All files must be open and the child must be running before the call.
func (s Gateway) Enter() (missing []string, err error) {
	// Logs use local time. The first use reads the time zone from a file, which must happen before the restriction.
	_ = time.Now().Local().String()
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("forbid dumps of memory: %w", err)
	}
	if err := dropCapabilities(); err != nil {
		return nil, err
	}
	if err := s.landlock(); isUnsupported(err) {
		missing = append(missing, "landlock")
	} else if err != nil {
		return nil, fmt.Errorf("enter landlock: %w", err)
	}
	if err := s.seccomp(); isUnsupported(err) {
		missing = append(missing, "seccomp")
	} else if err != nil {
		return nil, fmt.Errorf("enter seccomp filter: %w", err)
	}
	return missing, nil
}

// isUnsupported returns whether the error is of a kernel without landlock or seccomp, of a kernel that disables it, or of a container
// that denies the system call.
func isUnsupported(err error) bool {
	for _, e := range []error{unix.ENOSYS, unix.EOPNOTSUPP, unix.EINVAL, unix.EPERM, errors.ErrUnsupported} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func dropCapabilities() error {
	if err := cap.NewSet().SetProc(); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return fmt.Errorf("set no_new_privs: %w", errno)
	}
	return nil
}

// landlock denies all threads the file system, abstract Unix sockets, and TCP bind(2) and connect(2), as far as the kernel supports it.
func (s Gateway) landlock() error {
	abi, err := landlockABI()
	if err != nil {
		return err
	}
	r, ports := s.handled(abi)
	rules, err := r.create()
	if err != nil {
		return err
	}
	defer unix.Close(rules)
	for _, port := range ports {
		if err := allowConnect(rules, port); err != nil {
			return err
		}
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(rules), 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// handled returns the rights that a version of landlock denies, and the TCP ports to which connections remain allowed.
// LANDLOCK_SCOPE_SIGNAL is not included, because the child is outside the domain; the filter of system calls restricts signals to
// the child.
func (s Gateway) handled(abi int) (r ruleset, ports []uint16) {
	r.files = fileRights(abi)
	if abi >= 4 {
		r.net = unix.LANDLOCK_ACCESS_NET_BIND_TCP
		few := false
		if ports, few = s.Outbound.TCPPorts(); few {
			r.net |= unix.LANDLOCK_ACCESS_NET_CONNECT_TCP
		}
	}
	if abi >= 6 {
		r.scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET
	}
	return r, ports
}

// seccomp installs the filter in all threads.
func (s Gateway) seccomp() error {
	if auditArch == 0 {
		return errors.ErrUnsupported
	}
	// SPEC_ALLOW: the process runs no untrusted code, and kernels before 5.16 would otherwise disable speculative store bypass.
	return setFilter(s.filter(os.Getpid()), unix.SECCOMP_FILTER_FLAG_TSYNC|unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW)
}
