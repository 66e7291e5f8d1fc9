// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"sockeye/internal/api"
)

// frameCounts are the totals of a rule at the time of a frame.
type frameCounts struct{ connections, retransmits uint64 }

// Frame adds the rules to a frame. The caller makes one frame at a time, because a frame has the rates since the one
// before.
func (d *Domain) Frame(frame *api.Frame) error {
	list, err := d.Cgroups("")
	if err != nil {
		return err
	}
	now := make(map[[2]string]frameCounts)
	rate := func(now, before uint64) float64 {
		if frame.Seconds <= 0 || now < before {
			return 0
		}
		return float64(now-before) / frame.Seconds
	}
	for _, c := range list {
		for _, r := range c.Rules {
			key := [2]string{c.Cgroup, r.Name}
			is := frameCounts{r.Connections, r.Retransmits}
			now[key] = is
			g := api.LiveGroup{Kind: "tune", Cgroup: c.Cgroup, Path: c.Path, Name: r.Name, Problem: c.Problem,
				Connections: r.Established - min(r.Closed, r.Established)}
			if was, ok := d.frameBefore[key]; ok {
				g.Rate, g.Retransmits = rate(is.connections, was.connections), rate(is.retransmits, was.retransmits)
			}
			frame.Groups = append(frame.Groups, g)
		}
	}
	d.frameBefore = now
	return nil
}
