// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"sockeye/lab"
)

func TestArrivals(t *testing.T) {
	a := &arrivals{Samples: [][2]int64{{1e9, 1000}, {2e9, 2000}, {4e9, 2000}}}
	for moment, want := range map[int64]float64{1: 0, 1e9: 0, 15e8: 1500, 2e9: 2000, 3e9: 2000, 9e9: 2000} {
		if got := a.at(moment); got != want {
			t.Errorf("at(%d) = %v, want %v", moment, got, want)
		}
	}
	if got := a.rate(1.5e9, 2.5e9); got != 4000 {
		t.Errorf("rate = %v, want 4000", got)
	}
	b := &arrivals{}
	b.add(startOfLoad - 1)
	if b.First != 0 {
		t.Error("the first 10 MB came before they did")
	}
	b.add(1)
	if b.First == 0 || b.First != b.last {
		t.Errorf("the first 10 MB came at %d, want %d", b.First, b.last)
	}
}

func TestOrder(t *testing.T) {
	first := map[string]bool{}
	for round := range len(gatewaySides) {
		o := order(round)
		first[o[0]] = true
		if !slices.Equal(slices.Sorted(slices.Values(o)), slices.Sorted(slices.Values(gatewaySides))) {
			t.Errorf("round %d has %v", round, o)
		}
	}
	if len(first) != len(gatewaySides) {
		t.Errorf("only %v begin a round", first)
	}
}

func gatewayTestPoint(rtt int, native, sockeye, pasta, cpu float64, partial uint64) *gatewayPoint {
	run := func(mbit, cpu float64) []gatewayRun {
		return []gatewayRun{{Mbit: mbit, CPU: cpu, First: 0.5, Gap: 0.1}}
	}
	p := &gatewayPoint{
		Link: linkLimited, RTT: rtt, MTU: 1500, CC: "cubic", Direction: upload, Connections: 1,
		sides: map[string][]gatewayRun{sideNative: run(native, math.NaN()), sideSockeye: run(sockeye, cpu), sidePasta: run(pasta, 1)},
	}
	p.sides[sideSockeye][0].Partial, p.sides[sideSockeye][0].Resent, p.sides[sideSockeye][0].Inside = partial, 3, 4
	return p
}

func TestGatewayReport(t *testing.T) {
	r := &gatewayReport{
		Options: gatewayOptions{Rounds: 1, Links: []string{linkLimited}, MTUs: []int{1500}, CCs: []string{"cubic"}, Directions: []string{upload}},
		Kernel:  "6.18", CPUs: 2, Took: "1m0s",
		Points: []*gatewayPoint{
			gatewayTestPoint(15, 960, 950, 13, 0.5, 0),
			gatewayTestPoint(285, 490, 400, 13, 1.5, 2),
			gatewayTestPoint(0, 960, 900, 700, 0.5, 0),
		},
		Requests: []gatewayRequests{{Link: linkLimited, RTT: 15, MTU: 1500, PerSecond: map[string]figure{sideNative: 66, sideSockeye: 65, sidePasta: figure(math.NaN())}}},
		Seeds:    []gatewaySeed{{RTT: 15, Seconds: map[string][]float64{sideNative: {900, 950}}, Mean: map[string]figure{sideNative: 925}}},
	}
	stalled := gatewayTestPoint(1, 960, 960, 13, 0.5, 0)
	stalled.sides[sideSockeye][0].Gap = 1.5
	r.Points = append(r.Points, stalled)
	b, err := r.json()
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		Points []struct {
			RTT         int     `json:"rtt_ms"`
			MTU         int     `json:"mtu"`
			CC          string  `json:"cc"`
			Direction   string  `json:"direction"`
			Connections int     `json:"connections"`
			Native      float64 `json:"native_mbit"`
			Sockeye     float64 `json:"sockeye_mbit"`
			Pasta       float64 `json:"pasta_mbit"`
			Partial     int     `json:"partial_sends"`
			Resent      int     `json:"retransmits"`
			CPU         struct {
				Sockeye float64 `json:"sockeye"`
				Pasta   float64 `json:"pasta"`
			} `json:"cpu_s_per_gb"`
		} `json:"points"`
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Points) != 4 {
		t.Fatalf("%d points, want 4", len(got.Points))
	}
	p := got.Points[1]
	if p.RTT != 285 || p.MTU != 1500 || p.CC != "cubic" || p.Direction != "upload" || p.Connections != 1 ||
		p.Native != 490 || p.Sockeye != 400 || p.Pasta != 13 || p.Partial != 2 || p.Resent != 7 || p.CPU.Sockeye != 1.5 || p.CPU.Pasta != 1 {
		t.Errorf("point = %+v", p)
	}
	var text strings.Builder
	r.print(&text)
	for _, want := range []string{
		"with delay, at least 0.95 of native: at 2 of 3 points\n  missed: 1gbit 285 ms, MTU 1500, cubic, upload, 1 connection: 0.82\n",
		"without delay, at least 1.5 times pasta, or 0.95 of native: at 0 of 1 points\n  missed: 1gbit 0 ms, MTU 1500, cubic, upload, 1 connection: 1.29\n",
		"no partial send: at 3 of 4 points\n", "no stall: at 3 of 4 points\n", "less CPU per GB than pasta: at 3 of 4 points\n",
		"66      65       -\n", "900 950\n",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, text.String())
		}
	}
	d := xml.NewDecoder(strings.NewReader(string(r.svg())))
	for err == nil {
		_, err = d.Token()
	}
	if !errors.Is(err, io.EOF) {
		t.Errorf("the plot is no XML: %v", err)
	}
}

func TestParseIperf(t *testing.T) {
	rates, mean, err := parseIperf([]byte(`{"intervals":[{"sum":{"bits_per_second":9e8}},{"sum":{"bits_per_second":1e8}}],"end":{"sum_received":{"bits_per_second":5e8}}}`))
	if err != nil || !slices.Equal(rates, []float64{900, 100}) || mean != 500 {
		t.Errorf("%v, %v, %v", rates, mean, err)
	}
	if _, _, err := parseIperf([]byte(`{"error":"unable to connect"}`)); err == nil || !strings.Contains(err.Error(), "unable to connect") {
		t.Errorf("error = %v", err)
	}
	if _, _, err := parseIperf([]byte(`iperf3: no`)); err == nil {
		t.Error("text that is no report was taken")
	}
}

// TestGatewayLoad has a load go natively and through a gateway, over a link with a delay,
// in both directions.
func TestGatewayLoad(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := lab.New(ctx, lab.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	p, err := newGatewayPath(ctx, l, linkLimited)
	if err != nil {
		t.Fatal(err)
	}
	sides := map[string]*gatewaySide{}
	for _, name := range []string{sideNative, sideSockeye} {
		if sides[name], err = p.newSide(ctx, name, 1500); err != nil {
			t.Fatal(err)
		}
	}
	if err := choose(p, sides, "cubic"); err != nil {
		t.Fatal(err)
	}
	const rtt = 10 * time.Millisecond
	if err := p.delay(rtt); err != nil {
		t.Fatal(err)
	}
	b := &gatewayBench{lab: l, report: &gatewayReport{}}
	for name, side := range sides {
		for _, direction := range []string{upload, download} {
			r, err := b.load(p, side, gatewayTask{Kind: direction, CC: "cubic", Connections: 2, Duration: time.Second}, time.Second/2)
			switch {
			case err != nil:
				t.Fatal(err)
			case r.Error != "":
				t.Errorf("%s %s: %s", name, direction, r.Error)
			case r.Mbit <= 0 || r.Mbit > 1.1*gatewayRate/1e6:
				t.Errorf("%s %s: %v Mbit/s over a link of 1000", name, direction, r.Mbit)
			case !math.IsNaN(r.First) && r.First < (2*rtt).Seconds():
				t.Errorf("%s %s: the first 10 MB took %v s", name, direction, r.First)
			case (name == sideSockeye) != (r.CPU > 0):
				t.Errorf("%s %s: CPU of the gateway %v s/GB", name, direction, r.CPU)
			}
		}
	}
}
