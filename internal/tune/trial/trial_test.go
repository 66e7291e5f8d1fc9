// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package trial

import (
	"bytes"
	"encoding/json"
	"math"
	"math/rand/v2"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"sockeye/internal/histogram"
)

// world makes the connections of a trial. The factors of effect are the effect of the treatment.
type world struct {
	tail   float64 // of the Pareto distribution of segments; 0: 100 each
	live   bool    // a connection has a value of RTT and rate for each 10 segments
	loss   float64 // of a segment, mean
	spread float64 // of the connections' loss, as a logarithm's deviation
	bursts float64 // mean length of the burst that one of 100 connections loses
	dying  float64 // share of connections that end after up to 15 RTOs
	broken float64 // share of connections that live through 200 RTOs
}

type effect struct{ time, loss, dying, size float64 }

var none = effect{1, 1, 1, 1}

func (w world) arm(r *rand.Rand, n int, e effect) Sample {
	var s Sample
	for range n {
		y := 100.0
		if w.tail > 0 {
			y = min(1e6, 20*math.Pow(1-r.Float64(), -1/w.tail))
		}
		y = math.Floor(y * e.size)
		x := poisson(r, y*e.loss*w.loss*math.Exp(w.spread*r.NormFloat64()-w.spread*w.spread/2))
		if w.bursts > 0 && r.Float64() < 0.01*e.loss {
			x += math.Floor(w.bursts * r.ExpFloat64())
		}
		if r.Float64() < w.dying*e.dying {
			k := float64(1 + r.IntN(15))
			s.RTOs += uint64(k)
			x += k
		}
		if r.Float64() < w.broken*e.dying {
			s.RTOs += 200
			x += 200
			y += 200
		}
		x = min(x, y)
		s.Connections++
		s.Established++
		s.Closed++
		s.Segments += uint64(y)
		s.Retransmits += uint64(x)
		s.Segments2 += uint64(y * y)
		s.Retransmits2 += uint64(x * x)
		s.SegmentsRetransmits += uint64(x * y)
		s.Bytes += uint64(y * 1448 * r.Float64())
		rtt := 20000 * e.time * math.Exp(0.5*r.NormFloat64())
		rate := 5000 / e.time * math.Exp(r.NormFloat64())
		add(&s.Connect, uint64(rtt*(1+0.1*r.ExpFloat64())), 1)
		values := 1
		if w.live {
			values = int(max(1, y/10))
		}
		for range values {
			add(&s.RTT, uint64(rtt*(1+0.05*r.ExpFloat64())), 1)
			add(&s.Rate, uint64(rate*(1+0.2*r.Float64())), 1)
		}
	}
	return s
}

func poisson(r *rand.Rand, mean float64) float64 {
	if mean > 50 {
		return max(0, math.Round(mean+math.Sqrt(mean)*r.NormFloat64()))
	}
	k, p := 0.0, math.Exp(-mean)
	for u := r.Float64(); u > p; k++ {
		u *= r.Float64()
	}
	return k
}

func (c Comparison) row(t testing.TB, name string) Row {
	t.Helper()
	for _, row := range c.Rows {
		if row.Name == name {
			return row
		}
	}
	t.Fatalf("no row %s", name)
	return Row{}
}

func TestSameArms(t *testing.T) {
	const runs = 200
	for name, test := range map[string]struct {
		world
		treated, control int
	}{
		"few":                       {world{loss: 0.001, live: true}, 60, 40},
		"equal sizes":               {world{loss: 0.002, live: true, dying: 0.03}, 700, 700},
		"bursts only":               {world{live: true, bursts: 50, dying: 0.05}, 700, 300},
		"a tenth, unequal loss":     {world{live: true, loss: 0.001, spread: 1.5, bursts: 20, dying: 0.1}, 1800, 200},
		"mice and elephants":        {world{tail: 1.2, live: true, loss: 0.001, spread: 1.5, bursts: 20}, 600, 600},
		"mice and elephants, tenth": {world{tail: 1.5, live: true, loss: 0.005, spread: 1, dying: 0.05}, 2700, 300},
		"broken paths":              {world{tail: 3, loss: 0.05, broken: 0.004}, 1000, 1000},
		"counted at close":          {world{tail: 2, loss: 0.001, spread: 1, bursts: 20, dying: 0.05}, 700, 700},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(3, 4))
			var wrong int
			verdicts := map[string]int{}
			for i := range runs {
				c := Compare(test.arm(r, test.treated, none), test.arm(r, test.control, none), Options{Seed: uint64(i)})
				var any bool
				for _, row := range c.Rows {
					any = any || row.Verdict == Lower || row.Verdict == Higher
					if row.Verdict != NotEnough {
						verdicts[row.Name]++
					}
				}
				if any {
					wrong++
				}
			}
			t.Logf("%d of %d comparisons with a false verdict; enough data: %v", wrong, runs, verdicts)
			if wrong > runs*6/100 {
				t.Errorf("%d of %d comparisons of arms that are the same have a verdict", wrong, runs)
			}
		})
	}
}

func TestIntervalsHoldTheTruth(t *testing.T) {
	const runs = 150
	half := effect{time: 0.5, loss: 0.5, dying: 0.5, size: 1}
	for name, test := range map[string]struct {
		world
		effect
		treated, control int
		truth            map[string]float64
	}{
		"quantiles": {world{tail: 3, live: true, loss: 0.002}, half, 2500, 1500,
			map[string]float64{"connect_median": -50, "connect_p99": -50, "rtt_median": -50, "rate_median": 100}},
		"losses":              {world{loss: 0.002}, half, 300, 300, map[string]float64{"retransmits": -50}},
		"few losses":          {world{loss: 0.0002}, half, 500, 500, map[string]float64{"retransmits": -50}},
		"none with treatment": {world{loss: 0.002}, effect{1, 0, 1, 1}, 200, 200, map[string]float64{"retransmits": -100}},
		"bursts":              {world{bursts: 30}, half, 2000, 2000, map[string]float64{"retransmits": -50}},
		"unequal connections": {world{tail: 2, loss: 0.002, spread: 1.5}, half, 2000, 500, map[string]float64{"retransmits": -50}},
		"timeouts":            {world{dying: 0.1}, half, 1500, 1500, map[string]float64{"rtos": -50}},
		"bytes":               {world{tail: 3}, effect{1, 1, 1, 2}, 800, 400, map[string]float64{"bytes": 100}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(5, 6))
			holds, all := map[string]int{}, map[string]int{}
			for i := range runs {
				c := Compare(test.arm(r, test.treated, test.effect), test.arm(r, test.control, none), Options{Seed: uint64(i)})
				for row, truth := range test.truth {
					got := c.row(t, row)
					if got.Verdict == NotEnough {
						continue
					}
					all[row]++
					if *got.Low <= truth && (got.High == nil || truth <= *got.High) {
						holds[row]++
					}
				}
			}
			t.Logf("%v of %v intervals hold the true difference", holds, all)
			for row := range test.truth {
				if all[row] < runs/4 {
					t.Errorf("%s: enough data in %d of %d runs only", row, all[row], runs)
				}
				if float64(holds[row]) < 0.93*float64(all[row]) {
					t.Errorf("%s: %d of %d intervals hold the true difference, want 95 %%", row, holds[row], all[row])
				}
			}
		})
	}
}

func TestRealDifferencesAreFound(t *testing.T) {
	w := world{tail: 3, live: true, loss: 0.005, spread: 0.5, bursts: 10, dying: 0.3}
	better := effect{time: 0.5, loss: 0.1, dying: 0.1, size: 2}
	want := map[string]Verdict{
		"connect_median": Lower, "connect_p99": Lower, "rtt_median": Lower, "rtt_p99": Lower, "rate_median": Higher,
		"retransmits": Lower, "rtos": Lower, "bytes": Higher,
	}
	r := rand.New(rand.NewPCG(7, 8))
	found := map[string]int{}
	for i := range 20 {
		c := Compare(w.arm(r, 10000, better), w.arm(r, 3000, none), Options{Seed: uint64(i)})
		for _, row := range c.Rows {
			if row.Verdict == want[row.Name] {
				found[row.Name]++
			}
		}
	}
	for row := range want {
		if found[row] < 19 {
			t.Errorf("%s: found in %d of 20 trials", row, found[row])
		}
	}
}

// add counts a value n more times, as the tune program does: in its bucket only.
func add(h *Histogram, v, n uint64) {
	h.Buckets[histogram.Bucket[histogram.Quarters](v)] += n
	_, end := histogram.Bounds[histogram.Quarters](histogram.Bucket[histogram.Quarters](v))
	h.Count, h.Max = h.Count+n, max(h.Max, end)
}

// same returns n connections of 100 segments without losses.
func same(n uint64) Sample {
	s := Sample{Connections: n, Established: n, Closed: n, Bytes: 100000 * n, Segments: 100 * n, Segments2: 10000 * n}
	add(&s.RTT, 20000, n)
	add(&s.Connect, 20000, n)
	add(&s.Rate, 5000, n)
	return s
}

// lose makes each connection lose x of its 100 segments, and x of these by RTOs.
func (s Sample) lose(connections, x, rtos uint64) Sample {
	s.Retransmits += connections * x
	s.Retransmits2 += connections * x * x
	s.SegmentsRetransmits += connections * x * 100
	s.RTOs += connections * rtos
	return s
}

func TestLossesThatComeTogether(t *testing.T) {
	// The same number of losses: one each on many connections, or two each on half as many.
	apart := Compare(same(1000).lose(100, 1, 1), same(1000).lose(200, 1, 1), Options{})
	together := Compare(same(1000).lose(1, 100, 100), same(1000).lose(2, 100, 100), Options{})
	for _, row := range []string{"retransmits", "rtos"} {
		if a := apart.row(t, row); a.Verdict != Lower || math.Abs(*a.Difference+50) > 1e-9 || *a.Low > -50 || *a.High < -50 || *a.High > -30 {
			t.Errorf("apart: %s is %s", row, text(t, a))
		}
		if a := together.row(t, row); a.Verdict == Lower || a.Verdict == Higher {
			t.Errorf("together: %s is %s", row, text(t, a))
		}
	}
	// Five connections that ended by timeout, against one.
	died := Compare(same(1000).lose(500, 3, 0).lose(1, 15, 15), same(1000).lose(500, 3, 0).lose(5, 15, 15), Options{})
	if a := died.row(t, "rtos"); a.Verdict == Lower {
		t.Errorf("one death against five: %s", text(t, a))
	}
}

func text(t testing.TB, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestShapeWithinABucket uses values around 1000 in both arms, with less spread in one arm than a bucket can resolve.
func TestShapeWithinABucket(t *testing.T) {
	around := func(spread float64) Sample {
		s, r := Sample{Connections: 20000}, rand.New(rand.NewPCG(1, 2))
		for range s.Connections {
			add(&s.Connect, uint64(1000*math.Exp(spread*r.NormFloat64())), 1)
		}
		return s
	}
	row := Compare(around(0.01), around(0.2), Options{}).row(t, "connect_median")
	if row.Verdict != NoDifference || *row.Low > 0 || *row.High < 0 {
		t.Errorf("%s", text(t, row))
	}
}

func TestNoLossInOneArm(t *testing.T) {
	c := Compare(same(1000), same(1000).lose(100, 1, 0), Options{}).row(t, "retransmits")
	if c.Verdict != Lower || *c.Difference != -100 || *c.Low != -100 || *c.High > -90 || *c.High < -99 {
		t.Errorf("none of the treated: %s", text(t, c))
	}
	c = Compare(same(1000).lose(100, 1, 0), same(1000), Options{}).row(t, "retransmits")
	if c.Verdict != Higher || c.Difference != nil || c.High != nil || *c.Low < 1000 {
		t.Errorf("none of the control: %s", text(t, c))
	}
	// The binomial intervals of 0 of 100 and of 3 of 12. Published tables have 0.0362, and 0.0549 to 0.5719.
	c = Compare(same(1000), same(1000).lose(100, 1, 0), Options{}).row(t, "retransmits")
	if want := 100 * (0.0362/0.9638 - 1); math.Abs(*c.High-want) > 0.05 {
		t.Errorf("0 against 100: %s, want up to %g", text(t, c), want)
	}
	c = Compare(same(1000).lose(3, 1, 0), same(1000).lose(9, 1, 0), Options{}).row(t, "retransmits")
	if low, high := 100*(0.0549/0.9451-1), 100*(0.5719/0.4281-1); math.Abs(*c.Low-low) > 0.05 || math.Abs(*c.High-high) > 0.05 {
		t.Errorf("3 against 9: %s, want %g to %g", text(t, c), low, high)
	}
	c = Compare(same(1000), same(1000).lose(1, 1, 0), Options{}).row(t, "retransmits")
	if c.Verdict != NotEnough || c.More < 1000 || c.More > 100000 || c.Low != nil {
		t.Errorf("one loss: %s", text(t, c))
	}
}

func TestTooLittle(t *testing.T) {
	nothing := Sample{}
	uncounted := Sample{Connections: 1000}
	tests := map[string]struct {
		treated, control Sample
		more             bool // a number of connections helps
	}{
		"nothing":    {nothing, nothing, true},
		"no control": {same(1000).lose(100, 1, 1), nothing, true},
		"no treated": {nothing, same(1000).lose(100, 1, 1), true},
		"29":         {same(29), same(5000).lose(500, 1, 1), true},
		"uncounted":  {uncounted, uncounted, false},
	}
	for name, test := range tests {
		c := Compare(test.treated, test.control, Options{})
		for _, row := range c.Rows {
			if row.Verdict != NotEnough || row.Low != nil || row.High != nil {
				t.Errorf("%s: %s", name, text(t, row))
			}
			if row.More > 0 != test.more {
				t.Errorf("%s: %s needs %d more connections", name, row.Name, row.More)
			}
		}
		if !strings.Contains(c.Summary(), "not enough data") || strings.Contains(c.Summary(), "treated connections") {
			t.Errorf("%s: %s", name, c.Summary())
		}
	}
	if row := Compare(same(1000), same(200), Options{}).row(t, "rtt_p99"); row.Verdict != NotEnough || row.More != 2400 {
		t.Errorf("99 %% of 200 connections: %s, want 2400 more, for 600 of the control", text(t, row))
	}
}

func TestMoreConnectionsAreEnough(t *testing.T) {
	treated, control := same(100).lose(1, 1, 1), same(50).lose(1, 1, 1)
	for _, row := range Compare(treated, control, Options{}).Rows {
		if row.Verdict != NotEnough {
			continue
		}
		times := 1 + (row.More+149)/150
		grown := Compare(grow(treated, times), grow(control, times), Options{}).row(t, row.Name)
		if grown.Verdict == NotEnough {
			t.Errorf("%s: %d more were not enough: %s", row.Name, row.More, text(t, grown))
		}
		if times > 2 {
			if grown = Compare(grow(treated, times/2), grow(control, times/2), Options{}).row(t, row.Name); grown.Verdict != NotEnough {
				t.Errorf("%s: half of %d more were enough", row.Name, row.More)
			}
		}
	}
}

// grow multiplies all counts of a sample.
func grow(s Sample, times uint64) Sample {
	multiply(reflect.ValueOf(&s).Elem(), times)
	return s
}

func multiply(v reflect.Value, times uint64) {
	switch v.Kind() {
	case reflect.Uint64:
		v.SetUint(v.Uint() * times)
	case reflect.Array, reflect.Slice:
		for i := range v.Len() {
			multiply(v.Index(i), times)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			multiply(v.Field(i), times)
		}
	}
}

func TestIdenticalArms(t *testing.T) {
	s := world{live: true, loss: 0.01, bursts: 20, dying: 0.3}.arm(rand.New(rand.NewPCG(1, 2)), 2000, none)
	c := Compare(s, s, Options{Seed: 9})
	for _, row := range c.Rows {
		if row.Verdict != NoDifference || *row.Difference != 0 || *row.Low >= 0 || *row.High <= 0 {
			t.Errorf("%s", text(t, row))
		}
	}
	if text(t, c) != text(t, Compare(s, s, Options{Seed: 9})) {
		t.Error("the same comparison twice differs")
	}
	if text(t, c) == text(t, Compare(s, s, Options{Seed: 10})) {
		t.Error("the seed changes nothing")
	}
}

// TestHolm uses an interval that excludes 0 by too little to be significant among several rows.
func TestHolm(t *testing.T) {
	c := Compare(same(1000).lose(75, 1, 0), same(1000).lose(105, 1, 0), Options{}).row(t, "retransmits")
	if *c.High >= 0 || c.Verdict != NoDifference {
		t.Errorf("%s", text(t, c))
	}
}

func TestJSON(t *testing.T) {
	b := []byte(text(t, Compare(same(1000).lose(100, 1, 1), same(10), Options{})))
	for _, name := range regexp.MustCompile(`"([^"]*)":`).FindAllSubmatch(b, -1) {
		if !regexp.MustCompile(`^[a-z_]+$`).Match(name[1]) {
			t.Errorf("field %s", name[1])
		}
	}
	var back Comparison
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal([]byte(text(t, back)), b) {
		t.Errorf("%s decoded as %s", b, text(t, back))
	}
}

func TestSummary(t *testing.T) {
	percent := func(v float64) *float64 { return &v }
	c := Comparison{Rows: []Row{
		{Name: "connect_median", Verdict: NoDifference},
		{Name: "rtt_p99", Verdict: Higher, Difference: percent(4.26), Low: percent(0.2), High: percent(12)},
		{Name: "retransmits", Verdict: Lower, Difference: percent(-91.2), Low: percent(-95), High: percent(-84.3)},
		{Name: "rtos", Verdict: NotEnough, More: 1200},
		{Name: "bytes", Verdict: NotEnough},
	}}
	want := "treated connections have a 99 % RTT 4.3 % higher (95 % interval 0.2 % to 12 %), " +
		"lose 91 % fewer segments (95 % interval 84 % to 95 %); median connect time: no difference shown; " +
		"RTOs, bytes: not enough data (about 1200 more connections needed)"
	if got := c.Summary(); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	c = Comparison{Rows: []Row{{Name: "retransmits", Verdict: Higher, Low: percent(250)}}}
	if got, want := c.Summary(), "treated connections lose more segments (95 % interval 250 % and more)"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	c = Comparison{Rows: []Row{{Name: "retransmits", Verdict: Lower, Difference: percent(-100), Low: percent(-100), High: percent(-99.4)}}}
	if got, want := c.Summary(), "treated connections lose 100 % fewer segments (95 % interval 99.4 % to 100 %)"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
