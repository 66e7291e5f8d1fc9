// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"sockeye/internal/api"
	"sockeye/internal/cgroup"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/format"
	"sockeye/internal/scope"
)

// Plan compares the rules of a policy with those in force, and checks that the kernel supports them.
func (d *Domain) Plan(policy *config.Policy) ([]domain.Step, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var steps []domain.Step
	add := func(c cgroupRules, changes []api.Change) {
		steps = append(steps, domain.Step{Changes: changes, Apply: func() (func() error, error) { return d.apply(c) }})
	}
	wanted := byCgroup(policy)
	if err := checkNested(d.host.Cgroups, wanted); err != nil {
		return nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(d.tuners)) {
		if !slices.ContainsFunc(wanted, func(c cgroupRules) bool { return c.Cgroup == name }) {
			var changes []api.Change
			for _, rule := range d.tuners[name].rules {
				changes = append(changes, removedRule(name, rule))
			}
			add(cgroupRules{Cgroup: name}, changes)
		}
	}
	for _, c := range wanted {
		t := d.tuners[c.Cgroup]
		if t == nil {
			if err := d.host.Cgroups.MayCreate(c.Cgroup); err != nil {
				return nil, tuneError(c.Cgroup, err)
			}
		}
		skipped, err := d.kernel.skippedOptions(c.Rules)
		if err != nil {
			return nil, tuneError(c.Cgroup, err)
		}
		if _, err := compileTune(c.Rules, c.Services, skipped); err != nil {
			return nil, tuneError(c.Cgroup, err)
		}
		if t == nil {
			changes := d.host.Cgroups.Added(c.Cgroup, "tuned")
			for _, rule := range c.Rules {
				changes = append(changes, addedRule(c.Cgroup, rule))
			}
			add(c, changes)
			continue
		}
		diff := append(changedRules(c.Cgroup, t.rules, c.Rules), t.changedSkips(c.Rules, skipped)...)
		if len(diff) > 0 || matchesService(c.Rules) && !reflect.DeepEqual(scope.Listeners(t.services), scope.Listeners(c.Services)) {
			add(c, diff)
			continue
		}
		steps = append(steps, d.host.Retry(c.Cgroup, "tuning", t.failure())...)
	}
	return steps, nil
}

// changedSkips lists the rules whose options the kernel supports now and did not support before, or the other way round. A
// module of the kernel may have been loaded.
func (t *tuner) changedSkips(rules []config.TuneRule, skipped map[string][]api.TuneSkipped) (changes []api.Change) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.inForce() {
		return nil
	}
	for _, rule := range rules {
		if was, is := optionsOf(t.skipped[rule.Name]), optionsOf(skipped[rule.Name]); was != is && hasRule(t.rules, rule.Name) {
			changes = append(changes, api.Change{Cgroup: t.name, Action: "change", Effect: "for new connections",
				What: fmt.Sprintf("rule %s: options that the kernel cannot set: %s -> %s", rule.Name, format.OrNone(was), format.OrNone(is))})
		}
	}
	return changes
}

func hasRule(rules []config.TuneRule, name string) bool {
	return slices.ContainsFunc(rules, func(r config.TuneRule) bool { return r.Name == name })
}

func optionsOf(skipped []api.TuneSkipped) string {
	var names []string
	for _, s := range skipped {
		names = append(names, s.Option)
	}
	return strings.Join(names, ", ")
}

// CheckNested returns an error if the policy tunes a cgroup and a cgroup below it, as far as paths and the units of
// this host show.
func CheckNested(policy *config.Policy) error {
	mount, err := cgroup.Mount()
	if err != nil {
		mount = "/nonexistent" // paths and slices need no host
	}
	return checkNested(scope.Tree{Mount: mount}, byCgroup(policy))
}

// checkNested returns an error if one cgroup is below another.
func checkNested(tree scope.Tree, all []cgroupRules) error {
	names := make([]string, len(all))
	for i, c := range all {
		names[i] = c.Cgroup
	}
	return nestedError(tree.CheckNested(names...))
}

// byCgroup groups the tune rules of a policy by cgroup.
func byCgroup(policy *config.Policy) []cgroupRules {
	return scope.ByCgroup(policy.Tune, func(r config.TuneRule) string { return r.Cgroup }, policy.Services)
}

func matchesService(rules []config.TuneRule) bool {
	return slices.ContainsFunc(rules, func(r config.TuneRule) bool { return r.Match.Service != "" })
}

// changedRules compares two lists of rules by name.
func changedRules(cgroup string, from, to []config.TuneRule) []api.Change {
	var changes []api.Change
	find := func(rules []config.TuneRule, name string) int {
		return slices.IndexFunc(rules, func(r config.TuneRule) bool { return r.Name == name })
	}
	var before, after []string
	for _, rule := range from {
		if find(to, rule.Name) < 0 {
			changes = append(changes, removedRule(cgroup, rule))
		} else {
			before = append(before, rule.Name)
		}
	}
	for _, rule := range to {
		i := find(from, rule.Name)
		if i < 0 {
			changes = append(changes, addedRule(cgroup, rule))
			continue
		}
		after = append(after, rule.Name)
		old := from[i]
		parts := changedSettings(old, rule)
		for _, part := range []struct{ what, from, to string }{
			{"match", old.Match.String(), rule.Match.String()},
			{"react", textOf(old.React), textOf(rule.React)},
			{"trial", textOf(old.Trial), textOf(rule.Trial)},
			{"observe", string(old.Observe), string(rule.Observe)},
			{"optional", fmt.Sprint(old.Optional), fmt.Sprint(rule.Optional)},
		} {
			if part.from != part.to {
				parts = append(parts, fmt.Sprintf("%s: %s -> %s", part.what, format.OrNone(part.from), format.OrNone(part.to)))
			}
		}
		if len(parts) == 0 && !reflect.DeepEqual(old, rule) {
			parts = append(parts, "match: other prefixes or ports") // the text omits some of them
		}
		for _, part := range parts {
			changes = append(changes, api.Change{Cgroup: cgroup, Action: "change", What: "rule " + rule.Name + ": " + part, Effect: "for new connections"})
		}
	}
	if !slices.Equal(before, after) {
		changes = append(changes, api.Change{Cgroup: cgroup, Action: "change", Effect: "the first rule that matches decides",
			What: fmt.Sprintf("order: %s -> %s", strings.Join(before, ", "), strings.Join(after, ", "))})
	}
	return changes
}

// changedSettings compares the settings of two versions of a rule, option by option.
func changedSettings(from, to config.TuneRule) []string {
	value := func(rule config.TuneRule, option string) string {
		for _, s := range rule.Set {
			if s.Option == option {
				return strings.TrimPrefix(s.String(), option+" ")
			}
		}
		return ""
	}
	var changed []string
	for _, o := range config.TuneOptions {
		if a, b := value(from, o.Name), value(to, o.Name); a != b {
			changed = append(changed, fmt.Sprintf("%s: %s -> %s", o.Name, cmp.Or(a, "unset"), cmp.Or(b, "unset")))
		}
	}
	if a, b := config.FormatTag(from.Tag), config.FormatTag(to.Tag); a != b {
		changed = append(changed, fmt.Sprintf("tag: %s -> %s", format.OrNone(a), format.OrNone(b)))
	}
	return changed
}

func addedRule(cgroup string, rule config.TuneRule) api.Change {
	what := "rule " + rule.Name
	if set := describeSet(rule); set != "" {
		what += ": " + set
	}
	return api.Change{Cgroup: cgroup, Action: "add", What: what, Effect: "for new connections: " + rule.Match.String()}
}

func removedRule(cgroup string, rule config.TuneRule) api.Change {
	return api.Change{Cgroup: cgroup, Action: "remove", What: "rule " + rule.Name,
		Effect: "new connections get a later rule or the kernel's defaults, open ones keep what they have"}
}

// describeSet describes the settings of a rule.
func describeSet(rule config.TuneRule) string {
	var parts []string
	for _, s := range rule.Set {
		parts = append(parts, s.String())
	}
	if rule.Tag != nil {
		parts = append(parts, "tag "+config.FormatTag(rule.Tag))
	}
	return strings.Join(parts, ", ")
}

func textOf[T any](v *T) string {
	if v == nil {
		return ""
	}
	return fmt.Sprint(any(v))
}
