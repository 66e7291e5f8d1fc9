// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"sync"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/tune"
)

// tuner keeps the tuning of one cgroup in step with the policy. Connections
// never wait for it.
type tuner struct {
	host *host
	log  *slog.Logger
	name string // of the cgroup in the policy

	mu       sync.Mutex
	rules    []config.TuneRule
	services []config.Service
	skipped  map[string][]api.TuneSkipped // by rule
	scope    cgroupScope
	tune     *bpf.Tune // nil while there is no such cgroup
	idle     *bpf.Tune // with the rules in force, of the cgroup that was there before; or nil
	problem  error
}

// tuneChange is what a new policy makes of one cgroup's tuning. Rules is nil
// where there is none any more.
type tuneChange struct {
	name     string
	rules    []config.TuneRule
	services []config.Service
}

func openTuner(h *host, log *slog.Logger, c tuneChange) (*tuner, error) {
	t := &tuner{host: h, log: log.With("cgroup", c.name), name: c.name}
	t.mu.Lock()
	defer t.mu.Unlock()
	dir := h.tuningDir(c.name)
	pinned, err := bpf.Pinned(dir)
	if err != nil {
		return nil, err
	}
	if data, err := bpf.ReadScope(dir); err == nil {
		// A damaged record is made anew.
		_ = json.Unmarshal(data, &t.scope)
	}
	t.rules, t.services = c.rules, c.services
	if err := t.open(); err != nil {
		t.release()
		if !pinned {
			err = fault.Join(err, bpf.RemoveTune(dir), removeCreated([]cgroupScope{t.scope}))
		}
		return nil, err
	}
	return t, nil
}

// open attaches to the cgroup, and installs the rules. A unit that is not
// there is waited for.
func (t *tuner) open() error {
	t.problem = nil
	err := t.scope.open(t.host, t.name)
	if errors.Is(err, fs.ErrNotExist) {
		t.problem = noCgroup(t.name, "its connections are tuned")
		return nil
	}
	if err != nil {
		return err
	}
	if idle := t.idle; idle != nil {
		t.idle = nil
		err := idle.Move(t.scope.Path)
		if err == nil {
			t.tune = idle
			return t.record(idle)
		}
		t.log.Debug("program loaded again", "reason", err)
		idle.Close()
	}
	t.tune, err = bpf.OpenTune(bpf.TuneConfig{Dir: t.host.tuningDir(t.name), Cgroup: t.scope.Path,
		Ready: func(opened *bpf.Tune) error {
			return fault.Join(t.record(opened), t.installIn(opened, t.rules, t.services))
		}})
	return err
}

// record keeps with the pins what they are of.
func (t *tuner) record(tuning *bpf.Tune) error {
	record, err := json.Marshal(t.scope)
	if err != nil {
		return err
	}
	return tuning.SetScope(record)
}

// install makes rules take effect; those before stay if it fails.
func (t *tuner) install(rules []config.TuneRule, services []config.Service) error {
	return t.installIn(t.tune, rules, services)
}

// installIn is install for a tuning that may not be attached yet, or nil.
func (t *tuner) installIn(tuning *bpf.Tune, rules []config.TuneRule, services []config.Service) error {
	skipped, err := t.host.lacking(rules)
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
		t.idle.Close() // it has other rules
		t.idle = nil
	}
	return nil
}

func compileTune(rules []config.TuneRule, services []config.Service, skipped map[string][]api.TuneSkipped) (*bpf.TuneRules, error) {
	compiled, err := tune.Compile(rules, services, func(rule config.TuneRule, option string) bool {
		return slices.ContainsFunc(skipped[rule.Name], func(s api.TuneSkipped) bool { return s.Option == option })
	})
	if err != nil {
		return nil, fault.Usage(err, "join prefixes of rules that set the same")
	}
	return compiled, nil
}

// renew attaches again if the cgroup was made anew, as when a unit starts.
// Others are the cgroups that the policy names.
func (t *tuner) renew(others []tuneChange) {
	t.mu.Lock()
	defer t.mu.Unlock()
	path, err := t.host.findCgroup(t.name)
	if t.inForce() && err == nil && path == t.scope.Path {
		return
	}
	before := t.problem
	t.rest()
	if err := t.reopen(others); err != nil {
		if before == nil || before.Error() != err.Error() {
			t.log.Warn("cgroup not tuned", "error", err)
		}
		t.problem = err
		return
	}
	if t.tune != nil {
		t.log.Info("cgroup tuned", "path", t.scope.Path)
	}
}

// inForce tells whether the rules are: the program is attached to the cgroup that
// is there now, and has them all.
func (t *tuner) inForce() bool {
	return t.problem == nil && t.tune != nil && t.tune.Attached()
}

func (t *tuner) reopen(others []tuneChange) error {
	for _, other := range others {
		// A unit may start anywhere.
		if err := t.host.checkNested([]tuneChange{{name: t.name}, other}); err != nil {
			return err
		}
	}
	return t.open()
}

// rest lets go of a cgroup that is not there any more. What has the rules in force is
// kept for the next: to load it again takes much longer than to attach it.
func (t *tuner) rest() {
	if t.tune == nil {
		return
	}
	if t.problem != nil {
		t.release()
		return
	}
	t.idle, t.tune = t.tune, nil
}

func (t *tuner) release() {
	for _, one := range []**bpf.Tune{&t.tune, &t.idle} {
		if *one != nil {
			(*one).Close()
			*one = nil
		}
	}
}

func (t *tuner) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.release()
}

// retire ends the tuning. New connections get the kernel's defaults, open ones
// keep what they have.
func (t *tuner) retire() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.release()
	if err := bpf.RemoveTune(t.host.tuningDir(t.name)); err != nil {
		return err
	}
	return removeCreated([]cgroupScope{t.scope})
}

// takeTune carries a change out, and returns what takes it back.
func (a *Agent) takeTune(c tuneChange) (back func() error, err error) {
	switch t := a.tuners[c.name]; {
	case c.rules == nil:
		before := tuneChange{c.name, t.rules, t.services}
		back = func() error { return a.openTuner(before) }
		delete(a.tuners, c.name)
		if err := t.retire(); err != nil {
			return nil, ofCgroup(c.name, fault.Join(err, back()))
		}
	case t == nil:
		back = func() error {
			t := a.tuners[c.name]
			delete(a.tuners, c.name)
			return t.retire()
		}
		if err := a.openTuner(c); err != nil {
			return nil, err
		}
	default:
		before := tuneChange{c.name, t.rules, t.services}
		change := func(c tuneChange) error {
			t.mu.Lock()
			defer t.mu.Unlock()
			return t.install(c.rules, c.services)
		}
		back = func() error { return change(before) }
		if err := change(c); err != nil {
			return nil, ofCgroup(c.name, err)
		}
	}
	a.watchCgroups()
	return back, nil
}

func (a *Agent) openTuner(c tuneChange) error {
	t, err := openTuner(a.host, a.log, c)
	if err != nil {
		return ofCgroup(c.name, err)
	}
	a.tuners[c.name] = t
	return nil
}

// startTune makes the policy's tuning true for the first time in this agent's
// life, and removes what an earlier one left of other cgroups.
func (a *Agent) startTune(policy *config.Policy) error {
	pinned, err := a.host.root.Tunings()
	if err != nil {
		return err
	}
	wanted := tunings(policy)
	for _, name := range pinned {
		dir := a.host.root.Tuning(name)
		if slices.ContainsFunc(wanted, func(c tuneChange) bool { return a.host.tuningDir(c.name) == dir }) {
			continue
		}
		var scope cgroupScope
		if data, err := bpf.ReadScope(dir); err == nil {
			// Without its record there is nothing more to remove.
			_ = json.Unmarshal(data, &scope)
		}
		if err := fault.Join(bpf.RemoveTune(dir), removeCreated([]cgroupScope{scope})); err != nil {
			return err
		}
		a.log.Info("tuning removed, it is not in the policy", "cgroup", cmp.Or(scope.Cgroup, name))
	}
	for _, c := range wanted {
		err := a.host.checkNested(wanted)
		if err == nil {
			err = a.openTuner(c)
		}
		if err == nil {
			continue
		}
		// What a policy that was good cannot do on this host today, such as after a
		// reboot with another kernel, is no reason not to do the rest.
		a.log.Warn("cgroup not tuned", "cgroup", c.name, "error", err)
		a.tuners[c.name] = &tuner{host: a.host, log: a.log.With("cgroup", c.name), name: c.name,
			rules: c.rules, services: c.services, problem: err}
	}
	a.watchCgroups()
	return nil
}

func ofCgroup(name string, err error) error {
	return &fault.Error{Err: fmt.Errorf("tune %s: %w", name, err), Hint: fault.Hint(err), Code: fault.Code(err)}
}
