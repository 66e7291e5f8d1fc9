// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"sockeye/room"
)

// Setup is what the process that prepares the guest is told.
type Setup struct {
	Interface Interface
	// ResolvConf is what the guest finds in /etc/resolv.conf; "" leaves it.
	ResolvConf string
	// Program is what the process becomes, "" for nothing: then it ends.
	Program   string
	Args, Env []string // of any bytes
	// Watched: the gateway is to know on which ports the guest listens.
	Watched bool
}

// setupReply comes from inside, with the TUN's descriptor, or tells what went wrong.
type setupReply struct {
	Error    string        `json:"error,omitempty"`
	Errno    syscall.Errno `json:"errno,omitempty"`
	Step     Step          `json:"step,omitempty"`
	Warnings []string      `json:"warnings,omitempty"`
	Kernel   room.Kernel   `json:"kernel"`
}

// InsideFD is the socket to the gateway, in the process that prepares the guest.
const InsideFD = 3

// maxSetup bounds what is told, in bytes: an environment may be large.
const maxSetup = 8 << 20

// InsideCommand is the word by which sockeye runs Inside.
const InsideCommand = "isolate-inside"

// Inside prepares the guest, from within its namespaces, and becomes the program. It
// returns only if that fails, or if there is none. What went wrong before the program was to
// start is told to the gateway, not returned.
func Inside() error {
	runtime.LockOSThread()
	holdSignals()
	socket := os.NewFile(InsideFD, "gateway")
	unix.CloseOnExec(InsideFD)
	var s Setup
	if err := gob.NewDecoder(&limited{socket, maxSetup}).Decode(&s); err != nil {
		return fmt.Errorf("read what to prepare: %w", err)
	}
	var reply setupReply
	tun, err := s.prepare(&reply.Warnings)
	var rights []byte
	if err != nil {
		reply.Error = err.Error()
		_ = errors.As(err, &reply.Errno)
		if step := new(StepError); errors.As(err, &step) {
			reply.Step = step.Step
		}
	} else {
		fds := []int{tun}
		if diag, err := openDiag(s.Watched); err == nil {
			fds = append(fds, diag)
		} else if s.Watched {
			reply.Error = err.Error()
		}
		rights = unix.UnixRights(fds...)
		// Here, as lo is up here for certain.
		if reply.Kernel, err = room.Calibrate(); err != nil {
			reply.Error = err.Error()
		}
	}
	text, encodeErr := json.Marshal(reply)
	if encodeErr != nil {
		return encodeErr
	}
	if err := unix.Sendmsg(InsideFD, text, rights, nil, 0); err != nil {
		return fmt.Errorf("answer the gateway: %w", err)
	}
	if reply.Error != "" || s.Program == "" {
		return nil
	}
	// Of this thread, which becomes the program.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("tie the program to the gateway: %w", err)
	}
	// The gateway says when it is at work; if it has died instead, the program does not
	// start.
	var ready [1]byte
	if n, _ := socket.Read(ready[:]); n != 1 {
		return errors.New("the gateway has ended")
	}
	if err := dropAll(); err != nil {
		return err
	}
	if err := keepSignals(); err != nil {
		return err
	}
	if err := closeOthers(); err != nil {
		return err
	}
	err = unix.Exec(s.Program, s.Args, s.Env)
	return fmt.Errorf("start %s: %w", s.Program, err)
}

// holdSignals has signals do nothing to this process: the gateway sends them to the program
// when that has started. Those that are ignored from the start, as by nohup(1), stay so.
func holdSignals() {
	for _, s := range PassedSignals {
		if !signal.Ignored(s) {
			signal.Notify(make(chan os.Signal, 1), s)
		}
	}
}

// PassedSignals are those that the gateway passes on to the program.
var PassedSignals = []os.Signal{unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2}

// closeOthers has the program inherit no descriptor but the standard ones: one may be a
// socket of the host's network.
func closeOthers() error {
	const first = 3
	err := unix.CloseRange(first, ^uint(0)>>1, unix.CLOSE_RANGE_CLOEXEC)
	if err == nil {
		return nil
	}
	// Linux before 5.11.
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("list descriptors: %w", err)
	}
	for _, entry := range list {
		if fd, err := strconv.Atoi(entry.Name()); err == nil && fd >= first {
			unix.CloseOnExec(fd)
		}
	}
	return nil
}

// keepSignals has this thread, and the program that it becomes, send signals to what the
// program starts only: the user's other processes are out of reach, by ptrace(2) too. From Linux
// 6.12.
func keepSignals() error {
	abi, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 || abi < 6 {
		return nil
	}
	r := ruleset{scoped: unix.LANDLOCK_SCOPE_SIGNAL | unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET}
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&r)), unsafe.Sizeof(r), 0)
	if errno == 0 {
		defer unix.Close(int(fd))
		_, _, errno = unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, fd, 0, 0)
	}
	if errno != 0 {
		return fmt.Errorf("keep signals inside: %w", errno)
	}
	return nil
}

// limited reads so many bytes at most.
type limited struct {
	f    *os.File
	left int
}

// Read reads from the file.
func (l *limited) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, errors.New("too long")
	}
	n, err := l.f.Read(p[:min(len(p), l.left)])
	l.left -= n
	return n, err
}

func (s *Setup) prepare(warnings *[]string) (tun int, err error) {
	if s.Program != "" {
		for _, c := range []struct{ name, value, without string }{
			{"net/ipv4/ip_unprivileged_port_start", "0", "ports below 1024 stay closed to the program"},
			{"net/ipv4/ping_group_range", fmt.Sprintf("%d %d", os.Getegid(), os.Getegid()), "ping does not work inside"},
			// A kernel that sends cookies forgets the connection when the program's queue is full.
			{"net/ipv4/tcp_syncookies", "0", "of many connections at once some may not get through"},
		} {
			err := os.WriteFile("/proc/sys/"+c.name, []byte(c.value), 0)
			switch {
			case errors.Is(err, unix.EROFS), errors.Is(err, unix.ENOENT):
				*warnings = append(*warnings, fmt.Sprintf("%s: set sysctl %s: %v", c.without, c.name, errors.Unwrap(err)))
			case err != nil:
				return -1, &StepError{StepRights, fmt.Errorf("set sysctl %s: %w", strings.ReplaceAll(c.name, "/", "."), errors.Unwrap(err))}
			}
		}
	}
	if s.ResolvConf != "" {
		if err := replaceFile("/etc/resolv.conf", s.ResolvConf); err != nil {
			return -1, &StepError{StepResolver, err}
		}
	}
	return OpenTUN(s.Interface)
}

// scratch is a folder that every host has, and that is covered for a moment in the mount
// namespace of the guest, which nobody else sees.
const scratch = "/tmp"

// replaceFile has a file be another one in this mount namespace. A file that is not there
// is left alone. Nothing is written to any file system of the host.
func replaceFile(path, text string) error {
	target, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(target)
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("tmpfs", scratch, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "size=1m,mode=755"); err != nil {
		return fmt.Errorf("mount over %s: %w", scratch, err)
	}
	file := scratch + "/resolv.conf"
	err = os.WriteFile(file, []byte(text), 0o644)
	if err == nil {
		err = os.Chmod(file, 0o644) // whatever the umask
	}
	if err == nil {
		err = unix.Mount(file, fmt.Sprintf("/proc/self/fd/%d", target), "", unix.MS_BIND, "")
	}
	if err != nil {
		err = fmt.Errorf("mount over %s: %w", path, err)
	}
	return errors.Join(err, unix.Unmount(scratch, unix.MNT_DETACH))
}

// dropAll gives up all capabilities, for good, in this thread, which becomes the program. The
// bounding set stays: with no_new_privs nothing in it can be had, and without it the kernel
// refuses to execute files that ask for it, as ping does.
func dropAll() error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return fmt.Errorf("clear ambient capabilities: %w", err)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&header, &none[0]); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	return nil
}

// HostAddresses are the addresses that the host sends from by default, which the
// guest has too; the zero value where it has none.
func HostAddresses() (v4, v6 netip.Addr) {
	return sourceTo(netip.MustParseAddr("192.0.2.1")), sourceTo(netip.MustParseAddr("2001:db8::1"))
}

// sourceTo is the address that the host would send from. Nothing is sent.
func sourceTo(to netip.Addr) netip.Addr {
	fd, err := unix.Socket(domain(to), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return netip.Addr{}
	}
	defer unix.Close(fd)
	if unix.Connect(fd, sockaddr(netip.AddrPortFrom(to, 9))) != nil {
		return netip.Addr{}
	}
	own, err := unix.Getsockname(fd)
	if err != nil {
		return netip.Addr{}
	}
	a, ok := addrPort(own)
	if !ok || a.Addr().IsLoopback() || a.Addr().IsUnspecified() || a.Addr().IsLinkLocalUnicast() {
		return netip.Addr{}
	}
	return a.Addr()
}
