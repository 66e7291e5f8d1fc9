// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"

	"sockeye/internal/api"
	"sockeye/internal/bpf/probe"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/trace/measure"
)

// Cgroups returns the state of the named cgroup, or of all traced cgroups for "", and whether the kernel supports
// timestamps.
func (d *Domain) Cgroups(cgroup string) (*api.TraceStatus, error) {
	tracers, err := d.tracersOf(cgroup)
	if err != nil {
		return nil, err
	}
	s := &api.TraceStatus{Cgroups: []api.TracedCgroup{}}
	switch err := probe.HaveTimestamps(); {
	case err == nil:
		s.Timestamps = true
	case errors.Is(err, ebpf.ErrNotSupported):
		s.Needs = "BPF timestamping, Linux 6.15 or later"
	default:
		return nil, err
	}
	for _, t := range tracers {
		status, err := t.status()
		if err != nil {
			return nil, ofTraced(t.name, err)
		}
		s.Cgroups = append(s.Cgroups, status)
	}
	return s, nil
}

// traceQuery is a decoded request.
type traceQuery struct {
	from, to time.Time // zero from: since the counts started
	selected func(measure.Group) bool
}

// Results returns the measurements of a time, or since the counts started.
func (d *Domain) Results(q url.Values) (*api.TraceResults, error) {
	query, tracers, err := d.traceQuery(q)
	if err != nil {
		return nil, err
	}
	if !query.from.IsZero() {
		periods, partial, err := d.periodsBetween(query.from, query.to)
		if err != nil {
			return nil, err
		}
		return &api.TraceResults{Period: query.pick(measure.Merge(periods)), Partial: partial}, nil
	}
	var periods []measure.Period
	for _, t := range tracers {
		reading, err := t.read()
		if err != nil {
			return nil, err
		}
		periods = append(periods, reading.period)
	}
	return &api.TraceResults{Period: query.pick(measure.Merge(periods))}, nil
}

// History returns the measurements of a time in slices.
func (d *Domain) History(q url.Values) (*api.TraceHistory, error) {
	query, _, err := d.traceQuery(q)
	if err != nil {
		return nil, err
	}
	periods, partial, err := d.periodsBetween(query.from, query.to)
	if err != nil {
		return nil, err
	}
	h := &api.TraceHistory{Slices: []measure.Period{}, Partial: partial && !query.from.IsZero()}
	for _, p := range periods {
		h.Slices = append(h.Slices, query.pick(p))
	}
	return h, nil
}

// pick returns the groups of a period that the query selects.
func (q traceQuery) pick(p measure.Period) measure.Period {
	results := []measure.Result{}
	for _, r := range p.Results {
		if q.selected(r.Group) {
			results = append(results, r)
		}
	}
	p.Results = results
	return p
}

// maxSlow is the maximum number of messages in a response.
const maxSlow = 1000

// Slow returns the slowest messages of the last minutes, slowest first.
func (d *Domain) Slow(q url.Values) ([]api.TraceSlow, error) {
	query, tracers, err := d.traceQuery(q)
	if err != nil {
		return nil, err
	}
	n := 10
	if text := q.Get("n"); text != "" {
		if n, err = strconv.Atoi(text); err != nil || n < 1 || n > maxSlow {
			return nil, fault.Usage(fmt.Errorf("%q is not a number of messages", text), fmt.Sprintf("1 to %d", maxSlow))
		}
	}
	var samples []measure.Sample
	for _, t := range tracers {
		found, err := t.slowest()
		if err != nil {
			return nil, err
		}
		samples = append(samples, found...)
	}
	slices.SortStableFunc(samples, func(a, b measure.Sample) int { return int(b.Stages[measure.Total] - a.Stages[measure.Total]) })
	list := []api.TraceSlow{}
	for i := range samples {
		s := &samples[i]
		if len(list) < n && query.selected(s.Group) && !s.Ended.Before(query.from) && !s.Ended.After(query.to) {
			list = append(list, api.TraceSlow{Sample: *s, Explanation: measure.Explain(s)})
		}
	}
	return list, nil
}

// traceQuery decodes a query and finds its tracers: that of a cgroup, or all.
func (d *Domain) traceQuery(q url.Values) (traceQuery, []*tracer, error) {
	query, err := parseTraceQuery(q)
	if err != nil {
		return query, nil, err
	}
	tracers, err := d.tracersOf(q.Get("cgroup"))
	if err != nil || q.Get("cgroup") == "" {
		return query, tracers, err
	}
	rules := make(map[string]bool)
	for _, t := range tracers {
		for _, rule := range t.inForce() {
			rules[rule.Name] = true
		}
	}
	selected := query.selected
	query.selected = func(g measure.Group) bool { return rules[g.Rule] && selected(g) }
	return query, tracers, nil
}

func parseTraceQuery(q url.Values) (traceQuery, error) {
	query := traceQuery{to: time.Now()}
	selector := q.Get("select")
	if _, err := measure.MatchGroup(selector, measure.Group{}); err != nil {
		return query, ofSelector(err)
	}
	query.selected = func(g measure.Group) bool {
		ok, _ := measure.MatchGroup(selector, g) // valid, parsed above
		return ok
	}
	if text := q.Get("since"); text != "" {
		if q.Get("from")+q.Get("to") != "" {
			return query, fault.Usage(errors.New("since excludes from and to"), "a time that has ended has a from and a to")
		}
		since, err := time.ParseDuration(text)
		if err != nil || since <= 0 {
			return query, fault.Usage(fmt.Errorf("%q is not a time span", text), "as in 5m or 90s")
		}
		query.from = query.to.Add(-since)
	}
	for _, bound := range []struct {
		key string
		to  *time.Time
	}{{"from", &query.from}, {"to", &query.to}} {
		text := q.Get(bound.key)
		if text == "" {
			continue
		}
		at, err := time.Parse(time.RFC3339Nano, text)
		if err != nil {
			return query, fault.Usage(fmt.Errorf("%q is not a time", text), "as in 2026-01-31T14:05:00Z")
		}
		*bound.to = at
	}
	if query.from.IsZero() && q.Get("to") != "" {
		return query, fault.Usage(errors.New("to goes with from"), "give a from that is before to")
	}
	if !query.from.IsZero() && !query.from.Before(query.to) {
		return query, fault.Usage(errors.New("the time ends before it begins"), "give a from that is before to")
	}
	return query, nil
}

func (t *tracer) inForce() []config.TraceRule {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.rules
}

func ofSelector(err error) error {
	var selector *measure.SelectorError
	if errors.As(err, &selector) {
		return fault.Usage(err, selector.Hint)
	}
	return err
}

func (t *tracer) slowest() ([]measure.Sample, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.trace == nil {
		return nil, nil
	}
	samples, err := t.names().Slowest(t.trace, t.compiled.Rules)
	if err != nil {
		return nil, ofTraced(t.name, err)
	}
	return samples, nil
}

// names returns the names for the numbers of the tracer's programs.
func (t *tracer) names() measure.Names {
	tuned := make(map[uint32]string)
	if t.tuningDir != "" {
		tuned = t.tuning.RuleNames(t.name)
	}
	cgroups := sync.OnceValue(func() map[uint64]string { return t.host.Cgroups.Names(t.scope.Path) })
	return measure.Names{
		Rules: t.rules, Services: t.services,
		TuneRule: func(id uint32) string { return tuned[id] },
		Cgroup:   func(id uint64) string { return cgroups()[id] },
	}
}

// Status adds the traced cgroups to status.
func (d *Domain) Status(status *api.Status) error {
	tracers, err := d.tracersOf("")
	if err != nil {
		return err
	}
	status.Trace = []api.TracedCgroup{}
	for _, t := range tracers {
		traced, err := t.status()
		if err != nil {
			return ofTraced(t.name, err)
		}
		status.Trace = append(status.Trace, traced)
	}
	return nil
}

// tracersOf returns the tracer of the named cgroup, or all tracers sorted by name for "".
func (d *Domain) tracersOf(cgroup string) ([]*tracer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []*tracer
	for _, name := range slices.Sorted(maps.Keys(d.tracers)) {
		if cgroup == "" || cgroup == name || "/"+cgroup == name {
			all = append(all, d.tracers[name])
		}
	}
	if cgroup != "" && len(all) == 0 {
		hint := "it has no trace rules"
		if len(d.tracers) > 0 {
			hint = "it traces " + strings.Join(slices.Sorted(maps.Keys(d.tracers)), ", ")
		}
		return nil, fault.Usage(fmt.Errorf("the policy traces no cgroup %q", cgroup), hint)
	}
	return all, nil
}

func (t *tracer) status() (api.TracedCgroup, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := api.TracedCgroup{Cgroup: t.name, Attached: t.problem == nil && t.trace != nil && t.trace.Attached(), Created: len(t.scope.Created) > 0,
		Programs: []string{}, Rules: []api.TraceRuleStatus{}}
	if t.problem != nil {
		s.Problem, s.Hint = fault.Message(t.problem), fault.Hint(t.problem)
	}
	groups := make(map[uint32]int)
	if t.trace != nil {
		s.Path, s.Since = t.scope.Below(t.host.Cgroups), t.scope.Since
		s.Programs, s.Memory = t.trace.Programs(), t.trace.Memory()
		keys, err := t.trace.Groups()
		if err != nil {
			return s, err
		}
		for _, key := range keys {
			groups[key.Rule]++
		}
	}
	for i, rule := range t.rules {
		r := api.TraceRuleStatus{
			Name: rule.Name, Match: rule.Match.String(), Connections: oneIn(rule.Connections), Messages: rule.Messages.String(),
			GroupBy: []string{}, Groups: groups[uint32(i+1)], Limit: rule.Groups, Stages: []string{}, Protocols: []string{},
			Skipped: append([]api.TraceSkipped{}, t.skipped[rule.Name]...),
		}
		for _, by := range rule.GroupBy {
			r.GroupBy = append(r.GroupBy, by.String())
		}
		for _, stage := range measurable(rule, t.skipped[rule.Name]) {
			r.Stages = append(r.Stages, string(stage))
		}
		for _, p := range rule.Protocols {
			r.Protocols = append(r.Protocols, string(p))
		}
		s.Rules = append(s.Rules, r)
	}
	return s, nil
}
