// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"sockeye/internal/bpf"
)

func weighted(t testing.TB, weights Weights) [bpf.Buckets]uint16 {
	t.Helper()
	table, err := WeightedBuckets(weights)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func countBuckets(table [bpf.Buckets]uint16, slots int) []int {
	count := make([]int, slots)
	for _, slot := range table {
		count[slot]++
	}
	return count
}

// with returns weights with another weight for one slot.
func (w Weights) with(slot, weight int) Weights {
	w = slices.Clone(w)
	w[slot] = weight
	return w
}

func equalWeights(slots int) Weights { return slices.Repeat(Weights{DefaultWeight}, slots) }

func TestWeightsShares(t *testing.T) {
	for _, test := range []struct {
		weights Weights
		want    []int
	}{
		{Weights{1}, []int{16384}},
		{Weights{0, 256}, []int{0, 16384}},
		{Weights{100, 100, 100}, []int{5462, 5461, 5461}},
		{Weights{0, 100, 100, 100}, []int{0, 5462, 5461, 5461}},
		{Weights{100, 50}, []int{10923, 5461}},
		{Weights{50, 100}, []int{5461, 10923}},
		{Weights{100, 100, 200, 0}, []int{4096, 4096, 8192, 0}},
		{Weights{1, 256, 256}, []int{32, 8176, 8176}},
	} {
		if got := countBuckets(weighted(t, test.weights), len(test.weights)); !slices.Equal(got, test.want) {
			t.Errorf("%v: %d buckets, want %d", test.weights, got, test.want)
		}
	}
}

// TestWeightsEqual checks that a service without weights keeps its table.
func TestWeightsEqual(t *testing.T) {
	for _, slots := range []int{1, 2, 3, 7, 64, 1000, bpf.MaxSlots} {
		for _, weight := range []int{1, DefaultWeight, MaxWeight} {
			if weighted(t, slices.Repeat(Weights{weight}, slots)) != buckets(slots) {
				t.Errorf("%d slots with weight %d: another table than without weights", slots, weight)
			}
		}
	}
}

func TestWeightsRefused(t *testing.T) {
	for _, test := range []struct {
		weights Weights
		want    string
	}{
		{nil, "make bucket table: 0 slots, want 1 to 1024"},
		{make(Weights, bpf.MaxSlots+1), "make bucket table: 1025 slots, want 1 to 1024"},
		{Weights{100, -1}, "make bucket table: slot 1: weight -1, want 0 to 256"},
		{Weights{257}, "make bucket table: slot 0: weight 257, want 0 to 256"},
		{Weights{0, 0}, "make bucket table: every slot is drained or has weight 0"},
	} {
		_, err := WeightedBuckets(test.weights)
		if err == nil || err.Error() != test.want {
			t.Errorf("%v: got %v, want %s", test.weights, err, test.want)
		}
		if sum := len(test.weights) == 2 && test.weights.sum() == 0; errors.Is(err, ErrNoWeight) != sum {
			t.Errorf("%v: no weight: %v", test.weights, !sum)
		}
	}
}

// TestWeightsOneSlot checks that a lower weight of one slot, down to a drain, moves buckets of that slot only, and no more than
// it has to lose. Each table depends on the weights only, so the same buckets return when the weight does.
func TestWeightsOneSlot(t *testing.T) {
	for _, slots := range []int{2, 3, 5, 8, 64, 1000, bpf.MaxSlots} {
		even := buckets(slots)
		for _, slot := range slices.Compact([]int{0, slots / 2, slots - 1}) {
			last := even
			for _, weight := range []int{75, 50, 0} {
				weights := equalWeights(slots).with(slot, weight)
				table := weighted(t, weights)
				moves := 0
				for b, now := range table {
					if now == even[b] {
						continue
					}
					moves++
					if int(even[b]) != slot {
						t.Fatalf("%d slots, slot %d with weight %d: bucket %d moves from slot %d to %d", slots, slot, weight, b, even[b], now)
					}
				}
				if want := countBuckets(even, slots)[slot] - weights.shares()[slot]; moves != want {
					t.Errorf("%d slots, slot %d with weight %d: %d buckets move, want %d", slots, slot, weight, moves, want)
				}
				for b, before := range last {
					if int(before) != slot && int(table[b]) == slot {
						t.Fatalf("%d slots, slot %d with weight %d: gets bucket %d", slots, slot, weight, b)
					}
				}
				last = table
			}
		}
	}
}

// TestWeightsMoves bounds the buckets that move without need when the weight of one slot changes and other slots have
// other weights already. In the worst of these changes, they are 4 % of all buckets.
func TestWeightsMoves(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	mixed := func(slots int) Weights {
		w := make(Weights, slots)
		for i := range w {
			w[i] = 50 + rnd.IntN(151)
		}
		return w
	}
	for _, slots := range []int{4, 8, 64, 512} {
		for _, test := range []struct {
			name      string
			before    Weights
			slot, new int
		}{
			{"another drain", equalWeights(slots).with(0, 0), 2, 0},
			{"half and a drain", equalWeights(slots).with(0, 50), 2, 0},
			{"another half", equalWeights(slots).with(0, 50), 2, 50},
			{"drain, mixed", mixed(slots), 2, 0},
			{"half, mixed", mixed(slots).with(2, 100), 2, 50},
			{"double, mixed", mixed(slots).with(2, 100), 2, 200},
			{"one percent, mixed", mixed(slots).with(2, 100), 2, 101},
		} {
			after := test.before.with(test.slot, test.new)
			a, b := weighted(t, test.before), weighted(t, after)
			moves, need := 0, 0
			for i := range a {
				if a[i] != b[i] {
					moves++
				}
			}
			shares := after.shares()
			for slot, share := range test.before.shares() {
				need += max(0, share-shares[slot])
			}
			if extra := moves - need; extra < 0 || extra > bpf.Buckets/25 {
				t.Errorf("%d slots, %s: %d buckets move, %d must", slots, test.name, moves, need)
			}
		}
	}
}

// TestWeightsStay compares tables with those of earlier versions: a different table would move devices at an upgrade of the
// agent.
func TestWeightsStay(t *testing.T) {
	mixed := make(Weights, bpf.MaxSlots)
	for slot := range mixed {
		mixed[slot] = slot * 7 % (MaxWeight + 1)
	}
	for _, test := range []struct {
		weights Weights
		want    string
	}{
		{Weights{100, 50}, "21465575dbf1e377"},
		{Weights{100, 0, 100, 100}, "eb76c793684a4fd5"},
		{Weights{10, 200, 0, 256, 1}, "bac0f8d309b9faa9"},
		{mixed, "be7e3e303896b04f"},
	} {
		table := weighted(t, test.weights)
		var b []byte
		for _, slot := range table {
			b = binary.BigEndian.AppendUint16(b, slot)
		}
		if got := fmt.Sprintf("%x", sha256.Sum256(b))[:16]; got != test.want {
			t.Errorf("%v: checksum %s, was %s", test.weights[:min(5, len(test.weights))], got, test.want)
		}
	}
}

func FuzzWeights(f *testing.F) {
	f.Add([]byte{100, 100, 0}, uint16(0))
	f.Add([]byte{0, 0}, uint16(1))
	f.Add([]byte{1, 255, 3, 0, 100}, uint16(300))
	f.Fuzz(func(t *testing.T, data []byte, more uint16) {
		weights := slices.Repeat(Weights{int(more % 258)}, int(more>>8))
		for _, w := range data {
			weights = append(weights, int(w))
		}
		table, err := WeightedBuckets(weights)
		if (err == nil) != (weights.check() == nil) {
			t.Fatalf("%v: %v", weights, err)
		}
		if err != nil {
			return
		}
		if got := countBuckets(table, len(weights)); !slices.Equal(got, weights.shares()) {
			t.Errorf("%v: %d buckets, want %d", weights, got, weights.shares())
		}
		for slot, n := range weights.shares() {
			if exact := float64(bpf.Buckets*weights[slot]) / float64(weights.sum()); math.Abs(float64(n)-exact) >= 1 || weights[slot] == 0 && n > 0 {
				t.Errorf("slot %d with weight %d: %d buckets, want %v", slot, weights[slot], n, exact)
			}
		}
	})
}

func BenchmarkWeightedBuckets(b *testing.B) {
	for name, weight := range map[string]func(slot int) int{
		"half drained": func(slot int) int { return slot % 2 * DefaultWeight },
		"mixed":        func(slot int) int { return slot * 7 % (MaxWeight + 1) },
	} {
		weights := make(Weights, bpf.MaxSlots)
		for slot := range weights {
			weights[slot] = weight(slot)
		}
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := WeightedBuckets(weights); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
