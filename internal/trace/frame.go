// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"time"

	"sockeye/internal/api"
	"sockeye/internal/fault"
	"sockeye/internal/trace/measure"
)

// mostLiveGroups is the number of groups of a frame.
const mostLiveGroups = 1000

// Frame adds the groups to a frame.
func (d *Domain) Frame(frame *api.Frame) error {
	tracers, err := d.tracersOf("")
	if err != nil || len(tracers) == 0 {
		return err
	}
	byRule := make(map[string]api.LiveGroup)
	for _, t := range tracers {
		t.mu.Lock()
		g := api.LiveGroup{Kind: "trace", Cgroup: t.name}
		if t.trace != nil {
			g.Path = t.scope.Below(d.host.Cgroups)
		}
		for _, r := range t.rules {
			byRule[r.Name] = g
		}
		if t.problem != nil {
			g.Problem = fault.Message(t.problem)
			frame.Groups = append(frame.Groups, g)
		}
		t.mu.Unlock()
	}
	now := time.Now()
	periods, _, err := d.periodsBetween(now.Add(-traceSlice), now)
	if err != nil || len(periods) == 0 {
		return err
	}
	all := measure.Merge(periods)
	for i := range all.Results[:min(len(all.Results), mostLiveGroups)] {
		r := &all.Results[i]
		g := byRule[r.Group.Rule]
		fillGroup(&g, r, all.To.Sub(all.From).Seconds())
		frame.Groups = append(frame.Groups, g)
	}
	return nil
}

// fillGroup sets the measurements of a group, which took a number of seconds.
func fillGroup(g *api.LiveGroup, r *measure.Result, seconds float64) {
	g.Name = r.Group.Label()
	if r.Group.Cgroup != "" {
		g.Path = r.Group.Cgroup
	}
	if seconds > 0 {
		g.Rate = float64(r.Chosen+r.RXChosen) / seconds
	}
	for stage, h := range r.Stages {
		if p99 := h.Quantile(0.99); h.Count > 0 && (int64(p99) > g.P99 || int64(p99) == g.P99 && string(stage) < g.Stage) {
			g.Stage, g.Median, g.P99 = string(stage), int64(h.Quantile(0.5)), int64(p99)
		}
	}
	if r.RXChosen > 0 || r.RXWaiting > 0 {
		oldest := int64(r.RXOldest)
		g.Oldest = &oldest
	}
}
