// SPDX-License-Identifier: Apache-2.0

package api

import (
	"net"
	"os"
	"testing"
)

// TestRemoveDeadSocket removes the socket of a process that was killed, but neither one that is in use nor another file.
func TestRemoveDeadSocket(t *testing.T) {
	dir := t.TempDir()
	path := SocketPath(dir)
	left := func() bool {
		t.Helper()
		if err := RemoveDeadSocket(dir); err != nil {
			t.Fatal(err)
		}
		_, err := os.Lstat(path)
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
	if left() {
		t.Error("the socket of a killed agent is left")
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if !left() {
		t.Error("a file that is not a socket is removed")
	}
}
