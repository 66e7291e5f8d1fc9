// SPDX-License-Identifier: Apache-2.0

package trial

import "math/bits"

// Histogram counts values in buckets of a quarter of an octave, as the tune
// program fills them: see TUNE_BUCKETS in bpf/include/tune.h. The values 0 to 3
// have a bucket each; above, a bucket is 14 % to 25 % of its lower bound wide.
type Histogram [128]uint64

// Bucket gives the bucket of a value. The last one also takes all values above
// its upper bound, 2^33.
func Bucket(v uint64) int {
	if v < 4 {
		return int(v)
	}
	e := bits.Len64(v) - 1
	return min((e-1)*4+int(v>>(e-2)&3), len(Histogram{})-1)
}

// Bounds gives the values of bucket i, 0 to 127: lo and more, less than hi.
func Bounds(i int) (lo, hi uint64) {
	if i < 4 {
		return uint64(i), uint64(i) + 1
	}
	width := uint64(1) << (i/4 - 1)
	lo = uint64(4+i%4) * width
	return lo, lo + width
}

// Count is the number of values.
func (h Histogram) Count() uint64 {
	var n uint64
	for _, count := range h {
		n += count
	}
	return n
}

// Quantile gives the value below which the share q of the values lies, q from 0
// to 1. It takes the values of a bucket for evenly spread, so it is off by up to
// the width of a bucket where they are not. An empty histogram has 0.
func (h Histogram) Quantile(q float64) float64 {
	value, _ := quantile(&h, q, h.Count(), 0.5)
	return value
}

// quantile is Quantile of a histogram whose count is n, and beside it a value that
// is as likely: the values of a bucket may be anywhere in it, which matters as far
// as the bucket has a large share of all. spot, 0 to 1, is the choice.
func quantile(h *Histogram, q float64, n uint64, spot float64) (value, likely float64) {
	rank := q * float64(n)
	for i, count := range h {
		if count == 0 {
			continue
		}
		lo, hi := Bounds(i)
		position := min(max(rank, 0)/float64(count), 1)
		share := float64(count) / float64(n)
		width := float64(hi - lo)
		value = float64(lo) + width*position
		likely = float64(lo) + width*(position*(1-share)+spot*share)
		if rank <= float64(count) {
			break
		}
		rank -= float64(count)
	}
	return value, likely
}

// Sum is about the sum of the values: each counts as the middle of its bucket,
// or exactly where the bucket holds one value.
func (h Histogram) Sum() float64 {
	var sum float64
	for i, count := range h {
		lo, hi := Bounds(i)
		sum += float64(count) * float64(lo+hi-1) / 2
	}
	return sum
}

// Mean is about the mean of the values, see Sum. An empty histogram has 0.
func (h Histogram) Mean() float64 {
	n := h.Count()
	if n == 0 {
		return 0
	}
	return h.Sum() / float64(n)
}

// Cumulative counts the values below each of the bounds. It is exact for bounds
// of buckets up to 2^32, such as powers of two; of a bucket that a bound cuts, no
// value is counted. The last bucket has no upper end and is only in Count, as
// Prometheus' +Inf. A Prometheus bucket le=bound would also have the values equal
// to the bound, which are counted in the next one here.
func (h Histogram) Cumulative(bounds ...uint64) []uint64 {
	below := make([]uint64, len(bounds))
	for b, bound := range bounds {
		for i, count := range h[:len(h)-1] {
			if _, hi := Bounds(i); hi > bound {
				break
			}
			below[b] += count
		}
	}
	return below
}
