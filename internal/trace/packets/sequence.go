// SPDX-License-Identifier: Apache-2.0

package packets

// sequence converts the sequence numbers of one direction to relative numbers, which do not wrap.
type sequence struct {
	set  bool
	base uint32
	last int64 // highest verified number
}

// sure is at for a sequence number that was sent, and not only acknowledged by the peer.
func (s *sequence) sure(raw uint32) int64 {
	n := s.at(raw)
	s.last = max(s.last, n)
	return n
}

// Range of relative sequence numbers.
const (
	least = -1 << 61
	most  = 1 << 61
)

// at returns the relative number of a sequence number. The first number is 1.
func (s *sequence) at(raw uint32) int64 {
	if !s.set {
		s.set, s.base, s.last = true, raw-1, 1
	}
	return s.last + int64(int32(raw-s.base-uint32(s.last)))
}

// span is a range of relative sequence numbers that excludes end.
type span struct{ start, end int64 }

func (s span) and(o span) span { return span{max(s.start, o.start), min(s.end, o.end)} }

func (s span) length() int64 { return max(0, s.end-s.start) }

// spans are sorted spans that do not touch.
type spans []span

func (s spans) length() (n int64) {
	for _, one := range s {
		n += one.length()
	}
	return n
}

// covers returns whether a single span contains all of o.
func (s spans) covers(o span) bool {
	for _, one := range s {
		if one.start <= o.start && o.end <= one.end {
			return true
		}
	}
	return false
}

// without returns the spans without o.
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

func (s spans) overlap(o span) bool {
	for _, one := range s {
		if one.and(o).length() > 0 {
			return true
		}
	}
	return false
}
