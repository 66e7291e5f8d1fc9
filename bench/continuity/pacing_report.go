// SPDX-License-Identifier: Apache-2.0

package continuity

import (
	"slices"

	"sockeye/bench/harness"
)

// pacedOutcome contains the worst figures of all rounds of an arm.
type pacedOutcome struct {
	Restart dumps `json:"restart"`
	Drain   dumps `json:"drain"`
	Rounds  int   `json:"rounds"`
}

// printPacing prints the comparison of pacing.
func (r *report) printPacing(p harness.Printf) {
	if len(r.paced) == 0 {
		return
	}
	load := r.Options.Pacing
	p("\nDumps of %d FRR routers with %d routes each, by BMP to nfacctd; the worst of %d rounds\n", load.Routers, load.Routes, load.Rounds)
	p("\tdumps at once\tqueue\tdeepest\tmember's memory\tdump of each\tlast dump\tidle\tmoves settled\tSYNs refused\tattempts failed\tconnections reset\n")
	for _, event := range []struct {
		title string
		of    func(pacedOutcome) dumps
	}{
		{"member restarted", func(o pacedOutcome) dumps { return o.Restart }},
		{"slot drained", func(o pacedOutcome) dumps { return o.Drain }},
	} {
		for _, a := range pacingArms {
			d := event.of(r.pacedOutcome(a.name))
			p("%s, %s\t%d of %d\t%.1f MB\t%.1f MB\t%.1f MB\t%.1f s\t%.1f s\t%.1f s\t%.1f s\t%d\t%d\t%d\n", event.title, a.title, d.AtOnce, d.Routers,
				float64(d.Queue)/megabyte, float64(d.Deepest)/megabyte, float64(d.Memory)/megabyte, d.Each, d.Seconds, d.Idle, d.Settled, d.Refused, d.Failed, d.Resets)
		}
	}
	p("Queue: the largest sum of the receive queues (Recv-Q) of the member's connections, every %v; deepest: the largest of one connection. Member's\n", sampleInterval)
	p("memory: the peak resident set of its main process, which has the routes of all routers. Dump of each: the median time between the first\n")
	p("and the last byte. Last dump: until the member has read it, from the time when the member is ready, or when its slot is to be drained. Idle: the\n")
	p("part of this time in which no router sent. Moves settled: until Sockeye considers all dumps as sent. Attempts failed and connections reset are\n")
	p("counted by the kernels of all routers.\n")
}

// pacingFigures returns the figures of the comparison of pacing, by arm.
func (r *report) pacingFigures() any {
	byArm := map[string]any{}
	for _, a := range pacingArms {
		byArm[a.name] = nil
		if slices.ContainsFunc(r.paced, func(run pacedRun) bool { return run.Arm == a.name }) {
			byArm[a.name] = r.pacedOutcome(a.name)
		}
	}
	return byArm
}

func (r *report) pacedOutcome(arm string) (o pacedOutcome) {
	for _, run := range r.paced {
		if run.Arm == arm {
			o.Restart, o.Drain = o.Restart.worse(run.Restart), o.Drain.worse(run.Drain)
			o.Rounds++
		}
	}
	return o
}
