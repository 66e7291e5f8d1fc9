// SPDX-License-Identifier: Apache-2.0

// Package agent is the one long-lived process of Sockeye. It keeps the host
// as the policy says, and answers those who ask. Packets do not need it.
package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf/rlimit"
	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bigtcp"
	"sockeye/internal/bpf"
	"sockeye/internal/cgroup"
	"sockeye/internal/config"
	"sockeye/internal/doctor"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/owned"
	"sockeye/internal/rights"
	"sockeye/internal/scope"
	"sockeye/internal/sockmetrics"
	"sockeye/internal/statedir"
	"sockeye/internal/steer"
	"sockeye/internal/trace"
	"sockeye/internal/tune"
)

// Options are the agent's flags.
type Options struct {
	Policy   string // file
	StateDir string // kept over reboots
	RunDir   string // holds the socket
	Pins     string // directory in a bpffs
	Group    string // group that may use the socket besides root, or ""
	Version  string
	Log      *slog.Logger
}

// Agent is a running agent.
type Agent struct {
	options Options
	log     *slog.Logger
	host    *domain.Host
	domains []domain.Domain
	started time.Time
	starts  int

	applying sync.Mutex // one Plan or Apply at a time; taken before mu
	mu       sync.Mutex // of what follows
	policy   *config.Policy
	// metricsProblem is why there is no endpoint although the policy names one.
	metricsProblem error
	inForce        inForce
	metrics        *metricsServer
	sockets        *sockmetrics.Collector
}

// Run is an agent's life: it returns when ctx ends. Steering goes on.
func Run(ctx context.Context, o Options) (err error) {
	if missing, err := rights.Missing(); err != nil {
		return err
	} else if len(missing) > 0 {
		return &fault.Error{Err: fmt.Errorf("start agent: missing %s", strings.Join(missing, ", ")),
			Hint: "run as root, or give these capabilities to the service", Code: fault.CodeNotPermitted}
	}
	// What is told to others, a keeper or a person, holds in any directory.
	for _, path := range []*string{&o.Policy, &o.StateDir, &o.RunDir, &o.Pins} {
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	if err := checkMountPoint(filepath.Dir(o.Pins)); err != nil {
		return err
	}
	// Kernels before 5.11 charge maps to RLIMIT_MEMLOCK.
	if err := rlimit.RemoveMemlock(); err != nil {
		return fmt.Errorf("raise RLIMIT_MEMLOCK: %w", err)
	}
	cgroups, err := cgroup.Mount()
	if err != nil {
		return err
	}
	root, err := bpf.OpenRoot(o.Pins)
	if err != nil {
		return err
	}
	defer root.Close()
	for _, dir := range []string{o.StateDir, o.RunDir} {
		if err := owned.Make(dir, 0o755); err != nil {
			return err
		}
	}
	if err := os.Chmod(o.StateDir, 0o700); err != nil {
		return fmt.Errorf("set mode of state directory: %w", err)
	}
	a := newAgent(o, root, scope.Tree{Mount: cgroups})
	defer a.close()
	if err := a.recordStart(); err != nil {
		return err
	}
	first, err := a.choosePolicy()
	if err != nil {
		return err
	}
	policy := first.policy
	if first.refused != nil {
		a.log.Error("policy file not in force, the policy that was applied last is", "policy", o.Policy, "error", firstLine(first.refused), "hint", "sockeye check "+o.Policy)
	}
	a.warnOfMissingCapabilities(policy)
	if doctor.InOwnPIDs() && len(policy.Services) > 0 {
		a.log.Warn("the agent is in " + doctor.OwnPIDs)
	}
	server, err := a.listen()
	if err != nil {
		return err
	}
	defer server.close()
	if err := a.startDomains(policy, first.text); err != nil {
		return err
	}
	a.mu.Lock()
	a.inForce.refused, a.inForce.refusedText = first.refused, first.refusedText
	a.mu.Unlock()
	var extra []uintptr
	for _, n := range a.neededCapabilities(policy) {
		extra = append(extra, n.Capability)
	}
	if err := rights.Drop(extra...); err != nil {
		return err
	}
	reload := make(chan os.Signal, 1)
	signal.Notify(reload, unix.SIGHUP)
	defer signal.Stop(reload)
	failed := server.serve()
	if _, err := daemon.SdNotify(false, daemon.SdNotifyReady); err != nil {
		a.log.Warn("service manager not notified", "error", err)
	}
	a.log.Info("agent started", "version", o.Version, "policy", o.Policy, "services", len(policy.Services), "tune", len(policy.Tune), "trace", len(policy.Trace), "bigtcp", len(policy.BigTCP))
	for {
		select {
		case <-ctx.Done():
			a.log.Info("agent stops, what it has set up goes on")
			return nil
		case err := <-failed:
			return err
		case <-reload:
			if _, err := a.Apply(api.Candidate{}); err != nil {
				a.log.Error("policy not applied", "policy", o.Policy, "error", firstLine(err))
			}
		}
	}
}

// newAgent returns an agent that has not started.
func newAgent(o Options, root *bpf.Root, cgroups scope.Tree) *Agent {
	h := &domain.Host{Log: o.Log, Root: root, StateDir: o.StateDir, Cgroups: cgroups, Watch: &scope.Watch{Tree: cgroups, Log: o.Log}}
	services := steer.New(h)
	tuning := tune.New(h)
	tracing := trace.New(h, tuning)
	return &Agent{
		options: o, log: o.Log, started: time.Now(), host: h, policy: &config.Policy{},
		domains: []domain.Domain{services, tuning, tracing, bigtcp.New(h)},
		sockets: sockmetrics.New(h, services.EachService, tuning.Paths, tracing.Paths),
	}
}

func readPolicy(path string) (*config.Policy, []byte, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, fault.Unreadable(fmt.Errorf("read policy file: %w", err), "write one (sockeye check FILE tells whether it is right), or name it with --policy of the agent")
	}
	policy, err := config.Parse(text, path)
	return policy, text, err
}

// checkMountPoint refuses to hide files under a bpffs.
func checkMountPoint(dir string) error {
	if bpf.IsBPFFS(dir) {
		return nil
	}
	if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
		return fault.Usage(fmt.Errorf("%s is not in a bpffs and not empty, so none can be mounted there", dir),
			"give --pins a directory in a bpffs, as in /sys/fs/bpf/sockeye")
	}
	return nil
}

// countStart keeps the number of the agent's starts, and what was measured of the kernel,
// for metrics.
func (a *Agent) recordStart() error {
	path := filepath.Join(a.options.StateDir, statedir.AgentFile)
	var record struct {
		Starts int                     `json:"starts"`
		Room   sockmetrics.Calibration `json:"room"`
	}
	if data, err := os.ReadFile(path); err == nil {
		// A damaged count starts again: it is no reason not to run.
		_ = json.Unmarshal(data, &record)
	}
	record.Starts++
	a.starts = record.Starts
	a.sockets.Calibrate(&record.Room)
	data, err := json.Marshal(record)
	if err != nil {
		return err
	}
	return statedir.Write(path, append(data, '\n'))
}

// read returns the policy of a candidate, and its text.
func (a *Agent) readCandidate(c api.Candidate) (*config.Policy, []byte, error) {
	switch {
	case c.Previous:
		policy, text, err := a.readSaved(previousFile)
		if errors.Is(err, os.ErrNotExist) && text == nil {
			return nil, nil, fault.Usage(errors.New("there is no previous policy"), "apply keeps the policy that it replaces")
		}
		return policy, text, err
	case c.Text != "" || c.Path != "":
		policy, err := config.Parse([]byte(c.Text), c.Path)
		return policy, []byte(c.Text), err
	}
	return readPolicy(a.options.Policy)
}

// start carries out the first policy of this agent's life.
func (a *Agent) startDomains(policy *config.Policy, text []byte) error {
	for _, d := range a.domains {
		if err := d.Start(policy); err != nil {
			return err
		}
	}
	metrics, err := a.serveMetrics(policy.Metrics.Listen)
	if err != nil {
		// Steering is worth more than figures of it.
		a.log.Error("metrics are not served", "error", err, "hint", fault.Hint(err))
		metrics = &metricsServer{}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.policy, a.metrics, a.metricsProblem = policy, metrics, err
	return a.savePolicy(policy, text, a.options.Policy)
}

func (a *Agent) close() {
	a.host.Watch.Close()
	for _, d := range a.domains {
		d.Close()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.metrics != nil {
		a.metrics.close()
	}
}

// steps returns the way from the policy in force to another one.
func (a *Agent) planSteps(policy *config.Policy) ([]domain.Step, error) {
	var steps []domain.Step
	for _, d := range a.domains {
		part, err := d.Plan(policy)
		if err != nil {
			return nil, err
		}
		steps = append(steps, part...)
	}
	return steps, nil
}

// Plan returns what Apply would change.
func (a *Agent) Plan(c api.Candidate) (*api.Plan, error) {
	a.applying.Lock()
	defer a.applying.Unlock()
	policy, _, err := a.readCandidate(c)
	if err != nil {
		return nil, err
	}
	steps, err := a.planSteps(policy)
	if err != nil {
		return nil, err
	}
	return a.describe(policy, steps), nil
}

func (a *Agent) describe(policy *config.Policy, steps []domain.Step) *api.Plan {
	plan := &api.Plan{Policy: a.options.Policy, Changes: []api.Change{}}
	for _, s := range steps {
		plan.Changes = append(plan.Changes, s.Changes...)
	}
	if a.policy.Metrics != policy.Metrics {
		plan.Changes = append(plan.Changes, api.Change{Action: "change",
			What: fmt.Sprintf("metrics: %s -> %s", format.OrNone(a.policy.Metrics.Listen), format.OrNone(policy.Metrics.Listen))})
	}
	return plan
}

// Apply carries out a policy. If a step fails, those before it are rolled back.
func (a *Agent) Apply(c api.Candidate) (*api.Plan, error) {
	a.applying.Lock()
	defer a.applying.Unlock()
	policy, text, err := a.readCandidate(c)
	if err != nil {
		return nil, err
	}
	steps, err := a.planSteps(policy)
	if err != nil {
		return nil, err
	}
	metrics, err := a.openChangedMetrics(policy)
	if err != nil {
		return nil, err
	}
	if err := domain.ApplySteps(steps); err != nil {
		metrics.close()
		return nil, err
	}
	plan := a.describe(policy, steps)
	for _, change := range plan.Changes {
		a.log.Info("policy applied", "service", change.Service, "cgroup", change.Cgroup, "netns", change.Netns, "interface", change.Interface, "action", change.Action, "what", change.What, "effect", change.Effect)
	}
	from := cmp.Or(c.Path, a.options.Policy)
	if c.Previous {
		from = a.savedPath(previousFile)
	}
	if err := a.putInForce(policy, text, from, metrics); err != nil {
		return nil, err
	}
	for _, d := range a.domains {
		if err := d.Applied(policy, c, plan); err != nil {
			return nil, err
		}
	}
	return plan, nil
}

// openMetrics serves the metrics where a policy has them served; nil if they are served there already.
func (a *Agent) openChangedMetrics(policy *config.Policy) (*metricsServer, error) {
	if a.policy.Metrics == policy.Metrics && a.metricsProblem == nil {
		return nil, nil
	}
	return a.serveMetrics(policy.Metrics.Listen)
}

// keep makes a policy the one in force, with another server of metrics unless that is nil.
func (a *Agent) putInForce(policy *config.Policy, text []byte, from string, metrics *metricsServer) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if metrics != nil {
		a.metrics.close()
		a.metrics, a.metricsProblem = metrics, nil
	}
	a.policy = policy
	return a.savePolicy(policy, text, from)
}

// Status is the agent and its domains.
func (a *Agent) Status() (*api.Status, error) {
	status := &api.Status{
		Version: a.options.Version, PID: os.Getpid(), Started: a.started, Starts: a.starts, Policy: a.options.Policy,
	}
	status.PolicyProblem, status.PolicyHint = a.policyProblem()
	for _, d := range a.domains {
		if err := d.Status(status); err != nil {
			return nil, err
		}
	}
	return status, nil
}

// needs lists the capabilities that a policy needs beyond those of the unit, each once.
func (a *Agent) neededCapabilities(policy *config.Policy) []rights.Need {
	var all []rights.Need
	for _, d := range a.domains {
		all = append(all, d.Needs(policy)...)
	}
	return rights.FirstNeeds(append(all, rights.MetricsNeeds(policy)...))
}

// warnOfRights logs the capabilities that the policy needs and this process lacks.
func (a *Agent) warnOfMissingCapabilities(policy *config.Policy) {
	for _, n := range a.neededCapabilities(policy) {
		if !rights.Has(n.Capability) {
			a.log.Warn("right missing", "capability", n.Name, "needed_for", n.For, "hint", n.DropInHint())
		}
	}
}
