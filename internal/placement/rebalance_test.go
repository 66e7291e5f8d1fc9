// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"sockeye/internal/bpf"
)

func rebalance(t testing.TB, loads []Load, weights Weights, options RebalanceOptions) *Balance {
	t.Helper()
	b, err := Rebalance(loads, weights, options)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// randomLoads returns devices in random slots: half of them alike, others up to 1000 times as large.
func randomLoads(rnd *rand.Rand, devices, slots int) []Load {
	loads := make([]Load, devices)
	for i := range loads {
		size := 1.0
		if rnd.IntN(2) == 0 {
			size = math.Exp(rnd.Float64() * math.Log(1000))
		}
		loads[i] = Load{Key: fmt.Sprintf("r%d", i), Slot: rnd.IntN(slots), Bytes: uint64(1000 * size), Datagrams: uint64(10*size) + uint64(rnd.IntN(3)), Pinned: rnd.IntN(10) == 0}
	}
	return loads
}

// checkBalance checks everything that a proposal promises, except that it is the best one. It returns the sum of the
// excess after the moves.
func checkBalance(t testing.TB, loads []Load, weights Weights, options RebalanceOptions, result *Balance) float64 {
	t.Helper()
	tolerance := options.Tolerance
	if tolerance == 0 {
		tolerance = DefaultTolerance
	}
	b, devices, err := newBalancer(loads, weights, tolerance)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(b.load, result.Before) || b.imbalance() != result.ImbalanceBefore {
		t.Errorf("load before: %v, want %v", result.Before, b.load)
	}
	if options.MaxMoves > 0 && len(result.Moves) > options.MaxMoves {
		t.Errorf("%d moves, want at most %d", len(result.Moves), options.MaxMoves)
	}
	before, highest := b.totalExcess(), b.imbalance()
	seen := make(map[string]bool)
	for _, m := range result.Moves {
		i, ok := slices.BinarySearchFunc(devices, m.Key, func(d Load, key string) int { return strings.Compare(d.Key, key) })
		if !ok || devices[i].Pinned || devices[i].Slot != m.From || m.From == m.To || weights[m.From] == 0 || weights[m.To] == 0 || seen[m.Key] {
			t.Fatalf("move %+v of %+v", m, devices[i])
		}
		seen[m.Key] = true
		j := slices.IndexFunc(b.items[m.From], func(it item) bool { return it.device == i })
		b.applyMove(m.From, j, m.To)
		if now := b.imbalance(); now > highest*(1+1e-9) {
			t.Errorf("move %+v raises the imbalance from %v to %v", m, highest, now)
		}
		highest = min(highest, b.imbalance())
	}
	for slot, load := range b.load {
		if math.Abs(load-result.After[slot]) > 1e-9 {
			t.Errorf("slot %d: load %v after the moves, want %v", slot, result.After[slot], load)
		}
	}
	after := b.totalExcess()
	if len(result.Moves) > 0 && after >= before || result.ImbalanceAfter > result.ImbalanceBefore*(1+1e-9) {
		t.Errorf("excess %v, before %v", after, before)
	}
	if result.Balanced != b.balanced() {
		t.Errorf("balanced: %v", result.Balanced)
	}
	return after
}

// optimum returns the lowest excess that moves without a rise of the imbalance reach, and the fewest moves to it, by a
// breadth-first search of all assignments.
func optimum(t testing.TB, loads []Load, weights Weights) (excess float64, moves int) {
	b, _, err := newBalancer(loads, weights, DefaultTolerance)
	if err != nil {
		t.Fatal(err)
	}
	var items []step
	for _, slot := range b.slots {
		for _, it := range b.items[slot] {
			items = append(items, step{it.device, slot, slot, it.size})
		}
	}
	initial := slices.Clone(b.load)
	type state [8]int8 // slot of each device
	var start state
	for i, it := range items {
		start[i] = int8(it.from)
	}
	set := func(s state) {
		copy(b.load, initial)
		for i, it := range items {
			b.apply(step{it.device, it.from, int(s[i]), it.size})
		}
	}
	excess = math.Inf(1)
	seen, level := map[state]bool{start: true}, []state{start}
	for depth := 0; len(level) > 0; depth++ {
		var next []state
		for _, s := range level {
			set(s)
			if e := b.totalExcess(); e < excess-epsilon {
				excess, moves = e, depth
			}
			highest := b.imbalance()
			for i := range items {
				if s[i] != start[i] {
					continue
				}
				for _, to := range b.slots {
					n := s
					n[i] = int8(to)
					if seen[n] {
						continue
					}
					set(n)
					if b.imbalance() <= highest+epsilon {
						seen[n] = true
						next = append(next, n)
					}
				}
			}
		}
		if excess <= epsilon {
			return excess, moves
		}
		level = next
	}
	return excess, moves
}

// TestRebalanceOptimum compares proposals with the optimum on small instances with large devices, of which most cannot be
// balanced.
func TestRebalanceOptimum(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	const instances = 3000
	var possible, balanced, worse, more int
	for range instances {
		slots := 2 + rnd.IntN(3)
		weights := make(Weights, slots)
		for i := range weights {
			weights[i] = []int{100, 100, 50, 200, 0}[rnd.IntN(5)]
		}
		weights[0] = 100
		loads := randomLoads(rnd, 3+rnd.IntN(6), slots)
		result := rebalance(t, loads, weights, RebalanceOptions{})
		got := checkBalance(t, loads, weights, RebalanceOptions{}, result)
		excess, moves := optimum(t, loads, weights)
		extra := len(result.Moves) - moves
		switch {
		case excess <= epsilon:
			possible++
			if result.Balanced {
				balanced++
				if extra != 0 {
					t.Errorf("%+v with weights %v: balanced by %d moves, optimum %d", loads, weights, len(result.Moves), moves)
				}
			}
		case got > excess+epsilon:
			worse++
		case extra > 0:
			more++
			if extra > 2 {
				t.Errorf("%+v with weights %v: %d moves, optimum %d", loads, weights, len(result.Moves), moves)
			}
		}
	}
	t.Logf("%d can be balanced: %d are, by the fewest moves; %d cannot: %d are as close as possible, %d of them by more moves",
		possible, balanced, instances-possible, instances-possible-worse, more)
	if possible < 400 || balanced < possible*99/100 || worse > instances*6/100 || more > instances/100 {
		t.Error("worse than documented")
	}
}

// TestRebalanceMany compares the number of moves for many devices with a lower bound: a move helps one slot above and one
// below the tolerance.
func TestRebalanceMany(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	for _, test := range []struct{ devices, slots int }{{5000, 64}, {5000, 8}, {300, 8}, {40, 4}} {
		for range 5 {
			weights := equalWeights(test.slots)
			loads := randomLoads(rnd, test.devices, test.slots)
			result := rebalance(t, loads, weights, RebalanceOptions{})
			checkBalance(t, loads, weights, RebalanceOptions{}, result)
			b, _, err := newBalancer(loads, weights, DefaultTolerance)
			if err != nil {
				t.Fatal(err)
			}
			over, under := b.outside()
			t.Logf("%d devices, %d slots: %d moves, at least %d; imbalance %.3f, before %.3f", test.devices, test.slots, len(result.Moves), max(over, under), result.ImbalanceAfter, result.ImbalanceBefore)
			if test.devices >= 300 && !result.Balanced {
				t.Errorf("%d devices, %d slots: not balanced", test.devices, test.slots)
			}
			shuffled := slices.Clone(loads)
			rnd.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
			if !reflect.DeepEqual(rebalance(t, shuffled, weights, RebalanceOptions{}), result) {
				t.Error("the order of the loads changes the proposal")
			}
			for limit := 1; limit < len(result.Moves); limit *= 2 {
				options := RebalanceOptions{MaxMoves: limit}
				checkBalance(t, loads, weights, options, rebalance(t, loads, weights, options))
			}
		}
	}
}

func TestRebalance(t *testing.T) {
	load := func(key string, slot int, bytes uint64) Load { return Load{Key: key, Slot: slot, Bytes: bytes} }
	pinned := func(l Load) Load { l.Pinned = true; return l }
	for name, test := range map[string]struct {
		loads    []Load
		weights  Weights
		options  RebalanceOptions
		moves    []Move
		before   float64
		after    float64
		balanced bool
	}{
		"no devices": {nil, Weights{100, 100}, RebalanceOptions{}, nil, 1, 1, true},
		"no load":    {[]Load{load("a", 0, 0)}, Weights{100, 100}, RebalanceOptions{}, nil, 1, 1, true},
		"even":       {[]Load{load("a", 0, 10), load("b", 1, 10)}, Weights{100, 100}, RebalanceOptions{}, nil, 1, 1, true},
		"tolerable":  {[]Load{load("a", 0, 109), load("b", 1, 91)}, Weights{100, 100}, RebalanceOptions{}, nil, 1.09, 1.09, true},
		"one move": {[]Load{load("a", 0, 6), load("b", 0, 4), load("c", 1, 2)}, Weights{100, 100}, RebalanceOptions{},
			[]Move{{"b", 0, 1}}, 10.0 / 6, 1, true},
		"best fit": {[]Load{load("a", 0, 1), load("b", 0, 2), load("c", 0, 3), load("d", 0, 6)}, Weights{100, 100}, RebalanceOptions{},
			[]Move{{"d", 0, 1}}, 2, 1, true},
		"by weight": {[]Load{load("a", 0, 10), load("b", 0, 10), load("c", 0, 10)}, Weights{50, 100}, RebalanceOptions{},
			[]Move{{"c", 0, 1}, {"b", 0, 1}}, 3, 1, true},
		"datagrams": {[]Load{{Key: "a", Datagrams: 5}, {Key: "b", Datagrams: 5}}, Weights{100, 100}, RebalanceOptions{},
			[]Move{{"a", 0, 1}}, 2, 1, true},
		"only a swap": {[]Load{load("a", 0, 70), load("b", 0, 50), load("c", 1, 40), load("d", 1, 40)}, Weights{100, 100}, RebalanceOptions{Tolerance: 0.15},
			nil, 1.2, 1.2, false},
		"pinned": {[]Load{pinned(load("a", 0, 10)), pinned(load("b", 0, 10)), load("c", 1, 1)}, Weights{100, 100}, RebalanceOptions{},
			nil, 40.0 / 21, 40.0 / 21, false},
		"one large device": {[]Load{load("a", 0, 100), load("b", 1, 1)}, Weights{100, 100}, RebalanceOptions{}, nil, 200.0 / 101, 200.0 / 101, false},
		"weight 0": {[]Load{load("a", 0, 10), load("b", 0, 10), load("c", 1, 100)}, Weights{100, 0, 100}, RebalanceOptions{},
			[]Move{{"a", 0, 2}}, 2, 1, true},
		"one slot": {[]Load{load("a", 0, 10)}, Weights{100}, RebalanceOptions{}, nil, 1, 1, true},
		"limit": {[]Load{load("a", 0, 10), load("b", 0, 10), load("c", 0, 10)}, Weights{100, 100, 100}, RebalanceOptions{MaxMoves: 1},
			[]Move{{"c", 0, 1}}, 3, 2, false},
		"largest numbers": {[]Load{load("a", 0, math.MaxUint64), load("b", 0, math.MaxUint64)}, Weights{100, 100}, RebalanceOptions{},
			[]Move{{"a", 0, 1}}, 2, 1, true},
	} {
		b := rebalance(t, test.loads, test.weights, test.options)
		if len(b.Moves)+len(test.moves) > 0 && !reflect.DeepEqual(b.Moves, test.moves) {
			t.Errorf("%s: moves %v, want %v", name, b.Moves, test.moves)
		}
		if math.Abs(b.ImbalanceBefore-test.before) > 1e-9 || math.Abs(b.ImbalanceAfter-test.after) > 1e-9 || b.Balanced != test.balanced {
			t.Errorf("%s: imbalance %v to %v, %v; want %v to %v, %v", name, b.ImbalanceBefore, b.ImbalanceAfter, b.Balanced, test.before, test.after, test.balanced)
		}
		checkBalance(t, test.loads, test.weights, test.options, b)
	}
}

func TestRebalanceRefused(t *testing.T) {
	for _, test := range []struct {
		loads   []Load
		weights Weights
		options RebalanceOptions
		want    string
	}{
		{nil, Weights{0, 0}, RebalanceOptions{}, "rebalance: every slot is drained or has weight 0"},
		{[]Load{{Key: "a", Slot: 2}}, Weights{1, 1}, RebalanceOptions{}, `rebalance: device "a" is in slot 2, want 0 to 1`},
		{[]Load{{Key: "a", Slot: -1}}, Weights{1, 1}, RebalanceOptions{}, `rebalance: device "a" is in slot -1, want 0 to 1`},
		{[]Load{{Key: "a"}, {Key: "b"}, {Key: "a"}}, Weights{1, 1}, RebalanceOptions{}, `rebalance: device "a" is given twice`},
		{nil, Weights{1}, RebalanceOptions{Tolerance: 1.5}, "rebalance: tolerance 1.5 and 0 moves"},
		{nil, Weights{1}, RebalanceOptions{Tolerance: math.NaN()}, "rebalance: tolerance NaN and 0 moves"},
		{nil, Weights{1}, RebalanceOptions{MaxMoves: -1}, "rebalance: tolerance 0.1 and -1 moves"},
	} {
		if _, err := Rebalance(test.loads, test.weights, test.options); err == nil || err.Error() != test.want {
			t.Errorf("got %v, want %s", err, test.want)
		}
	}
}

func FuzzRebalance(f *testing.F) {
	f.Add([]byte{100, 0, 50, 200}, []byte("0a1b2c3d4e5f6g7h8i9j"), uint8(0))
	f.Add([]byte{1}, []byte{}, uint8(3))
	f.Add([]byte{100, 100}, []byte{0, 255, 0, 255, 4, 1, 3, 63}, uint8(2))
	f.Fuzz(func(t *testing.T, slots, devices []byte, limit uint8) {
		var weights Weights
		for _, w := range slots[:min(len(slots), 64)] {
			weights = append(weights, int(w))
		}
		var loads []Load
		for i := 0; i+1 < min(len(devices), 400); i += 2 { // two bytes: slot and flags, load as a power of two and more
			kind, size := devices[i], devices[i+1]
			l := Load{Key: fmt.Sprint(i), Slot: int(kind>>2) % max(1, len(weights)), Pinned: kind&3 == 3}
			if kind&1 == 0 {
				l.Bytes = uint64(size|1) << (size % 64)
			}
			if kind&2 == 0 {
				l.Datagrams = uint64(size) << (size % 7)
			}
			loads = append(loads, l)
		}
		options := RebalanceOptions{Tolerance: float64(limit>>4) / 16, MaxMoves: int(limit & 15)}
		result, err := Rebalance(loads, weights, options)
		if (err == nil) != (weights.check() == nil) {
			t.Fatal(err)
		}
		if err == nil {
			checkBalance(t, loads, weights, options, result)
		}
	})
}

func BenchmarkRebalance(b *testing.B) {
	for _, n := range []struct{ devices, slots int }{{5000, 64}, {5000, 8}, {300, 16}, {5000, bpf.MaxSlots}} {
		loads := randomLoads(rand.New(rand.NewPCG(1, 2)), n.devices, n.slots)
		b.Run(fmt.Sprintf("%d devices, %d slots", n.devices, n.slots), func(b *testing.B) {
			for b.Loop() {
				rebalance(b, loads, equalWeights(n.slots), RebalanceOptions{})
			}
		})
	}
}
