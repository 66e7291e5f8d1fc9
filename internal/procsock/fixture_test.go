// SPDX-License-Identifier: Apache-2.0

package procsock_test

import (
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/testenv"
)

// pair is a loopback connection: the socket that connected and the socket that was accepted.
type pair struct{ connected, accepted *net.TCPConn }

// connect opens a connection to a listener.
func connect(t testing.TB, l *net.TCPListener) pair {
	t.Helper()
	return connectTo(t, l, l.Addr().String())
}

func connectTo(t testing.TB, l *net.TCPListener, address string) pair {
	t.Helper()
	connected, accepted := testenv.Connect(t, l, address)
	return pair{connected, accepted}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
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
