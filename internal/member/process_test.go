// SPDX-License-Identifier: Apache-2.0

package member

import (
	"cmp"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/cgroup"
	"sockeye/internal/testenv"
)

func TestReadSelf(t *testing.T) {
	p, err := Read(os.Getpid())
	check(t, err)
	exe, err := os.Readlink("/proc/self/exe")
	check(t, err)
	var netns unix.Stat_t
	check(t, unix.Stat("/proc/self/ns/net", &netns))
	if p.PID != os.Getpid() || p.Parent != os.Getppid() || p.UIDs != (UIDs{}) || p.Exe != exe ||
		!slices.Equal(p.Args, os.Args) || p.Cgroup != testenv.CgroupPath() || p.Netns != netns.Ino {
		t.Errorf("read %+v", p)
	}
	if again, err := Read(os.Getpid()); err != nil || again.StartTime != p.StartTime || p.StartTime == 0 {
		t.Errorf("started at %d and %d, %v", p.StartTime, again.StartTime, err)
	}
}

// TestReadOddNames reads processes whose names look like fields of /proc/PID/stat.
func TestReadOddNames(t *testing.T) {
	for _, name := range []string{"plain", "a b", "(a)", ") S 1 2 (", ") Z 1 1 1 1 1", "a\nb", ")\n(", "\\", "\xff"} {
		args := []string{"prog " + name, "", "two words", "a\nline", "--x=(" + name + ")", "\xff"}
		c := start(t, "rename", nil, func(cmd *exec.Cmd) {
			cmd.Args = args
			cmd.Env = append(cmd.Env, "NAME="+name)
		})
		comm, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(c.pid()), "comm"))
		check(t, err)
		if want := name[:min(len(name), 15)] + "\n"; string(comm) != want {
			t.Errorf("the name is %q, want %q", comm, want)
		}
		p, err := Read(c.pid())
		if err != nil {
			t.Errorf("%q: %v", name, err)
			continue
		}
		if p.Parent != os.Getpid() || !slices.Equal(p.Args, args) || p.Command() != strings.Join(args, " ") {
			t.Errorf("%q: read %+v", name, p)
		}
		self, err := Read(os.Getpid())
		check(t, err)
		if p.StartTime < self.StartTime {
			t.Errorf("%q: started at %d, before its parent at %d", name, p.StartTime, self.StartTime)
		}
	}
}

// TestReadOther reads a process of another user, cgroup and network namespace.
func TestReadOther(t *testing.T) {
	group := filepath.Join(testenv.Cgroup(), "nfacctd@3.service")
	check(t, os.Mkdir(group, 0o755))
	dir, err := os.Open(group)
	check(t, err)
	defer dir.Close()
	c := start(t, "sleep", nil, func(cmd *exec.Cmd) {
		cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWNET
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 1234, Gid: 1234}
	})
	defer os.Remove(group)
	defer c.Wait()
	defer c.Process.Kill()
	check(t, cgroup.Move(group, c.pid()))
	p, err := Read(c.pid())
	check(t, err)
	self, err := Read(os.Getpid())
	check(t, err)
	if p.Cgroup != testenv.CgroupPath()+"/nfacctd@3.service" {
		t.Errorf("cgroup %s", p.Cgroup)
	}
	// The agent may be in a container.
	var seen Process
	start(t, "read", &seen, func(cmd *exec.Cmd) {
		cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWCGROUP
		cmd.Env = append(cmd.Env, "PROCESS="+strconv.Itoa(c.pid()))
	})
	if seen.Cgroup != p.Cgroup {
		t.Errorf("from another cgroup namespace: cgroup %s, want %s", seen.Cgroup, p.Cgroup)
	}
	if p.UIDs != (UIDs{1234, 1234, 1234, 1234}) || p.Netns == self.Netns || p.Netns == 0 || p.Exe != self.Exe {
		t.Errorf("read %+v", p)
	}
}

func TestReadNothing(t *testing.T) {
	c := start(t, "sleep", nil, nil)
	first, err := Read(c.pid())
	check(t, err)
	if parent, err := Parent(c.pid()); err != nil || parent != os.Getpid() {
		t.Errorf("parent %d: %v", parent, err)
	}
	if !Alive(c.pid(), first.StartTime) || Alive(c.pid(), first.StartTime+1) {
		t.Error("a process that sleeps is the one that started then, and no other")
	}
	check(t, c.stop.Close())
	h, err := Open(c.pid())
	check(t, err)
	defer h.Close()
	check(t, within(t, "a child", h.Wait))
	if p, err := Read(c.pid()); !errors.Is(err, fs.ErrNotExist) || Alive(c.pid(), first.StartTime) {
		t.Errorf("a zombie: %+v, %v", p, err)
	}
	check(t, c.Wait())
	if _, err := Parent(c.pid()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the parent of none: %v", err)
	}
	for _, pid := range []int{c.pid(), 1 << 30, 0, -1} {
		if p, err := Read(pid); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("process %d: %+v, %v", pid, p, err)
		}
		if _, err := Open(max(pid, 1<<22+1)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("open: %v", err)
		}
	}
}

// TestAllSleep checks that one busy thread of several makes a process busy.
func TestAllSleep(t *testing.T) {
	for name, want := range map[string]bool{"sleep": true, "spin": false} {
		c := start(t, name, nil, nil)
		var err error
		testenv.Within(t, name, func() bool {
			var got bool
			got, err = AllSleep(c.pid())
			return err != nil || got == want
		})
		check(t, err)
		check(t, c.Process.Kill())
		_ = c.Wait()
	}
	// The thread that calls is busy, and is not the first one.
	busy := make(chan bool)
	go func() {
		runtime.LockOSThread()
		asleep, err := AllSleep(os.Getpid())
		busy <- err == nil && !asleep
	}()
	if !<-busy {
		t.Error("the thread that runs counts as asleep")
	}
	if _, err := AllSleep(1 << 30); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no process: %v", err)
	}
}

// TestAliveAtExecve checks that a process is alive while a thread other than the first calls execve(2): the first thread exits
// then.
func TestAliveAtExecve(t *testing.T) {
	c := start(t, "execute", nil, func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, "TIMES=100") })
	h, err := Open(c.pid())
	check(t, err)
	defer h.Close()
	first, err := Read(c.pid())
	for errors.Is(err, fs.ErrNotExist) && !h.Ended() { // the first thread has no executable while it exits
		first, err = Read(c.pid())
	}
	check(t, err)
	n := 0
	for ; !h.Ended(); n++ {
		if !Alive(c.pid(), first.StartTime) && !h.Ended() {
			t.Fatalf("not alive at check %d", n)
		}
		if text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(c.pid()), "environ")); err == nil && strings.Contains(string(text), "TIMES=0") {
			break
		}
	}
	if n < 100 {
		t.Errorf("%d checks", n)
	}
}

func TestAll(t *testing.T) {
	first, second := start(t, "sleep", nil, nil), start(t, "sleep", nil, nil)
	zombie := start(t, "sleep", nil, nil)
	check(t, zombie.Process.Kill())
	h, err := Open(zombie.pid())
	check(t, err)
	defer h.Close()
	check(t, within(t, "a killed child", h.Wait))
	all, err := All()
	check(t, err)
	at := func(pid int) int { return slices.IndexFunc(all, func(p *Process) bool { return p.PID == pid }) }
	for _, pid := range []int{os.Getpid(), first.pid(), second.pid()} {
		if at(pid) < 0 {
			t.Errorf("%d is not there", pid)
		}
	}
	// Process ids wrap around.
	if !slices.IsSortedFunc(all, func(a, b *Process) int { return cmp.Compare(a.StartTime, b.StartTime) }) {
		t.Error("those that started first do not come first")
	}
	if at(zombie.pid()) >= 0 {
		t.Error("a zombie is there")
	}
	for _, p := range all {
		if len(p.Args) == 0 {
			t.Errorf("%+v", p)
		}
	}
}

func TestBelow(t *testing.T) {
	for _, test := range []struct {
		process, cgroup string
		want            bool
	}{
		{"/", "/", true}, {"/a", "/", true}, {"/a", "/a", true}, {"/a/b", "/a", true},
		{"/ab", "/a", false}, {"/a", "/a/b", false}, {"/", "/a", false}, {"/b/a", "/a", false},
	} {
		if got := (&Process{Cgroup: test.process}).InCgroup(test.cgroup); got != test.want {
			t.Errorf("%s below %s: %v", test.process, test.cgroup, got)
		}
	}
}

func TestSlotVariable(t *testing.T) {
	for want, env := range map[string][]string{
		"":                            {"XSOCKEYE_SLOT=5", "SOCKEYE_SLOTS=6"},
		"3":                           {"A=\nSOCKEYE_SLOT=9", "SOCKEYE_SLOT=3"},
		"1=2 3":                       {"SOCKEYE_SLOT=1=2 3"},
		strings.Repeat("1", maxValue): {"SOCKEYE_SLOT=" + strings.Repeat("1", 100_000)},
	} {
		c := start(t, "sleep", nil, func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, env...) })
		p, err := Read(c.pid())
		check(t, err)
		if got := p.SlotVariable(); got != want {
			t.Errorf("%q: %q, want %q", env, got, want)
		}
		check(t, c.Process.Kill())
		c.Wait()
		if got := p.SlotVariable(); got != want {
			t.Errorf("%q, after its end: %q, want %q", env, got, want)
		}
	}
}

// TestRemember recalls attributes that the process has overwritten.
func TestRemember(t *testing.T) {
	first := FromRecord(12, 34, []string{"nfacctd", "-f", "x-3.conf"}, "3", "", FileID{})
	p := &Process{PID: 12, StartTime: 34, Args: []string{"nfacctd: Core Process [default]"}}
	p.RecallFirstSeen(first)
	if p.Command() != "nfacctd -f x-3.conf" || p.SlotVariable() != "3" {
		t.Errorf("%q, slot %q", p.Command(), p.SlotVariable())
	}
	self, err := Read(os.Getpid())
	check(t, err)
	self.RecallFirstSeen(FromRecord(os.Getpid(), self.StartTime, self.Args, "", "", FileID{}))
	t.Setenv("SOCKEYE_SLOT", "4")
	if got := self.SlotVariable(); got != "" {
		t.Errorf("slot %q, want none", got)
	}
}

// TestHugeCommandLine reads a process whose arguments exceed the limit. A process can set the range of its arguments
// (PR_SET_MM_MAP) to gigabytes without a cost.
func TestHugeCommandLine(t *testing.T) {
	c := start(t, "sleep", nil, func(cmd *exec.Cmd) {
		cmd.Args = append(cmd.Args, slices.Repeat([]string{"a"}, 3*maxArgs)...)
		cmd.Args = append(cmd.Args, strings.Repeat("x", 2*maxText))
	})
	p, err := Read(c.pid())
	check(t, err)
	if size := len(p.Command()); size > maxText || len(p.Args) > maxArgs {
		t.Errorf("%d bytes in %d arguments are kept, want %d in %d at most", size, len(p.Args), maxText, maxArgs)
	}
	if !strings.HasPrefix(strings.Join(p.Args[1:], " "), "a a a a ") {
		t.Errorf("the beginning is %.20q", p.Args)
	}
}
