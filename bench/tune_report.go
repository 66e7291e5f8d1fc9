// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/stats"
	"sockeye/lab/plot"
)

type tuneReport struct {
	Options tuneOptions `json:"options"`
	Kernel  string      `json:"kernel"`
	CPUs    int         `json:"cpus"`
	Started time.Time   `json:"started"`
	Took    string      `json:"took"`

	// Nil are the parts that were not run.
	incast    []incastRun
	iw        []iwPoint
	handshake *handshakeLosses
	learned   []learnedPrefix
	cost      cost

	rules []api.TuneRuleStatus
}

// A figure is NaN if it was not measured, and then null in JSON.
type figure float64

// MarshalJSON writes a number of at most four decimals, or null.
func (f figure) MarshalJSON() ([]byte, error) { return json.Marshal(number(float64(f))) }

// quantile of v, 0 to 1, by the nearest rank; NaN if there is none.
func quantile(v []float64, q float64) figure { return figure(stats.Quantile(v, q)) }

// An incastPoint is all rounds of one arm with X flows of large RPCs: sums of
// what is counted, means of rates, and quantiles of all latencies together.
type incastPoint struct {
	Rate        figure `json:"rate_1mb_mbit"` // of one flow
	Retransmits uint64 `json:"retransmits"`
	Segments    uint64 `json:"segments"`
	Drops       uint64 `json:"bottleneck_drops"`
	P50Small    figure `json:"p50_10kb_ms"`
	P99Small    figure `json:"p99_10kb_ms"`
	P50Large    figure `json:"p50_1mb_ms"`
	P99Large    figure `json:"p99_1mb_ms"`
	SmallRate   figure `json:"rpc_10kb_per_second"`
	StreamRate  figure `json:"rate_stream_mbit"`
	CPU         figure `json:"cpu_share"` // of all CPUs, others' work included
	SmallRPCs   int    `json:"samples_10kb"`
	LargeRPCs   int    `json:"samples_1mb"`
}

type incastPair struct {
	X        int         `json:"x"`
	Baseline incastPoint `json:"baseline"`
	Tuned    incastPoint `json:"tuned"`
}

func (r *tuneReport) pairs() (pairs []incastPair) {
	if r.incast == nil {
		return nil
	}
	for _, x := range incastFlows {
		pairs = append(pairs, incastPair{x, r.point(baseline, x), r.point(tuned, x)})
	}
	return pairs
}

func (r *tuneReport) point(arm string, x int) (p incastPoint) {
	var smalls, larges []float64
	var rounds figure
	for _, run := range r.incast {
		if run.Arm != arm || run.X != x {
			continue
		}
		rounds++
		p.Retransmits += run.Retransmits
		p.Segments += run.Segments
		p.Drops += run.Drops
		p.Rate += figure(run.Rate)
		p.SmallRate += figure(run.SmallRate)
		p.StreamRate += figure(run.StreamRate)
		p.CPU += figure(run.CPU)
		smalls = append(smalls, run.small...)
		larges = append(larges, run.large...)
	}
	for _, f := range []*figure{&p.Rate, &p.SmallRate, &p.StreamRate, &p.CPU} {
		*f /= rounds
	}
	p.P50Small, p.P99Small = quantile(smalls, 0.5), quantile(smalls, 0.99)
	p.P50Large, p.P99Large = quantile(larges, 0.5), quantile(larges, 0.99)
	p.SmallRPCs, p.LargeRPCs = len(smalls), len(larges)
	return p
}

// rounded keeps four decimals.
func rounded(v float64) float64 { return math.Round(v*1e4) / 1e4 }

func (s spread) rounded() spread { return spread{rounded(s.Median), rounded(s.Min), rounded(s.Max)} }

func (r *tuneReport) print(to io.Writer) {
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	p := func(format string, args ...any) { fmt.Fprintf(w, format, args...) }
	p("\nBoth arms in turn, cubic in both; Linux %s, %d CPUs for all of it.\n", r.Kernel, r.CPUs)
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
			p("In %d of the %d runs the CPUs were busy to more than %.0f %%, others' work included: run it on an idle machine.\n", n, len(r.incast), 100*saturation)
		}
		p("\nThe same, tuned of baseline\n")
		p("X\t1 MB flow, Mbit/s\tretransmits\t10 KB p99\t1 MB p99\t10 KB RPCs/s\n")
		for _, pair := range pairs {
			b, t := pair.Baseline, pair.Tuned
			p("%d\t%.2f\t%s\t%.2f\t%.2f\t%.2f\n", pair.X, t.Rate/b.Rate, ofText("%.3f", figure(t.Retransmits), figure(b.Retransmits)), t.P99Small/b.P99Small, t.P99Large/b.P99Large, t.SmallRate/b.SmallRate)
		}
	}
	if r.iw != nil {
		p("\nMilliseconds of a transfer on a new connection, %.0f Mbit/s; medians of %d\n", iwRate/1e6, r.Options.Transfers)
		p("RTT\tsize\tinitial window 10\t40\tof 10\n")
		for _, f := range r.iw {
			p("%.0f ms\t%s\t%.0f\t%.0f\t%.2f\n", f.RTT, sizeText(f.Bytes), f.Baseline.Median, f.Tuned.Median, f.Tuned.Median/f.Baseline.Median)
		}
	}
	if h := r.handshake; h != nil {
		p("\nMilliseconds that connect(2) takes, RTT %.0f ms; medians [min .. max] of %d\n", h.RTT, r.Options.Rounds*handshakesAtOnce)
		p("\tkernel's 1 s\tsyn_rto, synack_rto 10 ms\n")
		p("first SYN lost\t%s\t%s\n", h.SYN.Baseline.format("%.1f"), h.SYN.Tuned.format("%.1f"))
		p("first SYN-ACK lost\t%s\t%s\n", h.SYNACK.Baseline.format("%.1f"), h.SYNACK.Tuned.format("%.1f"))
	}
	if r.learned != nil {
		p("\nInitial window learned for two prefixes, %.0f Mbit/s, RTT %v; by candidate: lossy of connections, and mean ms of the first 64 KB\n", learningRate/1e6, 2*learningDelay)
		p("prefix\tlink\tsettled on\tafter transfers")
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
		p("\nMicroseconds of CPU for a connection on loopback, both ends in the cgroup: connect, accept, close; medians [min .. max] of %d batches of %d\n", r.Options.Batches, costBatch)
		p("\ttogether\tmore than without a program\tratio\n")
		for _, arm := range costArms {
			p("%s\t%s\t%.2f\t%.3f\n", costTitles[arm], spreadOf(r.cost[arm]).format("%.2f"), spreadOf(r.cost.more(arm)).Median, spreadOf(r.cost.ratio(arm)).Median)
		}
	}
	p("\nWhat the rules did\n")
	p("rule\tconnections\toptions set\tfailed\n")
	for _, rule := range r.rules {
		if rule.Connections == 0 && len(r.Options.Only) > 0 {
			continue // of a part that was not run
		}
		var failed []string
		for _, f := range rule.Failures {
			failed = append(failed, fmt.Sprintf("%s: %s, %d times", f.Option, f.Error, f.Count))
		}
		p("%s\t%d\t%d\t%s\n", rule.Name, rule.Connections, rule.OptionsSet, strings.Join(failed, "; "))
	}
	p("\nTook %s.\n", r.Took)
	if err := w.Flush(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
	}
}

// saturation is the share of the CPUs above which a run of incast measures these,
// and not the bottleneck.
const saturation = 0.9

// saturated counts such runs.
func (r *tuneReport) saturated() (n int) {
	for _, run := range r.incast {
		if run.CPU > saturation {
			n++
		}
	}
	return n
}

// ofText is a ratio, "-" if there is none.
func ofText(verb string, part, of figure) string {
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

func (r *tuneReport) json() ([]byte, error) {
	out := map[string]any{"incast": r.pairs(), "iw": r.iw, "syn_rto": r.handshake, "learning": r.learned, "cost_us": nil}
	if r.cost != nil {
		us, detail := map[string]any{}, map[string]any{}
		for _, arm := range costArms {
			detail[arm] = map[string]spread{
				"us": spreadOf(r.cost[arm]).rounded(), "more_us": spreadOf(r.cost.more(arm)).rounded(), "ratio": spreadOf(r.cost.ratio(arm)).rounded(),
			}
			if arm != costNone {
				us[arm] = number(spreadOf(r.cost.more(arm)).Median)
			}
		}
		us["arms"] = detail
		out["cost_us"] = us
	}
	out["detail"] = map[string]any{"run": r, "incast_runs": r.incast, "incast_runs_saturated": r.saturated(), "rules": r.rules}
	return json.MarshalIndent(out, "", "  ")
}

func (r *tuneReport) write(dir string) error {
	r.print(os.Stdout)
	b, err := r.json()
	if err != nil {
		return fmt.Errorf("write figures: %w", err)
	}
	files := map[string][]byte{"bench-tune.json": append(b, '\n')}
	if r.incast != nil {
		files["bench-tune-incast.svg"] = r.incastSVG()
	}
	if r.iw != nil {
		files["bench-tune-iw.svg"] = r.iwSVG()
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			return fmt.Errorf("write figures: %w", err)
		}
	}
	return nil
}

// bars are those of the two arms, one under the other; none unless both were
// measured.
func bars(label, verb string, b, t figure) []plot.Bar {
	if math.IsNaN(float64(b + t)) {
		return nil
	}
	return []plot.Bar{
		{Label: label, Note: fmt.Sprintf(verb, b), Parts: []float64{float64(b)}},
		{Note: fmt.Sprintf(verb+" (%s of baseline)", t, ofText("%.2f", t, b)), Parts: []float64{0, float64(t)}},
	}
}

func (r *tuneReport) incastSVG() []byte {
	chart := plot.Chart{
		Title:  fmt.Sprintf("Incast: three senders, one receiver, a queue of %d packets", r.Options.Queue),
		Legend: []string{"baseline", "tuned"},
	}
	for _, panel := range []struct {
		title, verb string
		figure      func(p incastPoint) figure
	}{
		{"retransmitted segments", "%.0f", func(p incastPoint) figure { return figure(p.Retransmits) }},
		{"10 KB RPCs: milliseconds of the slowest 1 %", "%.1f", func(p incastPoint) figure { return p.P99Small }},
		{"1 MB RPCs: milliseconds of the slowest 1 %", "%.0f", func(p incastPoint) figure { return p.P99Large }},
		{"10 KB RPCs a second", "%.0f", func(p incastPoint) figure { return p.SmallRate }},
		{"1 MB RPCs: Mbit/s of a flow", "%.1f", func(p incastPoint) figure { return p.Rate }},
	} {
		p := plot.Panel{Title: panel.title}
		for _, pair := range r.pairs() {
			p.Bars = append(p.Bars, bars(fmt.Sprintf("X = %d", pair.X), panel.verb, panel.figure(pair.Baseline), panel.figure(pair.Tuned))...)
		}
		chart.Panels = append(chart.Panels, p)
	}
	return chart.SVG()
}

func (r *tuneReport) iwSVG() []byte {
	chart := plot.Chart{Title: "Milliseconds of a transfer on a new connection", Legend: []string{"initial window 10", "40"}}
	for _, rtt := range iwRTTs {
		p := plot.Panel{Title: fmt.Sprintf("RTT %v", rtt)}
		for _, f := range r.iw {
			if f.RTT == float64(rtt.Milliseconds()) {
				p.Bars = append(p.Bars, bars(sizeText(f.Bytes), "%.0f", figure(f.Baseline.Median), figure(f.Tuned.Median))...)
			}
		}
		chart.Panels = append(chart.Panels, p)
	}
	return chart.SVG()
}
