// SPDX-License-Identifier: Apache-2.0

package sockdiag

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Process is a process that has a socket.
type Process struct {
	PID     int    `json:"pid"`
	FD      int    `json:"fd"`      // first descriptor of the socket
	Command string `json:"command"` // name in /proc/PID/comm
	// Thread is the id of the thread whose table has the descriptor, or 0 if it is that of the process.
	Thread int `json:"-"`
}

// ReadProcesses returns the processes of sockets by inode, for wanted inodes. hidden is the number of processes that
// are not readable.
func ReadProcesses(wanted func(inode uint32) bool) (byInode map[uint32][]Process, hidden int, err error) {
	byInode = make(map[uint32][]Process)
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, 0, fmt.Errorf("list processes: %w", err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		// A process that exits concurrently has no sockets.
		if err := readProcess(pid, 0, wanted, byInode); errors.Is(err, fs.ErrPermission) {
			hidden++
		}
	}
	return byInode, hidden, nil
}

// ReadThreads is ReadProcesses for sockets whose descriptors only a thread has: unshare(2) with CLONE_FILES gives a thread a table of its own,
// which /proc/PID/fd does not show.
func ReadThreads(wanted func(inode uint32) bool) (byInode map[uint32][]Process, err error) {
	byInode = make(map[uint32][]Process)
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		threads, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid)) // it has exited
		for _, t := range threads {
			if thread, err := strconv.Atoi(t.Name()); err == nil && thread != pid {
				_ = readProcess(pid, thread, wanted, byInode)
			}
		}
	}
	return byInode, nil
}

// ReadSocketsOf returns which of some processes have sockets, by inode, for wanted inodes.
func ReadSocketsOf(pids []int, wanted func(inode uint32) bool) map[uint32][]Process {
	byInode := make(map[uint32][]Process)
	for _, pid := range pids {
		_ = readProcess(pid, 0, wanted, byInode) // a process that exits has no sockets
	}
	return byInode
}

// readProcess reads the descriptors of a process, or of one of its threads.
func readProcess(pid, thread int, wanted func(uint32) bool, byInode map[uint32][]Process) error {
	dir := filepath.Join("/proc", strconv.Itoa(cmp.Or(thread, pid)))
	fds, err := os.ReadDir(filepath.Join(dir, "fd"))
	if err != nil {
		return err
	}
	command := ""
	for _, f := range fds {
		target, err := os.Readlink(filepath.Join(dir, "fd", f.Name()))
		if err != nil {
			if errors.Is(err, fs.ErrPermission) {
				return err
			}
			continue
		}
		number, ok := strings.CutPrefix(target, "socket:[")
		inode, err := strconv.ParseUint(strings.TrimSuffix(number, "]"), 10, 32)
		if !ok || err != nil || !wanted(uint32(inode)) {
			continue
		}
		if have := byInode[uint32(inode)]; len(have) > 0 && have[len(have)-1].PID == pid {
			continue
		}
		if command == "" {
			name, err := os.ReadFile(filepath.Join(dir, "comm"))
			if err != nil {
				return err
			}
			command = strings.TrimSuffix(string(name), "\n")
		}
		fd, err := strconv.Atoi(f.Name())
		if err != nil {
			continue
		}
		byInode[uint32(inode)] = append(byInode[uint32(inode)], Process{pid, fd, command, thread})
	}
	return nil
}

// Has reports whether the descriptor of a process still refers to the socket with an inode.
func (p *Process) Has(inode uint32) bool {
	target, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", cmp.Or(p.Thread, p.PID), p.FD))
	return err == nil && target == fmt.Sprintf("socket:[%d]", inode)
}

// sendBufLock is SOCK_SNDBUF_LOCK of linux/socket.h.
const sendBufLock = 1

// Ask reads the options of a socket that sock_diag does not report. It needs the right to trace the process, and
// Linux 5.14.
func (p *Process) Ask(cookie uint64) (*Asked, error) {
	fd, err := p.Open(cookie)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	lock, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK)
	if err != nil {
		return nil, fmt.Errorf("read SO_BUF_LOCK: %w", err)
	}
	lowat, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT)
	if err != nil {
		return nil, fmt.Errorf("read TCP_NOTSENT_LOWAT: %w", err)
	}
	return &Asked{Fixed: lock&sendBufLock != 0, NotSentLowat: int(uint32(lowat))}, nil
}

// Open returns a copy of the socket of a process, which has a cookie. The caller closes the copy. Open needs the right to trace the
// process, and Linux 6.9 for the descriptor of a thread.
func (p *Process) Open(cookie uint64) (fd int, err error) {
	flags := 0
	if p.Thread != 0 {
		flags = unix.O_EXCL // PIDFD_THREAD
	}
	handle, err := unix.PidfdOpen(cmp.Or(p.Thread, p.PID), flags)
	if err != nil {
		return -1, fmt.Errorf("open pid %d: %w", p.PID, err)
	}
	defer unix.Close(handle)
	fd, err = unix.PidfdGetfd(handle, p.FD, 0)
	if err != nil {
		return -1, fmt.Errorf("duplicate descriptor %d of pid %d: %w", p.FD, p.PID, err)
	}
	if is, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE); err != nil || is != cookie {
		unix.Close(fd)
		return -1, fmt.Errorf("descriptor %d of pid %d now refers to another socket", p.FD, p.PID)
	}
	return fd, nil
}
