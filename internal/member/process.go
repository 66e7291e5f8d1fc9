// SPDX-License-Identifier: Apache-2.0

// Package member finds the processes that serve a service, without their
// help: what they are by /proc, their sockets by pidfd_getfd(2).
package member

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/cgroup"
)

// Process is what the kernel says of a process.
type Process struct {
	PID       int
	Parent    int
	StartTime uint64 // clock ticks since boot
	UIDs      UIDs
	Exe       string // path of the executable where it runs, "" for one that may not be read
	File      FileID // the executable itself
	Args      []string
	Cgroup    string // path in cgroup v2, "/" where there is none
	Netns     uint64 // inode of the network namespace
	UserNS    FileID
	MountNS   FileID

	slotVariable *string // of Environment, once it was read
	exeVerified  bool    // the host had File at Exe
}

// UIDs are the users of a process: real, effective, saved, and that of the file system.
type UIDs [4]uint32

// Within tells whether all of them are among some users. They are not where a program that somebody
// else started became a user by its set-user-ID bit: who started it controls its arguments, its
// environment and its descriptors, and may send it signals.
func (u UIDs) Within(users []uint32) bool {
	return !slices.ContainsFunc(u[:], func(uid uint32) bool { return !slices.Contains(users, uid) })
}

// FileID names a file or a namespace for as long as it is in use.
type FileID struct {
	Device uint64 `json:"device"`
	Inode  uint64 `json:"inode"`
}

func fileID(s *unix.Stat_t) FileID { return FileID{uint64(s.Dev), s.Ino} }

// FromRecord is what an earlier look at a process saw of it that the process may have written over
// since, and the executable that was found to be the host's, or "".
func FromRecord(pid int, startTime uint64, args []string, slotVariable, exe string, file FileID) *Process {
	return &Process{PID: pid, StartTime: startTime, Args: args, slotVariable: &slotVariable, Exe: exe, File: file, exeVerified: exe != ""}
}

// RecallFirstSeen takes over from an earlier look what a process may write over, and where its executable
// was on the host, which may have been replaced since.
func (p *Process) RecallFirstSeen(first *Process) {
	p.Args, p.slotVariable = first.Args, first.slotVariable
	if exe, file := first.VerifiedExecutable(); exe != "" && file == p.File {
		p.Exe, p.exeVerified = exe, true
	}
}

// MayRun tells whether the process, as it was seen, may run that executable: it is false once execve(2)
// has replaced the one that is known.
func (p *Process) MayRun(file FileID) bool {
	return p.File == file || p.File == FileID{} || file == FileID{}
}

// VerifiedExecutable is the executable if it was found to be the host's file of that path.
func (p *Process) VerifiedExecutable() (exe string, file FileID) {
	if !p.exeVerified {
		return "", FileID{}
	}
	return p.Exe, p.File
}

// SlotVariable is SOCKEYE_SLOT of the environment with which the process
// started, or "".
func (p *Process) SlotVariable() string {
	if p.slotVariable == nil {
		value := environment(p.PID, "SOCKEYE_SLOT")
		p.slotVariable = &value
	}
	return *p.slotVariable
}

// Command is the command line, as a person would type it.
func (p *Process) Command() string { return strings.Join(p.Args, " ") }

// Unit returns the unit of the system's service manager that a process belongs to, by its cgroup, and
// the instance of a template's unit.
func (p *Process) Unit() (unit, instance string) { return UnitOf(p.Cgroup) }

func environment(pid int, name string) string {
	file, err := os.Open(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		return ""
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxEnvironment))
	if err != nil {
		return ""
	}
	for entry := range bytes.SplitSeq(data, []byte{0}) {
		if value, ok := bytes.CutPrefix(entry, []byte(name+"=")); ok {
			return string(value)
		}
	}
	return ""
}

// folder is /proc/PID of one process. What is read through it is of this process, or fails: it never
// is of a later one with the same id.
type procDir int

// Bounds of what is kept of a process: its arguments and its environment are where, and as large as, it
// says (PR_SET_MM_MAP), gigabytes that cost it nothing.
const (
	maxText        = 32 << 10 // bytes of a file
	maxArgs        = 512
	maxEnvironment = 1 << 20 // bytes in which SOCKEYE_SLOT is looked for
)

// read reads the first maxText bytes of a file.
func (f procDir) read(name string) ([]byte, error) {
	fd, err := unix.Openat(int(f), name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), name)
	defer file.Close()
	return io.ReadAll(io.LimitReader(file, maxText))
}

// id follows a link to a file or a namespace.
func (f procDir) id(name string) (FileID, error) {
	var stat unix.Stat_t
	if err := unix.Fstatat(int(f), name, &stat, 0); err != nil {
		return FileID{}, err
	}
	return fileID(&stat), nil
}

func (f procDir) link(name string) (string, error) {
	var path [unix.PathMax]byte
	n, err := unix.Readlinkat(int(f), name, path[:])
	if err != nil {
		return "", err
	}
	return string(path[:n]), nil
}

// Read returns the process with the given id. It fails with fs.ErrNotExist if
// there is none.
func Read(pid int) (*Process, error) {
	dir, err := openProcess(pid)
	if err != nil {
		return nil, err
	}
	defer unix.Close(int(dir))
	p := &Process{PID: pid, Cgroup: "/"}
	if p.Parent, p.StartTime, err = dir.stat(pid); err != nil {
		return nil, err
	}
	status, err := dir.read("status")
	if err != nil {
		return nil, readError(pid, err)
	}
	if p.UIDs, err = parseUIDs(status); err != nil {
		return nil, fmt.Errorf("read process %d: %w", pid, err)
	}
	args, err := dir.read("cmdline")
	if err != nil {
		return nil, readError(pid, err)
	}
	if args = bytes.TrimRight(args, "\x00"); len(args) > 0 {
		p.Args = strings.SplitN(string(args), "\x00", maxArgs)
	}
	groups, err := dir.read("cgroup")
	if err != nil {
		return nil, readError(pid, err)
	}
	if path, ok := cgroup.Parse(string(groups)); ok {
		p.Cgroup = path
	}
	// Kernel threads have none, and some files need more rights than others.
	if p.Exe, err = dir.link("exe"); err == nil {
		p.Exe = strings.TrimSuffix(p.Exe, " (deleted)") // then the host has another file there, or none
		p.File, _ = dir.id("exe")
	}
	netns, err := dir.id("ns/net")
	if err != nil {
		return nil, readError(pid, err)
	}
	p.Netns = netns.Inode
	if p.UserNS, err = dir.id("ns/user"); err != nil {
		return nil, readError(pid, err)
	}
	if p.MountNS, err = dir.id("ns/mnt"); err != nil {
		return nil, readError(pid, err)
	}
	return p, nil
}

// parseUIDs finds the users in /proc/PID/status. The owner of /proc/PID is the effective one alone.
func parseUIDs(status []byte) (uids UIDs, err error) {
	for line := range bytes.Lines(status) {
		text, ok := bytes.CutPrefix(line, []byte("Uid:"))
		if !ok {
			continue
		}
		fields := bytes.Fields(text)
		if len(fields) != len(uids) {
			break
		}
		for i, field := range fields {
			uid, err := strconv.ParseUint(string(field), 10, 32)
			if err != nil {
				return uids, fmt.Errorf("users: %w", err)
			}
			uids[i] = uint32(uid)
		}
		return uids, nil
	}
	return uids, errors.New("unexpected format of status")
}

// Alive tells whether a process that had this id and start time still runs. That costs a
// fraction of Read.
func Alive(pid int, startTime uint64) bool {
	dir, err := openProcess(pid)
	if err != nil {
		return false
	}
	defer unix.Close(int(dir))
	_, now, err := dir.stat(pid)
	return err == nil && now == startTime
}

// Parent is the process that a process is a child of.
func Parent(pid int) (int, error) {
	dir, err := openProcess(pid)
	if err != nil {
		return 0, err
	}
	defer unix.Close(int(dir))
	parent, _, err := dir.stat(pid)
	return parent, err
}

func openProcess(pid int) (procDir, error) {
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, readError(pid, err)
	}
	return procDir(fd), nil
}

// stat reads proc_pid_stat(5). A process that has ended and is not waited for is gone.
func (f procDir) stat(pid int) (parent int, startTime uint64, err error) {
	stat, err := f.read("stat")
	if err != nil {
		return 0, 0, readError(pid, err)
	}
	// The name in parentheses may hold anything, parentheses too.
	_, rest, ok := cutLast(string(stat), ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 {
		return 0, 0, fmt.Errorf("read process %d: unexpected format of stat", pid)
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return 0, 0, readError(pid, fs.ErrNotExist)
	}
	if parent, err = strconv.Atoi(fields[1]); err != nil {
		return 0, 0, fmt.Errorf("read process %d: parent: %w", pid, err)
	}
	if startTime, err = strconv.ParseUint(fields[19], 10, 64); err != nil {
		return 0, 0, fmt.Errorf("read process %d: start time: %w", pid, err)
	}
	return parent, startTime, nil
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// gone makes one error of the many ways in which /proc says that a process
// has ended.
func readError(pid int, err error) error {
	if errors.Is(err, unix.ESRCH) {
		err = fs.ErrNotExist
	}
	return fmt.Errorf("read process %d: %w", pid, err)
}

// All returns the processes of the host, oldest first, except kernel threads
// and those that end meanwhile or may not be read.
func All() ([]*Process, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var processes []*Process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if p, err := Read(pid); err == nil && len(p.Args) > 0 {
			processes = append(processes, p)
		}
	}
	slices.SortFunc(processes, func(a, b *Process) int {
		return cmp.Or(cmp.Compare(a.StartTime, b.StartTime), cmp.Compare(a.PID, b.PID))
	})
	return processes, nil
}
