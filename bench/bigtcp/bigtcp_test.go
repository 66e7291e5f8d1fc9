// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"

	"sockeye/bench/bigtcp/transfers"
	"sockeye/bench/harness"
)

func bigtcpResult(factor float64) *transfers.Result {
	r := &transfers.Result{Path: transfers.PathBridge, Message: 80000, Size: 185000, Rounds: 10, ForNS: 1e9}
	for _, family := range transfers.Families {
		r.Families = append(r.Families, transfers.Family{Family: family, Rows: []transfers.Row{
			{Name: "rr_min", Title: "latency, minimum", Unit: "µs", Off: 50, On: 50 / factor, Ratio: 1 / factor, Low: 0.99 / factor, High: 1.01 / factor},
			{Name: "rr_p90", Title: "latency, P90", Unit: "µs", Off: 60, On: 60 / factor, Ratio: 1 / factor, Low: 0.9 / factor, High: 1.1 / factor},
			{Name: "rr_p99", Title: "latency, P99", Unit: "µs", Off: 90, On: 90 / factor, Ratio: 1 / factor, Low: 0.9 / factor, High: 1.1 / factor},
			{Name: "rr_rate", Title: "transactions", Unit: "a second", Off: 18000, On: 18000 * factor, Ratio: factor, Low: 0.99 * factor, High: 1.01 * factor},
			{Name: "stream_rate", Title: "stream", Unit: "Gbit/s", Off: 17, On: 17 * factor, Ratio: factor, Low: 0.9 * factor, High: 1.1 * factor},
		}})
	}
	return r
}

func TestBigTCPReport(t *testing.T) {
	r := &report{Run: harness.Run{Kernel: "6.18", CPUs: 2, Took: "1m0s"}}
	for i := range setups {
		r.Setups = append(r.Setups, bigtcpResult(1.6-0.1*float64(i)))
	}
	b, err := harness.JSON(r)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		RR map[string]struct {
			TPS float64 `json:"tps_ratio"`
			P90 float64 `json:"p90_ratio"`
			P99 float64 `json:"p99_ratio"`
		} `json:"rr"`
		Stream map[string]struct {
			Ratio float64 `json:"ratio"`
		} `json:"stream"`
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	for _, family := range transfers.Families {
		if rr := got.RR[family]; rr.TPS != 1.6 || rr.P90 != 0.625 || rr.P99 != 0.625 || got.Stream[family].Ratio != 1.6 {
			t.Errorf("%s: %+v, %+v", family, rr, got.Stream[family])
		}
	}
	text := harness.Text(r)
	for _, want := range []string{
		"Two namespaces at a bridge", "IPv6  transactions  1.50: 1.60, met\n", "IPv4  latency, P90  0.70: 0.62, met\n",
		"veth pair, two CPUs  IPv6  1.20 [1.19 .. 1.21]     0.83 [0.75 .. 0.92]     0.83 [0.75 .. 0.92]     1.20 [1.08 .. 1.32]\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	for d := xml.NewDecoder(strings.NewReader(string(r.chart().SVG()))); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("svg: %v", err)
		}
	}
}

func TestBigTCPVerdict(t *testing.T) {
	for _, c := range []struct {
		ratio, low, high, aim float64
		most                  bool
		want                  string
	}{
		{1.6, 1.5, 1.7, 1.5, false, "met"},
		{1.6, 1.4, 1.7, 1.5, false, "met, within the noise"},
		{1.4, 1.3, 1.6, 1.5, false, "missed, within the noise"},
		{1.4, 1.3, 1.45, 1.5, false, "missed"},
		{0.6, 0.5, 0.7, 0.7, true, "met"},
		{0.6, 0.5, 0.8, 0.7, true, "met, within the noise"},
		{0.75, 0.6, 0.8, 0.7, true, "missed, within the noise"},
		{0.75, 0.71, 0.8, 0.7, true, "missed"},
	} {
		if got := verdict(transfers.Row{Ratio: c.ratio, Low: c.low, High: c.high}, c.aim, c.most); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}
