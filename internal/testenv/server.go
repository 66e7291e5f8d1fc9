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

// serverVariable makes the test binary a server, on an address.
const serverVariable = "SOCKEYE_TEST_SERVER"

// Server is a process that serves TCP: it drains what it accepts, and ends with
// its standard input.
type Server struct {
	*exec.Cmd
	Address string
	Stop    io.Closer
}

// Serve is the server's own process. A package that starts servers calls it
// from a test by the name of TestServer, in which there is nothing to test.
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
				// It ends when the other side does.
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

// StartServer starts a server in a cgroup, and in a network namespace of its own
// if flags, those of clone(2), say so. It has copies of files, too.
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
		t.Fatalf("the server ends: %v", err)
	}
	if err := json.Unmarshal(line, &s.Address); err != nil {
		t.Fatal(err)
	}
	return s
}

// Kill ends the server, and waits until it has ended.
func (s *Server) Kill() {
	s.Process.Kill()
	s.Wait()
}
