// SPDX-License-Identifier: Apache-2.0

package core

import (
	"cmp"
	"fmt"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
)

// WhyClosed describes the end of the process that closed a member's socket.
func WhyClosed(event bpf.Event) string {
	status, ok := bpf.ExitStatus(event)
	switch {
	case !ok:
		return "socket closed"
	case status.Signaled():
		return "process ended by " + cmp.Or(unix.SignalName(status.Signal()), fmt.Sprintf("signal %d", status.Signal()))
	}
	return fmt.Sprintf("process exited with status %d", status.ExitStatus())
}
