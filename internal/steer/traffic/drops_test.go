// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"strings"
	"testing"
	"time"

	"sockeye/internal/config"
	"sockeye/internal/member"
)

// TestNoteDrops checks which drops are recent.
func TestNoteDrops(t *testing.T) {
	start := time.Unix(1_700_000_000, 0)
	key, old := dropKey{2, config.UDP}, member.ID{PID: 7, StartTime: 1}
	d := memberDrops{begun: start}
	for i, step := range []struct {
		after, age time.Duration
		id         member.ID
		drops      uint64
		at         time.Duration // of the last drops; -1: none
	}{
		{0, time.Second, old, 5, -1}, // dropped before the first reading, nobody knows when
		{10 * time.Second, time.Hour, old, 5, -1},
		{20 * time.Second, time.Hour, old, 6, 20 * time.Second},
		{30 * time.Second, time.Hour, old, 6, 20 * time.Second},
		{40 * time.Second, time.Second, member.ID{PID: 8, StartTime: 2}, 0, -1}, // another member
		{50 * time.Second, time.Second, member.ID{PID: 9, StartTime: 3}, 1, 50 * time.Second},
	} {
		now := start.Add(step.after)
		d.note(now, key, step.id, now.Add(-step.age), &Queue{Dropped: step.drops})
		got := d.last[key]
		if got.queue.Dropped != step.drops || got.at.IsZero() != (step.at < 0) || step.at >= 0 && got.at != start.Add(step.at) {
			t.Errorf("step %d: %+v", i, got)
		}
	}
}

// TestDropHint checks that the hint names the limit in the way.
func TestDropHint(t *testing.T) {
	const max, standard = 212992, 212992
	for _, one := range []struct {
		protocol config.Protocol
		limit    uint64
		want     string
	}{
		{config.UDP, 2 * max, "as the sysctl net.core.rmem_max (212992) allows"}, {config.UDP, standard, "uses the default buffer"},
		{config.UDP, 8192, "enlarge the receive buffer"}, {config.TCP, 4096, "net.core.somaxconn (4096)"}, {config.TCP, 16, "raise backlog"},
	} {
		if got := dropHint(one.protocol, one.limit, max, standard, 4096); !strings.Contains(got, one.want) {
			t.Errorf("%s with %d: %s, want %s", one.protocol, one.limit, got, one.want)
		}
	}
}
