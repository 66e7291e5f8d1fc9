// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"time"

	"sockeye/internal/fleet/forward"
)

// dropsTime is the time for which dropped packets are reported after the last one.
const dropsTime = time.Minute

// drops finds packets that only a stranger or a misconfiguration can cause.
type drops struct {
	counts [forward.Outcomes]uint64
	last   [forward.Outcomes]time.Time // of the last packet; zero: none
	known  bool                        // counts are those of an earlier call
}

// reportedDrops are the outcomes that are reported, with their causes. Packets that hosts disagree about are not dropped. Unreachable hosts are reported with their paths.
var reportedDrops = map[forward.Outcome]string{
	forward.Untrusted: "packets are dropped (untrusted): in the tunnel from an address that is not a host's, or not to a service; or in broadcast or doubly tagged frames to a service. Block UDP port 4789 for strangers",
	forward.Expired:   "packets are dropped because their TTL is used up (ttl): hosts forward them to each other (compare EPOCH in sockeye fleet on each host), or a router is too far away",
	forward.Disagreed: "another host sends packets of devices that are not of this host (disagreed): compare EPOCH and the device maps of the hosts; or a sender on the link has the MAC address of a host",
}

// problems returns the problems that the counts of packets show. flipped is the time of the last change of the table: hosts disagree while
// they do not have the same one.
func (d *drops) problems(counts [forward.Outcomes]uint64, now, flipped time.Time) (list []string) {
	for outcome := range forward.Outcome(forward.Outcomes) {
		text, reported := reportedDrops[outcome]
		if !reported {
			continue
		}
		if outcome == forward.Disagreed && now.Sub(flipped) < dropsTime {
			continue
		}
		if d.known && counts[outcome] > d.counts[outcome] {
			d.last[outcome] = now
		}
		if last := d.last[outcome]; !last.IsZero() && now.Sub(last) < dropsTime {
			list = append(list, text)
		}
	}
	d.counts, d.known = counts, true
	return list
}
