// SPDX-License-Identifier: Apache-2.0

// Package domaintest runs domains in tests as the agent runs them, from the text of a policy.
package domaintest

import (
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/scope"
	"sockeye/internal/testenv"
)

// Policy returns the text of a policy with CGROUP replaced by the cgroup of the test. replace has pairs of old and new
// texts.
func Policy(text string, replace ...string) string {
	return strings.NewReplacer(append(replace, "CGROUP", testenv.CgroupPath())...).Replace(text)
}

// Runner runs a list of domains.
type Runner struct {
	Host    *domain.Host
	Domains []domain.Domain
	// Path is the path of the policies: relative paths in a policy are relative to its directory.
	Path string
	// Extra sends additional metrics; nil for none.
	Extra func(chan<- prometheus.Metric)
}

// New returns a runner of domains on a host.
func New(h *domain.Host, domains ...domain.Domain) *Runner {
	return &Runner{Host: h, Domains: domains, Path: filepath.Join(h.StateDir, "policy.yaml")}
}

// Host returns a host with a state directory, a pin directory, and the cgroups of this machine. The pin directory is
// locked until the test calls Runner.Stop.
func Host(t testing.TB, stateDir, pins string, log slog.Handler) *domain.Host {
	t.Helper()
	root, err := bpf.OpenRoot(pins)
	if err != nil {
		t.Fatal(err)
	}
	tree := scope.Tree{Mount: filepath.Dir(testenv.Cgroup())}
	l := slog.New(log)
	return &domain.Host{Log: l, Root: root, StateDir: stateDir, Cgroups: tree, Watch: &scope.Watch{Tree: tree, Log: l}}
}

// Start applies the first policy.
func (r *Runner) Start(t testing.TB, text string) {
	t.Helper()
	policy, err := config.Parse([]byte(text), r.Path)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range r.Domains {
		if err := d.Start(policy); err != nil {
			t.Fatal(err)
		}
	}
}

// Apply applies a policy.
func (r *Runner) Apply(text string) ([]api.Change, error) {
	policy, err := config.Parse([]byte(text), r.Path)
	if err != nil {
		return nil, err
	}
	return r.apply(policy)
}

// Status returns the state of the domains.
func (r *Runner) Status(t testing.TB) *api.Status {
	t.Helper()
	status := new(api.Status)
	for _, d := range r.Domains {
		if err := d.Status(status); err != nil {
			t.Fatal(err)
		}
	}
	return status
}

// Retire removes all programs, maps and settings of the domains from the kernel.
func (r *Runner) Retire(t testing.TB) {
	t.Helper()
	if _, err := r.apply(&config.Policy{}); err != nil {
		t.Error(err)
	}
}

func (r *Runner) apply(policy *config.Policy) ([]api.Change, error) {
	steps, changes, err := r.steps(policy)
	if err == nil {
		err = domain.ApplySteps(steps)
	}
	if err != nil {
		return nil, err
	}
	for _, d := range r.Domains {
		if err := d.Applied(policy, api.Candidate{}, &api.Plan{}); err != nil {
			return nil, err
		}
	}
	return changes, nil
}

// Plan returns the changes of a policy.
func (r *Runner) Plan(text string) ([]api.Change, error) {
	policy, err := config.Parse([]byte(text), r.Path)
	if err != nil {
		return nil, err
	}
	_, changes, err := r.steps(policy)
	return changes, err
}

func (r *Runner) steps(policy *config.Policy) (steps []domain.Step, changes []api.Change, err error) {
	for _, d := range r.Domains {
		part, err := d.Plan(policy)
		if err != nil {
			return nil, nil, err
		}
		for _, s := range part {
			changes = append(changes, s.Changes...)
		}
		steps = append(steps, part...)
	}
	return steps, changes, nil
}

// Stop closes the domains. As after a crash of the agent, pinned programs stay attached.
func (r *Runner) Stop() {
	r.Host.Watch.Close()
	for _, d := range r.Domains {
		d.Close()
	}
	r.Host.Root.Close()
}

// collector gathers the metrics of a runner.
type collector struct{ r *Runner }

func (c collector) Describe(chan<- *prometheus.Desc) {}

func (c collector) Collect(out chan<- prometheus.Metric) {
	for _, d := range c.r.Domains {
		d.Collect(out)
	}
	if c.r.Extra != nil {
		c.r.Extra(out)
	}
}

// Serve serves the metrics on an address until the test calls stop.
func (r *Runner) Serve(t testing.TB, address string) (stop func()) {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: r.metrics(), ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(l) }()
	return func() { server.Close() }
}

// metrics answers scrapes with the metrics of the domains.
func (r *Runner) metrics() http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collector{r})
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
}

// Scrape reads the metrics from an address.
func Scrape(t testing.TB, address string) string {
	t.Helper()
	client := &http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		t.Fatalf("%s: %v\n%s", answer.Status, err, text)
	}
	return string(text)
}
