// SPDX-License-Identifier: Apache-2.0

// Package member finds the processes that serve a service and copies their sockets, without their cooperation. The
// attributes of a process come from /proc, and the sockets from pidfd_getfd(2).
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
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/cgroup"
)

// Process contains the attributes of a process in /proc.
type Process struct {
	PID       int
	Parent    int
	StartTime uint64 // clock ticks since boot
	UIDs      UIDs
	Exe       string // path of the executable in the mount namespace of the process; "" if unreadable
	File      FileID // executable file
	Args      []string
	Cgroup    string // path in cgroup v2; "/" without cgroup v2
	Netns     uint64 // inode of the network namespace
	UserNS    FileID
	MountNS   FileID

	slotVariable *string // cached result of SlotVariable
	exeVerified  bool    // Exe on the host refers to File
}

// UIDs are the user ids of a process: real, effective, saved, and file system.
type UIDs [4]uint32

// Within returns whether all ids are in users. The real id of a set-user-ID program is the id of the user who started
// the program; this user controls its arguments, environment and descriptors, and may send it signals.
func (u UIDs) Within(users []uint32) bool {
	return !slices.ContainsFunc(u[:], func(uid uint32) bool { return !slices.Contains(users, uid) })
}

// FileID identifies a file or a namespace while it exists.
type FileID struct {
	Device uint64 `json:"device"`
	Inode  uint64 `json:"inode"`
}

func fileID(s *unix.Stat_t) FileID { return FileID{uint64(s.Dev), s.Ino} }

// FromRecord returns a process with the recorded attributes that the process may have overwritten since. exe is the
// verified path of the executable, or "".
func FromRecord(pid int, startTime uint64, args []string, slotVariable, exe string, file FileID) *Process {
	return &Process{PID: pid, StartTime: startTime, Args: args, slotVariable: &slotVariable, Exe: exe, File: file, exeVerified: exe != ""}
}

// RecallFirstSeen copies the attributes that a process can overwrite from its first inspection, and the verified path of
// the executable, which an upgrade may have replaced since.
func (p *Process) RecallFirstSeen(first *Process) {
	p.Args, p.slotVariable = first.Args, first.slotVariable
	if exe, file := first.VerifiedExecutable(); exe != "" && file == p.File {
		p.Exe, p.exeVerified = exe, true
	}
}

// MayRun returns whether the process may have run an executable. It returns false if both executables are known and
// differ, as after execve(2).
func (p *Process) MayRun(file FileID) bool {
	return p.File == file || p.File == FileID{} || file == FileID{}
}

// VerifiedExecutable returns the path and the file of the executable if the path refers to that file on the host, or "".
func (p *Process) VerifiedExecutable() (exe string, file FileID) {
	if !p.exeVerified {
		return "", FileID{}
	}
	return p.Exe, p.File
}

// SlotVariable returns SOCKEYE_SLOT of the initial environment of the process, or "".
func (p *Process) SlotVariable() string {
	if p.slotVariable == nil {
		value := environment(p.PID, "SOCKEYE_SLOT")
		p.slotVariable = &value
	}
	return *p.slotVariable
}

// Command returns the arguments joined by spaces.
func (p *Process) Command() string { return strings.Join(p.Args, " ") }

// Unit returns the system unit of a process by its cgroup, and the instance name of a template unit.
func (p *Process) Unit() (unit, instance string) { return UnitOf(p.Cgroup) }

// Limits of the data per process. A process sets the location and the size of its arguments and its environment
// (PR_SET_MM_MAP), up to gigabytes without a cost.
const (
	maxText        = 32 << 10 // bytes of a file
	maxArgs        = 512
	maxEnvironment = 1 << 20 // bytes that are searched for SOCKEYE_SLOT
	maxValue       = 64      // bytes of a slot number that are kept and shown
)

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
			return string(value[:min(len(value), maxValue)])
		}
	}
	return ""
}

// procDir is a descriptor of /proc/PID. Reads through the descriptor return data of this process or fail; they never
// return data of a later process with the same id.
type procDir int

// id returns the file or the namespace that a link refers to.
func (f procDir) id(name string) (FileID, error) { return identify(int(f), name, 0) }

// identify returns the file of a path.
func identify(dir int, path string, flags int) (FileID, error) {
	stat, err := statAt(dir, path, flags)
	if err != nil {
		return FileID{}, err
	}
	return FileID{unix.Mkdev(stat.Dev_major, stat.Dev_minor), stat.Ino}, nil
}

// Stat returns the attributes of a file without a question to the server of its file system: that of another process's file may be
// of any user (FUSE below overlayfs in a user namespace), or not reachable (NFS), and would never answer.
func Stat(path string) (*unix.Statx_t, error) { return statAt(unix.AT_FDCWD, path, 0) }

func statAt(dir int, path string, flags int) (*unix.Statx_t, error) {
	stat := new(unix.Statx_t)
	return stat, unix.Statx(dir, path, flags|unix.AT_STATX_DONT_SYNC, unix.STATX_BASIC_STATS, stat)
}

// Alive returns whether the process with this id and start time is still running, at a fraction of the cost of Read.
func Alive(pid int, startTime uint64) bool {
	dir, err := openProcess(pid)
	if err != nil {
		return false
	}
	defer unix.Close(int(dir))
	_, now, _, err := dir.stat(pid)
	return err == nil && now == startTime
}

// Sleeps reports whether the first thread of a process sleeps: it neither runs, nor waits for a CPU or a disk. ran is the
// CPU time of the thread, or 0 if the kernel does not count it (CONFIG_SCHED_INFO).
func Sleeps(pid int) (asleep bool, ran time.Duration, err error) {
	dir, err := openProcess(pid)
	if err != nil {
		return false, 0, err
	}
	defer unix.Close(int(dir))
	fields, err := dir.statFields("stat")
	if err != nil {
		return false, 0, readError(pid, err)
	}
	if text, err := dir.read("schedstat"); err == nil {
		_, _ = fmt.Sscan(string(text), (*int64)(&ran)) // stays 0
	}
	return isAsleep(fields), ran, nil
}

func isAsleep(fields []string) bool { return fields[0] != "R" && fields[0] != "D" }

// mostThreads limits the threads that AllSleep reads: a process may have very many.
const mostThreads = 128

// AllSleep reports whether the threads of a process sleep, as Sleeps does. Of more than 128 threads, it reads 128.
func AllSleep(pid int) (bool, error) {
	dir, err := openProcess(pid)
	if err != nil {
		return false, err
	}
	defer unix.Close(int(dir))
	threads, err := dir.threads(mostThreads)
	if err != nil {
		return false, readError(pid, err)
	}
	for _, thread := range threads {
		if fields, err := dir.statFields("task/" + thread + "/stat"); err == nil && !isAsleep(fields) {
			return false, nil
		}
	}
	return true, nil
}

// Parent returns the process id of the parent of a process.
func Parent(pid int) (int, error) {
	dir, err := openProcess(pid)
	if err != nil {
		return 0, err
	}
	defer unix.Close(int(dir))
	parent, _, _, err := dir.stat(pid)
	return parent, err
}

// All returns the processes of the host, oldest first, without kernel threads, unreadable processes, and processes that
// exit during the call.
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
		if p, err := read(pid, false); err == nil && len(p.Args) > 0 {
			processes = append(processes, p)
		}
	}
	slices.SortFunc(processes, func(a, b *Process) int {
		return cmp.Or(cmp.Compare(a.StartTime, b.StartTime), cmp.Compare(a.PID, b.PID))
	})
	return processes, nil
}

// Read returns the process with a process id. The error wraps fs.ErrNotExist if there is no such process.
func Read(pid int) (*Process, error) { return read(pid, true) }

var errKernelThread = errors.New("a kernel thread")

// read is Read. Without kernelThreads, kernel threads are not read further than it takes to know them: many hosts have more of
// them than processes.
func read(pid int, kernelThreads bool) (*Process, error) {
	dir, err := openProcess(pid)
	if err != nil {
		return nil, err
	}
	defer unix.Close(int(dir))
	p := &Process{PID: pid, Cgroup: "/"}
	var isKernelThread bool
	if p.Parent, p.StartTime, isKernelThread, err = dir.stat(pid); err != nil {
		return nil, err
	}
	if isKernelThread && !kernelThreads {
		return nil, errKernelThread
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
	// Kernel threads have no executable, and the link may be unreadable.
	if p.Exe, err = dir.link("exe"); err == nil {
		p.Exe = strings.TrimSuffix(p.Exe, " (deleted)") // the path now refers to another file or to none
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

func (f procDir) link(name string) (string, error) {
	var path [unix.PathMax]byte
	n, err := unix.Readlinkat(int(f), name, path[:])
	if err != nil {
		return "", err
	}
	return string(path[:n]), nil
}

// parseUIDs parses the user ids in /proc/PID/status. The owner of /proc/PID is only the effective user.
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

func openProcess(pid int) (procDir, error) {
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, readError(pid, err)
	}
	return procDir(fd), nil
}

// stat reads /proc/PID/stat (proc_pid_stat(5)). A process whose threads all exit, or have exited, counts as exited.
func (f procDir) stat(pid int) (parent int, startTime uint64, isKernelThread bool, err error) {
	fields, err := f.statFields("stat")
	if err != nil {
		return 0, 0, false, readError(pid, err)
	}
	// A thread that calls execve(2) takes the place of the first one, and the list of the threads may end early while threads
	// exit (next_tid, fs/proc/base.c).
	const attempts = 5
	for n := 0; isExiting(fields) && f.allExit(); n++ {
		if n == attempts {
			return 0, 0, false, readError(pid, fs.ErrNotExist)
		}
		if fields, err = f.statFields("stat"); err != nil {
			return 0, 0, false, readError(pid, err)
		}
	}
	if parent, err = strconv.Atoi(fields[1]); err != nil {
		return 0, 0, false, fmt.Errorf("read process %d: parent: %w", pid, err)
	}
	if startTime, err = strconv.ParseUint(fields[19], 10, 64); err != nil {
		return 0, 0, false, fmt.Errorf("read process %d: start time: %w", pid, err)
	}
	return parent, startTime, flagsOf(fields)&kernelThread != 0, nil
}

// allExit reports whether all threads of a process exit or have exited. The first thread alone also exits when another thread
// calls execve(2) (de_thread).
func (f procDir) allExit() bool {
	threads, err := f.threads(-1)
	if err != nil {
		return true
	}
	for _, thread := range threads {
		if fields, err := f.statFields("task/" + thread + "/stat"); err == nil && !isExiting(fields) {
			return false
		}
	}
	return true
}

// statFields returns the fields of a stat file from the state on. The name in parentheses may contain any characters, also
// parentheses.
func (f procDir) statFields(file string) ([]string, error) {
	text, err := f.read(file)
	if err != nil {
		return nil, err
	}
	_, rest, ok := cutLast(string(text), ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 {
		return nil, errors.New("unexpected format of stat")
	}
	return fields, nil
}

// read reads the first maxText bytes of a file.
func (f procDir) read(name string) ([]byte, error) {
	fd, err := unix.Openat(int(f), name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	text := make([]byte, 0, 1024)
	for len(text) < maxText {
		n, err := unix.Read(fd, text[len(text):min(cap(text), maxText)])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if n <= 0 {
			return text, err
		}
		text = slices.Grow(text[:len(text)+n], 1024)
	}
	return text, nil
}

// isExiting reports whether a thread is in do_exit or has exited. A process closes its sockets in do_exit, before it becomes
// a zombie.
func isExiting(fields []string) bool {
	return fields[0] == "Z" || fields[0] == "X" || flagsOf(fields)&exiting != 0
}

// Flags of a thread (include/linux/sched.h).
const (
	exiting      = 0x4      // PF_EXITING
	kernelThread = 0x200000 // PF_KTHREAD
)

// flagsOf returns the flags among the fields of a stat file.
func flagsOf(fields []string) uint64 {
	flags, err := strconv.ParseUint(fields[6], 10, 32)
	if err != nil {
		return 0
	}
	return flags
}

// threads returns the ids of up to n threads, or of all for -1.
func (f procDir) threads(n int) ([]string, error) {
	fd, err := unix.Openat(int(f), "task", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	dir := os.NewFile(uintptr(fd), "task")
	defer dir.Close()
	return dir.Readdirnames(n)
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// readError wraps an error of /proc, and maps ESRCH to fs.ErrNotExist.
func readError(pid int, err error) error {
	if errors.Is(err, unix.ESRCH) {
		err = fs.ErrNotExist
	}
	return fmt.Errorf("read process %d: %w", pid, err)
}
