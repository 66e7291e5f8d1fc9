// SPDX-License-Identifier: Apache-2.0

// Package member finds the processes that serve a service, without their
// help: what they are by /proc, their sockets by pidfd_getfd(2).
package member

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// Process is what /proc says of a process.
type Process struct {
	PID       int
	Parent    int
	StartTime uint64 // clock ticks since boot
	UID       uint32 // effective
	Exe       string // "" for one that may not be read
	Args      []string
	Cgroup    string // path in cgroup v2, "/" where there is none
	Netns     uint64 // inode of the network namespace

	slotVariable *string // of Environment, once it was read
}

// Remembered is what an earlier look at a process saw of it that the process
// may have written over since.
func Remembered(pid int, startTime uint64, args []string, slotVariable string) *Process {
	return &Process{PID: pid, StartTime: startTime, Args: args, slotVariable: &slotVariable}
}

// Remember takes over from an earlier look what a process may write over.
func (p *Process) Remember(first *Process) {
	p.Args, p.slotVariable = first.Args, first.slotVariable
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

// Unit returns the systemd unit that a process belongs to, by its cgroup, and
// the instance of a template's unit.
func (p *Process) Unit() (unit, instance string) {
	for part := range strings.SplitSeq(p.Cgroup, "/") {
		if !strings.HasSuffix(part, ".service") && !strings.HasSuffix(part, ".scope") {
			continue
		}
		unit = part
		instance = ""
		name := strings.TrimSuffix(part, filepath.Ext(part))
		if _, after, ok := strings.Cut(name, "@"); ok {
			instance = after
		}
	}
	return unit, instance
}

func environment(pid int, name string) string {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
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

// Read returns the process with the given id. It fails with fs.ErrNotExist if
// there is none.
func Read(pid int) (*Process, error) {
	dir := "/proc/" + strconv.Itoa(pid)
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return nil, gone(pid, err)
	}
	p := &Process{PID: pid, Cgroup: "/"}
	// The name in parentheses may hold anything, parentheses too.
	_, rest, ok := cutLast(string(stat), ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 {
		return nil, fmt.Errorf("read process %d: unexpected format of stat", pid)
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return nil, gone(pid, fs.ErrNotExist)
	}
	if p.Parent, err = strconv.Atoi(fields[1]); err != nil {
		return nil, fmt.Errorf("read process %d: parent: %w", pid, err)
	}
	if p.StartTime, err = strconv.ParseUint(fields[19], 10, 64); err != nil {
		return nil, fmt.Errorf("read process %d: start time: %w", pid, err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return nil, gone(pid, err)
	}
	p.UID = info.Sys().(*syscall.Stat_t).Uid
	args, err := os.ReadFile(dir + "/cmdline")
	if err != nil {
		return nil, gone(pid, err)
	}
	if args = bytes.TrimRight(args, "\x00"); len(args) > 0 {
		p.Args = strings.Split(string(args), "\x00")
	}
	groups, err := os.ReadFile(dir + "/cgroup")
	if err != nil {
		return nil, gone(pid, err)
	}
	for line := range strings.Lines(string(groups)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			p.Cgroup = strings.TrimSuffix(path, "\n")
		}
	}
	// Kernel threads have none, and some files need more rights than others.
	p.Exe, _ = os.Readlink(dir + "/exe")
	if p.Netns, err = inode(dir + "/ns/net"); err != nil {
		return nil, gone(pid, err)
	}
	return p, nil
}

func inode(path string) (uint64, error) {
	info, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	return info.Sys().(*syscall.Stat_t).Ino, nil
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// gone makes one error of the many ways in which /proc says that a process
// has ended.
func gone(pid int, err error) error {
	if errors.Is(err, syscall.ESRCH) {
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
