// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package measure

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/config"
	"sockeye/internal/histogram"
)

// traffic makes slices of a side. The common level of slices changes slowly: alike is the correlation of consecutive
// slices, and sway the standard deviation of its logarithm.
type traffic struct {
	slices, messages int // messages of a slice, about
	alike, sway      float64
	incidents        float64 // share of slices in which a third takes 8 times as long
}

// parts are the stages of a message and their medians.
var parts = []struct {
	stage  config.Stage
	median float64
}{{config.StageStack, 20e3}, {config.StageQdisc, 5e3}, {config.StageNetwork, 10e6}}

// side makes a side on which one stage takes a multiple of its time.
func (w traffic) side(r *rand.Rand, longer map[config.Stage]float64) []*Result {
	var results []*Result
	sway := make([]float64, len(parts))
	for i := range sway {
		sway[i] = r.NormFloat64()
	}
	for range w.slices {
		result := &Result{Stages: map[config.Stage]*Histogram{Total: {}}}
		for i, part := range parts {
			result.Stages[part.stage] = &Histogram{}
			sway[i] = w.alike*sway[i] + math.Sqrt(1-w.alike*w.alike)*r.NormFloat64()
		}
		slow := 0.01
		if r.Float64() < w.incidents {
			slow = 0.33
		}
		for range int(float64(w.messages) * math.Exp(0.5*r.NormFloat64())) {
			var total float64
			for i, part := range parts {
				v := part.median * math.Exp(w.sway*sway[i]+0.4*r.NormFloat64())
				if f, ok := longer[part.stage]; ok {
					v *= f
				}
				if r.Float64() < slow {
					v *= 8
				}
				result.Stages[part.stage].Observe(uint64(v))
				total += v
			}
			result.Stages[Total].Observe(uint64(total))
			result.Chosen++
		}
		results = append(results, result)
	}
	return results
}

func rowOf(t *testing.T, c Comparison, stage config.Stage, figure string) Row {
	t.Helper()
	for _, row := range c.Rows {
		if row.Stage == stage && row.Figure == figure {
			return row
		}
	}
	t.Fatalf("no row %s %s", stage, figure)
	return Row{}
}

func TestSidesThatAreAlike(t *testing.T) {
	for name, test := range map[string]struct {
		traffic
		runs   int
		errors float64 // share of comparisons
	}{
		"one minute":          {traffic{slices: 6, messages: 200, sway: 0.2}, 50, 0.05},
		"two minutes":         {traffic{slices: 12, messages: 100, alike: 0.5, sway: 0.1}, 50, 0.05},
		"six minutes":         {traffic{slices: 36, messages: 30, sway: 0.2}, 40, 0.05},
		"slow for 20 seconds": {traffic{slices: 36, messages: 30, alike: 0.6, sway: 0.3}, 40, 0.05},
		"slow for a minute":   {traffic{slices: 90, messages: 15, alike: 0.85, sway: 0.2}, 40, 0.05},
		"an hour, slow for 3": {traffic{slices: 360, messages: 5, alike: 0.95, sway: 0.2}, 40, 0.05},
		// The hardest case: six minutes are worth two independent slices.
		"six minutes, slow for 2": {traffic{slices: 36, messages: 60, alike: 0.9, sway: 0.2}, 50, 0.15},
		"incidents":               {traffic{slices: 60, messages: 30, sway: 0.05, incidents: 0.05}, 40, 0.05},
		"one result":              {traffic{slices: 1, messages: 1000}, 100, 0.05},
		"less than a minute":      {traffic{slices: 5, messages: 200}, 40, 0.05},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(1, 2))
			wrong := 0
			judged := map[string]int{}
			for range test.runs {
				c := Compare(test.side(r, nil), test.side(r, nil))
				if slices.ContainsFunc(c.Rows, func(row Row) bool { return row.Verdict == Real }) {
					wrong++
				}
				for _, row := range c.Rows {
					if row.Verdict != NotEnough {
						judged[row.Figure]++
					}
				}
			}
			t.Logf("%d of %d comparisons with a false verdict; rows with enough data: %v", wrong, test.runs, judged)
			if n := float64(test.runs); float64(wrong) > test.errors*n+2*math.Sqrt(test.errors*(1-test.errors)*n) {
				t.Errorf("%d of %d comparisons of sides that are alike have a verdict", wrong, test.runs)
			}
			if judged["mean"] < test.runs/2 {
				t.Errorf("%d means had enough data, in %d comparisons", judged["mean"], test.runs)
			}
		})
	}
}

func TestDifferencesAreFound(t *testing.T) {
	for name, test := range map[string]struct {
		traffic
		stage  config.Stage
		factor float64
		least  int // of 20 times
	}{
		"a queue, one minute":     {traffic{slices: 6, messages: 200, alike: 0.3, sway: 0.1}, config.StageQdisc, 3, 17},
		"a queue, six minutes":    {traffic{slices: 36, messages: 60, alike: 0.3, sway: 0.1}, config.StageQdisc, 1.5, 18},
		"a longer way":            {traffic{slices: 60, messages: 60, alike: 0.6, sway: 0.1}, config.StageNetwork, 1.5, 18},
		"a faster stack, an hour": {traffic{slices: 360, messages: 15, alike: 0.9, sway: 0.1}, config.StageStack, 0.7, 18},
		"two results":             {traffic{slices: 1, messages: 5000}, config.StageNetwork, 1.1, 18},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(3, 4))
			found, held := 0, 0
			for range 20 {
				c := Compare(test.side(r, nil), test.side(r, map[config.Stage]float64{test.stage: test.factor}))
				if most, ok := c.Most("p50"); ok && most.Stage == test.stage && (*most.Ratio > 1) == (test.factor > 1) {
					found++
				}
				if row := rowOf(t, c, test.stage, "p50"); row.Low != nil && *row.Low <= test.factor && test.factor <= *row.High {
					held++
				}
			}
			t.Logf("found in %d of 20, interval right in %d", found, held)
			if found < test.least {
				t.Errorf("found in %d of 20 comparisons", found)
			}
			if held < 16 {
				t.Errorf("the interval holds the factor in %d of 20 comparisons", held)
			}
		})
	}
}

// TestAnIncidentIsNoDifference uses one bad slice on a side: its many messages are one piece of evidence.
func TestAnIncidentIsNoDifference(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	w := traffic{slices: 36, messages: 100, sway: 0.05}
	a, b := w.side(r, nil), w.side(r, nil)
	for range 5000 {
		b[17].Stages[config.StageNetwork].Observe(uint64(400e6 * math.Exp(0.3*r.NormFloat64())))
	}
	c := Compare(a, b)
	for _, figure := range []string{"p50", "p90", "p99", "mean"} {
		if row := rowOf(t, c, config.StageNetwork, figure); row.Verdict == Real {
			t.Errorf("%s: %s", figure, inJSON(t, row))
		}
	}
	// If the messages were independent, which they are not, the difference would be significant.
	c = Compare(asOne(a), asOne(b))
	if row := rowOf(t, c, config.StageNetwork, "p90"); !c.Independent || row.Verdict != Real {
		t.Errorf("of the sums: %s", inJSON(t, row))
	}
}

// asOne merges several results.
func asOne(results []*Result) []*Result {
	var s Sum
	for _, r := range results {
		s.Add(r, time.Time{})
	}
	return []*Result{&s.Result}
}

func TestComparisonOfTheSame(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for _, w := range []traffic{{slices: 36, messages: 100, sway: 0.1}, {slices: 1, messages: 3000}} {
		side := w.side(r, nil)
		before := inJSON(t, side)
		c := Compare(side, side)
		if len(c.Rows) != 16 || c.A != c.B || c.Independent != (w.slices < 6) {
			t.Errorf("%d rows, %+v", len(c.Rows), c)
		}
		for _, row := range c.Rows {
			if row.Verdict != NotShown || *row.Ratio != 1 || *row.Low >= 1 || *row.High <= 1 || row.A != row.B {
				t.Errorf("%s", inJSON(t, row))
			}
		}
		if inJSON(t, c) != inJSON(t, Compare(side, side)) {
			t.Error("the same comparison twice differs")
		}
		if inJSON(t, side) != before {
			t.Error("the sides were changed")
		}
		if !strings.HasPrefix(c.Summary(), "at p50 and p99 no significant difference") {
			t.Error(c.Summary())
		}
	}
}

// TestWithinABucket uses times whose unknown position in their bucket would make a difference: all at its end, or
// around there.
func TestWithinABucket(t *testing.T) {
	r := rand.New(rand.NewPCG(17, 18))
	_, hi := histogram.Bounds[histogram.Times](histogram.Bucket[histogram.Times](1e6))
	side := func(spread float64) []*Result {
		h := &Histogram{}
		for range 20000 {
			h.Observe(uint64(float64(hi-1) * math.Exp(spread*r.NormFloat64())))
		}
		h.Observe(2 * hi) // else the greatest would tell
		return []*Result{{Chosen: h.Count, Stages: map[config.Stage]*Histogram{config.StageStack: h}}}
	}
	row := rowOf(t, Compare(side(0), side(0.2)), config.StageStack, "p50")
	if row.Verdict != NotShown || *row.Low > 1 || *row.High < 1 {
		t.Errorf("%s", inJSON(t, row))
	}
}

func TestTooLittleToCompare(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 10))
	side := func(slices, messages int) []*Result { return traffic{slices: slices, messages: messages}.side(r, nil) }
	one := func(n int) []*Result {
		h := &Histogram{}
		for i := range n {
			h.Observe(uint64(1e6 + 1e4*i))
		}
		return []*Result{{Chosen: uint64(n), Stages: map[config.Stage]*Histogram{config.StageStack: h}}}
	}
	// One slice with nearly all messages is one piece of evidence.
	lopsided := side(8, 5)
	lopsided[3] = side(1, 5000)[0]
	for name, test := range map[string]struct {
		a, b   []*Result
		enough map[string]bool
	}{
		"nothing":            {nil, nil, nil},
		"one side":           {side(10, 100), nil, nil},
		"29 messages":        {one(29), one(1000), map[string]bool{}},
		"30 messages":        {one(30), one(1000), map[string]bool{"p50": true, "mean": true}},
		"100 messages":       {one(100), one(100), map[string]bool{"p50": true, "p90": true, "mean": true}},
		"600 messages":       {one(600), one(600), map[string]bool{"p50": true, "p90": true, "p99": true, "mean": true}},
		"one slice with all": {lopsided, side(8, 500), map[string]bool{}},
	} {
		c := Compare(test.a, test.b)
		if (test.enough != nil) != (len(c.Rows) > 0) {
			t.Errorf("%s: %s", name, inJSON(t, c))
		}
		for _, row := range c.Rows {
			if row.Stage == config.StageStack && (row.Verdict != NotEnough) != test.enough[row.Figure] {
				t.Errorf("%s: %s", name, inJSON(t, row))
			}
			if (row.Verdict == NotEnough) != (row.Low == nil) || row.Ratio == nil || row.A == 0 || row.B == 0 {
				t.Errorf("%s: %s", name, inJSON(t, row))
			}
		}
		if len(test.enough) == 0 && !strings.Contains(c.Summary(), "not enough data") {
			t.Errorf("%s: %s", name, c.Summary())
		}
	}
	// Only slices that have the stage count.
	few := side(8, 500)
	for _, result := range few[:3] {
		delete(result.Stages, config.StageQdisc)
	}
	c := Compare(few, side(8, 500))
	if rowOf(t, c, config.StageQdisc, "p50").Verdict != NotEnough || rowOf(t, c, config.StageStack, "p50").Verdict == NotEnough || c.Independent {
		t.Errorf("a stage in 5 slices of 8: %s", inJSON(t, c))
	}
	// A stage that one side lacks cannot be compared.
	for _, result := range few {
		delete(result.Stages, config.StageQdisc)
	}
	for _, row := range Compare(few, side(8, 500)).Rows {
		if row.Stage == config.StageQdisc {
			t.Errorf("a stage of one side: %s", inJSON(t, row))
		}
	}
}

func TestZeroTimes(t *testing.T) {
	zeros := func() []*Result {
		h := &Histogram{Count: 1000}
		h.Buckets[0] = 1000
		return []*Result{{Chosen: 1000, Stages: map[config.Stage]*Histogram{config.StageQdisc: h}}}
	}
	c := Compare(zeros(), zeros())
	for _, row := range c.Rows {
		if row.Ratio != nil || row.Verdict == Real {
			t.Errorf("%s", inJSON(t, row))
		}
	}
	if _, err := json.Marshal(c); err != nil {
		t.Error(err)
	}
}

func TestComparisonJSON(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	b := inJSON(t, Compare(traffic{slices: 8, messages: 300}.side(r, nil), traffic{slices: 8, messages: 300}.side(r, nil)))
	for _, name := range regexp.MustCompile(`"([^"]*)":`).FindAllStringSubmatch(b, -1) {
		if !regexp.MustCompile(`^[a-z_]+$`).MatchString(name[1]) {
			t.Errorf("field %s", name[1])
		}
	}
	var back Comparison
	if err := json.Unmarshal([]byte(b), &back); err != nil || inJSON(t, back) != b {
		t.Errorf("%s decoded as %s, %v", b, inJSON(t, back), err)
	}
}

func TestComparisonSummary(t *testing.T) {
	number := func(v float64) *float64 { return &v }
	row := func(stage config.Stage, figure string, a, b time.Duration, verdict Verdict) Row {
		ratio := float64(b) / float64(a)
		return Row{Stage: stage, Figure: figure, A: a, B: b, Ratio: &ratio, Low: number(ratio * 0.9), High: number(ratio * 1.1), Verdict: verdict}
	}
	network50 := row(config.StageNetwork, "p50", 10*ms, 15*ms, Real)
	for name, test := range map[string]struct {
		rows        []Row
		independent bool
		want        string
	}{
		"nothing": {nil, false, "not enough data: no stage was measured on both sides"},
		"two stages": {[]Row{
			row(config.StageQdisc, "p50", 5*us, 20*us, Real), row(config.StageQdisc, "p99", ms, 31*ms, Real),
			network50, row(config.StageNetwork, "p99", 80*ms, 60*ms, NotShown), row(Total, "p50", 10100*us, 15200*us, Real),
		}, false, "at p50 B is 5 ms slower (15 ms, A 10 ms, 1.50 times, 95 % interval 1.35 to 1.65) in network, the largest difference, and 5.1 ms slower in total; " +
			"at p99 B is 30 ms slower (31 ms, A 1 ms, 31.0 times, 95 % interval 27.9 to 34.1) in qdisc, the largest difference"},
		"the NIC's part": {[]Row{network50, row(config.StageNIC, "p50", ms, 4*ms, Real)}, true,
			"at p50 B is 3 ms slower (4 ms, A 1 ms, 4.00 times, 95 % interval 3.60 to 4.40) in nic, the largest difference; at p99 there is not enough data; " +
				"a side has fewer than 6 slices, so each message counts as independent: the significance is overestimated"},
		"not the NIC's part": {[]Row{network50, row(config.StageNIC, "p50", ms, 2*ms, Real), row(config.StageNetwork, "p99", 10*ms, 5*ms, Real)}, false,
			"at p50 B is 5 ms slower (15 ms, A 10 ms, 1.50 times, 95 % interval 1.35 to 1.65) in network, the largest difference; " +
				"at p99 B is 5 ms faster (5 ms, A 10 ms, 0.50 times, 95 % interval 0.45 to 0.55) in network, the largest difference"},
		"the whole only": {[]Row{row(Total, "p50", 10*ms, 12*ms, Real), row(config.StageStack, "p50", ms, 2*ms, NotShown), row(Total, "p99", 1, 9, NotEnough)}, false,
			"at p50 B is 2 ms slower (12 ms, A 10 ms, 1.20 times, 95 % interval 1.08 to 1.32) in total, without a significant difference of a stage; at p99 there is not enough data"},
		"none": {[]Row{row(config.StageStack, "p50", ms, 2*ms, NotShown), row(config.StageStack, "p99", ms, 2*ms, NotShown)}, false,
			"at p50 and p99 no significant difference"},
		"others": {[]Row{row(config.StageStack, "p50", ms, 2*ms, NotShown), row(config.StageStack, "p90", ms, 2*ms, Real), row(config.StageStack, "mean", ms, 2*ms, Real)}, false,
			"at p50 no significant difference; at p99 there is not enough data; also significant: stack p90, stack mean"},
	} {
		if got := (Comparison{Rows: test.rows, Independent: test.independent}).Summary(); got != test.want {
			t.Errorf("%s:\ngot  %s\nwant %s", name, got, test.want)
		}
	}
}

// TestHolmOverRows uses a stage that would be significant alone, among others without a difference.
func TestHolmOverRows(t *testing.T) {
	r := rand.New(rand.NewPCG(13, 14))
	single, among := 0, 0
	for range 60 {
		w := traffic{slices: 1, messages: 1000}
		a, b := w.side(r, nil), w.side(r, map[config.Stage]float64{config.StageStack: 1.05})
		c := Compare(a, b)
		row := rowOf(t, c, config.StageStack, "p50")
		if *row.Low > 1 {
			single++
			if row.Verdict == NotShown {
				among++
			}
		}
	}
	if single < 10 || among < 3 {
		t.Errorf("%d intervals leave out 1, of which %d are no difference among all", single, among)
	}
}

func TestCompareIsBounded(t *testing.T) {
	r := rand.New(rand.NewPCG(15, 16))
	w := traffic{slices: 360, messages: 20, alike: 0.9, sway: 1}
	a, b := w.side(r, nil), w.side(r, nil)
	for _, side := range [][]*Result{a, b} {
		for _, result := range side {
			for _, stage := range Stages {
				if result.Stages[stage] == nil {
					result.Stages[stage] = result.Stages[Total]
				}
			}
		}
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	start := threadTime(t)
	if c := Compare(a, b); len(c.Rows) != 4*len(Stages) {
		t.Errorf("%d rows", len(c.Rows))
	}
	took := threadTime(t) - start
	t.Log(took)
	if took > time.Second {
		t.Errorf("took %v", took)
	}
}

// threadTime returns the CPU time of the thread.
func threadTime(t *testing.T) time.Duration {
	t.Helper()
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		t.Fatal(err)
	}
	return time.Duration(ts.Nano())
}
