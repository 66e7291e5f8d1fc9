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

// runInit starts the program as a child of this process, the first process (init) of the PID namespace. The program itself cannot be
// init: the kernel would discard signals for which the program has no handler, and orphans would become the program's children. The
// program
//
//   - stays in the gateway's process group and session, so that terminal keys and job control work,
//   - receives the signals that the gateway sends over the socket, and signals to the process group,
//   - determines the exit code of this process, upon whose exit the kernel kills all processes of the namespace.
//
// runInit returns only if the program cannot be started.
func (s *Setup) runInit(socket *os.File) error {
	program, err := syscall.ForkExec(s.Program, s.Args, &syscall.ProcAttr{Env: s.Env, Files: []uintptr{0, 1, 2}})
	if err != nil {
		return fmt.Errorf("start %s: %w", s.Program, err)
	}
	if _, err := socket.Write([]byte{1}); err != nil {
		return fmt.Errorf("reply to the gateway: %w", err)
	}
	go forwardSignals(socket, program)
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("wait for the program: %w", err)
		case pid != program: // an orphaned process
		case status.Signaled():
			os.Exit(128 + int(status.Signal()))
		case status.Exited():
			os.Exit(status.ExitStatus())
		}
	}
}

// forwardSignals reads signals from the socket, one byte each, and sends them to the program. When the gateway has exited, this
// process exits.
func forwardSignals(socket *os.File, program int) {
	var number [1]byte
	for {
		if _, err := socket.Read(number[:]); err != nil {
			os.Exit(128 + int(unix.SIGKILL))
		}
		_ = unix.Kill(program, unix.Signal(number[0]))
	}
}

// discardSignals makes this process discard PassedSignals. Signals that are already ignored, for example by nohup(1), stay ignored,
// also in the program.
func discardSignals() {
	for _, s := range PassedSignals {
		if !signal.Ignored(s) {
			signal.Notify(make(chan os.Signal, 1), s)
		}
	}
}
