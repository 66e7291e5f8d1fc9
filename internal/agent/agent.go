// SPDX-License-Identifier: Apache-2.0

// Package agent is the long-lived process of Sockeye. The agent applies the policy to the host, serves the API on a
// Unix socket and the metrics over HTTP. No packet passes through the agent: the pinned programs work without it.
//
// An apply goes from [Agent.Apply] through readCandidate, planSteps (Plan of each domain), [domain.ApplySteps] (Apply of
// each step) and putInForce to Applied of each domain.
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
	"sockeye/internal/bpf"
	"sockeye/internal/bpf/load"
	"sockeye/internal/bpf/probe"
	"sockeye/internal/cgroup"
	"sockeye/internal/config"
	"sockeye/internal/doctor"
	"sockeye/internal/domain"
	"sockeye/internal/events"
	"sockeye/internal/fault"
	"sockeye/internal/format"
	"sockeye/internal/otlp"
	"sockeye/internal/owned"
	"sockeye/internal/rights"
	"sockeye/internal/scope"
	"sockeye/internal/sockmetrics"
	"sockeye/internal/statedir"
	"sockeye/internal/ui"
	"sockeye/internal/watch"
)

// Options are the agent's flags.
type Options struct {
	Policy   string // path of the policy file
	StateDir string // directory of the files that outlive a reboot
	RunDir   string // directory of the API socket
	Pins     string // pin directory, in a bpffs
	Group    string // group that may connect to the API socket besides root; "" for none
	Version  string
	Log      *slog.Logger
	// WatchPolicy has the agent apply the policy file when files of its directory are replaced.
	WatchPolicy bool
}

// Agent is a running agent.
type Agent struct {
	options Options
	log     *slog.Logger
	host    *domain.Host
	domains []domain.Domain
	started time.Time
	starts  int

	applying sync.Mutex // serializes Plan and Apply; locked before mu
	mu       sync.Mutex // guards the fields below
	policy   *config.Policy
	// metricsProblem is the error of the metrics listener that the policy in force names.
	metricsProblem error
	// exportProblem is the error of the export of metrics that the policy in force names.
	exportProblem error
	inForce       inForce
	events        *events.Log
	metrics       *metricsServer
	export        *otlp.Export
	sockets       *sockmetrics.Collector
	live          *liveView
	explaining    sync.Mutex      // serializes the plans of /v1/why
	gathered      *sharedGatherer // of all metrics
	page          *webPage        // the web page; nil for none
	pageProblem   error           // why the web page that the policy in force names is not served
}

// settleTime is how long the files of the policy have to be unchanged. The kubelet replaces the files of a ConfigMap by
// several changes of their directory.
const settleTime = 500 * time.Millisecond

// settleLimit is the time after which a change is examined although other changes follow.
const settleLimit = 5 * time.Second

// Run runs an agent until ctx is canceled or the API server fails. Pinned programs stay attached.
func Run(ctx context.Context, o Options) (err error) {
	if missing, err := rights.Missing(); err != nil {
		return err
	} else if len(missing) > 0 {
		return &fault.Error{Err: fmt.Errorf("start agent: missing %s", strings.Join(missing, ", ")),
			Hint: "run as root, or give these capabilities to the service", Code: fault.CodeNotPermitted}
	}
	// A keeper process and the hints of errors use these paths in other working directories.
	for option, path := range map[string]*string{"--policy": &o.Policy, "--state-dir": &o.StateDir, "--run-dir": &o.RunDir, "--pins": &o.Pins} {
		if *path == "" {
			return fault.Usage(fmt.Errorf("%s is empty", option), "name a path, or leave the option out")
		}
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	if err := checkMountPoint(filepath.Dir(o.Pins)); err != nil {
		return err
	}
	// Kernels before 5.11 charge maps to RLIMIT_MEMLOCK.
	if err := rlimit.RemoveMemlock(); err != nil {
		// If bpf(2) is not permitted, the library takes the kernel for an older one.
		if unavailable := load.Available(); unavailable != nil {
			return fault.In("start agent", unavailable)
		}
		return fmt.Errorf("raise RLIMIT_MEMLOCK: %w", err)
	}
	if err := probe.CheckKernel(); err != nil {
		return fault.In("start agent", err)
	}
	cgroups, err := cgroup.Mount()
	if err != nil {
		return err
	}
	started, dirs, mounted := false, missingDirs(&o), bpf.IsBPFFS(filepath.Dir(o.Pins))
	defer func() {
		// The agent that holds the lock may just have created them.
		if !started && !errors.Is(err, bpf.ErrLocked) {
			removeEmpty(dirs)
			if !mounted && unmountEmpty(filepath.Dir(o.Pins)) {
				removeEmpty(dirs)
			}
		}
	}()
	root, err := bpf.OpenRoot(o.Pins)
	if err != nil {
		return err
	}
	defer root.Close()
	a := newAgent(o, root, scope.Tree{Mount: cgroups})
	left, err := newFootprint(&o, root, a.domains)
	if err != nil {
		return err
	}
	defer func() {
		if started || left == nil {
			return
		}
		if failed := left.erase(); failed != nil {
			o.Log.Warn("a start that failed has left something on the host", "error", failed, "hint", "sockeye reset removes it")
		}
	}()
	defer a.close()
	for _, dir := range []string{o.StateDir, o.RunDir} {
		if err := owned.Make(dir, 0o755); err != nil {
			return err
		}
	}
	if err := statedir.Claim(o.StateDir); err != nil {
		return err
	}
	first, err := a.choosePolicy()
	if err != nil {
		return err
	}
	if err := a.recordStart(); errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		a.log.Error("start not recorded", "error", err) // steering must continue on a full disk
	} else if err != nil {
		return err
	}
	if err := a.events.Open(); err != nil {
		a.log.Error("events are not recorded", "error", err) // steering must continue on a full disk
	}
	if first.refused != nil {
		a.log.Error("policy file refused; the last applied policy is in force", events.PolicyRefused, "policy", o.Policy, "error", firstLine(first.refused), "hint", "sockeye check "+o.Policy)
	}
	a.warnOfMissingCapabilities(first.policy)
	if doctor.InOwnPIDs() && len(first.policy.Services) > 0 {
		a.log.Warn("the agent is in " + doctor.OwnPIDs)
	}
	if doctor.HostCgroupsHidden() {
		a.log.Warn("the agent is in "+doctor.HiddenCgroups, "hint", doctor.HiddenHint)
	}
	server, err := a.listen()
	if err != nil {
		return err
	}
	defer server.close()
	if err := a.startDomains(first); err != nil {
		return err
	}
	var extra []uintptr
	for _, n := range a.neededCapabilities(first.policy) {
		extra = append(extra, n.Capability)
	}
	if err := rights.Drop(extra...); err != nil {
		return err
	}
	started = true
	reload := make(chan os.Signal, 1)
	signal.Notify(reload, unix.SIGHUP)
	defer signal.Stop(reload)
	changed := make(chan struct{}, 1)
	if o.WatchPolicy {
		folders, err := watchPolicy(o.Policy, changed)
		if err != nil {
			return err
		}
		defer folders.Close()
	}
	settled, unsettled := time.NewTimer(0), time.Time{} // time of the first change that was not examined
	<-settled.C
	var background sync.WaitGroup
	defer background.Wait()
	viewing, endViews := context.WithCancel(ctx)
	defer endViews()
	background.Go(func() { a.live.run(viewing) })
	failed := server.serve()
	if _, err := daemon.SdNotify(false, daemon.SdNotifyReady); err != nil {
		a.log.Warn("service manager not notified", "error", err)
	}
	a.log.Info("agent started", append([]any{events.AgentStarted, "version", o.Version, "policy", o.Policy}, first.policy.Counts()...)...)
	for {
		select {
		case <-ctx.Done():
			a.log.Info("agent stops; pinned programs stay attached", events.AgentStopped)
			return nil
		case err := <-failed:
			return err
		case <-reload:
			_, _ = a.Apply(api.Candidate{}) // logs its error
		case <-changed:
			if unsettled.IsZero() {
				unsettled = time.Now()
			}
			settled.Reset(min(settleTime, time.Until(unsettled.Add(settleLimit))))
		case <-settled.C:
			unsettled = time.Time{}
			a.applyChanged()
		}
	}
}

// watchPolicy reports changes in the directory of the policy file, until the caller closes the result.
func watchPolicy(policy string, changed chan<- struct{}) (*watch.Folders, error) {
	folders, err := watch.NewFolders(func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	})
	if err != nil {
		return nil, err
	}
	// What the agent has read before may have been replaced meanwhile.
	changed <- struct{}{}
	if err := folders.Add(filepath.Dir(policy)); err != nil {
		folders.Close()
		return nil, err
	}
	return folders, nil
}

// applyChanged applies the policy file if the file, or one that it names, differs from what is in force.
func (a *Agent) applyChanged() {
	problem, _ := a.policyProblem()
	if problem == "" {
		return
	}
	_, _ = a.Apply(api.Candidate{}) // logs its error
}

// newAgent returns an agent without a policy. The caller calls startDomains.
func newAgent(o Options, root *bpf.Root, cgroups scope.Tree) *Agent {
	record := events.New(filepath.Join(o.StateDir, eventsDir), config.DefaultEventsSize)
	log := slog.New(events.NewHandler(record, o.Log.Handler()))
	h := &domain.Host{Log: log, Root: root, StateDir: o.StateDir, Cgroups: cgroups, Watch: &scope.Watch{Tree: cgroups, Log: log}}
	services, domains := newDomains(h)
	var paths []func() map[string]string
	for _, d := range domain.With[domain.Scoped](domains) {
		paths = append(paths, d.Paths)
	}
	a := &Agent{
		options: o, log: log, events: record, started: time.Now(), host: h, policy: &config.Policy{},
		domains: domains, sockets: sockmetrics.New(h, services.EachService, paths...),
	}
	a.gathered = a.gatherer()
	a.live = newLiveView(a.fillFrame, &recording{dir: filepath.Join(o.StateDir, framesDir)}, log)
	return a
}

// checkMountPoint returns an error if dir is not in a bpffs and contains files, which a mount would hide.
func checkMountPoint(dir string) error {
	if bpf.IsBPFFS(dir) {
		return nil
	}
	if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
		return fault.Usage(fmt.Errorf("%s is not in a bpffs and not empty, so the agent cannot mount a bpffs there", dir),
			"give --pins a directory in a bpffs, as in /sys/fs/bpf/sockeye")
	}
	return nil
}

// startRecord is the content of statedir.AgentFile.
type startRecord struct {
	Starts int                     `json:"starts"`
	Room   sockmetrics.Calibration `json:"room"`
}

// recordStart increments the agent's start counter in the state directory, and calibrates the room estimator unless
// the directory has the calibration of the running kernel.
func (a *Agent) recordStart() error {
	path := filepath.Join(a.options.StateDir, statedir.AgentFile)
	var record startRecord
	if data, err := os.ReadFile(path); err == nil {
		// A damaged file resets the counter and does not stop the agent.
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

// startDomains applies the first policy of this process. A listener for metrics or the web page that fails is logged:
// steering works without them.
func (a *Agent) startDomains(first *startPolicy) error {
	for _, d := range a.domains {
		if err := d.Start(first.policy); err != nil {
			return err
		}
	}
	metrics, err := a.serveMetrics(first.policy.Metrics.Listen)
	if err != nil {
		a.log.Error("metrics are not served", "error", err, "hint", fault.Hint(err))
		metrics = &metricsServer{}
	}
	a.startExport(first.policy)
	page, failed := a.openPage(first.policy)
	if failed != nil {
		a.log.Error("the web page is not served", "error", failed, "hint", fault.Hint(failed))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.metrics, a.metricsProblem = metrics, err
	a.setPage(page, failed)
	if err = a.setPolicy(first.loadedPolicy); errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		a.log.Error("policy not saved", "error", err) // steering must continue on a full disk
		err = nil
	}
	a.inForce.refused, a.inForce.refusedText = first.refused, first.refusedText
	return err
}

// Plan returns what Apply would change. Plan changes nothing.
func (a *Agent) Plan(c api.Candidate) (*api.Plan, error) {
	a.applying.Lock()
	defer a.applying.Unlock()
	candidate, err := a.readCandidate(c)
	if err != nil {
		return nil, err
	}
	if _, err := ui.ReadSettings(candidate.policy.UI); err != nil {
		return nil, err
	}
	steps, err := a.planSteps(candidate.policy)
	if err != nil {
		return nil, err
	}
	if _, err := a.newExport(candidate.policy); err != nil {
		return nil, err
	}
	return a.describe(candidate.policy, steps), nil
}

// Apply applies a policy to all domains and saves the policy as the one in force. If a step fails, the steps before it
// are rolled back, and the previous policy stays in force. What fails after the last step is returned and logged, and
// the policy stays in force.
func (a *Agent) Apply(c api.Candidate) (_ *api.Plan, err error) {
	a.applying.Lock()
	defer a.applying.Unlock()
	inForce := false
	defer func() {
		switch {
		case err != nil && inForce:
			a.log.Error("policy applied, with an error", "policy", cmp.Or(c.Path, a.options.Policy), "error", firstLine(err))
		case err != nil:
			a.log.Error("policy not applied", events.PolicyNotApplied, "policy", cmp.Or(c.Path, a.options.Policy), "error", firstLine(err))
		}
	}()
	candidate, err := a.readCandidate(c)
	if err != nil {
		return nil, err
	}
	steps, err := a.planSteps(candidate.policy)
	if err != nil {
		return nil, err
	}
	metrics, err := a.openChangedMetrics(candidate.policy)
	if err != nil {
		return nil, err
	}
	page, err := a.openPage(candidate.policy)
	if err != nil {
		metrics.close()
		return nil, err
	}
	export, err := a.newExport(candidate.policy)
	if err == nil {
		err = domain.ApplySteps(steps)
	}
	if err != nil {
		metrics.close()
		page.discard()
		return nil, err
	}
	plan := a.describe(candidate.policy, steps)
	a.logChanges(plan)
	a.replaceExport(export)
	inForce = true
	if failed := a.putInForce(candidate, metrics, page); failed != nil {
		err = fault.WithHint(fmt.Errorf("the policy is in force, but not saved: %w", failed), "sockeye apply saves it")
	}
	for _, d := range a.domains {
		err = fault.Join(err, d.Applied(candidate.policy, c, plan))
	}
	if err != nil {
		return nil, err
	}
	return plan, nil
}

// readCandidate reads and parses the policy that a request names: the previous policy, the text of the request, or the
// policy file.
func (a *Agent) readCandidate(c api.Candidate) (loadedPolicy, error) {
	switch {
	case c.Previous:
		previous, err := a.readSaved(previousFile)
		if errors.Is(err, os.ErrNotExist) && previous.text == nil {
			err = fault.Usage(errors.New("there is no previous policy"), "apply keeps the policy that it replaces")
		}
		return previous, err
	case c.Text != "" || c.Path != "":
		p, err := parsePolicy([]byte(c.Text), c.Path)
		p.path = cmp.Or(c.Path, a.options.Policy)
		return p, err
	}
	return readPolicy(a.options.Policy)
}

// planSteps returns the steps of all domains from the policy in force to another policy.
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

// describe lists the changes of steps, and those of the metrics address and of the web page.
func (a *Agent) describe(policy *config.Policy, steps []domain.Step) *api.Plan {
	plan := &api.Plan{Policy: a.options.Policy, Changes: []api.Change{}}
	for _, s := range steps {
		plan.Changes = append(plan.Changes, s.Changes...)
	}
	if a.policy.Metrics.Listen != policy.Metrics.Listen {
		plan.Changes = append(plan.Changes, api.Change{Action: "change",
			What: fmt.Sprintf("metrics: %s -> %s", format.OrNone(a.policy.Metrics.Listen), format.OrNone(policy.Metrics.Listen))})
	}
	if from, to := otlp.Describe(a.policy.Metrics.OTLP), otlp.Describe(policy.Metrics.OTLP); from != to {
		plan.Changes = append(plan.Changes, api.Change{Action: "change", What: fmt.Sprintf("metrics.otlp: %s -> %s", from, to)})
	}
	if was, is := eventsSize(a.policy), eventsSize(policy); was != is {
		plan.Changes = append(plan.Changes, api.Change{Action: "change", What: fmt.Sprintf("events.size: %d -> %d bytes", was, is)})
	}
	if a.policy.UI != policy.UI {
		plan.Changes = append(plan.Changes, api.Change{Action: "change", What: fmt.Sprintf("web page: %s -> %s", describeUI(a.policy.UI), describeUI(policy.UI))})
	}
	plan.Changes = append(plan.Changes, a.describeRetries(policy)...)
	return plan
}

// describeRetries lists what an apply of the same settings changes: listeners that could not be opened before, and files
// that have changed and are named outside of services and rules.
func (a *Agent) describeRetries(policy *config.Policy) []api.Change {
	a.mu.Lock()
	before, metrics, page := a.inForce.referenced, a.metricsProblem, a.pageProblem
	a.mu.Unlock()
	var changes []api.Change
	add := func(format string, args ...any) {
		changes = append(changes, api.Change{Action: "change", What: fmt.Sprintf(format, args...)})
	}
	if metrics != nil && a.policy.Metrics.Listen == policy.Metrics.Listen {
		add("metrics: not served -> %s", policy.Metrics.Listen)
	}
	if page != nil && a.policy.UI == policy.UI {
		add("web page: not served -> %s", describeUI(policy.UI))
	}
	for _, path := range settingsFiles(policy) {
		if mark, ok := before[path]; ok && mark != statMark(path) {
			add("contents of %s", path)
		}
	}
	return changes
}

// openChangedMetrics opens the metrics listener of a policy. The result is nil if the agent serves that address
// already.
func (a *Agent) openChangedMetrics(policy *config.Policy) (*metricsServer, error) {
	if a.policy.Metrics.Listen == policy.Metrics.Listen && a.metricsProblem == nil {
		return nil, nil
	}
	return a.serveMetrics(policy.Metrics.Listen)
}

func (a *Agent) logChanges(plan *api.Plan) {
	for _, change := range plan.Changes {
		attrs := []any{events.PolicyApplied}
		for _, one := range [][2]string{{"service", change.Service}, {"cgroup", change.Cgroup}, {"netns", change.Netns}, {"interface", change.Interface},
			{"action", change.Action}, {"what", change.What}, {"effect", change.Effect}} {
			if one[1] != "" {
				attrs = append(attrs, one[0], one[1])
			}
		}
		a.log.Info("policy applied", attrs...)
	}
}

// putInForce records an applied policy as the one in force. A non-nil metrics server replaces the current one. The error
// is that of saving the policy.
func (a *Agent) putInForce(p loadedPolicy, metrics *metricsServer, page *pageChange) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.setPage(page, nil)
	if metrics != nil {
		a.metrics.close()
		a.metrics, a.metricsProblem = metrics, nil
	}
	return a.setPolicy(p)
}

func (a *Agent) close() {
	a.host.Watch.Close()
	a.stopExport()
	for _, d := range a.domains {
		d.Close()
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.metrics != nil {
		a.metrics.close()
	}
	a.page.close()
	a.events.Close()
}

// eventsSize returns the size of the files of events by a policy, in bytes.
func eventsSize(policy *config.Policy) int64 {
	return cmp.Or(policy.Events.Size, config.DefaultEventsSize)
}

// setPolicy sets the policy in force and saves the policy. The caller holds a.mu.
func (a *Agent) setPolicy(p loadedPolicy) error {
	a.policy = p.policy
	a.events.Resize(eventsSize(p.policy))
	a.inForce = inForce{text: p.text, referenced: p.referenced, notSaved: a.savePolicy(p)}
	return a.inForce.notSaved
}

// Status returns the state of the agent and of its domains.
func (a *Agent) Status() (*api.Status, error) {
	status := &api.Status{
		Version: a.options.Version, PID: os.Getpid(), Started: a.started, Starts: a.starts, Policy: a.options.Policy,
	}
	status.PolicyProblem, status.PolicyHint = a.policyProblem()
	if problem := a.events.Stats().Problem; problem != nil {
		status.EventsProblem = firstLine(problem)
	}
	for _, d := range a.domains {
		if err := d.Status(status); err != nil {
			return nil, err
		}
	}
	return status, nil
}

// warnOfMissingCapabilities logs the capabilities that the policy needs and this process lacks.
func (a *Agent) warnOfMissingCapabilities(policy *config.Policy) {
	for _, n := range a.neededCapabilities(policy) {
		if !rights.Has(n.Capability) {
			a.log.Warn("capability missing", "capability", n.Name, "needed_for", n.For, "hint", n.DropInHint())
		}
	}
}

// neededCapabilities lists the capabilities that a policy needs beyond those of the systemd unit, without duplicates.
func (a *Agent) neededCapabilities(policy *config.Policy) []rights.Need {
	var all []rights.Need
	for _, d := range a.domains {
		all = append(all, d.Needs(policy)...)
	}
	return rights.FirstNeeds(append(all, rights.EndpointNeeds(policy)...))
}
