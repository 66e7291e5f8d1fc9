// SPDX-License-Identifier: Apache-2.0

package packets

// sequence makes relative numbers, which do not wrap, of the sequence numbers of
// one direction.
type sequence struct {
	set  bool
	base uint32
	last int64 // the highest that is sure
}

// at gives the relative number; the first one ever asked for is 1.
func (s *sequence) at(raw uint32) int64 {
	if !s.set {
		s.set, s.base, s.last = true, raw-1, 1
	}
	return s.last + int64(int32(raw-s.base-uint32(s.last)))
}

// sure is at, of a number that is not the peer's claim.
func (s *sequence) sure(raw uint32) int64 {
	n := s.at(raw)
	s.last = max(s.last, n)
	return n
}

// Relative sequence numbers are between these; what spans them has a length.
const (
	least = -1 << 61
	most  = 1 << 61
)

// span is a range of relative sequence numbers; end is not included.
type span struct{ start, end int64 }

func (s span) and(o span) span { return span{max(s.start, o.start), min(s.end, o.end)} }

func (s span) length() int64 { return max(0, s.end-s.start) }

// spans are spans in order that do not touch.
type spans []span

func (s spans) length() (n int64) {
	for _, one := range s {
		n += one.length()
	}
	return n
}

func (s spans) overlap(o span) bool {
	for _, one := range s {
		if one.and(o).length() > 0 {
			return true
		}
	}
	return false
}

// covers tells whether all of o is in one of them.
func (s spans) covers(o span) bool {
	for _, one := range s {
		if one.start <= o.start && o.end <= one.end {
			return true
		}
	}
	return false
}

// without takes a span out.
func (s spans) without(o span) spans {
	if !s.overlap(o) {
		return s
	}
	var left spans
	for _, one := range s {
		if one.and(o).length() == 0 {
			left = append(left, one)
			continue
		}
		if one.start < o.start {
			left = append(left, span{one.start, o.start})
		}
		if o.end < one.end {
			left = append(left, span{o.end, one.end})
		}
	}
	return left
}
