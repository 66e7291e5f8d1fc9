// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
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
	"sockeye/internal/fault"
	"sockeye/internal/rights"
	"sockeye/internal/scope"
	"sockeye/internal/trace/measure"
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
	kernel *sendProbe
	tuning Tuning

	mu      sync.Mutex
	tracers map[string]*tracer // by cgroup
	history *traceHistory      // nil if no cgroup is traced
}

// New returns the domain without any rules. The agent creates it after the domain of tuning, because cgroups are
// tuned before they are traced.
func New(h *domain.Host, tuning Tuning) *Domain {
	d := &Domain{host: h, log: h.Log, kernel: new(sendProbe), tuning: tuning, tracers: make(map[string]*tracer)}
	h.AddPrograms(d.programs)
	h.Watch.Subscribe(d.cgroups, d.renew)
	return d
}

// tracer keeps the tracing of one cgroup up to date with the policy and the host.
type tracer struct {
	host    *domain.Host
	log     *slog.Logger
	name    string // name of the cgroup in the policy
	kernel  *sendProbe
	rulesOf Tuning

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
	tuning         string          // folder of the pins of the cgroup's tuning, "" for none
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

// traceChange is the change of one cgroup's tracing by a new policy. rules is nil if the policy has no rules for the
// cgroup.
type traceChange struct {
	name     string
	rules    []config.TraceRule
	services []config.Service
}

// tracings groups the rules of a policy by cgroup.
func tracings(policy *config.Policy) []traceChange {
	var all []traceChange
	for _, rule := range policy.Trace {
		i := slices.IndexFunc(all, func(c traceChange) bool { return c.name == rule.Cgroup })
		if i < 0 {
			i = len(all)
			all = append(all, traceChange{name: rule.Cgroup, services: policy.Services})
		}
		all[i].rules = append(all[i].rules, rule)
	}
	return all
}

// listeners returns the listeners of the services by service name.
func (c traceChange) listeners() map[string][]config.Listener {
	listeners := make(map[string][]config.Listener)
	for _, s := range c.services {
		listeners[s.Name] = s.Listeners
	}
	return listeners
}

// hash returns a hash of everything that the programs depend on.
func (c traceChange) hash() (string, error) {
	text, err := json.Marshal(struct {
		Version   int
		Rules     []config.TraceRule
		Listeners map[string][]config.Listener
	}{1, c.rules, c.listeners()})
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:]), nil
}

func (d *Domain) newTracer(c traceChange) *tracer {
	return &tracer{host: d.host, log: d.log.With("cgroup", c.name), name: c.name, kernel: d.kernel, rulesOf: d.tuning,
		tracing: tracing{rules: c.rules, services: c.services}}
}

func (d *Domain) openTracer(c traceChange) error {
	t := d.newTracer(c)
	t.mu.Lock()
	defer t.mu.Unlock()
	dir := d.host.Root.Tracing(scope.PinName(c.name))
	if data, err := bpf.ReadScope(dir); err == nil {
		// A damaged record is replaced.
		_ = json.Unmarshal(data, &t.scope)
	}
	if err := t.open(); err != nil {
		t.release()
		return ofTraced(c.name, fault.Join(err, bpf.RemoveTrace(dir), scope.RemoveCreated([]scope.Scope{t.scope.Scope})))
	}
	t.resume()
	d.tracers[c.name] = t
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
	hash, err := traceChange{t.name, t.rules, t.services}.hash()
	if err != nil {
		return err
	}
	was := t.tuning
	t.tuning = t.wantedTuning()
	tuned, err := tuningID(t.tuning)
	if err != nil {
		return err
	}
	c := bpf.TraceConfig{Dir: t.host.Root.Tracing(scope.PinName(t.name)), Cgroup: t.scope.Path, Rules: t.compiled,
		Tuning: t.tuning, Send: t.measures(config.StageSend)}
	// A new tuning assigns the rule numbers anew.
	c.Adopt = t.scope.Rules == hash && (tuned == 0 || t.scope.Tuned == 0 || tuned == t.scope.Tuned)
	var opened *bpf.Trace
	if idle := t.idle; idle != nil {
		t.idle = nil
		if c.Adopt && t.tuning == was && idle.Move(t.scope.Path) == nil {
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
		t.log.Info("cgroup traced", "path", t.scope.Path, "open_connections", adopted.Chosen)
	}
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

// measurable returns the stages of a rule that the kernel can measure.
func measurable(rule config.TraceRule, skipped []api.TraceSkipped) []config.Stage {
	return slices.DeleteFunc(slices.Clone(rule.Stages), func(s config.Stage) bool {
		return slices.ContainsFunc(skipped, func(skip api.TraceSkipped) bool { return skip.Stage == string(s) })
	})
}

// measures returns whether a rule measures the stage.
func (t *tracer) measures(stage config.Stage) bool {
	return slices.ContainsFunc(t.rules, func(r config.TraceRule) bool {
		return slices.Contains(measurable(r, t.skipped[r.Name]), stage)
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
	return t.rulesOf.Pins(t.name)
}

// sendProbe caches whether the kernel allows fentry programs.
type sendProbe struct {
	once sync.Once
	err  error
}

// lackingStages returns the stages of each rule that the kernel cannot measure.
func (p *sendProbe) lackingStages(rules []config.TraceRule) (map[string][]api.TraceSkipped, error) {
	skipped := make(map[string][]api.TraceSkipped)
	for _, rule := range rules {
		for _, stage := range rule.Stages {
			needs, err := p.requirement(rule, stage)
			if err != nil {
				return nil, err
			}
			if needs != "" {
				skipped[rule.Name] = append(skipped[rule.Name], api.TraceSkipped{Stage: string(stage), Needs: needs})
			}
		}
	}
	return skipped, nil
}

// requirement returns the requirement of a TCP stage that the kernel does not meet, or "".
func (p *sendProbe) requirement(rule config.TraceRule, stage config.Stage) (string, error) {
	if !slices.Contains(rule.Protocols, config.TCP) {
		return "", nil
	}
	switch stage {
	case config.StageRXStack, config.StageReader:
		return "", nil
	case config.StageStack, config.StageQdisc:
		if slices.Contains(rule.Protocols, config.UDP) {
			return "", nil
		}
	case config.StageSend:
		err := p.probeSend()
		if errors.Is(err, ebpf.ErrNotSupported) {
			return "fentry programs, which this kernel does not allow", nil
		}
		if err != nil {
			return "", fmt.Errorf("probe fentry: %w", err)
		}
	}
	err := bpf.HaveTimestamps()
	if errors.Is(err, ebpf.ErrNotSupported) {
		return "BPF timestamping, Linux 6.15 or later", nil
	}
	return "", err
}

// probeSend probes the stage send on the first call and returns the cached result afterwards.
func (p *sendProbe) probeSend() error {
	p.once.Do(func() { p.err = bpf.HaveSend() })
	return p.err
}

// renew attaches the programs again if the cgroup or its tuning was created again.
func (t *tracer) renew() {
	t.mu.Lock()
	defer t.mu.Unlock()
	path, err := t.host.Cgroups.Find(t.name)
	wanted := t.wantedTuning()
	if t.trace != nil && t.trace.Attached() && err == nil && path == t.scope.Path && t.tuning == wanted {
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
		t.release()
		if before == nil || before.Error() != err.Error() {
			t.log.Warn("cannot trace cgroup", "error", err)
		}
		t.problem = err
	}
	t.resume()
}

func (t *tracer) release() {
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

func (t *tracer) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.release()
}

// remove removes the programs, and clears the flag of traced connections in the kernel.
func (t *tracer) remove() error {
	t.forgetConnections(t.log)
	t.release()
	return bpf.RemoveTrace(t.host.Root.Tracing(scope.PinName(t.name)))
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

// retire removes the tracing.
func (t *tracer) retire() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fault.Join(t.remove(), scope.RemoveCreated([]scope.Scope{t.scope.Scope}))
}

// asidePins is the suffix of a pin directory that is being replaced.
const asidePins = "_before"

// change replaces the rules and resets the counts. If change fails, the previous rules remain in force.
func (t *tracer) change(c traceChange) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	before, dir := t.tracing, t.host.Root.Tracing(scope.PinName(t.name))
	aside := dir + asidePins
	if err := fault.Join(bpf.RemoveTrace(aside), bpf.MoveTrace(dir, aside)); err != nil {
		return err
	}
	t.tracing = tracing{rules: c.rules, services: c.services, scope: traceScope{Scope: before.scope.Scope}}
	if err := t.open(); err != nil {
		t.release()
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

// apply applies a change and returns the function that rolls it back.
func (d *Domain) apply(c traceChange) (rollback func() error, err error) {
	before := traceChange{name: c.name}
	d.mu.Lock()
	if t := d.tracers[c.name]; t != nil {
		before.rules, before.services = t.rules, t.services
	}
	d.mu.Unlock()
	return func() error { return d.setRules(before) }, d.setRules(c)
}

// setRules replaces the rules of a cgroup. If setRules fails, the previous rules stay in force.
func (d *Domain) setRules(c traceChange) error {
	defer d.host.Watch.Look()
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.tracers[c.name]
	if t != nil {
		d.sliceNow() // before its counts are removed
	}
	switch {
	case c.rules == nil:
		delete(d.tracers, c.name)
		if err := t.retire(); err != nil {
			return ofTraced(c.name, fault.Join(err, d.openTracer(traceChange{c.name, t.rules, t.services})))
		}
	case t == nil:
		if err := d.openTracer(c); err != nil {
			return err
		}
	default:
		if err := t.change(c); err != nil {
			return ofTraced(c.name, err)
		}
	}
	d.recordTrace()
	if t != nil {
		for _, other := range d.tracers {
			if other != t {
				other.retrace(t.scope.Path)
			}
		}
	}
	return nil
}

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

// Paths returns the names in the policy of the traced cgroups by their directories.
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

// retrace traces connections again that the tracing of another cgroup has released, if one of the cgroups is below
// the other.
func (t *tracer) retrace(cgroup string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if scope.Within(cgroup, t.scope.Path) || scope.Within(t.scope.Path, cgroup) {
		t.selectOpen()
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

// Check returns nil: Plan checks the rules, and the domain waits for missing cgroups.
func (d *Domain) Check(*config.Policy) error { return nil }

// Plan compares the rules of a policy with those in force, and checks that the kernel can measure their stages.
func (d *Domain) Plan(policy *config.Policy) ([]domain.Step, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var steps []domain.Step
	add := func(c traceChange, changes []api.Change) {
		steps = append(steps, domain.Step{Changes: changes, Apply: func() (func() error, error) { return d.apply(c) }})
	}
	wanted := tracings(policy)
	names := make([]string, len(wanted))
	for i, c := range wanted {
		names[i] = c.name
	}
	for _, name := range slices.Sorted(maps.Keys(d.tracers)) {
		if !slices.Contains(names, name) {
			var changes []api.Change
			for _, rule := range d.tracers[name].rules {
				changes = append(changes, api.Change{Cgroup: name, Action: "remove", What: "trace " + rule.Name, Effect: "its counts are deleted"})
			}
			add(traceChange{name: name}, changes)
		}
	}
	for _, c := range wanted {
		t := d.tracers[c.name]
		if _, err := d.host.Cgroups.Find(c.name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, ofTraced(c.name, err)
		}
		if t == nil {
			if err := d.host.Cgroups.MayCreate(c.name); err != nil {
				return nil, ofTraced(c.name, err)
			}
		}
		skipped, err := d.kernel.lackingStages(c.rules)
		if err != nil {
			return nil, ofTraced(c.name, err)
		}
		if _, err := compileTrace(c.rules, c.services, skipped); err != nil {
			return nil, ofTraced(c.name, err)
		}
		if err := unmeasurable(c.rules, skipped); err != nil {
			return nil, err
		}
		if t == nil {
			changes := d.host.Cgroups.Added(c.name, "traced")
			for _, rule := range c.rules {
				changes = append(changes, addedTrace(c.name, rule, skipped[rule.Name]))
			}
			add(c, changes)
			continue
		}
		before, err := traceChange{c.name, t.rules, t.services}.hash()
		if err != nil {
			return nil, err
		}
		after, err := c.hash()
		if err != nil {
			return nil, err
		}
		if before != after {
			add(c, changedTrace(c, t.rules, skipped))
		}
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

func addedTrace(cgroup string, rule config.TraceRule, skipped []api.TraceSkipped) api.Change {
	c := api.Change{Cgroup: cgroup, Action: "add", Effect: "of " + rule.Match.String(),
		What: fmt.Sprintf("trace %s: %s of connections, %s of their messages", rule.Name, oneIn(rule.Connections), rule.Messages)}
	for _, s := range skipped {
		c.Effect += fmt.Sprintf("; without %s, which requires %s", s.Stage, s.Needs)
	}
	return c
}

func oneIn(n int) string { return fmt.Sprintf("1/%d", n) }

// changedTrace compares two lists of rules by name. A change of one rule restarts the counts of the cgroup.
func changedTrace(c traceChange, before []config.TraceRule, skipped map[string][]api.TraceSkipped) []api.Change {
	var changes []api.Change
	text := func(r config.TraceRule) string {
		encoded, _ := json.Marshal(r) // cannot fail for plain values
		return string(encoded)
	}
	for _, old := range before {
		if !slices.ContainsFunc(c.rules, func(r config.TraceRule) bool { return r.Name == old.Name }) {
			changes = append(changes, api.Change{Cgroup: c.name, Action: "remove", What: "trace " + old.Name, Effect: "its counts are deleted"})
		}
	}
	for _, rule := range c.rules {
		i := slices.IndexFunc(before, func(r config.TraceRule) bool { return r.Name == rule.Name })
		switch {
		case i < 0:
			changes = append(changes, addedTrace(c.name, rule, skipped[rule.Name]))
		case text(before[i]) != text(rule):
			changes = append(changes, api.Change{Cgroup: c.name, Action: "change", What: "trace " + rule.Name, Effect: "counts restart at 0"})
		}
	}
	if len(changes) == 0 {
		changes = append(changes, api.Change{Cgroup: c.name, Action: "change", What: "trace: order, or listeners of services", Effect: "counts restart at 0"})
	}
	return changes
}

// Start removes the tracing of cgroups that are no longer in the policy, and traces the cgroups of the policy. A rule
// that this host cannot apply is logged and does not stop the others.
func (d *Domain) Start(policy *config.Policy) error {
	defer d.host.Watch.Look()
	d.mu.Lock()
	defer d.mu.Unlock()
	wanted := tracings(policy)
	if err := d.removeOthers(wanted); err != nil {
		return err
	}
	for _, c := range wanted {
		if err := d.openTracer(c); err != nil {
			// A cgroup that cannot be traced does not stop the others.
			d.log.Warn("cannot trace cgroup", "cgroup", c.name, "error", err)
			t := d.newTracer(c)
			t.problem = err
			d.tracers[c.name] = t
		}
	}
	d.recordTrace()
	return nil
}

func (d *Domain) removeOthers(wanted []traceChange) error {
	pinned, err := d.host.Root.Tracings()
	if err != nil {
		return err
	}
	for _, name := range pinned {
		dir := d.host.Root.Tracing(name)
		if slices.ContainsFunc(wanted, func(c traceChange) bool { return d.host.Root.Tracing(scope.PinName(c.name)) == dir }) {
			continue
		}
		var left traceScope
		if data, err := bpf.ReadScope(dir); err == nil {
			// Without the record, only the pins are removed.
			_ = json.Unmarshal(data, &left)
		}
		if err := fault.Join(d.removeLeftover(dir, left), scope.RemoveCreated([]scope.Scope{left.Scope})); err != nil {
			return err
		}
		d.log.Info("tracing removed: not in the policy", "cgroup", cmp.Or(left.Cgroup, name))
	}
	return nil
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

func ofTraced(name string, err error) error {
	return &fault.Error{Err: fmt.Errorf("trace %s: %w", name, err), Hint: fault.Hint(err), Code: fault.Code(err)}
}

// Needs lists the capabilities that the trace rules of a policy need beyond those of the unit.
func Needs(policy *config.Policy) []rights.Need {
	var needs []rights.Need
	for _, r := range policy.Trace {
		if scope.Creates(r.Cgroup) {
			needs = append(needs, rights.Need{Right: rights.DACOverride, For: "cgroup " + r.Cgroup + " of trace rule " + r.Name + ", which the agent creates where there is none"})
		}
	}
	return needs
}

// Needs lists the capabilities that the trace rules of a policy need beyond those of the unit.
func (d *Domain) Needs(policy *config.Policy) []rights.Need { return Needs(policy) }
