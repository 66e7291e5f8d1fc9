// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"strings"
	"testing"
	"time"

	"sockeye/internal/fleet/forward"
)

// TestDrops is that packets of strangers and loops are one problem each, until a minute after the last packet.
func TestDrops(t *testing.T) {
	var d drops
	var counts [forward.Outcomes]uint64
	now, flipped := time.Now(), time.Time{}
	step := func(what string, after time.Duration, want ...string) {
		t.Helper()
		now = now.Add(after)
		got := d.problems(counts, now, flipped)
		if len(got) != len(want) {
			t.Fatalf("%s: %q", what, got)
		}
		for i := range want {
			if !strings.Contains(got[i], want[i]) {
				t.Errorf("%s: %q", what, got)
			}
		}
	}
	counts[forward.Untrusted] = 7
	step("packets before this agent", 0)
	counts[forward.Local], counts[forward.Unreachable] = 100, 3
	step("other outcomes", time.Second)
	counts[forward.Untrusted]++
	step("a stranger", time.Second, "(untrusted)")
	counts[forward.Expired]++
	step("a loop", 30*time.Second, "(ttl)", "(untrusted)")
	step("a minute after the stranger", 31*time.Second, "(ttl)")
	step("a minute after the loop", 30*time.Second)

	// Hosts disagree for a while after each change of the table.
	flipped = now
	counts[forward.Disagreed]++
	step("a move", time.Second)
	counts[forward.Disagreed]++
	step("a slow host", 50*time.Second)
	step("the same table", 10*time.Second)
	counts[forward.Disagreed]++
	step("another table", time.Second, "(disagreed)")
	step("a minute after the packet", time.Minute)
}
