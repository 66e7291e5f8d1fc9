// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/trace/measure"
)

// tracersOf returns the tracing of the named cgroup, or all by name.
func (a *Agent) tracersOf(cgroup string) ([]*tracer, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var all []*tracer
	for _, name := range slices.Sorted(maps.Keys(a.tracers)) {
		if cgroup == "" || cgroup == name || "/"+cgroup == name {
			all = append(all, a.tracers[name])
		}
	}
	if cgroup != "" && len(all) == 0 {
		hint := "it has no trace rules"
		if len(a.tracers) > 0 {
			hint = "it traces " + strings.Join(slices.Sorted(maps.Keys(a.tracers)), ", ")
		}
		return nil, fault.Usage(fmt.Errorf("the policy traces no cgroup %q", cgroup), hint)
	}
	return all, nil
}

// names tell what the numbers of the tracer's programs stand for.
func (t *tracer) names() measure.Names {
	tuned := make(map[uint32]string)
	if t.tuner != nil {
		tuned = t.tuner.ruleNames()
	}
	cgroups := sync.OnceValue(func() map[uint64]string { return t.host.cgroupNames(t.scope.Path) })
	return measure.Names{
		Rules: t.rules, Services: t.services,
		TuneRule: func(id uint32) string { return tuned[id] },
		Cgroup:   func(id uint64) string { return cgroups()[id] },
	}
}

// ruleNames are the names of all rules that connections may have, by number.
func (t *tuner) ruleNames() map[uint32]string {
	t.mu.Lock()
	defer t.mu.Unlock()
	names := make(map[uint32]string)
	_, _, all, err := t.numbers()
	if err != nil {
		// They are shown by number then.
		return names
	}
	for id, rule := range all {
		names[id] = bpf.Text(rule.Name[:])
	}
	return names
}

// cgroupNames are the cgroups at or below a folder, by their id, which is the
// inode of their folder (cgroup_id in include/linux/cgroup.h, Linux 6.18).
func (h *host) cgroupNames(dir string) map[uint64]string {
	names := make(map[uint64]string)
	_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return nil // gone meanwhile
		}
		if len(names) == maxBelow {
			return filepath.SkipAll
		}
		var stat unix.Stat_t
		if unix.Stat(path, &stat) == nil {
			names[stat.Ino] = "/" + strings.TrimPrefix(strings.TrimPrefix(path, h.cgroups), "/")
		}
		return nil
	})
	return names
}

// TraceStatus is what is traced, and whether the kernel can.
func (a *Agent) TraceStatus(cgroup string) (*api.TraceStatus, error) {
	tracers, err := a.tracersOf(cgroup)
	if err != nil {
		return nil, err
	}
	s := &api.TraceStatus{Cgroups: []api.TracedCgroup{}}
	switch err := bpf.HaveTimestamps(); {
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
		s.Path, s.Since = t.scope.below(t.host), t.scope.Since
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
		for _, stage := range measured(rule, t.skipped[rule.Name]) {
			r.Stages = append(r.Stages, string(stage))
		}
		for _, p := range rule.Protocols {
			r.Protocols = append(r.Protocols, string(p))
		}
		s.Rules = append(s.Rules, r)
	}
	return s, nil
}

// traceQuery is what a request asks for.
type traceQuery struct {
	from, to time.Time // zero from: since the counts began
	selected func(measure.Group) bool
}

func parseTraceQuery(q url.Values) (traceQuery, error) {
	query := traceQuery{to: time.Now()}
	selector := q.Get("select")
	if _, err := measure.MatchGroup(selector, measure.Group{}); err != nil {
		return query, ofSelector(err)
	}
	query.selected = func(g measure.Group) bool {
		ok, _ := measure.MatchGroup(selector, g) // parsed above
		return ok
	}
	if text := q.Get("since"); text != "" {
		if q.Get("from")+q.Get("to") != "" {
			return query, fault.Usage(errors.New("since goes with neither from nor to"), "a time that has ended has a from and a to")
		}
		since, err := time.ParseDuration(text)
		if err != nil || since <= 0 {
			return query, fault.Usage(fmt.Errorf("%q is no time span", text), "as in 5m or 90s")
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
			return query, fault.Usage(fmt.Errorf("%q is no time", text), "as in 2026-01-31T14:05:00Z")
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

// traceQuery reads a query, and finds the tracers that it is about: that of a
// cgroup, or all.
func (a *Agent) traceQuery(q url.Values) (traceQuery, []*tracer, error) {
	query, err := parseTraceQuery(q)
	if err != nil {
		return query, nil, err
	}
	tracers, err := a.tracersOf(q.Get("cgroup"))
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

// pick keeps the groups that a query selects.
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

// TraceResults is what was measured in a time, or since the counts began.
func (a *Agent) TraceResults(q url.Values) (*api.TraceResults, error) {
	query, tracers, err := a.traceQuery(q)
	if err != nil {
		return nil, err
	}
	if !query.from.IsZero() {
		periods, partial, err := a.window(query.from, query.to)
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

// TraceHistory is what was measured in a time, in slices.
func (a *Agent) TraceHistory(q url.Values) (*api.TraceHistory, error) {
	query, _, err := a.traceQuery(q)
	if err != nil {
		return nil, err
	}
	periods, partial, err := a.window(query.from, query.to)
	if err != nil {
		return nil, err
	}
	h := &api.TraceHistory{Slices: []measure.Period{}, Partial: partial && !query.from.IsZero()}
	for _, p := range periods {
		h.Slices = append(h.Slices, query.pick(p))
	}
	return h, nil
}

// maxSlow bounds the messages of an answer.
const maxSlow = 1000

// TraceSlow are the slowest messages of the last minutes, the slowest first.
func (a *Agent) TraceSlow(q url.Values) ([]api.TraceSlow, error) {
	query, tracers, err := a.traceQuery(q)
	if err != nil {
		return nil, err
	}
	n := 10
	if text := q.Get("n"); text != "" {
		if n, err = strconv.Atoi(text); err != nil || n < 1 || n > maxSlow {
			return nil, fault.Usage(fmt.Errorf("%q is no number of messages", text), fmt.Sprintf("1 to %d", maxSlow))
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

func (a *Agent) traceRoutes(show func(string, func(*http.Request) (any, error))) {
	show("/v1/trace", func(r *http.Request) (any, error) { return a.TraceStatus(r.URL.Query().Get("cgroup")) })
	show("/v1/trace/results", func(r *http.Request) (any, error) { return a.TraceResults(r.URL.Query()) })
	show("/v1/trace/history", func(r *http.Request) (any, error) { return a.TraceHistory(r.URL.Query()) })
	show("/v1/trace/slow", func(r *http.Request) (any, error) {
		// Addresses of connections are nobody's business but root's.
		if err := mustBeRoot(r); err != nil {
			return nil, err
		}
		return a.TraceSlow(r.URL.Query())
	})
}
