// SPDX-License-Identifier: Apache-2.0

// Package agent is the one long-lived process of Sockeye. It keeps the host
// as the policy says, and answers those who ask. Packets do not need it.
package agent

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf/rlimit"
	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/member"
	"sockeye/internal/owned"
	"sockeye/internal/steer"
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

// SocketPath is where the agent of a run directory listens.
func SocketPath(runDir string) string { return filepath.Join(runDir, "agent.sock") }

// Agent is a running agent.
type Agent struct {
	options Options
	log     *slog.Logger
	host    *host
	started time.Time
	starts  int

	applying sync.Mutex // one Apply at a time; taken before mu
	mu       sync.Mutex // held while the policy changes
	policy   *config.Policy
	// metricsProblem is why there is no endpoint although the policy names one.
	metricsProblem error
	inForce        inForce
	services       map[string]*service
	tuners         map[string]*tuner  // by cgroup
	tracers        map[string]*tracer // likewise
	history        *traceHistory      // nil while nothing is traced
	watch          *folderWatch       // nil while nothing is tuned or traced
	sizers         map[string]*sizer  // by network namespace
	records        *sizing.Store      // of sizes that were set
	networks       *networkWatch      // nil while no sizes are set
	metrics        *metricsServer
	sockets        socketMetrics
}

// Run is an agent's life: it returns when ctx ends. Steering goes on.
func Run(ctx context.Context, o Options) (err error) {
	if missing, err := missingCapabilities(); err != nil {
		return err
	} else if len(missing) > 0 {
		return &Error{Err: fmt.Errorf("start agent: missing %s", strings.Join(missing, ", ")),
			Hint: "run as root, or give these capabilities to the service", Code: CodeNotPermitted}
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
	cgroups, err := CgroupMount()
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
	a := &Agent{
		options: o, log: o.Log, started: time.Now(),
		host:     &host{root: root, stateDir: o.StateDir, cgroups: cgroups, systemd: findServiceManager()},
		policy:   &config.Policy{},
		services: make(map[string]*service),
		tuners:   make(map[string]*tuner),
		tracers:  make(map[string]*tracer),
	}
	defer a.close()
	a.host.reserve.fill()
	if err := a.countStart(); err != nil {
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
	a.warnOfRights(policy)
	if inOwnPIDs() && len(policy.Services) > 0 {
		a.log.Warn("the agent is in " + ownPIDs)
	}
	server, err := a.listen()
	if err != nil {
		return err
	}
	defer server.close()
	if err := a.start(policy, first.text); err != nil {
		return err
	}
	a.mu.Lock()
	a.inForce.refused, a.inForce.refusedText = first.refused, first.refusedText
	a.mu.Unlock()
	var extra []uintptr
	for _, r := range rights {
		if r.needed(policy) != "" {
			extra = append(extra, r.capability)
		}
	}
	if err := dropCapabilities(extra...); err != nil {
		return err
	}
	reload := make(chan os.Signal, 1)
	signal.Notify(reload, unix.SIGHUP)
	defer signal.Stop(reload)
	failed := server.serve()
	if _, err := daemon.SdNotify(false, daemon.SdNotifyReady); err != nil {
		a.log.Warn("service manager not notified", "error", err)
	}
	a.log.Info("agent started", "version", o.Version, "policy", o.Policy, "services", len(a.services), "tuned", len(a.tuners), "traced", len(a.tracers), "bigtcp", len(policy.BigTCP))
	for {
		select {
		case <-ctx.Done():
			a.log.Info("agent stops, what it has set up goes on")
			return nil
		case err := <-failed:
			return err
		case <-reload:
			if _, err := a.Apply(Candidate{}); err != nil {
				a.log.Error("policy not applied", "policy", o.Policy, "error", firstLine(err))
			}
		}
	}
}

func readPolicy(path string) (*config.Policy, []byte, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, Unreadable(fmt.Errorf("read policy file: %w", err), "write one (sockeye check FILE tells whether it is right), or name it with --policy of the agent")
	}
	policy, err := config.Parse(text, path)
	return policy, text, err
}

// checkMountPoint refuses to hide files under a bpffs.
func checkMountPoint(dir string) error {
	if isBPFFS(dir) {
		return nil
	}
	if entries, err := os.ReadDir(dir); err == nil && len(entries) > 0 {
		return Usage(fmt.Errorf("%s is not in a bpffs and not empty, so none can be mounted there", dir),
			"give --pins a directory in a bpffs, as in /sys/fs/bpf/sockeye")
	}
	return nil
}

// CgroupMount finds where cgroup v2 is mounted.
func CgroupMount() (string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("find cgroup v2: %w", err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// ... root mountpoint options ... - type source options (proc(5))
		fields := strings.Fields(lines.Text())
		if i := slices.Index(fields, "-"); i > 5 && i+1 < len(fields) && fields[i+1] == "cgroup2" {
			return fields[4], nil
		}
	}
	if err := lines.Err(); err != nil {
		return "", fmt.Errorf("find cgroup v2: %w", err)
	}
	return "", &Error{Err: errors.New("find cgroup v2: it is not mounted"),
		Hint: "mount -t cgroup2 none /sys/fs/cgroup/unified", Code: CodeUnsupported}
}

// agentFile is in every agent's state directory.
const agentFile = ".agent.json"

// countStart keeps the number of the agent's starts, and what was measured of the kernel,
// for metrics.
func (a *Agent) countStart() error {
	path := filepath.Join(a.options.StateDir, agentFile)
	var record struct {
		Starts int            `json:"starts"`
		Room   calibratedRoom `json:"room"`
	}
	if data, err := os.ReadFile(path); err == nil {
		// A damaged count starts again: it is no reason not to run.
		_ = json.Unmarshal(data, &record)
	}
	record.Starts++
	a.starts = record.Starts
	a.sockets.calibrate(a.log, &record.Room)
	data, err := json.Marshal(record)
	if err != nil {
		return err
	}
	return writeFile(path, append(data, '\n'))
}

// start makes the policy true for the first time in this agent's life. What
// an earlier agent left of services that are not in the policy is removed.
func (a *Agent) start(policy *config.Policy, text []byte) error {
	pinned, err := a.host.root.Services()
	if err != nil {
		return err
	}
	for _, name := range pinned {
		if !slices.ContainsFunc(policy.Services, func(c config.Service) bool { return c.Name == name }) {
			if err := a.removeLeftover(name); err != nil {
				return err
			}
		}
	}
	for _, c := range policy.Services {
		devices, err := readDevices(c)
		if err != nil {
			return ofService(c.Name, err)
		}
		if err := a.open(c, devices); err != nil {
			return err
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.startTune(policy); err != nil {
		return err
	}
	if err := a.startTrace(policy); err != nil {
		return err
	}
	if err := a.startBigTCP(policy); err != nil {
		return err
	}
	if a.metrics, err = a.serveMetrics(policy.Metrics.Listen); err != nil {
		// Steering is worth more than figures of it.
		a.log.Error("metrics are not served", "error", err, "hint", Hint(err))
		a.metrics, a.metricsProblem = &metricsServer{}, err
	}
	a.policy = policy
	return a.remember(policy, text, a.options.Policy)
}

func (a *Agent) open(c config.Service, devices *steer.DeviceMap) error {
	s, err := openService(a.host, a.log, c, devices)
	if err != nil {
		return ofService(c.Name, err)
	}
	a.services[c.Name] = s
	return nil
}

// removeLeftover ends a service that only its pins remember.
func (a *Agent) removeLeftover(name string) error {
	keepers, err := findKeepers(a.host.root.Dir, name, nil, pinnedRows(a.host.root.Dir))
	if err != nil {
		return err
	}
	for _, k := range keepers {
		for _, socket := range k.sockets {
			if err := bpf.Detach(socket.FD()); err != nil {
				a.log.Warn("program not detached", "service", name, "error", err)
			}
		}
		if err := k.end(); err != nil {
			return err
		}
	}
	a.log.Info("service removed, it is not in the policy", "service", name)
	return bpf.Remove(a.host.root.Service(name))
}

func (a *Agent) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.watch != nil {
		a.watch.close()
		a.watch = nil
	}
	if a.networks != nil {
		a.networks.close()
		a.networks = nil
	}
	for _, s := range a.sizers {
		s.close()
	}
	for _, s := range a.services {
		s.close()
	}
	for _, t := range a.tuners {
		t.close()
	}
	if a.history != nil {
		a.history.close()
		a.history = nil
	}
	for _, t := range a.tracers {
		t.close()
	}
	if a.metrics != nil {
		a.metrics.close()
	}
}

// candidate finds the policy that a request is about, whose users the host has.
func (a *Agent) candidate(c Candidate) (*config.Policy, []byte, error) {
	policy, text, err := a.read(c)
	if err == nil {
		err = member.CheckUsers(policy)
	}
	return policy, text, err
}

func (a *Agent) read(c Candidate) (*config.Policy, []byte, error) {
	switch {
	case c.Previous:
		policy, text, err := a.saved(previousFile)
		if errors.Is(err, os.ErrNotExist) && text == nil {
			return nil, nil, Usage(errors.New("there is no previous policy"), "apply keeps the policy that it replaces")
		}
		return policy, text, err
	case c.Text != "" || c.Path != "":
		policy, err := config.Parse([]byte(c.Text), c.Path)
		return policy, []byte(c.Text), err
	}
	return readPolicy(a.options.Policy)
}

// step is a change of one service, where target is nil for one that is added
// or removed, or of one cgroup's tuning or tracing, or of the sizes in one network
// namespace.
type step struct {
	name    string
	config  *config.Service
	devices *steer.DeviceMap // of a service that is added
	target  *target
	tune    *tuneChange
	trace   *traceChange
	bigtcp  *bigTCPChange
}

// readDeviceMaps reads the device maps of a policy, by service. The agent's lock is not held: a large one
// takes seconds.
func readDeviceMaps(policy *config.Policy) (map[string]*steer.DeviceMap, error) {
	all := make(map[string]*steer.DeviceMap)
	for _, c := range policy.Services {
		devices, err := readDevices(c)
		if err != nil {
			return nil, ofService(c.Name, err)
		}
		all[c.Name] = devices
	}
	return all, nil
}

// buildDeviceMaps makes those that are to change for the kernel, without the agent's lock. The caller
// closes them.
func (a *Agent) buildDeviceMaps(policy *config.Policy, devices map[string]*steer.DeviceMap) (all map[string]builtDevices, err error) {
	all = make(map[string]builtDevices)
	for _, c := range policy.Services {
		a.mu.Lock()
		s := a.services[c.Name]
		a.mu.Unlock()
		if s == nil {
			continue
		}
		built, err := s.build(c, devices[c.Name])
		if err != nil {
			closeBuilt(all)
			return nil, ofService(c.Name, err)
		}
		all[c.Name] = built
	}
	return all, nil
}

func closeBuilt(all map[string]builtDevices) {
	for _, b := range all {
		b.close()
	}
}

func (a *Agent) prepare(policy *config.Policy, devices map[string]*steer.DeviceMap) ([]step, []Change, error) {
	changes := []Change{}
	var steps []step
	for _, name := range slices.Sorted(maps.Keys(a.services)) {
		if !slices.ContainsFunc(policy.Services, func(c config.Service) bool { return c.Name == name }) {
			steps = append(steps, step{name: name})
			changes = append(changes, Change{Service: name, Action: "remove", What: "service", Effect: "the kernel's hash decides from then on"})
		}
	}
	for _, c := range policy.Services {
		s := a.services[c.Name]
		fresh := s == nil
		if fresh {
			s = &service{host: a.host}
		}
		t, err := s.prepare(c, devices[c.Name])
		if err != nil {
			return nil, nil, ofService(c.Name, err)
		}
		if fresh {
			steps = append(steps, step{name: c.Name, config: &c, devices: devices[c.Name]})
			changes = append(changes, Change{Service: c.Name, Action: "add", What: "service"})
			continue
		}
		if diff := s.plan(t); len(diff) > 0 {
			steps = append(steps, step{name: c.Name, config: &c, target: t})
			changes = append(changes, diff...)
		}
	}
	tunings, tuned, err := a.prepareTune(policy)
	if err != nil {
		return nil, nil, err
	}
	for _, c := range tunings {
		steps = append(steps, step{tune: &c})
	}
	changes = append(changes, tuned...)
	tracings, traced, err := a.prepareTrace(policy)
	if err != nil {
		return nil, nil, err
	}
	for _, c := range tracings {
		steps = append(steps, step{trace: &c})
	}
	changes = append(changes, traced...)
	sizings, sized, err := a.prepareBigTCP(policy)
	if err != nil {
		return nil, nil, err
	}
	for _, c := range sizings {
		steps = append(steps, step{bigtcp: &c})
	}
	changes = append(changes, sized...)
	if a.policy.Metrics != policy.Metrics {
		changes = append(changes, Change{Action: "change",
			What: fmt.Sprintf("metrics: %s -> %s", orNone(a.policy.Metrics.Listen), orNone(policy.Metrics.Listen))})
	}
	return steps, changes, nil
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// Plan says what Apply would change.
func (a *Agent) Plan(c Candidate) (*Plan, error) {
	policy, _, err := a.candidate(c)
	if err != nil {
		return nil, err
	}
	devices, err := readDeviceMaps(policy)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	_, changes, err := a.prepare(policy, devices)
	if err != nil {
		return nil, err
	}
	return &Plan{Policy: a.options.Policy, Changes: changes}, nil
}

// Apply makes a policy true. If a step fails, those before it are taken back.
func (a *Agent) Apply(c Candidate) (*Plan, error) {
	a.applying.Lock()
	defer a.applying.Unlock()
	policy, text, err := a.candidate(c)
	if err != nil {
		return nil, err
	}
	devices, err := readDeviceMaps(policy)
	if err != nil {
		return nil, err
	}
	for _, c := range policy.Services {
		if c.SlotsAs == "" {
			continue
		}
		if _, err := a.host.nonce(c.SlotsAs); err != nil {
			return nil, ofService(c.SlotsAs, err)
		}
	}
	built, err := a.buildDeviceMaps(policy, devices)
	if err != nil {
		return nil, err
	}
	defer closeBuilt(built)
	a.mu.Lock()
	defer a.mu.Unlock()
	steps, changes, err := a.prepare(policy, devices)
	if err != nil {
		return nil, err
	}
	for _, step := range steps {
		if step.target != nil {
			step.target.built = built[step.name]
		}
	}
	metrics := a.metrics
	if a.policy.Metrics != policy.Metrics || a.metricsProblem != nil {
		if metrics, err = a.serveMetrics(policy.Metrics.Listen); err != nil {
			return nil, err
		}
	}
	var undo []func() error
	for _, step := range steps {
		back, err := a.take(step)
		if err == nil {
			undo = append(undo, back)
			continue
		}
		if metrics != a.metrics {
			metrics.close()
		}
		for _, back := range slices.Backward(undo) {
			if failed := back(); failed != nil {
				err = joined(err, fmt.Errorf("go back to the policy before: %w", failed))
			}
		}
		a.watchCgroups()
		a.watchNetworks()
		return nil, err
	}
	if metrics != a.metrics {
		a.metrics.close()
		a.metrics, a.metricsProblem = metrics, nil
	}
	a.policy = policy
	for _, s := range a.services {
		s.mu.Lock()
		s.scanOnce() // also for what no event has told of
		s.mu.Unlock()
	}
	for _, change := range changes {
		a.log.Info("policy applied", "service", change.Service, "cgroup", change.Cgroup, "netns", change.Netns, "interface", change.Interface, "action", change.Action, "what", change.What, "effect", change.Effect)
	}
	plan := &Plan{Policy: a.options.Policy, Changes: changes}
	from := cmp.Or(c.Path, a.options.Policy)
	if c.Previous {
		from = a.from(previousFile)
	}
	if err := a.remember(policy, text, from); err != nil {
		return nil, err
	}
	if c.Live {
		plan.Live, err = a.applyLive()
	}
	return plan, err
}

// take carries a step out, and returns what takes it back. A step that fails
// leaves its service as it was.
func (a *Agent) take(step step) (back func() error, err error) {
	if step.tune != nil {
		return a.takeTune(*step.tune)
	}
	if step.trace != nil {
		return a.takeTrace(*step.trace)
	}
	if step.bigtcp != nil {
		return a.takeBigTCP(*step.bigtcp)
	}
	switch s := a.services[step.name]; {
	case step.config == nil:
		before := s.now()
		back = func() error { return a.open(before.config, before.mapping.Devices) }
		delete(a.services, step.name)
		if err := s.retire(); err != nil {
			return nil, ofService(step.name, joined(err, back()))
		}
	case s == nil:
		back = func() error {
			s := a.services[step.name]
			delete(a.services, step.name)
			return s.retire()
		}
		if err := a.open(*step.config, step.devices); err != nil {
			return nil, err
		}
	default:
		before := s.now()
		back = func() error { return s.apply(before) }
		if err := s.apply(step.target); err != nil {
			return nil, ofService(step.name, err)
		}
	}
	return back, nil
}

func ofService(name string, err error) error {
	return &Error{Err: fmt.Errorf("service %s: %w", name, err), Hint: Hint(err), Code: Code(err)}
}

// service finds a service by name; where there is only one the name may be
// left out.
func (a *Agent) service(name string) (*service, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if name == "" && len(a.services) == 1 {
		for _, s := range a.services {
			return s, nil
		}
	}
	if s := a.services[name]; s != nil {
		return s, nil
	}
	known := make([]string, 0, len(a.services))
	for name := range a.services {
		known = append(known, name)
	}
	slices.Sort(known)
	hint := "the policy has " + strings.Join(known, ", ")
	if near := config.Nearest(name, known); near != "" {
		hint = "did you mean " + near + "?"
	}
	if name == "" {
		return nil, Usage(errors.New("which service?"), "name one with --service; "+hint)
	}
	return nil, Usage(fmt.Errorf("there is no service %q", name), hint)
}

// selected returns the named service, or all, by name.
func (a *Agent) selected(name string) ([]*service, error) {
	if name != "" {
		s, err := a.service(name)
		return []*service{s}, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var all []*service
	for _, c := range a.policy.Services {
		if s := a.services[c.Name]; s != nil {
			all = append(all, s)
		}
	}
	return all, nil
}

// Status is the agent and its services.
func (a *Agent) Status() (*Status, error) {
	services, err := a.selected("")
	if err != nil {
		return nil, err
	}
	status := &Status{
		Version: a.options.Version, PID: os.Getpid(), Started: a.started, Starts: a.starts,
		Policy: a.options.Policy, Services: []ServiceStatus{}, Tune: []TunedCgroup{}, Trace: []TracedCgroup{}, BigTCP: []BigTCPNetwork{},
	}
	status.PolicyProblem, status.PolicyHint = a.policyProblem()
	for _, s := range services {
		status.Services = append(status.Services, s.status())
	}
	tuners, err := a.tunersOf("")
	if err != nil {
		return nil, err
	}
	for _, t := range tuners {
		status.Tune = append(status.Tune, t.summary())
	}
	tracers, err := a.tracersOf("")
	if err != nil {
		return nil, err
	}
	for _, t := range tracers {
		traced, err := t.status()
		if err != nil {
			return nil, ofTraced(t.name, err)
		}
		status.Trace = append(status.Trace, traced)
	}
	for _, s := range a.allSizers() {
		status.BigTCP = append(status.BigTCP, s.summary())
	}
	return status, nil
}
