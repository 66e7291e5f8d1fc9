// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/sockaddr"
)

// Listen opens a listener that is not an MPTCP socket. It is closed when the test ends.
func Listen(t testing.TB, address string) *net.TCPListener {
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

// Connect opens a connection to a listener at an address, and closes both ends when the test ends.
func Connect(t testing.TB, l *net.TCPListener, address string) (connected, accepted *net.TCPConn) {
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
	return c.(*net.TCPConn), a
}

// TCPSocket opens a TCP socket with timeouts, and closes it when the test ends. Unlike the sockets of package net, it has
// default options.
func TCPSocket(t testing.TB, domain int) (fd int) {
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

// Port returns the local port of a socket.
func Port(t testing.TB, fd int) uint16 {
	t.Helper()
	local, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(os.NewSyscallError("getsockname", err))
	}
	return sockaddr.AddrPort(local).Port()
}

// Cookie returns the cookie of a socket.
func Cookie(t testing.TB, c syscall.Conn) (cookie uint64) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if failed := raw.Control(func(fd uintptr) {
		cookie, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE)
	}); failed != nil {
		t.Fatal(failed)
	}
	if err != nil {
		t.Fatal(os.NewSyscallError("getsockopt", err))
	}
	return cookie
}

// Subgroup creates a cgroup below the tests' cgroup, and removes it when the test ends.
func Subgroup(t testing.TB, name string) string {
	t.Helper()
	dir := filepath.Join(Cgroup(), name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		Within(t, "removing cgroup "+name, func() bool { return os.Remove(dir) == nil })
	})
	return dir
}

// Within waits until f returns true, and fails the test after a minute.
func Within(t testing.TB, what string, f func() bool) {
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
