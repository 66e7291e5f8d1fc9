// SPDX-License-Identifier: Apache-2.0

package member

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
)

// TestAdmitUser checks that all user ids of a process are checked.
func TestAdmitUser(t *testing.T) {
	for _, test := range []struct {
		uids  UIDs
		users []uint32
		want  string
	}{
		{UIDs{0, 0, 0, 0}, []uint32{0}, ""},
		{UIDs{7001, 7001, 7001, 7001}, []uint32{0, 7001}, ""},
		{UIDs{0, 7001, 0, 7001}, []uint32{0, 7001}, ""},
		{UIDs{7001, 7001, 7001, 7001}, []uint32{0}, "it runs as user 7001, not as root"},
		{UIDs{7001, 0, 0, 0}, []uint32{0}, "it runs as user 7001 (effective root, saved root), not as root"},
		{UIDs{0, 0, 7001, 0}, []uint32{0}, "it runs as user root (effective root, saved 7001), not as root"},
		{UIDs{0, 7001, 0, 7001}, []uint32{0}, "it runs as user root (effective 7001, saved root), not as root"},
		{UIDs{0, 0, 0, 7001}, []uint32{0}, "it runs as user root (effective root, saved root), not as root"},
		{UIDs{1, 1, 1, 1}, []uint32{0, 7001, 7002}, "it runs as user " + UserName(1) + ", not as root, 7001 or 7002"},
	} {
		err := AdmitUser(&Process{UIDs: test.uids}, test.users)
		if got := text(err); got != test.want {
			t.Errorf("%v of %v: %q, want %q", test.uids, test.users, got, test.want)
		}
	}
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestParseUIDs(t *testing.T) {
	for status, want := range map[string]UIDs{
		"Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t5\t5\t5\n":   {1, 2, 3, 4},
		"Name:\tUid: 9 9 9 9\nUid:\t0\t0\t0\t4294967294\n": {0, 0, 0, 4294967294},
	} {
		if got, err := parseUIDs([]byte(status)); err != nil || got != want {
			t.Errorf("%q: %v, %v", status, got, err)
		}
	}
	for _, status := range []string{"", "Uid:\n", "Uid:\t0\t0\t0\n", "Uid:\t0\t0\t0\t-1\n", "Uid:\t0\t0\t0\t4294967296\n", "uid:\t0\t0\t0\t0\n", " Uid:\t0\t0\t0\t0\n"} {
		if got, err := parseUIDs([]byte(status)); err == nil {
			t.Errorf("%q: %v", status, got)
		}
	}
}

// TestUsers checks the users of rules and services.
func TestUsers(t *testing.T) {
	rules, err := Rules([]config.Member{{Match: config.MemberMatch{User: "7001"}}, {Match: config.MemberMatch{User: "root"}}, {Match: config.MemberMatch{User: "0"}}})
	check(t, err)
	for _, test := range []struct {
		names []string
		rules []Rule
		want  []uint32
	}{
		{nil, nil, nil},
		{[]string{"root", "7002"}, rules, []uint32{0, 7002}},
		{[]string{"root", "7002", "0", "7002"}, nil, []uint32{0, 7002}},
		{nil, rules, []uint32{7001, 0}},
	} {
		got, err := Users(test.names, test.rules)
		check(t, err)
		if !slices.Equal(got, test.want) {
			t.Errorf("%v: %v, want %v", test.names, got, test.want)
		}
	}
	if _, err := Users([]string{"no-such-user"}, nil); err == nil || !strings.Contains(err.Error(), "no-such-user") {
		t.Errorf("%v, want an error that names the user", err)
	}
	if got := rules[0].Users([]uint32{5}); !slices.Equal(got, []uint32{7001}) {
		t.Errorf("users of a rule with a user: %v", got)
	}
	var none Rule
	if got := none.Users([]uint32{5, 6}); !slices.Equal(got, []uint32{5, 6}) {
		t.Errorf("users of a rule without a user: %v", got)
	}
}

// TestAdmit checks processes in real namespaces.
func TestAdmit(t *testing.T) {
	host, err := ReadHost()
	check(t, err)
	exe, err := os.Readlink("/proc/self/exe")
	check(t, err)
	namespaces := func(flags uintptr) func(*exec.Cmd) {
		return func(cmd *exec.Cmd) {
			cmd.SysProcAttr.Cloneflags = flags
			if flags&unix.CLONE_NEWUSER != 0 {
				root := []syscall.SysProcIDMap{{HostID: 0, ContainerID: 0, Size: 1}}
				cmd.SysProcAttr.UidMappings, cmd.SysProcAttr.GidMappings = root, root
			}
		}
	}
	plain := config.Member{Namespaces: config.HostNamespaces}
	unit := config.Member{Namespaces: config.HostNamespaces, Match: config.MemberMatch{SystemdUnit: "*"}}
	anywhere := config.Member{Namespaces: config.AnyNamespaces, Match: config.MemberMatch{Executable: exe}}
	const user, mount = "it is in a user namespace of its own", "it is in a mount namespace of its own"
	for _, test := range []struct {
		name   string
		flags  uintptr
		cgroup string
		rule   config.Member
		want   string
	}{
		{"the host's", 0, "", plain, ""},
		{"a mount namespace", unix.CLONE_NEWNS, "", plain, mount},
		{"a user namespace", unix.CLONE_NEWUSER, "", plain, user},
		{"both", unix.CLONE_NEWUSER | unix.CLONE_NEWNS, "", plain, user},
		{"both, any", unix.CLONE_NEWUSER | unix.CLONE_NEWNS, "", anywhere, ""},
		{"a unit's mounts", unix.CLONE_NEWNS, "/system.slice/a.service", unit, ""},
		{"a unit's mounts, another rule", unix.CLONE_NEWNS, "/system.slice/a.service", plain, mount},
		{"a unit's users", unix.CLONE_NEWUSER, "/system.slice/a.service", unit, user},
		{"no unit's mounts", unix.CLONE_NEWNS, "/a", unit, mount},
		{"a user's own unit", unix.CLONE_NEWNS, "/user.slice/user-1.slice/user@1.service/a.service", unit, mount},
		{"a session", unix.CLONE_NEWNS, "/user.slice/user-1.slice/session-1.scope", unit, mount},
	} {
		c := start(t, "sleep", nil, namespaces(test.flags))
		p, err := Read(c.pid())
		check(t, err)
		if test.cgroup != "" {
			p.Cgroup = test.cgroup
		}
		r := rule(t, test.rule)
		err = r.Admit(p, []uint32{0}, host)
		if got := text(err); got != test.want {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
		if refusal := (*Refusal)(nil); err != nil && (!errors.As(err, &refusal) || refusal.Hint == "") {
			t.Errorf("%s: no hint", test.name)
		}
	}
}

// TestHostFile checks that hasFile follows links, and returns false for a replaced file.
func TestHostFile(t *testing.T) {
	host, err := ReadHost()
	check(t, err)
	dir := t.TempDir()
	program, other, link := filepath.Join(dir, "program"), filepath.Join(dir, "other"), filepath.Join(dir, "link")
	for _, path := range []string{program, other} {
		data, err := os.ReadFile("/proc/self/exe")
		check(t, err)
		check(t, os.WriteFile(path, data, 0o755))
	}
	check(t, os.Symlink(program, link))
	c := start(t, "sleep", nil, func(cmd *exec.Cmd) { cmd.Path = program })
	p, err := Read(c.pid())
	check(t, err)
	if p.Exe != program {
		t.Errorf("executable %s", p.Exe)
	}
	for path, want := range map[string]bool{program: true, link: true, other: false, dir: false, dir + "/none": false, "": false, "/": false} {
		if got := host.hasFile(path, p.File); got != want {
			t.Errorf("%q: %v, want %v", path, got, want)
		}
	}
	r := rule(t, config.Member{Match: config.MemberMatch{Executable: program}, Namespaces: config.HostNamespaces})
	check(t, r.Admit(p, []uint32{0}, host))
	exe, file := p.VerifiedExecutable()
	if exe != program || file != p.File {
		t.Errorf("proven: %s %v", exe, file)
	}
	check(t, os.Rename(other, program))
	now, err := Read(c.pid())
	check(t, err)
	if !r.Matches(now) || r.Admit(now, []uint32{0}, host) == nil {
		t.Errorf("a process whose file was replaced: %+v", now)
	}
	now.RecallFirstSeen(FromRecord(p.PID, p.StartTime, p.Args, "", exe, file))
	check(t, r.Admit(now, []uint32{0}, host))
	// After execve, the process runs an executable that is not recorded.
	now.File, now.exeVerified = FileID{1, 2}, false
	now.RecallFirstSeen(FromRecord(p.PID, p.StartTime, p.Args, "", exe, file))
	if r.Admit(now, []uint32{0}, host) == nil {
		t.Error("hasFile accepts another file")
	}
}

// TestHostRoots checks an agent in a hardened unit, which does not see all files: files are found in the root of
// process 1, and links are resolved in that root.
func TestHostRoots(t *testing.T) {
	blind, seeing := t.TempDir(), t.TempDir()
	check(t, os.WriteFile(filepath.Join(seeing, "program"), nil, 0o755))
	check(t, os.Symlink("/program", filepath.Join(seeing, "absolute")))
	check(t, os.Symlink("../../../program", filepath.Join(seeing, "above")))
	check(t, os.Symlink("/etc/passwd", filepath.Join(seeing, "outside")))
	check(t, os.Symlink("self", filepath.Join(seeing, "self")))
	deep := strings.Repeat("d/", mostDirs)
	check(t, os.MkdirAll(filepath.Join(seeing, deep), 0o755))
	check(t, os.WriteFile(filepath.Join(seeing, deep, "program"), nil, 0o755))
	var stat, outside unix.Stat_t
	check(t, unix.Stat(filepath.Join(seeing, "program"), &stat))
	check(t, unix.Stat("/etc/passwd", &outside))
	host := &Host{roots: []string{blind, blind + "/none", seeing}}
	for _, path := range []string{"/program", "program", "/absolute", "/above"} {
		if !host.hasFile(path, fileID(&stat)) {
			t.Errorf("%s is not found", path)
		}
	}
	if host.hasFile("/outside", fileID(&outside)) || host.hasFile("/program", fileID(&outside)) {
		t.Error("a file of another root is found")
	}
	dir, err := unix.Open(seeing, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	check(t, err)
	defer unix.Close(dir)
	for path, want := range map[string]error{"self": unix.ELOOP, deep + "program": unix.ENAMETOOLONG, "program/x": unix.ENOTDIR, "none": unix.ENOENT, "/..": unix.EISDIR} {
		if fd, err := openInRoot(dir, path); !errors.Is(err, want) {
			t.Errorf("%.20s: %d, %v, want %v", path, fd, err, want)
		}
	}
}

// TestHostRootsRenames resolves ".." while files are renamed.
func TestHostRootsRenames(t *testing.T) {
	root := t.TempDir()
	check(t, os.Mkdir(filepath.Join(root, "dir"), 0o755))
	check(t, os.WriteFile(filepath.Join(root, "program"), nil, 0o755))
	var stat unix.Stat_t
	check(t, unix.Stat(filepath.Join(root, "program"), &stat))
	a, b := filepath.Join(t.TempDir(), "a"), filepath.Join(t.TempDir(), "b")
	check(t, os.WriteFile(a, nil, 0o644))
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				_, _ = os.Rename(a, b), os.Rename(b, a)
			}
		}
	}()
	host := &Host{roots: []string{root}}
	for range 5000 {
		if !host.hasFile("/dir/../dir/../dir/../program", fileID(&stat)) {
			t.Error("the program is not found")
			break
		}
	}
	close(stop)
	<-done
}

// TestSocketOwner checks that the owner and the network namespace of a socket do not depend on the process.
func TestSocketOwner(t *testing.T) {
	for _, test := range []struct {
		name  string
		uid   uint32
		flags uintptr
	}{{"own", 0, 0}, {"another user's", 7001, 0}, {"of a namespace", 0, unix.CLONE_NEWNET}} {
		c := start(t, "listen", nil, func(cmd *exec.Cmd) {
			cmd.SysProcAttr.Cloneflags = test.flags
			cmd.SysProcAttr.Credential = &syscall.Credential{Uid: test.uid}
		})
		h, err := Open(c.pid())
		check(t, err)
		defer h.Close()
		p, err := Read(c.pid())
		check(t, err)
		self, err := Read(os.Getpid())
		check(t, err)
		sockets, err := h.Sockets(all)
		check(t, err)
		if len(sockets) != 2 || (p.Netns != self.Netns) != (test.flags != 0) {
			t.Fatalf("%s: %d sockets, namespaces %d and %d", test.name, len(sockets), p.Netns, self.Netns)
		}
		for _, s := range sockets {
			netns, err := s.Netns()
			if err != nil || netns != p.Netns || s.UID != test.uid {
				t.Errorf("%s: %s has user %d and namespace %d, %v, want %d and %d", test.name, s, s.UID, netns, err, test.uid, p.Netns)
			}
		}
		CloseAll(sockets)
		check(t, c.Process.Kill())
		c.Wait()
	}
}
