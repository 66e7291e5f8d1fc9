// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Program configures the confinement of a program that this process starts.
type Program struct {
	// Path is the program's file.
	Path string
	// Read and Write are files and directories that the program may read, and read and write. If either is not empty, the program
	// can open only these and the files that every program needs.
	Read, Write []string
	// AllowUserns allows the program to create user namespaces.
	AllowUserns bool
}

// LandlockError is returned if files are to be restricted and the kernel does not support landlock.
type LandlockError struct{ Err error }

func (e *LandlockError) Error() string { return fmt.Sprintf("restrict files (landlock): %v", e.Err) }

// Unwrap returns the kernel's error.
func (e *LandlockError) Unwrap() error { return e.Err }

// FileError is returned for a path in Read or Write that cannot be opened.
type FileError struct {
	Option, Path string
	Err          error
}

func (e *FileError) Error() string { return fmt.Sprintf("%s %s: %v", e.Option, e.Path, e.Err) }

// Unwrap returns the kernel's error.
func (e *FileError) Unwrap() error { return e.Err }

// Enter irrevocably confines this process, before the program is started: capabilities and the filter of system calls apply to all
// threads, landlock to the calling thread, which must fork the program. Enter returns the restrictions that the kernel does not
// support in missing, one line each.
func (p Program) Enter() (missing []string, err error) {
	if err := dropCapabilities(); err != nil {
		return nil, err
	}
	lacking, err := p.landlock()
	if err != nil {
		return nil, err
	}
	missing = append(missing, lacking...)
	if err := filterProgram(p.AllowUserns); isUnsupported(err) {
		missing = append(missing, fmt.Sprintf("system calls are not filtered: %v", err))
	} else if err != nil {
		return nil, fmt.Errorf("filter system calls: %w", err)
	}
	// This process remains the program's parent; the program must not ptrace it.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("forbid dumps of memory: %w", err)
	}
	return missing, nil
}

// baseReadable are the files that programs need to start and to resolve names. Files that do not exist are skipped.
var baseReadable = []string{
	"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store",
	"/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload", "/etc/alternatives",
	"/etc/resolv.conf", "/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/hostname",
	"/etc/protocols", "/etc/services", "/etc/passwd", "/etc/group", "/etc/localtime", "/etc/timezone",
	"/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/pki/tls/certs", "/etc/pki/ca-trust", "/etc/ca-certificates",
	"/sys/devices/system/cpu", "/sys/kernel/mm/transparent_hugepage",
}

// baseWritable are /proc, which shows the program's own processes, and devices without storage.
var baseWritable = []string{
	"/proc", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts", "/dev/ptmx",
}

const (
	readRights  = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	deviceWrite = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR | unix.LANDLOCK_ACCESS_FS_WRITE_FILE |
		unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
)

// landlock restricts the calling thread: signals and abstract Unix sockets to processes of the domain (since Linux 6.12), and files to
// Read, Write and the base files, if Read or Write is not empty.
func (p Program) landlock() (missing []string, err error) {
	named := len(p.Read)+len(p.Write) > 0
	abi, err := landlockABI()
	if err != nil && named {
		return nil, &LandlockError{err}
	}
	if abi < 6 {
		missing = append(missing, "the program can send signals to its process group outside: this needs landlock of Linux 6.12")
	}
	var r ruleset
	if named {
		r.files = fileRights(abi)
	}
	if abi >= 6 {
		r.scoped = unix.LANDLOCK_SCOPE_SIGNAL | unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET
	}
	if r == (ruleset{}) {
		return missing, nil
	}
	rules, err := r.create()
	if err != nil {
		return nil, fmt.Errorf("make landlock rules: %w", err)
	}
	defer unix.Close(rules)
	if named {
		if err := p.allowFiles(rules, r.files); err != nil {
			return nil, err
		}
	}
	if _, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(rules), 0, 0); errno != 0 {
		return nil, fmt.Errorf("enter landlock: %w", errno)
	}
	return missing, nil
}

// allowFiles adds a rule for each path. A path of Read or Write must exist.
func (p Program) allowFiles(rules int, handled uint64) error {
	for _, list := range []struct {
		paths  []string
		rights uint64
		option string // option with the paths; "": the paths are optional
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
