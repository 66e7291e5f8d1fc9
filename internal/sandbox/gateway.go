// SPDX-License-Identifier: Apache-2.0

// Package sandbox confines two processes for good: a gateway, which needs little, and a program that nobody knows beforehand.
// Both give up all capabilities and enter a landlock domain and a filter of system calls (seccomp).
package sandbox

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/cap"

	"sockeye/internal/gateway"
)

// Gateway is what a gateway's process may still do once it is in.
type Gateway struct {
	// Child is a process that may be sent signals; 0 for none.
	Child int
	// Outbound is where the guest may go. Where it may go nowhere, no socket is opened any
	// more: what is open stays in use, and listeners accept.
	Outbound gateway.Outbound
	// Listens: sockets that are open may be bound to ports of UDP, and listen.
	Listens bool
}

// Enter takes away, from all threads and for good, what a gateway does not need: every
// capability, new programs, the file system, system calls that are not in the filter, and
// sockets that are not TCP, UDP or ICMP echo over IP. A forbidden call fails with EPERM; one
// that only an intruder would make (execve, ptrace, bpf, mount) ends the process by SIGSYS.
// What the kernel cannot take away is in missing; the rest holds all the same.
//
// All that the process needs must be open already, and its child started.
func (s Gateway) Enter() (missing []string, err error) {
	// Logs tell the local time, whose rules are in a file.
	_ = time.Now().Local().String()
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("forbid dumps of memory: %w", err)
	}
	if err := dropCapabilities(); err != nil {
		return nil, err
	}
	if err := s.landlock(); noSuchSandbox(err) {
		missing = append(missing, "landlock")
	} else if err != nil {
		return nil, fmt.Errorf("enter landlock: %w", err)
	}
	if err := s.seccomp(); noSuchSandbox(err) {
		missing = append(missing, "seccomp")
	} else if err != nil {
		return nil, fmt.Errorf("enter seccomp filter: %w", err)
	}
	return missing, nil
}

// noSuchSandbox tells errors of a kernel that has no landlock or seccomp, or has it turned
// off, and of a container that hides it.
func noSuchSandbox(err error) bool {
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

// ruleset is struct landlock_ruleset_attr.
type ruleset struct{ files, net, scoped uint64 }

// handled is all that landlock can forbid, by its ABI's version (linux/landlock.h), and the
// ports of TCP that may be connected to all the same.
// LANDLOCK_SCOPE_SIGNAL is not in it: the child was started outside, and the seccomp filter
// names the only process that signals may go to.
func (s Gateway) handled(abi int) (r ruleset, ports []uint16) {
	r.files = 1<<13 - 1
	for version, rights := range map[int]uint64{
		2: unix.LANDLOCK_ACCESS_FS_REFER, 3: unix.LANDLOCK_ACCESS_FS_TRUNCATE, 5: unix.LANDLOCK_ACCESS_FS_IOCTL_DEV,
	} {
		if abi >= version {
			r.files |= rights
		}
	}
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

// ruleNetPort is LANDLOCK_RULE_NET_PORT.
const ruleNetPort = 2

// portRule is struct landlock_net_port_attr.
type portRule struct{ access, port uint64 }

// landlock forbids the file system, all of it, and of the network what it can.
func (s Gateway) landlock() error {
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return errno
	}
	r, ports := s.handled(int(abi))
	// Older kernels take no larger structure than they know, unless the rest is zero.
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&r)), unsafe.Sizeof(r), 0)
	if errno != 0 {
		return errno
	}
	defer unix.Close(int(fd))
	for _, port := range ports {
		rule := portRule{unix.LANDLOCK_ACCESS_NET_CONNECT_TCP, uint64(port)}
		_, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, fd, ruleNetPort, uintptr(unsafe.Pointer(&rule)), 0, 0, 0)
		if errno != 0 {
			return errno
		}
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// seccomp sets the filter, in all threads.
func (s Gateway) seccomp() error {
	if auditArch == 0 {
		return errors.ErrUnsupported
	}
	// SPEC_ALLOW: nothing runs in this process but its own code; kernels before 5.16 would
	// slow all of it down.
	return setFilter(s.filter(os.Getpid()), unix.SECCOMP_FILTER_FLAG_TSYNC|unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW)
}
