// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"cmp"
	"encoding/json"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/rights"
	"sockeye/internal/scope"
)

// Domain implements [domain.Domain] for the tune rules of the policy.
type Domain struct {
	host   *domain.Host
	log    *slog.Logger
	kernel *optionProbe

	mu     sync.Mutex
	tuners map[string]*tuner // by cgroup

	frameBefore map[[2]string]frameCounts // by cgroup and rule, of the last frame; used by Frame only
}

var _ domain.Scoped = (*Domain)(nil)

// New returns the domain without any rules.
func New(h *domain.Host) *Domain {
	d := &Domain{host: h, log: h.Log, kernel: &optionProbe{host: h}, tuners: make(map[string]*tuner)}
	h.AddPrograms(d.programs)
	h.Watch.Subscribe(d.cgroups, d.renew)
	return d
}

// Check returns nil: Plan checks the rules, and the domain waits for missing cgroups.
func (d *Domain) Check(*config.Policy) error { return nil }

// Start removes the tuning of cgroups that are no longer in the policy, and tunes the cgroups of the policy. A rule
// that this host cannot apply is logged and does not stop the others.
func (d *Domain) Start(policy *config.Policy) error {
	defer d.host.Watch.Look()
	d.mu.Lock()
	defer d.mu.Unlock()
	wanted := byCgroup(policy)
	if err := d.removeOthers(wanted); err != nil {
		return err
	}
	outerFirst(d.host.Cgroups, wanted)
	for _, c := range wanted {
		if err := d.startTuner(c); err != nil {
			// A policy that was valid can fail after a reboot with another kernel. The other cgroups are tuned
			// nevertheless.
			d.log.Warn("cgroup not tuned", events.CgroupNotTuned, "cgroup", c.Cgroup, "error", err)
			d.register(c, err)
		}
	}
	return nil
}

func (d *Domain) removeOthers(wanted []cgroupRules) error {
	pinned, err := d.host.Root.Tunings()
	if err != nil {
		return err
	}
	for _, name := range scope.Leftovers(pinned, wanted) {
		dir := d.host.Root.Tuning(name)
		var left scope.Scope
		if data, err := pin.ReadScope(dir); err == nil {
			// Without the record, only the pins are removed.
			_ = json.Unmarshal(data, &left)
		}
		if err := fault.Join(bpf.RemoveTune(dir), scope.RemoveCreated([]scope.Scope{left})); err != nil {
			return err
		}
		d.log.Info("tuning removed: not in the policy", events.TuningRemoved, "cgroup", cmp.Or(left.Cgroup, name))
	}
	return nil
}

// Close closes the descriptors of this process. The programs stay attached.
func (d *Domain) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range d.tuners {
		t.close()
	}
}

// Needs lists the capabilities that the tune rules of a policy need beyond those of the unit.
func (d *Domain) Needs(policy *config.Policy) []rights.Need { return Needs(policy) }

// Needs lists the capabilities that the tune rules of a policy need beyond those of the unit.
func Needs(policy *config.Policy) []rights.Need {
	var needs []rights.Need
	for _, r := range policy.Tune {
		needs = append(needs, scope.Needs(r.Cgroup, "tune rule "+r.Name)...)
	}
	return needs
}

// Paths maps the directories of the tuned cgroups to the names of these cgroups in the policy.
func (d *Domain) Paths() map[string]string {
	tuners, _ := d.tunersOf("") // cannot fail for ""
	paths := make(map[string]string)
	for _, t := range tuners {
		if path := t.path(); path != "" {
			paths[path] = t.name
		}
	}
	return paths
}

// Pins returns the pin directory of a tuned cgroup, or "" if the cgroup is not tuned at present.
func (d *Domain) Pins(cgroup string) string {
	d.mu.Lock()
	t := d.tuners[cgroup]
	d.mu.Unlock()
	if t == nil || t.path() == "" {
		return ""
	}
	return d.host.Root.Tuning(scope.PinName(cgroup))
}

// RuleNames returns the names of all rules that connections of a cgroup may have, by rule number.
func (d *Domain) RuleNames(cgroup string) map[uint32]string {
	d.mu.Lock()
	t := d.tuners[cgroup]
	d.mu.Unlock()
	if t == nil {
		return map[uint32]string{}
	}
	return t.ruleNames()
}

// apply applies a change and returns the function that rolls it back.
func (d *Domain) apply(c cgroupRules) (rollback func() error, err error) {
	defer d.host.Watch.Look()
	d.mu.Lock()
	defer d.mu.Unlock()
	before := cgroupRules{Cgroup: c.Cgroup}
	if t := d.tuners[c.Cgroup]; t != nil {
		before.Rules, before.Services = t.rules, t.services
	}
	rollback = func() error {
		defer d.host.Watch.Look()
		d.mu.Lock()
		defer d.mu.Unlock()
		err := d.setRules(before)
		if err != nil && before.Rules != nil && d.tuners[c.Cgroup] == nil {
			d.register(before, err)
		}
		return err
	}
	return rollback, d.setRules(c)
}

// setRules replaces the rules of a cgroup. If setRules fails, the previous rules stay in force.
func (d *Domain) setRules(c cgroupRules) error {
	switch t := d.tuners[c.Cgroup]; {
	case c.Rules == nil:
		delete(d.tuners, c.Cgroup)
		if err := t.retire(); err != nil {
			return tuneError(c.Cgroup, fault.Join(err, d.startTuner(cgroupRules{Cgroup: c.Cgroup, Rules: t.rules, Services: t.services})))
		}
	case t == nil:
		return d.startTuner(c)
	default:
		t.mu.Lock()
		defer t.mu.Unlock()
		if err := t.install(c.Rules, c.Services); err != nil {
			return tuneError(c.Cgroup, err)
		}
	}
	return nil
}

func (d *Domain) startTuner(c cgroupRules) error {
	t, err := d.openTuner(c)
	if err != nil {
		return tuneError(c.Cgroup, err)
	}
	d.tuners[c.Cgroup] = t
	return nil
}

// cgroups returns the names of the tuned cgroups.
func (d *Domain) cgroups() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Keys(d.tuners))
}

// renew attaches the programs to cgroups that were created again.
func (d *Domain) renew() {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []cgroupRules
	for name := range d.tuners {
		all = append(all, cgroupRules{Cgroup: name})
	}
	outerFirst(d.host.Cgroups, all)
	for _, c := range all {
		d.tuners[c.Cgroup].renew(d.pathsBut(c.Cgroup))
	}
}

// outerFirst sorts cgroups so that each comes before those inside it: only the inner ones are refused then.
func outerFirst(tree scope.Tree, all []cgroupRules) {
	slices.SortStableFunc(all, func(a, b cgroupRules) int {
		return cmp.Or(cmp.Compare(len(tree.Directory(a.Cgroup)), len(tree.Directory(b.Cgroup))), cmp.Compare(a.Cgroup, b.Cgroup))
	})
}

// pathsBut returns the absolute paths of the tuned cgroups by name, without one.
func (d *Domain) pathsBut(name string) map[string]string {
	paths := make(map[string]string)
	for _, t := range d.tuners {
		if t.name == name {
			continue
		}
		if path := t.path(); path != "" {
			paths[t.name] = path
		}
	}
	return paths
}

// programs returns the ids of the attached programs.
func (d *Domain) programs() ([]uint32, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var ids []uint32
	for _, t := range d.tuners {
		t.mu.Lock()
		if t.tune != nil && t.tune.Attached() {
			if id, err := t.tune.ProgramID(); err == nil {
				ids = append(ids, id)
			}
		}
		t.mu.Unlock()
	}
	return ids, nil
}

// nestedError adds the domain to the error about nested cgroups.
func nestedError(err error) error {
	if err == nil {
		return nil
	}
	return fault.In("tune", err)
}

func tuneError(name string, err error) error {
	return fault.In("tune "+name, err)
}

// Applied applies the rules to open connections if the candidate requests it.
func (d *Domain) Applied(_ *config.Policy, c api.Candidate, plan *api.Plan) error {
	if !c.Live {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	all := newTuneLive()
	for _, t := range d.tuners {
		if err := t.applyLive(all); err != nil {
			return tuneError(t.name, err)
		}
	}
	plan.Live = all
	return nil
}
