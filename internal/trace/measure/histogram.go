// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"time"
)

// Histogram counts times, in nanoseconds, in the buckets of struct
// trace_histogram in bpf/include/trace.h: 16 of 16 ns each, then 16 for each
// power of two from 256 ns on. From there, a time lies within 3.2 % of the
// middle of its bucket.
type Histogram struct {
	Count   uint64 // sum of Buckets
	Sum     uint64
	Max     uint64
	Buckets [512]uint64
}

// Bucket gives the bucket of a time. The last one also takes all times above its
// upper bound, 549.8 s.
func Bucket(v uint64) int {
	if v < 256 {
		return int(v >> 4)
	}
	e := bits.Len64(v) - 1
	return min(16+(e-8)*16+int(v>>(e-4)&15), len(Histogram{}.Buckets)-1)
}

// Bounds gives the times of bucket i, 0 to 511: lo and more, less than hi.
func Bounds(i int) (lo, hi uint64) {
	if i < 16 {
		return uint64(i) << 4, uint64(i+1) << 4
	}
	shift := i/16 + 3
	lo = uint64(16+i%16) << shift
	return lo, lo + 1<<shift
}

// Observe counts a time.
func (h *Histogram) Observe(v uint64) {
	h.Count++
	h.Sum += v
	h.Max = max(h.Max, v)
	h.Buckets[Bucket(v)]++
}

// Add counts all that o has counted.
func (h *Histogram) Add(o *Histogram) {
	h.Count += o.Count
	h.Sum += o.Sum
	h.Max = max(h.Max, o.Max)
	for i, count := range o.Buckets {
		h.Buckets[i] += count
	}
}

// Sub takes out what the same histogram had counted earlier. Max becomes that of
// what is left if it rose since; else it is the most that the highest bucket
// left allows.
func (h *Histogram) Sub(earlier *Histogram) {
	rose := h.Max > earlier.Max
	highest := -1
	h.Count = 0
	for i := range h.Buckets {
		h.Buckets[i] = less(h.Buckets[i], earlier.Buckets[i])
		h.Count += h.Buckets[i]
		if h.Buckets[i] > 0 {
			highest = i
		}
	}
	h.Sum = less(h.Sum, earlier.Sum)
	switch {
	case highest < 0:
		h.Max = 0
	case !rose && highest < len(h.Buckets)-1:
		_, hi := Bounds(highest)
		h.Max = min(h.Max, hi-1)
	}
}

func less(later, earlier uint64) uint64 { return later - min(earlier, later) }

// end gives the upper bound of the times of bucket i, by Max too. What one CPU
// counts while it is read may be in a bucket before it is in Max.
func (h *Histogram) end(i int) uint64 {
	lo, hi := Bounds(i)
	if i == len(h.Buckets)-1 {
		return max(h.Max, lo)
	}
	return min(hi, max(h.Max, lo))
}

// Quantile gives the time below which the share q of the times lies, q from 0 to
// 1. It takes the times of a bucket for evenly spread, up to Max. An empty
// histogram has 0.
func (h *Histogram) Quantile(q float64) time.Duration {
	rank := min(max(q, 0), 1) * float64(h.Count)
	var value float64
	for i, count := range h.Buckets {
		if count == 0 {
			continue
		}
		lo, _ := Bounds(i)
		value = float64(lo) + float64(h.end(i)-lo)*min(rank/float64(count), 1)
		if rank <= float64(count) {
			break
		}
		rank -= float64(count)
	}
	return duration(value)
}

// duration makes a duration of nanoseconds, as long as there is one.
func duration(ns float64) time.Duration {
	if ns >= math.MaxInt64 {
		return math.MaxInt64
	}
	return time.Duration(ns)
}

// Mean is exact. An empty histogram has 0.
func (h *Histogram) Mean() time.Duration {
	if h.Count == 0 {
		return 0
	}
	return duration(float64(h.Sum) / float64(h.Count))
}

// Cumulative counts the times below each of the bounds, nanoseconds. It is exact
// for bounds of buckets: multiples of 16 ns up to 512 ns, then sixteenths of the
// power of two below, up to 2^39. Of a bucket that a bound cuts, no time is
// counted. The last bucket is only in Count, as Prometheus' +Inf. A Prometheus
// bucket le=bound would also have the times equal to the bound, which are counted
// in the next one here.
func (h *Histogram) Cumulative(bounds ...uint64) []uint64 {
	below := make([]uint64, len(bounds))
	for b, bound := range bounds {
		for i, count := range h.Buckets[:len(h.Buckets)-1] {
			if _, hi := Bounds(i); hi > bound {
				break
			}
			below[b] += count
		}
	}
	return below
}

// NativeZero is the zero threshold of native histograms, in seconds.
const NativeZero = 16e-9

// Native gives the buckets of a Prometheus native histogram of seconds: the count
// by index, where bucket i holds what is above 2^((i-1)/2^schema) and not above
// 2^(i/2^schema); schema is -4 to 8. All times of a bucket count as its middle;
// those below NativeZero, the first bucket, are in zero. Schema 3 is about as fine
// as the histogram is: its buckets are 9 % wide.
func (h *Histogram) Native(schema int32) (positive map[int]int64, zero uint64) {
	positive = make(map[int]int64)
	for i, count := range h.Buckets[1:] {
		if count == 0 {
			continue
		}
		lo, hi := Bounds(i + 1)
		middle := float64(lo+hi-1) / 2 / 1e9
		positive[int(math.Ceil(math.Ldexp(math.Log2(middle), int(schema))))] += int64(count)
	}
	return positive, h.Buckets[0]
}

// Point is a point of a distribution function: Share of all are not above Time.
type Point struct {
	Time  time.Duration
	Share float64
}

// CDF gives the points of the distribution function, from share 0 to share 1,
// between which it is straight. It is flat over empty buckets. An empty histogram
// has none.
func (h *Histogram) CDF() []Point {
	var points []Point
	var below uint64
	for i, count := range h.Buckets {
		if count == 0 {
			continue
		}
		lo, _ := Bounds(i)
		if n := len(points); n == 0 || points[n-1].Time < time.Duration(lo) {
			points = append(points, Point{time.Duration(lo), float64(below) / float64(h.Count)})
		}
		below += count
		points = append(points, Point{duration(float64(h.end(i))), float64(below) / float64(h.Count)})
	}
	return points
}

// jsonHistogram has the buckets that are not empty, as index and count, in their
// order.
type jsonHistogram struct {
	Count   *uint64     `json:"count"`
	Sum     *uint64     `json:"sum_ns"`
	Max     *uint64     `json:"max_ns"`
	Buckets *[][]uint64 `json:"buckets"`
}

// MarshalJSON writes {"count":..,"sum_ns":..,"max_ns":..,"buckets":[[index,count],..]}
// with the buckets that are not empty.
func (h Histogram) MarshalJSON() ([]byte, error) {
	b := fmt.Appendf(nil, `{"count":%d,"sum_ns":%d,"max_ns":%d,"buckets":[`, h.Count, h.Sum, h.Max)
	separator := ""
	for i, count := range h.Buckets {
		if count > 0 {
			b = fmt.Appendf(b, "%s[%d,%d]", separator, i, count)
			separator = ","
		}
	}
	return append(b, "]}"...), nil
}

// UnmarshalJSON reads what MarshalJSON writes, and refuses all else: unknown or
// missing fields, buckets that do not exist, are empty or out of order, and a
// count that is not theirs.
func (h *Histogram) UnmarshalJSON(b []byte) error {
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
	read := Histogram{Count: *j.Count, Sum: *j.Sum, Max: *j.Max}
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
			return fmt.Errorf("read histogram: bucket %d has a count of %d, of %d", i, count, left)
		}
		read.Buckets[i] = count
		left, next = left-count, i+1
	}
	if left > 0 {
		return fmt.Errorf("read histogram: a count of %d is in no bucket", left)
	}
	*h = read
	return nil
}
