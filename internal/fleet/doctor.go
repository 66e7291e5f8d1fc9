// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"

	"sockeye/internal/api"
	"sockeye/internal/doctor"
	"sockeye/internal/fleet/forward"
)

// mostForwarded is the share of forwarded packets above which doctor advises to make the routers hash by source address.
const mostForwarded = 0.5

// ExamineAgent reports the problems of the fleet, and the share of the packets that the routers sent to the wrong host.
func ExamineAgent(_ context.Context, d *doctor.Report, _ *api.Client, status *api.Status) {
	s := status.Fleet
	if s == nil {
		return
	}
	for _, problem := range s.Problems {
		d.Add("fleet", s.Fleet, doctor.Warning, problem, "sockeye fleet shows the hosts")
	}
	if len(s.Problems) == 0 {
		d.Add("fleet", s.Fleet, doctor.OK, fmt.Sprintf("epoch %d", s.Epoch), "")
	}
	local, forwarded := s.Packets[forward.Local.String()], s.Packets[forward.Forwarded.String()]
	if all := local + forwarded; all > 0 {
		share := float64(forwarded) / float64(all)
		text := fmt.Sprintf("%.1f %% of %d packets", 100*share, all)
		if share > mostForwarded {
			d.Add("fleet", "packets of other hosts", doctor.Note, text, "routers that hash the source address alone, and keep the hosts of flows when hosts change, send fewer packets to other hosts")
		} else {
			d.Add("fleet", "packets of other hosts", doctor.OK, text, "")
		}
	}
}
