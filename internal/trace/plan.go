// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/scope"
)

// cgroupRules are the trace rules of a policy for one cgroup.
type cgroupRules = scope.Rules[config.TraceRule]

// Plan compares the rules of a policy with those in force, and checks that the kernel can measure their stages.
func (d *Domain) Plan(policy *config.Policy) ([]domain.Step, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var steps []domain.Step
	add := func(c cgroupRules, changes []api.Change) {
		steps = append(steps, domain.Step{Changes: changes, Apply: func() (func() error, error) { return d.apply(c) }})
	}
	wanted := byCgroup(policy)
	names := make([]string, len(wanted))
	for i, c := range wanted {
		names[i] = c.Cgroup
	}
	for _, name := range slices.Sorted(maps.Keys(d.tracers)) {
		if !slices.Contains(names, name) {
			var changes []api.Change
			for _, rule := range d.tracers[name].rules {
				changes = append(changes, api.Change{Cgroup: name, Action: "remove", What: "trace " + rule.Name, Effect: "its counts are deleted"})
			}
			add(cgroupRules{Cgroup: name}, changes)
		}
	}
	for _, c := range wanted {
		t := d.tracers[c.Cgroup]
		if _, err := d.host.Cgroups.Find(c.Cgroup); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, ofTraced(c.Cgroup, err)
		}
		if t == nil {
			if err := d.host.Cgroups.MayCreate(c.Cgroup); err != nil {
				return nil, ofTraced(c.Cgroup, err)
			}
		}
		skipped, err := d.kernel.lackingStages(c.Rules)
		if err != nil {
			return nil, ofTraced(c.Cgroup, err)
		}
		if _, err := compileTrace(c.Rules, c.Services, skipped); err != nil {
			return nil, ofTraced(c.Cgroup, err)
		}
		if err := unmeasurable(c.Rules, skipped); err != nil {
			return nil, err
		}
		if t == nil {
			changes := d.host.Cgroups.Added(c.Cgroup, "traced")
			for _, rule := range c.Rules {
				changes = append(changes, addedTrace(c.Cgroup, rule, skipped[rule.Name]))
			}
			add(c, changes)
			continue
		}
		before, err := hashOf(t.rules, t.services)
		if err != nil {
			return nil, err
		}
		after, err := hashOf(c.Rules, c.Services)
		if err != nil {
			return nil, err
		}
		if before != after {
			add(c, changedTrace(c, t.rules, skipped))
			continue
		}
		steps = append(steps, d.host.Retry(c.Cgroup, "tracing", t.failure())...)
	}
	return steps, nil
}

// unmeasurable returns an error for a rule without any stage that the kernel can measure.
func unmeasurable(rules []config.TraceRule, skipped map[string][]api.TraceSkipped) error {
	for _, rule := range rules {
		if len(measurable(rule, skipped[rule.Name])) == 0 {
			return &fault.Error{Err: fmt.Errorf("trace rule %s: this kernel cannot measure any of its stages: %s requires %s", rule.Name,
				skipped[rule.Name][0].Stage, skipped[rule.Name][0].Needs),
				Hint: "stages rx_stack and reader, and sockeye trace packets, do not require this", Code: fault.CodeUnsupported}
		}
	}
	return nil
}

func oneIn(n int) string { return fmt.Sprintf("1/%d", n) }

// changedTrace compares two lists of rules by name. A change of one rule restarts the counts of the cgroup.
func changedTrace(c cgroupRules, before []config.TraceRule, skipped map[string][]api.TraceSkipped) []api.Change {
	var changes []api.Change
	text := func(r config.TraceRule) string {
		encoded, _ := json.Marshal(r) // cannot fail for plain values
		return string(encoded)
	}
	for _, old := range before {
		if !slices.ContainsFunc(c.Rules, func(r config.TraceRule) bool { return r.Name == old.Name }) {
			changes = append(changes, api.Change{Cgroup: c.Cgroup, Action: "remove", What: "trace " + old.Name, Effect: "its counts are deleted"})
		}
	}
	for _, rule := range c.Rules {
		i := slices.IndexFunc(before, func(r config.TraceRule) bool { return r.Name == rule.Name })
		switch {
		case i < 0:
			changes = append(changes, addedTrace(c.Cgroup, rule, skipped[rule.Name]))
		case text(before[i]) != text(rule):
			changes = append(changes, api.Change{Cgroup: c.Cgroup, Action: "change", What: "trace " + rule.Name, Effect: "counts restart at 0"})
		}
	}
	if len(changes) == 0 {
		changes = append(changes, api.Change{Cgroup: c.Cgroup, Action: "change", What: "trace: order, or listeners of services", Effect: "counts restart at 0"})
	}
	return changes
}

func addedTrace(cgroup string, rule config.TraceRule, skipped []api.TraceSkipped) api.Change {
	c := api.Change{Cgroup: cgroup, Action: "add", Effect: "of " + rule.Match.String(),
		What: fmt.Sprintf("trace %s: %s of connections, %s of their messages", rule.Name, oneIn(rule.Connections), rule.Messages)}
	for _, s := range skipped {
		c.Effect += fmt.Sprintf("; without %s, which requires %s", s.Stage, s.Needs)
	}
	return c
}

// byCgroup groups the trace rules of a policy by cgroup.
func byCgroup(policy *config.Policy) []cgroupRules {
	return scope.ByCgroup(policy.Trace, func(r config.TraceRule) string { return r.Cgroup }, policy.Services)
}

// hashOf returns a hash of everything that the programs depend on.
func hashOf(rules []config.TraceRule, services []config.Service) (string, error) {
	text, err := json.Marshal(struct {
		Version   int
		Rules     []config.TraceRule
		Listeners map[string][]config.Listener
	}{1, rules, scope.Listeners(services)})
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:]), nil
}

// apply applies a change and returns the function that rolls it back.
func (d *Domain) apply(c cgroupRules) (rollback func() error, err error) {
	before := cgroupRules{Cgroup: c.Cgroup}
	d.mu.Lock()
	if t := d.tracers[c.Cgroup]; t != nil {
		before.Rules, before.Services = t.rules, t.services
	}
	d.mu.Unlock()
	rollback = func() error {
		err := d.setRules(before)
		d.mu.Lock()
		defer d.mu.Unlock()
		if err != nil && before.Rules != nil && d.tracers[c.Cgroup] == nil {
			d.register(before, err)
		}
		return err
	}
	return rollback, d.setRules(c)
}

// setRules replaces the rules of a cgroup. If setRules fails, the previous rules stay in force.
func (d *Domain) setRules(c cgroupRules) error {
	defer d.host.Watch.Look()
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.tracers[c.Cgroup]
	if t != nil {
		d.sliceNow() // before its counts are removed
	}
	switch {
	case c.Rules == nil:
		delete(d.tracers, c.Cgroup)
		if err := t.retire(); err != nil {
			return ofTraced(c.Cgroup, fault.Join(err, d.openTracer(cgroupRules{Cgroup: c.Cgroup, Rules: t.rules, Services: t.services})))
		}
	case t == nil:
		if err := d.openTracer(c); err != nil {
			return err
		}
	default:
		if err := t.change(c); err != nil {
			return ofTraced(c.Cgroup, err)
		}
	}
	d.startOrStopHistory()
	if t != nil {
		for _, other := range d.tracers {
			if other != t {
				other.retrace(t.scope.Path)
			}
		}
	}
	return nil
}
