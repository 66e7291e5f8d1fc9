// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"sockeye/internal/config"
)

// Verdict says whether a difference is real.
type Verdict string

// The verdicts: the sides differ, the data does not show that they do, or there
// is too little data to show anything.
const (
	Real      Verdict = "real"
	NotShown  Verdict = "no difference shown"
	NotEnough Verdict = "not enough data"
)

// Row compares one figure of a stage. Ratio is B/A, and Low to High its 95 %
// interval. Nil is what is not known: a ratio to 0, and an interval without
// enough data.
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

// Side is what one side of a comparison has.
type Side struct {
	Slices   int    `json:"slices"` // in which something was measured
	Messages uint64 `json:"messages"`
}

// Comparison is what Compare finds. Each interval stands for itself. The verdicts
// stand together: by Holm's method over the rows that have enough data, the chance
// that any "real" is false stays at 5 %. So an interval may leave out 1 and the
// verdict still be "no difference shown".
type Comparison struct {
	A Side `json:"a"`
	B Side `json:"b"`
	// Independent: a side has less than 6 slices, so each message counted as
	// evidence of its own. Messages of one connection or moment are alike, so
	// differences then look more certain than they are.
	Independent bool  `json:"independent"`
	Rows        []Row `json:"rows"`
}

const (
	errorLevel = 0.05
	draws      = 2000 // of a row

	// minSlices is the least number of parts of a side of which a variance is
	// worth something.
	minSlices = 6

	// minNeighbours is the least number of parts from which can be told how alike
	// neighbours are.
	minNeighbours = 18

	// minMessages is the least number of messages of a side.
	minMessages = 30

	// minAbove is how many independent messages must be expected above a quantile.
	// Where that is less than 6, a side has none there, and so no idea of the
	// quantile, more often (e^-6) than one of several verdicts may err.
	minAbove = 6
)

var compared = []struct {
	name     string
	quantile float64 // 0: the mean
}{{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"mean", 0}}

// Compare tells which stages differ between two sides, by how much, and whether
// it is real. A side is a list of results of the same groups, one for each slice
// of time, in their order, as [Find] gives it; or one result. It compares the
// stages that both have.
//
// The slices are what is independent, not their messages: see evidence. It says
// what is so of the messages of these times; of other times or connections only
// as far as they are alike.
func Compare(a, b []*Result) Comparison {
	var c Comparison
	c.A, c.B = side(a), side(b)
	c.Independent = min(c.A.Slices, c.B.Slices) < minSlices
	var p []float64
	var enough []int
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
			row.Ratio = knownRatio(float64(row.B) / float64(row.A))
			judged := 1.0
			if ea.draw != nil && eb.draw != nil {
				var low, high float64
				low, high, judged = ratio(rand.New(rand.NewPCG(1, uint64(len(c.Rows)))), ea, eb)
				row.Low, row.High, row.Verdict = knownRatio(low), knownRatio(high), NotShown
				enough = append(enough, len(c.Rows))
			}
			c.Rows, p = append(c.Rows, row), append(p, judged)
		}
	}
	slices.SortStableFunc(enough, func(i, j int) int { return cmp.Compare(p[i], p[j]) })
	for done, i := range enough {
		if p[i] > errorLevel/float64(len(enough)-done) {
			break
		}
		c.Rows[i].Verdict = Real
	}
	return c
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

// knownRatio is nil for what JSON has no number for.
func knownRatio(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

// estimate is a figure of one side, and what else it might be.
type estimate struct {
	value time.Duration
	// draw gives a value that is as likely, nanoseconds; nil: not enough data.
	draw func(*rand.Rand) float64
}

// ratio gives the interval of b/a, and p of no difference, two-sided.
func ratio(r *rand.Rand, a, b estimate) (low, high, p float64) {
	ratios := make([]float64, draws)
	var below, above int
	for i := range ratios {
		va, vb := a.draw(r), b.draw(r)
		ratios[i] = vb / va
		if vb <= va {
			below++
		}
		if vb >= va {
			above++
		}
	}
	slices.Sort(ratios)
	tail := int(draws * errorLevel / 2)
	return ratios[tail], ratios[draws-1-tail], min(1, 2*float64(min(below, above)+1)/(draws+1))
}

// population is a stage of one side.
type population struct {
	Histogram
	slices  []*Histogram // that are not empty
	buckets []int        // that are not empty
	below   []float64    // of each of them, how many times are below it
}

func newPopulation(results []*Result, stage config.Stage) *population {
	p := &population{}
	for _, r := range results {
		if h := r.Stages[stage]; h != nil && h.Count > 0 {
			p.Add(h)
			p.slices = append(p.slices, h)
		}
	}
	var below uint64
	for i, count := range p.Buckets {
		if count > 0 {
			p.buckets, p.below = append(p.buckets, i), append(p.below, float64(below))
			below += count
		}
	}
	return p
}

// evidence is how far the slices of a side say the same of a share or a mean: its
// variance, by the jackknife that leaves out one part of the time after the other,
// and the degrees of freedom that this is worth; 0: too few. Of a slice, x is the
// part of the sum that y is the number of.
//
// What is slow stays slow for a while, so that slices which follow each other are
// alike. So the parts are also made of 2, 4 and more slices, as long as there are
// 6 of them, and the one counts that makes the interval widest. Where there are
// enough parts to see how alike neighbours still are, the variance counts that too.
// In less than 3 minutes it cannot be seen: what is slow for all of them, by
// chance, may look like a difference.
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
		worth := sumY * sumY / squares // as many parts of one size (Kish)
		var v, lag, before float64
		for i := range xs {
			d := (sumX-xs[i])/(sumY-ys[i]) - sumX/sumY
			v, lag = v+d*d, lag+d*before
			before = d
		}
		if v > 0 && n >= minNeighbours {
			// Of first order, with Kendall's correction (1954) for few parts.
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
		if width := math.Sqrt(v) * studentWidth(df); width >= widest {
			widest, variance, freedom = width, v, df
		}
	}
	return variance, freedom
}

// studentWidth is about the 97.5 % quantile of Student's t: 1 % too small at 5
// degrees of freedom, 10 % at 2 (Abramowitz and Stegun, 26.7.5).
func studentWidth(df float64) float64 {
	const z = 1.959964
	return z + (z*z*z+z)/(4*df) + (5*z*z*z*z*z+16*z*z*z+3*z)/(96*df*df)
}

// quantile gives the quantile q. Its distribution is not assumed: as many times as
// the side has independent evidence are drawn from its histogram. Where the q-th
// of n such times falls in the histogram is distributed as Beta(q(n+1),
// (1-q)(n+1)), so one number stands for all of them (Woodruff's interval, 1952,
// drawn). The evidence is the number n whose share of times up to the quantile
// varies as that of the slices does; n itself is as uncertain as their variance.
//
// Where in its bucket a time lies is not known, so each draw also chooses that, the
// more freely the larger the bucket's share.
func (p *population) quantile(q float64, independent bool) estimate {
	e := estimate{value: p.Quantile(q)}
	n, df := float64(p.Count), math.Inf(1)
	if !independent {
		var variance float64
		at := uint64(e.value)
		count := func(h *Histogram) float64 { return float64(h.Count) }
		if variance, df = p.evidence(func(h *Histogram) float64 { return h.upTo(at) }, count); df == 0 {
			return e
		}
		n = min(n, q*(1-q)/variance)
	}
	if p.Count < minMessages || n*min(q, 1-q) < minAbove {
		return e
	}
	e.draw = func(r *rand.Rand) float64 {
		n := n * drawScale(r, df)
		return p.at(drawBeta(r, q*(n+1), (1-q)*(n+1)), r.Float64())
	}
	return e
}

// upTo is about how many times are below v.
func (h *Histogram) upTo(v uint64) float64 {
	at := Bucket(v)
	var below uint64
	for _, count := range h.Buckets[:at] {
		below += count
	}
	lo, _ := Bounds(at)
	part := 1.0
	if end := h.end(at); v < end {
		part = float64(v-lo) / float64(end-lo)
	}
	return float64(below) + part*float64(h.Buckets[at])
}

// at gives a time below which the share q is, with spot, 0 to 1, as its place in
// the bucket as far as that is not known.
func (p *population) at(q, spot float64) float64 {
	rank := q * float64(p.Count)
	i, found := slices.BinarySearch(p.below, rank)
	if !found {
		i--
	}
	i = max(i, 0)
	bucket := p.buckets[i]
	count := float64(p.Buckets[bucket])
	share := count / float64(p.Count)
	position := min(max((rank-p.below[i])/count, 0), 1)
	lo, _ := Bounds(bucket)
	return float64(lo) + float64(p.end(bucket)-lo)*(position*(1-share)+spot*share)
}

// mean gives the mean. Its logarithm counts as distributed by Student's t.
func (p *population) mean(independent bool) estimate {
	e := estimate{value: p.Mean()}
	mean := float64(p.Sum) / float64(p.Count)
	var variance float64
	df := math.Inf(1)
	if independent {
		for i, count := range p.Buckets {
			lo, _ := Bounds(i)
			d := float64(lo+p.end(i))/2 - mean
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
		return mean * math.Exp(deviation*r.NormFloat64()/math.Sqrt(drawScale(r, df)))
	}
	return e
}

// drawScale draws chi-squared of df degrees of freedom, divided by df: what makes
// a normal deviate one of Student's t.
func drawScale(r *rand.Rand, df float64) float64 {
	if math.IsInf(df, 1) {
		return 1
	}
	return drawGamma(r, df/2) * 2 / df
}

func drawBeta(r *rand.Rand, a, b float64) float64 {
	x, y := drawGamma(r, a), drawGamma(r, b)
	if x+y == 0 {
		return 0.5
	}
	return x / (x + y)
}

// drawGamma draws from Gamma(shape, 1) (Marsaglia and Tsang, A simple method for
// generating gamma variables, 2000; below shape 1 by their boost).
func drawGamma(r *rand.Rand, shape float64) float64 {
	boost := 1.0
	if shape < 1 {
		boost = math.Pow(1-r.Float64(), 1/shape)
		shape++
	}
	d := shape - 1.0/3
	for {
		x := r.NormFloat64()
		v := 1 + x/math.Sqrt(9*d)
		if v <= 0 {
			continue
		}
		v = v * v * v
		if math.Log(1-r.Float64()) < x*x/2+d-d*v+d*math.Log(v) {
			return boost * d * v
		}
	}
}

// Most gives the row of a figure (p50, p90, p99, mean) whose difference is real
// and the largest, in time, of all stages but the whole. NIC stands for network,
// of which it is a part, if it has at least half of that difference.
func (c Comparison) Most(figure string) (Row, bool) {
	var most, nic Row
	for _, row := range c.Rows {
		if row.Figure != figure || row.Verdict != Real || row.Stage == Total {
			continue
		}
		if row.Stage == config.StageNIC {
			nic = row
		}
		if row.more() > most.more() {
			most = row
		}
	}
	if most.Stage == config.StageNetwork && 2*nic.more() >= most.more() {
		most = nic
	}
	return most, most.more() > 0
}

// more is by how much the sides differ.
func (r Row) more() time.Duration { return max(r.B-r.A, r.A-r.B) }

// Summary says in one sentence which stage differs most at p50 and p99, by how
// much, and whether it is real.
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
			parts = append(parts, "real besides: "+strings.Join(besides, ", "))
		}
	}
	if c.Independent {
		parts = append(parts, fmt.Sprintf("each message counts as independent, for a side has less than %d slices: this looks more certain than it is", minSlices))
	}
	return strings.Join(parts, "; ")
}

// summary is what it says of one figure.
func (c Comparison) summary(figure string) string {
	most, ok := c.Most(figure)
	var total Row
	var shown bool // enough data for some stage
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
		return "B is " + total.words() + " in total, and no stage is shown to differ"
	case !ok:
		return "no difference is shown"
	}
	text := "B is " + most.words() + " in " + string(most.Stage) + ", which differs most"
	if total.Verdict == Real {
		text += ", and " + total.direction() + " in total"
	}
	return text
}

// direction gives the difference, such as "5 ms slower".
func (r Row) direction() string {
	if r.B < r.A {
		return FormatDuration(r.A-r.B) + " faster"
	}
	return FormatDuration(r.B-r.A) + " slower"
}

// words gives a real difference, such as "5 ms slower (15 ms after 10 ms, 1.5
// times, 95 % interval 1.4 to 1.6)".
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

// digits3 writes three digits.
func digits3(v float64) string {
	switch {
	case v >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}
