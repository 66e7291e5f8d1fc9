// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"math"
	"strings"

	"sockeye/bench/harness"
	"sockeye/internal/api"
	"sockeye/internal/chart"
)

type report struct {
	Options options `json:"options"`
	harness.Run

	// Parts that were not run are nil.
	incast    []incastRun
	iw        []iwLink
	handshake *handshakeLosses
	learned   []learnedPrefix
	cost      cost

	rules []api.TuneRuleStatus
}

// incastPoint contains the results of all rounds of one arm with X large flows per sender: sums of counters, means of
// rates, and quantiles of all latencies.
type incastPoint struct {
	Retransmits uint64                `json:"retransmits"`
	Segments    uint64                `json:"segments"`
	Drops       uint64                `json:"bottleneck_drops"`
	Marks       uint64                `json:"bottleneck_marks"`
	CPU         harness.Figure        `json:"cpu_share"` // share of all CPUs, including other processes
	Classes     map[string]classPoint `json:"classes"`   // by flowClasses.key
}

// classPoint contains the results of one class of flows. Latencies are those of RPCs, or of 1 MB of a stream.
type classPoint struct {
	Retransmits uint64         `json:"retransmits"`
	Rate        harness.Figure `json:"rate_mbit"` // mean of the flows
	P50         harness.Figure `json:"p50_ms"`
	P99         harness.Figure `json:"p99_ms"`
	Samples     int            `json:"samples"`
}

func p50(c classPoint) harness.Figure  { return c.P50 }
func p99(c classPoint) harness.Figure  { return c.P99 }
func rate(c classPoint) harness.Figure { return c.Rate }

// Print implements harness.Report.
func (r *report) Print(p harness.Printf) {
	p("\nAll arms of a comparison in rotating order, with cubic; Linux %s, %d CPUs in total.\n", r.Kernel, r.CPUs)
	if r.incast != nil {
		r.printIncast(p)
	}
	if r.iw != nil {
		r.printWindows(p)
	}
	if h := r.handshake; h != nil {
		p("\nDuration of connect(2) in milliseconds, RTT %.0f ms; medians [min .. max] of %d\n", h.RTT, r.Options.Rounds*handshakesAtOnce)
		p("\tkernel default, 1 s\tsyn_rto, synack_rto 10 ms\n")
		p("first SYN lost\t%s\t%s\n", h.SYN.Baseline.Format("%.1f"), h.SYN.Tuned.Format("%.1f"))
		p("first SYN-ACK lost\t%s\t%s\n", h.SYNACK.Baseline.Format("%.1f"), h.SYNACK.Tuned.Format("%.1f"))
	}
	if r.learned != nil {
		p("\nInitial window learned for two prefixes, %.0f Mbit/s, RTT %v; by candidate window: connections with losses, and mean ms for the first 64 KB\n", learningRate/1e6, 2*learningDelay)
		p("prefix\tlink\tlearned window\ttransfers")
		for _, c := range r.learned[0].Candidates {
			p("\t%d", c.Window)
		}
		p("\n")
		for _, l := range r.learned {
			p("%s\t%s\t%d\t%d", l.Prefix, l.Link, l.Window, l.Transfers)
			for _, c := range l.Candidates {
				p("\t%d of %d, %.0f", c.Lossy, c.Connections, c.Time)
			}
			p("\n")
		}
	}
	if r.cost != nil {
		p("\nCPU time of a loopback connection in microseconds (connect, accept, close), both ends in the cgroup; medians [min .. max] of %d batches of %d\n", r.Options.Batches, costBatch)
		p("\ttotal\tdifference to no program\tratio\n")
		for _, arm := range costArms {
			p("%s\t%s\t%.2f\t%.3f\n", costTitles[arm], harness.SpreadOf(r.cost[arm]).Format("%.2f"), harness.SpreadOf(r.cost.more(arm)).Median, harness.SpreadOf(r.cost.ratio(arm)).Median)
		}
	}
	p("\nCounters of the rules\n")
	p("rule\tconnections\toptions set\tfailed\n")
	for _, rule := range r.rules {
		if rule.Connections == 0 && len(r.Options.Only) > 0 {
			continue // the part was not run
		}
		var failed []string
		for _, f := range rule.Failures {
			failed = append(failed, fmt.Sprintf("%s: %s, %d times", f.Option, f.Error, f.Count))
		}
		p("%s\t%d\t%d\t%s\n", rule.Name, rule.Connections, rule.OptionsSet, strings.Join(failed, "; "))
	}
	p("\nDuration %s.\n", r.Took)
}

// saturation is the CPU utilization above which an incast run measures the CPUs instead of the bottleneck.
const saturation = 0.9

func (r *report) printIncast(p harness.Printf) {
	o := r.Options
	p("\nIncast over IPv6: %d senders, one receiver, %.0f Mbit/s with a queue of %d packets. Each sender has X flows of 1 MB RPCs, %d stream and %d flows of 10 KB RPCs;\n",
		senders, float64(o.Rate)/1e6, o.Queue, streamFlows, smallFlows)
	p("%d rounds of %g s for each arm. %s: same_prefix 44 bits, sndbuf and rcvbuf %d bytes, cwnd_clamp %d, syn_rto and synack_rto 10 ms.\n", o.Rounds, o.Seconds, tuned, o.Buffers, o.Clamp)
	p("%s: cwnd lock %d. %s: SO_SNDBUF %d; SO_RCVBUF %d and TCP_WINDOW_CLAMP %d at the receiver. Times of a stream are those of 1 MB; rates are means of a flow.\n",
		byRoute, o.Clamp, byApp, o.Buffers, receiveBuffer(o.Clamp), o.Clamp*segment)
	p("X\tflows\t\tdropped\tmarked")
	for _, class := range flowClasses {
		p("\t%s: retransmits\tP50\tP99, ms\tMbit/s", class.title)
	}
	p("\tCPU\n")
	for _, x := range o.X {
		for _, arm := range o.Arms {
			f := r.point(arm, x)
			p("%d\t%d\t%s\t%d\t%d", x, flowsOf(x), arm, f.Drops, f.Marks)
			for _, class := range flowClasses {
				c := f.Classes[class.key]
				p("\t%d\t%s\t%s\t%s", c.Retransmits, text("%.1f", c.P50), text("%.1f", c.P99), text("%.2f", c.Rate))
			}
			p("\t%s %%\n", text("%.0f", 100*f.CPU))
		}
	}
	if n := r.saturated(); n > 0 {
		p("In %d of %d runs the CPU utilization, including other processes, exceeded %.0f %%: repeat the benchmark on an idle machine.\n", n, len(r.incast), 100*saturation)
	}
	p("\nIncast, ratio to %s\n", baseline)
	p("X\tflows\t\tdropped\tretransmits\t1 MB P99\t1 MB rate\tstream rate\t10 KB P50\t10 KB P99\t10 KB rate\n")
	for _, x := range r.Options.X {
		b := r.point(baseline, x)
		for _, arm := range o.Arms[1:] {
			f := r.point(arm, x)
			p("%d\t%d\t%s\t%s\t%s", x, flowsOf(x), arm, ofText("%.3f", harness.Figure(f.Drops), harness.Figure(b.Drops)),
				ofText("%.3f", harness.Figure(f.Retransmits), harness.Figure(b.Retransmits)))
			for _, c := range []struct {
				key    string
				figure func(classPoint) harness.Figure
			}{{"1mb", p99}, {"1mb", rate}, {"stream", rate}, {"10kb", p50}, {"10kb", p99}, {"10kb", rate}} {
				p("\t%s", ofText("%.2f", c.figure(f.Classes[c.key]), c.figure(b.Classes[c.key])))
			}
			p("\n")
		}
	}
	if x := r.effectEnd(); x > 0 {
		p("The effect on losses ends at X = %d, with %d flows: the bottleneck drops more than half as many packets of %s as of %s.\n", x, flowsOf(x), tuned, baseline)
	}
}

func (r *report) printWindows(p harness.Printf) {
	p("\nCompletion time of a transfer of %s to %s on a new connection in milliseconds, %.0f Mbit/s; ratios to the fixed window of 10 are medians [p25 .. p75] of transfers of the same size\n",
		sizeText(iwSmallest), sizeText(iwLargest), iwRate/1e6)
	p("RTT\tqueue\tinitial window\ttransfers\tmean\tP10\tP25\tP50\tP75\tP90\tP99\tratio\n")
	for _, l := range r.iw {
		for _, arm := range []string{fixed10, fixed40, exploring, explored} {
			title := iwTitles[arm]
			if arm == explored {
				title = fmt.Sprintf("%s: %d", title, l.window)
			}
			f := l.times(arm)
			p("%d ms\t%d\t%s\t%d\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f", l.rtt.Milliseconds(), l.queue, title, f.Transfers, f.Mean, f.P10, f.P25, f.P50, f.P75, f.P90, f.P99)
			if f.Ratio != nil {
				p("\t%v\n", f.Ratio)
			} else {
				p("\t-\n")
			}
		}
	}
}

// ofText formats a ratio, or "-".
func ofText(verb string, part, of harness.Figure) string { return text(verb, part/of) }

// text formats a figure, or "-" if it was not measured.
func text(verb string, f harness.Figure) string {
	if math.IsNaN(float64(f)) || math.IsInf(float64(f), 0) {
		return "-"
	}
	return fmt.Sprintf(verb, f)
}

// Figures implements harness.Report.
func (r *report) Figures() any {
	var iw []any
	for _, l := range r.iw {
		iw = append(iw, l.figures())
	}
	out := map[string]any{"incast": r.incastFigures(), "iw": iw, "syn_rto": r.handshake, "learning": r.learned, "cost_us": nil}
	if r.cost != nil {
		us, detail := map[string]any{}, map[string]any{}
		for _, arm := range costArms {
			detail[arm] = map[string]harness.Spread{
				"us": harness.SpreadOf(r.cost[arm]).Rounded(), "more_us": harness.SpreadOf(r.cost.more(arm)).Rounded(), "ratio": harness.SpreadOf(r.cost.ratio(arm)).Rounded(),
			}
			if arm != costNone {
				us[arm] = harness.Number(harness.SpreadOf(r.cost.more(arm)).Median)
			}
		}
		us["arms"] = detail
		out["cost_us"] = us
	}
	if x := r.effectEnd(); r.incast != nil && x > 0 {
		out["incast_effect_ends"] = map[string]int{"x": x, "flows": flowsOf(x)}
	}
	out["detail"] = map[string]any{"run": r, "incast_runs": r.incast, "incast_runs_saturated": r.saturated(), "rules": r.rules}
	return out
}

// incastFigures returns the points of all arms, by X.
func (r *report) incastFigures() (rows []map[string]any) {
	if r.incast == nil {
		return nil
	}
	for _, x := range r.Options.X {
		row := map[string]any{"x": x, "flows": flowsOf(x)}
		for _, arm := range r.Options.Arms {
			row[arm] = r.point(arm, x)
		}
		rows = append(rows, row)
	}
	return rows
}

// effectEnd returns the smallest X at which the rule no longer reduces the drops of the bottleneck by half, and 0 if there
// is none. Drops and not retransmissions: on a busy host, TCP also probes for losses that did not happen.
func (r *report) effectEnd() int {
	for _, x := range r.Options.X {
		if b, t := r.point(baseline, x), r.point(tuned, x); b.Segments > 0 && 2*t.Drops > b.Drops {
			return x
		}
	}
	return 0
}

// saturated returns the number of runs above this utilization.
func (r *report) saturated() (n int) {
	for _, run := range r.incast {
		if run.CPU > saturation {
			n++
		}
	}
	return n
}

// Charts implements harness.Report.
func (r *report) Charts() map[string]chart.Chart {
	charts := map[string]chart.Chart{}
	if r.incast != nil {
		charts["-incast"] = r.incastChart()
	}
	if r.iw != nil {
		charts["-iw"] = r.iwChart()
	}
	return charts
}

// incastCharts is the number of arms that a chart of the incast shows.
const incastCharts = 4

func (r *report) incastChart() chart.Chart {
	arms := r.Options.Arms[:min(incastCharts, len(r.Options.Arms))]
	drawing := chart.Chart{
		Title:  fmt.Sprintf("Incast: three senders, one receiver, a queue of %d packets", r.Options.Queue),
		Legend: arms,
	}
	for _, panel := range []struct {
		title, verb string
		figure      func(p incastPoint) harness.Figure
	}{
		{"retransmitted segments", "%.0f", func(p incastPoint) harness.Figure { return harness.Figure(p.Retransmits) }},
		{"10 KB RPCs: P99 latency, ms", "%.1f", func(p incastPoint) harness.Figure { return p.Classes["10kb"].P99 }},
		{"1 MB RPCs: P99 latency, ms", "%.0f", func(p incastPoint) harness.Figure { return p.Classes["1mb"].P99 }},
		{"10 KB RPCs: Mbit/s per flow", "%.2f", func(p incastPoint) harness.Figure { return p.Classes["10kb"].Rate }},
		{"1 MB RPCs: Mbit/s per flow", "%.1f", func(p incastPoint) harness.Figure { return p.Classes["1mb"].Rate }},
	} {
		p := chart.Panel{Title: panel.title}
		for _, x := range r.Options.X {
			b := panel.figure(r.point(baseline, x))
			for i, arm := range arms {
				f := panel.figure(r.point(arm, x))
				if math.IsNaN(float64(f)) {
					continue
				}
				bar := chart.Bar{Note: fmt.Sprintf(panel.verb, f), Parts: make([]float64, i+1)}
				bar.Parts[i] = float64(f)
				if i == 0 {
					bar.Label = fmt.Sprintf("X = %d, %d flows", x, flowsOf(x))
				} else {
					bar.Note += fmt.Sprintf(" (%s times baseline)", ofText("%.2f", f, b))
				}
				p.Bars = append(p.Bars, bar)
			}
		}
		drawing.Panels = append(drawing.Panels, p)
	}
	return drawing
}

// point returns the results of an arm.
func (r *report) point(arm string, x int) incastPoint {
	p := incastPoint{Classes: map[string]classPoint{}}
	var rounds harness.Figure
	took := map[string][]float64{}
	for _, run := range r.incast {
		if run.Arm != arm || run.X != x {
			continue
		}
		rounds++
		p.Segments += run.Segments
		p.Drops += run.Drops
		p.Marks += run.Marks
		p.CPU += harness.Figure(run.CPU)
		for key, c := range run.Classes {
			sum := p.Classes[key]
			sum.Retransmits += c.Retransmits
			sum.Rate += harness.Figure(c.Rate)
			p.Classes[key] = sum
			took[key] = append(took[key], c.took...)
		}
	}
	p.CPU /= rounds
	for key, c := range p.Classes {
		p.Retransmits += c.Retransmits
		c.Rate /= rounds
		c.P50, c.P99, c.Samples = harness.Quantile(took[key], 0.5), harness.Quantile(took[key], 0.99), len(took[key])
		p.Classes[key] = c
	}
	return p
}

// iwChart draws the distributions of completion times.
func (r *report) iwChart() chart.Chart {
	drawing := chart.Chart{Title: fmt.Sprintf("Transfers of %s to %s on new connections, by initial window: share completed, by ms", sizeText(iwSmallest), sizeText(iwLargest))}
	for _, arm := range iwArms {
		drawing.Legend = append(drawing.Legend, iwTitles[arm])
	}
	for _, l := range r.iw {
		p := chart.Panel{Title: fmt.Sprintf("RTT %d ms, queue of %d packets; explored: %d", l.rtt.Milliseconds(), l.queue, l.window)}
		for _, arm := range iwArms {
			p.Samples = append(p.Samples, l.took[arm])
		}
		drawing.Panels = append(drawing.Panels, p)
	}
	return drawing
}

func sizeText(bytes int) string {
	if bytes >= 1_000_000 {
		return fmt.Sprintf("%g MB", float64(bytes)/1e6)
	}
	return fmt.Sprintf("%g KB", float64(bytes)/1e3)
}
