// SPDX-License-Identifier: Apache-2.0

package sandbox

import "golang.org/x/sys/unix"

const auditArch = unix.AUDIT_ARCH_X86_64

// archCalls and archFatal are system calls that other architectures do not have.
var (
	archCalls = []uintptr{unix.SYS_EPOLL_WAIT, unix.SYS_POLL}
	archFatal = []uintptr{unix.SYS_FORK, unix.SYS_VFORK, unix.SYS_IOPL, unix.SYS_IOPERM, unix.SYS_MODIFY_LDT}
)
