// SPDX-License-Identifier: Apache-2.0

// Package rendezvous implements weighted rendezvous hashing (highest random weight) in integers, which give the same
// result on all architectures.
package rendezvous

import "math/bits"

// Preferred returns the index of the candidate, of n, with the lowest score. The score is an exponential variate with the
// weight as its rate, so that the probability of a candidate is proportional to its weight. hash must be uniform over 64
// bits and independent for each candidate. Weights are between 1 and 2^25.
func Preferred(n int, weight, hash func(i int) uint64) int {
	best := 0
	lowest, rate := uint64(0), uint64(0) // the score is lowest/rate; no score yet
	for i := range n {
		h, w := hash(i), weight(i)
		// -log2(u) >= 1-u, so most logarithms need not be computed.
		if rate > 0 && ^h>>32*rate >= lowest*w {
			continue
		}
		if l := negLog2(h); rate == 0 || l*rate < lowest*w {
			best, lowest, rate = i, l, w
		}
	}
	return best
}

// Score is the score of a candidate with a weight, as in [Preferred].
type Score struct{ log, weight uint64 }

// NewScore returns the score of a candidate. Hash and weight are those of [Preferred].
func NewScore(hash, weight uint64) Score { return Score{negLog2(hash), weight} }

// Less reports whether a candidate is preferred to another one.
func (s Score) Less(other Score) bool { return s.log*other.weight < other.log*s.weight }

// negLog2 returns -log2((hash+1)/2^64) in units of 2^-32, rounded up.
func negLog2(hash uint64) uint64 {
	if hash++; hash == 0 {
		return 0
	}
	exponent := bits.Len64(hash) - 1
	log, m := uint64(exponent), hash<<(63-exponent)
	for range 32 {
		hi, lo := bits.Mul64(m, m)
		log <<= 1
		if hi>>63 == 1 {
			log, m = log|1, hi
		} else {
			m = hi<<1 | lo>>63
		}
	}
	return 64<<32 - log
}

// Mix is the finalizer of SplitMix64, a bijection whose result looks random.
func Mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
