// SPDX-License-Identifier: Apache-2.0

// Package netns opens, makes and enters network namespaces.
//
// A thread, not a process, is in a network namespace. [Do] keeps the calling
// goroutine on one thread while that thread is in another namespace, and [Enter]
// moves a thread for good. [Thread] gives a goroutine a thread that ends with it.
//
// All errors but those of f wrap the errno: EPERM means that CAP_SYS_ADMIN is
// missing, over the namespace (Open needs none) or over the caller's user
// namespace.
package netns

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"sockeye/internal/fault"
	"sockeye/internal/rights"
	"sockeye/internal/sysctl"
)

// own names the network namespace of the calling thread. /proc/self/ns/net is that
// of the process's first thread.
const own = "/proc/thread-self/ns/net"

// ErrNotNamespace is the error of a file that is not a network namespace.
var ErrNotNamespace = errors.New("is not a network namespace")

// EnterError is the failure to enter a namespace. Errors of the function that runs in
// the namespace are returned as they are.
type EnterError struct {
	Name string // of the namespace's file
	Err  error  // an errno: EPERM without CAP_SYS_ADMIN
}

func (e *EnterError) Error() string {
	return fmt.Sprintf("enter network namespace %s: %v", e.Name, e.Err)
}

// Explain returns the hint and the exit code of the error.
func (e *EnterError) Explain() (hint string, code int) {
	if errors.Is(e.Err, unix.EPERM) {
		return rights.MissingHint(unix.CAP_SYS_ADMIN, "restart the agent; it keeps that right if a service names a netns then"), fault.CodeNotPermitted
	}
	return "", fault.CodeFailed
}

// Unwrap returns the errno.
func (e *EnterError) Unwrap() error { return e.Err }

// Open opens the network namespace that a path names, as in /run/netns/NAME or
// /proc/PID/ns/net. The namespace exists at least as long as the file is open. The
// error wraps [ErrNotNamespace] if the path names something else.
func Open(path string) (*os.File, error) {
	// A FIFO that is named by mistake must not be waited for.
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open network namespace: %w", err)
	}
	if !Is(file) {
		file.Close()
		return nil, fmt.Errorf("open network namespace: %s %w", path, ErrNotNamespace)
	}
	return file, nil
}

// Is reports whether a file is a network namespace (ioctl_nsfs(2)).
func Is(file *os.File) bool {
	kind, err := unix.IoctlRetInt(int(file.Fd()), unix.NS_GET_NSTYPE)
	return err == nil && kind == unix.CLONE_NEWNET
}

// Inode returns the inode of the network namespace of the calling thread, which identifies it as long as it exists.
func Inode() (uint64, error) {
	var stat unix.Stat_t
	if err := unix.Stat(own, &stat); err != nil {
		return 0, fmt.Errorf("find network namespace: %w", err)
	}
	return stat.Ino, nil
}

// New makes a network namespace with nothing but lo, which is down, and leaves the
// calling thread where it is. It needs CAP_SYS_ADMIN.
func New() (*os.File, error) {
	var file *os.File
	err := Thread(func() (err error) {
		file, err = enterNew()
		return err
	})
	return file, err
}

// NewSmall is [New] for the lab and the tests: the namespace has a small TCP connection table of its own (Linux 6.1;
// tcp_set_hashinfo). Otherwise, namespaces share a table, and each dump of connections by sock_diag reads all of it:
// 262,144 buckets on a host with 24 GiB.
func NewSmall() (*os.File, error) {
	var file *os.File
	err := Thread(func() (err error) {
		if err = EnterParent(); err == nil {
			file, err = enterNew()
		}
		return err
	})
	return file, err
}

// enterNew moves the calling thread to a new network namespace, and opens it.
func enterNew() (*os.File, error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, fmt.Errorf("make network namespace: %w", err)
	}
	return Current()
}

// ownConnections is the size of the TCP connection table in a namespace of [NewSmall].
const ownConnections = "4096"

// EnterParent moves the calling thread to a new network namespace. Those that the thread makes there are as with
// [NewSmall].
func EnterParent() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("make network namespace: %w", err)
	}
	err := sysctl.Write("net.ipv4.tcp_child_ehash_entries", ownConnections)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("limit the TCP connection tables: %w", err)
	}
	return nil
}

// Thread runs f on a thread that runs nothing else and ends with f, so that f may
// move the thread to other namespaces or drop its capabilities. The thread is never
// the process's first one: that one cannot end, and /proc/self shows its
// namespaces. A process that f starts with Pdeathsig dies when f returns.
func Thread(f func() error) error {
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done) // also when f ends its goroutine, as tests do
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// While this goroutine waits it holds the first thread, so the next
			// one is on another.
			defer runtime.UnlockOSThread()
			err = Thread(f)
			return
		}
		err = f()
	}()
	<-done
	return err
}

// Cookie is the number by which BPF programs and SO_NETNS_COOKIE know a network
// namespace; nil stands for the calling thread's. The error wraps ENOPROTOOPT before
// Linux 5.14. Another namespace than the thread's needs CAP_SYS_ADMIN.
func Cookie(namespace *os.File) (cookie uint64, err error) {
	if namespace != nil {
		here, err := IsCurrent(namespace)
		if err != nil {
			return 0, err
		}
		if here {
			namespace = nil
		}
	}
	err = Do(namespace, func() error {
		// Sockets of every family have a namespace; this one loads no module.
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("create socket: %w", err)
		}
		defer unix.Close(fd)
		if cookie, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); err != nil {
			return fmt.Errorf("read SO_NETNS_COOKIE: %w", err)
		}
		return nil
	})
	return cookie, err
}

// IsCurrent reports whether the calling thread is in a network namespace.
func IsCurrent(namespace *os.File) (bool, error) {
	theirs, err := namespace.Stat()
	if err != nil {
		return false, fmt.Errorf("compare network namespaces: %w", err)
	}
	ours, err := os.Stat(own)
	if err != nil {
		return false, fmt.Errorf("compare network namespaces: %w", err)
	}
	return os.SameFile(theirs, ours), nil
}

// Do runs f on the calling thread in a network namespace, and brings the thread back;
// nil stands for the namespace where the thread is, which needs no capability. What f
// opens stays in the namespace; goroutines that f starts are not in it. The error is
// that of f, or an [*EnterError] if f did not run.
//
// If the thread cannot come back, it stays locked to the calling goroutine and ends
// with it, so that no other goroutine runs in the wrong namespace.
func Do(namespace *os.File, f func() error) error {
	if namespace == nil {
		return f()
	}
	runtime.LockOSThread()
	home, err := Current()
	if err != nil {
		runtime.UnlockOSThread()
		return err
	}
	defer home.Close()
	if err := Enter(namespace); err != nil {
		runtime.UnlockOSThread()
		return err
	}
	err = f()
	if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
		back = fmt.Errorf("leave network namespace %s: %w", namespace.Name(), back)
		if err != nil {
			return fmt.Errorf("%w; %w", err, back)
		}
		return back
	}
	runtime.UnlockOSThread()
	return err
}

// Current opens the network namespace of the calling thread.
func Current() (*os.File, error) {
	file, err := os.Open(own)
	if err != nil {
		return nil, fmt.Errorf("open own network namespace: %w", err)
	}
	return file, nil
}

// Enter moves the calling thread, to which the caller has locked its goroutine, to a
// network namespace. The failure is an [*EnterError].
func Enter(namespace *os.File) error {
	if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
		return &EnterError{namespace.Name(), err}
	}
	return nil
}
