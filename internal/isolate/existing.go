// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/cap"
)

// Errors of OpenPID and OpenNetns.
var (
	ErrNoNamespace  = errors.New("is not a network namespace")
	ErrOwnNamespace = errors.New("is the network namespace of this process")
)

// Namespace is an existing network namespace.
type Namespace struct {
	net   *os.File
	watch *os.File // readable when the process has exited, or the directory has changed
	// name is the namespace's file in the watched directory; "": a process is watched.
	name string
}

// OpenNetns opens the network namespace at a path, as /run/netns/NAME. Ended returns when the path is removed. Returns ErrNoNamespace
// for another kind of file, and ErrOwnNamespace for the namespace of this process.
func OpenNetns(path string) (_ *Namespace, err error) {
	if pid, ok := strings.CutPrefix(filepath.Clean(path), "/proc/"); ok {
		if pid, ok = strings.CutSuffix(pid, "/ns/net"); ok {
			if number, err := strconv.Atoi(pid); err == nil {
				return OpenPID(number)
			}
		}
	}
	n := &Namespace{name: filepath.Base(path)}
	defer func() {
		if err != nil {
			n.Close()
		}
	}()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch namespace: %w", err)
	}
	n.watch = os.NewFile(uintptr(fd), "folder")
	// Before path is opened: a removal in between is then reported.
	_, unwatched := unix.InotifyAddWatch(int(n.watch.Fd()), filepath.Dir(path), unix.IN_DELETE|unix.IN_MOVED_FROM|unix.IN_DELETE_SELF)
	if fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0); err != nil {
		return nil, err
	}
	n.net = os.NewFile(uintptr(fd), path)
	if kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE); err != nil || kind != unix.CLONE_NEWNET {
		return nil, ErrNoNamespace
	}
	if unwatched != nil {
		return nil, fmt.Errorf("watch namespace: %w", unwatched)
	}
	return n, n.notOwn()
}

// OpenPID opens the network namespace of a process. Ended returns when the process exits. Returns ESRCH if there is no such process,
// and ErrOwnNamespace for the namespace of this process.
func OpenPID(pid int) (_ *Namespace, err error) {
	if pid <= 0 {
		return nil, unix.ESRCH
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.EINVAL) { // the ID of a thread
		err = unix.ESRCH
	}
	if err != nil {
		return nil, err
	}
	n := &Namespace{watch: os.NewFile(uintptr(fd), "process")}
	defer func() {
		if err != nil {
			n.Close()
		}
	}()
	n.net, err = os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if errors.Is(err, fs.ErrNotExist) {
		err = unix.ESRCH
	}
	if err != nil {
		return nil, err
	}
	// The process may have exited, and its PID may have been reused.
	if err := unix.PidfdSendSignal(fd, 0, nil, 0); err != nil && !errors.Is(err, unix.EPERM) {
		return nil, err
	}
	return n, n.notOwn()
}

// notOwn returns ErrOwnNamespace for the network namespace of this process, whose routes the gateway would replace.
func (n *Namespace) notOwn() error {
	if same, err := sameFile(n.net, "/proc/self/ns/net"); err != nil {
		return err
	} else if same {
		return ErrOwnNamespace
	}
	return nil
}

// Close closes the descriptors.
func (n *Namespace) Close() {
	for _, f := range []*os.File{n.net, n.watch} {
		if f != nil {
			f.Close()
		}
	}
}

// enter changes a command to run in the namespace with nsenter(1), because only a single-threaded process may enter a user namespace.
// The descriptors from 4 on are the namespaces and the command.
func (n *Namespace) enter(cmd *exec.Cmd) error {
	nsenter, err := exec.LookPath("nsenter")
	if err != nil {
		return &StepError{StepJoin, fmt.Errorf("find nsenter: %w", errors.Unwrap(err))}
	}
	// For nsenter, the path may be another file, for example /proc/self/exe.
	itself, err := unix.Open(cmd.Path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", cmd.Path, err)
	}
	args := []string{nsenter, "--preserve-credentials", "--net=/proc/self/fd/4"}
	cmd.ExtraFiles = append(cmd.ExtraFiles, n.net, os.NewFile(uintptr(itself), cmd.Path))
	user, err := n.owner()
	if err != nil {
		return &StepError{StepJoin, err}
	}
	if user != nil {
		cmd.ExtraFiles = append(cmd.ExtraFiles, user)
		args = append(args, "--user=/proc/self/fd/6")
	}
	cmd.Args = append(append(args, "--", "/proc/self/fd/5"), cmd.Args[1:]...)
	cmd.Path = nsenter
	return nil
}

// owner returns the user namespace to enter first; nil if this process has CAP_SYS_ADMIN already.
func (n *Namespace) owner() (*os.File, error) {
	admin, err := cap.GetProc().GetFlag(cap.Effective, cap.SYS_ADMIN)
	if err != nil {
		return nil, fmt.Errorf("read capabilities: %w", err)
	}
	if admin {
		return nil, nil
	}
	fd, err := unix.IoctlRetInt(int(n.net.Fd()), unix.NS_GET_USERNS)
	if err != nil {
		return nil, fmt.Errorf("join the namespace: %w", err)
	}
	user := os.NewFile(uintptr(fd), "user")
	same, err := sameFile(user, "/proc/self/ns/user")
	if err == nil && same {
		err = fmt.Errorf("join the namespace: %w", unix.EPERM)
	}
	if err != nil {
		user.Close()
		return nil, err
	}
	return user, nil
}

func sameFile(f *os.File, path string) (bool, error) {
	a, err := f.Stat()
	if err != nil {
		return false, fmt.Errorf("compare namespaces: %w", err)
	}
	b, err := os.Stat(path)
	if err != nil {
		return false, fmt.Errorf("compare namespaces: %w", err)
	}
	return os.SameFile(a, b), nil
}

// Ended returns when the process of the namespace has exited, the path is removed, or ctx is done.
func (n *Namespace) Ended(ctx context.Context) error {
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("make eventfd: %w", err)
	}
	defer unix.Close(wake)
	stop := context.AfterFunc(ctx, func() {
		_, _ = unix.Write(wake, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // the counter cannot overflow
	})
	defer stop()
	watched := int(n.watch.Fd())
	events := make([]byte, 1<<16)
	for {
		fds := []unix.PollFd{{Fd: int32(watched), Events: unix.POLLIN}, {Fd: int32(wake), Events: unix.POLLIN}}
		if _, err := unix.Poll(fds, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("watch the namespace: %w", err)
		}
		switch {
		case fds[1].Revents != 0:
			return nil
		case fds[0].Revents == 0:
		case n.name == "":
			return nil
		default:
			size, err := unix.Read(watched, events)
			if err == nil && removed(events[:size], n.name) {
				return nil
			}
		}
	}
}

// removed returns whether events of inotify(7) report the removal of a name, or of its directory.
func removed(events []byte, name string) bool {
	for len(events) >= unix.SizeofInotifyEvent {
		mask := binary.NativeEndian.Uint32(events[4:])
		length := int(binary.NativeEndian.Uint32(events[12:]))
		events = events[unix.SizeofInotifyEvent:]
		if length > len(events) {
			return true
		}
		if mask&(unix.IN_DELETE_SELF|unix.IN_IGNORED) != 0 || strings.TrimRight(string(events[:length]), "\x00") == name {
			return true
		}
		events = events[length:]
	}
	return false
}
