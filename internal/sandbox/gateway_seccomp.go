// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"slices"

	"golang.org/x/sys/unix"
)

// allowed is a system call that is allowed if all conditions hold.
type allowed struct {
	number uintptr
	ifs    []condition
}

// condition holds if the lower 32 bits of an argument, masked, are one of the values. The tested arguments have 32 bits (int), or no
// meaning above.
type condition struct {
	argument int
	mask     uint32
	values   []uint32
}

const all = ^uint32(0)

// fatalCalls are the system calls that kill the process.
var fatalCalls = []uintptr{
	unix.SYS_EXECVE, unix.SYS_EXECVEAT, unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV,
	unix.SYS_PIDFD_GETFD, unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD,
	unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER,
	unix.SYS_UNSHARE, unix.SYS_SETNS, unix.SYS_CHROOT, unix.SYS_PIVOT_ROOT, unix.SYS_MOUNT, unix.SYS_UMOUNT2,
	unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_MOVE_MOUNT, unix.SYS_OPEN_TREE, unix.SYS_MOUNT_SETATTR,
	unix.SYS_OPEN_BY_HANDLE_AT, unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL,
	unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE, unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD, unix.SYS_REBOOT,
}

// Offsets in struct seccomp_data, in bytes.
const (
	dataNumber    = 0
	dataArch      = 4
	dataArguments = 16
)

var refused = verdict(unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM))

// filter returns the filter, in classic BPF, of the process with the PID own.
func (s Gateway) filter(own int) []unix.SockFilter {
	p := []unix.SockFilter{
		load(dataArch),
		jump(unix.BPF_JEQ, auditArch, 1, 0),
		verdict(unix.SECCOMP_RET_KILL_PROCESS),
		load(dataNumber),
		// x32 system calls of amd64.
		jump(unix.BPF_JGE, 0x40000000, 0, 1),
		verdict(unix.SECCOMP_RET_KILL_PROCESS),
	}
	for _, c := range s.calls(own) {
		block := c.block()
		p = append(p, jump(unix.BPF_JEQ, uint32(c.number), 0, uint8(len(block))))
		p = append(p, block...)
	}
	for _, number := range slices.Concat(fatalCalls, archFatal) {
		p = append(p, jump(unix.BPF_JEQ, uint32(number), 0, 1), verdict(unix.SECCOMP_RET_KILL_PROCESS))
	}
	// clone3(2) has its flags in memory; C libraries fall back to clone(2).
	p = append(p, jump(unix.BPF_JEQ, unix.SYS_CLONE3, 0, 1), verdict(unix.SECCOMP_RET_ERRNO|uint32(unix.ENOSYS)))
	return append(p, refused)
}

// namespaces are the flags of clone(2) that create a namespace.
const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
	unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

var netCalls = []uintptr{
	unix.SYS_READ, unix.SYS_WRITE, unix.SYS_READV, unix.SYS_WRITEV, unix.SYS_CLOSE,
	unix.SYS_SENDTO, unix.SYS_RECVFROM, unix.SYS_SENDMSG, unix.SYS_RECVMSG, unix.SYS_SENDMMSG, unix.SYS_RECVMMSG,
	unix.SYS_ACCEPT4, unix.SYS_SHUTDOWN, unix.SYS_GETSOCKOPT, unix.SYS_SETSOCKOPT, unix.SYS_GETSOCKNAME, unix.SYS_GETPEERNAME,
	unix.SYS_EPOLL_PWAIT, unix.SYS_EPOLL_CTL, unix.SYS_PPOLL,
}

// runtimeCalls are the system calls of Go's runtime (runtime/sys_linux_*.s, internal/runtime/syscall, internal/runtime/cgroup) and of
// os.Process.
var runtimeCalls = []uintptr{
	unix.SYS_FUTEX, unix.SYS_MUNMAP, unix.SYS_MADVISE, unix.SYS_MINCORE, unix.SYS_BRK,
	unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK, unix.SYS_RESTART_SYSCALL,
	unix.SYS_NANOSLEEP, unix.SYS_CLOCK_GETTIME, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_GETTIMEOFDAY,
	unix.SYS_SCHED_YIELD, unix.SYS_SCHED_GETAFFINITY, unix.SYS_GETPID, unix.SYS_GETTID, unix.SYS_GETRANDOM,
	unix.SYS_EPOLL_CREATE1, unix.SYS_EVENTFD2, unix.SYS_PREAD64,
	unix.SYS_SETITIMER, unix.SYS_TIMER_CREATE, unix.SYS_TIMER_SETTIME, unix.SYS_TIMER_DELETE,
	unix.SYS_WAITID, unix.SYS_WAIT4, unix.SYS_PIDFD_SEND_SIGNAL, unix.SYS_GETRUSAGE, unix.SYS_EXIT, unix.SYS_EXIT_GROUP,
}

// calls returns the system calls of the gateway's loop, of the Go runtime, of signals and of waiting for the child. Calls with
// conditions are in the order of their frequency. Since Linux 5.11, the kernel does not run the filter for calls without conditions,
// because it caches that the filter always allows them.
func (s Gateway) calls(own int) []allowed {
	signalled := []uint32{uint32(own)}
	if s.Child != 0 {
		signalled = append(signalled, uint32(s.Child))
	}
	list := []allowed{
		{unix.SYS_IOCTL, []condition{{1, all, []uint32{unix.TIOCOUTQ, unix.SIOCOUTQNSD, unix.TIOCINQ, unix.TIOCGPGRP, unix.TIOCSPGRP}}}},
		{unix.SYS_FCNTL, []condition{{1, all, []uint32{unix.F_GETFL, unix.F_SETFL, unix.F_GETFD, unix.F_SETFD}}}},
		{unix.SYS_TGKILL, []condition{{0, all, []uint32{uint32(own)}}}},
		{unix.SYS_KILL, []condition{{0, all, signalled}}},
		{unix.SYS_MMAP, []condition{{2, unix.PROT_EXEC, []uint32{0}}}},
		{unix.SYS_CLONE, []condition{{0, unix.CLONE_THREAD | namespaces, []uint32{unix.CLONE_THREAD}}}},
		{unix.SYS_PRCTL, []condition{{0, all, []uint32{unix.PR_SET_VMA}}}},
	}
	if !s.Outbound.None() {
		list = append(list, allowed{unix.SYS_SOCKET, []condition{
			{0, all, []uint32{unix.AF_INET, unix.AF_INET6}},
			{1, ^uint32(unix.SOCK_NONBLOCK | unix.SOCK_CLOEXEC), []uint32{unix.SOCK_STREAM, unix.SOCK_DGRAM}},
			{2, all, []uint32{0, unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6}},
		}}, allowed{unix.SYS_CONNECT, nil})
	}
	if s.Listens {
		list = append(list, allowed{unix.SYS_BIND, nil}, allowed{unix.SYS_LISTEN, nil})
	}
	for _, n := range slices.Concat(netCalls, runtimeCalls, archCalls) {
		list = append(list, allowed{number: n})
	}
	return list
}

// block checks the conditions of a call whose number has matched.
func (c allowed) block() (p []unix.SockFilter) {
	for _, i := range c.ifs {
		p = append(p, load(uint32(dataArguments+8*i.argument)))
		if i.mask != all {
			p = append(p, unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: i.mask})
		}
		for n, v := range i.values {
			p = append(p, jump(unix.BPF_JEQ, v, uint8(len(i.values)-n), 0))
		}
		p = append(p, refused)
	}
	return append(p, verdict(unix.SECCOMP_RET_ALLOW))
}

func load(offset uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
}

// jump skips yes instructions if the comparison holds, and no instructions otherwise.
func jump(comparison uint16, k uint32, yes, no uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | comparison | unix.BPF_K, Jt: yes, Jf: no, K: k}
}

func verdict(v uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: v}
}
