// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/internal/testenv"
	"sockeye/lab"
)

// TestMain also runs the worker processes of the benchmark.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && Benchmark.Workers[os.Args[1]] != nil {
		os.Exit(harness.RunCommand(os.Args[1:], Benchmark))
	}
	os.Exit(testenv.Run(m))
}

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
		t.Error("the time of the first 10 MB is set before they arrived")
	}
	b.add(1)
	if b.First == 0 || b.First != b.last {
		t.Errorf("the first 10 MB arrived at %d, want %d", b.First, b.last)
	}
	for range 100 {
		b.add(1)
	}
	if got := b.at(b.last); got != startOfLoad+100 {
		t.Errorf("%v bytes arrived until the end, want %d", got, startOfLoad+100)
	}
	if n := len(b.Samples); n > 20 {
		t.Errorf("%d samples of %d additions in one interval; samples are not merged", n, 102)
	}
}

func TestGapBeforeFirstAndAfterLastByte(t *testing.T) {
	a := &arrivals{Samples: [][2]int64{{3e9, 1}, {4e9, 2}, {5e9, 3}}, Longest: 1e9}
	for _, c := range []struct{ start, end, want int64 }{{25e8, 55e8, 1e9}, {1e9, 55e8, 2e9}, {25e8, 8e9, 3e9}, {25e8, 45e8, 1e9}} {
		if got := a.gap(c.start, c.end); got != c.want {
			t.Errorf("gap(%d, %d) = %d, want %d", c.start, c.end, got, c.want)
		}
	}
	if got := (&arrivals{}).gap(1e9, 3e9); got != 2e9 {
		t.Errorf("gap without a byte = %d, want %d", got, int64(2e9))
	}
}

func testPoint(rtt int, native, sockeye, pasta, cpu float64, partial uint64) *gatewayPoint {
	run := func(mbit, cpu float64) []gatewayRun {
		return []gatewayRun{{Mbit: mbit, CPU: cpu, First: 0.5, Gap: 0.1}}
	}
	p := &gatewayPoint{
		Link: linkLimited, RTT: rtt, MTU: 1500, CC: "cubic", Direction: upload, Connections: 1,
		sides: map[string][]gatewayRun{
			sideNative: run(native, math.NaN()), sideSockeye: run(sockeye, cpu), sidePasta: run(pasta, 1), sidePastaNew: run(2*pasta, 0.6),
		},
	}
	p.sides[sideSockeye][0].Partial, p.sides[sideSockeye][0].Resent, p.sides[sideSockeye][0].Inside = partial, 3, 4
	return p
}

// tripsOf returns three rounds of each side, with the given times in us as medians.
func tripsOf(times ...float64) map[string][]rrResult {
	runs := map[string][]rrResult{}
	for i, side := range gatewaySides {
		for _, factor := range []float64{1, 0.5, 3} {
			us := harness.Figure(times[i] * factor)
			runs[side] = append(runs[side], rrResult{us, 2 * us, 1e6 / us, 5})
		}
	}
	return runs
}

func TestGatewayReport(t *testing.T) {
	r := &gatewayReport{
		Options:      options{Rounds: 1, Links: []string{linkLimited}, MTUs: []int{1500}, CCs: []string{"cubic"}, Directions: []string{upload}, Sides: gatewaySides},
		PastaVersion: "1", PastaNewVersion: "2",
		Run: harness.Run{Kernel: "6.18", CPUs: 2, Took: "1m0s"},
		Points: []*gatewayPoint{
			testPoint(15, 960, 950, 13, 0.5, 0),
			testPoint(285, 490, 400, 13, 1.5, 2),
			testPoint(0, 960, 900, 700, 0.5, 0),
		},
		Requests: []gatewayRequests{{Link: linkLimited, RTT: 15, MTU: 1500, PerSecond: map[string]harness.Figure{sideNative: 66, sideSockeye: 65, sidePasta: harness.Figure(math.NaN()), sidePastaNew: 64}}},
		RR: []*gatewayRR{
			{
				Connections: 1, MTU: 1500, Trips: tripsOf(10, 16, 40, 18), Connects: tripsOf(30, 60, 90, 50),
			},
			{Connections: 16, MTU: 1500, Trips: tripsOf(10, 18, 40, 15), Connects: tripsOf(30, 40, 90, 50)},
		},
		Programs: []*gatewayProgram{
			{Name: "redis-benchmark", Unit: "connections/s", Runs: map[string][]float64{sideNative: {20000}, sideSockeye: {12000}, sidePasta: {9000}, sidePastaNew: {8000}}},
			{Name: "wget", Unit: "s", smaller: true, Runs: map[string][]float64{sideNative: {2}, sideSockeye: {2.1}, sidePasta: {5}, sidePastaNew: {4}}},
		},
		Core: []*gatewayCore{{MTU: 65520, Direction: upload, Runs: map[string][]coreRun{
			sideNative: {{Mbit: 9000}}, sideSockeye: {{8000, 0.9, 18000, 8, 20000}}, sidePasta: {{700, 1, 60000, 0.7, 60000}}, sidePastaNew: {{900, 1, 70000, 0.9, 70000}},
		}}},
		Seeds: []gatewaySeed{{RTT: 15, Seconds: map[string][]float64{sideNative: {900, 950}}, Mean: map[string]harness.Figure{sideNative: 925}}},
	}
	// The load stalls in one round of three, which the median does not show.
	stalled := testPoint(1, 960, 960, 13, 0.5, 0)
	for name, runs := range stalled.sides {
		stalled.sides[name] = append(runs, runs[0], runs[0])
	}
	stalled.sides[sideSockeye][0].Gap = 1.5
	r.Points = append(r.Points, stalled)
	b, err := harness.JSON(r)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		PastaVersion    string `json:"pasta_version"`
		PastaNewVersion string `json:"pasta_new_version"`
		RR              []struct {
			Connections int                `json:"connections"`
			MTU         int                `json:"mtu"`
			Native      float64            `json:"native"`
			Sockeye     float64            `json:"sockeye"`
			Pasta       float64            `json:"pasta"`
			PastaNew    float64            `json:"pasta_new"`
			P99         map[string]float64 `json:"p99_us"`
			Connect     map[string]float64 `json:"connect_us"`
			CPU         map[string]float64 `json:"connect_cpu_us"`
		} `json:"rr"`
		Points []struct {
			RTT         int     `json:"rtt_ms"`
			MTU         int     `json:"mtu"`
			CC          string  `json:"cc"`
			Direction   string  `json:"direction"`
			Connections int     `json:"connections"`
			Native      float64 `json:"native_mbit"`
			Sockeye     float64 `json:"sockeye_mbit"`
			Pasta       float64 `json:"pasta_mbit"`
			PastaNew    float64 `json:"pasta_new_mbit"`
			Partial     int     `json:"partial_sends"`
			Resent      int     `json:"retransmits"`
			CPU         struct {
				Sockeye  float64 `json:"sockeye"`
				Pasta    float64 `json:"pasta"`
				PastaNew float64 `json:"pasta_new"`
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
		p.Native != 490 || p.Sockeye != 400 || p.Pasta != 13 || p.Partial != 2 || p.Resent != 7 || p.CPU.Sockeye != 1.5 || p.CPU.Pasta != 1 ||
		p.PastaNew != 26 || p.CPU.PastaNew != 0.6 {
		t.Errorf("point = %+v", p)
	}
	if got.PastaVersion != "1" || got.PastaNewVersion != "2" || len(got.RR) != 2 {
		t.Fatalf("versions %q, %q, %d round trips", got.PastaVersion, got.PastaNewVersion, len(got.RR))
	}
	if r := got.RR[1]; r.Connections != 16 || r.MTU != 1500 || r.Native != 10 || r.Sockeye != 18 || r.Pasta != 40 || r.PastaNew != 15 ||
		r.P99[sideSockeye] != 36 || r.Connect[sidePasta] != 90 || r.CPU[sidePastaNew] != 5 {
		t.Errorf("round trips = %+v", r)
	}
	text := harness.Text(r)
	for _, want := range []string{
		"with delay, at least 0.95 times native: met at 2 of 3 points\n  missed: 1gbit 285 ms, MTU 1500, cubic, upload, 1 connection: 0.82 times native\n",
		"without delay, at least 1.5 times pasta: met at 0 of 1 points\n  missed: 1gbit 0 ms, MTU 1500, cubic, upload, 1 connection: 1.29 times pasta, 0.94 times native\n",
		"without delay, at least 1.5 times pasta, or 0.95 times native: met at 0 of 1 points\n",
		"no partial send: met at 3 of 4 points\n", "no stall: met at 3 of 4 points\n", "less CPU per GB than pasta: met at 3 of 4 points\n",
		"66      65       -      64\n", "900 950\n", "pasta: passt 1; pasta_new: passt 2\n",
		"less CPU per GB than the newest pasta: met at 3 of 4 points\n",
		"median of a round trip to native's, MTU 1500, 16 connections: 1.80 [1.80 .. 1.80], at most 1.70: missed\n",
		"P99 of a connect to the newest pasta's, MTU 1500, 16 connections: 0.80 [0.80 .. 0.80], at most 1.00: met\n",
		"without delay, at least 0.6 times native: met at 1 of 1 points\n",
		"wget             s              2.00    2.10     5.00   4.00       1.05 [1.05 .. 1.05]  0.53 [0.53 .. 0.53]\n",
		"connections/s of redis-benchmark to the newest pasta's: 1.50 [1.50 .. 1.50], at least 1.00: met\n",
		"time of wget to native's: 1.05 [1.05 .. 1.05], at most 1.05: met\n",
		"MTU 65520, upload  9000    8000     700    900        0.90                 1.00   1.00       8.0                  0.7    0.9        20000    60000  70000\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the report does not contain %q:\n%s", want, text)
		}
	}
	d := xml.NewDecoder(strings.NewReader(string(r.chart().SVG())))
	for err == nil {
		_, err = d.Token()
	}
	if !errors.Is(err, io.EOF) {
		t.Errorf("the chart is not valid XML: %v", err)
	}
}

func TestMedianOfMissingFigures(t *testing.T) {
	p := testPoint(0, 1, 1, 1, 1, 0)
	p.sides[sideSockeye] = []gatewayRun{{First: math.NaN()}, {First: 0.5}, {First: 0.7}}
	if got := p.median(sideSockeye, runFirst); got != 0.7 {
		t.Errorf("median = %v, want 0.7", got)
	}
	p.sides[sideSockeye][1].First = math.NaN()
	if got := p.median(sideSockeye, runFirst); !math.IsNaN(got) {
		t.Errorf("median = %v, want NaN", got)
	}
}

// datagramTestLoad returns a load of 1000 datagrams of which the sides receive the given numbers.
func datagramTestLoad(burst, rate int, arrived ...int) *datagramLoad {
	l := &datagramLoad{Burst: burst, Rate: rate, Runs: map[string][]datagramRun{}}
	for i, n := range arrived {
		l.Runs[gatewaySides[i]] = []datagramRun{{
			Sent: 1000, Arrived: n, Elapsed: 1000 / float64(max(rate, 1)), CPU: harness.Figure(2 + i), Lost: datagramLost{Socket: 1000 - n},
		}}
	}
	return l
}

func TestDatagramReport(t *testing.T) {
	d := &gatewayDatagrams{
		Direction: inbound, Bytes: 200,
		Bursts: []*datagramLoad{datagramTestLoad(2000, 0, 1000, 900, 800), datagramTestLoad(20000, 0, 1000, 700, 600)},
		Rates: []*datagramLoad{
			datagramTestLoad(0, 20000, 1000, 1000, 998), datagramTestLoad(0, 50000, 1000, 1000), datagramTestLoad(0, 100000, 1000, 990),
		},
	}
	slow := &d.Rates[2].Runs[sideNative][0]
	slow.Elapsed *= 2
	again := d.Rates[1].Runs[sideSockeye][0]
	again.Arrived, again.Lost.Socket = 500, 500
	d.Rates[1].Runs[sideSockeye] = []datagramRun{again, d.Rates[1].Runs[sideSockeye][0]}
	for side, want := range map[string]string{sideNative: "50000+", sideSockeye: "50000", sidePasta: "0"} {
		if got := d.highestText(side); got != want {
			t.Errorf("the highest rate of %s is %s, want %s", side, got, want)
		}
	}
	r := &gatewayReport{Options: options{Rounds: 1, Sides: gatewaySides[:3]}, Datagrams: []*gatewayDatagrams{d}, DatagramBuffers: datagramBuffers{8192, 4096, 2048, 0}}
	text := harness.Text(r)
	for _, want := range []string{
		"medians of 3", "in bytes: programs 8192, Sockeye's gateway 4096, pasta 2048",
		"inbound, 200 bytes  1000           900      800    1000            700      600    50000+          50000    0      3.0",
		"  inbound, 200 bytes, burst of 2000, sockeye: of 1000 sent: 100 at the gateway's socket\n",
		"  inbound, 200 bytes, 100000/s, sockeye: of 1000 sent: 10 at the gateway's socket\n",
		"  inbound, 200 bytes, 20000/s, pasta: of 1000 sent: 2 at the gateway's socket\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the report does not contain %q:\n%s", want, text)
		}
	}
	if strings.Contains(text, "native:") || strings.Contains(text, "Aims") {
		t.Errorf("native datagrams are lost, or aims without points are printed:\n%s", text)
	}
	b, err := harness.JSON(r)
	if err != nil {
		t.Fatal(err)
	}
	var got struct {
		UDP []struct {
			Direction string         `json:"direction"`
			Bytes     int            `json:"bytes"`
			Highest   map[string]int `json:"highest_per_second"`
			Bursts    []struct {
				Datagrams int                      `json:"datagrams"`
				Runs      map[string][]datagramRun `json:"runs"`
			} `json:"bursts"`
			CPU map[string]float64 `json:"cpu_us_per_datagram"`
		} `json:"udp"`
	}
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if len(got.UDP) != 1 || len(got.UDP[0].Bursts) != 2 {
		t.Fatalf("udp = %+v", got.UDP)
	}
	if u := got.UDP[0]; u.Direction != inbound || u.Bytes != 200 || u.Highest[sideSockeye] != 50000 || u.CPU[sidePasta] != 4 ||
		u.Bursts[1].Datagrams != 20000 || u.Bursts[1].Runs[sidePasta][0].Arrived != 600 {
		t.Errorf("udp = %+v", u)
	}
}

func TestDeviceDrops(t *testing.T) {
	const text = "Inter-|   Receive                                                |  Transmit\n" +
		" face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n" +
		"    lo: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n eth0: 9 9 9 20 9 9 9 9 9 9 9 3 9 9 9 9\n"
	if got := deviceDrops(text, "eth0"); got != 23 {
		t.Errorf("%d drops, want 23", got)
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
		t.Error("parseIperf accepts text that is not a report")
	}
}

// TestGatewayLoad runs a load natively and through a gateway, in both directions, over a link with a delay.
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
	p, err := newGatewayPath(ctx, l, linkLimited, "")
	if err != nil {
		t.Fatal(err)
	}
	broken, err := p.newSide(ctx, sideSockeye, 1)
	if err == nil {
		t.Error("startSide accepts an MTU of 1")
	}
	if err := broken.stop(); err != nil {
		t.Errorf("stop a side that did not start: %v", err)
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
	b := &bench{lab: l, report: &gatewayReport{}}
	for name, side := range sides {
		for _, kind := range []string{roundTrips, connects} {
			const trips = 20 // of each connection, and one more that began before
			r, err := b.trips(p, side, task{Kind: kind, Connections: 3, Duration: trips * rtt})
			switch {
			case err != nil:
				t.Fatal(err)
			case r.Median < harness.Figure(rtt.Microseconds()), r.P99 < r.Median:
				t.Errorf("%s %s: median %v us, P99 %v us over a link of %v", name, kind, r.Median, r.P99, rtt)
			case r.Rate <= 0 || r.Rate > harness.Figure(3*(trips+1)/(trips*rtt.Seconds())):
				t.Errorf("%s %s: %v per second on 3 connections over a link of %v", name, kind, r.Rate, rtt)
			case (name == sideSockeye) != (r.CPU > 0):
				t.Errorf("%s %s: CPU of the gateway %v us", name, kind, r.CPU)
			}
		}
		for _, direction := range []string{upload, download} {
			r, err := b.load(p, side, task{Kind: direction, CC: "cubic", Connections: 2, Duration: time.Second}, time.Second/2)
			switch {
			case err != nil:
				t.Fatal(err)
			case r.Error != "":
				t.Errorf("%s %s: %s", name, direction, r.Error)
			case r.Mbit <= 0 || r.Mbit > 1.5*gatewayRate/1e6: // on a busy host, socket buffers have several MB from before the measured half second
				t.Errorf("%s %s: %v Mbit/s over a link of 1000 Mbit/s", name, direction, r.Mbit)
			case !math.IsNaN(r.First) && r.First < (2*rtt).Seconds():
				t.Errorf("%s %s: the first 10 MB took %v s", name, direction, r.First)
			case (name == sideSockeye) != (r.CPU > 0):
				t.Errorf("%s %s: CPU of the gateway %v s/GB", name, direction, r.CPU)
			}
		}
	}
}

// TestGatewayDatagrams sends datagrams natively and through sockeye isolate, in both directions: first so few that all
// arrive, then more than the program's socket accepts.
func TestGatewayDatagrams(t *testing.T) {
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
	b := &bench{lab: l, report: &gatewayReport{}}
	p, far, sides, err := b.datagramSides(ctx, []string{sideNative, sideSockeye})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		for _, s := range sides {
			if err := s.stop(); err != nil {
				t.Error(err)
			}
		}
	}()
	if s := b.report.DatagramBuffers; s.Program == 0 || s.Sockeye < s.Program {
		t.Errorf("receive buffers: %+v, want the gateway's at least as large as the programs'", s)
	}
	for name, side := range sides {
		for _, direction := range []string{inbound, outbound} {
			for _, load := range []*datagramLoad{{Burst: 50}, {Rate: 1000}} {
				d := &gatewayDatagrams{Direction: direction, Bytes: 1400}
				r, err := b.datagramLoad(p, far, side, d, load)
				want := max(load.Burst, int(float64(load.Rate)*b.datagramSteady().Seconds()))
				switch {
				case err != nil:
					t.Fatal(err)
				case r.Sent != want || r.Arrived != want || r.Lost != (datagramLost{}):
					t.Errorf("%s %s, %s: %+v, want %d", name, direction, load.name(), r, want)
				case (name == sideSockeye) != (r.CPU > 0):
					t.Errorf("%s %s, %s: CPU of the gateway %v us per datagram", name, direction, load.name(), r.CPU)
				// A sender that waits for a CPU exceeds this time.
				case load.Rate > 0 && r.Elapsed < float64(r.Sent-1)/float64(load.Rate):
					t.Errorf("%s %s: %d sent in %v s, faster than %s", name, direction, r.Sent, r.Elapsed, load.name())
				}
			}
		}
		// A stopped program reads nothing.
		pid, err := side.program()
		if err != nil {
			t.Fatal(err)
		}
		before, err := p.lost(side, inbound)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		var sent datagramSent
		if err := far.Ask(datagramTask{
			Run: 1, Bytes: 1400, Count: 20000, Target: netip.AddrPortFrom(p.addresses[0], datagramPort(name)),
		}, &sent); err != nil {
			t.Fatal(err)
		}
		err = l.WaitFor(ctx, "losses of "+name, func() (bool, error) {
			after, err := p.lost(side, inbound)
			return after.Program > before.Program || side.around != nil && after.Socket > before.Socket, err
		})
		if err := errors.Join(err, unix.Kill(pid, unix.SIGCONT)); err != nil {
			t.Fatal(err)
		}
	}
}
