// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"

	"sockeye/internal/api"
)

// outsideCommand is the length of a command line in the lines about processes that are not members.
const outsideCommand = 50

// WaitingLine says why a process is not a member of a service yet.
func WaitingLine(service string, w *api.WaitingStatus) string {
	return fmt.Sprintf("%s: process %d (%s) is not ready: %s", service, w.PID, Shorten(w.Command, outsideCommand), w.Problem)
}

// RefusedLine says why a process is not admitted as a member of a service.
func RefusedLine(service string, r *api.RefusedStatus) string {
	return fmt.Sprintf("%s: process %d (%s) is refused as a member: %s", service, r.PID, Shorten(r.Command, outsideCommand), r.Problem)
}
