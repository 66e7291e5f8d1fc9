// SPDX-License-Identifier: Apache-2.0

package isolate

import (
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

// terminal is the controlling terminal of this process.
type terminal struct {
	file  *os.File // nil if there is none
	group int      // process group of this process
}

func openTerminal() terminal {
	f, err := os.OpenFile("/dev/tty", os.O_RDONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return terminal{}
	}
	return terminal{f, unix.Getpgrp()}
}

// foreground returns whether the process group of this process is the terminal's foreground process group, to which the
// terminal sends the signals of keys.
func (t terminal) foreground() bool {
	if t.file == nil {
		return false
	}
	group, err := unix.IoctlGetInt(int(t.file.Fd()), unix.TIOCGPGRP)
	return err == nil && group == t.group
}

// setForeground makes the process group of this process the foreground process group again. A shell inside has set its own process
// group as the foreground group, and cannot restore the previous group, because its ID does not exist in the shell's PID namespace.
func (t terminal) setForeground() {
	signal.Ignore(unix.SIGTTOU)
	_ = unix.IoctlSetPointerInt(int(t.file.Fd()), unix.TIOCSPGRP, t.group)
}
