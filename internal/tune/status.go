// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/histogram"
	"sockeye/internal/match"
	"sockeye/internal/scope"
	"sockeye/internal/tune/trial"
)

// Status adds the tuned cgroups to status.
func (d *Domain) Status(status *api.Status) error {
	tuners, err := d.tunersOf("")
	if err != nil {
		return err
	}
	status.Tune = []api.TunedCgroup{}
	for _, t := range tuners {
		status.Tune = append(status.Tune, t.summary())
	}
	return nil
}

// Cgroups returns the state of the named cgroup, or of all tuned cgroups for "".
func (d *Domain) Cgroups(cgroup string) ([]api.TuneStatus, error) {
	tuners, err := d.tunersOf(cgroup)
	if err != nil {
		return nil, err
	}
	ownPrograms, err := d.host.OwnPrograms()
	if err != nil {
		return nil, err
	}
	list := []api.TuneStatus{}
	for _, t := range tuners {
		status, err := t.status(ownPrograms)
		if err != nil {
			return nil, tuneError(t.name, err)
		}
		list = append(list, status)
	}
	return list, nil
}

func (t *tuner) status(ownPrograms []uint32) (api.TuneStatus, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := api.TuneStatus{Cgroup: t.name, Attached: t.inForce(), Created: len(t.scope.Created) > 0,
		Foreign: []api.TuneForeign{}, Rules: []api.TuneRuleStatus{}}
	if t.problem != nil {
		s.Problem, s.Hint = fault.Message(t.problem), fault.Hint(t.problem)
	}
	if t.tune != nil {
		s.Path = t.scope.Below(t.host.Cgroups)
		var err error
		if s.Foreign, err = t.foreign(ownPrograms); err != nil {
			return s, err
		}
	}
	ids, older, _, err := t.ruleIDs()
	if err != nil {
		return s, err
	}
	failures := map[bpf.TuneFailure]uint64{}
	if t.tune != nil {
		if failures, err = t.tune.Failures(); err != nil {
			return s, err
		}
	}
	for _, rule := range t.rules {
		r, err := t.ruleStatus(rule, ids[rule.Name], failures)
		if err != nil {
			return s, err
		}
		r.Older = older[rule.Name]
		s.Rules = append(s.Rules, r)
	}
	return s, nil
}

// summary returns the state for sockeye status.
func (t *tuner) summary() api.TunedCgroup {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := api.TunedCgroup{Cgroup: t.name, Attached: t.inForce(), Rules: len(t.rules)}
	if t.problem != nil {
		s.Problem, s.Hint = fault.Message(t.problem), fault.Hint(t.problem)
	}
	return s
}

func (t *tuner) ruleStatus(rule config.TuneRule, id uint32, failures map[bpf.TuneFailure]uint64) (api.TuneRuleStatus, error) {
	r := api.TuneRuleStatus{
		Name: rule.Name, Match: rule.Match.String(), Set: ruleTexts(rule), Observe: string(rule.Observe),
		React: textOf(rule.React), Trial: textOf(rule.Trial),
		Skipped: slices.Concat([]api.TuneSkipped{}, t.skipped[rule.Name]), Failures: failuresOf(id, failures),
	}
	if id == 0 {
		return r, nil
	}
	for arm := range bpf.TuneArms {
		s, err := t.tune.Stats(id, arm)
		if err != nil {
			return r, err
		}
		r.Connections += s.Connections
		r.TunedLive += s.Adopted
		r.Established += s.Established
		r.Closed += s.Closed
		r.OptionsSet += s.Options
		r.Bytes += s.Bytes
		r.Segments += s.Segments
		r.Retransmits += s.Retransmits
		r.RTOs += s.Rtos
		r.Reactions += s.Reactions
		r.Tags += s.Tags
		if arm == bpf.TuneArmControl {
			r.Control = s.Connections
			continue
		}
		r.RTT, r.Connect = spreadOf(s.Rtt), spreadOf(s.Connect)
	}
	return r, nil
}

func spreadOf(counts histogram.Quarters) *api.TuneSpread {
	h := histogram.Of[float64](counts)
	if h.Count == 0 {
		return nil
	}
	return &api.TuneSpread{P50: h.Quantile(0.5), P90: h.Quantile(0.9), P99: h.Quantile(0.99)}
}

func failuresOf(id uint32, all map[bpf.TuneFailure]uint64) []api.TuneFailure {
	list := []api.TuneFailure{}
	options := AllOptions()
	for f, count := range all {
		if f.Rule == id && int(f.Option) < len(options) {
			list = append(list, api.TuneFailure{Option: options[f.Option].Name, Error: cmp.Or(unix.ErrnoName(unix.Errno(f.Error)), strconv.Itoa(int(f.Error))), Count: count})
		}
	}
	slices.SortFunc(list, func(a, b api.TuneFailure) int {
		return cmp.Or(strings.Compare(a.Option, b.Option), strings.Compare(a.Error, b.Error))
	})
	return list
}

// foreign lists programs of other owners that run for the same connections. The kernel runs the programs of the
// socket's cgroup first, then those of its ancestors, and those of one cgroup in the order of attachment
// (compute_effective_progs, Linux 6.18). The last program decides.
func (t *tuner) foreign(ownPrograms []uint32) ([]api.TuneForeign, error) {
	list := []api.TuneForeign{}
	program, err := t.tune.ProgramID()
	if err != nil {
		return list, nil // the cgroup was removed
	}
	add := func(dir, order string, ids []uint32) {
		for _, id := range ids {
			if slices.Contains(ownPrograms, id) {
				continue
			}
			effect := "a rule overrides what it sets"
			if order == "after" {
				effect = "may override " + strings.Join(t.optionsSet(), ", ")
			}
			name := t.host.Cgroups.Below(dir)
			list = append(list, api.TuneForeign{ID: id, Cgroup: name, Order: order, Effect: effect})
		}
	}
	for dir := t.scope.Path; ; dir = filepath.Dir(dir) {
		ids, err := bpf.SockOps(dir)
		if errors.Is(err, fs.ErrNotExist) {
			return []api.TuneForeign{}, nil // removed; its programs are freed later
		}
		if err != nil {
			return nil, err
		}
		if at := slices.Index(ids, program); dir == t.scope.Path && at >= 0 {
			add(dir, "before", ids[:at])
			ids = ids[at+1:]
		}
		add(dir, "after", ids)
		if dir == t.host.Cgroups.Mount || len(dir) <= len(t.host.Cgroups.Mount) {
			break
		}
	}
	seen := 0
	err = filepath.WalkDir(t.scope.Path, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENAMETOOLONG) || err == nil && (!d.IsDir() || path == t.scope.Path) {
			return nil
		}
		if err != nil {
			return err
		}
		if seen++; seen > scope.MaxBelow {
			return filepath.SkipAll
		}
		ids, err := bpf.SockOps(path)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENAMETOOLONG) {
			return nil
		}
		add(path, "before", ids)
		return err
	})
	return list, err
}

// optionsSet lists the options that the rules set, without duplicates.
func (t *tuner) optionsSet() []string {
	var names []string
	for _, o := range config.TuneOptions {
		if slices.ContainsFunc(t.rules, func(r config.TuneRule) bool {
			return slices.ContainsFunc(r.Set, func(s config.Setting) bool { return s.Option == o.Name })
		}) {
			names = append(names, o.Name)
		}
	}
	return names
}

// Explain returns the rule that a connection would get in each cgroup, and why.
func (d *Domain) Explain(cgroup string, questions []match.Question) ([]api.TuneExplanation, error) {
	tuners, err := d.tunersOf(cgroup)
	if err != nil {
		return nil, err
	}
	if len(tuners) == 0 {
		return nil, fault.Usage(errors.New("nothing is tuned"), "the policy has no tune rules")
	}
	list := []api.TuneExplanation{}
	for _, t := range tuners {
		t.mu.Lock()
		for _, q := range questions {
			e := api.TuneExplanation{Cgroup: t.name, Role: string(q.Role), Set: []string{}, Steps: Explain(t.rules, t.services, q)}
			if rule := matched(e.Steps, t.rules); rule != nil {
				e.Rule, e.Set = rule.Name, ruleTexts(*rule)
			}
			list = append(list, e)
		}
		t.mu.Unlock()
	}
	return list, nil
}

// ruleTexts lists the settings of a rule.
func ruleTexts(rule config.TuneRule) []string {
	texts := make([]string, 0, len(rule.Set)+1)
	for _, s := range rule.Set {
		texts = append(texts, s.String())
	}
	if rule.Tag != nil {
		texts = append(texts, "tag "+config.FormatTag(rule.Tag))
	}
	return texts
}

func matched(steps []match.Step, rules []config.TuneRule) *config.TuneRule {
	for _, step := range steps {
		if step.Matches {
			i := slices.IndexFunc(rules, func(r config.TuneRule) bool { return r.Name == step.Rule })
			return &rules[i]
		}
	}
	return nil
}

// Trial compares the arms of a rule's trial.
func (d *Domain) Trial(name string) (*api.TuneTrial, error) {
	t, rule, err := d.findRule(name)
	if err != nil {
		return nil, err
	}
	if rule.Trial == nil {
		return nil, fault.Usage(fmt.Errorf("rule %s has no trial", name), "add trial: {control: 10%}")
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	ids, _, _, err := t.ruleIDs()
	if err != nil {
		return nil, err
	}
	var arms [bpf.TuneArms]trial.Sample
	if id := ids[name]; id != 0 {
		for arm := range arms {
			s, err := t.tune.Stats(id, arm)
			if err != nil {
				return nil, err
			}
			arms[arm] = sampleOf(s)
		}
	}
	c := trial.Compare(arms[bpf.TuneArmTreated], arms[bpf.TuneArmControl], trial.Options{})
	return &api.TuneTrial{Cgroup: t.name, Rule: name, Share: rule.Trial.Control, Comparison: c, Summary: c.Summary()}, nil
}

func sampleOf(s *bpf.TuneStats) trial.Sample {
	return trial.Sample{
		Connections: s.Connections, Established: s.Established, Closed: s.Closed,
		Bytes: s.Bytes, Segments: s.Segments, Retransmits: s.Retransmits, RTOs: s.Rtos,
		Segments2: s.Segments2, Retransmits2: s.Retransmits2, SegmentsRetransmits: s.SegmentsRetransmits,
		RTT: histogram.Of[float64](histogram.Quarters(s.Rtt)), Connect: histogram.Of[float64](histogram.Quarters(s.Connect)), Rate: histogram.Of[float64](histogram.Quarters(s.Rate)),
	}
}

// findRule returns the rule with a name. Names of rules are unique in a policy.
func (d *Domain) findRule(name string) (*tuner, config.TuneRule, error) {
	tuners, err := d.tunersOf("")
	if err != nil {
		return nil, config.TuneRule{}, err
	}
	var known []string
	for _, t := range tuners {
		t.mu.Lock()
		rules := t.rules
		t.mu.Unlock()
		for _, rule := range rules {
			if rule.Name == name {
				return t, rule, nil
			}
			known = append(known, rule.Name)
		}
	}
	hint := "the policy has no tune rules"
	if near := config.Nearest(name, known); near != "" {
		hint = "did you mean " + near + "?"
	} else if len(known) > 0 {
		hint = "the policy has " + strings.Join(known, ", ")
	}
	return nil, config.TuneRule{}, fault.Usage(fmt.Errorf("there is no rule %q", name), hint)
}

// tunersOf returns the tuner of the named cgroup, or all tuners sorted by name for "".
func (d *Domain) tunersOf(cgroup string) ([]*tuner, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []*tuner
	for _, name := range slices.Sorted(maps.Keys(d.tuners)) {
		if cgroup == "" || cgroup == name || "/"+cgroup == name {
			all = append(all, d.tuners[name])
		}
	}
	if cgroup != "" && len(all) == 0 {
		return nil, fault.Usage(fmt.Errorf("the policy tunes no cgroup %q", cgroup), d.tunedHint())
	}
	return all, nil
}

func (d *Domain) tunedHint() string {
	if len(d.tuners) == 0 {
		return "it has no tune rules"
	}
	return "it tunes " + strings.Join(slices.Sorted(maps.Keys(d.tuners)), ", ")
}

// ruleIDs returns the numbers of the rules in force by name, the number of their older versions, and all rules by
// number.
func (t *tuner) ruleIDs() (current map[string]uint32, older map[string]int, all map[uint32]*bpf.InstalledRule, err error) {
	current, older = make(map[string]uint32), make(map[string]int)
	if t.tune == nil {
		return current, older, nil, nil
	}
	all, err = t.tune.Rules()
	for id, rule := range all {
		if name := bpf.Text(rule.Name[:]); rule.Retired == 0 {
			current[name] = id
		} else {
			older[name]++
		}
	}
	return current, older, all, err
}
