// SPDX-License-Identifier: Apache-2.0

package procsock_test

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/testenv"
)

// pair is a loopback connection: the socket that connected and the socket that was accepted.
type pair struct{ connected, accepted *net.TCPConn }

// listen opens a listener that is not an MPTCP socket.
func listen(t testing.TB, address string) *net.TCPListener {
	t.Helper()
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	l, err := c.Listen(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

// connect opens a connection to a listener.
func connect(t testing.TB, l *net.TCPListener) pair {
	t.Helper()
	return connectTo(t, l, l.Addr().String())
}

func connectTo(t testing.TB, l *net.TCPListener, address string) pair {
	t.Helper()
	var d net.Dialer
	d.SetMultipathTCP(false)
	c, err := d.DialContext(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	a, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close() })
	return pair{c.(*net.TCPConn), a}
}

// newSocket opens a TCP socket with timeouts, which is closed at the end of the test.
func newSocket(t testing.TB, domain int) int {
	t.Helper()
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		t.Fatal(os.NewSyscallError("socket", err))
	}
	t.Cleanup(func() { unix.Close(fd) })
	for _, name := range []int{unix.SO_SNDTIMEO, unix.SO_RCVTIMEO} {
		if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, name, &unix.Timeval{Sec: 60}); err != nil {
			t.Fatal(os.NewSyscallError("setsockopt", err))
		}
	}
	return fd
}

func portOf(t testing.TB, fd int) int {
	t.Helper()
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(os.NewSyscallError("getsockname", err))
	}
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return sa.Port
	case *unix.SockaddrInet6:
		return sa.Port
	}
	t.Fatalf("socket of family %T", sa)
	return 0
}

// subgroup creates a cgroup below that of the tests.
func subgroup(t testing.TB, name string) string {
	t.Helper()
	dir := filepath.Join(testenv.Cgroup(), name)
	check(t, os.Mkdir(dir, 0o755))
	t.Cleanup(func() {
		within(t, "remove cgroup "+name, func() bool { return os.Remove(dir) == nil })
	})
	return dir
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// within waits until f returns true, and fails the test after one minute.
func within(t testing.TB, what string, f func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for !f() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Errorf("timeout: %s", what)
			return
		}
	}
}

func descriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	check(t, err)
	return len(entries)
}

func cookie(t testing.TB, fd int) uint64 {
	t.Helper()
	c, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	check(t, err)
	return c
}

func cookieOf(t testing.TB, c syscall.Conn) (value uint64) {
	t.Helper()
	raw, err := c.SyscallConn()
	check(t, err)
	check(t, raw.Control(func(fd uintptr) { value = cookie(t, int(fd)) }))
	return value
}

func addrPort(a net.Addr) netip.AddrPort {
	got := netip.MustParseAddrPort(a.String())
	return netip.AddrPortFrom(got.Addr().Unmap(), got.Port())
}

func protocolOf(t testing.TB, c syscall.Conn) (protocol int) {
	t.Helper()
	raw, err := c.SyscallConn()
	check(t, err)
	check(t, raw.Control(func(fd uintptr) { protocol, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PROTOCOL) }))
	check(t, err)
	return protocol
}
