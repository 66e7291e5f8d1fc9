// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The filter of the program forbids what leads out of its namespaces, or to parts of the kernel that a program without
// rights seldom needs and that were often a way to root. All else is allowed: it is for programs that nobody knows
// beforehand. The list is that of container runtimes (Docker's and Podman's default profiles, @privileged of systemd), but
// for what only needs a capability, which the program has not.

// families are the families of sockets that the program may open. Others either lead out of the network namespace, as
// AF_VSOCK does, or are of no use behind the gateway.
var families = []uint32{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK}

// protocols are the protocols of AF_INET and AF_INET6: others load modules of the kernel, and the gateway carries none of
// them. Go's net package asks for MPTCP, and falls back to TCP.
var protocols = []uint32{
	0, unix.IPPROTO_ICMP, unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMPV6, unix.IPPROTO_UDPLITE, unix.IPPROTO_RAW, unix.IPPROTO_MPTCP,
}

// deniedCalls fail with EPERM, whatever their arguments.
var deniedCalls = []uintptr{
	// A ring's requests are no system calls, so no filter sees them.
	unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER,
	// The session keyring is inherited from outside.
	unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL,
	// Large parts of the kernel.
	unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD, unix.SYS_FANOTIFY_INIT,
	unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE, unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD,
	// The host as a whole: its kernel's log, its clock, its power, its swap.
	unix.SYS_SYSLOG, unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_REBOOT, unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_ACCT, unix.SYS_QUOTACTL,
	// Files around their folders' permissions.
	unix.SYS_OPEN_BY_HANDLE_AT,
}

// namespaceCalls are denied, too, unless the program may make user namespaces: within one it may have the rights for them.
var namespaceCalls = []uintptr{
	unix.SYS_SETNS, unix.SYS_CHROOT, unix.SYS_PIVOT_ROOT, unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_MOVE_MOUNT, unix.SYS_OPEN_TREE,
	unix.SYS_MOUNT_SETATTR, unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSPICK,
}

// terminalRequests are those of ioctl(2) that put text into the input of a terminal, which the calling shell then reads
// (TIOCSTI, and TIOCLINUX on a console), or that load line disciplines into the kernel.
var terminalRequests = []uint32{unix.TIOCSTI, unix.TIOCLINUX, unix.TIOCSETD}

// ioprioGroup is IOPRIO_WHO_PGRP of linux/ioprio.h.
const ioprioGroup = 2

// The kernel takes these arguments as 32 bits (int, unsigned int) and looks at nothing above: conditions on all 64 bits
// could be passed by setting one above. The flags of clone(2) are cut to 32 bits too; unshare(2) refuses what is above.

// programFilter is the filter of an isolated program, in classic BPF.
func programFilter(allowUserns bool) []unix.SockFilter {
	const x32 = 0x40000000 // on amd64 the numbers of the x32 ABI are from here on
	p := []unix.SockFilter{
		// Numbers of another architecture (int 0x80 on amd64) mean other calls. A 32-bit program cannot run.
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
	// The process group reaches out of the PID namespace: a program that shares it with a shell would slow that down.
	call(unix.SYS_SETPRIORITY, argument(0), jump(unix.BPF_JEQ, unix.PRIO_PGRP, 0, 1), refused, permitted)
	call(unix.SYS_IOPRIO_SET, argument(0), jump(unix.BPF_JEQ, ioprioGroup, 0, 1), refused, permitted)
	denied := deniedCalls
	if !allowUserns {
		denied = slices.Concat(denied, namespaceCalls)
		call(unix.SYS_CLONE, argument(0), jump(unix.BPF_JSET, unix.CLONE_NEWUSER, 0, 1), refused, permitted)
		call(unix.SYS_UNSHARE, argument(0), jump(unix.BPF_JSET, unix.CLONE_NEWUSER, 0, 1), refused, permitted)
		// Its flags are in memory, where no filter sees them. C libraries fall back to clone.
		call(unix.SYS_CLONE3, failWith(unix.ENOSYS))
	}
	for _, number := range denied {
		call(number, refused)
	}
	return append(p, permitted)
}

// socketBlock decides about the family of a socket and, of IP, its protocol.
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

// argument loads the lower 32 bits of an argument. Both architectures are little endian.
func argument(n int) unix.SockFilter { return load(uint32(dataArguments + 8*n)) }

// anyOf ends with a verdict if what is loaded is one of the values, and goes on if not.
func anyOf(values []uint32, then unix.SockFilter) (p []unix.SockFilter) {
	for _, v := range values {
		p = append(p, jump(unix.BPF_JEQ, v, 0, 1), then)
	}
	return p
}

// noneOf ends with a verdict if what is loaded is none of the values, and goes on if it is one.
func noneOf(values []uint32, then unix.SockFilter) (p []unix.SockFilter) {
	for n, v := range values {
		p = append(p, jump(unix.BPF_JEQ, v, uint8(len(values)-n), 0))
	}
	return append(p, then)
}

var permitted = verdict(unix.SECCOMP_RET_ALLOW)

func failWith(errno unix.Errno) unix.SockFilter {
	return verdict(unix.SECCOMP_RET_ERRNO | uint32(errno))
}

// filterProgram sets the filter in all threads of this process, from which the program is forked.
func filterProgram(allowUserns bool) error {
	if auditArch == 0 {
		return errors.ErrUnsupported
	}
	return setFilter(programFilter(allowUserns), unix.SECCOMP_FILTER_FLAG_TSYNC)
}

// setFilter sets a filter in all threads.
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
