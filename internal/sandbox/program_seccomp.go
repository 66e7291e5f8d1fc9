// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The filter denies system calls that give access to objects outside the program's namespaces, and system calls that unprivileged
// programs rarely need and that have often allowed privilege escalation. All other calls are allowed, because the program is arbitrary. The list
// follows container runtimes (default profiles of Docker and Podman, @privileged of systemd), without calls that fail anyway for lack
// of a capability.

// families are the address families that the program may use. Others either lead out of the network namespace, as AF_VSOCK, or are not
// forwarded by the gateway.
var families = []uint32{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK}

// protocols are the allowed protocols of AF_INET and AF_INET6. Others load kernel modules and are not forwarded by the gateway. Go's
// net package requests MPTCP and falls back to TCP.
var protocols = []uint32{
	0, unix.IPPROTO_ICMP, unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMPV6, unix.IPPROTO_UDPLITE, unix.IPPROTO_RAW, unix.IPPROTO_MPTCP,
}

// deniedCalls fail with EPERM regardless of their arguments.
var deniedCalls = []uintptr{
	// Requests of a ring bypass the filter.
	unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER,
	// The session keyring is shared with processes outside.
	unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL,
	// Large parts of the kernel.
	unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD, unix.SYS_FANOTIFY_INIT,
	unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE, unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD,
	// State of the whole host: kernel log, clock, power, swap, accounting.
	unix.SYS_SYSLOG, unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_REBOOT, unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_ACCT, unix.SYS_QUOTACTL,
	// Opens files regardless of the permissions of their directories.
	unix.SYS_OPEN_BY_HANDLE_AT,
}

// namespaceCalls are denied unless the program may create user namespaces, in which it would have the capabilities for these calls.
var namespaceCalls = []uintptr{
	unix.SYS_SETNS, unix.SYS_CHROOT, unix.SYS_PIVOT_ROOT, unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_MOVE_MOUNT, unix.SYS_OPEN_TREE,
	unix.SYS_MOUNT_SETATTR, unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSPICK,
}

// terminalRequests are the requests of ioctl(2) that insert input into a terminal, which the calling shell would read (TIOCSTI, and
// TIOCLINUX on a console), or that load line disciplines.
var terminalRequests = []uint32{unix.TIOCSTI, unix.TIOCLINUX, unix.TIOCSETD}

// ioprioGroup is IOPRIO_WHO_PGRP of linux/ioprio.h.
const ioprioGroup = 2

var permitted = verdict(unix.SECCOMP_RET_ALLOW)

// argument loads the lower 32 bits of an argument. Both architectures are little endian. The kernel truncates the arguments of the
// conditions below to 32 bits (int, unsigned int), so a condition on all 64 bits could be bypassed by setting an upper bit. The flags
// of clone(2) are truncated, too; unshare(2) rejects upper bits.
func argument(n int) unix.SockFilter { return load(uint32(dataArguments + 8*n)) }

func failWith(errno unix.Errno) unix.SockFilter {
	return verdict(unix.SECCOMP_RET_ERRNO | uint32(errno))
}

// filterProgram installs the filter in all threads of this process, which later forks the program.
func filterProgram(allowUserns bool) error {
	if auditArch == 0 {
		return errors.ErrUnsupported
	}
	return setFilter(programFilter(allowUserns), unix.SECCOMP_FILTER_FLAG_TSYNC)
}

// programFilter is the filter of an isolated program, in classic BPF.
func programFilter(allowUserns bool) []unix.SockFilter {
	const x32 = 0x40000000 // first number of the x32 ABI of amd64
	p := []unix.SockFilter{
		// Other architectures (int 0x80 on amd64) number calls differently. 32-bit programs are killed.
		load(dataArch),
		jump(unix.BPF_JEQ, auditArch, 1, 0),
		verdict(unix.SECCOMP_RET_KILL_PROCESS),
		load(dataNumber),
		jump(unix.BPF_JGE, x32, 0, 1),
		failWith(unix.ENOSYS),
	}
	call := func(number uintptr, block ...unix.SockFilter) {
		p = append(p, jump(unix.BPF_JEQ, uint32(number), 0, uint8(len(block))))
		p = append(p, block...)
	}
	call(unix.SYS_SOCKET, socketBlock(true)...)
	call(unix.SYS_SOCKETPAIR, socketBlock(false)...)
	call(unix.SYS_IOCTL, slices.Concat([]unix.SockFilter{argument(1)}, anyOf(terminalRequests, refused), []unix.SockFilter{permitted})...)
	// The process group includes processes outside the PID namespace, as the calling shell.
	call(unix.SYS_SETPRIORITY, argument(0), jump(unix.BPF_JEQ, unix.PRIO_PGRP, 0, 1), refused, permitted)
	call(unix.SYS_IOPRIO_SET, argument(0), jump(unix.BPF_JEQ, ioprioGroup, 0, 1), refused, permitted)
	denied := deniedCalls
	if !allowUserns {
		denied = slices.Concat(denied, namespaceCalls)
		call(unix.SYS_CLONE, argument(0), jump(unix.BPF_JSET, unix.CLONE_NEWUSER, 0, 1), refused, permitted)
		call(unix.SYS_UNSHARE, argument(0), jump(unix.BPF_JSET, unix.CLONE_NEWUSER, 0, 1), refused, permitted)
		// The flags of clone3(2) are in memory, which the filter cannot read. C libraries fall back to clone(2).
		call(unix.SYS_CLONE3, failWith(unix.ENOSYS))
	}
	for _, number := range denied {
		call(number, refused)
	}
	return append(p, permitted)
}

// socketBlock checks the address family and, with single, the protocol of AF_INET and AF_INET6.
func socketBlock(single bool) (p []unix.SockFilter) {
	p = append(p, argument(0))
	p = append(p, noneOf(families, failWith(unix.EAFNOSUPPORT))...)
	if single {
		ip := append([]unix.SockFilter{argument(2)}, noneOf(protocols, failWith(unix.EPROTONOSUPPORT))...)
		p = append(p, jump(unix.BPF_JEQ, unix.AF_INET, 1, 0), jump(unix.BPF_JEQ, unix.AF_INET6, 0, uint8(len(ip))))
		p = append(p, ip...)
	}
	return append(p, permitted)
}

// anyOf returns the verdict then if the loaded value is one of the values, and continues otherwise.
func anyOf(values []uint32, then unix.SockFilter) (p []unix.SockFilter) {
	for _, v := range values {
		p = append(p, jump(unix.BPF_JEQ, v, 0, 1), then)
	}
	return p
}

// noneOf returns the verdict then if the loaded value is none of the values, and continues otherwise.
func noneOf(values []uint32, then unix.SockFilter) (p []unix.SockFilter) {
	for n, v := range values {
		p = append(p, jump(unix.BPF_JEQ, v, uint8(len(values)-n), 0))
	}
	return append(p, then)
}

// setFilter installs a filter in all threads.
func setFilter(filter []unix.SockFilter, flags uintptr) error {
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	thread, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return errno
	}
	if thread != 0 {
		return fmt.Errorf("thread %d has a filter of its own", thread)
	}
	return nil
}
