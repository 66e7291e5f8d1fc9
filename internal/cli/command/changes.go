// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"io"

	"sockeye/internal/api"
)

// WriteChanges writes a table of changes, or none if there are none.
func WriteChanges(w io.Writer, list []api.Change, none string) {
	if len(list) == 0 {
		fmt.Fprintln(w, none)
		return
	}
	fmt.Fprintln(w, "WHERE\tACTION\tWHAT\tEFFECT")
	for _, change := range list {
		of := change.Service
		switch {
		case change.Cgroup != "":
			of = "cgroup " + change.Cgroup
		case change.Interface != "":
			of = "interface " + change.Interface
		}
		if change.Netns != "" {
			of += " of " + change.Netns
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", OrDash(of), change.Action, change.What, OrDash(change.Effect))
	}
}
