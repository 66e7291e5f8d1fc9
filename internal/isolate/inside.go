// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"sockeye/internal/sandbox"
	"sockeye/internal/sockdiag"
	"sockeye/internal/sysctl"
	"sockeye/internal/tun"
	"sockeye/room"
)

// Setup configures the process inside.
type Setup struct {
	Interface tun.Interface
	// ResolvConf is the content of /etc/resolv.conf inside; "": the host's file.
	ResolvConf string
	// Program is the path of the program; "": the process inside exits after the preparation.
	Program   string
	Args, Env []string // arbitrary bytes
	// Watched makes the gateway monitor the ports on which the guest listens.
	Watched bool
	// AllowUserns allows the program to create user namespaces.
	AllowUserns bool
	// Expose are sockets of the host, or directories of sockets, that the program may reach.
	Expose []string
	// Read and Write are files and directories that the program may read, and read and write. If either is not empty, the program
	// can open only these and the files that every program needs.
	Read, Write []string
}

// setupReply is the reply of the process inside, sent with the descriptors.
type setupReply struct {
	Error    string        `json:"error,omitempty"`
	Errno    syscall.Errno `json:"errno,omitempty"`
	Step     Step          `json:"step,omitempty"`
	Warnings []string      `json:"warnings,omitempty"`
	Missing  []string      `json:"missing,omitempty"`
	Kernel   room.Kernel   `json:"kernel"`
}

// InsideFD is the descriptor of the socket to the gateway in the process inside.
const InsideFD = 3

// maxSetup is the maximum size of an encoded Setup in bytes. Environments may be large.
const maxSetup = 8 << 20

// InsideCommand is the hidden command of sockeye that calls Inside.
const InsideCommand = "isolate-inside"

// limited reads at most left bytes.
type limited struct {
	f    *os.File
	left int
}

// Inside prepares the guest from within its namespaces, starts the program, and exits with the program. It is the first process of the
// PID namespace. Inside returns if there is no program, or if the program cannot be started. Errors of the preparation are sent to the
// gateway.
func Inside() error {
	runtime.LockOSThread()
	discardSignals()
	socket := os.NewFile(InsideFD, "gateway")
	unix.CloseOnExec(InsideFD)
	var s Setup
	if err := gob.NewDecoder(&limited{socket, maxSetup}).Decode(&s); err != nil {
		return fmt.Errorf("read the setup: %w", err)
	}
	reply, fds := s.reply()
	text, err := json.Marshal(reply)
	if err != nil {
		return err
	}
	if err := unix.Sendmsg(InsideFD, text, unix.UnixRights(fds...), nil, 0); err != nil {
		return fmt.Errorf("reply to the gateway: %w", err)
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	if reply.Error != "" || s.Program == "" {
		return nil
	}
	// The gateway sends a byte when it is running. If it has exited instead, the program does not start.
	var ready [1]byte
	if n, _ := socket.Read(ready[:]); n != 1 {
		return errors.New("the gateway has exited")
	}
	return s.runInit(socket)
}

// reply prepares the guest and confines this process, and returns the reply to the gateway.
func (s *Setup) reply() (reply setupReply, fds []int) {
	err := s.prepareAll(&reply, &fds)
	if err == nil {
		return reply, fds
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	reply.Error = err.Error()
	_ = errors.As(err, &reply.Errno)
	if step := new(StepError); errors.As(err, &step) {
		reply.Step = step.Step
	}
	return reply, nil
}

func (s *Setup) prepareAll(reply *setupReply, fds *[]int) error {
	tunnel, err := s.prepare(reply)
	if err != nil {
		return err
	}
	*fds = []int{tunnel}
	if diag, err := sockdiag.OpenSocket(s.Watched); err == nil {
		*fds = append(*fds, diag)
	} else if s.Watched {
		return err
	}
	// lo of the namespace is up, which Calibrate needs.
	if reply.Kernel, err = room.Calibrate(); err != nil || s.Program == "" {
		return err
	}
	if err := closeOthers(); err != nil {
		return err
	}
	// Changes of credentials clear this setting. Therefore, it is set after them.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("set the parent-death signal: %w", err)
	}
	missing, err := sandbox.Program{Path: s.Program, Read: s.Read, Write: s.Write, AllowUserns: s.AllowUserns}.Enter()
	reply.Missing = append(reply.Missing, missing...)
	switch {
	case errors.As(err, new(*sandbox.LandlockError)):
		return &StepError{StepLandlock, err}
	case errors.As(err, new(*sandbox.FileError)):
		return &StepError{StepFiles, err}
	}
	return err
}

// PassedSignals are the signals that the gateway forwards to the program.
var PassedSignals = []os.Signal{unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGHUP, unix.SIGUSR1, unix.SIGUSR2}

// closeOthers sets close-on-exec on all descriptors except the standard streams, because they may be sockets of the host's network.
func closeOthers() error {
	const first = 3
	err := unix.CloseRange(first, ^uint(0)>>1, unix.CLOSE_RANGE_CLOEXEC)
	if err == nil {
		return nil
	}
	// Linux before 5.11 has no CLOSE_RANGE_CLOEXEC.
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

// Read reads from the file.
func (l *limited) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, errors.New("too long")
	}
	n, err := l.f.Read(p[:min(len(p), l.left)])
	l.left -= n
	return n, err
}

// lacksSysctl returns whether the error is of a kernel without the sysctl, or of a container that makes it read-only.
func lacksSysctl(err error) bool {
	return errors.Is(err, unix.EROFS) || errors.Is(err, unix.ENOENT)
}

func (s *Setup) prepare(reply *setupReply) (fd int, err error) {
	if s.Program != "" {
		if err := s.setSysctls(reply); err != nil {
			return -1, &StepError{StepRights, err}
		}
		if err := s.mounts(reply); err != nil {
			return -1, err
		}
	}
	fd, err = tun.Open(s.Interface)
	switch {
	case errors.As(err, new(*tun.DeviceError)):
		return -1, &StepError{StepDevice, err}
	case err != nil:
		return -1, &StepError{StepInterface, err}
	}
	return fd, nil
}

func (s *Setup) setSysctls(reply *setupReply) error {
	for setting, without := range map[struct{ name, value string }]string{
		{"net.ipv4.ip_unprivileged_port_start", "0"}:                                    "ports below 1024 stay closed to the program",
		{"net.ipv4.ping_group_range", fmt.Sprintf("%d %d", os.Getegid(), os.Getegid())}: "ping does not work inside",
		// A connection inside has the round-trip time to the gateway.
		{"net.ipv4.tcp_wmem", guestWmem()}: "its connections may occupy much of the host's TCP memory",
		// With SYN cookies, the kernel drops a connection if the program's accept queue is full.
		{"net.ipv4.tcp_syncookies", "0"}: "some of many simultaneous connections may fail",
	} {
		if err := sysctl.Write(setting.name, setting.value); lacksSysctl(err) {
			reply.Warnings = append(reply.Warnings, fmt.Sprintf("%s: %v", without, err))
		} else if err != nil {
			return err
		}
	}
	if s.AllowUserns {
		return nil
	}
	// A second restriction in addition to the filter of system calls. The sysctl applies to the guest's user namespace.
	if err := sysctl.Write("user.max_user_namespaces", "0"); lacksSysctl(err) {
		reply.Missing = append(reply.Missing, fmt.Sprintf("only the filter of system calls denies user namespaces: %v", err))
	} else if err != nil {
		return err
	}
	return nil
}

// maxGuestBuffer is the maximum send buffer of a connection inside, in bytes. It can be small, because the gateway acknowledges
// within a millisecond; data in flight to the peer are in the host's socket.
const maxGuestBuffer = 512 << 10

// guestWmem returns net.ipv4.tcp_wmem, limited to maxGuestBuffer.
func guestWmem() string {
	values := sysctl.Numbers("net.ipv4.tcp_wmem")
	if len(values) != 3 {
		values = []int64{4096, 16384, maxGuestBuffer}
	}
	return fmt.Sprintf("%d %d %d", values[0], min(values[1], maxGuestBuffer), min(values[2], maxGuestBuffer))
}
