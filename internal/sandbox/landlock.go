// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"encoding/binary"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The package calls landlock(7) directly, because github.com/landlock-lsm/go-landlock has three limits: BestEffort does not report
// the rights that an older kernel lacks, which --require-sandbox needs; optional paths are skipped if they do not exist, but not if
// the user may not open them; and it rejects rights of directories for files, so that callers have to open each path themselves.

// ruleset is struct landlock_ruleset_attr: the rights that are denied unless a rule allows them.
type ruleset struct{ files, net, scoped uint64 }

// landlockABI returns the version of the kernel's landlock (linux/landlock.h), or the errno of a kernel without it.
func landlockABI() (int, error) {
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 {
		return 0, errno
	}
	return int(abi), nil
}

// fileRights returns all file system rights that a version of landlock handles.
func fileRights(abi int) uint64 {
	rights := uint64(1<<13 - 1)
	for version, more := range map[int]uint64{
		2: unix.LANDLOCK_ACCESS_FS_REFER, 3: unix.LANDLOCK_ACCESS_FS_TRUNCATE, 5: unix.LANDLOCK_ACCESS_FS_IOCTL_DEV,
	} {
		if abi >= version {
			rights |= more
		}
	}
	return rights
}

// create returns a descriptor of the ruleset. The rights must be among those of the kernel's version.
func (r *ruleset) create() (fd int, err error) {
	// Older kernels accept a larger structure if the unknown rest is zero.
	n, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(r)), unsafe.Sizeof(*r), 0)
	if errno != 0 {
		return -1, errno
	}
	return int(n), nil
}

// notDirectoryRights are the rights allowed in a rule for a file that is not a directory.
const notDirectoryRights = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE |
	unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV

// allowFile adds a rule for a file, or for a directory and everything below it.
func allowFile(rules int, path string, rights uint64) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		rights &= notDirectoryRights
	}
	var rule struct { // struct landlock_path_beneath_attr, which is packed
		access [8]byte
		parent [4]byte
	}
	binary.NativeEndian.PutUint64(rule.access[:], rights)
	binary.NativeEndian.PutUint32(rule.parent[:], uint32(fd))
	const pathBeneath = 1 // LANDLOCK_RULE_PATH_BENEATH
	return addRule(rules, pathBeneath, unsafe.Pointer(&rule))
}

// allowConnect allows connections to a TCP port.
func allowConnect(rules int, port uint16) error {
	// struct landlock_net_port_attr
	rule := struct{ access, port uint64 }{unix.LANDLOCK_ACCESS_NET_CONNECT_TCP, uint64(port)}
	const netPort = 2 // LANDLOCK_RULE_NET_PORT
	return addRule(rules, netPort, unsafe.Pointer(&rule))
}

func addRule(rules, kind int, rule unsafe.Pointer) error {
	if _, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(rules), uintptr(kind), uintptr(rule), 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}
