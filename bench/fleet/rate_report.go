// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
	"sockeye/internal/stats"
)

const leastRate = 0.95 // of the kernel's own forwarding

func (p *ratePart) print(w harness.Printf) {
	w("\nSender, host 1, host 2: veth pairs between namespaces, and one CPU for all of them; %d launches of %d rounds, arms in rotating order.\n",
		len(p.launches), len(p.launches[0]))
	w("Medians. Packets are counted at the interface of host 2. Ratios, computed within each round, are to the kernel's forwarding by a route, those\n")
	w("of a tunnel to the kernel's through a tunnel: median over the launches [95 %% confidence interval]. CPU: of all work for a packet, also the\n")
	w("sender's.\n")
	for _, l := range loads {
		unit, verb, factor := l.unit()
		w("\n%s\n\t%s\tratio\tCPU ns per packet\tratio\t", l.title, unit)
		if l.bytes == 0 {
			w("bytes per packet\n")
		} else {
			w("above dropped\tlost\n")
		}
		for _, a := range p.measured(l.name) {
			w("%s\t"+verb+"\t%s\t%.0f\t%s", a.title, factor*p.median(a, l, rateOf), p.ratioText(a, l, rateOf), p.median(a, l, cpuOf), p.ratioText(a, l, cpuOf))
			if l.bytes == 0 {
				w("\t%.0f\n", p.median(a, l, bytesOf))
				continue
			}
			w("\t%.0f\t%.2f %%\n", p.above(a.name, l.name).Median, 100*p.median(a, l, lostOf))
		}
	}
	w("\nNone: what the sender and the reception at host 1 cost in all arms. Kernel, again: a second lane of the same; its ratio shows the noise.\n")
	w("Device map: of %d addresses.\n", largeMap)
	for _, a := range arms {
		if why := p.left[a.name]; why != "" {
			w("Not run: %s: %s.\n", a.title, why)
		}
	}
	w("The work had %.0f %% of the CPU (median); less than 95 %% makes the rates uncertain, but not the CPU time.\n", 100*p.busy())
}

func (p *ratePart) median(a arm, l load, figure func(sample) float64) float64 {
	return stats.Median(p.samples(a.name, l.name, figure))
}

// ratioText formats the ratio of a figure, and returns "" if there is none.
func (p *ratePart) ratioText(a arm, l load, figure func(sample) float64) string {
	if a.to == "" {
		return ""
	}
	d := p.ratios(a.name, a.to, l.name, figure)
	return fmt.Sprintf("%.3f [%.3f .. %.3f]", d.Median, d.Low, d.High)
}

func (p *ratePart) figures() map[string]any {
	type figures struct {
		Rate      harness.Figure        `json:"per_second"`
		CPU       harness.Figure        `json:"cpu_ns"`
		Bytes     harness.Figure        `json:"packet_bytes"`
		Lost      *float64              `json:"lost,omitempty"`
		Above     *harness.Distribution `json:"cpu_ns_above_dropped,omitempty"`
		RateRatio *harness.Distribution `json:"rate_ratio,omitempty"`
		CPURatio  *harness.Distribution `json:"cpu_ratio,omitempty"`
		To        string                `json:"ratio_to,omitempty"`
	}
	all := map[string]map[string]figures{}
	for _, l := range loads {
		all[l.name] = map[string]figures{}
		for _, a := range p.measured(l.name) {
			f := figures{Rate: harness.Figure(p.median(a, l, rateOf)), CPU: harness.Figure(p.median(a, l, cpuOf)), Bytes: harness.Figure(p.median(a, l, bytesOf)), To: a.to}
			if l.bytes > 0 {
				above := p.above(a.name, l.name)
				f.Above, f.Lost = &above, harness.Number(p.median(a, l, lostOf))
			}
			if a.to != "" {
				rate, cpu := p.ratios(a.name, a.to, l.name, rateOf), p.ratios(a.name, a.to, l.name, cpuOf)
				f.RateRatio, f.CPURatio = &rate, &cpu
			}
			all[l.name][a.name] = f
		}
	}
	d := p.smallest()
	return map[string]any{
		"rate_vs_forwarding": d.Median, "rate_vs_forwarding_interval": []harness.Figure{d.Low, d.High},
		"rate": all, "rate_left_out": p.left, "rate_cpu_share": harness.Figure(p.busy()), "rate_launches": p.launches,
	}
}

// busy returns the median share of the CPU.
func (p *ratePart) busy() float64 {
	var v []float64
	for _, rounds := range p.launches {
		for _, r := range rounds {
			for _, samples := range r {
				for _, s := range samples {
					v = append(v, s.Busy)
				}
			}
		}
	}
	return min(1, stats.Median(v)) // other threads of this process use other CPUs
}

// smallest returns the ratio of Sockeye's rate to that of the kernel for the smallest datagrams on the link.
func (p *ratePart) smallest() harness.Distribution {
	return p.ratios(armSockeye, armForwarding, loads[0].name, rateOf)
}

func (p *ratePart) targets() []harness.Target {
	return []harness.Target{harness.AtLeast("datagrams of 64 bytes per second through a host, to the kernel's forwarding", "%.3f", leastRate, p.smallest())}
}

func (p *ratePart) panels() (all []chart.Panel) {
	for _, l := range loads {
		unit, verb, factor := l.unit()
		panel := chart.Panel{Title: l.title + ": " + unit}
		for _, a := range p.measured(l.name) {
			rate := factor * p.median(a, l, rateOf)
			note := fmt.Sprintf(verb, rate)
			if a.to != "" {
				note += fmt.Sprintf(" (× %.3f)", p.ratios(a.name, a.to, l.name, rateOf).Median)
			}
			panel.Bars = append(panel.Bars, chart.Bar{Label: a.title, Note: note, Parts: []float64{rate}})
		}
		all = append(all, panel)
	}
	return all
}

// unit returns the unit of the rate of a load, and the factor of its samples.
func (l load) unit() (title, verb string, factor float64) {
	if l.bytes == 0 {
		return "Gbit/s", "%.1f", 1e-9
	}
	return "packets per second", "%.0f", 1
}
