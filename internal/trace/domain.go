// SPDX-License-Identifier: Apache-2.0

package trace

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

// Tuning provides the tuning of connections, for rules that group messages by tune rule.
type Tuning interface {
	// Pins returns the pin directory of a tuned cgroup, or "" if the cgroup is not tuned.
	Pins(cgroup string) string
	// RuleNames returns the names of all tune rules that connections of a cgroup may have, by rule number.
	RuleNames(cgroup string) map[uint32]string
}

// Domain implements [domain.Domain] for the trace rules of the policy.
type Domain struct {
	host   *domain.Host
	log    *slog.Logger
	kernel *stageProbe
	tuning Tuning

	mu      sync.Mutex
	tracers map[string]*tracer // by cgroup
	history *traceHistory      // nil if no cgroup is traced
}

var (
	_ domain.Scoped   = (*Domain)(nil)
	_ domain.Measurer = (*Domain)(nil)
)

// New returns the domain without any rules. The agent creates it after the domain of tuning, because cgroups are
// tuned before they are traced.
func New(h *domain.Host, tuning Tuning) *Domain {
	d := &Domain{host: h, log: h.Log, kernel: new(stageProbe), tuning: tuning, tracers: make(map[string]*tracer)}
	h.AddPrograms(d.programs)
	h.Watch.Subscribe(d.cgroups, d.renew)
	return d
}

// Needs lists the capabilities that the trace rules of a policy need beyond those of the unit.
func (d *Domain) Needs(policy *config.Policy) []rights.Need { return Needs(policy) }

// Needs lists the capabilities that the trace rules of a policy need beyond those of the unit.
func Needs(policy *config.Policy) []rights.Need {
	var needs []rights.Need
	for _, r := range policy.Trace {
		needs = append(needs, scope.Needs(r.Cgroup, "trace rule "+r.Name)...)
	}
	return needs
}

// Check returns nil: Plan checks the rules, and the domain waits for missing cgroups.
func (d *Domain) Check(*config.Policy) error { return nil }

// Start removes the tracing of cgroups that are no longer in the policy, and traces the cgroups of the policy. A rule
// that this host cannot apply is logged and does not stop the others.
func (d *Domain) Start(policy *config.Policy) error {
	defer d.host.Watch.Look()
	d.mu.Lock()
	defer d.mu.Unlock()
	wanted := byCgroup(policy)
	if err := d.removeOthers(wanted); err != nil {
		return err
	}
	for _, c := range wanted {
		if err := d.openTracer(c); err != nil {
			// A cgroup that cannot be traced does not stop the others.
			d.log.Warn("cannot trace cgroup", events.CgroupNotTraced, "cgroup", c.Cgroup, "error", err)
			d.register(c, err)
		}
	}
	d.startOrStopHistory()
	return nil
}

func (d *Domain) removeOthers(wanted []cgroupRules) error {
	pinned, err := d.host.Root.Tracings()
	if err != nil {
		return err
	}
	for _, name := range scope.Leftovers(pinned, wanted) {
		dir := d.host.Root.Tracing(name)
		var left traceScope
		if data, err := pin.ReadScope(dir); err == nil {
			// Without the record, only the pins are removed.
			_ = json.Unmarshal(data, &left)
		}
		if err := fault.Join(d.removeLeftover(dir, left), scope.RemoveCreated([]scope.Scope{left.Scope})); err != nil {
			return err
		}
		d.log.Info("tracing removed: not in the policy", events.TracingRemoved, "cgroup", cmp.Or(left.Cgroup, name))
	}
	return nil
}

// removeLeftover removes the pins of a cgroup that is not in the policy, and the cgroup if an agent created it.
func (d *Domain) removeLeftover(dir string, scope traceScope) error {
	old := tracing{scope: scope}
	var err error
	old.trace, err = bpf.OpenTrace(bpf.TraceConfig{Dir: dir, Cgroup: scope.Path, Rules: &bpf.TraceRules{Groups: scope.Groups}, Adopt: true})
	if err != nil {
		d.log.Debug("connections keep the trace flag", "cgroup", scope.Cgroup, "reason", err)
		return bpf.RemoveTrace(dir)
	}
	old.forgetConnections(d.log)
	old.closePrograms()
	return bpf.RemoveTrace(dir)
}

// Applied does nothing.
func (d *Domain) Applied(*config.Policy, api.Candidate, *api.Plan) error { return nil }

// Close closes the descriptors of this process. The programs remain attached.
func (d *Domain) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.history != nil {
		d.history.close()
		d.history = nil
	}
	for _, t := range d.tracers {
		t.close()
	}
}

// asidePins is the suffix of a pin directory that is being replaced.
const asidePins = "_before"

// cgroups returns the names of the traced cgroups.
func (d *Domain) cgroups() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Keys(d.tracers))
}

// renew attaches the programs to cgroups that were created again.
func (d *Domain) renew() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range d.tracers {
		t.renew()
	}
}

// programs returns the ids of the attached programs.
func (d *Domain) programs() ([]uint32, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var ids []uint32
	for _, t := range d.tracers {
		t.mu.Lock()
		if t.trace != nil && t.trace.Attached() {
			if id, err := t.trace.ProgramID(); err == nil {
				ids = append(ids, id)
			}
		}
		t.mu.Unlock()
	}
	return ids, nil
}

// Paths maps the directories of the traced cgroups to the names of these cgroups in the policy.
func (d *Domain) Paths() map[string]string {
	tracers, _ := d.tracersOf("") // cannot fail for ""
	paths := make(map[string]string)
	for _, t := range tracers {
		t.mu.Lock()
		if t.scope.Path != "" {
			paths[t.scope.Path] = t.name
		}
		t.mu.Unlock()
	}
	return paths
}

func ofTraced(name string, err error) error {
	return fault.In("trace "+name, err)
}
