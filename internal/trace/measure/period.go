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
)

// Merge makes one period of several, by group. What is so at a time (InFlight,
// RXWaiting, RXOldest) is that of the latest period that has the group; of periods
// that end at once, all together. Results are in the order of [Group.Label], those
// of other last. Nothing is shared with the periods.
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
	order(merged.Results)
	return merged
}

// order sorts by label, with other last of its rule.
func order(results []Result) {
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

// Sum is a result that others are added to.
type Sum struct {
	Result
	latest time.Time // of what is so at a time
}

// Add adds a result of a period that ended then.
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

// Diff gives what was measured from the end of one period to the end of another
// that began at the same time and ended later. A group that counts less than
// before has begun anew: all of it counts. What is so at a time is that of later.
// Stages in which nothing was counted since are absent. Nothing is shared with the
// periods.
func Diff(earlier, later Period) Period {
	before := make(map[Group]*Result, len(earlier.Results))
	for i := range earlier.Results {
		before[earlier.Results[i].Group] = &earlier.Results[i]
	}
	d := Period{From: earlier.To, To: later.To, Results: make([]Result, 0, len(later.Results))}
	for i := range later.Results {
		r := &later.Results[i]
		b := before[r.Group]
		if b == nil || r.anew(b) {
			b = &Result{}
		}
		d.Results = append(d.Results, r.since(b))
	}
	return d
}

// anew tells whether r, the later, counts anything less than before.
func (r *Result) anew(before *Result) bool {
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

// since gives r without what was counted before.
func (r *Result) since(before *Result) Result {
	d := *r
	d.Chosen -= before.Chosen
	d.Bytes -= before.Bytes
	d.Unqueued = less(r.Unqueued, before.Unqueued)
	d.Undriven = less(r.Undriven, before.Undriven)
	d.RXChosen -= before.RXChosen
	d.RXUnstamped = less(r.RXUnstamped, before.RXUnstamped)
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

// Trim gives the periods whose middle is from one time to another, the latter
// excluded, so that of times that follow each other none has a period of the
// other's. A zero time is no bound.
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

// Find gives, for each period, all groups that the selector means as one result,
// which has nothing counted where the period has none of them. [MatchGroup] tells
// how selectors are written. The result's Group is what the groups share. It is
// what [Compare] takes. If no period has such a group, the error is a
// [*SelectorError] that names groups there are.
func Find(periods []Period, selector string) ([]*Result, error) {
	conditions, err := parseSelector(selector)
	if err != nil {
		return nil, err
	}
	var shared *Group
	selected := map[Group]bool{}
	found := make([]*Result, len(periods))
	for i, p := range periods {
		var s Sum
		for j := range p.Results {
			r := &p.Results[j]
			meant, known := selected[r.Group]
			if !known {
				meant = meets(r.Group, conditions)
				selected[r.Group] = meant
				if meant {
					shared = r.Group.shared(shared)
				}
			}
			if meant {
				s.Add(r, p.To)
			}
		}
		found[i] = &s.Result
	}
	if shared == nil {
		return nil, &SelectorError{Selector: selector, Message: "no group is so", Hint: groupsHint(selected)}
	}
	for _, r := range found {
		r.Group = *shared
	}
	return found, nil
}

// shared gives what g shares with other; nil: there is no other.
func (g Group) shared(other *Group) *Group {
	if other == nil {
		return &g
	}
	s := *other
	keep(&s.Rule, g.Rule)
	keep(&s.Protocol, g.Protocol)
	keep(&s.Other, g.Other)
	keep(&s.Remote, g.Remote)
	keep(&s.Port, g.Port)
	keep(&s.Service, g.Service)
	keep(&s.Cgroup, g.Cgroup)
	keep(&s.TuneRule, g.TuneRule)
	keep(&s.Arm, g.Arm)
	return &s
}

// keep leaves a value that is also the other's.
func keep[T comparable](value *T, other T) {
	if *value != other {
		var none T
		*value = none
	}
}

// groupsHint names the first of the groups.
func groupsHint(groups map[Group]bool) string {
	if len(groups) == 0 {
		return "nothing was measured in this time"
	}
	const named = 5
	results := make([]Result, 0, len(groups))
	for g := range groups {
		results = append(results, Result{Group: g})
	}
	order(results)
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

// less returns what a counter rose by.
func less(later, earlier uint64) uint64 { return later - min(earlier, later) }
