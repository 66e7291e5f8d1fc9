// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package stats

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestMedianInterval(t *testing.T) {
	for n, want := range map[int]int{1: 1, 5: 1, 6: 1, 8: 1, 9: 2, 10: 2, 12: 3, 50: 18, 100: 40} { // tables of the sign test
		if got := medianRank(n); got != want {
			t.Errorf("rank of %d values: %d, want %d", n, got, want)
		}
	}
	v := []float64{9, 1, 8, 2, 7, 3, 6, 4, 5}
	if low, high := MedianInterval(v); low != 2 || high != 8 {
		t.Errorf("interval of 1 to 9: %g to %g", low, high)
	}
	if Median(v) != 5 || Median(v[:4]) != 5 || Quantile(v, 0) != 1 || Quantile(v, 0.5) != 5 || Quantile(v, 1) != 9 {
		t.Errorf("median %g, of four %g, quantiles %g, %g, %g", Median(v), Median(v[:4]), Quantile(v, 0), Quantile(v, 0.5), Quantile(v, 1))
	}
	low, high := MedianInterval(nil)
	for _, got := range []float64{low, high, Median(nil), Quantile(nil, 0.5)} {
		if !math.IsNaN(got) {
			t.Errorf("empty sample: %g", got)
		}
	}
}

func TestHolm(t *testing.T) {
	for _, test := range []struct {
		p    []float64
		want []bool
	}{
		{nil, []bool{}},
		{[]float64{0.05}, []bool{true}},
		{[]float64{0.03, 0.03}, []bool{false, false}},
		{[]float64{0.04, 0.02}, []bool{true, true}},
		{[]float64{0.04, 0.001, 0.03, 0.012}, []bool{false, true, false, true}},
	} {
		if got := Holm(test.p); !slices.Equal(got, test.want) {
			t.Errorf("%v: got %v, want %v", test.p, got, test.want)
		}
	}
}

// uniform is the uniform distribution, in which a quantile equals its share.
type uniform struct{}

func (uniform) At(q, _ float64) float64 { return q }

// TestDraws compares the moments of the draws with those of the distributions.
func TestDraws(t *testing.T) {
	const draws = 200000
	moments := func(draw func(*rand.Rand) float64) (mean, variance float64) {
		r := rand.New(rand.NewPCG(1, 2))
		var sum, squares float64
		for range draws {
			v := draw(r)
			sum, squares = sum+v, squares+v*v
		}
		mean = sum / draws
		return mean, squares/draws - mean*mean
	}
	for _, freedom := range []float64{1, 2, 2.5, 5, 30, 1000} {
		mean, variance := moments(func(r *rand.Rand) float64 { return Scale(r, freedom) })
		if math.Abs(mean-1) > 6*math.Sqrt(2/freedom/draws) || math.Abs(variance*freedom/2-1) > 0.1 {
			t.Errorf("scale of %g degrees: mean %g, variance %g", freedom, mean, variance)
		}
	}
	for _, q := range []float64{0.5, 0.9, 0.99} {
		for _, n := range []float64{30, 600, 1e6} {
			mean, variance := moments(func(r *rand.Rand) float64 { return DrawQuantile(r, uniform{}, q, n, math.Inf(1)) })
			want := q * (1 - q) / (n + 2)
			if math.Abs(mean-q) > 6*math.Sqrt(want/draws) || math.Abs(variance/want-1) > 0.05 {
				t.Errorf("quantile %g of %g: mean %g, variance %g, want %g", q, n, mean, variance, want)
			}
		}
	}
	for freedom, want := range map[float64]float64{1: 12.706, 2: 4.303, 5: 2.571, 30: 2.042, 1e9: NormalWidth} { // tables
		if got := StudentWidth(freedom); math.Abs(got-want) > 1e-3 {
			t.Errorf("t of %g degrees: got %g, want %g", freedom, got, want)
		}
	}
}

// TestRatio uses a difference of twice its standard deviation.
func TestRatio(t *testing.T) {
	normal := func(mean float64) func(*rand.Rand) float64 {
		return func(r *rand.Rand) float64 { return math.Exp(mean + r.NormFloat64()/math.Sqrt2) }
	}
	low, high, p := Ratio(rand.New(rand.NewPCG(1, 2)), normal(0), normal(2))
	if math.Abs(math.Log(low)-2+NormalWidth) > 0.15 || math.Abs(math.Log(high)-2-NormalWidth) > 0.15 || math.Abs(p-0.0455) > 0.015 {
		t.Errorf("%g to %g, p %g", low, high, p)
	}
}

func TestBeta(t *testing.T) {
	// The probability of k or more of n is a sum of binomial terms.
	for _, test := range []struct {
		n, k int
		p    float64
	}{{1, 1, 0.3}, {10, 3, 0.2}, {50, 1, 0.01}, {200, 120, 0.5}, {200, 199, 0.9}} {
		var want float64
		for i := test.k; i <= test.n; i++ {
			all, _ := math.Lgamma(float64(test.n + 1))
			in, _ := math.Lgamma(float64(i + 1))
			out, _ := math.Lgamma(float64(test.n - i + 1))
			want += math.Exp(all - in - out + float64(i)*math.Log(test.p) + float64(test.n-i)*math.Log(1-test.p))
		}
		a, b := float64(test.k), float64(test.n-test.k+1)
		if got := betaCDF(test.p, a, b); math.Abs(got-want) > 1e-10 {
			t.Errorf("%d or more of %d at %g: got %g, want %g", test.k, test.n, test.p, got, want)
		}
		if got := betaQuantile(want, a, b); want < 1-1e-9 && math.Abs(got-test.p) > 1e-7 {
			t.Errorf("quantile %g of Beta(%g, %g): got %g, want %g", want, a, b, got, test.p)
		}
	}
	// The continued fraction must not be mirrored repeatedly.
	if got := betaCDF(0.25, 1.0/3, 3); math.IsNaN(got) || got < 0.7 || got > 0.9 {
		t.Errorf("Beta(1/3, 3) at 0.25: %g", got)
	}
	if got := betaCDF(0.5, 1e8, 1e8); math.Abs(got-0.5) > 1e-4 {
		t.Errorf("Beta(1e8, 1e8) at 0.5: %g", got)
	}
}
