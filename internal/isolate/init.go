// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// first is the first process of the guest's process namespace. A program is not made for that: signals that it does not
// handle would not end it, and orphans would be its children. So it is the first one's child, which
//
//   - stays in the gateway's process group and session, so that keys of the terminal and job control reach it as before,
//   - gets the signals that the gateway passes on, over the socket: those that come to this process itself, as from a key or
//     from a service manager that signals all processes, come to the program, too,
//   - ends it with its own exit code, upon which the kernel ends all that it has left behind.
//
// It returns only if the program cannot be started.
func (s *Setup) first(socket *os.File) error {
	program, err := syscall.ForkExec(s.Program, s.Args, &syscall.ProcAttr{Env: s.Env, Files: []uintptr{0, 1, 2}})
	if err != nil {
		return fmt.Errorf("start %s: %w", s.Program, err)
	}
	if _, err := socket.Write([]byte{1}); err != nil {
		return fmt.Errorf("answer the gateway: %w", err)
	}
	go passSignals(socket, program)
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("wait for the program: %w", err)
		case pid != program: // an orphan
		case status.Signaled():
			os.Exit(128 + int(status.Signal()))
		case status.Exited():
			os.Exit(status.ExitStatus())
		}
	}
}

// passSignals sends the program the signals that the gateway names, one byte each. When the gateway has ended, so does all
// that is inside.
func passSignals(socket *os.File, program int) {
	var number [1]byte
	for {
		if _, err := socket.Read(number[:]); err != nil {
			os.Exit(128 + int(unix.SIGKILL))
		}
		_ = unix.Kill(program, unix.Signal(number[0]))
	}
}

// holdSignals has signals do nothing to this process. Those that are ignored from the start, as by nohup(1), stay so, and
// the program inherits that.
func holdSignals() {
	for _, s := range PassedSignals {
		if !signal.Ignored(s) {
			signal.Notify(make(chan os.Signal, 1), s)
		}
	}
}
