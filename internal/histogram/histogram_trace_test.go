// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package histogram

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// timing is the histogram of trace.
type timing = Histogram[time.Duration, Times]

// counted returns a histogram of times.
func counted(times ...uint64) *timing {
	h := &timing{}
	for _, v := range times {
		h.Observe(v)
	}
	return h
}

func TestTimes(t *testing.T) {
	for v, want := range map[uint64]int{
		0: 0, 15: 0, 16: 1, 255: 15, 256: 16, 271: 16, 272: 17, 511: 31, 512: 32, 543: 32, 544: 33,
		1000: 47, 1 << 20: 208, 31<<34 - 1: 510, 31 << 34: 511, 1<<39 - 1: 511, 1 << 39: 511, math.MaxUint64: 511,
	} {
		if got := Bucket[Times](v); got != want {
			t.Errorf("bucket of %d: got %d, want %d", v, got, want)
		}
	}
	var end uint64
	for i := range (timing{}).Buckets {
		lo, hi := Bounds[Times](i)
		if lo != end || hi <= lo {
			t.Errorf("bucket %d: %d to %d, want one that starts at %d", i, lo, hi, end)
		}
		end = hi
	}
	if end != 1<<39 {
		t.Errorf("the last bucket ends at %d, want 2^39", end)
	}
}

// TestRelativeError checks that both ends of each bucket are within 3.2 % of its middle.
func TestRelativeError(t *testing.T) {
	var worst float64
	for i := Bucket[Times](256); i <= Bucket[Times](500e9); i++ {
		lo, hi := Bounds[Times](i)
		for _, v := range []uint64{lo, hi - 1} {
			worst = max(worst, math.Abs(float64(lo+hi)/2/float64(v)-1))
		}
	}
	t.Logf("%.2f %%", 100*worst)
	if worst > 0.032 {
		t.Errorf("a time is %.2f %% from the middle of its bucket", 100*worst)
	}
}

func FuzzTimes(f *testing.F) {
	for _, v := range []uint64{0, 15, 16, 255, 256, 511, 512, 1<<39 - 1, 1 << 39, math.MaxUint64} {
		f.Add(v)
	}
	f.Fuzz(func(t *testing.T, v uint64) {
		i := Bucket[Times](v)
		lo, hi := Bounds[Times](i)
		if v < lo || v >= hi && i < 511 {
			t.Errorf("%d is in bucket %d, %d to %d", v, i, lo, hi)
		}
		if Bucket[Times](lo) != i || Bucket[Times](hi-1) != i {
			t.Errorf("bounds of bucket %d, %d to %d, are in buckets %d and %d", i, lo, hi, Bucket[Times](lo), Bucket[Times](hi-1))
		}
	})
}

func TestQuantiles(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	const n = 50000
	for name, draw := range map[string]func() float64{
		"narrow":      func() float64 { return 1e6 * math.Exp(0.05*r.NormFloat64()) },
		"log-normal":  func() float64 { return 20e3 * math.Exp(r.NormFloat64()) },
		"exponential": func() float64 { return 300 + 5e6*r.ExpFloat64() },
		"uniform":     func() float64 { return 1e9 * (1 + r.Float64()) },
		"heavy tail":  func() float64 { return min(400e9, 1e5*math.Pow(1-r.Float64(), -1/1.2)) },
		"two modes": func() float64 {
			if r.Float64() < 0.3 {
				return 40e6 * math.Exp(0.1*r.NormFloat64())
			}
			return 50e3 * math.Exp(0.1*r.NormFloat64())
		},
	} {
		h := &timing{}
		var values []uint64
		var sum float64
		for range n {
			v := uint64(draw())
			h.Observe(v)
			values = append(values, v)
			sum += float64(v)
		}
		slices.Sort(values)
		for _, q := range []float64{0.001, 0.01, 0.1, 0.25, 0.5, 0.9, 0.99, 0.999, 0.9999} {
			// Any value between two adjacent values is correct.
			i := int(q * n)
			low, high := float64(values[i-1]), float64(values[i])
			if got := float64(h.Quantile(q)); got < low*0.95 || got > high*1.05 {
				t.Errorf("%s: quantile %g: got %g, want %g to %g", name, q, got, low, high)
			}
		}
		if got := h.Quantile(1); uint64(got) != values[n-1] {
			t.Errorf("%s: got maximum %d, want %d", name, got, values[n-1])
		}
		if got := float64(h.Mean()); math.Abs(got-sum/n) > 1 {
			t.Errorf("%s: mean %g, want %g", name, got, sum/n)
		}
	}
}

func TestQuantileEnds(t *testing.T) {
	var empty timing
	if empty.Quantile(0.5) != 0 || empty.Mean() != 0 || empty.CDF() != nil {
		t.Errorf("empty: median %d, mean %d, CDF %v", empty.Quantile(0.5), empty.Mean(), empty.CDF())
	}
	same := counted(1_000_100, 1_000_100, 1_000_100)
	for q, most := range map[float64]time.Duration{-1: 983_040, 0: 983_040, 0.5: 1_000_100, 1: 1_000_100, 2: 1_000_100} {
		if got := same.Quantile(q); got > most || got < 983_040 {
			t.Errorf("three times 1000.1 µs: quantile %g is %d", q, got)
		}
	}
	long := counted(1, 2000e9)
	if got := long.Quantile(1); got != 2000*time.Second {
		t.Errorf("above all buckets: got %v", got)
	}
	if got := counted(math.MaxUint64).Quantile(1); got != math.MaxInt64 {
		t.Errorf("above all durations: got %d", got)
	}
	unread := &timing{Count: 1} // the bucket was read after the maximum, and Max is still 0
	unread.Buckets[Bucket[Times](5000)] = 1
	if got := unread.Quantile(0.99); got < 4800 || got > 5120 {
		t.Errorf("maximum unknown: got %d", got)
	}
}

func TestAddAndSub(t *testing.T) {
	r := rand.New(rand.NewPCG(2, 3))
	rose, stayed := 0, 0
	for range 2000 {
		var before, since timing
		for range r.IntN(20) {
			before.Observe(uint64(1e5 * math.Exp(2*r.NormFloat64())))
		}
		for range r.IntN(5) {
			since.Observe(uint64(1e5 * math.Exp(2*r.NormFloat64())))
		}
		later := before
		later.Add(&since)
		if later.Count != before.Count+since.Count || later.Max != max(before.Max, since.Max) {
			t.Fatalf("sum of %+v and %+v is %+v", before, since, later)
		}
		got := later
		got.Sub(&before)
		if got.Count != since.Count || got.Sum != since.Sum || got.Buckets != since.Buckets {
			t.Fatalf("difference of %+v and %+v is %+v, want %+v", later, before, got, since)
		}
		switch {
		case since.Max > before.Max || since.Count == 0:
			rose++
			if got.Max != since.Max {
				t.Fatalf("maximum is %d, want %d: it rose from %d", got.Max, since.Max, before.Max)
			}
		default:
			stayed++
			if got.Max < since.Max || got.Max > later.Max || Bucket[Times](got.Max) != Bucket[Times](since.Max) {
				t.Fatalf("maximum is %d, want at least %d and at most %d", got.Max, since.Max, later.Max)
			}
		}
	}
	if rose < 100 || stayed < 100 {
		t.Errorf("the maximum increased %d times, and did not change %d times", rose, stayed)
	}
	long := counted(600e9, 550e9)
	long.Sub(counted(600e9))
	if long.Count != 1 || long.Max != 600e9 {
		t.Errorf("in the last bucket: count %d, maximum %d", long.Count, long.Max)
	}
}

func TestCumulative(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 5))
	var h timing
	var values, bounds, want []uint64
	for range 20000 {
		v := uint64(1e4 * math.Exp(3*r.NormFloat64()))
		h.Observe(v)
		values = append(values, v)
	}
	slices.Sort(values)
	for e := 4; e <= 39; e++ {
		bound := uint64(1) << e
		n, _ := slices.BinarySearch(values, bound)
		bounds, want = append(bounds, bound), append(want, uint64(n))
	}
	if got := h.Cumulative(bounds...); !slices.Equal(got, want) {
		t.Errorf("cumulative counts: got %v, want %v", got, want)
	}
	cut := counted(1000, 1000, 600e9)
	if got := cut.Cumulative(992, 1000, 1024, 1<<39, math.MaxUint64); !slices.Equal(got, []uint64{0, 0, 2, 2, 2}) {
		t.Errorf("bounds within a bucket, and above all values: got %v", got)
	}
}

func TestNative(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 7))
	h := counted(0, 3, 15, 16, 1e9)
	for range 5000 {
		h.Observe(uint64(1e5 * math.Exp(3*r.NormFloat64())))
	}
	for schema := int32(-4); schema <= 8; schema++ {
		positive, zero := h.Native(schema)
		if zero != h.Buckets[0] {
			t.Errorf("schema %d: %d below %g s, want %d", schema, zero, NativeZero, h.Buckets[0])
		}
		base := math.Exp2(math.Exp2(-float64(schema)))
		want := map[int]int64{}
		for i, count := range h.Buckets {
			lo, hi := Bounds[Times](i)
			if count == 0 || i == 0 {
				continue
			}
			middle := float64(lo+hi-1) / 2e9
			index := int(math.Ceil(math.Log(middle) / math.Log(base)))
			want[index] += int64(count)
			if above, upTo := math.Pow(base, float64(index-1)), math.Pow(base, float64(index)); middle <= above || middle > upTo*(1+1e-9) {
				t.Fatalf("schema %d: %g is not between %g and %g", schema, middle, above, upTo)
			}
		}
		if !reflect.DeepEqual(positive, want) {
			t.Errorf("schema %d: got %v, want %v", schema, positive, want)
		}
		desc := prometheus.NewDesc("name", "help", nil, nil)
		if _, err := prometheus.NewConstNativeHistogram(desc, h.Count, float64(h.Sum)/1e9, positive, nil, zero, schema, NativeZero, time.Time{}); err != nil {
			t.Errorf("schema %d: %v", schema, err)
		}
	}
	if positive, _ := counted(1 << 30).Native(0); !reflect.DeepEqual(positive, map[int]int64{1: 1}) {
		t.Errorf("1.07 s is in %v, want above 1 and up to 2", positive)
	}
}

func TestCDF(t *testing.T) {
	r := rand.New(rand.NewPCG(8, 9))
	var h timing
	for range 1000 {
		v := 1e5 * math.Exp(r.NormFloat64())
		if r.Float64() < 0.1 {
			v *= 1000
		}
		h.Observe(uint64(v))
	}
	points := h.CDF()
	if first, last := points[0], points[len(points)-1]; first.Share != 0 || last.Share != 1 || last.Time != time.Duration(h.Max) {
		t.Errorf("from %+v to %+v, maximum %d", first, last, h.Max)
	}
	for i, p := range points[1:] {
		if p.Time <= points[i].Time || p.Share < points[i].Share {
			t.Errorf("%+v after %+v", p, points[i])
		}
		if p.Share > points[i].Share {
			if got := h.Quantile(p.Share); math.Abs(float64(got-p.Time)) > 1 {
				t.Errorf("quantile %g is %d, value of the distribution: %d", p.Share, got, p.Time)
			}
		}
	}
}

func TestHistogramJSON(t *testing.T) {
	b, err := json.Marshal(map[string]*timing{"stack": counted(3, 1000, 1001, 700e9)})
	if err != nil {
		t.Fatal(err)
	}
	want := `{"stack":{"count":4,"sum_ns":700000002004,"max_ns":700000000000,"buckets":[[0,1],[47,2],[511,1]]}}`
	if string(b) != want {
		t.Errorf("got %s, want %s", b, want)
	}
	var back map[string]*timing
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	if *back["stack"] != *counted(3, 1000, 1001, 700e9) {
		t.Errorf("decoded as %+v", back["stack"])
	}
	if b, err = json.Marshal(timing{}); err != nil || string(b) != `{"count":0,"sum_ns":0,"max_ns":0,"buckets":[]}` {
		t.Errorf("empty: %s, %v", b, err)
	}
}

func TestHistogramJSONRefusals(t *testing.T) {
	for text, want := range map[string]string{
		`[]`:                                "cannot unmarshal",
		`{}`:                                "missing",
		`{"count":0,"sum_ns":0,"max_ns":0}`: "missing",
		`{"count":0,"sum_ns":0,"max_ns":0,"buckets":null}`:                         "missing",
		`{"count":0,"sum_ns":0,"max_ns":0,"buckets":[],"min_ns":0}`:                "unknown field",
		`{"count":-1,"sum_ns":0,"max_ns":0,"buckets":[]}`:                          "cannot unmarshal",
		`{"count":1,"sum_ns":0,"max_ns":0,"buckets":[]}`:                           "count exceeds the sum of the buckets by 1",
		`{"count":1,"sum_ns":0,"max_ns":0,"buckets":[[3]]}`:                        "not an index and a count",
		`{"count":1,"sum_ns":0,"max_ns":0,"buckets":[[3,1,1]]}`:                    "not an index and a count",
		`{"count":1,"sum_ns":0,"max_ns":0,"buckets":[null]}`:                       "not an index and a count",
		`{"count":1,"sum_ns":0,"max_ns":0,"buckets":[[512,1]]}`:                    "bucket 512 is out of order or range",
		`{"count":1,"sum_ns":0,"max_ns":0,"buckets":[[-1,1]]}`:                     "cannot unmarshal",
		`{"count":1,"sum_ns":0,"max_ns":0,"buckets":[[1.5,1]]}`:                    "cannot unmarshal",
		`{"count":2,"sum_ns":0,"max_ns":0,"buckets":[[4,1],[3,1]]}`:                "bucket 3 is out of order",
		`{"count":2,"sum_ns":0,"max_ns":0,"buckets":[[4,1],[4,1]]}`:                "bucket 4 is out of order",
		`{"count":0,"sum_ns":0,"max_ns":0,"buckets":[[4,0]]}`:                      "bucket 4 has a count of 0",
		`{"count":1,"sum_ns":0,"max_ns":0,"buckets":[[4,18446744073709551615]]}`:   "bucket 4 has a count",
		`{"count":0,"sum_ns":0,"max_ns":0,"buckets":[]} {}`:                        "more than one value",
		`{"count":1,"sum_ns":0,"max_ns":0,"buckets":[[4,18446744073709551615],1]}`: "cannot unmarshal",
		`{"count":99999999999999999999,"sum_ns":0,"max_ns":0,"buckets":[[511,1]]}`: "cannot unmarshal",
		`{"count":2,"sum_ns":0,"max_ns":0,"buckets":[[4,1],[5,1],[6,1]]}`:          "bucket 6 has a count of 1, at most 0 possible",
	} {
		h := *counted(7)
		err := h.UnmarshalJSON([]byte(text))
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", text, err, want)
		}
		if h != *counted(7) {
			t.Errorf("%s changed the histogram", text)
		}
	}
}

func FuzzHistogramJSON(f *testing.F) {
	for _, text := range []string{
		`{"count":4,"sum_ns":700000002004,"max_ns":700000000000,"buckets":[[0,1],[47,2],[511,1]]}`,
		`{"count":1,"sum_ns":0,"max_ns":0,"buckets":[[3,1]]}`,
		`{"count":18446744073709551615,"sum_ns":18446744073709551615,"max_ns":18446744073709551615,"buckets":[[511,18446744073709551615]]}`,
		`{"count":0,"sum_ns":0,"max_ns":0,"buckets":[]}`, `{"buckets":[[[]]]}`, `null`, `{`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var h timing
		if h.UnmarshalJSON(b) != nil {
			return
		}
		out, err := h.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		var back timing
		if err := json.Unmarshal(out, &back); err != nil || back != h {
			t.Errorf("%s decoded as %+v, %v", out, back, err)
		}
		before := time.Duration(0)
		for _, q := range []float64{0, 0.5, 0.99, 1} {
			v := h.Quantile(q)
			if v < before {
				t.Errorf("%s: quantile %g is %d, a lower quantile is %d", out, q, v, before)
			}
			before = v
		}
		h.Mean()
		h.CDF()
		h.Native(3)
		h.Cumulative(1000, 1e9)
		other := h
		other.Add(&h)
		other.Sub(&h)
	})
}
