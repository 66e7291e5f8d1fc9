// SPDX-License-Identifier: Apache-2.0

package rendezvous

import (
	"math"
	"math/rand/v2"
	"testing"
)

func TestNegLog2(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for i := range 10_000 {
		hash := rnd.Uint64() >> (i % 64)
		got, want := float64(negLog2(hash))/(1<<32), 64-math.Log2(float64(hash)+1)
		if math.Abs(got-want) > 1e-8 {
			t.Fatalf("%#x: %v, want %v", hash, got, want)
		}
	}
	if negLog2(math.MaxUint64) != 0 || negLog2(0) != 64<<32 {
		t.Errorf("%#x and %#x at the ends", negLog2(math.MaxUint64), negLog2(0))
	}
}

// TestPreferred compares Preferred, which skips logarithms, with the lowest of all scores, and checks that the choice is
// proportional to the weight.
func TestPreferred(t *testing.T) {
	ids, weights := []uint64{3, 4, 7, 900}, []uint64{1000, 2000, 1, 5000}
	const keys = 16384
	count := make([]int, len(ids))
	for key := range keys {
		hash := func(i int) uint64 { return Mix(uint64(key)<<16 | ids[i]) }
		score := func(i int) float64 { return float64(negLog2(hash(i))) / float64(weights[i]) }
		want := 0
		for i := range ids {
			if score(i) < score(want) {
				want = i
			}
		}
		for i := range ids {
			if NewScore(hash(i), weights[i]).Less(NewScore(hash(want), weights[want])) {
				t.Fatalf("key %d: the score of candidate %d is below that of candidate %d", key, i, want)
			}
		}
		got := Preferred(len(ids), func(i int) uint64 { return weights[i] }, hash)
		if got != want {
			t.Fatalf("key %d: candidate %d, want %d", key, got, want)
		}
		count[got]++
	}
	for i, weight := range weights {
		want := keys * float64(weight) / 8001
		if math.Abs(float64(count[i])-want) > 4*math.Sqrt(want)+1 {
			t.Errorf("candidate %d is preferred by %d keys, want about %.0f", i, count[i], want)
		}
	}
}
