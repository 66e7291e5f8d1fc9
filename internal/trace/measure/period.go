// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"sockeye/internal/config"
	"sockeye/internal/histogram"
)

// Sum is a sum of results.
type Sum struct {
	Result
	latest time.Time // time of the gauges
}

// Merge merges periods into one, by group. Gauges (InFlight, RXWaiting, RXOldest) are those of the latest period that
// contains the group, or the sum over all periods that end at that time. Results are sorted by [Group.Label], and other
// comes last. The result shares no memory with the periods.
func Merge(periods []Period) Period {
	var merged Period
	groups := map[Group]*Sum{}
	for i, p := range periods {
		if i == 0 || p.From.Before(merged.From) {
			merged.From = p.From
		}
		if i == 0 || p.To.After(merged.To) {
			merged.To = p.To
		}
		for j := range p.Results {
			r := &p.Results[j]
			s := groups[r.Group]
			if s == nil {
				s = &Sum{Result: Result{Group: r.Group}}
				groups[r.Group] = s
			}
			s.Add(r, p.To)
		}
	}
	merged.Results = make([]Result, 0, len(groups))
	for _, s := range groups {
		merged.Results = append(merged.Results, s.Result)
	}
	sortResults(merged.Results)
	return merged
}

// Add adds a result of a period with the given end.
func (s *Sum) Add(r *Result, ended time.Time) {
	s.Chosen += r.Chosen
	s.Bytes += r.Bytes
	s.Unqueued += r.Unqueued
	s.Undriven += r.Undriven
	s.RXChosen += r.RXChosen
	s.RXUnstamped += r.RXUnstamped
	if ended.After(s.latest) {
		s.latest, s.InFlight, s.RXWaiting, s.RXOldest = ended, 0, 0, 0
	}
	if ended.Equal(s.latest) {
		s.InFlight += r.InFlight
		s.RXWaiting += r.RXWaiting
		s.RXOldest = max(s.RXOldest, r.RXOldest)
	}
	s.Outcomes = addOutcomes(s.Outcomes, r.Outcomes)
	s.RXOutcomes = addOutcomes(s.RXOutcomes, r.RXOutcomes)
	for stage, h := range r.Stages {
		if h == nil {
			continue
		}
		if s.Stages == nil {
			s.Stages = map[config.Stage]*Histogram{}
		}
		if s.Stages[stage] == nil {
			s.Stages[stage] = &Histogram{}
		}
		s.Stages[stage].Add(h)
	}
}

func addOutcomes(to, from map[Outcome]uint64) map[Outcome]uint64 {
	if to == nil && from != nil {
		to = make(map[Outcome]uint64, len(from))
	}
	for outcome, n := range from {
		to[outcome] += n
	}
	return to
}

// Diff returns the measurements between the ends of two periods with the same start. If a counter of a group is lower
// in the later period, the group was restarted, and the result contains all of its later counts. Gauges are those of
// the later period. Stages without new counts are absent. The result shares no memory with the periods.
func Diff(earlier, later Period) Period {
	before := make(map[Group]*Result, len(earlier.Results))
	for i := range earlier.Results {
		before[earlier.Results[i].Group] = &earlier.Results[i]
	}
	d := Period{From: earlier.To, To: later.To, Results: make([]Result, 0, len(later.Results))}
	for i := range later.Results {
		r := &later.Results[i]
		b := before[r.Group]
		if b == nil || r.restarted(b) {
			b = &Result{}
		}
		d.Results = append(d.Results, r.since(b))
	}
	return d
}

// restarted returns whether a counter of r, the later result, is lower than before.
func (r *Result) restarted(before *Result) bool {
	if r.Chosen < before.Chosen || r.RXChosen < before.RXChosen || r.Bytes < before.Bytes {
		return true
	}
	for outcome, n := range before.Outcomes {
		if r.Outcomes[outcome] < n {
			return true
		}
	}
	for outcome, n := range before.RXOutcomes {
		if r.RXOutcomes[outcome] < n {
			return true
		}
	}
	for stage, h := range before.Stages {
		if h != nil && h.Count > 0 && (r.Stages[stage] == nil || r.Stages[stage].Count < h.Count) {
			return true
		}
	}
	return false
}

// since returns r without the counts of before.
func (r *Result) since(before *Result) Result {
	d := *r
	d.Chosen -= before.Chosen
	d.Bytes -= before.Bytes
	d.Unqueued = histogram.Increase(r.Unqueued, before.Unqueued)
	d.Undriven = histogram.Increase(r.Undriven, before.Undriven)
	d.RXChosen -= before.RXChosen
	d.RXUnstamped = histogram.Increase(r.RXUnstamped, before.RXUnstamped)
	d.Outcomes = subOutcomes(r.Outcomes, before.Outcomes)
	d.RXOutcomes = subOutcomes(r.RXOutcomes, before.RXOutcomes)
	d.Stages = map[config.Stage]*Histogram{}
	for stage, h := range r.Stages {
		if h == nil {
			continue
		}
		left := *h
		if b := before.Stages[stage]; b != nil {
			left.Sub(b)
		}
		if left.Count > 0 {
			d.Stages[stage] = &left
		}
	}
	return d
}

func subOutcomes(later, earlier map[Outcome]uint64) map[Outcome]uint64 {
	d := maps.Clone(later)
	for outcome, n := range earlier {
		switch n {
		case 0:
		case d[outcome]:
			delete(d, outcome)
		default:
			d[outcome] -= n
		}
	}
	return d
}

// Trim returns the periods whose middle is in [from, to), so that adjacent times share no period. A zero time is
// unbounded.
func Trim(periods []Period, from, to time.Time) []Period {
	var kept []Period
	for _, p := range periods {
		middle := p.From.Add(p.To.Sub(p.From) / 2)
		if (from.IsZero() || !middle.Before(from)) && (to.IsZero() || middle.Before(to)) {
			kept = append(kept, p)
		}
	}
	return kept
}

// Find returns, for each period, the sum of all groups that the selector matches, or an empty result if no group
// matches. [MatchGroup] describes selectors. The Group of a result contains the common values of the groups. [Compare]
// accepts the results. If no period has a matching group, the error is a [*SelectorError] that lists existing groups.
func Find(periods []Period, selector string) ([]*Result, error) {
	f, err := NewFinder(selector)
	if err != nil {
		return nil, err
	}
	for _, p := range periods {
		f.Begin()
		for i := range p.Results {
			f.Add(&p.Results[i], p.To)
		}
	}
	return f.Results()
}

// Finder does the work of [Find] for one result at a time, and keeps no more than a sum per period.
type Finder struct {
	selector   string
	conditions []condition
	selected   map[Group]bool // groups that were seen, true for those that match
	shared     *Group         // common values of those that match
	sums       []*Sum         // of each period
}

// NewFinder returns a Finder for a selector. The error is a [*SelectorError].
func NewFinder(selector string) (*Finder, error) {
	conditions, err := parseSelector(selector)
	if err != nil {
		return nil, err
	}
	return &Finder{selector: selector, conditions: conditions, selected: map[Group]bool{}}, nil
}

// Begin begins the next period.
func (f *Finder) Begin() { f.sums = append(f.sums, &Sum{}) }

// Add adds a result of the period that was begun last, which ends at a time.
func (f *Finder) Add(r *Result, ended time.Time) {
	meant, known := f.selected[r.Group]
	if !known {
		meant = meets(r.Group, f.conditions)
		f.selected[r.Group] = meant
		if meant {
			f.shared = r.Group.common(f.shared)
		}
	}
	if meant {
		f.sums[len(f.sums)-1].Add(r, ended)
	}
}

// Seen returns the number of different groups.
func (f *Finder) Seen() int { return len(f.selected) }

// Groups returns the groups that match, in no order.
func (f *Finder) Groups() []Group {
	var groups []Group
	for g, meant := range f.selected {
		if meant {
			groups = append(groups, g)
		}
	}
	return groups
}

// Results returns the sum of each period.
func (f *Finder) Results() ([]*Result, error) {
	if f.shared == nil {
		return nil, &SelectorError{Selector: f.selector, Message: "no group matches", Hint: groupsHint(f.selected)}
	}
	found := make([]*Result, 0, len(f.sums))
	for _, s := range f.sums {
		s.Group = *f.shared
		found = append(found, &s.Result)
	}
	return found, nil
}

// common returns the common values of two groups, or g if other is nil.
func (g Group) common(other *Group) *Group {
	if other == nil {
		return &g
	}
	s := *other
	keepEqual(&s.Rule, g.Rule)
	keepEqual(&s.Protocol, g.Protocol)
	keepEqual(&s.Other, g.Other)
	keepEqual(&s.Remote, g.Remote)
	keepEqual(&s.Port, g.Port)
	keepEqual(&s.Service, g.Service)
	keepEqual(&s.Cgroup, g.Cgroup)
	keepEqual(&s.TuneRule, g.TuneRule)
	keepEqual(&s.Arm, g.Arm)
	return &s
}

// keepEqual clears a value that differs from the other one.
func keepEqual[T comparable](value *T, other T) {
	if *value != other {
		var none T
		*value = none
	}
}

// groupsHint returns a hint with the first groups.
func groupsHint(groups map[Group]bool) string {
	if len(groups) == 0 {
		return "no measurements exist for this time"
	}
	const named = 5
	results := make([]Result, 0, len(groups))
	for g := range groups {
		results = append(results, Result{Group: g})
	}
	sortResults(results)
	var labels []string
	for _, r := range results[:min(named, len(results))] {
		labels = append(labels, r.Group.Label())
	}
	hint := "groups: " + strings.Join(labels, "; ")
	if more := len(results) - named; more > 0 {
		hint += fmt.Sprintf("; and %d more", more)
	}
	return hint
}

// sortResults sorts results by label. The group other is the last of its rule.
func sortResults(results []Result) {
	labels := make(map[Group]string, len(results))
	for _, r := range results {
		labels[r.Group] = r.Group.Label()
	}
	slices.SortFunc(results, func(a, b Result) int {
		c := cmp.Compare(a.Group.Rule, b.Group.Rule)
		if c == 0 && a.Group.Other != b.Group.Other {
			c = 1
			if b.Group.Other {
				c = -1
			}
		}
		return cmp.Or(c, a.Group.Remote.Addr().Compare(b.Group.Remote.Addr()), cmp.Compare(a.Group.Port, b.Group.Port),
			cmp.Compare(labels[a.Group], labels[b.Group]))
	})
}
