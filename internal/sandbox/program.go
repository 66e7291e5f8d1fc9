// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/internal/gateway"
)

// Program is what a program may do that is started by this process.
type Program struct {
	// Path is of the program's file.
	Path string
	// Read and Write are files and folders that the program may read, and also write. If there are any, it may reach no
	// others but those that every program needs.
	Read, Write []string
	// AllowUserns: the program may make user namespaces.
	AllowUserns bool
}

// LandlockError is of a kernel without landlock, where files are to be restricted.
type LandlockError struct{ Err error }

func (e *LandlockError) Error() string { return fmt.Sprintf("restrict files (landlock): %v", e.Err) }

// Unwrap is the kernel's reason.
func (e *LandlockError) Unwrap() error { return e.Err }

// FileError is of a path in Read or Write that cannot be allowed.
type FileError struct {
	Option, Path string
	Err          error
}

func (e *FileError) Error() string { return fmt.Sprintf("%s %s: %v", e.Option, e.Path, e.Err) }

// Unwrap is the kernel's reason.
func (e *FileError) Unwrap() error { return e.Err }

// Enter takes away, for good, what the program is not to have: from all threads the capabilities, from the calling one,
// which forks the program, the rest. What the kernel cannot take away is in missing, one line each.
func (p Program) Enter() (missing []string, err error) {
	if err := dropCapabilities(); err != nil {
		return nil, err
	}
	lacking, err := p.landlock()
	if err != nil {
		return nil, err
	}
	missing = append(missing, lacking...)
	if err := filterProgram(p.AllowUserns); noSuchSandbox(err) {
		missing = append(missing, fmt.Sprintf("system calls are not filtered: %v", err))
	} else if err != nil {
		return nil, fmt.Errorf("filter system calls: %w", err)
	}
	// This process stays as the first one inside: the program may not look into it.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("forbid dumps of memory: %w", err)
	}
	return missing, nil
}

// baseReadable are files that a program needs to start and to find names, whatever it does. Those that are not there are
// passed over.
var baseReadable = []string{
	"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store",
	"/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload", "/etc/alternatives",
	"/etc/resolv.conf", "/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/hostname",
	"/etc/protocols", "/etc/services", "/etc/passwd", "/etc/group", "/etc/localtime", "/etc/timezone",
	"/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/pki/tls/certs", "/etc/pki/ca-trust", "/etc/ca-certificates",
	"/sys/devices/system/cpu", "/sys/kernel/mm/transparent_hugepage",
}

// baseWritable are the program's own processes, and devices that keep nothing.
var baseWritable = []string{
	"/proc", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts", "/dev/ptmx",
}

const (
	readRights  = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	deviceWrite = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR | unix.LANDLOCK_ACCESS_FS_WRITE_FILE |
		unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	// fileRights are those that a rule for what is no folder may have.
	fileRights = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE |
		unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
)

// landlock keeps, from Linux 6.12, signals and abstract sockets inside, and lets the program reach only files that were
// named, if any were: without them nothing is denied.
func (p Program) landlock() (missing []string, err error) {
	named := len(p.Read)+len(p.Write) > 0
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 && named {
		return nil, &LandlockError{errno}
	}
	if errno != 0 {
		abi = 0
	}
	if abi < 6 {
		missing = append(missing, "the program may send signals to its process group outside: landlock of Linux 6.12 is needed")
	}
	all, _ := Gateway{Outbound: gateway.Outbound{All: true}}.handled(int(abi))
	var r ruleset
	if named {
		r.files = all.files
	}
	if abi >= 6 {
		r.scoped = unix.LANDLOCK_SCOPE_SIGNAL | unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET
	}
	if r == (ruleset{}) {
		return missing, nil
	}
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&r)), unsafe.Sizeof(r), 0)
	if errno != 0 {
		return nil, fmt.Errorf("make landlock rules: %w", errno)
	}
	defer unix.Close(int(fd))
	if named {
		if err := p.allowFiles(int(fd), r.files); err != nil {
			return nil, err
		}
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0); errno != 0 {
		return nil, fmt.Errorf("enter landlock: %w", errno)
	}
	return missing, nil
}

// allowFiles adds what the program may read and write. A path that was named must be there.
func (p Program) allowFiles(rules int, handled uint64) error {
	for _, list := range []struct {
		paths  []string
		rights uint64
		option string // of paths that were named
	}{
		{baseReadable, readRights, ""},
		{baseWritable, deviceWrite, ""},
		{[]string{p.Path}, readRights, ""},
		{p.Read, readRights, "--read"},
		{p.Write, handled, "--write"},
	} {
		for _, path := range list.paths {
			err := allowFile(rules, path, list.rights&handled)
			if list.option == "" && (errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission)) {
				continue
			}
			if err != nil {
				return &FileError{list.option, path, err}
			}
		}
	}
	return nil
}

// pathRule is struct landlock_path_beneath_attr, which is packed.
type pathRule struct {
	access [8]byte
	parent [4]byte
}

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
		rights &= fileRights
	}
	var rule pathRule
	binary.NativeEndian.PutUint64(rule.access[:], rights)
	binary.NativeEndian.PutUint32(rule.parent[:], uint32(fd))
	const pathBeneath = 1 // LANDLOCK_RULE_PATH_BENEATH
	if _, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(rules), pathBeneath, uintptr(unsafe.Pointer(&rule)), 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}
