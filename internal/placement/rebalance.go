// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"sockeye/internal/fault"
)

// DefaultTolerance is the deviation of a slot from its fair share that needs no move, as a fraction of the fair share.
const DefaultTolerance = 0.10

// Load is the measured load of a device, as rates or as counts of the same time for all devices.
type Load struct {
	Key       string // name or address of the device
	Slot      int
	Bytes     uint64
	Datagrams uint64
	Pinned    bool // by the operator: the device stays
}

// Move is the move of a device to another slot.
type Move struct {
	Key      string
	From, To int
}

// Balance is a proposal to balance the load. Loads are fractions of the total load of all slots with a weight; see
// Rebalance.
type Balance struct {
	Moves         []Move // in the order in which they must be made
	Before, After []float64
	Fair          []float64
	// The highest load of a slot, divided by its fair share. 1 is perfect, and the value without load.
	ImbalanceBefore, ImbalanceAfter float64
	// Balanced reports whether every slot is within the tolerance after the moves.
	Balanced bool
}

// RebalanceOptions are the limits of a proposal.
type RebalanceOptions struct {
	Tolerance float64 // 0 for DefaultTolerance
	MaxMoves  int     // 0 for no limit
}

// Rebalance proposes the fewest moves of devices that bring the load of every slot within the tolerance of its fair
// share, or as close to that as moves of whole devices allow.
//
// The load of a device is the mean of its fraction of all bytes and its fraction of all datagrams. The fair share of a
// slot is its fraction of all weights. Devices in slots with weight 0 do not count and do not move, because the bucket
// table moves them; such a slot receives nothing. A device moves at most once, and no move, made in order, raises the
// highest load relative to the fair share, so that a proposal can be interrupted after any move.
//
// The problem is load rebalancing: multiprocessor scheduling from a given assignment with few moves. It is NP-hard, as
// it contains the partition problem. Rebalance searches for balance with 1 to 4 moves exhaustively, with bounded effort:
// if the search completes, a balanced result of up to 4 moves is the optimum. Otherwise, each step makes the move that
// lowers the sum of the squared deviations beyond the tolerance, relative to the fair shares, by the most; if there is
// none, the best pair of moves. Small instances are also tried with pairs first. Then superfluous moves are dropped.
// This result is a local optimum, without a bound on its distance from the optimum. Where large devices prevent balance,
// it can have many moves for a small gain; MaxMoves bounds them, and the steps with the most gain come first. Compared
// with the optimum of 3000 random instances of 3 to 8 devices and 2 to 4 slots (TestRebalanceOptimum): of 488 that can be
// balanced, 487 are, by the fewest moves; of the others, 94 % come as close as possible, with at most 2 moves too many.
// The result depends on the arguments only, not on the order of loads.
func Rebalance(loads []Load, weights Weights, options RebalanceOptions) (*Balance, error) {
	if err := weights.check(); err != nil {
		return nil, fmt.Errorf("rebalance: %w", err)
	}
	if options.Tolerance == 0 {
		options.Tolerance = DefaultTolerance
	}
	if !(options.Tolerance > 0 && options.Tolerance <= 1) || options.MaxMoves < 0 {
		return nil, fault.Usage(fmt.Errorf("rebalance: tolerance %v and %d moves", options.Tolerance, options.MaxMoves),
			"the tolerance is above 0 and at most 1, the number of moves is not negative")
	}
	if options.MaxMoves == 0 {
		options.MaxMoves = math.MaxInt
	}
	b, devices, err := newBalancer(loads, weights, options.Tolerance)
	if err != nil {
		return nil, err
	}
	result := &Balance{Before: slices.Clone(b.load), Fair: b.fair, ImbalanceBefore: b.imbalance()}
	moves := b.solve(options.MaxMoves)
	for _, m := range moves {
		d := devices[m.device]
		result.Moves = append(result.Moves, Move{d.Key, m.from, m.to})
		b.apply(m)
	}
	result.After, result.ImbalanceAfter = b.load, b.imbalance()
	result.Balanced = b.balanced()
	return result, nil
}

// item is a device that may move.
type item struct {
	device int
	size   float64
}

// balancer is the state of a search.
type balancer struct {
	tolerance  float64
	load, fair []float64
	slots      []int    // slots with a weight
	items      [][]item // of each slot, those that have not moved, by size
	effort     int      // left for the current search
}

// newBalancer returns the state before the first move, and the devices by the index of their items.
func newBalancer(loads []Load, weights Weights, tolerance float64) (*balancer, []Load, error) {
	devices := slices.Clone(loads)
	slices.SortFunc(devices, func(a, b Load) int { return strings.Compare(a.Key, b.Key) })
	b := &balancer{
		tolerance: tolerance, load: make([]float64, len(weights)), fair: make([]float64, len(weights)), items: make([][]item, len(weights)),
	}
	for slot, w := range weights {
		if w > 0 {
			b.slots = append(b.slots, slot)
			b.fair[slot] = float64(w) / float64(weights.sum())
		}
	}
	var bytes, datagrams float64
	for i, d := range devices {
		if i > 0 && d.Key == devices[i-1].Key {
			return nil, nil, fmt.Errorf("rebalance: device %s is given twice", shortQuote(d.Key))
		}
		if d.Slot < 0 || d.Slot >= len(weights) {
			return nil, nil, fmt.Errorf("rebalance: device %s is in slot %d, want 0 to %d", shortQuote(d.Key), d.Slot, len(weights)-1)
		}
		if weights[d.Slot] > 0 {
			bytes += float64(d.Bytes)
			datagrams += float64(d.Datagrams)
		}
	}
	if bytes == 0 {
		bytes = math.Inf(1)
	}
	if datagrams == 0 {
		datagrams = math.Inf(1)
	}
	total := 2.0
	if math.IsInf(bytes, 1) || math.IsInf(datagrams, 1) {
		total = 1
	}
	for i, d := range devices {
		if weights[d.Slot] == 0 {
			continue
		}
		size := (float64(d.Bytes)/bytes + float64(d.Datagrams)/datagrams) / total
		b.load[d.Slot] += size
		if !d.Pinned && size > 0 {
			b.items[d.Slot] = append(b.items[d.Slot], item{i, size})
		}
	}
	for _, items := range b.items {
		slices.SortStableFunc(items, func(a, b item) int { return cmp.Compare(a.size, b.size) })
	}
	return b, devices, nil
}

const (
	// epsilon is the smallest difference of loads and of potentials that counts; the total load is 1.
	epsilon = 1e-12
	// centre is the weight of deviations within the tolerance, which decide between moves that are otherwise equal.
	centre = 1e-6
	// maxDepth is the number of moves that are searched exhaustively.
	maxDepth = 4
	// searchEffort bounds the exhaustive search, and all searches for a pair of moves, in examined pairs of slots.
	searchEffort = 400_000
)

// step is a move of the device with an index. size is the load of the device.
type step struct {
	device, from, to int
	size             float64
}

// solve returns the moves. The state is that before them again.
func (b *balancer) solve(limit int) []step {
	if b.balanced() {
		return nil
	}
	b.effort = searchEffort
	for depth := 1; depth <= min(maxDepth, limit) && b.effort > 0; depth++ {
		if moves := b.search(depth, b.imbalance()); moves != nil {
			slices.Reverse(moves)
			return moves
		}
	}
	// Single moves first is usually better, pairs first sometimes.
	best := b.prune(b.descend(limit, false))
	if b.pairCost() > searchEffort {
		return best
	}
	bestExcess := b.excessAfter(best)
	if pairs := b.prune(b.descend(limit, true)); b.excessAfter(pairs) < bestExcess-epsilon ||
		b.excessAfter(pairs) <= bestExcess+epsilon && len(pairs) < len(best) {
		best = pairs
	}
	return best
}

// search returns exactly depth moves, last first, that balance the load, or nil if there are none or the effort is
// used up. No move may raise the highest relative load.
func (b *balancer) search(depth int, highest float64) []step {
	over, under := b.outside()
	if max(over, under) > depth { // a move helps one slot above and one below
		return nil
	}
	if depth == 1 {
		return b.last(highest, over, under)
	}
	for _, from := range b.slots {
		for i := len(b.items[from]) - 1; i >= 0; i-- { // large devices are more likely to solve it
			size := b.items[from][i].size
			if i+1 < len(b.items[from]) && size == b.items[from][i+1].size {
				continue
			}
			for _, to := range b.slots {
				if to == from {
					continue
				}
				if b.effort--; b.effort <= 0 {
					return nil
				}
				if b.load[to]+size > highest*b.fair[to]+epsilon {
					continue
				}
				m, undo := b.applyMove(from, i, to)
				moves := b.search(depth-1, min(highest, b.imbalance()))
				undo()
				if moves != nil {
					return append(moves, m)
				}
			}
		}
	}
	return nil
}

// last returns a move that balances the load, where at most one slot is above and at most one is below the tolerance.
// Of several, it is the one that leaves the lowest potential.
func (b *balancer) last(highest float64, over, under int) []step {
	var best []step
	lowest := math.Inf(1)
	for _, from := range b.slots {
		if over > 0 && b.side(from, b.load[from]) <= 0 {
			continue
		}
		for _, to := range b.slots {
			if to == from || under > 0 && b.side(to, b.load[to]) >= 0 {
				continue
			}
			b.effort--
			i, _ := b.fit(from, to, highest)
			if i < 0 {
				continue
			}
			it := b.items[from][i]
			if b.side(from, b.load[from]-it.size) != 0 || b.side(to, b.load[to]+it.size) != 0 {
				continue
			}
			after := b.change(from, to, it.size)
			if after < lowest {
				best, lowest = []step{{it.device, from, to, it.size}}, after
			}
		}
	}
	return best
}

// change returns the change of the sum of potentials by a move.
func (b *balancer) change(from, to int, size float64) float64 {
	return b.potential(from, b.load[from]-size) + b.potential(to, b.load[to]+size) - b.potential(from, b.load[from]) - b.potential(to, b.load[to])
}

// potential is excess with a small share of the deviation within the tolerance, so that it is strictly convex.
func (b *balancer) potential(slot int, load float64) float64 {
	d := load - b.fair[slot]
	return b.excess(slot, load) + centre*d*d/b.fair[slot]
}

// pairExcess returns the excess of two slots after a move.
func (b *balancer) pairExcess(from, to int, size float64) float64 {
	return b.excess(from, b.load[from]-size) + b.excess(to, b.load[to]+size)
}

// candidates are the changes of all pairs of slots, and the best one of each slot that a device leaves. A candidate can
// have become inadmissible, because the highest relative load falls; no better one can have appeared.
type candidates struct {
	b       *balancer
	changes [][]float64
	best    []int // index of the lowest change in each row
}

// descend returns the moves of repeated best single moves, and of best pairs where no single move helps, or, with
// pairsFirst, of best pairs as long as there are any. The state is that before them again.
func (b *balancer) descend(limit int, pairsFirst bool) []step {
	load, items := slices.Clone(b.load), slices.Clone(b.items)
	for slot := range b.items {
		b.items[slot] = slices.Clone(b.items[slot])
	}
	defer func() { b.load, b.items = load, items }()
	b.effort = searchEffort
	highest := b.imbalance()
	singles := b.candidates(highest)
	var moves []step
	for len(moves) < limit && !b.balanced() {
		var next []step
		if pairsFirst {
			next = b.bestPair(limit-len(moves), highest)
		}
		if next == nil {
			if c := singles.lowest(highest); c.change < 0 {
				next = []step{c.step}
			} else if next = b.bestPair(limit-len(moves), highest); next == nil {
				break
			}
		}
		var changed []int
		for _, m := range next {
			i := slices.IndexFunc(b.items[m.from], func(it item) bool { return it.device == m.device })
			b.items[m.from] = slices.Delete(b.items[m.from], i, i+1)
			b.apply(m)
			changed = append(changed, m.from, m.to)
		}
		moves = append(moves, next...)
		highest = min(highest, b.imbalance())
		singles.update(changed, highest)
	}
	return moves
}

func (b *balancer) balanced() bool {
	over, under := b.outside()
	return over+under == 0
}

// outside returns the numbers of slots above and below the tolerance.
func (b *balancer) outside() (over, under int) {
	if b.empty() {
		return 0, 0
	}
	for _, slot := range b.slots {
		switch b.side(slot, b.load[slot]) {
		case 1:
			over++
		case -1:
			under++
		}
	}
	return over, under
}

// side returns 1 for a slot above the tolerance with a load, -1 below, 0 within.
func (b *balancer) side(slot int, load float64) int {
	d, limit := load-b.fair[slot], b.tolerance*b.fair[slot]+epsilon
	switch {
	case d > limit:
		return 1
	case d < -limit:
		return -1
	}
	return 0
}

func (b *balancer) candidates(highest float64) *candidates {
	c := &candidates{b, make([][]float64, len(b.slots)), make([]int, len(b.slots))}
	for i := range b.slots {
		c.changes[i] = make([]float64, len(b.slots))
		c.row(i, highest)
	}
	return c
}

// update computes the candidates of pairs with a slot whose load has changed.
func (c *candidates) update(changed []int, highest float64) {
	for i, from := range c.b.slots {
		if slices.Contains(changed, from) {
			c.row(i, highest)
			continue
		}
		for _, to := range changed {
			j, _ := slices.BinarySearch(c.b.slots, to)
			c.changes[i][j] = c.b.candidateOf(from, to, highest).change
		}
		c.choose(i)
	}
}

// row computes the candidates of a slot that a device leaves.
func (c *candidates) row(i int, highest float64) {
	for j, to := range c.b.slots {
		c.changes[i][j] = c.b.candidateOf(c.b.slots[i], to, highest).change
	}
	c.choose(i)
}

// candidate is the move between two slots that lowers their potential by the most.
type candidate struct {
	step
	change float64 // of the potential; 0 if no move lowers the excess
}

// lowest returns the best candidate of all; its change is 0 if there is none.
func (c *candidates) lowest(highest float64) candidate {
	for {
		row := 0
		for i, j := range c.best {
			if c.changes[i][j] < c.changes[row][c.best[row]] {
				row = i
			}
		}
		j := c.best[row]
		now := c.b.candidateOf(c.b.slots[row], c.b.slots[j], highest)
		if now.change == c.changes[row][j] {
			return now
		}
		c.changes[row][j] = now.change
		c.choose(row)
	}
}

// candidateOf returns the candidate of two slots.
func (b *balancer) candidateOf(from, to int, highest float64) candidate {
	if from == to || b.load[from]*b.fair[to] <= b.load[to]*b.fair[from] {
		return candidate{}
	}
	i, change := b.fit(from, to, highest)
	if i < 0 || change >= 0 {
		return candidate{}
	}
	it := b.items[from][i]
	if b.pairExcess(from, to, 0)-b.pairExcess(from, to, it.size) <= epsilon {
		return candidate{}
	}
	return candidate{step{it.device, from, to, it.size}, change}
}

// choose finds the best candidate of a row.
func (c *candidates) choose(i int) {
	best, lowest := 0, c.changes[i][0]
	for j, change := range c.changes[i] {
		if change < lowest {
			best, lowest = j, change
		}
	}
	c.best[i] = best
}

// bestPair returns the two moves that lower the potential by the most, or nil if none lowers the excess, or if the
// effort that is left is not sufficient for the search.
func (b *balancer) bestPair(limit int, highest float64) []step {
	cost := b.pairCost()
	if limit < 2 || cost > b.effort {
		return nil
	}
	b.effort -= cost
	var best []step
	lowest, excess := 0.0, b.totalExcess()
	for _, from := range b.slots {
		for i := 0; i < len(b.items[from]); i++ {
			size := b.items[from][i].size
			for _, to := range b.slots {
				if to == from || b.load[to]+size > highest*b.fair[to]+epsilon {
					continue
				}
				first := b.change(from, to, size)
				m, undo := b.applyMove(from, i, to)
				top := min(highest, b.imbalance())
				for _, from2 := range b.slots {
					for _, to2 := range b.slots {
						if from2 == to2 {
							continue
						}
						j, second := b.fit(from2, to2, top)
						if j < 0 || first+second >= lowest {
							continue
						}
						m2, undo2 := b.applyMove(from2, j, to2)
						if b.totalExcess() < excess-epsilon {
							best, lowest = []step{m, m2}, first+second
						}
						undo2()
					}
				}
				undo()
			}
		}
	}
	return best
}

// applyMove applies the move of item i of a slot, and returns a function that restores the state.
func (b *balancer) applyMove(from, i, to int) (step, func()) {
	it := b.items[from][i]
	fromLoad, toLoad := b.load[from], b.load[to]
	m := step{it.device, from, to, it.size}
	b.items[from] = slices.Delete(b.items[from], i, i+1)
	b.apply(m)
	return m, func() {
		b.items[from] = slices.Insert(b.items[from], i, it)
		b.load[from], b.load[to] = fromLoad, toLoad
	}
}

// fit returns the item of a slot whose move to another slot lowers the sum of potentials by the most without raising
// the highest relative load, and the change of that sum; -1 if there is none. The sum is convex in the size of the item.
func (b *balancer) fit(from, to int, highest float64) (int, float64) {
	items := b.items[from]
	room := highest*b.fair[to] - b.load[to] + epsilon
	if len(items) == 0 || items[0].size > room {
		return -1, 0
	}
	i, _ := slices.BinarySearchFunc(items, 0.0, func(it item, _ float64) int {
		if it.size > room || b.slope(to, b.load[to]+it.size) >= b.slope(from, b.load[from]-it.size) {
			return 1
		}
		return -1
	})
	best, lowest, least := -1, math.Inf(1), math.Inf(1)
	for j := max(0, i-1); j <= i && j < len(items) && items[j].size <= room; j++ {
		left, c := b.pairExcess(from, to, items[j].size), b.change(from, to, items[j].size)
		if left < least-epsilon || left <= least+epsilon && c < lowest {
			best, lowest, least = j, c, left
		}
	}
	return best, lowest
}

// slope is the derivative of potential by the load, halved.
func (b *balancer) slope(slot int, load float64) float64 {
	d := load - b.fair[slot]
	v := max(0, math.Abs(d)-b.tolerance*b.fair[slot]-epsilon)
	return (math.Copysign(v, d) + centre*d) / b.fair[slot]
}

// pairCost returns the effort of bestPair: pairs of slots for the second move, for each first move.
func (b *balancer) pairCost() int {
	n, count := len(b.slots), 0
	for _, from := range b.slots {
		count += len(b.items[from])
	}
	return count * n * n * n
}

// prune drops moves, smallest first, without which the excess is the same.
func (b *balancer) prune(moves []step) []step {
	order := slices.Clone(moves)
	slices.SortStableFunc(order, func(a, b step) int { return cmp.Compare(a.size, b.size) })
	for _, m := range order {
		rest := slices.DeleteFunc(slices.Clone(moves), func(o step) bool { return o.device == m.device })
		if b.excessAfter(rest) <= b.excessAfter(moves)+epsilon && b.allowed(rest) {
			moves = rest
		}
	}
	return moves
}

func (b *balancer) excessAfter(moves []step) float64 {
	load := slices.Clone(b.load)
	for _, m := range moves {
		b.apply(m)
	}
	sum := b.totalExcess()
	b.load = load
	return sum
}

// totalExcess returns the sum of the excess of all slots.
func (b *balancer) totalExcess() float64 {
	sum := 0.0
	for _, slot := range b.slots {
		sum += b.excess(slot, b.load[slot])
	}
	return sum
}

// excess returns the share of a slot with a load in the sum that is to become 0: the squared deviation beyond the
// tolerance, relative to the fair share.
func (b *balancer) excess(slot int, load float64) float64 {
	v := max(0, math.Abs(load-b.fair[slot])-b.tolerance*b.fair[slot]-epsilon)
	return v * v / b.fair[slot]
}

// allowed reports whether no move raises the highest relative load, in order.
func (b *balancer) allowed(moves []step) bool {
	load := slices.Clone(b.load)
	defer func() { b.load = load }()
	highest := b.imbalance()
	for _, m := range moves {
		b.apply(m)
		now := b.imbalance()
		if now > highest+epsilon {
			return false
		}
		highest = now
	}
	return true
}

// imbalance returns the highest load of a slot divided by its fair share.
func (b *balancer) imbalance() float64 {
	if b.empty() {
		return 1
	}
	highest := 0.0
	for _, slot := range b.slots {
		highest = max(highest, b.load[slot]/b.fair[slot])
	}
	return highest
}

// empty reports whether there is no load.
func (b *balancer) empty() bool {
	for _, slot := range b.slots {
		if b.load[slot] > 0 {
			return false
		}
	}
	return true
}

func (b *balancer) apply(m step) {
	b.load[m.from] -= m.size
	b.load[m.to] += m.size
}
