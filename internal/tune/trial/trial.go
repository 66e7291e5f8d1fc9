// SPDX-License-Identifier: Apache-2.0

// Package trial compares the two arms of a trial: tuned connections and control connections.
package trial

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"

	"sockeye/internal/histogram"
	"sockeye/internal/stats"
)

// Histogram contains the buckets of the tune program.
type Histogram = histogram.Histogram[float64, histogram.Quarters]

// Sample contains the sums over the connections of one arm (struct tune_stats in bpf/include/tune.h). RTT and Connect
// are in microseconds, Rate in kilobytes per second.
type Sample struct {
	Connections, Established, Closed             uint64
	Bytes, Segments, Retransmits, RTOs           uint64
	Segments2, Retransmits2, SegmentsRetransmits uint64
	RTT, Connect, Rate                           Histogram
}

// Options are the options of Compare. The same samples and options give the same comparison.
type Options struct {
	Seed uint64 // seed of the bootstrap
}

// Verdict is the result of a comparison.
type Verdict string

// The verdicts: treated connections have lower or higher values, no difference is shown, or there is not enough data.
const (
	Lower        Verdict = "lower"
	Higher       Verdict = "higher"
	NoDifference Verdict = "no difference shown"
	NotEnough    Verdict = "not enough data"
)

// Row compares one figure of both arms. Difference is that of treated from control, in percent of control, with the
// 95 % confidence interval Low to High. Nil is unknown: a figure without data, a difference from 0, an unbounded
// upper end, and an interval without enough data.
type Row struct {
	Name       string   `json:"name"`
	Unit       string   `json:"unit"`
	Treated    *float64 `json:"treated"`
	Control    *float64 `json:"control"`
	Difference *float64 `json:"difference_percent"`
	Low        *float64 `json:"low_percent"`
	High       *float64 `json:"high_percent"`
	Verdict    Verdict  `json:"verdict"`
	// More estimates the number of connections, of both arms together, after which NotEnough becomes another
	// verdict; 0 if unknown.
	More uint64 `json:"more_connections,omitempty"`
}

// Comparison is the result of a trial. Each interval is for its row alone. The verdicts hold together: with Holm's
// method over the rows that have enough data, the probability that any "lower" or "higher" is wrong is at most 5 %.
// An interval may therefore exclude 0 while the verdict is "no difference shown".
type Comparison struct {
	Treated uint64 `json:"treated_connections"`
	Control uint64 `json:"control_connections"`
	Rows    []Row  `json:"rows"`
}

const (
	rows = 8 // number of rows of a comparison

	// minDraws is the minimum number of connections per arm. Fewer give no useful median or variance.
	minDraws = 30
)

// figure is a row before its verdict.
type figure struct {
	treated, control float64 // NaN: unknown
	low, high        float64 // interval of treated/control
	p                float64 // two-sided p-value of no difference
	// lack is the factor by which both arms must grow for a verdict: at most 1 is enough data, +Inf is unknown.
	lack float64
}

// figures are the rows, with their words in a summary.
var figures = [rows]struct {
	name, unit           string
	label                string
	sentence, less, more string
	compare              func(t, c *Sample, o Options) figure
}{
	{"connect_median", "us", "median connect time", "have a median connect time %s", "lower", "higher", quantiles(connectTimes, 0.5)},
	{"connect_p99", "us", "99 % connect time", "have a 99 %% connect time %s", "lower", "higher", quantiles(connectTimes, 0.99)},
	{"rtt_median", "us", "median RTT", "have a median RTT %s", "lower", "higher", quantiles(roundTrips, 0.5)},
	{"rtt_p99", "us", "99 % RTT", "have a 99 %% RTT %s", "lower", "higher", quantiles(roundTrips, 0.99)},
	{"rate_median", "kB/s", "median delivery rate", "have a median delivery rate %s", "lower", "higher", quantiles(deliveryRates, 0.5)},
	{"retransmits", "per million segments", "retransmits", "lose %s segments", "fewer", "more", retransmits},
	{"rtos", "per 1000 connections", "RTOs", "have %s RTOs", "fewer", "more", timeouts},
	{"bytes", "bytes per connection", "bytes", "carry %s bytes", "fewer", "more", volume},
}

// Compare reports the significant differences between the arms of a trial. The method of each row is described at
// quantiles, retransmits, timeouts and volume.
func Compare(treated, control Sample, o Options) Comparison {
	result := Comparison{Treated: treated.Connections, Control: control.Connections}
	nt, nc := float64(max(treated.Connections, 1)), float64(max(control.Connections, 1))
	few := minDraws / min(nt, nc)
	var judged [rows]figure
	var enough []int // indices of rows with enough data
	var p []float64  // their p-values
	for i := range figures {
		f := figures[i].compare(&treated, &control, o)
		if few > 1 && (math.IsInf(f.lack, 1) || f.lack < few) {
			f.lack = few
		}
		row := Row{
			Name: figures[i].name, Unit: figures[i].unit, Verdict: NoDifference,
			Treated: stats.Known(f.treated), Control: stats.Known(f.control), Difference: stats.Known(percent(f.treated / f.control)),
		}
		switch {
		case f.lack <= 1:
			row.Low, row.High = stats.Known(percent(f.low)), stats.Known(percent(f.high))
			enough, p = append(enough, i), append(p, f.p)
		case math.IsInf(f.lack, 1):
			row.Verdict = NotEnough
		default:
			row.Verdict, row.More = NotEnough, uint64(math.Ceil((f.lack-1)*(nt+nc)))
		}
		result.Rows = append(result.Rows, row)
		judged[i] = f
	}
	for k, real := range stats.Holm(p) {
		i := enough[k]
		switch {
		case !real:
		case judged[i].treated < judged[i].control:
			result.Rows[i].Verdict = Lower
		default:
			result.Rows[i].Verdict = Higher
		}
	}
	return result
}

func percent(ratio float64) float64 { return 100 * (ratio - 1) }

func connectTimes(s *Sample) (*Histogram, float64) {
	return &s.Connect, float64(min(s.Connect.Count, s.Connections))
}

func roundTrips(s *Sample) (*Histogram, float64)    { return &s.RTT, s.draws(&s.RTT) }
func deliveryRates(s *Sample) (*Histogram, float64) { return &s.Rate, s.draws(&s.Rate) }

// draws returns the number of independent draws of a histogram that has several values per connection. Values of one
// connection are similar, so the number is at most the number of connections; a connection that sends more has more
// values, so the number is at most equals if the sizes are known.
func (s *Sample) draws(h *Histogram) float64 {
	n := float64(min(h.Count, s.Connections))
	if s.Segments2 > 0 {
		n = min(n, s.equals())
	}
	return n
}

// quantiles compares the quantile q of two histograms by a bootstrap without a distribution: each arm is resampled
// from its own histogram as many times as it has independent draws (stats.DrawQuantile). The interval has the
// percentiles of the ratios.
func quantiles(pick func(*Sample) (*Histogram, float64), q float64) func(t, c *Sample, o Options) figure {
	need := max(minDraws, math.Round(stats.MinBeyond/(1-q)))
	return func(t, c *Sample, o Options) figure {
		th, nt := pick(t)
		ch, nc := pick(c)
		f := figure{treated: math.NaN(), control: math.NaN(), lack: lacking(need, min(nt, nc))}
		if th.Count > 0 {
			f.treated = th.Quantile(q)
		}
		if ch.Count > 0 {
			f.control = ch.Quantile(q)
		}
		if f.lack > 1 {
			return f
		}
		draw := func(h *Histogram, n float64) func(*rand.Rand) float64 {
			d := h.Distribution()
			return func(r *rand.Rand) float64 { return stats.DrawQuantile(r, d, q, n, math.Inf(1)) }
		}
		f.low, f.high, f.p = stats.Ratio(rand.New(rand.NewPCG(o.Seed, 0)), draw(ch, nc), draw(th, nt))
		return f
	}
}

// count is a number of events in clusters: events/together are independent. exposure is the denominator of the rate.
type count struct{ events, exposure, together float64 }

// retransmits compares the ratio of retransmitted to all segments, with connections as clusters. The delta method
// gives the variance of a ratio of sums. The variance divided by that of independent retransmits gives the mean size
// of a cluster, and so the number of independent losses of the arm. These are compared as Poisson counts
// (compareCounts), which is valid for few counts and for 0. An arm is at least as clustered as both together, because
// few losses give a poor estimate.
func retransmits(t, c *Sample, _ Options) figure {
	ratio := func(s *Sample) (x, y, variance float64) {
		x, y = float64(s.Retransmits), float64(s.Segments)
		r := x / y
		variance = float64(s.Retransmits2) - 2*r*float64(s.SegmentsRetransmits) + r*r*float64(s.Segments2)
		n := s.equals()
		return x, y, max(variance, 0) * n / (n - 1)
	}
	f := figure{
		treated: 1e6 * float64(t.Retransmits) / float64(t.Segments),
		control: 1e6 * float64(c.Retransmits) / float64(c.Segments),
		lack:    lacking(minDraws, min(t.equals(), c.equals())),
	}
	if f.lack > 1 {
		return f
	}
	xt, yt, vt := ratio(t)
	xc, yc, vc := ratio(c)
	both := max(1, (vt+vc)/max(xt+xc, 1))
	f.compareCounts(count{xt, yt, max(both, vt/max(xt, 1))}, count{xc, yc, max(both, vc/max(xc, 1))})
	return f
}

// timeouts compares RTOs per connection. RTOs come in runs, and only their sum is known, so the largest possible
// clusters are assumed, in the arm where these are larger. Each RTO is also a retransmit, so the clusters are bounded
// by all RTOs on one connection, by the sum of squares of retransmits, and by the most retransmits that one of n
// connections can have with that sum (Samuelson's inequality). If most retransmits are not RTOs, a difference needs
// many connections.
func timeouts(t, c *Sample, _ Options) figure {
	together := 1.0
	for _, s := range []*Sample{t, c} {
		if s.RTOs == 0 {
			continue
		}
		n, events, squares := float64(s.Connections), float64(s.RTOs), float64(s.Retransmits2)
		mean := float64(s.Retransmits) / n
		most := mean + math.Sqrt(max(squares/n-mean*mean, 0)*(n-1))
		if s.RTOs > s.Retransmits { // retransmits give no bound for RTOs
			most, squares = events, events*events
		}
		together = max(together, min(events, squares/events, most))
	}
	nt, nc := float64(t.Connections), float64(c.Connections)
	xt, xc := float64(t.RTOs), float64(c.RTOs)
	f := figure{treated: 1000 * xt / nt, control: 1000 * xc / nc, lack: lacking(minDraws, min(nt, nc))}
	switch {
	case f.lack > 1:
	case xt+xc+float64(t.Segments)+float64(c.Segments) == 0:
		f.lack = math.Inf(1)
	default:
		f.compareCounts(count{xt, nt, together}, count{xc, nc, together})
	}
	return f
}

// volume compares bytes per connection. There is no sum of squares of bytes: the coefficient of variation is that of
// segments, increased by 1 for segments that are not full. The logarithm of the ratio is taken as normal.
func volume(t, c *Sample, _ Options) figure {
	f := figure{
		treated: float64(t.Bytes) / float64(t.Connections),
		control: float64(c.Bytes) / float64(c.Connections),
		lack:    lacking(minDraws, min(t.equals(), c.equals())),
	}
	if t.Bytes == 0 || c.Bytes == 0 {
		f.lack = math.Inf(1)
	}
	if f.lack > 1 {
		return f
	}
	var variance float64
	for _, s := range []*Sample{t, c} {
		n := float64(s.Connections)
		variance += (2*(n/s.equals()-1) + 1) / n
	}
	log, deviation := math.Log(f.treated/f.control), math.Sqrt(variance)
	half := deviation * stats.NormalWidth
	f.low, f.high = math.Exp(log-half), math.Exp(log+half)
	f.p = math.Erfc(math.Abs(log) / deviation / math.Sqrt2)
	return f
}

func lacking(need, have float64) float64 {
	if have == 0 {
		return math.Inf(1)
	}
	return need / have
}

// equals returns Kish's effective sample size: the number of connections if all have sent the same number of
// segments, about 1 if one connection has sent nearly all. Connections with more than TUNE_SEGMENTS_MAX segments have
// less than their weight.
func (s *Sample) equals() float64 {
	if s.Segments2 == 0 {
		return 0
	}
	n := float64(s.Segments)
	return min(n*n/float64(s.Segments2), float64(s.Connections))
}

// compareCounts sets the interval, p and lack for two rates. There is enough data if all events in one arm would be a
// difference after Holm's correction.
func (f *figure) compareCounts(t, c count) {
	kt, kc := t.events/t.together, c.events/c.together
	et, ec := t.exposure/t.together, c.exposure/c.together
	share := et / (et + ec)
	need := math.Log(stats.Level/(2*rows)) / math.Log(min(share, 1-share))
	f.lack = need / (max(t.events+c.events, 1) / max(t.together, c.together))
	f.low, f.high, f.p = stats.RateRatio(kt, et, kc, ec)
}

// Summary returns one sentence with the significant differences, the figures without one, and the figures without
// enough data.
func (c Comparison) Summary() string {
	var found, none, missing []string
	var more uint64
	for _, row := range c.Rows {
		for _, f := range figures {
			if f.name != row.Name {
				continue
			}
			switch row.Verdict {
			case Lower:
				found = append(found, row.words(f.sentence, f.less))
			case Higher:
				found = append(found, row.words(f.sentence, f.more))
			case NoDifference:
				none = append(none, f.label)
			case NotEnough:
				missing = append(missing, f.label)
				more = max(more, row.More)
			}
		}
	}
	var parts []string
	if len(found) > 0 {
		parts = append(parts, "treated connections "+strings.Join(found, ", "))
	}
	if len(none) > 0 {
		parts = append(parts, strings.Join(none, ", ")+": "+string(NoDifference))
	}
	if len(missing) > 0 {
		text := strings.Join(missing, ", ") + ": " + string(NotEnough)
		if more > 0 {
			text += fmt.Sprintf(" (about %d more connections needed)", more)
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, "; ")
}

// words describes a significant difference, such as "lose 91 % fewer segments (95 % interval 84 % to 95 %)".
func (r Row) words(sentence, direction string) string {
	if r.Difference != nil {
		direction = size(*r.Difference) + " % " + direction
	}
	text := fmt.Sprintf(sentence, direction)
	low, high := r.Low, r.High
	if r.Verdict == Lower {
		low, high = high, low
	}
	switch {
	case low != nil && high != nil:
		text += fmt.Sprintf(" (95 %% interval %s %% to %s %%)", size(*low), size(*high))
	case low != nil:
		text += fmt.Sprintf(" (95 %% interval %s %% and more)", size(*low))
	}
	return text
}

// size formats a percentage without its sign, with one decimal below 10.
func size(percent float64) string {
	p := math.Abs(percent)
	decimals := 0
	if p < 10 || p > 99 && p < 100 {
		decimals = 1
	}
	return strings.TrimSuffix(strconv.FormatFloat(p, 'f', decimals, 64), ".0")
}
