// SPDX-License-Identifier: Apache-2.0

package netns_test

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/netns"
	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newNamespace(t testing.TB) *os.File {
	t.Helper()
	n, err := netns.New()
	check(t, err)
	t.Cleanup(func() { n.Close() })
	return n
}

// inode identifies the network namespace of the calling thread.
func inode(t testing.TB) uint64 {
	t.Helper()
	var stat unix.Stat_t
	check(t, unix.Stat("/proc/thread-self/ns/net", &stat))
	return stat.Ino
}

func inodeOf(t testing.TB, n *os.File) uint64 {
	t.Helper()
	var stat unix.Stat_t
	check(t, unix.Fstat(int(n.Fd()), &stat))
	return stat.Ino
}

func TestDo(t *testing.T) {
	n, home := newNamespace(t), inode(t)
	failure := errors.New("of f")
	err := netns.Do(n, func() error {
		if got := inode(t); got != inodeOf(t, n) {
			t.Errorf("in namespace %d, want %d", got, inodeOf(t, n))
		}
		if got, err := netns.Inode(); err != nil || got != inodeOf(t, n) {
			t.Errorf("in namespace %d, %v, want %d", got, err, inodeOf(t, n))
		}
		links, err := net.Interfaces()
		if err != nil || len(links) != 1 || links[0].Name != "lo" || links[0].Flags&net.FlagUp != 0 {
			t.Errorf("interfaces: %v, %v; want lo alone, down", links, err)
		}
		return failure
	})
	if !errors.Is(err, failure) {
		t.Errorf("got %v, want the error of f", err)
	}
	if got := inode(t); got != home {
		t.Errorf("back in namespace %d, want %d", got, home)
	}
	check(t, netns.Do(nil, func() error {
		if got := inode(t); got != home {
			t.Errorf("without a namespace: in %d, want %d", got, home)
		}
		return nil
	}))
}

// TestDoAtOnce enters several namespaces at the same time, and checks that no thread of the process stays in one of
// them.
func TestDoAtOnce(t *testing.T) {
	home := inode(t)
	var all sync.WaitGroup
	for range 4 {
		n := newNamespace(t)
		want := inodeOf(t, n)
		all.Go(func() {
			for range 200 {
				if err := netns.Do(n, func() error {
					runtime.Gosched()
					if got := inode(t); got != want {
						t.Errorf("in namespace %d, want %d", got, want)
					}
					return nil
				}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		left := ""
		threads, err := filepath.Glob("/proc/self/task/*/ns/net")
		check(t, err)
		for _, path := range threads {
			var stat unix.Stat_t
			if unix.Stat(path, &stat) == nil && stat.Ino != home {
				left = path
			}
		}
		if left == "" {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s is not in the process's namespace", left)
		}
	}
}

func TestDoWithoutRights(t *testing.T) {
	n := newNamespace(t)
	testenv.WithoutRights(t, func() {
		home := inode(t)
		err := netns.Do(n, func() error {
			t.Error("f ran")
			return nil
		})
		var enter *netns.EnterError
		if !errors.As(err, &enter) || !errors.Is(err, unix.EPERM) || enter.Name != n.Name() {
			t.Errorf("got %v, want an EnterError of EPERM", err)
		}
		if got := inode(t); got != home {
			t.Errorf("in namespace %d, want %d", got, home)
		}
	})
}

func TestOpen(t *testing.T) {
	n, err := netns.Open("/proc/thread-self/ns/net")
	check(t, err)
	defer n.Close()
	if here, err := netns.IsCurrent(n); err != nil || !here {
		t.Errorf("own namespace is current: got %v, %v", here, err)
	}
	if here, err := netns.IsCurrent(newNamespace(t)); err != nil || here {
		t.Errorf("another namespace is current: got %v, %v", here, err)
	}
	fifo := filepath.Join(t.TempDir(), "fifo")
	check(t, unix.Mkfifo(fifo, 0o600))
	for _, path := range []string{fifo, t.TempDir(), "/dev/null", "/proc/self/ns/mnt", "/etc/passwd"} {
		if _, err := netns.Open(path); !errors.Is(err, netns.ErrNotNamespace) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: got %v, want ErrNotNamespace", path, err)
		}
	}
	if _, err := netns.Open("/no/such"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing: got %v", err)
	}
}

func TestThread(t *testing.T) {
	home := inode(t)
	other := newNamespace(t)
	var thread int
	for range 50 { // some goroutine may be on the first thread
		check(t, netns.Thread(func() error {
			if thread = unix.Gettid(); thread == unix.Getpid() {
				t.Error("runs on the first thread")
			}
			return netns.Enter(other)
		}))
		if got := inode(t); got != home {
			t.Fatalf("in namespace %d, want %d", got, home)
		}
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat("/proc/self/task/" + strconv.Itoa(thread)); errors.Is(err, fs.ErrNotExist) {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the thread has not ended")
		}
	}
	check(t, netns.Thread(func() error {
		runtime.Goexit()
		return nil
	}))
}

func TestCookie(t *testing.T) {
	other := newNamespace(t)
	own, err := netns.Cookie(nil)
	if errors.Is(err, unix.ENOPROTOOPT) {
		t.Skip("kernel: SO_NETNS_COOKIE is Linux 5.14")
	}
	check(t, err)
	here, err := netns.Current()
	check(t, err)
	defer here.Close()
	theirs, err := netns.Cookie(other)
	check(t, err)
	if own == 0 || theirs == 0 || own == theirs {
		t.Errorf("cookies %d and %d", own, theirs)
	}
	testenv.WithoutRights(t, func() {
		// Entering the thread's own namespace needs no capability.
		if got, err := netns.Cookie(here); err != nil || got != own {
			t.Errorf("own cookie: got %d, %v, want %d", got, err, own)
		}
		if _, err := netns.Cookie(other); !errors.Is(err, unix.EPERM) {
			t.Errorf("cookie of another namespace: got %v, want EPERM", err)
		}
	})
}

// TestNewSmall checks that a namespace has a connection table of its own, and that the caller stays where it is. A negative
// number of entries means that the table is shared (tcp_ehash_entries, Linux 6.1).
func TestNewSmall(t *testing.T) {
	home := inode(t)
	n, err := netns.NewSmall()
	check(t, err)
	defer n.Close()
	if got := inode(t); got != home {
		t.Errorf("in namespace %d, want %d", got, home)
	}
	check(t, netns.Do(n, func() error {
		text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_ehash_entries")
		if errors.Is(err, fs.ErrNotExist) {
			t.Skip("kernel: no tables of namespaces before Linux 6.1")
		}
		if strings.TrimSpace(string(text)) != "4096" {
			t.Errorf("tcp_ehash_entries: %s, %v", text, err)
		}
		return nil
	}))
}
