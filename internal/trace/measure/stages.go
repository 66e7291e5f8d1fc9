// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"cmp"
	"time"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
)

// stagesOf returns the times of a message in the stages between its timestamps. ended is the time of its last acknowledgement. The program
// sums up the same differences (trace_find_times in bpf/include/trace_stages.bpf.h).
func stagesOf(m *bpf.TraceMessage, ended uint64) map[config.Stage]time.Duration {
	stages := make(map[config.Stage]time.Duration)
	for _, leg := range []struct {
		stage    config.Stage
		from, to uint64
	}{
		{config.StageSend, m.Started, m.Sent},
		{config.StageStack, m.Sent, m.Queued},
		{config.StageNetwork, m.Driver, ended},
	} {
		if leg.from != 0 && leg.to != 0 {
			stages[leg.stage] = time.Duration(max(leg.to, leg.from) - leg.from)
		}
	}
	// After a drop in the host, the wait of the retransmission counts.
	if queued := cmp.Or(m.Requeued, m.Queued); m.Driver != 0 && queued != 0 {
		stages[config.StageQdisc] = time.Duration(m.Driver - queued)
	}
	if m.Hardware != 0 {
		stages[config.StageNIC] = time.Duration(m.Hardware - 1)
	}
	return stages
}
