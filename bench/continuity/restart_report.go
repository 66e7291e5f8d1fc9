// SPDX-License-Identifier: Apache-2.0

package continuity

import (
	"fmt"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
)

// printRestarts prints the scenarios that replace a member, and the cost of the template filter.
func (r *report) printRestarts(p harness.Printf) {
	printed := false
	for _, s := range scenarios {
		if !s.restarts || r.outcome(s.name, restartArms[0].name).Rounds == 0 {
			continue
		}
		printed = true
		p("\n%s: %s\n", s.name, s.title)
		p("\trecords lost\tin the process\tundecodable\twithout routes\tlongest undecoded\tSYNs refused\tsessions closed\tlongest split\n")
		for _, a := range restartArms {
			o := r.outcome(s.name, a.name)
			p("%s\t%d of %d\t%d\t%d\t%d\t%.2f s\t%d\t%d\t%.1f ms\n", a.title, o.Lost, o.Sent, o.InProcess, o.Undecodable, o.WithoutRoutes, o.FirstDecoded, o.Refused, o.Closed, o.SplitMS)
		}
	}
	if printed {
		p("\nThe member of one of %d slots is replaced; restart: %v after its end. Each datagram has one record. The exporters send their template once.\n", startSlots, r.Options.Down)
		p("Wait and takeover: when_empty: {wait: 60s}, takeover: true. Reject, no templates: when_empty: reject, templates: off. In the process: received by\n")
		p("the kernel for the member that was ended, which had not read or counted them; not among the lost ones. Undecodable: at a member that had not\n")
		p("received the template. Without routes: as above. Longest undecoded: the longest time without a decoded record of a UDP port; it ends at the\n")
		p("latest with the run. Plain SO_REUSEPORT loses nothing, because other members receive the datagrams, without templates and routes.\n")
	}
	if t := r.templates; t != nil {
		p("\nThe filter that copies templates, above an empty filter: %s ns for an IPFIX datagram without templates, %s ns for other datagrams\n",
			interval(t.IPFIX), interval(t.Other))
		p("(median of runs in turns, with its 95 %% confidence interval).\n")
	}
}

func interval(d harness.Distribution) string {
	return fmt.Sprintf("%.1f [%.1f .. %.1f]", float64(d.Median), float64(d.Low), float64(d.High))
}

// restartChart draws the records that were lost or of less use.
func (r *report) restartChart() chart.Chart {
	drawing := chart.Chart{
		Title:  "Records when one of four members is replaced, % of those that were sent",
		Legend: []string{"lost", "not decodable", "decodable, but without routes"},
	}
	for _, s := range scenarios {
		if !s.restarts {
			continue
		}
		p := chart.Panel{Title: s.name + ": " + s.title}
		for _, a := range restartArms {
			o := r.outcome(s.name, a.name)
			if o.Rounds == 0 {
				continue
			}
			percent := func(n uint64) float64 { return 100 * float64(n) / float64(max(1, o.Sent)) }
			bare := o.WithoutRoutes - min(o.WithoutRoutes, o.Undecodable)
			p.Bars = append(p.Bars, chart.Bar{
				Label: a.title, Note: fmt.Sprintf("%.1f, %.1f and %.1f %%; up to %.1f s without a decoded record", percent(o.Lost), percent(o.Undecodable), percent(bare), o.FirstDecoded),
				Parts: []float64{percent(o.Lost), percent(o.Undecodable), percent(bare)},
			})
		}
		if len(p.Bars) > 0 {
			drawing.Panels = append(drawing.Panels, p)
		}
	}
	return drawing
}
