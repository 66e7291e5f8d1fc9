// SPDX-License-Identifier: Apache-2.0

//go:build vm

package selftest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/cli"
	"sockeye/internal/doctor"
	"sockeye/internal/fault"
	"sockeye/internal/mountinfo"
	"sockeye/internal/testenv"
)

// onHost is the name under which the test binary prepares a host and runs the binary of Sockeye there.
const onHost = "on-host"

func TestMain(m *testing.M) {
	switch filepath.Base(os.Args[0]) {
	case "sockeye":
		os.Exit(cli.Main(os.Args[1:], cli.Host()))
	case onHost:
		if err := runOnHost(os.Args[1], os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(testenv.Run(m))
}

// Directories of the agents. They are below directories of the test, because a start creates missing parents, too.
const (
	base     = "/tmp/hosts"
	bpffs    = base + "/bpf"
	pins     = bpffs + "/sockeye"
	stateDir = base + "/lib/sockeye"
	runDir   = base + "/run/sockeye"
	policy   = base + "/policy.yaml"
	binary   = base + "/sockeye" // a link to the test binary
)

const goodPolicy = `services:
  telemetry:
    slots: 2
    user: nobody
    listeners:
      - {protocol: tcp, address: "[::]:1790"}
      - {protocol: udp, address: "[::]:4739"}
    members:
      - {match: {executable: /usr/sbin/nfacctd}, slot: free}
`

// hosts change the mount namespace or the system calls of a process.
var hosts = map[string]func() error{
	"good":           func() error { return nil },
	"cgroup v1 only": cgroupV1,
	"no cgroup v2":   withoutCgroups,
	"v2 beside v1": func() error {
		return errors.Join(cgroupV1(), os.MkdirAll("/run/cgroup2", 0o755), unix.Mount("none", "/run/cgroup2", "cgroup2", 0, ""))
	},
	"no bpffs":        func() error { return unix.Unmount(bpffs, 0) },
	"no mount(2)":     func() error { return errors.Join(unix.Unmount(bpffs, 0), filter(refuse(unix.SYS_MOUNT, unix.EPERM))) },
	"no BPF":          func() error { return filter(refuse(unix.SYS_BPF, unix.ENOSYS)) },
	"BPF forbidden":   func() error { return filter(refuse(unix.SYS_BPF, unix.EPERM)) },
	"links forbidden": func() error { return filter(refuseBPF(linkCreate, linkCreate, unix.EPERM)) },
	"Linux 5.4": func() error {
		return filter(append(refuseBPF(since56, 255, unix.EINVAL), refuseFrom(closeRange, unix.ENOSYS)...))
	},
	"user namespace": func() error { return nil },
}

// The boundary of Linux 5.4: what a seccomp filter can refuse of later kernels. It does not see the types of maps and
// programs, which are in memory: a real Linux 5.4 lacks ring buffers and sk_lookup, too.
const (
	since56    = 24  // BPF_MAP_LOOKUP_BATCH, the first command of bpf(2) since 5.6
	linkCreate = 28  // BPF_LINK_CREATE
	closeRange = 436 // the first system call since 5.9; 435 is of 5.3
)

func withoutCgroups() error {
	err := unix.Unmount("/sys/fs/cgroup", unix.MNT_DETACH)
	text, readErr := os.ReadFile("/proc/self/mountinfo")
	if strings.Contains(string(text), " - cgroup2 ") {
		return errors.New("a cgroup v2 is still mounted")
	}
	return errors.Join(err, readErr)
}

// cgroupV1 mounts a hierarchy of cgroup v1 as systemd does, without controllers: the kernel's are in use by cgroup v2.
func cgroupV1() error {
	const dir = "/sys/fs/cgroup/systemd"
	if err := withoutCgroups(); err != nil {
		return err
	}
	return errors.Join(unix.Mount("tmpfs", "/sys/fs/cgroup", "tmpfs", 0, "mode=0755"), os.Mkdir(dir, 0o755),
		unix.Mount("cgroup", dir, "cgroup", 0, "none,name=systemd"))
}

// Offsets in struct seccomp_data.
const (
	dataNumber   = 0
	dataArgument = 16
)

func load32(offset uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
}

// unless skips instructions if the comparison of the loaded value with k is false.
func unless(comparison uint16, k uint32, skip uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_K | comparison, K: k, Jf: skip}
}

func returnErrno(errno unix.Errno) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(errno)}
}

func refuse(number uint32, errno unix.Errno) []unix.SockFilter {
	return []unix.SockFilter{load32(dataNumber), unless(unix.BPF_JEQ, number, 1), returnErrno(errno)}
}

// refuseFrom refuses the system calls with a number or a higher one.
func refuseFrom(number uint32, errno unix.Errno) []unix.SockFilter {
	return []unix.SockFilter{load32(dataNumber), unless(unix.BPF_JGE, number, 1), returnErrno(errno)}
}

// refuseBPF refuses commands of bpf(2).
func refuseBPF(first, last uint32, errno unix.Errno) []unix.SockFilter {
	return []unix.SockFilter{
		load32(dataNumber), unless(unix.BPF_JEQ, unix.SYS_BPF, 4),
		load32(dataArgument), unless(unix.BPF_JGE, first, 2),
		{Code: unix.BPF_JMP | unix.BPF_K | unix.BPF_JGT, K: last, Jt: 1}, returnErrno(errno),
	}
}

// filter restricts all threads of this process, and what they start.
func filter(rules []unix.SockFilter) error {
	rules = append(rules, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW})
	program := unix.SockFprog{Len: uint16(len(rules)), Filter: &rules[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return os.NewSyscallError("seccomp", errno)
	}
	return nil
}

// outcome is the result of a command on a host.
type outcome struct {
	Code      int
	Out, Err  string
	Started   bool     // an agent answered, and was ended by SIGTERM
	Files     []string // below base, that the command has created
	Mounts    []string // mount points that the command has added
	Processes []string // of Sockeye, that the command has left
}

// traces are what a command of Sockeye can leave on a host.
type traces struct{ files, mounts, processes []string }

func findTraces() (*traces, error) {
	t := &traces{}
	err := filepath.WalkDir(base, func(path string, _ fs.DirEntry, err error) error {
		t.files = append(t.files, path)
		return err
	})
	if err != nil {
		return nil, err
	}
	mounts, err := mountinfo.Read()
	if err != nil {
		return nil, err
	}
	for _, m := range mounts {
		t.mounts = append(t.mounts, m.Point)
	}
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}
	for _, file := range commands {
		text, _ := os.ReadFile(file) // the process may have exited
		if args := strings.Split(string(text), "\x00"); filepath.Base(args[0]) == "sockeye" {
			t.processes = append(t.processes, filepath.Dir(file)+" "+strings.Join(args[1:], " "))
		}
	}
	return t, nil
}

// without returns what is in after and not in before.
func without(after, before []string) []string {
	return slices.DeleteFunc(after, func(s string) bool { return slices.Contains(before, s) })
}

// runOnHost prepares a host in this process, runs a command of Sockeye, and prints the outcome.
func runOnHost(name string, args []string) error {
	// The parent has given this process a mount namespace of its own.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	if err := hosts[name](); err != nil {
		return fmt.Errorf("prepare the host %q: %w", name, err)
	}
	before, err := findTraces()
	if err != nil {
		return err
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.Command(binary, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.WaitDelay = 10 * time.Second // a process that is left over may have the pipes
	if err := cmd.Start(); err != nil {
		return err
	}
	var o outcome
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // ProcessState has the exit code
		close(ended)
	}()
	deadline := time.After(2 * time.Minute)
	for exited := false; !exited; {
		select {
		case <-ended:
			exited = true
		case <-deadline:
			_ = cmd.Process.Kill()
			<-ended
			return fmt.Errorf("%v does not end: %s", args, stderr.String())
		case <-time.After(50 * time.Millisecond):
			if !o.Started && args[0] == "agent" && exec.Command(binary, "status", "--run-dir", runDir).Run() == nil {
				o.Started = true
				_ = cmd.Process.Signal(unix.SIGTERM)
			}
		}
	}
	o.Code, o.Out, o.Err = cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()
	after, err := findTraces()
	if err != nil {
		return err
	}
	o.Files, o.Mounts, o.Processes = without(after.files, before.files), without(after.mounts, before.mounts), without(after.processes, before.processes)
	return json.NewEncoder(os.Stdout).Encode(o)
}

// run runs a command on a host.
func run(t *testing.T, host string, args ...string) outcome {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", append([]string{host}, args...)...)
	cmd.Args[0] = onHost
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET}
	if host == "user namespace" {
		one := []syscall.SysProcIDMap{{Size: 65536}}
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings, cmd.SysProcAttr.GidMappings = one, one
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s, %v: %v: %s", host, args, err, stderr.String())
	}
	var o outcome
	if err := json.Unmarshal(out, &o); err != nil {
		t.Fatalf("%s, %v: %v: %s", host, args, err, out)
	}
	return o
}

// agent runs an agent until it is refused, or answers.
func agent(t *testing.T, host string) outcome {
	t.Helper()
	return run(t, host, "agent", "--policy", policy, "--pins", pins, "--state-dir", stateDir, "--run-dir", runDir)
}

// prepare makes the directory of the test, with a bpffs and a policy.
func prepare(t *testing.T) {
	t.Helper()
	self, err := os.Executable()
	if err == nil {
		err = errors.Join(os.MkdirAll(bpffs, 0o755), os.Symlink(self, binary), os.WriteFile(policy, []byte(goodPolicy), 0o644))
	}
	if err == nil {
		err = unix.Mount("bpffs", bpffs, "bpf", 0, "mode=0700")
	}
	t.Cleanup(func() {
		reset := exec.Command(binary, "reset", "--pins", pins, "--state-dir", stateDir)
		if out, err := reset.CombinedOutput(); err != nil {
			t.Errorf("reset: %v: %s", err, out)
		}
		if err := errors.Join(unix.Unmount(bpffs, unix.MNT_DETACH), os.RemoveAll(base)); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

// wantRefusal checks that a command printed one line with the message and one with the hint, and exited with the code.
func wantRefusal(t *testing.T, o outcome, code int, message, hint string) {
	t.Helper()
	lines := strings.Split(strings.TrimSuffix(o.Err, "\n"), "\n")
	if strings.Contains(lines[0], "cannot calibrate the room estimator") {
		lines = lines[1:] // a warning of an agent that has chosen its policy, on an emulated CPU that is busy
	}
	if o.Code != code || o.Out != "" || len(lines) != 2 || !strings.Contains(lines[0], message) || !strings.HasPrefix(strings.TrimSpace(lines[1]), "hint: ") || !strings.Contains(lines[1], hint) {
		t.Errorf("exit code %d, output %q, error\n%s\nwant exit code %d, %q, hint %q", o.Code, o.Out, o.Err, code, message, hint)
	}
}

// wantNothing checks that a command has left nothing on the host.
func wantNothing(t *testing.T, o outcome) {
	t.Helper()
	if len(o.Files)+len(o.Mounts)+len(o.Processes) > 0 {
		t.Errorf("left files %q, mounts %q, processes %q", o.Files, o.Mounts, o.Processes)
	}
}

// TestUnsuitableHosts runs commands on hosts that the agent cannot work on. The agent prints one error and one hint, exits
// with the documented code, and leaves nothing; doctor finds the same; check and status do not depend on the host.
func TestUnsuitableHosts(t *testing.T) {
	for _, c := range []struct {
		host          string
		code          int
		message, hint string // of the agent
		check         string // of doctor, that fails
	}{
		{"cgroup v1 only", fault.CodeUnsupported, "sockeye: find cgroup v2: it is not mounted", "boot with systemd.unified_cgroup_hierarchy=1, or mkdir /run/cgroup2", "cgroup v2"},
		{"no cgroup v2", fault.CodeUnsupported, "sockeye: find cgroup v2: it is not mounted", "hint: mount -t cgroup2 none /sys/fs/cgroup", "cgroup v2"},
		{"no mount(2)", fault.CodeNotPermitted, "sockeye: mount bpffs at " + bpffs + ": operation not permitted", "before the agent starts: mount -t bpf", ""},
		{"no BPF", fault.CodeUnsupported, "sockeye: start agent: call bpf(2): function not implemented: the kernel has no BPF, or a seccomp filter hides it", "CONFIG_BPF_SYSCALL", "bpf(2)"},
		{"BPF forbidden", fault.CodeNotPermitted, "sockeye: start agent: call bpf(2): operation not permitted: this process has a seccomp filter", "SystemCallFilter=", "bpf(2)"},
		{"user namespace", fault.CodeNotPermitted, "sockeye: start agent: call bpf(2): operation not permitted: this process is in a user namespace of its own", "run the agent in the host's user namespace", "bpf(2)"},
		{"links forbidden", fault.CodeNotPermitted, "sockeye: service telemetry: ", "", ""},
		{"Linux 5.4", fault.CodeUnsupported, "sockeye: start agent: this kernel lacks BPF links (Linux 5.7), pidfd_getfd (Linux 5.6)", "Sockeye needs Linux 5.10 or later", "BPF links"},
	} {
		t.Run(c.host, func(t *testing.T) {
			prepare(t)
			o := agent(t, c.host)
			wantRefusal(t, o, c.code, c.message, c.hint)
			wantNothing(t, o)

			o = run(t, c.host, "doctor", "--policy", policy, "--pins", pins, "--run-dir", runDir, "-o", "json")
			var findings []doctor.Finding
			if err := json.Unmarshal([]byte(o.Out), &findings); err != nil || o.Err != "" {
				t.Fatalf("doctor: %v in %+v", err, o)
			}
			code, found := 0, c.check == ""
			for _, f := range findings {
				if f.Result != doctor.Failure {
					continue
				}
				code, found = max(code, f.Code), found || f.Check == c.check
				if f.Hint == "" {
					t.Errorf("doctor: no hint in %+v", f)
				}
			}
			if c.check != "" && code != c.code || o.Code != code || !found {
				t.Errorf("doctor: exit code %d, want %d, and a failure of %q in\n%+v", o.Code, c.code, c.check, findings)
			}
			wantNothing(t, o)
			wantSame(t, c.host)
		})
	}
}

// wantSame checks the commands that do not depend on the host.
func wantSame(t *testing.T, host string) {
	t.Helper()
	if o := run(t, host, "check", policy); o.Code != 0 || o.Err != "" {
		t.Errorf("check: %+v", o)
	}
	o := run(t, host, "status", "--run-dir", runDir)
	wantRefusal(t, o, fault.CodeFailed, "sockeye: no agent answers on "+api.SocketPath(runDir), "")
	wantNothing(t, o)
}

// TestUnsuitablePolicies starts agents without a policy, and with one of an earlier version.
func TestUnsuitablePolicies(t *testing.T) {
	for _, c := range []struct {
		name, old, text string
		message, hint   string
	}{
		{"none", "", "", "sockeye: read policy file: open " + policy + ": no such file or directory", "sockeye init --write"},
		{"no user", "    user: nobody\n", "", policy + ":", "user"},
		{"old key", "telemetry:\n", "telemetry:\n    port_steering: true\n", policy + ":3:5: services.telemetry.port_steering: unknown key", "steering"},
	} {
		t.Run(c.name, func(t *testing.T) {
			// Also where the agent mounts the bpffs.
			for _, host := range []string{"good", "no bpffs"} {
				t.Run(host, func(t *testing.T) {
					prepare(t)
					err := os.Remove(policy)
					if c.old != "" {
						err = os.WriteFile(policy, []byte(strings.Replace(goodPolicy, c.old, c.text, 1)), 0o644)
					}
					if err != nil {
						t.Fatal(err)
					}
					o := agent(t, host)
					wantRefusal(t, o, fault.CodeUsage, c.message, c.hint)
					if host == "no bpffs" {
						o.Mounts = without(o.Mounts, []string{bpffs}) // others may have pins there already
					}
					wantNothing(t, o)
					o = run(t, host, "check", policy)
					wantRefusal(t, o, fault.CodeUsage, c.message, "")
					if o := run(t, host, "doctor", "--policy", policy, "--pins", pins, "--run-dir", runDir); o.Code != fault.CodeUsage {
						t.Errorf("doctor: %+v", o)
					}
				})
			}
		})
	}
}

// TestSuitableHosts starts agents on hosts that are unusual, and suitable.
func TestSuitableHosts(t *testing.T) {
	for _, host := range []string{"good", "no bpffs", "v2 beside v1"} {
		t.Run(host, func(t *testing.T) {
			prepare(t)
			o := agent(t, host)
			if o.Code != 0 || !o.Started {
				t.Errorf("%+v", o)
			}
			if host == "no bpffs" && !slices.Equal(o.Mounts, []string{bpffs}) {
				t.Errorf("mounts %q", o.Mounts)
			}
		})
	}
}

// TestForbiddenKeepsPins checks that an agent that may not call bpf(2) leaves the pins of the agent before alone, and does
// not advise to remove them.
func TestForbiddenKeepsPins(t *testing.T) {
	prepare(t)
	before := agent(t, "good")
	if !before.Started || len(before.Processes) != 1 {
		t.Fatalf("%+v, want one keeper", before)
	}
	o := agent(t, "BPF forbidden")
	wantRefusal(t, o, fault.CodeNotPermitted, "call bpf(2): operation not permitted", "SystemCallFilter=")
	if strings.Contains(o.Err, "reset") {
		t.Errorf("the error advises reset: %s", o.Err)
	}
	wantNothing(t, o)
	after, err := findTraces()
	if err != nil {
		t.Fatal(err)
	}
	if left := without(before.Files, after.files); len(left) > 0 {
		t.Errorf("the agent has removed %q", left)
	}
	if left := without(before.Processes, after.processes); len(left) > 0 {
		t.Errorf("the agent has ended %q", left)
	}
}
