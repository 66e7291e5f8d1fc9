// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/domain"
	"sockeye/internal/events"
	"sockeye/internal/scope"
	"sockeye/internal/steer/keeper"
	"sockeye/internal/testenv"
)

// TestMain also runs the keeper process, which an agent starts from its own executable.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == keeper.Command {
		ctx, _ := signal.NotifyContext(context.Background(), unix.SIGTERM)
		if keeper.Run(ctx) != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	testenv.Main(m)
}

// testAgent returns an agent in this process that has no socket and keeps its capabilities.
func testAgent(t testing.TB, dir, pins string) *Agent {
	t.Helper()
	root, err := bpf.OpenRoot(pins)
	if err != nil {
		t.Fatal(err)
	}
	a := newAgent(Options{StateDir: dir, RunDir: dir, Policy: filepath.Join(dir, "policy.yaml"), Version: "1.2.3",
		Log: slog.New(slog.DiscardHandler)}, root, scope.Tree{Mount: filepath.Dir(testenv.Cgroup())})
	a.starts = 7
	a.events = events.New(filepath.Join(dir, eventsDir), config.DefaultEventsSize)
	return a
}

// stop closes an agent as a crash would: pinned programs stay attached.
func (a *Agent) stop() {
	a.close()
	a.host.Root.Close()
}

// retire removes everything that an agent has set up in the kernel.
func retire(t testing.TB, a *Agent) {
	t.Helper()
	steps, err := a.planSteps(&config.Policy{})
	if err == nil {
		err = domain.ApplySteps(steps)
	}
	if err != nil {
		t.Error(err)
	}
}

func servicesOf(t testing.TB, a *Agent) []api.ServiceStatus {
	t.Helper()
	status, err := a.Status()
	if err != nil {
		t.Fatal(err)
	}
	return status.Services
}

// begin starts an agent with the policy in text.
func (a *Agent) begin(t testing.TB, text string) {
	t.Helper()
	policy, err := parsePolicy([]byte(text), a.options.Policy)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.startDomains(&startPolicy{loadedPolicy: policy}); err != nil {
		t.Fatal(err)
	}
}
