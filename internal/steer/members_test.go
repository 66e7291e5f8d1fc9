// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/member"
)

// TestSeenBeforeExecve inspects a process between fork(2) and execve(2), as a scan may while systemd starts a unit. After
// execve(2), the recorded attributes must be those of the new program.
func TestSeenBeforeExecve(t *testing.T) {
	cmd := exec.Command("/bin/sh", "-c", "read line; exec /bin/sleep 60")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	read := func() *member.Process {
		p, err := member.Read(cmd.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	before := read()
	self := member.ID{PID: before.PID, StartTime: before.StartTime}
	s := &service{firstSeen: map[member.ID]*member.Process{self: before}}
	if got := s.recallFirstSeen(read()).Command(); got != before.Command() {
		t.Errorf("%q, want %q as long as it runs the same program", got, before.Command())
	}
	if _, err := in.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}
	// The kernel replaces the executable before the arguments, and a process has none in between. One read may have the earlier
	// arguments and the next executable.
	executed := func() bool {
		p := read()
		return p.File != before.File && len(p.Args) > 0 && p.Command() != before.Command()
	}
	for deadline := time.Now().Add(10 * time.Second); !executed(); {
		if time.Now().After(deadline) {
			t.Fatal("the process does not call execve")
		}
		time.Sleep(time.Millisecond)
	}
	if got := s.recallFirstSeen(read()).Command(); got != "/bin/sleep 60" {
		t.Errorf("%q after execve", got)
	}
	if s.firstSeen[self] != nil {
		t.Error("the attributes before execve are still recorded")
	}
}

// TestFirstSights checks that processes that match a rule and have ended make room for the first sight of another one, and that living ones
// fill no more than their share of memory.
func TestFirstSights(t *testing.T) {
	s := &service{firstSeen: make(map[member.ID]*member.Process)}
	p := &member.Process{Args: []string{"nfacctd"}}
	for i := range 2*bpf.MaxSlots + 7 {
		s.recordFirst(member.ID{PID: os.Getpid(), StartTime: uint64(i)}, p) // none of them lives
	}
	if n := len(s.firstSeen); n > 2*bpf.MaxSlots || n < 7 {
		t.Errorf("%d records, want at most %d", n, 2*bpf.MaxSlots)
	}
	last := member.ID{PID: os.Getpid(), StartTime: uint64(2*bpf.MaxSlots + 6)}
	if s.firstSeen[last] == nil {
		t.Error("the last one has no record")
	}
}
