// SPDX-License-Identifier: Apache-2.0

package netif_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/netif/netiftest"
	"sockeye/internal/fault"
	"sockeye/internal/linux"
	"sockeye/internal/testenv"
)

// olderThan reports whether the kernel is older than a version.
func olderThan(t testing.TB, major, minor int) bool {
	t.Helper()
	release, _, err := linux.Uname()
	if err != nil {
		t.Fatal(err)
	}
	var running [2]int
	if _, err := fmt.Sscanf(release, "%d.%d", &running[0], &running[1]); err != nil {
		t.Fatal(err)
	}
	return running[0] < major || running[0] == major && running[1] < minor
}

// processNetns starts a process in a new network namespace, and returns the path of the
// namespace.
func processNetns(t testing.TB) string {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), waitEnv+"=1")
	// The process exits when its input is closed. PR_SET_PDEATHSIG would kill it when the
	// thread that started it exits.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		cmd.Wait()
	})
	return fmt.Sprintf("/proc/%d/ns/net", cmd.Process.Pid)
}

func TestOpenNamespace(t *testing.T) {
	path := netiftest.NamedNetns(t, "first")
	other := netiftest.NamedNetns(t, "second")
	own, first, again, second := netiftest.Open(t, ""), netiftest.Open(t, path), netiftest.Open(t, path), netiftest.Open(t, other)
	if own.Path() != "" || first.Path() != path {
		t.Errorf("paths are %q and %q", own.Path(), first.Path())
	}
	if first.ID() != again.ID() || first.ID() == own.ID() || first.ID() == second.ID() {
		t.Errorf("IDs are %d, %d and %d, %d", own.ID(), first.ID(), again.ID(), second.ID())
	}
}

func TestOpenNamespaceRefuses(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/no/such", dir, fifo, "/dev/null", "/proc/self/ns/mnt", "/etc/passwd", "\x00"} {
		n, err := netif.OpenNamespace(path)
		var e *fault.Error
		if !errors.As(err, &e) || e.Code != fault.CodeUsage || e.Hint == "" {
			t.Errorf("%q gives %v, %v", path, n, err)
		}
	}
}

func TestOpenNamespaceWithoutRights(t *testing.T) {
	path := netiftest.NamedNetns(t, "locked")
	testenv.WithoutRights(t, func() {
		if n, err := netif.OpenNamespace(path); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("another namespace gives %v, %v", n, err)
		}
		own, err := netif.OpenNamespace("")
		if err != nil {
			t.Fatal(err)
		}
		defer own.Close()
		if _, err := own.Interface("lo"); err != nil {
			t.Error(err)
		}
	})
}

func TestDo(t *testing.T) {
	path := netiftest.NamedNetns(t, "inside")
	netiftest.Add(t, netiftest.Kernel(t, path), &netlink.Bridge{LinkAttrs: netiftest.Named("inside0")})
	n := netiftest.Open(t, path)
	failed := errors.New("failed")
	err := n.Do(func() error {
		if _, err := netlink.LinkByName("inside0"); err != nil {
			return err
		}
		return failed
	})
	if !errors.Is(err, failed) {
		t.Error(err)
	}
	for range 100 {
		if _, err := netlink.LinkByName("inside0"); err == nil {
			t.Fatal("a thread stays in the namespace")
		}
	}
	err = netiftest.Open(t, "").Do(func() error {
		_, err := netlink.LinkByName("lo")
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

func TestNamedNamespaces(t *testing.T) {
	b, a := netiftest.NamedNetns(t, "b"), netiftest.NamedNetns(t, "a")
	if err := os.WriteFile(filepath.Join(netiftest.NamedDir, "none"), nil, 0o444); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(filepath.Join(netiftest.NamedDir, "none"))
	paths, err := netif.NamedNamespaces()
	if err != nil || !slices.Equal(paths, []string{a, b}) {
		t.Errorf("got %v, %v", paths, err)
	}
}
