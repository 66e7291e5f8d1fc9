// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"sockeye/bench/harness"
	"sockeye/internal/testenv"
	"sockeye/lab"
	"sockeye/lab/simulate/model"
)

func newBench(t *testing.T, o options) *bench {
	t.Helper()
	testenv.NeedTCX(t)
	l, err := lab.New(t.Context(), lab.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	b := &bench{options: o, lab: l}
	if err := b.mountPins(); err != nil {
		t.Fatal(err)
	}
	return b
}

// TestCosts measures one launch of the program.
func TestCosts(t *testing.T) {
	measured, err := newBench(t, options{Launches: 1}).costs(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p := measured.(*costPart)
	for _, size := range []int{0, largeMap} {
		local, forwarded, other := p.distribution(size, "local").Median, p.distribution(size, "forwarded").Median, p.distribution(size, "other").Median
		if !(other > 0 && local > other && forwarded > local) {
			t.Errorf("device map of %d: local %v ns, forwarded %v, other %v", size, local, forwarded, other)
		}
	}
}

// TestRates sends each load through each arm.
func TestRates(t *testing.T) {
	measured, err := newBench(t, options{Launches: 1, Rounds: 1, Slice: 5 * time.Millisecond}).rates(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p := measured.(*ratePart)
	for _, a := range arms {
		if why := p.left[a.name]; why != "" {
			t.Logf("%s: %s", a.name, why)
			if a.name != "nft" && a.name != "ipvs" {
				t.Errorf("%s was not run: %s", a.name, why)
			}
			continue
		}
		for _, l := range loads {
			s, ok := p.launches[0][0][a.name][l.name]
			switch {
			case a.name == armDropped && l.bytes == 0:
				if ok {
					t.Errorf("%s has a stream", a.name)
				}
			case s.Rate <= 0 || s.CPU <= 0 || s.Lost > 0.1:
				t.Errorf("%s, %s: %+v", a.name, l.name, s)
			case l.bytes > 0 && (s.Bytes < float64(headerBytes+l.bytes) || s.Bytes > float64(headerBytes+l.bytes+50)):
				t.Errorf("%s, %s: packets of %v bytes", a.name, l.name, s.Bytes)
			}
		}
	}
}

func TestSimulate(t *testing.T) {
	b := &bench{options: options{Fleets: []int{3}, Days: 30}}
	measured, err := b.simulate(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if p := measured.(*simulatedPart); len(p.fleets) != 1 || p.fleets[0].Hosts != 3 || p.worst() < 0.5 || p.worst() > 2 {
		t.Errorf("%+v", p.fleets)
	}
}

// sampleReport returns a report in which Sockeye has a share of the kernel's rate.
func sampleReport(share float64) *report {
	costs := &costPart{empty: []float64{30, 32, 31}, above: map[int]map[string][]float64{
		0:        {"local": {44, 45, 46}, "forwarded": {138, 139, 140}, "other": {28, 29, 30}},
		largeMap: {"local": {69, 70, 71}, "forwarded": {162, 163, 164}, "other": {28, 29, 30}},
	}}
	rates := &ratePart{left: map[string]string{"ipvs": "ipvsadm: Can't initialize ipvs: Protocol not available"}}
	for i := range 8 {
		r := round{}
		for _, a := range arms {
			if rates.left[a.name] != "" {
				continue
			}
			rate := 1e6 + 1e3*float64(i)
			switch a.name {
			case armSockeye:
				rate *= share
			case armDropped:
				rate *= 2
			}
			r[a.name] = map[string]sample{}
			for _, l := range loads {
				if l.bytes > 0 || a.name != armDropped {
					r[a.name][l.name] = sample{Rate: rate, CPU: 1e9 / rate, Bytes: float64(headerBytes + l.bytes), Busy: 0.99}
				}
			}
		}
		rates.launches = append(rates.launches, []round{r})
	}
	simulated := &simulatedPart{days: 365, fleets: []model.Result{{Hosts: 3, Moved: 100, MovedOverIdeal: 0.99}, {Hosts: 1000, Moved: 200, MovedOverIdeal: 1.02}}}
	changes := &changesPart{changes: []change{
		{Name: "join", Moved: 5500, Ideal: 5461, Sent: 1000, Forwarded: 0.6, Misdirected: 1, Split: 0.8, Gap: 0.01},
		{Name: "drain", Moved: 5500, Ideal: 5461, Sent: 1000, Forwarded: 0.5},
		{Name: "return", Moved: 5400, Ideal: 5461, Sent: 1000, Forwarded: 0.6},
		{Name: "kill", Moved: 5500, Ideal: 5461, Sent: 1000, Lost: 300, Gap: 2.9},
	}}
	return &report{Run: harness.Run{Kernel: "6.18", CPUs: 2, Took: "1m0s"}, parts: []part{costs, rates, changes, simulated}}
}

func TestReport(t *testing.T) {
	r := sampleReport(0.97)
	b, err := harness.JSON(r)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		NS struct {
			Local     float64 `json:"local"`
			Forwarded float64 `json:"forwarded"`
			Other     float64 `json:"other"`
			DeviceMap struct {
				Forwarded float64 `json:"forwarded"`
			} `json:"device_map"`
		} `json:"ns"`
		Rate  float64                              `json:"rate_vs_forwarding"`
		Rates map[string]map[string]map[string]any `json:"rate"`
		Left  map[string]string                    `json:"rate_left_out"`
		Join  struct {
			Moved int     `json:"moved"`
			Ideal float64 `json:"ideal"`
			Lost  *int    `json:"lost"`
		} `json:"join"`
		Drain struct {
			Lost *int `json:"lost"`
		} `json:"drain"`
		Kill struct {
			Gap float64 `json:"gap_s"`
		} `json:"kill"`
		Misdirected int     `json:"misdirected"`
		Forwarded   float64 `json:"share_forwarded"`
		Simulated   struct {
			Hosts int     `json:"hosts"`
			Moved float64 `json:"moved_over_ideal"`
		} `json:"simulated"`
		Targets []harness.Target `json:"targets"`
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if got.NS.Local != 45 || got.NS.Forwarded != 139 || got.NS.Other != 29 || got.NS.DeviceMap.Forwarded != 163 {
		t.Errorf("ns: %+v", got.NS)
	}
	if got.Rate != 0.97 || got.Rates["udp_64"][armSockeye]["ratio_to"] != armForwarding || got.Left["ipvs"] == "" {
		t.Errorf("rate %v, %v, left out %v", got.Rate, got.Rates["udp_64"], got.Left)
	}
	if got.Simulated.Hosts != 1000 || got.Simulated.Moved != 1.02 {
		t.Errorf("simulated: %+v", got.Simulated)
	}
	if got.Join.Moved != 5500 || got.Join.Ideal != 5461 || got.Join.Lost == nil || got.Drain.Lost == nil || got.Kill.Gap != 2.9 || got.Misdirected != 1 || got.Forwarded != 0.55 {
		t.Errorf("changes: %+v, %+v, %+v, misdirected %d", got.Join, got.Drain, got.Kill, got.Misdirected)
	}
	var verdicts []string
	for _, target := range got.Targets {
		verdicts = append(verdicts, target.Verdict)
	}
	if all := strings.Join(verdicts, ", "); all != "met, missed, met, met, met, missed, met, met" {
		t.Errorf("verdicts %s of %+v", all, got.Targets)
	}
	if worse := sampleReport(0.9).Targets()[2]; worse.Verdict != "missed" {
		t.Errorf("with a rate of 0.9: %+v", worse)
	}
	text := harness.Text(r)
	for _, want := range []string{
		"no device map                  45 [44 .. 46]    139 [138 .. 140]  29 [28 .. 30]\n",
		"Sockeye                  973395              0.970 [0.970 .. 0.970]",
		"Not run: IPVS, direct, sh: ipvsadm: Can't initialize ipvs: Protocol not available.\n",
		"kill    0.0      5500           1.007          1000       300   0",
		"1000   0       0       0           0       200            1.020",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	for d := xml.NewDecoder(strings.NewReader(string(r.Charts()[""].SVG()))); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("svg: %v", err)
		}
	}
}
