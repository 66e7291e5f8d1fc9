// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"slices"

	"sockeye/bench/harness"
)

// Targets implements harness.Report.
func (r *report) Targets() (all []harness.Target) {
	for _, t := range []struct {
		measure, claim         string
		others, sampled, every float64
	}{
		{"throughput", "throughput of a stream, to that without programs: ", 1, 0.99, 0.97},
		{"rr", "requests per second, to those without programs: ", 1, 0.98, 0.93},
	} {
		m := measures[slices.IndexFunc(measures, func(m traceMeasure) bool { return m.name == t.measure })]
		for _, a := range []struct {
			arm, title string
			goal       float64
		}{{armOthers, "tracing of others", t.others}, {armSampled, "one message in 100", t.sampled}, {armEvery, "every message", t.every}} {
			if len(r.ratios(a.arm, m)) == 0 { // the arm did not run
				continue
			}
			all = append(all, harness.AtLeast(t.claim+a.title, "%.3f", a.goal, harness.DistributionOf(r.ratios(a.arm, m))))
		}
	}
	return all
}
