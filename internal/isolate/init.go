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

// runInit starts the program as a child of this process, which is the first one (init) of the process namespace. The program is not
// that process itself, because the kernel would discard signals that the program does not handle, and orphans would become the
// program's children. The program
//
//   - stays in the gateway's process group and session, so that keys of the terminal and job control work,
//   - gets the signals that the gateway sends over the socket, and those that are sent to the process group,
//   - ends this process with its own exit code, upon which the kernel ends all processes of the namespace.
//
// runInit returns only if the program cannot be started.
func (s *Setup) runInit(socket *os.File) error {
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

// passSignals sends the program the signals that arrive over the socket, one byte each. When the gateway has exited, this process
// exits.
func passSignals(socket *os.File, program int) {
	var number [1]byte
	for {
		if _, err := socket.Read(number[:]); err != nil {
			os.Exit(128 + int(unix.SIGKILL))
		}
		_ = unix.Kill(program, unix.Signal(number[0]))
	}
}

// holdSignals makes signals have no effect on this process. Signals that are ignored already, as by nohup(1), stay ignored, and
// the program inherits that.
func holdSignals() {
	for _, s := range PassedSignals {
		if !signal.Ignored(s) {
			signal.Notify(make(chan os.Signal, 1), s)
		}
	}
}
