// SPDX-License-Identifier: Apache-2.0

// Package testenv runs tests in a separate network and mount namespace and in a
// separate cgroup, with a bpffs if needed. The tests do not affect the host, and
// testenv removes the cgroup afterwards. It also has the sockets that several packages
// need.
package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/rlimit"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/cgroup"
	"sockeye/internal/netns"
)

const marker = "SOCKEYE_TEST_NAMESPACE"

// MainWithMaps is Main for tests that create BPF maps: before Linux 5.11, maps are
// charged to RLIMIT_MEMLOCK.
func MainWithMaps(m *testing.M) {
	if err := rlimit.RemoveMemlock(); err != nil {
		fmt.Fprintln(os.Stderr, "testenv:", err)
		os.Exit(1)
	}
	Main(m)
}

// Main runs the tests of a package in new namespaces, with lo up. Main must be
// called from TestMain, as root.
func Main(m *testing.M) {
	if os.Getenv(marker) != "" {
		if err := enter(); err != nil {
			fmt.Fprintln(os.Stderr, "testenv:", err)
			os.Exit(1)
		}
		os.Exit(Run(m))
	}
	os.Exit(isolate())
}

// isolate runs this program again in new namespaces and a new cgroup, and returns
// the exit code.
func isolate() (code int) {
	dir, err := newCgroup()
	if err != nil {
		fmt.Fprintln(os.Stderr, "testenv:", err)
		return 1
	}
	// Destroy kills processes that the tests left running.
	defer func() {
		pids, _ := cgroup.Processes(dir)
		// A process that was told to end may wait for a CPU.
		for start := time.Now(); len(pids) > 0 && time.Since(start) < 10*time.Second; pids, _ = cgroup.Processes(dir) {
			time.Sleep(Backoff(start))
		}
		for _, pid := range pids {
			text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			fmt.Printf("testenv: process %d is still running: %q\n", pid, text)
			code = max(code, 1)
		}
		if err := cgroup.Destroy(dir); err != nil {
			fmt.Fprintln(os.Stderr, "testenv:", err)
		}
	}()
	// The parent keeps the thread: Pdeathsig is sent when the thread exits that has started the child.
	runtime.LockOSThread()
	if err := netns.EnterParent(); err != nil {
		fmt.Fprintln(os.Stderr, "testenv:", err)
		return 1
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), marker+"="+dir)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS,
		Pdeathsig:  unix.SIGKILL,
	}
	// The terminal also sends SIGINT and SIGQUIT to the child, which then exits. signal.Ignore would make the child
	// ignore the signals too.
	signal.Notify(make(chan os.Signal, 1), unix.SIGINT, unix.SIGQUIT)
	terminated := make(chan os.Signal, 1)
	signal.Notify(terminated, unix.SIGTERM, unix.SIGHUP)
	if err = cmd.Start(); err == nil {
		go func() {
			<-terminated
			cmd.Process.Kill()
		}()
		err = cmd.Wait()
	}
	if cmd.ProcessState == nil {
		fmt.Fprintln(os.Stderr, "testenv:", err)
		return 1
	}
	if code := cmd.ProcessState.ExitCode(); code >= 0 {
		return code
	}
	fmt.Fprintln(os.Stderr, "testenv:", cmd.ProcessState)
	return 1
}

func enter() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	// The child moves itself, so that all its threads are in the cgroup.
	return cgroup.Move(Cgroup(), 0)
}

// Cgroup returns the directory of the tests' cgroup.
func Cgroup() string { return os.Getenv(marker) }

// CgroupPath returns the path of the tests' cgroup as in /proc/PID/cgroup.
func CgroupPath() string { return "/" + filepath.Base(Cgroup()) }

const cgroupPrefix = "sockeye-test-"

// newCgroup creates the tests' cgroup, and removes cgroups of test programs that were killed.
func newCgroup() (string, error) {
	mount, err := cgroup.Mount()
	if err != nil {
		return "", err
	}
	for _, dir := range cgroup.Stale(mount, cgroupPrefix, "") {
		_ = cgroup.Destroy(dir) // another test program may do the same
	}
	return cgroup.Make(mount, cgroupPrefix, "")
}

// BPFFS mounts a bpffs for a test and returns the mount point.
func BPFFS(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("bpffs", dir, "bpf", 0, "mode=0700"); err != nil {
		t.Fatalf("mount bpffs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount bpffs: %v", err)
		}
	})
	return dir
}

// WithoutRights runs f on a thread without capabilities.
func WithoutRights(t testing.TB, f func()) {
	t.Helper()
	WithRights(t, nil, f)
}

// WithRights runs f on a thread that has only the given capabilities (CAP_*).
func WithRights(t testing.TB, caps []int, f func()) {
	t.Helper()
	if err := probeKernel(); err != nil {
		t.Fatal(err)
	}
	err := netns.Thread(func() error {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		for _, c := range caps {
			data[c/32].Permitted |= 1 << (c % 32)
			data[c/32].Effective |= 1 << (c % 32)
		}
		if err := unix.Capset(&header, &data[0]); err != nil {
			return os.NewSyscallError("capset", err)
		}
		f()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// probeKernel makes the BPF library probe the kernel with all capabilities.
//
// The library interprets EPERM as "not supported", and caches the result for the
// process. Without this call, after the first test that drops capabilities, later
// tests would load programs without object names and without BTF. Without BTF, the
// verifier follows each call of a global function, and rejects tune_sockops after
// 1,000,000 instructions.
func probeKernel() error {
	number := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}
	m, err := ebpf.NewMap(&ebpf.MapSpec{
		Name: "rights", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1, Key: number, Value: number,
	})
	if err != nil {
		return err
	}
	m.Close()
	function := &btf.Func{Name: "rights", Type: &btf.FuncProto{Return: number}, Linkage: btf.GlobalFunc}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "rights", Type: ebpf.SocketFilter, License: "Apache-2.0",
		Instructions: asm.Instructions{
			btf.WithFuncMetadata(asm.Mov.Imm(asm.R0, 0).WithSymbol(function.Name), function),
			asm.Return(),
		},
	})
	if err != nil {
		return err
	}
	return p.Close()
}

// Backoff returns the pause between two attempts of a test that has waited for a condition since start: a tenth of the
// time waited, between 5 and 100 ms. The CPUs are left to the tests beside it.
func Backoff(start time.Time) time.Duration {
	return min(max(time.Since(start)/10, 5*time.Millisecond), 100*time.Millisecond)
}
