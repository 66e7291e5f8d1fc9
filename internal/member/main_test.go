// SPDX-License-Identifier: Apache-2.0

package member

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/testenv"
)

// childVariable makes the test binary a child process: the child runs the named function, prints its result as a line of
// JSON, and exits when its standard input is closed.
const childVariable = "SOCKEYE_TEST_CHILD"

// children contains the functions of child processes.
var children = map[string]func() (any, error){
	"sleep": func() (any, error) { return nil, nil },
	"spin": func() (any, error) {
		go func() {
			for { //nolint:revive,staticcheck // busy, as a thread that decodes
			}
		}()
		return nil, nil
	},
	"rename": func() (any, error) {
		return nil, os.WriteFile("/proc/self/comm", []byte(os.Getenv("NAME")), 0)
	},
	"sockets": openSockets,
	"listen": func() (any, error) {
		for _, kind := range []int{unix.SOCK_STREAM, unix.SOCK_DGRAM} {
			fd, err := unix.Socket(unix.AF_INET6, kind, 0)
			if err == nil {
				err = unix.Bind(fd, &unix.SockaddrInet6{})
			}
			if err == nil && kind == unix.SOCK_STREAM {
				err = unix.Listen(fd, 1)
			}
			if err != nil {
				return nil, err
			}
		}
		return nil, nil
	},
	"execute": func() (any, error) { return nil, nil },
	"read": func() (any, error) {
		pid, err := strconv.Atoi(os.Getenv("PROCESS"))
		if err != nil {
			return nil, err
		}
		return Read(pid)
	},
}

func TestMain(m *testing.M) {
	if name := os.Getenv(childVariable); name != "" {
		if err := runChild(children[name]); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	testenv.Main(m)
}

func runChild(f func() (any, error)) error {
	result, err := f()
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(result); err != nil {
		return err
	}
	if times, err := strconv.Atoi(os.Getenv("TIMES")); err == nil && times > 0 {
		return executeAgain(times - 1)
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// executeAgain executes the test binary again, by a thread that is not the first one.
func executeAgain(times int) error {
	if err := os.Setenv("TIMES", strconv.Itoa(times)); err != nil {
		return err
	}
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		result <- unix.Exec("/proc/self/exe", os.Args, os.Environ())
	}()
	runtime.LockOSThread() // the first thread waits
	return <-result
}

// child is a running child process.
type child struct {
	*exec.Cmd
	stop io.Closer
}

func (c *child) pid() int { return c.Process.Pid }

// start starts a child process after applying changes to its command, and decodes its output.
func start(t testing.TB, does string, result any, change func(cmd *exec.Cmd)) *child {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childVariable+"="+does)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{}
	if change != nil {
		change(cmd)
	}
	in, err := cmd.StdinPipe()
	check(t, err)
	out, err := cmd.StdoutPipe()
	check(t, err)
	check(t, cmd.Start())
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadBytes('\n')
	if err != nil {
		t.Fatalf("the child exited: %v", err)
	}
	if result != nil {
		check(t, json.Unmarshal(line, result))
	}
	return &child{cmd, in}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// within fails the test unless f returns before a deadline.
func within(t testing.TB, what string, f func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-time.After(time.Minute):
		t.Fatalf("%s: timeout", what)
		return nil
	}
}
