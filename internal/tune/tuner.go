// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/scope"
)

// tuner keeps the tuning of one cgroup up to date with the policy and the host.
type tuner struct {
	host   *domain.Host
	log    *slog.Logger
	kernel *optionProbe
	name   string // name of the cgroup in the policy

	mu       sync.Mutex
	rules    []config.TuneRule
	services []config.Service
	skipped  map[string][]api.TuneSkipped // by rule
	scope    scope.Scope
	tune     *bpf.Tune // nil while the cgroup does not exist
	idle     *bpf.Tune // loaded program with the rules in force, of a removed cgroup; or nil
	problem  error
}

// cgroupRules are the tune rules of a policy for one cgroup.
type cgroupRules = scope.Rules[config.TuneRule]

// register registers the tuner of a cgroup that could not be tuned. Later events of the cgroup, and plans, try again.
func (d *Domain) register(c cgroupRules, problem error) {
	t := d.newTuner(c)
	t.problem = problem
	d.tuners[c.Cgroup] = t
}

// failure returns why the cgroup is not tuned, or nil.
func (t *tuner) failure() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.problem
}

func (d *Domain) openTuner(c cgroupRules) (*tuner, error) {
	t := d.newTuner(c)
	t.mu.Lock()
	defer t.mu.Unlock()
	dir := d.host.Root.Tuning(scope.PinName(c.Cgroup))
	pinned, err := pin.Pinned(dir)
	if err != nil {
		return nil, err
	}
	if err := t.open(d.pathsBut(c.Cgroup)); err != nil {
		t.closeLocked()
		if !pinned {
			err = fault.Join(err, bpf.RemoveTune(dir), scope.RemoveCreated([]scope.Scope{t.scope}))
		}
		return nil, err
	}
	if t.tune != nil {
		t.log.Info("cgroup tuned", events.CgroupTuned, "path", t.scope.Path)
	}
	return t, nil
}

// newTuner returns a tuner that is not attached, with the record that is pinned.
func (d *Domain) newTuner(c cgroupRules) *tuner {
	t := &tuner{host: d.host, log: d.log.With("cgroup", c.Cgroup), kernel: d.kernel, name: c.Cgroup, rules: c.Rules, services: c.Services}
	if data, err := pin.ReadScope(d.host.Root.Tuning(scope.PinName(c.Cgroup))); err == nil {
		// A damaged record is replaced.
		_ = json.Unmarshal(data, &t.scope)
	}
	return t
}

// install replaces the rules. If install fails, the previous rules stay in force.
func (t *tuner) install(rules []config.TuneRule, services []config.Service) error {
	return t.installIn(t.tune, rules, services)
}

// renew attaches the program again if the cgroup was created again, for example because a unit was started. others
// are the paths of the other tuned cgroups by name.
func (t *tuner) renew(others map[string]string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	path, err := t.host.Cgroups.Find(t.name)
	if t.inForce() && err == nil && path == t.scope.Path {
		return
	}
	before := t.problem
	t.detach()
	if err := t.open(others); err != nil {
		if before == nil || before.Error() != err.Error() {
			t.log.Warn("cgroup not tuned", events.CgroupNotTuned, "error", err)
		}
		t.problem = err
		return
	}
	if t.tune != nil {
		t.log.Info("cgroup tuned", events.CgroupTuned, "path", t.scope.Path)
	}
}

// open attaches the program to the cgroup and installs the rules. For a unit that does not run, open sets the problem
// and returns nil. others are the paths of the other tuned cgroups by name: a unit may have started in one of them since
// the rules were planned.
func (t *tuner) open(others map[string]string) error {
	t.problem = nil
	err := t.scope.Open(t.host.Cgroups, t.name)
	if errors.Is(err, fs.ErrNotExist) {
		t.problem = scope.Absent(t.name, "its connections are tuned")
		return nil
	}
	if err != nil {
		return err
	}
	others[t.name] = t.scope.Path
	if err := nestedError(scope.CheckPaths(others)); err != nil {
		return err
	}
	if idle := t.idle; idle != nil {
		t.idle = nil
		err := idle.Move(t.scope.Path)
		if err == nil {
			t.tune = idle
			return t.record(idle)
		}
		t.log.Debug("program reloaded", "reason", err)
		idle.Close()
	}
	t.tune, err = bpf.OpenTune(bpf.TuneConfig{Dir: t.host.Root.Tuning(scope.PinName(t.name)), Cgroup: t.scope.Path,
		Ready: func(opened *bpf.Tune) error {
			return fault.Join(t.record(opened), t.installIn(opened, t.rules, t.services))
		}})
	return err
}

// record writes the scope to the pins.
func (t *tuner) record(tuning *bpf.Tune) error {
	record, err := json.Marshal(t.scope)
	if err != nil {
		return err
	}
	return tuning.SetScope(record)
}

// installIn is install for a tuning that may not be attached yet, or that is nil.
func (t *tuner) installIn(tuning *bpf.Tune, rules []config.TuneRule, services []config.Service) error {
	skipped, err := t.kernel.skippedOptions(rules)
	if err != nil {
		return err
	}
	if tuning != nil {
		compiled, err := compileTune(rules, services, skipped)
		if err != nil {
			return err
		}
		if err := tuning.Install(compiled); err != nil {
			return err
		}
	}
	t.rules, t.services, t.skipped = rules, services, skipped
	if tuning != nil {
		t.problem = nil
	} else if t.idle != nil {
		t.idle.Close() // has other rules
		t.idle = nil
	}
	return nil
}

func compileTune(rules []config.TuneRule, services []config.Service, skipped map[string][]api.TuneSkipped) (*bpf.TuneRules, error) {
	compiled, err := Compile(rules, services, func(rule config.TuneRule, option string) bool {
		return slices.ContainsFunc(skipped[rule.Name], func(s api.TuneSkipped) bool { return s.Option == option })
	})
	if err != nil {
		return nil, fault.Usage(err, "merge rules with the same settings")
	}
	return compiled, nil
}

// inForce reports whether the program is attached to the existing cgroup and has all rules.
func (t *tuner) inForce() bool {
	return t.problem == nil && t.tune != nil && t.tune.Attached()
}

// detach closes the pins of a removed cgroup. It keeps the loaded program for the next cgroup, because loading is much
// slower than attaching.
func (t *tuner) detach() {
	if t.tune == nil {
		return
	}
	if t.problem != nil {
		t.closeLocked()
		return
	}
	t.idle, t.tune = t.tune, nil
}

func (t *tuner) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closeLocked()
}

// retire ends the tuning. New connections get the kernel's defaults, and open connections keep their values.
func (t *tuner) retire() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closeLocked()
	if err := bpf.RemoveTune(t.host.Root.Tuning(scope.PinName(t.name))); err != nil {
		return err
	}
	return scope.RemoveCreated([]scope.Scope{t.scope})
}

func (t *tuner) closeLocked() {
	for _, one := range []**bpf.Tune{&t.tune, &t.idle} {
		if *one != nil {
			(*one).Close()
			*one = nil
		}
	}
}

// ruleNames returns the names of all rules that connections may have, by number.
func (t *tuner) ruleNames() map[uint32]string {
	t.mu.Lock()
	defer t.mu.Unlock()
	names := make(map[uint32]string)
	_, _, all, err := t.ruleIDs()
	if err != nil {
		// Such rules are shown by number.
		return names
	}
	for id, rule := range all {
		names[id] = bpf.Text(rule.Name[:])
	}
	return names
}

// contains reports whether a cgroup, given by its path below the mount, is the tuned cgroup or below it.
func (t *tuner) contains(cgroup string) bool {
	path := t.path()
	below, err := filepath.Rel(path, filepath.Join(t.host.Cgroups.Mount, cgroup))
	return path != "" && err == nil && below != ".." && !strings.HasPrefix(below, "../")
}

// path returns the directory of the cgroup, or "" if it does not exist.
func (t *tuner) path() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.tune == nil {
		return ""
	}
	return t.scope.Path
}
