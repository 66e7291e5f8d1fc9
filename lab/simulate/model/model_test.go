// SPDX-License-Identifier: Apache-2.0

package model

import "testing"

// TestFleet lets small fleets run for some days, in which more happens than in a year of a real one.
func TestFleet(t *testing.T) {
	for _, hosts := range []int{3, 25} {
		c := Usual(hosts)
		c.Batch, c.Duration, c.Seed = 512, 6*Day, uint64(hosts)
		c.Deaths, c.Drains, c.Partitions = 2*Day, 3*Day, Day
		c.Outages, c.Replacements, c.Weights, c.Leaders = Day/2, Day, Day, Day
		if hosts > 3 {
			c.Duration = 2 * Day
		}
		r := Run(c)
		t.Log(r.String())
		if r.Deaths == 0 || r.Drains == 0 || r.Partitions == 0 || r.Outages == 0 || r.Replacements == 0 || r.Weights == 0 || r.Leaders == 0 {
			t.Error("not all events have happened")
		}
		if r.MovedOverIdeal < 0.9 || r.MovedOverIdeal > 1.1 {
			t.Errorf("%.3f of the ideal number of buckets moved", r.MovedOverIdeal)
		}
		p := r.Packets
		if p.Lost != 0 || p.Misdirected != 0 || p.Reset != 0 {
			t.Errorf("%d packets lost, %d misdirected, %d reset", p.Lost, p.Misdirected, p.Reset)
		}
		if p.Once == 0 || p.Twice == 0 || p.Local == 0 || p.Dead == 0 {
			t.Errorf("packets took not all ways: %+v", p)
		}
		if sum := p.Local + p.Once + p.Twice + p.Misdirected + p.Reset + p.Lost + p.Dead + p.Partitioned + p.Undecided; sum != p.Followed {
			t.Errorf("%d of %d packets are accounted for", sum, p.Followed)
		}
		again := Run(c)
		if again != r {
			t.Errorf("another result with the same seed:\n%s", again.String())
		}
	}
}
