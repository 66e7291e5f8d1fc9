// SPDX-License-Identifier: Apache-2.0

// Package stats contains the statistics for comparisons of two samples. The caller defines the figures and the sample
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
	// Level is the error probability of all intervals and verdicts.
	Level = 0.05
	// Draws is the number of random draws for an interval of Ratio.
	Draws = 2000
	// MinBeyond is the minimum expected number of independent values above a quantile. If fewer than 6 are expected,
	// the probability that a sample has no value there, and no information about the quantile, exceeds e^-6, the error
	// probability of one of several verdicts.
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
	return v[Rank(len(v), q)]
}

// Rank returns the index of the quantile q, 0 to 1, in n sorted values, by the nearest rank.
func Rank(n int, q float64) int { return max(0, int(math.Ceil(q*float64(n)))-1) }

// MedianInterval returns the interval that contains the median of a population with a confidence of at least 95 %, by
// the sign test on a sample v. For fewer than six values it returns their minimum and maximum, with a lower confidence,
// and NaN for an empty sample.
func MedianInterval(v []float64) (low, high float64) {
	if len(v) == 0 {
		return math.NaN(), math.NaN()
	}
	v = slices.Sorted(slices.Values(v))
	rank := medianRank(len(v))
	return v[rank-1], v[len(v)-rank]
}

// medianRank returns the largest rank for which the interval from the value of this rank to the value of the same rank
// from above contains the median with a confidence of at least 95 %. For fewer than six values the rank is 1 and the
// confidence is lower.
func medianRank(n int) int {
	rank := 1
	term := math.Pow(0.5, float64(n)) // probability of rank-1 heads
	for fewer := term; ; rank++ {
		term *= float64(n-rank+1) / float64(rank)
		if fewer += term; 2*fewer > Level {
			return rank
		}
	}
}

// Holm returns the rejected null hypotheses, given by their p values. The probability of any false rejection is at most
// Level (Holm, A simple sequentially rejective multiple test procedure, 1979).
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

// Ratio returns the 95 % confidence interval of b/a, and the two-sided p value of no difference, from Draws draws of
// each.
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

// Distribution is a distribution in which the position of a value within its bucket is unknown. At returns a value
// below which the share q of the values is; spot, 0 to 1, selects the position.
type Distribution interface {
	At(q, spot float64) float64
}

// DrawQuantile draws a possible value of the quantile q of a distribution that is estimated from n independent values.
// It makes no assumption about the form of the distribution. The share of the distribution below the q-th of n values
// drawn from it has the distribution Beta(q(n+1), (1-q)(n+1)), so a single random number replaces n draws (Woodruff's
// interval, 1952, by simulation). If n was derived from a variance with freedom degrees of freedom, n has the
// corresponding uncertainty; freedom is +Inf if n is exact. Each draw also selects a position in the bucket, so an
// interval is never narrower than the buckets.
func DrawQuantile(r *rand.Rand, d Distribution, q, n, freedom float64) float64 {
	n *= Scale(r, freedom)
	beta := distuv.Beta{Alpha: q * (n + 1), Beta: (1 - q) * (n + 1), Src: r}
	share := beta.Rand()
	if math.IsNaN(share) { // both gamma variates are 0
		share = 0.5
	}
	return d.At(share, r.Float64())
}

// Scale draws from the chi-squared distribution with the given degrees of freedom, divided by them; it returns 1 for
// +Inf. A normal variate divided by the square root of the result has Student's t distribution.
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

// RateRatio returns the 95 % confidence interval of the ratio of two rates of independent events, a/exposureA by
// b/exposureB, and the two-sided p value of no difference. Given the sum of the events, a is binomial; the interval is
// that of Clopper and Pearson, which is exact and conservative. high is +Inf without events in b.
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
// fraction: https://dlmf.nist.gov/8.17.E22. mathext.RegIncBeta of gonum 0.17 is inaccurate for the counts of a long
// trial: for a = b = 1e8 at 0.5 it returns 0.79.
func betaCDF(x, a, b float64) float64 {
	if x <= 0 || x >= 1 {
		return min(max(x, 0), 1)
	}
	mirrored := x > (a+1)/(a+b+2) // avoids slow convergence
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
