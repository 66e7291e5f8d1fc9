// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package histogram

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestQuarters(t *testing.T) {
	for v, want := range map[uint64]int{
		0: 0, 1: 1, 3: 3, 4: 4, 7: 7, 8: 8, 9: 8, 10: 9, 15: 11, 16: 12, 19: 12, 20: 13, 1000: 35, 1023: 35, 1024: 36,
		1 << 32: 124, 7<<30 - 1: 126, 7 << 30: 127, 1<<33 - 1: 127, 1 << 33: 127, math.MaxUint64: 127,
	} {
		if got := Bucket[Quarters](v); got != want {
			t.Errorf("bucket of %d: got %d, want %d", v, got, want)
		}
	}
	var end uint64
	for i := range (Quarters{}) {
		lo, hi := Bounds[Quarters](i)
		if lo != end || hi <= lo {
			t.Errorf("bucket %d: %d to %d, want one that starts at %d", i, lo, hi, end)
		}
		end = hi
	}
	if end != 1<<33 {
		t.Errorf("the last bucket ends at %d, want 2^33", end)
	}
}

func FuzzQuarters(f *testing.F) {
	for _, v := range []uint64{0, 3, 4, 5, 1023, 1024, 7<<30 - 1, 7 << 30, 1 << 33, math.MaxUint64} {
		f.Add(v)
	}
	f.Fuzz(func(t *testing.T, v uint64) {
		i := Bucket[Quarters](v)
		lo, hi := Bounds[Quarters](i)
		if v < lo || v >= hi && v < 1<<33 {
			t.Errorf("%d is in bucket %d, %d to %d", v, i, lo, hi)
		}
		if v >= 1<<33 && i != len(Quarters{})-1 {
			t.Errorf("%d is in bucket %d, want the last", v, i)
		}
		if Bucket[Quarters](lo) != i || Bucket[Quarters](hi-1) != i {
			t.Errorf("bounds of bucket %d, %d to %d, are in buckets %d and %d", i, lo, hi, Bucket[Quarters](lo), Bucket[Quarters](hi-1))
		}
	})
}

func TestHistogram(t *testing.T) {
	h := Of[float64](Quarters{})
	if h.Count != 0 || h.Mean() != 0 || h.Sum != 0 || h.Quantile(0.5) != 0 {
		t.Errorf("empty: count %d, mean %g, sum %d, median %g", h.Count, h.Mean(), h.Sum, h.Quantile(0.5))
	}
	var counts Quarters
	r := rand.New(rand.NewPCG(1, 1))
	var values []float64
	var sum float64
	for range 20000 {
		v := uint64(20000 * math.Exp(r.NormFloat64()))
		counts[Bucket[Quarters](v)]++
		values = append(values, float64(v))
		sum += float64(v)
	}
	slices.Sort(values)
	h = Of[float64](counts)
	if h.Count != 20000 {
		t.Errorf("count %d", h.Count)
	}
	for _, q := range []float64{0.01, 0.25, 0.5, 0.9, 0.99} {
		if got, want := h.Quantile(q), values[int(q*20000)]; math.Abs(got/want-1) > 0.03 {
			t.Errorf("quantile %g: got %g, want %g", q, got, want)
		}
	}
	if math.Abs(float64(h.Sum)/sum-1) > 0.02 || math.Abs(h.Mean()*20000/sum-1) > 0.02 {
		t.Errorf("sum %d, mean %g, want about %g and %g", h.Sum, h.Mean(), sum, sum/20000)
	}
	var bounds, want []uint64
	for e := range 33 {
		bound := uint64(1) << e
		n, _ := slices.BinarySearch(values, float64(bound))
		bounds, want = append(bounds, bound), append(want, uint64(n))
	}
	if got := h.Cumulative(bounds...); !slices.Equal(got, want) {
		t.Errorf("cumulative counts: got %v, want %v", got, want)
	}
}

func TestHistogramEnds(t *testing.T) {
	var counts Quarters
	counts[Bucket[Quarters](8)] = 2
	counts[Bucket[Quarters](1<<40)] = 2
	h := Of[float64](counts)
	for q, want := range map[float64]float64{0: 8, 0.25: 9, 0.5: 10, 0.75: 7.5 * (1 << 30), 1: 1 << 33} {
		if got := h.Quantile(q); got != want {
			t.Errorf("quantile %g: got %g, want %g", q, got, want)
		}
	}
	if got := h.Cumulative(8, 9, 10, 1<<32, math.MaxUint64); !slices.Equal(got, []uint64{0, 0, 2, 2, 2}) {
		t.Errorf("cumulative counts: got %v", got)
	}
	var small Quarters
	small[1], small[3], small[Bucket[Quarters](6)] = 1, 1, 1
	if got := Of[float64](small).Sum; got != 10 {
		t.Errorf("sum of 1, 3 and 6: got %d", got)
	}
}
