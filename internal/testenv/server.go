// SPDX-License-Identifier: Apache-2.0

package testenv

import (
	"bufio"
	"encoding/json"
	"io"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// serverVariable has the listen address of the server. It makes the test binary a server.
const serverVariable = "SOCKEYE_TEST_SERVER"

// Server is a process that accepts TCP connections and discards all data. It exits
// when its standard input is closed.
type Server struct {
	*exec.Cmd
	Address string
	Stop    io.Closer
}

// Serve runs the server in the process that StartServer starts. A package that
// starts servers must call Serve in a test with the name TestServer. Otherwise Serve
// returns immediately.
func Serve(t *testing.T) {
	address := os.Getenv(serverVariable)
	if address == "" {
		return
	}
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	l, err := c.Listen(t.Context(), "tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				// Copy returns when the peer closes the connection.
				_, _ = io.Copy(io.Discard, c)
			}()
		}
	}()
	if err := json.NewEncoder(os.Stdout).Encode(l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
		t.Fatal(err)
	}
}

// StartServer starts a server in a cgroup. flags are flags of clone(2), such as
// CLONE_NEWNET for a new network namespace. The server inherits files.
func StartServer(t testing.TB, cgroup, address string, flags uintptr, files ...*os.File) *Server {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestServer$")
	cmd.Env = append(os.Environ(), serverVariable+"="+address, marker+"="+cgroup)
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = files
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: flags}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s := &Server{Cmd: cmd, Stop: in}
	t.Cleanup(s.Kill)
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err != nil {
		t.Fatalf("the server has exited: %v", err)
	}
	if err := json.Unmarshal(line, &s.Address); err != nil {
		t.Fatal(err)
	}
	return s
}

// Kill kills the server and waits for its exit.
func (s *Server) Kill() {
	s.Process.Kill()
	s.Wait()
}
