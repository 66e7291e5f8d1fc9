// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/internal/api"
	"sockeye/internal/trace/measure"
)

// policies contains the policy of each state.
var policies = map[string]string{
	tX: `trace:
  - {name: sampled_100, cgroup: %[1]s, match: {port: %[2]d}, messages: 1/100, group_by: remote/24}
  - {name: every, cgroup: %[1]s, messages: 1/1, group_by: remote/24}
`,
	rX: `trace:
  - name: rx
    cgroup: %[1]s
    messages: 1/100
    group_by: remote/24
    stages: [stack, qdisc, nic, network, rx_stack, reader]
`,
}

func tracePolicy(state, cgroup string) []byte {
	return fmt.Appendf(nil, policies[state], cgroup, sampledPort)
}

// bpffs returns the mount point of the bpffs, which the agent mounts in this process' mount namespace.
func (t *bench) bpffs() string { return filepath.Join(t.Lab.Dir(), "bpf") }

func (t *bench) pins() string { return filepath.Join(t.bpffs(), "sockeye") }

func (t *bench) agentCPU() time.Duration {
	if t.agent == nil {
		return 0
	}
	used, _ := harness.CPUTime(t.agent.Pid()) // 0 for an agent that has exited
	return used
}

// program contains the run time of a program during a load in an arm.
type program struct {
	Arm     string  `json:"arm"`
	Load    string  `json:"load"`
	Program string  `json:"program"`
	Runs    float64 `json:"runs"` // per message, or per request with its response
	NS      float64 `json:"ns"`   // per run
}

// tracedRule is the state of a trace rule, as the agent reports it.
type tracedRule struct {
	Rule      string `json:"rule"`
	Sent      uint64 `json:"sent"`      // messages chosen
	Accounted uint64 `json:"accounted"` // messages with an outcome, or in flight
	Acked     uint64 `json:"acked"`
	Received  uint64 `json:"received"` // chosen
}

// tracing runs each load once in each arm of a state with the kernel's BPF statistics enabled, whose cost is included.
// It returns an error if messages of an arm are not traced as its rule requires.
func (t *bench) tracing(ctx context.Context, state string) (programs []program, rules []tracedRule, err error) {
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, nil, fmt.Errorf("enable BPF statistics: %w", err)
	}
	defer stats.Close()
	if err := t.attach(ctx, state); err != nil {
		return nil, nil, err
	}
	var traced []string
	for _, a := range traceArms {
		if a.state != state || !t.includes(a) {
			continue
		}
		for _, l := range traceLoads {
			ran, err := t.programsOf(ctx, a, l)
			if err != nil {
				return nil, nil, fmt.Errorf("%s, %s: %w", l.name, a.name, err)
			}
			programs = append(programs, ran...)
		}
		if a.traced {
			traced = append(traced, a.name)
		}
	}
	if rules, err = t.tracedRules(ctx); err != nil {
		return nil, nil, err
	}
	for _, name := range traced {
		i := slices.IndexFunc(rules, func(r tracedRule) bool { return r.Rule == name })
		if i < 0 || rules[i].Sent == 0 {
			return nil, nil, fmt.Errorf("%s: no sent message is traced", name)
		}
		if state == rX && rules[i].Received == 0 {
			return nil, nil, fmt.Errorf("%s: no received message is traced", name)
		}
	}
	return programs, rules, nil
}

// attach attaches the programs of a state, most of them by an agent, or none.
func (t *bench) attach(ctx context.Context, state string) error {
	if t.state == state {
		return nil
	}
	if err := t.detachOthers(); err != nil {
		return err
	}
	if t.agent != nil {
		if err := t.detach(ctx); err != nil {
			return err
		}
	}
	switch state {
	case traceOff:
	case tX, rX:
		if err := t.startTracing(ctx, state); err != nil {
			return err
		}
	default:
		if err := t.attachOthers(state); err != nil {
			return err
		}
	}
	t.state = state
	return nil
}

// startTracing starts an agent and returns when all programs of a policy are attached.
func (t *bench) startTracing(ctx context.Context, state string) error {
	dir := t.Lab.Dir()
	policy := filepath.Join(dir, "policy.yaml")
	if err := os.WriteFile(policy, tracePolicy(state, "/"+t.Lab.CgroupPath()+"/"+tracedGroup), 0o600); err != nil {
		return fmt.Errorf("write policy: %w", err)
	}
	n, err := t.Lab.Namespace("agent")
	if err != nil {
		return err
	}
	p := n.Command(ctx, t.Binary, "agent", "--policy", policy, "--run-dir", t.RunDir(), "--state-dir", filepath.Join(dir, "state"), "--pins", t.pins())
	p.Name = "agent"
	if err := p.Start(); err != nil {
		return err
	}
	t.agent = p
	return t.Lab.WaitFor(ctx, "the agent's programs", func() (bool, error) {
		var s api.TraceStatus
		err := t.Ask(ctx, "/v1/trace", &s)
		if errors.Is(err, api.ErrNoAgent) || errors.Is(err, unix.ECONNRESET) { // the agent is starting, or has failed
			return false, p.Err()
		}
		if err != nil {
			return false, fmt.Errorf("%w; last lines of the agent's log:\n%s", err, p.LogTail(15))
		}
		if !s.Timestamps {
			return false, fmt.Errorf("not supported by this kernel: requires %s", s.Needs)
		}
		for _, g := range s.Cgroups {
			if g.Problem != "" {
				return false, fmt.Errorf("cgroup %s: %s", g.Cgroup, g.Problem)
			}
			if !g.Attached {
				return false, nil
			}
		}
		return len(s.Cgroups) > 0, nil
	})
}

const agentGrace = 10 * time.Second

// detach stops the agent and removes everything that it attached.
func (t *bench) detach(ctx context.Context) error {
	if err := t.agent.Stop(agentGrace); err != nil {
		return err
	}
	t.agent = nil
	n, err := t.Lab.Namespace("agent")
	if err != nil {
		return err
	}
	p := n.Command(ctx, t.Binary, "reset", "--pins", t.pins())
	p.Name = "reset"
	if err := p.Start(); err != nil {
		return err
	}
	if err := p.Wait(); err != nil {
		return fmt.Errorf("remove the agent's programs: %w\n%s", err, p.LogTail(15))
	}
	programs, err := t.attached()
	if err != nil {
		return err
	}
	for _, p := range programs {
		p.Close()
	}
	if len(programs) > 0 {
		return fmt.Errorf("%d programs are attached after reset", len(programs))
	}
	return nil
}

func (t *bench) tracedRules(ctx context.Context) (rules []tracedRule, err error) {
	var results api.TraceResults
	if err := t.Ask(ctx, "/v1/trace/results", &results); err != nil {
		return nil, err
	}
	for _, r := range results.Results {
		i := slices.IndexFunc(rules, func(x tracedRule) bool { return x.Rule == r.Group.Rule })
		if i < 0 {
			i = len(rules)
			rules = append(rules, tracedRule{Rule: r.Group.Rule})
		}
		rules[i].Sent += r.Chosen
		rules[i].Accounted += r.InFlight
		for _, n := range r.Outcomes {
			rules[i].Accounted += n
		}
		rules[i].Acked += r.Outcomes[measure.Acked]
		rules[i].Received += r.RXChosen
	}
	return rules, nil
}

func (t *bench) programsOf(ctx context.Context, a traceArm, l traceLoad) ([]program, error) {
	before, err := t.programCounts()
	if err != nil {
		return nil, err
	}
	pieces, err := t.drive(ctx, a, l, 0)
	if err != nil {
		return nil, err
	}
	messages := 0.0
	for _, p := range pieces {
		messages += float64(p.Messages)
	}
	after, err := t.programCounts()
	if err != nil {
		return nil, err
	}
	ran := []program{}
	for _, name := range slices.Sorted(maps.Keys(after)) {
		runs, took := after[name].runs-before[name].runs, after[name].took-before[name].took
		if runs > 0 {
			ran = append(ran, program{a.name, l.name, name, float64(runs) / messages, float64(took) / float64(runs)})
		}
	}
	return ran, nil
}

type programCount struct {
	runs uint64
	took time.Duration
}

// programCounts returns the sums over the programs with the same name, one per cgroup.
func (t *bench) programCounts() (map[string]programCount, error) {
	programs, err := t.attached()
	if err != nil {
		return nil, err
	}
	counts := map[string]programCount{}
	for _, p := range programs {
		defer p.Close()
		info, err := p.Info()
		if err != nil {
			return nil, fmt.Errorf("read program: %w", err)
		}
		s, err := p.Stats()
		if err != nil {
			return nil, fmt.Errorf("read statistics of program %s: %w", info.Name, err)
		}
		c := counts[info.Name]
		counts[info.Name] = programCount{c.runs + s.RunCount, c.took + s.Runtime}
	}
	return counts, nil
}

// attached opens the programs of the pinned links.
func (t *bench) attached() (programs []*ebpf.Program, err error) {
	err = filepath.WalkDir(t.pins(), func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || d.IsDir() {
			return err
		}
		l, err := link.LoadPinnedLink(path, nil)
		if err != nil {
			return nil // a map, or a program
		}
		defer l.Close()
		info, err := l.Info()
		if err != nil {
			return fmt.Errorf("read %s: %w", path, err)
		}
		p, err := ebpf.NewProgramFromID(info.Program)
		if err != nil {
			return fmt.Errorf("open program of %s: %w", path, err)
		}
		programs = append(programs, p)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("find attached programs: %w", err)
	}
	return programs, nil
}
