// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/bpf/pin"
	"sockeye/internal/clock"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/scope"
	"sockeye/internal/trace/measure"
)

// tracer keeps the tracing of one cgroup up to date with the policy and the host.
type tracer struct {
	host   *domain.Host
	log    *slog.Logger
	name   string // name of the cgroup in the policy
	kernel *stageProbe
	tuning Tuning

	mu sync.Mutex
	tracing
	sampler *sampler // nil without a reader of samples
}

// tracing is the state of a tracer for one list of rules.
type tracing struct {
	rules          []config.TraceRule
	services       []config.Service
	compiled       *bpf.TraceRules
	skipped        map[string][]api.TraceSkipped // by rule
	scope          traceScope
	tuningDir      string          // folder of the pins of the cgroup's tuning, "" for none
	trace          *bpf.Trace      // nil while the cgroup does not exist
	idle           *bpf.Trace      // loaded programs with the same rules, of a removed cgroup; or nil
	stamping       *clock.Stamping // receive timestamps; nil if no rule needs them
	baselinePeriod measure.Period  // counts before this agent
	problem        error
}

// traceScope is stored with the pins. Pins with the same hash of rules are adopted.
type traceScope struct {
	scope.Scope
	Rules  string    `json:"rules"`  // hash
	Groups int       `json:"groups"` // indexes
	Since  time.Time `json:"since"`
	// Tuned is the id of the map of the cgroup's tuning whose rule numbers the groups use; 0 if there was none.
	Tuned ebpf.MapID `json:"tuned"`
}

// register registers the tracer of a cgroup that could not be traced. Later events of the cgroup, and plans, try again.
func (d *Domain) register(c cgroupRules, problem error) {
	t := d.newTracer(c)
	t.problem = problem
	d.tracers[c.Cgroup] = t
}

// failure returns why the cgroup is not traced, or nil.
func (t *tracer) failure() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.problem
}

func (d *Domain) openTracer(c cgroupRules) error {
	t := d.newTracer(c)
	t.mu.Lock()
	defer t.mu.Unlock()
	dir := d.host.Root.Tracing(scope.PinName(c.Cgroup))
	if data, err := pin.ReadScope(dir); err == nil {
		// A damaged record is replaced.
		_ = json.Unmarshal(data, &t.scope)
	}
	if err := t.open(); err != nil {
		t.closeLocked()
		return ofTraced(c.Cgroup, fault.Join(err, bpf.RemoveTrace(dir), scope.RemoveCreated([]scope.Scope{t.scope.Scope})))
	}
	t.resume()
	d.tracers[c.Cgroup] = t
	return nil
}

func (d *Domain) newTracer(c cgroupRules) *tracer {
	return &tracer{host: d.host, log: d.log.With("cgroup", c.Cgroup), name: c.Cgroup, kernel: d.kernel, tuning: d.tuning,
		tracing: tracing{rules: c.Rules, services: c.Services}}
}

// renew attaches the programs again if the cgroup or its tuning was created again.
func (t *tracer) renew() {
	t.mu.Lock()
	defer t.mu.Unlock()
	path, err := t.host.Cgroups.Find(t.name)
	wanted := t.wantedTuning()
	if t.trace != nil && t.trace.Attached() && err == nil && path == t.scope.Path && t.tuningDir == wanted {
		return
	}
	before := t.problem
	t.pauseSampler()
	// Attaching loaded programs is much faster than loading them.
	idle := t.idle
	t.idle = nil
	if t.trace != nil && t.problem == nil {
		idle, t.trace = t.trace, nil
	}
	t.closePrograms()
	t.idle = idle
	if err := t.open(); err != nil {
		t.closeLocked()
		if before == nil || before.Error() != err.Error() {
			t.log.Warn("cannot trace cgroup", events.CgroupNotTraced, "error", err)
		}
		t.problem = err
	}
	t.resume()
}

func (t *tracer) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closeLocked()
}

// retire removes the tracing.
func (t *tracer) retire() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fault.Join(t.remove(), scope.RemoveCreated([]scope.Scope{t.scope.Scope}))
}

// remove removes the programs, and clears the flag of traced connections in the kernel.
func (t *tracer) remove() error {
	t.forgetConnections(t.log)
	t.closeLocked()
	return bpf.RemoveTrace(t.host.Root.Tracing(scope.PinName(t.name)))
}

// change replaces the rules and resets the counts. If change fails, the previous rules remain in force.
func (t *tracer) change(c cgroupRules) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	before, dir := t.tracing, t.host.Root.Tracing(scope.PinName(t.name))
	aside := dir + asidePins
	if err := fault.Join(bpf.RemoveTrace(aside), bpf.MoveTrace(dir, aside)); err != nil {
		return err
	}
	t.tracing = tracing{rules: c.Rules, services: c.Services, scope: traceScope{Scope: before.scope.Scope}}
	if err := t.open(); err != nil {
		t.closeLocked()
		t.tracing = before
		err = fault.Join(err, bpf.RemoveTrace(dir), bpf.MoveTrace(aside, dir))
		t.resume()
		return err
	}
	before.forgetConnections(t.log)
	t.pauseSampler()
	before.closePrograms()
	t.resume()
	if err := bpf.RemoveTrace(aside); err != nil {
		t.log.Warn("cannot remove programs of the previous rules", "error", err)
	}
	return nil
}

// open attaches the programs to the cgroup. It adopts pins with the same rules and their counts. For a unit that is not
// running, open sets the problem. If the kernel cannot measure any stage of the rules, open attaches nothing.
func (t *tracer) open() error {
	t.problem = nil
	var err error
	if t.skipped, err = t.kernel.lackingStages(t.rules); err != nil {
		return err
	}
	if !slices.ContainsFunc(t.rules, func(r config.TraceRule) bool { return len(measurable(r, t.skipped[r.Name])) > 0 }) {
		t.problem = unmeasurable(t.rules, t.skipped)
		return bpf.RemoveTrace(t.host.Root.Tracing(scope.PinName(t.name)))
	}
	if t.compiled, err = compileTrace(t.rules, t.services, t.skipped); err != nil {
		return err
	}
	err = t.scope.Open(t.host.Cgroups, t.name)
	if errors.Is(err, fs.ErrNotExist) {
		t.problem = scope.Absent(t.name, "its messages are traced")
		return nil
	}
	if err != nil {
		return err
	}
	hash, err := hashOf(t.rules, t.services)
	if err != nil {
		return err
	}
	was := t.tuningDir
	t.tuningDir = t.wantedTuning()
	tuned, err := tuningID(t.tuningDir)
	if err != nil {
		return err
	}
	c := bpf.TraceConfig{Dir: t.host.Root.Tracing(scope.PinName(t.name)), Cgroup: t.scope.Path, Rules: t.compiled,
		Tuning: t.tuningDir, Send: t.measures(config.StageSend)}
	// A new tuning assigns the rule numbers anew.
	c.Adopt = t.scope.Rules == hash && (tuned == 0 || t.scope.Tuned == 0 || tuned == t.scope.Tuned)
	var opened *bpf.Trace
	if idle := t.idle; idle != nil {
		t.idle = nil
		if c.Adopt && t.tuningDir == was && idle.Move(t.scope.Path) == nil {
			opened = idle
		} else {
			idle.Close()
		}
	}
	if opened == nil {
		opened, err = bpf.OpenTrace(c)
	}
	var incompatible *pin.IncompatibleError
	if errors.As(err, &incompatible) && c.Adopt {
		// The pins are of another version. Their counts are discarded, so that the tracing starts.
		c.Adopt = false
		opened, err = bpf.OpenTrace(c)
	}
	if err != nil {
		return err
	}
	t.trace = opened
	if t.measures(config.StageRXStack) || t.measures(config.StageReader) {
		if t.stamping, err = clock.OpenStamping(); err != nil {
			return err
		}
	}
	if !c.Adopt {
		t.scope.Rules, t.scope.Groups, t.scope.Since, t.baselinePeriod = hash, t.compiled.Groups, time.Now(), measure.Period{}
	}
	if tuned != 0 {
		t.scope.Tuned = tuned
	}
	record, err := json.Marshal(t.scope)
	if err != nil {
		return err
	}
	if err := t.trace.SetScope(record); err != nil {
		return err
	}
	return t.recordBaseline()
}

// tuningID returns the id of a tuning, given by its pin directory, which differs from that of an earlier tuning; 0 if
// there is none.
func tuningID(dir string) (ebpf.MapID, error) {
	if dir == "" {
		return 0, nil
	}
	return bpf.TuningID(dir)
}

// recordBaseline records the counts before this agent, once.
func (t *tracer) recordBaseline() error {
	if !t.baselinePeriod.To.IsZero() {
		return nil
	}
	reading, err := t.readLocked()
	if err != nil {
		return err
	}
	t.baselinePeriod = reading.period
	return nil
}

// resume selects open connections and resumes the readers of samples.
func (t *tracer) resume() {
	t.selectOpen()
	t.resumeSampler()
}

func compileTrace(rules []config.TraceRule, services []config.Service, skipped map[string][]api.TraceSkipped) (*bpf.TraceRules, error) {
	able := slices.Clone(rules)
	for i, rule := range able {
		able[i].Stages = measurable(rule, skipped[rule.Name])
	}
	compiled, err := Compile(able, services)
	if err != nil {
		return nil, fault.Usage(err, "merge rules that trace the same connections")
	}
	return compiled, nil
}

// measures returns whether a rule measures the stage.
func (t *tracer) measures(stage config.Stage) bool {
	return slices.ContainsFunc(t.rules, func(r config.TraceRule) bool {
		return slices.Contains(measurable(r, t.skipped[r.Name]), stage)
	})
}

// measurable returns the stages of a rule that the kernel can measure.
func measurable(rule config.TraceRule, skipped []api.TraceSkipped) []config.Stage {
	return slices.DeleteFunc(slices.Clone(rule.Stages), func(s config.Stage) bool {
		return slices.ContainsFunc(skipped, func(skip api.TraceSkipped) bool { return skip.Stage == string(s) })
	})
}

// wantedTuning returns the pin directory of the cgroup's tuning, or "" if no rule groups by tune rule or there is no
// tuning.
func (t *tracer) wantedTuning() string {
	asks := slices.ContainsFunc(t.rules, func(r config.TraceRule) bool {
		return slices.ContainsFunc(r.GroupBy, func(by config.TraceGroupBy) bool {
			return by.Kind == config.GroupRule || by.Kind == config.GroupArm
		})
	})
	if !asks {
		return ""
	}
	return t.tuning.Pins(t.name)
}

func (t *tracer) closeLocked() {
	t.pauseSampler()
	t.closePrograms()
}

// closePrograms closes the descriptors of the attached programs, which remain attached, and of the idle ones.
func (t *tracing) closePrograms() {
	if t.idle != nil {
		t.idle.Close()
		t.idle = nil
	}
	if t.trace != nil {
		t.trace.Close()
		t.trace = nil
	}
	if t.stamping != nil {
		t.stamping.Close()
		t.stamping = nil
	}
}

// forgetConnections clears the flag of traced connections in the kernel.
func (t *tracing) forgetConnections(log *slog.Logger) {
	if t.trace == nil {
		return
	}
	if err := DeselectOpen(t.trace, t.scope.Path); err != nil {
		log.Info("connections keep the trace flag", "reason", err)
	}
}

// retrace traces connections again that the tracing of another cgroup has released, if one of the cgroups is below
// the other.
func (t *tracer) retrace(cgroup string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if scope.Within(cgroup, t.scope.Path) || scope.Within(t.scope.Path, cgroup) {
		t.selectOpen()
	}
}

// selectOpen applies the rules to open connections. It traces connections again that the rules selected before and
// another tracing has released.
func (t *tracer) selectOpen() {
	if t.trace == nil {
		return
	}
	adopted, err := SelectOpen(t.trace, t.scope.Path)
	switch {
	case errors.Is(err, ebpf.ErrNotSupported):
		t.log.Info("cannot trace connections that are already open", "reason", err)
	case err != nil:
		t.log.Warn("cannot trace connections that are already open", "error", err)
	default:
		for _, p := range adopted.Problems {
			t.log.Debug("cannot inspect connection", "problem", p)
		}
		t.log.Info("cgroup traced", events.CgroupTraced, "path", t.scope.Path, "open_connections", adopted.Chosen)
	}
}

// setClock updates the programs' offset of the host's clock, which may have been set.
func (t *tracer) setClock() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.stamping == nil {
		return
	}
	if err := t.trace.RefreshClock(); err != nil {
		t.log.Warn("cannot update the clock offset", "error", err)
	}
}
