// SPDX-License-Identifier: Apache-2.0

// Package stats has the statistics for comparisons of two samples. The caller defines the figures and the sample
// sizes.
package stats

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"

	"gonum.org/v1/gonum/stat/distuv"
)

const (
	// Level is the chance of error that all intervals and verdicts accept.
	Level = 0.05
	// Draws is the number of random draws behind an interval of Ratio.
	Draws = 2000
	// MinBeyond is how many independent values must be expected above a quantile. Of fewer than 6 expected, a sample has
	// none there, and so no idea of the quantile, more often (e^-6) than one of several verdicts may err.
	MinBeyond = 6
)

// Known returns a pointer to v, or nil for NaN and infinity, which JSON cannot represent.
func Known(v float64) *float64 {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return nil
	}
	return &v
}

// Median returns the median of v, and NaN if v is empty.
func Median(v []float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	v = slices.Sorted(slices.Values(v))
	n := len(v)
	return (v[(n-1)/2] + v[n/2]) / 2
}

// Quantile returns the quantile q of v, 0 to 1, by the nearest rank, and NaN if v is empty.
func Quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return math.NaN()
	}
	v = slices.Sorted(slices.Values(v))
	return v[max(0, int(math.Ceil(q*float64(len(v))))-1)]
}

// MedianInterval returns the interval that contains the median of a population with a confidence of at least 95 %, by
// the sign test on a sample v. For fewer than six values it returns their extremes, with a lower confidence, and NaN for
// none.
func MedianInterval(v []float64) (low, high float64) {
	if len(v) == 0 {
		return math.NaN(), math.NaN()
	}
	v = slices.Sorted(slices.Values(v))
	rank := medianRank(len(v))
	return v[rank-1], v[len(v)-rank]
}

// medianRank returns the greatest rank such that the interval from the value of this rank to the value of the same rank
// from above contains the median with a confidence of at least 95 %. For fewer than six values the rank is 1 and the
// confidence is lower.
func medianRank(n int) int {
	rank := 1
	term := math.Pow(0.5, float64(n)) // of rank-1 heads
	for fewer := term; ; rank++ {
		term *= float64(n-rank+1) / float64(rank)
		if fewer += term; 2*fewer > Level {
			return rank
		}
	}
}

// Holm returns which of several null hypotheses, given by their p values, are rejected such that the chance of any
// false rejection is at most Level (Holm, A simple sequentially rejective multiple test procedure, 1979).
func Holm(p []float64) (rejected []bool) {
	order := make([]int, len(p))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(p[i], p[j]) })
	rejected = make([]bool, len(p))
	for done, i := range order {
		if p[i] > Level/float64(len(p)-done) {
			break
		}
		rejected[i] = true
	}
	return rejected
}

// Ratio returns the 95 % interval of b/a, and the two-sided p of no difference, from Draws draws of each.
func Ratio(r *rand.Rand, a, b func(*rand.Rand) float64) (low, high, p float64) {
	ratios := make([]float64, Draws)
	var below, above int
	for i := range ratios {
		va, vb := a(r), b(r)
		ratios[i] = vb / va
		if vb <= va {
			below++
		}
		if vb >= va {
			above++
		}
	}
	slices.Sort(ratios)
	const tail = Draws * Level / 2
	return ratios[int(tail)], ratios[Draws-1-int(tail)], min(1, 2*float64(min(below, above)+1)/(Draws+1))
}

// Distribution is a distribution of which the place of a value within a bucket is not known. At returns a value below
// which the share q of all lies, with spot, 0 to 1, as the choice of the place.
type Distribution interface {
	At(q, spot float64) float64
}

// DrawQuantile draws what the quantile q of a distribution may be, given the number of independent values n that it is
// known from. The distribution's form is not assumed: as many values are drawn from it. Where the q-th of n such values
// falls in it is distributed as Beta(q(n+1), (1-q)(n+1)), so one number stands for all (Woodruff's interval, 1952, drawn).
// An n that was derived from a variance with freedom degrees of freedom is as uncertain as that; freedom is +Inf where n
// is known. Each draw also chooses the place in the bucket, so an interval does not get narrower than the buckets are.
func DrawQuantile(r *rand.Rand, d Distribution, q, n, freedom float64) float64 {
	n *= Scale(r, freedom)
	beta := distuv.Beta{Alpha: q * (n + 1), Beta: (1 - q) * (n + 1), Src: r}
	share := beta.Rand()
	if math.IsNaN(share) { // both gamma values are 0
		share = 0.5
	}
	return d.At(share, r.Float64())
}

// Scale draws chi-squared with the given degrees of freedom, divided by them; 1 for +Inf. A normal deviate divided by
// its square root is one of Student's t.
func Scale(r *rand.Rand, freedom float64) float64 {
	if math.IsInf(freedom, 1) {
		return 1
	}
	return distuv.ChiSquared{K: freedom, Src: r}.Rand() / freedom
}

// StudentWidth returns the 97.5 % quantile of Student's t.
func StudentWidth(freedom float64) float64 {
	return distuv.StudentsT{Sigma: 1, Nu: freedom}.Quantile(1 - Level/2)
}

// NormalWidth is the 97.5 % quantile of the normal distribution.
const NormalWidth = 1.959963984540054

// RateRatio returns the 95 % interval of the ratio of two rates of independent events, a/exposureA by b/exposureB, and
// the two-sided p of no difference. Of the events of both, those of a are binomial, so the interval is Clopper and
// Pearson's, which is exact and rather too wide than too narrow. high is +Inf without events in b.
func RateRatio(a, exposureA, b, exposureB float64) (low, high, p float64) {
	share := exposureA / (exposureA + exposureB)
	low, high = 0, math.Inf(1)
	atMost, atLeast := 1.0, 1.0
	if a > 0 {
		q := betaQuantile(Level/2, a, b+1)
		low = q / (1 - q) * exposureB / exposureA
		atLeast = betaCDF(share, a, b+1)
	}
	if b > 0 {
		q := betaQuantile(Level/2, b, a+1)
		high = (1 - q) / q * exposureB / exposureA
		atMost = betaCDF(1-share, b, a+1)
	}
	return low, high, min(1, 2*min(atMost, atLeast))
}

// betaQuantile returns the inverse of betaCDF, by bisection.
func betaQuantile(p, a, b float64) float64 {
	low, high := 0.0, 1.0
	for range 80 {
		if x := (low + high) / 2; betaCDF(x, a, b) < p {
			low = x
		} else {
			high = x
		}
	}
	return (low + high) / 2
}

// betaCDF returns the distribution function of Beta(a, b), the regularized incomplete beta function, by its continued
// fraction: https://dlmf.nist.gov/8.17.E22. mathext.RegIncBeta of gonum 0.17 is wrong for the counts of a long trial: for
// a = b = 1e8 at 0.5 it returns 0.79.
func betaCDF(x, a, b float64) float64 {
	if x <= 0 || x >= 1 {
		return min(max(x, 0), 1)
	}
	mirrored := x > (a+1)/(a+b+2) // where it converges slowly
	if mirrored {
		x, a, b = 1-x, b, a
	}
	la, _ := math.Lgamma(a)
	lb, _ := math.Lgamma(b)
	lab, _ := math.Lgamma(a + b)
	const tiny, steps = 1e-300, 100000
	nonzero := func(v float64) float64 {
		if math.Abs(v) < tiny {
			return tiny
		}
		return v
	}
	up, down := 1.0, 1/nonzero(1-(a+b)*x/(a+1))
	fraction := down
	for m := 1.0; m < steps; m++ {
		var change float64
		for _, term := range [2]float64{
			m * (b - m) * x / ((a + 2*m - 1) * (a + 2*m)),
			-(a + m) * (a + b + m) * x / ((a + 2*m) * (a + 2*m + 1)),
		} {
			down, up = 1/nonzero(1+term*down), nonzero(1+term/up)
			change = down * up
			fraction *= change
		}
		if math.Abs(change-1) < 1e-14 {
			break
		}
	}
	value := math.Exp(a*math.Log(x)+b*math.Log1p(-x)+lab-la-lb) / a * fraction
	if mirrored {
		return 1 - value
	}
	return value
}
