// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"

	"sockeye/internal/api"
	"sockeye/internal/config"
)

// everyMessage is the sampling of a rule that chooses all messages.
var everyMessage = config.TraceSampling{OneIn: 1}.String()

// Notes returns the notes on what a host does not measure.
func Notes(status *api.TraceStatus) []string {
	var notes []string
	note := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	if !status.Timestamps {
		note("Messages sent over TCP were not measured: this needs %s.", status.Needs)
	}
	for _, g := range status.Cgroups {
		if g.Problem != "" {
			note("Cgroup %s: %s.", g.Cgroup, g.Problem)
		}
		for _, r := range g.Rules {
			for _, s := range r.Skipped {
				note("Rule %s does not measure %s: it needs %s.", r.Name, s.Stage, s.Needs)
			}
			if r.Messages != everyMessage || r.Connections != everyMessage {
				note("Rule %s chooses %s of the connections and %s of their messages.", r.Name, r.Connections, r.Messages)
			}
		}
	}
	return notes
}
