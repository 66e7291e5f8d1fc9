// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/fault"
	"sockeye/internal/scope"
	"sockeye/internal/steer/stored"
	"sockeye/internal/testenv"
)

// startService starts a domain with one service. extra are lines of the policy.
func startService(t *testing.T, steering string, extra ...string) (*Domain, *service, *config.Policy) {
	t.Helper()
	d := startDomain(t)
	policy := parse(t, oneService(steering, extra...))
	apply(t, d, policy)
	if err := d.Applied(policy, api.Candidate{}, nil); err != nil {
		t.Fatal(err)
	}
	return d, d.services["telemetry"], policy
}

// startDomain starts a domain without services.
func startDomain(t *testing.T) *Domain {
	t.Helper()
	root, err := bpf.OpenRoot(testenv.BPFFS(t) + "/sockeye")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	tree, log := scope.Tree{Mount: filepath.Dir(testenv.Cgroup())}, slog.New(slog.DiscardHandler)
	d := New(&domain.Host{Log: log, Root: root, StateDir: t.TempDir(), Cgroups: tree, Watch: &scope.Watch{Tree: tree, Log: log}})
	if err := d.Start(&config.Policy{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		apply(t, d, &config.Policy{})
		d.Close()
	})
	return d
}

// oneService returns a policy with the service telemetry, and lines that follow it.
func oneService(steering string, extra ...string) string {
	return `services:
  telemetry:
    slots: 2
    steering: ` + steering + `
    listeners: [{protocol: tcp, address: "[::]:1790"}, {protocol: udp, address: "[::]:4739"}]
    user: root
    cgroup: ` + testenv.CgroupPath() + "\n" + strings.Join(extra, "\n")
}

func parse(t *testing.T, text string) *config.Policy {
	t.Helper()
	policy, err := config.Parse([]byte(text), "policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return policy
}

// apply applies a policy, and returns the changes.
func apply(t *testing.T, d *Domain, policy *config.Policy) (changes []api.Change) {
	t.Helper()
	steps, err := d.Plan(policy)
	if err == nil {
		err = domain.ApplySteps(steps)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, step := range steps {
		changes = append(changes, step.Changes...)
	}
	return changes
}

// requests calls what the routes call, and returns the errors.
func (s *service) requests(t *testing.T) map[string]error {
	t.Helper()
	all := make(map[string]error)
	_, all["slots"] = s.slots()
	_, all["devices"] = s.devices()
	_, all["templates"] = s.rooms.TemplatesOf("")
	_, _, all["slot set"] = s.moves.ChangeSlot(1, stored.Setting{State: stored.Drain, Weight: -1}, false)
	_, _, all["move"] = s.moves.MovePin("192.0.2.1", 1, nil, false)
	_, _, all["move home"] = s.moves.RemovePins(false)
	_, all["rebalance"] = s.moves.Rebalance(t.Context(), time.Millisecond, true)
	all["moves"] = s.moves.Stop(true)
	_, all["register"] = s.addClaim(os.Getpid(), nil, "register", nil)
	all["unregister"] = s.unregister(1)
	return all
}

// A request that found a service before a policy removed it gets the error of a service that does not exist, and leaves the
// state file alone.
func TestRequestsAfterRemoval(t *testing.T) {
	for _, steering := range []string{"reuseport", "lookup"} {
		d, s, _ := startService(t, steering)
		apply(t, d, &config.Policy{})
		before, err := os.ReadFile(s.StatePath())
		if err != nil {
			t.Fatal(err)
		}
		for what, err := range s.requests(t) {
			if fault.Code(err) != fault.CodeUsage || err == nil || err.Error() != `there is no service "telemetry"` {
				t.Errorf("%s: %v", what, err)
			}
		}
		if after, err := os.ReadFile(s.StatePath()); err != nil || string(after) != string(before) {
			t.Errorf("state file: %s, before %s, %v", after, before, err)
		}
		if held := metric(t, d, "sockeye_service_ports_steered"); held != nil {
			t.Errorf("metrics of a removed service: %v", held)
		}
	}
}

// If the data path of a service cannot be replaced, status and metrics say so, commands fail, and apply opens it again.
func TestLostDataPath(t *testing.T) {
	for _, steering := range []string{"reuseport", "lookup"} {
		d, s, policy := startService(t, steering)
		if changes := apply(t, d, policy); changes != nil {
			t.Errorf("changes of an open service: %+v", changes)
		}
		for _, lost := range []string{"events", "path"} {
			s.Mu.Lock()
			s.Events.Close()
			s.Events = nil
			if lost == "path" {
				s.Path.Close()
				s.Path = nil
				s.Netns.Close()
				s.Netns = nil
			}
			s.Mu.Unlock()
			status := s.status()
			if status.PortsSteered || status.Problem != "the data path is not open" || !strings.Contains(status.Hint, "sockeye apply") || status.Notes == nil || status.Refused == nil || status.Waiting == nil {
				t.Errorf("%s, %s: status %+v", steering, lost, status)
			}
			for what, err := range s.requests(t) {
				if err == nil || err.Error() != "the data path is not open" {
					t.Errorf("%s, %s: %s: %v", steering, lost, what, err)
				}
			}
			if held := metric(t, d, "sockeye_service_ports_steered"); held == nil || *held != 0 {
				t.Errorf("%s, %s: metrics: %v", steering, lost, held)
			}
			if changes := apply(t, d, policy); len(changes) != 1 || changes[0].What != "data path" {
				t.Errorf("%s, %s: changes %+v", steering, lost, changes)
			}
			if status := s.status(); status.Problem == "the data path is not open" {
				t.Errorf("%s, %s: then %+v", steering, lost, status)
			}
			if _, err := s.slots(); err != nil {
				t.Errorf("%s, %s: then %v", steering, lost, err)
			}
			if held := metric(t, d, "sockeye_service_ports_steered"); held == nil || *held != 1 {
				t.Errorf("%s, %s: then metrics: %v", steering, lost, held)
			}
		}
		apply(t, d, &config.Policy{}) // the next service has the same ports
	}
}

// When a service moves to another network namespace, none of its sockets stays in the old one.
func TestNetnsChange(t *testing.T) {
	d, s, policy := startService(t, "reuseport")
	s.Mu.Lock()
	conn, err := s.Diag()
	s.Mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	changed := *policy
	changed.Services = slices.Clone(policy.Services)
	changed.Services[0].Netns = "/proc/self/ns/net"
	if changes := apply(t, d, &changed); len(changes) != 1 {
		t.Fatalf("%+v", changes)
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if again, err := s.Diag(); err != nil || again == conn {
		t.Errorf("sock_diag still asks the old namespace: %v", err)
	}
}

// An apply that is running when the agent exits changes nothing any more.
func TestApplyAtExit(t *testing.T) {
	d, _, policy := startService(t, "lookup")
	changed := *policy
	changed.Services = slices.Clone(policy.Services)
	changed.Services[0].Slots = 1
	for _, to := range []*config.Policy{{}, &changed} {
		steps, err := d.Plan(to)
		if err != nil || len(steps) != 1 {
			t.Fatalf("%+v, %v", steps, err)
		}
		d.Close()
		if _, err := steps[0].Apply(); err == nil || err.Error() != "the agent is stopping" {
			t.Errorf("apply: %v", err)
		}
		if services, err := d.host.Root.Services(); err != nil || len(services) != 1 {
			t.Errorf("pinned: %v, %v", services, err)
		}
		d.closed = false
		if err := d.Start(policy); err != nil { // as the next agent does
			t.Fatal(err)
		}
	}
}

// metric returns the value of a gauge of the only service, or nil.
func metric(t *testing.T, d *Domain, name string) (value *float64) {
	t.Helper()
	all := make(chan prometheus.Metric)
	go func() {
		defer close(all)
		d.Collect(all)
	}()
	for m := range all {
		var text dto.Metric
		if err := m.Write(&text); err != nil {
			t.Error(err)
		}
		if strings.Contains(m.Desc().String(), `"`+name+`"`) {
			value = new(text.GetGauge().GetValue())
		}
	}
	return value
}
