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
	// minSlices is the least number of parts of a side of which a variance is
	// worth something.
	minSlices = 6

	// minNeighbours is the least number of parts from which can be told how alike
	// neighbours are.
	minNeighbours = 18

	// minMessages is the least number of messages of a side.
	minMessages = 30
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
	var enough []int // rows with enough data
	var p []float64  // of these
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

// estimate is a figure of one side, and what else it might be.
type estimate struct {
	value time.Duration
	// draw gives a value that is as likely, nanoseconds; nil: not enough data.
	draw func(*rand.Rand) float64
}

// population is a stage of one side.
type population struct {
	Histogram
	slices []*Histogram // that are not empty
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
		if width := math.Sqrt(v) * stats.StudentWidth(df); width >= widest {
			widest, variance, freedom = width, v, df
		}
	}
	return variance, freedom
}

// quantile gives the quantile q, see stats.DrawQuantile. The evidence is the number n of independent times whose share up
// to the quantile varies as that of the slices does; n itself is as uncertain as their variance.
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

// mean gives the mean. Its logarithm counts as distributed by Student's t.
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
