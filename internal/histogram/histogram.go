// SPDX-License-Identifier: Apache-2.0

// Package histogram counts values in log-linear buckets like the BPF programs, and computes figures from the counts.
package histogram

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"slices"
	"time"
)

// Value is the type of a computed figure, such as a quantile.
type Value interface{ time.Duration | float64 }

// Buckets counts values by bucket. Buckets are log-linear: an octave (a power of two to the next) is divided into
// buckets of equal width. Below the first octave, all buckets have the width of the buckets in the first octave. The
// BPF programs use the same arrays.
type Buckets interface {
	Times | Quarters
}

// Times contains the buckets of struct trace_histogram in bpf/include/trace.h: 16 buckets of 16 ns, then 16 buckets per
// octave from 256 ns on. From there on, a time is within 3.2 % of the middle of its bucket. The last bucket also counts
// all times above its upper bound, 549.8 s.
type Times [512]uint64

// Quarters contains the buckets of TUNE_BUCKETS in bpf/include/tune.h, four per octave: the values 0 to 3 have one
// bucket each; above, the width of a bucket is 14 % to 25 % of its lower bound. The last bucket also counts all values
// above its upper bound, 2^33.
type Quarters [128]uint64

// Histogram counts values in buckets. Quantiles and means have type V. The zero value is an empty histogram.
type Histogram[V Value, B Buckets] struct {
	Count   uint64 // sum of Buckets
	Sum     uint64 // sum of the values
	Max     uint64 // largest value, or the upper bound of its bucket if the value is unknown
	Buckets B
}

// Of returns a histogram from the counts of its buckets. Its Sum is approximate: each value counts as the middle of its
// bucket, or exactly if the bucket counts a single value.
func Of[V Value, B Buckets](counts B) Histogram[V, B] {
	h := Histogram[V, B]{Buckets: counts}
	var sum float64
	for i := range len(counts) {
		if counts[i] > 0 {
			lo, hi := Bounds[B](i)
			h.Count, h.Max = h.Count+counts[i], hi
			sum += float64(counts[i]) * float64(lo+hi-1) / 2
		}
	}
	h.Sum = uint64(sum)
	return h
}

// Observe counts a value.
func (h *Histogram[V, B]) Observe(v uint64) {
	h.Count++
	h.Sum += v
	h.Max = max(h.Max, v)
	h.Buckets[Bucket[B](v)]++
}

// Add adds the counts of o.
func (h *Histogram[V, B]) Add(o *Histogram[V, B]) {
	h.Count += o.Count
	h.Sum += o.Sum
	h.Max = max(h.Max, o.Max)
	for i := range len(h.Buckets) {
		h.Buckets[i] += o.Buckets[i]
	}
}

// Sub subtracts an earlier state of the same histogram. If Max has increased since, Max remains; otherwise Max becomes
// the upper bound of the highest remaining bucket, if that is lower.
func (h *Histogram[V, B]) Sub(earlier *Histogram[V, B]) {
	rose := h.Max > earlier.Max
	highest := -1
	h.Count = 0
	for i := range len(h.Buckets) {
		h.Buckets[i] = Increase(h.Buckets[i], earlier.Buckets[i])
		h.Count += h.Buckets[i]
		if h.Buckets[i] > 0 {
			highest = i
		}
	}
	h.Sum = Increase(h.Sum, earlier.Sum)
	switch {
	case highest < 0:
		h.Max = 0
	case !rose && highest < len(h.Buckets)-1:
		_, hi := Bounds[B](highest)
		h.Max = min(h.Max, hi-1)
	}
}

// Increase returns the increase of a counter, or 0 if it was reset.
func Increase(later, earlier uint64) uint64 { return later - min(earlier, later) }

// Quantile returns the value below which the share q of the values is, q from 0 to 1. It assumes that the values of a
// bucket are distributed uniformly up to Max. It returns 0 for an empty histogram.
func (h *Histogram[V, B]) Quantile(q float64) V {
	rank := min(max(q, 0), 1) * float64(h.Count)
	var value float64
	for i := range len(h.Buckets) {
		count := float64(h.Buckets[i])
		if count == 0 {
			continue
		}
		lo, _ := Bounds[B](i)
		value = float64(lo) + float64(h.End(i)-lo)*min(rank/count, 1)
		if rank <= count {
			break
		}
		rank -= count
	}
	return valueOf[V](value)
}

// Mean returns Sum / Count, and 0 for an empty histogram.
func (h *Histogram[V, B]) Mean() V {
	if h.Count == 0 {
		return 0
	}
	return valueOf[V](float64(h.Sum) / float64(h.Count))
}

// UpTo returns the approximate number of values below v.
func (h *Histogram[V, B]) UpTo(v uint64) float64 {
	at := Bucket[B](v)
	var below uint64
	for i := range at {
		below += h.Buckets[i]
	}
	lo, _ := Bounds[B](at)
	part := 1.0
	if end := h.End(at); v < end {
		part = float64(v-lo) / float64(end-lo)
	}
	return float64(below) + part*float64(h.Buckets[at])
}

// Bucket returns the bucket that counts a value.
func Bucket[B Buckets](v uint64) int {
	width, octave := layout[B]()
	v >>= width
	if v < 1<<octave {
		return int(v)
	}
	shift := bits.Len64(v) - 1 - octave
	return min(shift<<octave+int(v>>shift), len(*new(B))-1)
}

// Cumulative returns the number of values below each bound. The result is exact for bounds of buckets, such as powers
// of two; values in a bucket that contains the bound are not counted. Values in the last bucket are only in Count, like
// +Inf in Prometheus. A Prometheus bucket le=bound would also contain the values equal to the bound, which are counted
// in the next bucket here.
func (h *Histogram[V, B]) Cumulative(bounds ...uint64) []uint64 {
	below := make([]uint64, len(bounds))
	for b, bound := range bounds {
		for i := range len(h.Buckets) - 1 {
			if _, hi := Bounds[B](i); hi > bound {
				break
			}
			below[b] += h.Buckets[i]
		}
	}
	return below
}

// Distribution is a histogram prepared for many calls of At.
type Distribution struct {
	count   float64
	buckets []filled
	below   []float64 // number of values below each bucket
}

// filled is a bucket that is not empty.
type filled struct{ lo, width, count float64 }

// Distribution returns the histogram's distribution. The histogram must not be empty.
func (h *Histogram[V, B]) Distribution() *Distribution {
	d := &Distribution{count: float64(h.Count)}
	var below uint64
	for i := range len(h.Buckets) {
		if count := h.Buckets[i]; count > 0 {
			lo, _ := Bounds[B](i)
			d.buckets = append(d.buckets, filled{float64(lo), float64(h.End(i) - lo), float64(count)})
			d.below = append(d.below, float64(below))
			below += count
		}
	}
	return d
}

// At returns a value below which the share q of the values may be. The position of a value within its bucket is
// unknown, which matters if the bucket contains a large share of all values: spot, 0 to 1, selects the position.
func (d *Distribution) At(q, spot float64) float64 {
	rank := q * d.count
	i, found := slices.BinarySearch(d.below, rank)
	if !found {
		i--
	}
	i = max(i, 0)
	b := d.buckets[i]
	share := b.count / d.count
	position := min(max((rank-d.below[i])/b.count, 0), 1)
	return b.lo + b.width*(position*(1-share)+spot*share)
}

// NativeZero is the zero threshold of native histograms, in seconds.
const NativeZero = 16e-9

// Native returns the buckets of a Prometheus native histogram in seconds: the counts by index, where bucket i contains
// the values in (2^((i-1)/2^schema), 2^(i/2^schema)]. schema is -4 to 8. All times of a bucket count as the middle of
// the bucket; times below NativeZero, the first bucket, are in zero. Schema 3 has the resolution of the histogram: its
// buckets are 9 % wide.
func (h *Histogram[V, B]) Native(schema int32) (positive map[int]int64, zero uint64) {
	positive = make(map[int]int64)
	for i := 1; i < len(h.Buckets); i++ {
		count := h.Buckets[i]
		if count == 0 {
			continue
		}
		lo, hi := Bounds[B](i)
		middle := float64(lo+hi-1) / 2 / 1e9
		positive[int(math.Ceil(math.Ldexp(math.Log2(middle), int(schema))))] += int64(count)
	}
	return positive, h.Buckets[0]
}

// Point is a point of a distribution function: a share of the values is at most Time.
type Point[V Value] struct {
	Time  V
	Share float64
}

// CDF returns the points of the distribution function, from share 0 to share 1. The function is linear between the
// points and flat over empty buckets. An empty histogram has no points.
func (h *Histogram[V, B]) CDF() []Point[V] {
	var points []Point[V]
	var below uint64
	for i := range len(h.Buckets) {
		count := h.Buckets[i]
		if count == 0 {
			continue
		}
		lo, _ := Bounds[B](i)
		if n := len(points); n == 0 || points[n-1].Time < V(lo) {
			points = append(points, Point[V]{V(lo), float64(below) / float64(h.Count)})
		}
		below += count
		points = append(points, Point[V]{valueOf[V](float64(h.End(i))), float64(below) / float64(h.Count)})
	}
	return points
}

// End returns the upper bound of the values in bucket i, limited by Max. While the kernel counts, a value may be
// visible in its bucket before it is visible in Max.
func (h *Histogram[V, B]) End(i int) uint64 {
	lo, hi := Bounds[B](i)
	if i == len(h.Buckets)-1 {
		return max(h.Max, lo)
	}
	return min(hi, max(h.Max, lo))
}

// Bounds returns the bounds of bucket i, which counts values from lo to less than hi.
func Bounds[B Buckets](i int) (lo, hi uint64) {
	width, octave := layout[B]()
	if i < 1<<octave {
		return uint64(i) << width, uint64(i+1) << width
	}
	shift := i>>octave - 1
	lo = uint64(i-shift<<octave) << (shift + width)
	return lo, lo + 1<<(shift+width)
}

// layout returns the width of the first buckets and the number of buckets in an octave, as powers of two.
func layout[B Buckets]() (width, octave int) {
	if len(*new(B)) == len(Times{}) {
		return 4, 4
	}
	return 0, 2
}

// valueOf converts a figure to V. The maximum duration is 292 years.
func valueOf[V Value](v float64) V {
	if _, ok := any(V(0)).(time.Duration); ok && v >= math.MaxInt64 {
		longest := int64(math.MaxInt64)
		return V(longest)
	}
	return V(v)
}

// MarshalJSON writes {"count":..,"sum_ns":..,"max_ns":..,"buckets":[[index,count],..]} with the non-empty buckets.
func (h Histogram[V, B]) MarshalJSON() ([]byte, error) {
	b := fmt.Appendf(nil, `{"count":%d,"sum_ns":%d,"max_ns":%d,"buckets":[`, h.Count, h.Sum, h.Max)
	separator := ""
	for i := range len(h.Buckets) {
		count := h.Buckets[i]
		if count > 0 {
			b = fmt.Appendf(b, "%s[%d,%d]", separator, i, count)
			separator = ","
		}
	}
	return append(b, "]}"...), nil
}

// jsonHistogram contains the non-empty buckets as pairs of index and count, in ascending order.
type jsonHistogram struct {
	Count   *uint64     `json:"count"`
	Sum     *uint64     `json:"sum_ns"`
	Max     *uint64     `json:"max_ns"`
	Buckets *[][]uint64 `json:"buckets"`
}

// UnmarshalJSON reads the output of MarshalJSON and returns an error for anything else: unknown or missing fields,
// invalid, empty or unsorted buckets, and a count that is not the sum of the buckets.
func (h *Histogram[V, B]) UnmarshalJSON(b []byte) error {
	var j jsonHistogram
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&j); err != nil {
		return fmt.Errorf("read histogram: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("read histogram: more than one value")
	}
	if j.Count == nil || j.Sum == nil || j.Max == nil || j.Buckets == nil {
		return errors.New("read histogram: count, sum_ns, max_ns or buckets is missing")
	}
	read := Histogram[V, B]{Count: *j.Count, Sum: *j.Sum, Max: *j.Max}
	left, next := read.Count, uint64(0)
	for _, pair := range *j.Buckets {
		if len(pair) != 2 {
			return errors.New("read histogram: a bucket is not an index and a count")
		}
		i, count := pair[0], pair[1]
		if i < next || i >= uint64(len(read.Buckets)) {
			return fmt.Errorf("read histogram: bucket %d is out of order or range", i)
		}
		if count == 0 || count > left {
			return fmt.Errorf("read histogram: bucket %d has a count of %d, at most %d possible", i, count, left)
		}
		read.Buckets[i] = count
		left, next = left-count, i+1
	}
	if left > 0 {
		return fmt.Errorf("read histogram: count exceeds the sum of the buckets by %d", left)
	}
	*h = read
	return nil
}
