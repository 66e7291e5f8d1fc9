// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"sockeye/internal/config"
	"sockeye/internal/histogram"
	"sockeye/internal/stats"
)

// Verdict is the result of a comparison.
type Verdict string

// The verdicts: the sides differ, no significant difference, or there is not enough data.
const (
	Real      Verdict = "real"
	NotShown  Verdict = "no difference shown"
	NotEnough Verdict = "not enough data"
)

// Row compares one figure of a stage. Ratio is B/A, with the 95 % confidence interval Low to High. Unknown values are
// nil: a ratio to 0, and an interval without enough data.
type Row struct {
	Stage   config.Stage  `json:"stage"`
	Figure  string        `json:"figure"` // p50, p90, p99, mean
	A       time.Duration `json:"a_ns"`
	B       time.Duration `json:"b_ns"`
	Ratio   *float64      `json:"ratio"`
	Low     *float64      `json:"low"`
	High    *float64      `json:"high"`
	Verdict Verdict       `json:"verdict"`
}

// Side describes the data of one side of a comparison.
type Side struct {
	Slices   int    `json:"slices"` // slices with measurements
	Messages uint64 `json:"messages"`
}

// Comparison is the result of Compare. Each interval applies to its row alone. The verdicts hold jointly: with Holm's
// method over the rows that have enough data, the probability that any verdict "real" is wrong is at most 5 %. An
// interval may therefore exclude 1 while the verdict is "no difference shown".
type Comparison struct {
	A Side `json:"a"`
	B Side `json:"b"`
	// Independent is set if a side has fewer than 6 slices, so that each message counts as independent. Messages of one
	// connection or time are similar, so the significance of differences is overestimated.
	Independent bool  `json:"independent"`
	Rows        []Row `json:"rows"`
}

const (
	// minSlices is the minimum number of parts of a side for an estimate of the variance.
	minSlices = 6

	// minNeighbours is the minimum number of parts for an estimate of the autocorrelation.
	minNeighbours = 18

	// minMessages is the minimum number of messages per side.
	minMessages = 30
)

var compared = []struct {
	name     string
	quantile float64 // 0 for the mean
}{{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"mean", 0}}

// estimate is a figure of one side, with its distribution.
type estimate struct {
	value time.Duration
	// draw returns a random value of the distribution of the estimate, in nanoseconds; nil without enough data.
	draw func(*rand.Rand) float64
}

// Compare compares the stages of two sides. A side is a list of results of the same groups, one per slice of time in
// order (see [Find]), or a single result. Compare compares the stages that both sides have.
//
// The independent observations are the slices, not the messages (see evidence). The result is valid for the compared
// times, and for other times or connections only if they are similar.
func Compare(a, b []*Result) Comparison {
	var c Comparison
	c.A, c.B = side(a), side(b)
	c.Independent = min(c.A.Slices, c.B.Slices) < minSlices
	var enough []int // indices of rows with enough data
	var p []float64  // p values of these rows
	for _, stage := range Stages {
		sa, sb := newPopulation(a, stage), newPopulation(b, stage)
		if sa.Count == 0 || sb.Count == 0 {
			continue
		}
		for _, figure := range compared {
			row := Row{Stage: stage, Figure: figure.name, Verdict: NotEnough}
			var ea, eb estimate
			if figure.quantile > 0 {
				ea, eb = sa.quantile(figure.quantile, c.Independent), sb.quantile(figure.quantile, c.Independent)
			} else {
				ea, eb = sa.mean(c.Independent), sb.mean(c.Independent)
			}
			row.A, row.B = ea.value, eb.value
			row.Ratio = stats.Known(float64(row.B) / float64(row.A))
			if ea.draw != nil && eb.draw != nil {
				low, high, judged := stats.Ratio(rand.New(rand.NewPCG(1, uint64(len(c.Rows)))), ea.draw, eb.draw)
				row.Low, row.High, row.Verdict = stats.Known(low), stats.Known(high), NotShown
				enough, p = append(enough, len(c.Rows)), append(p, judged)
			}
			c.Rows = append(c.Rows, row)
		}
	}
	for k, real := range stats.Holm(p) {
		if real {
			c.Rows[enough[k]].Verdict = Real
		}
	}
	return c
}

// StagesOf returns the sums of the stages of results. Stages without measurements are absent.
func StagesOf(results []*Result) map[config.Stage]*Histogram {
	stages := make(map[config.Stage]*Histogram)
	for _, stage := range Stages {
		if p := newPopulation(results, stage); p.Count > 0 {
			stages[stage] = &p.Histogram
		}
	}
	return stages
}

func side(results []*Result) Side {
	var s Side
	for _, r := range results {
		s.Messages += r.Chosen + r.RXChosen
		for _, h := range r.Stages {
			if h != nil && h.Count > 0 {
				s.Slices++
				break
			}
		}
	}
	return s
}

// population is a stage of one side.
type population struct {
	Histogram
	slices []*Histogram // not empty
}

func newPopulation(results []*Result, stage config.Stage) *population {
	p := &population{}
	for _, r := range results {
		if h := r.Stages[stage]; h != nil && h.Count > 0 {
			p.Add(h)
			p.slices = append(p.slices, h)
		}
	}
	return p
}

// quantile estimates the quantile q (stats.DrawQuantile). The number n of independent observations is the number for
// which the share up to the quantile has the same variance as between slices; n has the uncertainty of this variance.
func (p *population) quantile(q float64, independent bool) estimate {
	e := estimate{value: p.Quantile(q)}
	n, df := float64(p.Count), math.Inf(1)
	if !independent {
		var variance float64
		at := uint64(e.value)
		count := func(h *Histogram) float64 { return float64(h.Count) }
		if variance, df = p.evidence(func(h *Histogram) float64 { return h.UpTo(at) }, count); df == 0 {
			return e
		}
		n = min(n, q*(1-q)/variance)
	}
	if p.Count < minMessages || n*min(q, 1-q) < stats.MinBeyond {
		return e
	}
	d := p.Distribution()
	e.draw = func(r *rand.Rand) float64 { return stats.DrawQuantile(r, d, q, n, df) }
	return e
}

// mean estimates the mean. The logarithm of the estimate has Student's t distribution.
func (p *population) mean(independent bool) estimate {
	e := estimate{value: p.Mean()}
	mean := float64(p.Sum) / float64(p.Count)
	var variance float64
	df := math.Inf(1)
	if independent {
		for i, count := range p.Buckets {
			lo, _ := histogram.Bounds[histogram.Times](i)
			d := float64(lo+p.End(i))/2 - mean
			variance += float64(count) * d * d
		}
		variance /= float64(p.Count) * float64(p.Count)
	} else if variance, df = p.evidence(func(h *Histogram) float64 { return float64(h.Sum) }, func(h *Histogram) float64 { return float64(h.Count) }); df == 0 {
		return e
	}
	if p.Count < minMessages {
		return e
	}
	deviation := math.Sqrt(variance) / max(mean, 1)
	e.draw = func(r *rand.Rand) float64 {
		return mean * math.Exp(deviation*r.NormFloat64()/math.Sqrt(stats.Scale(r, df)))
	}
	return e
}

// evidence returns the variance of a share or a mean by the jackknife over parts of the time, and its degrees of
// freedom; 0 if there are too few parts. x and y are numerator and denominator of a slice.
// Consecutive slices are similar, because slow periods last. Therefore evidence also forms parts of 2, 4 and more
// slices, as long as there are at least 6 parts, and uses the widest interval. With enough parts, the variance includes
// the autocorrelation of adjacent parts. In less than 3 minutes, a slow period that affects all slices cannot be
// distinguished from a difference.
func (p *population) evidence(x, y func(*Histogram) float64) (variance, freedom float64) {
	var widest float64
	for size := 1; (len(p.slices)+size-1)/size >= minSlices; size *= 2 {
		var xs, ys []float64
		var sumX, sumY, squares float64
		for part := range slices.Chunk(p.slices, size) {
			var px, py float64
			for _, h := range part {
				px, py = px+x(h), py+y(h)
			}
			xs, ys = append(xs, px), append(ys, py)
			sumX, sumY, squares = sumX+px, sumY+py, squares+py*py
		}
		n := float64(len(xs))
		worth := sumY * sumY / squares // effective number of parts (Kish)
		var v, lag, before float64
		for i := range xs {
			d := (sumX-xs[i])/(sumY-ys[i]) - sumX/sumY
			v, lag = v+d*d, lag+d*before
			before = d
		}
		if v > 0 && n >= minNeighbours {
			// First-order autocorrelation with Kendall's correction (1954) for few parts.
			alike := lag / v
			alike = min(max(alike+(1+3*alike)/n, 0), 0.99)
			v *= (1 + alike) / (1 - alike)
			worth *= (1 - alike) / (1 + alike)
		}
		df := worth - 1
		if df < 1 {
			return 0, 0
		}
		v *= (n - 1) / n
		if width := math.Sqrt(v) * stats.StudentWidth(df); width >= widest {
			widest, variance, freedom = width, v, df
		}
	}
	return variance, freedom
}

// difference returns the absolute difference of the sides.
func (r Row) difference() time.Duration { return max(r.B-r.A, r.A-r.B) }

// Summary returns one sentence with the stage that has the largest difference at p50 and p99, the difference, and its
// significance.
func (c Comparison) Summary() string {
	if len(c.Rows) == 0 {
		return "not enough data: no stage was measured on both sides"
	}
	var parts []string
	for _, figure := range []string{"p50", "p99"} {
		parts = append(parts, "at "+figure+" "+c.summary(figure))
	}
	if parts[0][len("at p50 "):] == parts[1][len("at p99 "):] {
		parts = []string{"at p50 and p99 " + parts[0][len("at p50 "):]}
	}
	var besides []string
	for _, row := range c.Rows {
		if row.Verdict == Real && (row.Figure == "p90" || row.Figure == "mean") {
			besides = append(besides, string(row.Stage)+" "+row.Figure)
		}
	}
	if _, p50 := c.Most("p50"); !p50 && len(besides) > 0 {
		if _, p99 := c.Most("p99"); !p99 {
			parts = append(parts, "also significant: "+strings.Join(besides, ", "))
		}
	}
	if c.Independent {
		parts = append(parts, fmt.Sprintf("a side has fewer than %d slices, so each message counts as independent: the significance is overestimated", minSlices))
	}
	return strings.Join(parts, "; ")
}

// summary returns the part of Summary for one figure.
func (c Comparison) summary(figure string) string {
	most, ok := c.Most(figure)
	var total Row
	var shown bool // a stage has enough data
	for _, row := range c.Rows {
		if row.Figure == figure {
			shown = shown || row.Verdict != NotEnough
			if row.Stage == Total {
				total = row
			}
		}
	}
	switch {
	case !shown:
		return "there is not enough data"
	case !ok && total.Verdict == Real:
		return "B is " + total.words() + " in total, without a significant difference of a stage"
	case !ok:
		return "no significant difference"
	}
	text := "B is " + most.words() + " in " + string(most.Stage) + ", the largest difference"
	if total.Verdict == Real {
		text += ", and " + total.direction() + " in total"
	}
	return text
}

// Most returns the row of a figure (p50, p90, p99, mean) with the largest significant difference in time, among all
// stages except total. NIC replaces network, which contains it, if it has at least half of that difference.
func (c Comparison) Most(figure string) (Row, bool) {
	var most, nic Row
	for _, row := range c.Rows {
		if row.Figure != figure || row.Verdict != Real || row.Stage == Total {
			continue
		}
		if row.Stage == config.StageNIC {
			nic = row
		}
		if row.difference() > most.difference() {
			most = row
		}
	}
	if most.Stage == config.StageNetwork && 2*nic.difference() >= most.difference() {
		most = nic
	}
	return most, most.difference() > 0
}

// words formats a significant difference, such as "5 ms slower (15 ms after 10 ms, 1.5 times, 95 % interval 1.4 to
// 1.6)".
func (r Row) words() string {
	text := fmt.Sprintf("%s (%s, A %s", r.direction(), FormatDuration(r.B), FormatDuration(r.A))
	if r.Ratio != nil {
		text += ", " + digits3(*r.Ratio) + " times"
	}
	if r.Low != nil && r.High != nil {
		text += fmt.Sprintf(", 95 %% interval %s to %s", digits3(*r.Low), digits3(*r.High))
	}
	return text + ")"
}

// direction formats the difference, such as "5 ms slower".
func (r Row) direction() string {
	if r.B < r.A {
		return FormatDuration(r.A-r.B) + " faster"
	}
	return FormatDuration(r.B-r.A) + " slower"
}

// digits3 formats a number with three digits.
func digits3(v float64) string {
	switch {
	case v >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}
