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
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"sockeye/internal/sandbox"
	"sockeye/internal/sockdiag"
	"sockeye/internal/tun"
	"sockeye/room"
)

// Setup is what the process that prepares the guest is told.
type Setup struct {
	Interface tun.Interface
	// ResolvConf is what the guest finds in /etc/resolv.conf; "" leaves it.
	ResolvConf string
	// Program is what the process becomes, "" for nothing: then it ends.
	Program   string
	Args, Env []string // of any bytes
	// Watched: the gateway is to know on which ports the guest listens.
	Watched bool
	// AllowUserns: the program may make user namespaces.
	AllowUserns bool
	// Expose are sockets, or folders of sockets, of the host that the program may reach.
	Expose []string
	// Read and Write are files and folders that the program may read, and also write. If there are any, it may reach no
	// others but those that every program needs.
	Read, Write []string
}

// setupReply comes from inside, with the TUN's descriptor, or tells what went wrong.
type setupReply struct {
	Error    string        `json:"error,omitempty"`
	Errno    syscall.Errno `json:"errno,omitempty"`
	Step     Step          `json:"step,omitempty"`
	Warnings []string      `json:"warnings,omitempty"`
	Missing  []string      `json:"missing,omitempty"`
	Kernel   room.Kernel   `json:"kernel"`
}

// InsideFD is the socket to the gateway, in the process that prepares the guest.
const InsideFD = 3

// maxSetup bounds what is told, in bytes: an environment may be large.
const maxSetup = 8 << 20

// InsideCommand is the word by which sockeye runs Inside.
const InsideCommand = "isolate-inside"

// Inside prepares the guest, from within its namespaces, and stays as their first process, which starts the program and
// ends with it. It returns only if that fails, or if there is no program. What went wrong before the program was to start is
// told to the gateway, not returned.
func Inside() error {
	runtime.LockOSThread()
	holdSignals()
	socket := os.NewFile(InsideFD, "gateway")
	unix.CloseOnExec(InsideFD)
	var s Setup
	if err := gob.NewDecoder(&limited{socket, maxSetup}).Decode(&s); err != nil {
		return fmt.Errorf("read what to prepare: %w", err)
	}
	reply, fds := s.reply()
	text, err := json.Marshal(reply)
	if err != nil {
		return err
	}
	if err := unix.Sendmsg(InsideFD, text, unix.UnixRights(fds...), nil, 0); err != nil {
		return fmt.Errorf("answer the gateway: %w", err)
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	if reply.Error != "" || s.Program == "" {
		return nil
	}
	// The gateway says when it is at work; if it has died instead, the program does not
	// start.
	var ready [1]byte
	if n, _ := socket.Read(ready[:]); n != 1 {
		return errors.New("the gateway has ended")
	}
	return s.first(socket)
}

// reply prepares the guest, and what the gateway is told of it: all that the program must not have is given up then.
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
	device, err := s.prepare(reply)
	if err != nil {
		return err
	}
	*fds = []int{device}
	if diag, err := sockdiag.OpenSocket(s.Watched); err == nil {
		*fds = append(*fds, diag)
	} else if s.Watched {
		return err
	}
	// Here, as lo is up here for certain.
	if reply.Kernel, err = room.Calibrate(); err != nil || s.Program == "" {
		return err
	}
	if err := closeOthers(); err != nil {
		return err
	}
	// Now that this process has changed what it may: that would undo it.
	if err := unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0); err != nil {
		return fmt.Errorf("tie the program to the gateway: %w", err)
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

// sysctl is one of the guest's own.
type sysctl struct{ name, value string }

func (c sysctl) set() error {
	err := os.WriteFile("/proc/sys/"+c.name, []byte(c.value), 0)
	if err != nil {
		return fmt.Errorf("set sysctl %s: %w", strings.ReplaceAll(c.name, "/", "."), errors.Unwrap(err))
	}
	return nil
}

// lacksSysctl tells an error of a kernel, or a container, that does not let it be set.
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

// mostGuestBuffer bounds the send buffer of each connection inside, in bytes. The gateway answers in less than a
// millisecond, and what is on its way further waits in the host's socket.
const mostGuestBuffer = 512 << 10

// smallerWmem is net.ipv4.tcp_wmem with that bound.
func smallerWmem() string {
	values := [3]int{4096, 16384, mostGuestBuffer}
	if text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_wmem"); err == nil {
		_, _ = fmt.Sscan(string(text), &values[0], &values[1], &values[2])
	}
	return fmt.Sprintf("%d %d %d", values[0], min(values[1], mostGuestBuffer), min(values[2], mostGuestBuffer))
}

func (s *Setup) setSysctls(reply *setupReply) error {
	for c, without := range map[sysctl]string{
		{"net/ipv4/ip_unprivileged_port_start", "0"}:                                    "ports below 1024 stay closed to the program",
		{"net/ipv4/ping_group_range", fmt.Sprintf("%d %d", os.Getegid(), os.Getegid())}: "ping does not work inside",
		// Its own end of the connections is no further than this host.
		{"net/ipv4/tcp_wmem", smallerWmem()}: "its connections may hold much of the host's memory for TCP",
		// A kernel that sends cookies forgets the connection when the program's queue is full.
		{"net/ipv4/tcp_syncookies", "0"}: "of many connections at once some may not get through",
	} {
		if err := c.set(); lacksSysctl(err) {
			reply.Warnings = append(reply.Warnings, fmt.Sprintf("%s: %v", without, err))
		} else if err != nil {
			return err
		}
	}
	if s.AllowUserns {
		return nil
	}
	// In the guest's user namespace: the filter of system calls is not the only one to forbid them.
	if err := (sysctl{"user/max_user_namespaces", "0"}).set(); lacksSysctl(err) {
		reply.Missing = append(reply.Missing, fmt.Sprintf("only the filter forbids user namespaces: %v", err))
	} else if err != nil {
		return err
	}
	return nil
}
