// SPDX-License-Identifier: Apache-2.0

// Package bigtcp is the benchmark of BIG TCP: requests with responses, and streams, between two namespaces, with BIG
// TCP off and on.
package bigtcp

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/bench/bigtcp/transfers"
	"sockeye/bench/harness"
	"sockeye/internal/chart"
)

const command = "bigtcp"

// Benchmark is the command bench bigtcp.
var Benchmark = harness.Benchmark{Name: command, Run: benchBigTCP}

// A setup is a path between two namespaces of this host.
type setup struct {
	title   string
	path    string
	twoCPUs bool
	message int // bytes; 0: the message size of the article
	// segmentation compares packets of the MTU with those of up to 65536 bytes.
	segmentation bool
}

// setups lists the setups. The first one is reported in detail.
var setups = []setup{
	{title: "bridge, one CPU", path: transfers.PathBridge},
	{title: "veth pair, one CPU", path: transfers.PathVeth},
	{title: "router, one CPU", path: transfers.PathRouter},
	{title: "bridge, two CPUs", path: transfers.PathBridge, twoCPUs: true},
	{title: "veth pair, two CPUs", path: transfers.PathVeth, twoCPUs: true},
	{title: "bridge, 60000 bytes", path: transfers.PathBridge, message: 60000},
	{title: "offload, one CPU", path: transfers.PathBridge, segmentation: true},
	{title: "offload, two CPUs", path: transfers.PathBridge, segmentation: true, twoCPUs: true},
}

// bigtcpAims are the required ratios of on to off: from the article for transactions, from the first machine of this
// benchmark for streams.
var bigtcpAims = []struct {
	row   string
	title string
	ratio float64
	most  bool // the ratio is a maximum
}{
	{"rr_rate", "transactions", 1.5, false},
	{"rr_p90", "latency, P90", 0.7, true},
	{"rr_p99", "latency, P99", 0.7, true},
	{"stream_rate", "stream", 1.29, false},
}

type report struct {
	harness.Run
	Setups []*transfers.Result `json:"setups"`
}

func benchBigTCP(args []string) error {
	fs := flag.NewFlagSet(command, flag.ContinueOnError)
	quick := fs.Bool("quick", false, "run for one minute instead of seven, with wider confidence intervals")
	if ok, err := harness.ParseFlags(fs, args); !ok {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	r := &report{Run: harness.Begin()}
	for i, s := range setups {
		o := transfers.Defaults()
		o.Path, o.TwoCPUs, o.Segmentation = s.path, s.twoCPUs, s.segmentation
		if s.message > 0 {
			o.Message = s.message
		}
		switch {
		case *quick && i == 0:
			o.For, o.Warmup = 300*time.Millisecond, 100*time.Millisecond
		case *quick:
			o.For, o.Warmup, o.Rounds = 100*time.Millisecond, 50*time.Millisecond, 6
		case i > 0:
			o.For = 500 * time.Millisecond
		}
		fmt.Fprintf(os.Stderr, "%s\n", s.title)
		result, err := transfers.Local(ctx, o)
		if err != nil {
			return fmt.Errorf("%s: %w", s.title, err)
		}
		r.Setups = append(r.Setups, result)
	}
	r.End()
	return harness.Publish(command, r)
}

var families = map[string]string{transfers.IPv6: "IPv6", transfers.IPv4: "IPv4"}

// Print implements harness.Report.
func (r *report) Print(p harness.Printf) {
	reported := r.Setups[0]
	p("\n")
	for _, line := range reported.Text() {
		p("%s\n", line)
	}
	p("\nAims for the ratio of on to off\n")
	for _, family := range transfers.Families {
		for _, aim := range bigtcpAims {
			if row, ok := reported.Row(family, aim.row); ok {
				p("%s  %-12s  %.2f: %.2f, %s\n", families[family], aim.title, aim.ratio, row.Ratio, verdict(row, aim.ratio, aim.most))
			}
		}
	}
	p("\nRatios of on to off, by path; a message of 60000 bytes fits into one packet, also with BIG TCP off. Offload: packets of the MTU (off) and of\n")
	p("up to 65536 bytes (on), which is what segmentation offload gives without BIG TCP.\n")
	head := fmt.Sprintf("%-27s", "")
	for _, aim := range bigtcpAims {
		head += fmt.Sprintf("%-24s", aim.title)
	}
	p("%s\n", strings.TrimRight(head, " "))
	for i, s := range setups {
		for _, family := range transfers.Families {
			line := fmt.Sprintf("%-21s%-6s", s.title, families[family])
			for _, aim := range bigtcpAims {
				row, _ := r.Setups[i].Row(family, aim.row)
				line += fmt.Sprintf("%-24s", ratioText(row))
			}
			p("%s\n", strings.TrimRight(line, " "))
		}
	}
	p("\n%d CPUs. Duration %s.\n", r.CPUs, r.Took)
}

func ratioText(r transfers.Row) string {
	return fmt.Sprintf("%.2f [%.2f .. %.2f]", r.Ratio, r.Low, r.High)
}

// Figures implements harness.Report.
func (r *report) Figures() any {
	ratio := func(family, row string) harness.Figure {
		found, _ := r.Setups[0].Row(family, row)
		return harness.Figure(found.Ratio)
	}
	type rr struct {
		TPS harness.Figure `json:"tps_ratio"`
		Min harness.Figure `json:"min_ratio"`
		P90 harness.Figure `json:"p90_ratio"`
		P99 harness.Figure `json:"p99_ratio"`
		CPU harness.Figure `json:"cpu_ratio"`
	}
	type stream struct {
		Ratio harness.Figure `json:"ratio"`
		CPU   harness.Figure `json:"cpu_ratio"`
	}
	rrs, streams, aims := map[string]rr{}, map[string]stream{}, map[string]map[string]string{}
	for _, f := range r.Setups[0].Families {
		name := f.Family
		rrs[name] = rr{ratio(name, "rr_rate"), ratio(name, "rr_min"), ratio(name, "rr_p90"), ratio(name, "rr_p99"), ratio(name, "rr_cpu")}
		streams[name] = stream{ratio(name, "stream_rate"), ratio(name, "stream_cpu_gb")}
		aims[name] = map[string]string{}
		for _, aim := range bigtcpAims {
			if row, ok := r.Setups[0].Row(name, aim.row); ok {
				aims[name][aim.row] = fmt.Sprintf("%.2f: %s", aim.ratio, verdict(row, aim.ratio, aim.most))
			}
		}
	}
	return struct {
		RR     map[string]rr                `json:"rr"`
		Stream map[string]stream            `json:"stream"`
		Aims   map[string]map[string]string `json:"aims"`
		Run    *report                      `json:"run"`
	}{rrs, streams, aims, r}
}

// Targets implements harness.Report.
func (r *report) Targets() (all []harness.Target) {
	for _, family := range transfers.Families {
		for _, aim := range bigtcpAims {
			row, ok := r.Setups[0].Row(family, aim.row)
			if !ok {
				continue
			}
			goal := "at least"
			if aim.most {
				goal = "at most"
			}
			all = append(all, harness.Target{Claim: families[family] + ", " + aim.title + ", ratio of on to off", Goal: fmt.Sprintf("%s %.2f", goal, aim.ratio),
				Measured: ratioText(row), Verdict: verdict(row, aim.ratio, aim.most)})
		}
	}
	return all
}

// verdict compares the ratio of a row with an aim.
func verdict(r transfers.Row, aim float64, most bool) string {
	met, low, high := r.Ratio >= aim, r.Low >= aim, r.High >= aim
	if most {
		met, low, high = r.Ratio <= aim, r.High <= aim, r.Low <= aim
	}
	switch {
	case low:
		return "met"
	case !high:
		return "missed"
	case met:
		return "met, within the noise"
	default:
		return "missed, within the noise"
	}
}

// Charts implements harness.Report.
func (r *report) Charts() map[string]chart.Chart { return map[string]chart.Chart{"": r.chart()} }

// chart draws the reported setup, off and on, and the ratios of the other setups.
func (r *report) chart() chart.Chart {
	drawing := chart.Chart{Title: "BIG TCP off and on, two namespaces on a bridge, both on one CPU", Legend: []string{"off", "on"}}
	for _, m := range []struct{ row, title, verb string }{
		{"rr_rate", "Transactions per second, request and response of 80000 bytes", "%.0f"},
		{"rr_min", "Latency, minimum, µs", "%.1f"},
		{"rr_p90", "Latency, P90, µs", "%.1f"},
		{"rr_p99", "Latency, P99, µs", "%.1f"},
		{"stream_rate", "Stream, Gbit/s", "%.1f"},
		{"stream_cpu_gb", "CPU of a stream, both ends, s/GB", "%.3f"},
	} {
		p := chart.Panel{Title: m.title}
		for _, family := range transfers.Families {
			row, ok := r.Setups[0].Row(family, m.row)
			if !ok {
				continue
			}
			name := families[family]
			p.Bars = append(p.Bars,
				chart.Bar{Label: name + ", off", Note: fmt.Sprintf(m.verb, row.Off), Parts: []float64{row.Off}},
				chart.Bar{Label: name + ", on", Note: fmt.Sprintf(m.verb+" (× %.2f)", row.On, row.Ratio), Parts: []float64{0, row.On}})
		}
		drawing.Panels = append(drawing.Panels, p)
	}
	for _, m := range []struct{ row, title string }{
		{"rr_rate", "Transactions, ratio of on to off by path"}, {"stream_rate", "Stream, ratio of on to off by path"},
	} {
		p := chart.Panel{Title: m.title}
		for i, s := range setups {
			for _, family := range transfers.Families {
				row, ok := r.Setups[i].Row(family, m.row)
				if ok {
					p.Bars = append(p.Bars, chart.Bar{Label: s.title + ", " + families[family], Note: ratioText(row), Parts: []float64{0, row.Ratio}})
				}
			}
		}
		drawing.Panels = append(drawing.Panels, p)
	}
	return drawing
}
