// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestRemoveDeadSocket removes the socket of a process that was killed, but neither one that is in use nor another file.
func TestRemoveDeadSocket(t *testing.T) {
	dir := t.TempDir()
	path := SocketPath(dir)
	left := func() bool {
		t.Helper()
		removed, err := RemoveDeadSocket(dir)
		if err != nil {
			t.Fatal(err)
		}
		_, err = os.Lstat(path)
		if removed && err == nil {
			t.Error("reported as removed, and still there")
		}
		return err == nil
	}
	if left() {
		t.Error("a socket in an empty directory")
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if !left() {
		t.Error("the socket of a running agent is removed")
	}
	l.Close()
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if !left() {
		t.Error("a socket in a directory that others may write is removed")
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if left() {
		t.Error("the socket of a killed agent is left")
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	if !left() {
		t.Error("the socket of a process that does not listen yet is removed")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if !left() {
		t.Error("a file that is not a socket is removed")
	}
}
