// SPDX-License-Identifier: Apache-2.0

package bigtcp_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp"
	"sockeye/internal/netns"
	"sockeye/internal/testenv"
)

const namedDir = "/run/netns"

// hideNamed puts a folder of our own over that of the host's named namespaces.
var hideNamed = sync.OnceValue(func() error {
	if err := os.MkdirAll(namedDir, 0o755); err != nil {
		return err
	}
	return unix.Mount("tmpfs", namedDir, "tmpfs", 0, "mode=0755")
})

// namedNetns makes a network namespace with a name, as ip netns add does, and
// returns its path.
func namedNetns(t testing.TB, name string) string {
	t.Helper()
	if err := hideNamed(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(namedDir, name)
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	inNewNetns(t, func() error { return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "") })
	t.Cleanup(func() { removeNetns(path) })
	return path
}

func removeNetns(path string) {
	unix.Unmount(path, unix.MNT_DETACH)
	os.Remove(path)
}

// heldNetns makes a network namespace that only a descriptor keeps: no name and no
// process leads to it.
func heldNetns(t testing.TB) *os.File {
	t.Helper()
	var held *os.File
	inNewNetns(t, func() (err error) {
		held, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	t.Cleanup(func() { held.Close() })
	return held
}

func inNewNetns(t testing.TB, f func() error) {
	t.Helper()
	err := netns.Thread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
	if err != nil {
		t.Fatal(err)
	}
}

// olderThan tells whether the kernel is older than a version.
func olderThan(t testing.TB, major, minor int) bool {
	t.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	var running [2]int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &running[0], &running[1]); err != nil {
		t.Fatal(err)
	}
	return running[0] < major || running[0] == major && running[1] < minor
}

// processNetns starts a process in a network namespace of its own, and returns the
// path of that.
func processNetns(t testing.TB) string {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), waitEnv+"=1")
	// It ends with its input: a signal for its parent's death would come when the
	// thread ends that started it.
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

// network opens a namespace, "" for that of the tests.
func network(t testing.TB, path string) *bigtcp.Network {
	t.Helper()
	n, err := bigtcp.OpenNetwork(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

// kernel talks to the kernel in a namespace, beside what is tested.
func kernel(t testing.TB, path string) *netlink.Handle {
	t.Helper()
	var at *os.File
	var err error
	if path != "" {
		if at, err = netns.Open(path); err != nil {
			t.Fatal(err)
		}
		defer at.Close()
	}
	var h *netlink.Handle
	if err := netns.Do(at, func() error {
		h, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return h
}

// add makes an interface.
func add(t testing.TB, h *netlink.Handle, l netlink.Link) {
	t.Helper()
	if err := h.LinkAdd(l); err != nil {
		t.Fatalf("add %s %s: %v", l.Type(), l.Attrs().Name, err)
	}
	// It may have gone with its namespace.
	t.Cleanup(func() { _ = h.LinkDel(l) })
}

func named(name string) netlink.LinkAttrs {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	return attrs
}

// addVeth makes a pair, one end in the namespace of h and the other in that of a
// file, nil for the same.
func addVeth(t testing.TB, h *netlink.Handle, name, peer string, other *os.File) {
	t.Helper()
	v := &netlink.Veth{LinkAttrs: named(name), PeerName: peer}
	if other != nil {
		v.PeerNamespace = netlink.NsFd(int(other.Fd()))
	}
	add(t, h, v)
}

func openFile(t testing.TB, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestOpenNetwork(t *testing.T) {
	path := namedNetns(t, "first")
	other := namedNetns(t, "second")
	own, first, again, second := network(t, ""), network(t, path), network(t, path), network(t, other)
	if own.Path() != "" || first.Path() != path {
		t.Errorf("paths are %q and %q", own.Path(), first.Path())
	}
	if first.ID() != again.ID() || first.ID() == own.ID() || first.ID() == second.ID() {
		t.Errorf("IDs are %d, %d and %d, %d", own.ID(), first.ID(), again.ID(), second.ID())
	}
}

func TestOpenNetworkRefuses(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/no/such", dir, fifo, "/dev/null", "/proc/self/ns/mnt", "/etc/passwd", "\x00"} {
		n, err := bigtcp.OpenNetwork(path)
		var e *bigtcp.Error
		if !errors.As(err, &e) || e.Kind != bigtcp.KindUsage || e.Hint == "" {
			t.Errorf("%q gives %v, %v", path, n, err)
		}
	}
}

func TestOpenNetworkWithoutRights(t *testing.T) {
	path := namedNetns(t, "locked")
	testenv.WithoutRights(t, func() {
		if n, err := bigtcp.OpenNetwork(path); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("another namespace gives %v, %v", n, err)
		}
		own, err := bigtcp.OpenNetwork("")
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
	path := namedNetns(t, "inside")
	add(t, kernel(t, path), &netlink.Bridge{LinkAttrs: named("inside0")})
	n := network(t, path)
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
	err = network(t, "").Do(func() error {
		_, err := netlink.LinkByName("lo")
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

func TestNetworkPaths(t *testing.T) {
	b, a := namedNetns(t, "b"), namedNetns(t, "a")
	if err := os.WriteFile(filepath.Join(namedDir, "none"), nil, 0o444); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(filepath.Join(namedDir, "none"))
	paths, err := bigtcp.NetworkPaths()
	if err != nil || !slices.Equal(paths, []string{a, b}) {
		t.Errorf("got %v, %v", paths, err)
	}
}

// descriptors counts those that this process has open.
func descriptors(t testing.TB) int {
	t.Helper()
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(open)
}
