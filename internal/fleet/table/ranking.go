// SPDX-License-Identifier: Apache-2.0

package table

import (
	"hash/fnv"

	"sockeye/internal/rendezvous"
)

// Ranking has the preferred host of each bucket, by weighted rendezvous hashing: a host that is added takes its share from
// the others, and one that is removed leaves its buckets to the others, by their weights; no other bucket moves. The result
// depends on the names and the weights only. The zero value has no hosts.
type Ranking struct {
	hosts map[string]*ranked
	best  [Buckets]*ranked
	score [Buckets]rendezvous.Score
}

type ranked struct {
	name   string
	seed   uint64
	weight uint32
	index  uint16 // only for Column
}

// Set adds a host, changes its weight, or removes it, with weight 0. It returns whether the host or its weight is new.
func (r *Ranking) Set(name string, weight uint32) bool {
	h := r.hosts[name]
	switch {
	case h == nil && weight == 0, h != nil && h.weight == weight:
		return false
	case h == nil:
		if r.hosts == nil {
			r.hosts = make(map[string]*ranked)
		}
		h = &ranked{name: name, seed: seed(name)}
		r.hosts[name] = h
	}
	less := weight < h.weight // its score gets worse, and other hosts may be better in its buckets
	h.weight = weight
	if weight == 0 {
		delete(r.hosts, name)
	}
	for b := range Buckets {
		switch {
		case r.best[b] == h && less:
			r.choose(b)
		case weight > 0:
			if score := h.scoreOf(b); r.best[b] == nil || r.best[b] == h || h.before(score, r.best[b], r.score[b]) {
				r.best[b], r.score[b] = h, score
			}
		}
	}
	return true
}

// choose compares all hosts for a bucket.
func (r *Ranking) choose(bucket int) {
	r.best[bucket] = nil
	for _, h := range r.hosts {
		if score := h.scoreOf(bucket); r.best[bucket] == nil || h.before(score, r.best[bucket], r.score[bucket]) {
			r.best[bucket], r.score[bucket] = h, score
		}
	}
}

// Hosts returns the number of hosts.
func (r *Ranking) Hosts() int { return len(r.hosts) }

// Preferred returns the preferred host of a bucket, or "" without hosts.
func (r *Ranking) Preferred(bucket int) string {
	if r.best[bucket] == nil {
		return ""
	}
	return r.best[bucket].name
}

// Column returns the preferred hosts of all buckets. index returns the index of a host, by name.
func (r *Ranking) Column(index func(name string) uint16) *Column {
	for _, h := range r.hosts {
		h.index = index(h.name)
	}
	c := new(Column)
	for b, h := range r.best {
		c[b] = None
		if h != nil {
			c[b] = h.index
		}
	}
	return c
}

func (h *ranked) scoreOf(bucket int) rendezvous.Score {
	return rendezvous.NewScore(rendezvous.Mix(h.seed+uint64(bucket)*0x9e3779b97f4a7c15), uint64(h.weight))
}

// before reports whether a host comes before another one. Equal scores are decided by the name.
func (h *ranked) before(score rendezvous.Score, other *ranked, otherScore rendezvous.Score) bool {
	if score.Less(otherScore) {
		return true
	}
	return !otherScore.Less(score) && h.name < other.name
}

// seed returns the hash of a name, from which the hashes for the buckets are derived.
func seed(name string) uint64 {
	hash := fnv.New64a()
	hash.Write([]byte(name)) // never returns an error
	return rendezvous.Mix(hash.Sum64())
}
