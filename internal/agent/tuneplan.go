// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/tune"
)

// tunings splits the rules of a policy by cgroup.
func tunings(policy *config.Policy) []tuneChange {
	var all []tuneChange
	for _, rule := range policy.Tune {
		i := slices.IndexFunc(all, func(c tuneChange) bool { return c.name == rule.Cgroup })
		if i < 0 {
			i = len(all)
			all = append(all, tuneChange{name: rule.Cgroup, services: policy.Services})
		}
		all[i].rules = append(all[i].rules, rule)
	}
	return all
}

// prepareTune says what a policy changes in the tuning of cgroups, and checks
// that it can be done.
func (a *Agent) prepareTune(policy *config.Policy) ([]tuneChange, []api.Change, error) {
	var (
		steps   []tuneChange
		changes []api.Change
	)
	wanted := tunings(policy)
	if err := a.host.checkNested(wanted); err != nil {
		return nil, nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(a.tuners)) {
		if !slices.ContainsFunc(wanted, func(c tuneChange) bool { return c.name == name }) {
			steps = append(steps, tuneChange{name: name})
			for _, rule := range a.tuners[name].rules {
				changes = append(changes, removedRule(name, rule))
			}
		}
	}
	for _, c := range wanted {
		t := a.tuners[c.name]
		if t == nil {
			if err := a.host.mayCreate(c.name); err != nil {
				return nil, nil, ofCgroup(c.name, err)
			}
		}
		skipped, err := a.host.lacking(c.rules)
		if err != nil {
			return nil, nil, ofCgroup(c.name, err)
		}
		if _, err := compileTune(c.rules, c.services, skipped); err != nil {
			return nil, nil, ofCgroup(c.name, err)
		}
		if t == nil {
			steps = append(steps, c)
			changes = append(changes, a.host.newCgroup(c.name, "tuned")...)
			for _, rule := range c.rules {
				changes = append(changes, addedRule(c.name, rule))
			}
			continue
		}
		diff := changedRules(c.name, t.rules, c.rules)
		if len(diff) > 0 || servicesMatter(c.rules) && !reflect.DeepEqual(listenersOf(t.services), listenersOf(c.services)) {
			steps = append(steps, c)
			changes = append(changes, diff...)
		}
	}
	return steps, changes, nil
}

func listenersOf(services []config.Service) map[string][]config.Listener {
	listeners := make(map[string][]config.Listener)
	for _, s := range services {
		listeners[s.Name] = s.Listeners
	}
	return listeners
}

func servicesMatter(rules []config.TuneRule) bool {
	return slices.ContainsFunc(rules, func(r config.TuneRule) bool { return r.Match.Service != "" })
}

// newCgroup says what beginning with a cgroup does to it. Done is what it will
// be.
func (h *host) newCgroup(name, done string) []api.Change {
	_, err := h.findCgroup(name)
	switch {
	case !errors.Is(err, fs.ErrNotExist):
		return nil
	case isUnit(name):
		return []api.Change{{Cgroup: name, Action: "add", What: "unit", Effect: "there is none now: it is " + done + " from the moment it starts"}}
	}
	return []api.Change{{Cgroup: name, Action: "add", What: "cgroup", Effect: "it is created, and removed when the policy names it no more"}}
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

// describeSet says what a rule does.
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

// changedRules compares lists of rules, by name.
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
				parts = append(parts, fmt.Sprintf("%s: %s -> %s", part.what, orNone(part.from), orNone(part.to)))
			}
		}
		if len(parts) == 0 && !reflect.DeepEqual(old, rule) {
			parts = append(parts, "match: other prefixes or ports") // which the text shortens
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

// changedSettings compares what two versions of a rule set, option by option.
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
		changed = append(changed, fmt.Sprintf("tag: %s -> %s", orNone(a), orNone(b)))
	}
	return changed
}

func textOf[T any](v *T) string {
	if v == nil {
		return ""
	}
	return fmt.Sprint(any(v))
}

// lacking tells which options of rules the kernel cannot set. It fails for a
// rule that does not say optional.
func (h *host) lacking(rules []config.TuneRule) (map[string][]api.TuneSkipped, error) {
	skipped := make(map[string][]api.TuneSkipped)
	for _, rule := range rules {
		settings := rule.Set
		if rule.React != nil {
			settings = slices.Concat(settings, rule.React.Set)
		}
		for _, s := range settings {
			needs, err := h.lacks(s)
			if err != nil {
				return nil, err
			}
			if needs == "" {
				continue
			}
			if !rule.Optional {
				return nil, &fault.Error{Err: fmt.Errorf("rule %s: this kernel cannot set %s: it needs %s", rule.Name, s.Option, needs),
					Hint: "leave it out, or give the rule optional: true to have it skipped", Code: fault.CodeUnsupported}
			}
			skipped[rule.Name] = append(skipped[rule.Name], api.TuneSkipped{Option: s.Option, Needs: needs})
		}
	}
	return skipped, nil
}

// lacks says what the kernel would need for a setting, "" if nothing.
func (h *host) lacks(s config.Setting) (string, error) {
	supported, err := h.probeTune()
	if err != nil {
		return "", err
	}
	o, _ := tune.FindOption(s.Option)
	if err := supported[s.Option]; errors.Is(err, ebpf.ErrNotSupported) {
		return "Linux " + o.Since + " or later", nil
	} else if err != nil {
		return "", fmt.Errorf("probe %s: %w", s.Option, err)
	}
	if s.Option == "congestion" {
		available, err := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control")
		if err != nil {
			return "", fmt.Errorf("read congestion controls: %w", err)
		}
		if !slices.Contains(strings.Fields(string(available)), s.Text) {
			return fmt.Sprintf("the module tcp_%s, loaded", s.Text), nil
		}
	}
	return "", nil
}

// probeTune tries, once, what the kernel can set.
func (h *host) probeTune() (map[string]error, error) {
	h.probing.Lock()
	defer h.probing.Unlock()
	if h.probed == nil {
		probed, err := h.probeOptions()
		if err != nil {
			return nil, fmt.Errorf("probe options: %w", err)
		}
		h.probed = probed
	}
	return h.probed, nil
}

// probeOptions probes in the agent's own cgroup, which it needs no right to
// write to.
func (h *host) probeOptions() (map[string]error, error) {
	own, err := cgroupOf(os.Getpid())
	if err != nil {
		return nil, err
	}
	return tune.Probe(filepath.Join(h.cgroups, own), h.root.Dir)
}
