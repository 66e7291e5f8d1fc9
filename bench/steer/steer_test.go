// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"
	"time"

	"sockeye/bench/harness"
	"sockeye/lab/traffic"
)

func TestInitiationName(t *testing.T) {
	m := traffic.AppendInitiation(nil, "description", "127.10.0.9")
	proxied := append([]byte("\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c"), make([]byte, 12)...)
	for name, b := range map[string][]byte{"plain": m, "behind a proxy": append(proxied, m...)} {
		if got := initiationName(b); got != "127.10.0.9" {
			t.Errorf("%s: %q", name, got)
		}
	}
	for i := range m {
		initiationName(m[:i]) // must not panic
	}
}

func TestTogether(t *testing.T) {
	seen := func(routers ...int) map[string]uint64 {
		m := map[string]uint64{}
		for _, i := range routers {
			m[routerAddr(i).String()] = 1
		}
		return m
	}
	share, err := together([]received{{TCP: seen(0, 1), UDP: seen(0)}, {UDP: seen(1)}}, 2)
	if err != nil || share != 0.5 {
		t.Errorf("together = %v, %v; want 0.5", share, err)
	}
	for name, members := range map[string][]received{
		"missing": {{TCP: seen(0)}},
		"twice":   {{TCP: seen(0), UDP: seen(0)}, {UDP: seen(0)}},
	} {
		if _, err := together(members, 1); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestReport(t *testing.T) {
	run := func(arm string, round int, members, balance, generator float64) measurement {
		s := func(v float64) time.Duration { return time.Duration(v * float64(time.Second)) }
		return measurement{
			Arm: arm, Round: round, Sent: sent{Records: 900_000, Updates: 100_000, Elapsed: time.Second},
			Datagrams: 1000, FlowRecords: 900_000, Usage: map[string]harness.Usage{membersGroup: {User: time.Second / 4, System: s(members)}},
			Memory: map[string]float64{membersGroup: 10, balanceGroup: 20}, Members: s(members), Balance: s(balance), Generator: s(generator),
		}
	}
	p := &part{runs: []measurement{
		run("plain", 0, 2, 0, 1), run("proxy", 0, 2, 1, 2), // proxy arm: members 2, proxy 1, delivery 1
		run("plain", 1, 1, 0, 1), run("proxy", 1, 1, 1, 1),
	}}
	if got, want := p.ratio("proxy", "plain", collectorsCPU), (harness.Spread{Median: 2, Min: 2, Max: 2}); got != want {
		t.Errorf("proxy of plain: %+v, want %+v", got, want)
	}
	if got, want := harness.SpreadOf(p.by("proxy", balancingCPU)), (harness.Spread{Median: 1.5, Min: 1, Max: 2}); got != want {
		t.Errorf("balancing: %+v, want %+v", got, want)
	}
	if got := harness.SpreadOf(p.by("reuseport", collectorsCPU)).Median; !math.IsNaN(got) {
		t.Errorf("figures of an arm that did not run: %v", got)
	}
	r := &report{
		arms: []armTitle{{"plain", "plain"}, {"proxy", "proxy"}}, placement: p, rate: &part{runs: p.runs}, plain: p, nfacctd: p,
		examined: []armTitle{{"nft", "nft"}}, traits: map[string]traits{"nft": {MovedExporters: 0.5}},
		storms: stormSet{{Arm: "proxy", Failed: 9}, {Arm: "lookup", Failed: 3}},
	}
	b, err := harness.JSON(r)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Join(strings.Fields(string(b)), "")
	for _, want := range []string{
		`"memory_mb":{"plain":{"balancing":20,"bpf":0,"members":10},"proxy":`,
		`"members_user_cpu_s_per_million":{"median":0.25,`,
		`"storm":{"arms":{`, `"haproxy_failed":9,`, `"sockeye_failed":3}`,
		`"peers":{"nft":{`, `"moved_exporters":0.5,`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the JSON has no %s", want)
		}
	}
	if !strings.Contains(string(b), `"reuseport": null`) {
		t.Error("a value that was not measured is not null in the JSON")
	}
	r.arms = append(r.arms, armTitle{"pmacct-ebpf", "of storms alone"})
	svg := string(r.chart().SVG())
	if strings.Contains(svg, "NaN") || strings.Contains(svg, "of storms alone") {
		t.Errorf("the chart has an arm without figures: %s", svg)
	}
	for d := xml.NewDecoder(strings.NewReader(svg)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("svg: %v", err)
		}
	}
}

// TestJudged is that the ratios that goals compare are those of all rounds, with the plain run of the same round, and that a report
// omits arms that did not run.
func TestJudged(t *testing.T) {
	p := &part{}
	for round := range 40 {
		for arm, datagrams := range map[string]uint64{"plain": 100 * uint64(round+1), "lookup": 90 * uint64(round+1)} {
			p.runs = append(p.runs, measurement{Arm: arm, Round: round, Datagrams: datagrams, Sent: sent{Elapsed: time.Second}})
		}
	}
	var b strings.Builder
	printf := func(format string, args ...any) { fmt.Fprintf(&b, format, args...) }
	printJudged(printf, p, receivedRate)
	if got, want := b.String(), "Ratio of lookup to plain: 0.900, with a confidence of 95 % 0.900 .. 0.900 (40 rounds)\n"; got != want {
		t.Errorf("printed %q, want %q", got, want)
	}
	b.Reset()
	printCPU(printf, []armTitle{{"plain", "plain"}, {"nft", "nftables"}}, p, "members", rates{}, 1)
	if strings.Contains(b.String(), "nftables") {
		t.Errorf("an arm that did not run is printed: %s", b.String())
	}
}
