// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"slices"

	"sockeye/bench/harness"
)

// A goal contains the goals of a steering mode: nanoseconds per datagram above the empty program with cold and with hot caches, those
// of a device map, and the rate in relation to plain sockets.
type goal struct {
	mode                 string
	cold, hot, deviceMap float64
	rate                 float64
}

var goals = []goal{
	{"reuseport", 60, 40, 60, 0.97},
	{"lookup", 60, 40, 60, 1},
}

// hasGoal returns whether an arm has goals.
func hasGoal(arm string) bool {
	return slices.ContainsFunc(goals, func(g goal) bool { return g.mode == arm })
}

const largestCPU = 1.02 // of plain sockets

// Targets implements harness.Report.
func (r *report) Targets() (all []harness.Target) {
	all = r.programs.targets()
	for _, g := range goals {
		all = append(all,
			harness.AtLeast("datagrams per second, to plain sockets: "+g.mode, "%.3f", g.rate, r.rate.distribution(g.mode, receivedRate)),
			harness.AtMost("CPU with nfacctd, to plain sockets: "+g.mode, "%.3f", largestCPU, r.nfacctd.distribution(g.mode, collectorsCPU)))
	}
	return all
}

// Targets implements harness.Report.
func (r *programReport) Targets() []harness.Target { return r.programs.targets() }

func (s programSet) targets() (all []harness.Target) {
	const format = "%.0f ns"
	for _, g := range goals {
		mode, empty, named := s.find(g.mode), s.find(g.mode+"_empty"), s.find(g.mode+"_device_map")
		for _, pass := range []struct {
			name string
			goal float64
		}{{"cold", g.cold}, {"hot", g.hot}} {
			all = append(all,
				harness.AtMost("datagram above the empty program, "+pass.name+": "+g.mode, format, pass.goal, mode.above(empty, pass.name)),
				harness.AtMost("device map, "+pass.name+": "+g.mode, format, g.deviceMap, named.above(mode, pass.name)))
		}
	}
	return all
}

// distribution returns the distribution of the ratio of an arm to plain sockets, computed within each round.
func (p *part) distribution(arm string, figure func(m, plain *measurement) float64) harness.Distribution {
	a, plain := p.by(arm, figure), p.by("plain", figure)
	var ratios []float64
	for i := range min(len(a), len(plain)) {
		ratios = append(ratios, a[i]/plain[i])
	}
	return harness.DistributionOf(ratios)
}
