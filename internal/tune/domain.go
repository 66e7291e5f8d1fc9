// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"cmp"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/rights"
	"sockeye/internal/scope"
)

// Domain carries out the tune rules of the policy.
type Domain struct {
	host   *domain.Host
	log    *slog.Logger
	kernel *optionProbe

	mu     sync.Mutex
	tuners map[string]*tuner // by cgroup
}

// New returns the domain without any rules.
func New(h *domain.Host) *Domain {
	d := &Domain{host: h, log: h.Log, kernel: &optionProbe{host: h}, tuners: make(map[string]*tuner)}
	h.AddPrograms(d.programs)
	h.Watch.Subscribe(d.cgroups, d.renew)
	return d
}

// Check finds nothing: what a rule names is waited for, or refused by Plan.
func (d *Domain) Check(*config.Policy) error { return nil }

// Start removes what an earlier agent left of cgroups that are not in the policy, and tunes those that
// are.
func (d *Domain) Start(policy *config.Policy) error {
	defer d.host.Watch.Look()
	d.mu.Lock()
	defer d.mu.Unlock()
	wanted := tunings(policy)
	if err := d.removeOthers(wanted); err != nil {
		return err
	}
	for _, c := range wanted {
		err := checkNested(d.host.Cgroups, wanted)
		if err == nil {
			err = d.startTuner(c)
		}
		if err == nil {
			continue
		}
		// What a policy that was good cannot do on this host today, such as after a
		// reboot with another kernel, is no reason not to do the rest.
		d.log.Warn("cgroup not tuned", "cgroup", c.name, "error", err)
		t := d.newTuner(c.name)
		t.rules, t.services, t.problem = c.rules, c.services, err
		d.tuners[c.name] = t
	}
	return nil
}

func (d *Domain) removeOthers(wanted []tuneChange) error {
	pinned, err := d.host.Root.Tunings()
	if err != nil {
		return err
	}
	for _, name := range pinned {
		dir := d.host.Root.Tuning(name)
		if slices.ContainsFunc(wanted, func(c tuneChange) bool { return d.host.Root.Tuning(scope.PinName(c.name)) == dir }) {
			continue
		}
		var left scope.Scope
		if data, err := bpf.ReadScope(dir); err == nil {
			// Without its record there is nothing more to remove.
			_ = json.Unmarshal(data, &left)
		}
		if err := fault.Join(bpf.RemoveTune(dir), scope.RemoveCreated([]scope.Scope{left})); err != nil {
			return err
		}
		d.log.Info("tuning removed, it is not in the policy", "cgroup", cmp.Or(left.Cgroup, name))
	}
	return nil
}

// Close ends the tuning in this process. The programs stay attached.
func (d *Domain) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range d.tuners {
		t.close()
	}
}

// Needs lists the capabilities that the tune rules of a policy need beyond those of the unit.
func Needs(policy *config.Policy) []rights.Need {
	var needs []rights.Need
	for _, r := range policy.Tune {
		if scope.Creates(r.Cgroup) {
			needs = append(needs, rights.Need{Right: rights.DACOverride, For: "cgroup " + r.Cgroup + " of tune rule " + r.Name + ", which the agent creates where there is none"})
		}
	}
	return needs
}

// Needs lists the capabilities that the tune rules of a policy need beyond those of the unit.
func (d *Domain) Needs(policy *config.Policy) []rights.Need { return Needs(policy) }

// Paths are the folders of the cgroups that are tuned, with their names in the policy.
func (d *Domain) Paths() map[string]string {
	tuners, _ := d.tunersOf("") // all: no name can be wrong
	paths := make(map[string]string)
	for _, t := range tuners {
		if path := t.path(); path != "" {
			paths[path] = t.name
		}
	}
	return paths
}

// Pins is the folder of the pins of a cgroup's tuning, "" if the cgroup is not tuned now.
func (d *Domain) Pins(cgroup string) string {
	d.mu.Lock()
	t := d.tuners[cgroup]
	d.mu.Unlock()
	if t == nil || t.path() == "" {
		return ""
	}
	return d.host.Root.Tuning(scope.PinName(cgroup))
}

// RuleNames are the names of all rules that connections of a cgroup may have, by number.
func (d *Domain) RuleNames(cgroup string) map[uint32]string {
	d.mu.Lock()
	t := d.tuners[cgroup]
	d.mu.Unlock()
	if t == nil {
		return map[uint32]string{}
	}
	return t.ruleNames()
}

// apply carries a change out, and returns how to roll it back.
func (d *Domain) apply(c tuneChange) (rollback func() error, err error) {
	defer d.host.Watch.Look()
	d.mu.Lock()
	defer d.mu.Unlock()
	before := tuneChange{name: c.name}
	if t := d.tuners[c.name]; t != nil {
		before.rules, before.services = t.rules, t.services
	}
	rollback = func() error {
		defer d.host.Watch.Look()
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.setRules(before)
	}
	return rollback, d.setRules(c)
}

// become gives a cgroup the rules of a change. If that fails, the cgroup has the rules that it had.
func (d *Domain) setRules(c tuneChange) error {
	switch t := d.tuners[c.name]; {
	case c.rules == nil:
		delete(d.tuners, c.name)
		if err := t.retire(); err != nil {
			return tuneError(c.name, fault.Join(err, d.startTuner(tuneChange{c.name, t.rules, t.services})))
		}
	case t == nil:
		return d.startTuner(c)
	default:
		t.mu.Lock()
		defer t.mu.Unlock()
		if err := t.install(c.rules, c.services); err != nil {
			return tuneError(c.name, err)
		}
	}
	return nil
}

func (d *Domain) startTuner(c tuneChange) error {
	t, err := d.openTuner(c)
	if err != nil {
		return tuneError(c.name, err)
	}
	d.tuners[c.name] = t
	return nil
}

// cgroups are the names of the cgroups that are tuned.
func (d *Domain) cgroups() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Keys(d.tuners))
}

// renew attaches to cgroups that were made anew.
func (d *Domain) renew() {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []tuneChange
	for name := range d.tuners {
		all = append(all, tuneChange{name: name})
	}
	for _, t := range d.tuners {
		t.renew(all)
	}
}

// programs are the ids of the programs that are attached.
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

// nestedError adds the domain to the error of cgroups that hold one another.
func nestedError(err error) error {
	if err == nil {
		return nil
	}
	return &fault.Error{Err: fmt.Errorf("tune: %w", err), Hint: fault.Hint(err), Code: fault.Code(err)}
}

func tuneError(name string, err error) error {
	return &fault.Error{Err: fmt.Errorf("tune %s: %w", name, err), Hint: fault.Hint(err), Code: fault.Code(err)}
}
