// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"sockeye/internal/bpf"
	"sockeye/internal/rendezvous"
)

// Weights of a slot. A slot is assigned buckets in proportion to its weight; a slot with weight 0 is assigned none.
const (
	DefaultWeight = 100
	MaxWeight     = 256
)

// Weights are the weights of all slots of a service, in the order of the slots. A drained slot has weight 0.
type Weights []int

// ErrNoWeight is the error for weights that leave no slot for any device.
var ErrNoWeight = errors.New("every slot is drained or has weight 0")

// receiver is a slot that has fewer buckets in the even table than its share.
type receiver struct {
	slot, room uint64
	left       int // buckets still to be assigned
}

// WeightedBuckets distributes the buckets in proportion to the weights. The result depends on the weights only, and is
// that of buckets for equal weights. It is derived from that even table: a slot with too many buckets releases the
// first ones in a fixed random order, and each released bucket is assigned to a slot with room by weighted rendezvous
// hashing, where the weight of a slot is its room. So a smaller weight releases a superset of buckets, and few buckets
// move between slots whose weights do not change. See docs/decisions/weighted-table.md.
func WeightedBuckets(weights Weights) ([bpf.Buckets]uint16, error) {
	if err := weights.check(); err != nil {
		return [bpf.Buckets]uint16{}, fmt.Errorf("make bucket table: %w", err)
	}
	table := buckets(len(weights))
	surplus := make([]int, len(weights))
	for _, slot := range table {
		surplus[slot]++
	}
	var receivers []receiver
	for slot, share := range weights.shares() {
		surplus[slot] -= share
		if surplus[slot] < 0 {
			receivers = append(receivers, receiver{uint64(slot), uint64(-surplus[slot]), -surplus[slot]})
		}
	}
	for _, bucket := range bucketOrder() {
		from := table[bucket]
		if surplus[from] <= 0 {
			continue
		}
		surplus[from]--
		i := preferred(receivers, bucket)
		table[bucket] = uint16(receivers[i].slot)
		if receivers[i].left--; receivers[i].left == 0 {
			receivers = slices.Delete(receivers, i, i+1)
		}
	}
	return table, nil
}

// check returns an error unless the buckets can be distributed by the weights.
func (w Weights) check() error {
	if len(w) < 1 || len(w) > bpf.MaxSlots {
		return fmt.Errorf("%d slots, want 1 to %d", len(w), bpf.MaxSlots)
	}
	for slot, weight := range w {
		if weight < 0 || weight > MaxWeight {
			return fmt.Errorf("slot %d: weight %d, want 0 to %d", slot, weight, MaxWeight)
		}
	}
	if w.sum() == 0 {
		return ErrNoWeight
	}
	return nil
}

// shares returns the number of buckets of each slot, by largest remainder. Of slots with equal remainders, the first
// ones get the remaining buckets.
func (w Weights) shares() []int {
	sum, left := w.sum(), bpf.Buckets
	shares, order := make([]int, len(w)), make([]int, len(w))
	for slot, weight := range w {
		shares[slot], order[slot] = bpf.Buckets*weight/sum, slot
		left -= shares[slot]
	}
	remainder := func(slot int) int { return bpf.Buckets * w[slot] % sum }
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(remainder(b), remainder(a)), cmp.Compare(a, b))
	})
	for _, slot := range order[:left] {
		shares[slot]++
	}
	return shares
}

func (w Weights) sum() int {
	sum := 0
	for _, weight := range w {
		sum += weight
	}
	return sum
}

// preferred returns the index of the receiver of a bucket. A bucket prefers a receiver with a probability proportional to
// its room.
func preferred(receivers []receiver, bucket int) int {
	return rendezvous.Preferred(len(receivers),
		func(i int) uint64 { return receivers[i].room },
		func(i int) uint64 { return rendezvous.Mix(uint64(bucket)<<16 | receivers[i].slot) })
}

// bucketOrder returns all buckets in the order in which a slot releases them.
func bucketOrder() []int {
	order := make([]int, bpf.Buckets)
	for b := range order {
		order[b] = b
	}
	// Mix is a bijection, so the order does not depend on the sort algorithm.
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Compare(rendezvous.Mix(1<<32|uint64(a)), rendezvous.Mix(1<<32|uint64(b)))
	})
	return order
}
