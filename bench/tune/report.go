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
	iw        []iwPoint
	handshake *handshakeLosses
	learned   []learnedPrefix
	cost      cost

	rules []api.TuneRuleStatus
}

// incastPoint contains the results of all rounds of one arm with X flows of large RPCs: sums of counters, means of
// rates, and quantiles of all latencies.
type incastPoint struct {
	Rate        harness.Figure `json:"rate_1mb_mbit"` // rate of one flow
	Retransmits uint64         `json:"retransmits"`
	Segments    uint64         `json:"segments"`
	Drops       uint64         `json:"bottleneck_drops"`
	P50Small    harness.Figure `json:"p50_10kb_ms"`
	P99Small    harness.Figure `json:"p99_10kb_ms"`
	P50Large    harness.Figure `json:"p50_1mb_ms"`
	P99Large    harness.Figure `json:"p99_1mb_ms"`
	SmallRate   harness.Figure `json:"rpc_10kb_per_second"`
	StreamRate  harness.Figure `json:"rate_stream_mbit"`
	CPU         harness.Figure `json:"cpu_share"` // share of all CPUs, including other processes
	SmallRPCs   int            `json:"samples_10kb"`
	LargeRPCs   int            `json:"samples_1mb"`
}

type incastPair struct {
	X        int         `json:"x"`
	Baseline incastPoint `json:"baseline"`
	Tuned    incastPoint `json:"tuned"`
}

func (r *report) pairs() (pairs []incastPair) {
	if r.incast == nil {
		return nil
	}
	for _, x := range incastFlows {
		pairs = append(pairs, incastPair{x, r.point(baseline, x), r.point(tuned, x)})
	}
	return pairs
}

func (r *report) point(arm string, x int) (p incastPoint) {
	var smalls, larges []float64
	var rounds harness.Figure
	for _, run := range r.incast {
		if run.Arm != arm || run.X != x {
			continue
		}
		rounds++
		p.Retransmits += run.Retransmits
		p.Segments += run.Segments
		p.Drops += run.Drops
		p.Rate += harness.Figure(run.Rate)
		p.SmallRate += harness.Figure(run.SmallRate)
		p.StreamRate += harness.Figure(run.StreamRate)
		p.CPU += harness.Figure(run.CPU)
		smalls = append(smalls, run.small...)
		larges = append(larges, run.large...)
	}
	for _, f := range []*harness.Figure{&p.Rate, &p.SmallRate, &p.StreamRate, &p.CPU} {
		*f /= rounds
	}
	p.P50Small, p.P99Small = harness.Quantile(smalls, 0.5), harness.Quantile(smalls, 0.99)
	p.P50Large, p.P99Large = harness.Quantile(larges, 0.5), harness.Quantile(larges, 0.99)
	p.SmallRPCs, p.LargeRPCs = len(smalls), len(larges)
	return p
}

// Print implements harness.Report.
func (r *report) Print(p harness.Printf) {
	p("\nBoth arms in rotating order, with cubic; Linux %s, %d CPUs in total.\n", r.Kernel, r.CPUs)
	if pairs := r.pairs(); pairs != nil {
		o := r.Options
		p("\nIncast: %d senders, one receiver, %.0f Mbit/s with a queue of %d packets; X flows of 1 MB RPCs, a stream, two flows of 10 KB RPCs;\n", senders, float64(o.Rate)/1e6, o.Queue)
		p("%d rounds of %g s for each arm. Tuned: sndbuf and rcvbuf %d bytes, cwnd_clamp %d, syn_rto and synack_rto 10 ms\n", o.Rounds, o.Seconds, o.Buffers, o.Clamp)
		p("X\t\t1 MB flow, Mbit/s\tretransmits\tdropped\t10 KB p50\tp99, ms\t1 MB p50\tp99, ms\t10 KB RPCs/s\tstream, Mbit/s\tCPU\n")
		for _, pair := range pairs {
			for _, arm := range []struct {
				name string
				f    incastPoint
			}{{baseline, pair.Baseline}, {tuned, pair.Tuned}} {
				f := arm.f
				p("%d\t%s\t%.1f\t%d\t%d\t%.1f\t%.1f\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f %%\n", pair.X, arm.name, f.Rate, f.Retransmits, f.Drops,
					f.P50Small, f.P99Small, f.P50Large, f.P99Large, f.SmallRate, f.StreamRate, 100*f.CPU)
			}
		}
		if n := r.saturated(); n > 0 {
			p("In %d of %d runs the CPU utilization, including other processes, exceeded %.0f %%: repeat the benchmark on an idle machine.\n", n, len(r.incast), 100*saturation)
		}
		p("\nIncast, ratio of tuned to baseline\n")
		p("X\t1 MB flow, Mbit/s\tretransmits\t10 KB p99\t1 MB p99\t10 KB RPCs/s\n")
		for _, pair := range pairs {
			b, t := pair.Baseline, pair.Tuned
			p("%d\t%.2f\t%s\t%.2f\t%.2f\t%.2f\n", pair.X, t.Rate/b.Rate, ofText("%.3f", harness.Figure(t.Retransmits), harness.Figure(b.Retransmits)), t.P99Small/b.P99Small, t.P99Large/b.P99Large, t.SmallRate/b.SmallRate)
		}
	}
	if r.iw != nil {
		p("\nCompletion time of a transfer on a new connection in milliseconds, %.0f Mbit/s; medians of %d\n", iwRate/1e6, r.Options.Transfers)
		p("RTT\tsize\tinitial window 10\t40\tratio of 40 to 10\n")
		for _, f := range r.iw {
			p("%.0f ms\t%s\t%.0f\t%.0f\t%.2f\n", f.RTT, sizeText(f.Bytes), f.Baseline.Median, f.Tuned.Median, f.Tuned.Median/f.Baseline.Median)
		}
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

// saturated returns the number of runs above this utilization.
func (r *report) saturated() (n int) {
	for _, run := range r.incast {
		if run.CPU > saturation {
			n++
		}
	}
	return n
}

// ofText formats a ratio, or "-".
func ofText(verb string, part, of harness.Figure) string {
	if !(of > 0) {
		return "-"
	}
	return fmt.Sprintf(verb, part/of)
}

func sizeText(bytes int) string {
	if bytes >= 1_000_000 {
		return fmt.Sprintf("%g MB", float64(bytes)/1e6)
	}
	return fmt.Sprintf("%g KB", float64(bytes)/1e3)
}

// Figures implements harness.Report.
func (r *report) Figures() any {
	out := map[string]any{"incast": r.pairs(), "iw": r.iw, "syn_rto": r.handshake, "learning": r.learned, "cost_us": nil}
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
	out["detail"] = map[string]any{"run": r, "incast_runs": r.incast, "incast_runs_saturated": r.saturated(), "rules": r.rules}
	return out
}

// bars returns the bars of both arms, or nil unless both were measured.
func bars(label, verb string, b, t harness.Figure) []chart.Bar {
	if math.IsNaN(float64(b + t)) {
		return nil
	}
	return []chart.Bar{
		{Label: label, Note: fmt.Sprintf(verb, b), Parts: []float64{float64(b)}},
		{Note: fmt.Sprintf(verb+" (%s times baseline)", t, ofText("%.2f", t, b)), Parts: []float64{0, float64(t)}},
	}
}

func (r *report) incastChart() chart.Chart {
	drawing := chart.Chart{
		Title:  fmt.Sprintf("Incast: three senders, one receiver, a queue of %d packets", r.Options.Queue),
		Legend: []string{"baseline", "tuned"},
	}
	for _, panel := range []struct {
		title, verb string
		figure      func(p incastPoint) harness.Figure
	}{
		{"retransmitted segments", "%.0f", func(p incastPoint) harness.Figure { return harness.Figure(p.Retransmits) }},
		{"10 KB RPCs: P99 latency, ms", "%.1f", func(p incastPoint) harness.Figure { return p.P99Small }},
		{"1 MB RPCs: P99 latency, ms", "%.0f", func(p incastPoint) harness.Figure { return p.P99Large }},
		{"10 KB RPCs per second", "%.0f", func(p incastPoint) harness.Figure { return p.SmallRate }},
		{"1 MB RPCs: Mbit/s per flow", "%.1f", func(p incastPoint) harness.Figure { return p.Rate }},
	} {
		p := chart.Panel{Title: panel.title}
		for _, pair := range r.pairs() {
			p.Bars = append(p.Bars, bars(fmt.Sprintf("X = %d", pair.X), panel.verb, panel.figure(pair.Baseline), panel.figure(pair.Tuned))...)
		}
		drawing.Panels = append(drawing.Panels, p)
	}
	return drawing
}

func (r *report) iwChart() chart.Chart {
	drawing := chart.Chart{Title: "Completion time of a transfer on a new connection, ms", Legend: []string{"initial window 10", "40"}}
	for _, rtt := range iwRTTs {
		p := chart.Panel{Title: fmt.Sprintf("RTT %v", rtt)}
		for _, f := range r.iw {
			if f.RTT == float64(rtt.Milliseconds()) {
				p.Bars = append(p.Bars, bars(sizeText(f.Bytes), "%.0f", harness.Figure(f.Baseline.Median), harness.Figure(f.Tuned.Median))...)
			}
		}
		drawing.Panels = append(drawing.Panels, p)
	}
	return drawing
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
