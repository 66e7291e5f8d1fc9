// SPDX-License-Identifier: Apache-2.0

// Package watch is the benchmark of the record of events. Devices of an empty slot send 100,000 datagrams per second, and
// the benchmark measures the CPU time of the agent and of the member of another slot, with and without these refusals.
package watch

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/internal/api"
	"sockeye/internal/chart"
	"sockeye/internal/stats"
	"sockeye/internal/testenv"
	"sockeye/lab"
	"sockeye/lab/swarm"
)

const (
	command  = "watch"
	port     = 4739
	patience = 30 * time.Second
	// devices is the number of sources.
	devices = 2000
	// served is the number of datagrams per second to the member.
	served = 2000
)

// Benchmark is the command bench watch.
var Benchmark = harness.Benchmark{
	Name: command, Run: inside, Sandboxed: true,
	Workers: map[string]func([]string) error{"watch-member": member, "watch-sender": sender},
}

type options struct {
	Quick   bool    `json:"quick"`
	Rounds  int     `json:"rounds"`
	Seconds float64 `json:"seconds_per_run"`
	Rate    float64 `json:"refusals_per_second"`
	Binary  string  `json:"-"`
}

// measurement is one run.
type measurement struct {
	Refused  uint64  `json:"refused"` // datagrams, by the counters of the service
	Summed   uint64  `json:"summed"`  // datagrams, by the events refusals; before the last summary
	Events   int     `json:"events"`  // recorded
	Sent     uint64  `json:"sent"`    // to the member
	Received uint64  `json:"received"`
	Seconds  float64 `json:"seconds"`
	Agent    float64 `json:"agent_cpu"`  // CPUs
	Member   float64 `json:"member_cpu"` // CPUs
}

// report has the measurements of both arms by round.
type report struct {
	harness.Run
	Options options       `json:"options"`
	Quiet   []measurement `json:"quiet"`
	Refused []measurement `json:"with_refusals"`
}

type bench struct {
	options
	harness.LabBench
	agent   *lab.Process
	member  *harness.Worker
	senders *lab.Namespace
	sources [2][]netip.Addr // by slot
}

func inside(args []string) error {
	o := options{}
	fs := flag.NewFlagSet(command, flag.ContinueOnError)
	fs.BoolVar(&o.Quick, "quick", false, "run for a minute, with fewer rounds")
	fs.IntVar(&o.Rounds, "rounds", 0, "number of rounds of both arms (default 5, quick 2)")
	fs.Float64Var(&o.Seconds, "seconds", 11, "time of a run, at least 11: the agent summarizes refusals every 10 seconds")
	fs.Float64Var(&o.Rate, "rate", 100_000, "refusals per second")
	fs.StringVar(&o.Binary, "sockeye", "", "the binary (default: build it)")
	if ok, err := harness.ParseFlags(fs, args); !ok {
		return err
	}
	if o.Rounds == 0 {
		o.Rounds = 5
		if o.Quick {
			o.Rounds = 2
		}
	}
	if o.Rounds < 1 || o.Seconds < 11 || o.Rate < 1 {
		return harness.Misused(fs)
	}
	return harness.InLab(func(ctx context.Context, l *lab.Lab) error {
		b := &bench{options: o}
		b.Lab = l
		return b.run(ctx)
	})
}

func (b *bench) path(name string) string { return filepath.Join(b.Lab.Dir(), name) }

func (b *bench) run(ctx context.Context) (err error) {
	r := &report{Run: harness.Begin(), Options: b.options}
	if b.Binary == "" {
		if b.Binary, err = harness.BuildSockeye(ctx, b.Lab.Dir()); err != nil {
			return err
		}
	}
	if err := b.start(ctx); err != nil {
		return err
	}
	for round := range b.Rounds {
		for _, rate := range harness.Turn([]float64{0, b.Rate}, round) {
			m, err := b.measure(ctx, rate)
			if err != nil {
				return fmt.Errorf("round %d: %w", round+1, err)
			}
			if rate == 0 {
				r.Quiet = append(r.Quiet, m)
			} else {
				r.Refused = append(r.Refused, m)
			}
			fmt.Fprint(os.Stderr, ".")
		}
	}
	fmt.Fprintln(os.Stderr)
	r.End()
	if err := testenv.Merge(cmp.Or(os.Getenv("OUT"), "."), "watch.json", map[string]any{"events_per_s_bounded": r.events()}); err != nil {
		return fmt.Errorf("write figures: %w", err)
	}
	return harness.Publish(command, r)
}

// start starts an agent, and a member in slot 1 of 2.
func (b *bench) start(ctx context.Context) error {
	collectors, err := b.Lab.Namespace("collector")
	if err != nil {
		return err
	}
	if b.senders, err = swarm.Attach(b.Lab); err != nil {
		return err
	}
	b.Lab.AtClose(func() error {
		_ = unix.Unmount(b.path("bpf"), unix.MNT_DETACH) // the error of a bpffs that was never mounted
		return nil
	})
	policy := fmt.Sprintf(`services:
  telemetry:
    slots: 2
    listeners: [{protocol: udp, address: "[::]:%d"}]
    steering: reuseport
    user: root
    cgroup: /%s
    members: [{match: {command_line: ' watch-member'}, slot: 1}]
`, port, b.Lab.CgroupPath())
	if err := os.WriteFile(b.path("policy.yaml"), []byte(policy), 0o600); err != nil {
		return fmt.Errorf("write policy: %w", err)
	}
	b.agent = collectors.Command(ctx, b.Binary, "agent", "--policy", b.path("policy.yaml"), "--state-dir", b.path("state"), "--run-dir", b.RunDir(),
		"--pins", b.path("bpf/sockeye"))
	b.agent.Name = "agent"
	if err := b.agent.Start(); err != nil {
		return err
	}
	if b.member, err = b.Worker(ctx, collectors, "member", "watch-member"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err = b.Lab.WaitFor(ctx, "the member", func() (bool, error) {
		var slots []api.SlotStatus
		return b.Ask(ctx, "/v1/slots", &slots) == nil && len(slots) == 2 && slots[1].Ready, nil
	})
	if err != nil {
		return err
	}
	query := url.Values{}
	for i := range devices {
		query.Add("address", swarm.Address(2*i).String()) // IPv4
	}
	var where []api.WhereStatus
	if err := api.NewClient(api.SocketPath(b.RunDir())).Get(ctx, "/v1/where", query, &where); err != nil {
		return err
	}
	for _, w := range where {
		b.sources[w.Slot] = append(b.sources[w.Slot], w.Address)
	}
	return nil
}

func (b *bench) measure(ctx context.Context, rate float64) (m measurement, err error) {
	w, err := b.Worker(ctx, b.senders, "senders", "watch-sender")
	if err != nil {
		return m, err
	}
	defer func() { err = errors.Join(err, w.Stop(patience)) }()
	before, err := b.count(ctx)
	if err != nil {
		return m, err
	}
	begun := time.Now()
	if err := w.Ask(order{Refused: rate, Served: served, Sources: b.sources, Time: time.Duration(b.Seconds * float64(time.Second))}, &m.Sent); err != nil {
		return m, err
	}
	m.Seconds = time.Since(begun).Seconds()
	after, err := b.count(ctx)
	if err != nil {
		return m, err
	}
	m.Refused, m.Received = after.refused-before.refused, after.received-before.received
	m.Agent, m.Member = (after.agent-before.agent).Seconds()/m.Seconds, (after.member-before.member).Seconds()/m.Seconds
	// The last refusals of a run are in the summary after it.
	if err := harness.Pause(ctx, 11*time.Second); err != nil {
		return m, err
	}
	stream, err := api.NewClient(api.SocketPath(b.RunDir())).Stream(ctx, "/v1/events", url.Values{"since": {begun.Format(time.RFC3339Nano)}})
	if err != nil {
		return m, err
	}
	defer stream.Close()
	for {
		var e api.Event
		switch err := stream.Next(&e); {
		case errors.Is(err, io.EOF):
			return m, nil
		case err != nil:
			return m, err
		}
		m.Events++
		if e.Kind == "refusals" {
			n, err := strconv.ParseUint(e.Details["packets"], 10, 64)
			if err != nil {
				return m, fmt.Errorf("read event: %w", err)
			}
			m.Summed += n
		}
	}
}

// counts are totals since the start of the agent.
type counts struct {
	refused  uint64
	received uint64
	agent    time.Duration
	member   time.Duration
}

func (b *bench) count(ctx context.Context) (c counts, err error) {
	var slots []api.SlotStatus
	if err := b.Ask(ctx, "/v1/slots", &slots); err != nil {
		return c, err
	}
	for _, s := range slots {
		for _, n := range s.Refused {
			c.refused += n
		}
	}
	if err := b.member.Ask("count", &c.received); err != nil {
		return c, err
	}
	if c.agent, err = harness.CPUTime(b.agent.Pid()); err != nil {
		return c, err
	}
	c.member, err = harness.CPUTime(b.member.Pid())
	return c, err
}

func agentCPU(m *measurement) float64  { return m.Agent }
func memberCPU(m *measurement) float64 { return m.Member }

// events is the number of events per second with refusals.
func (r *report) events() harness.Figure {
	return harness.Figure(stats.Median(values(r.Refused, func(m *measurement) float64 { return float64(m.Events) / m.Seconds })))
}

// Print implements harness.Report.
func (r *report) Print(p harness.Printf) {
	p("Devices of an empty slot send %.0f datagrams/s from %d sources, for %.0f s; %d datagrams/s go to the member of another slot\n",
		r.Options.Rate, devices, r.Options.Seconds, served)
	p("(Linux %s, %d CPUs, %d rounds in turns, median [min .. max]).\n\n", r.Kernel, r.CPUs, r.Options.Rounds)
	p("\twithout refusals\twith refusals\n")
	row := func(title, verb string, f func(*measurement) float64) {
		p("%s\t%s\t%s\n", title, harness.SpreadOf(values(r.Quiet, f)).Format(verb), harness.SpreadOf(values(r.Refused, f)).Format(verb))
	}
	row("refused datagrams per second", "%.0f", func(m *measurement) float64 { return float64(m.Refused) / m.Seconds })
	row("events per second", "%.1f", func(m *measurement) float64 { return float64(m.Events) / m.Seconds })
	row("CPU time of the agent, % of a CPU", "%.2f", func(m *measurement) float64 { return 100 * m.Agent })
	row("CPU time of the member, % of a CPU", "%.2f", func(m *measurement) float64 { return 100 * m.Member })
	lostQuiet, _ := missing(r.Quiet)
	lost, uncounted := missing(r.Refused)
	p("datagrams that the member missed\t%d\t%d\n", lostQuiet, lost)
	p("refusals that no event counts\t-\t%d\n", uncounted)
	p("\nMember with refusals / without: %s, 95 %% interval %.3f .. %.3f\n", r.ratio(), float64(r.ratio().Low), float64(r.ratio().High))
}

// Figures implements harness.Report.
func (r *report) Figures() any {
	lost, uncounted := missing(r.Refused)
	return struct {
		*report
		Agent     harness.Figure       `json:"agent_cpu_with_refusals"`
		Ratio     harness.Distribution `json:"member_cpu_ratio"`
		Events    harness.Figure       `json:"events_per_s_bounded"`
		Missed    uint64               `json:"datagrams_missed"`
		Uncounted uint64               `json:"refusals_uncounted"`
	}{r, harness.Figure(stats.Median(values(r.Refused, agentCPU))), r.ratio(), r.events(), lost, uncounted}
}

// missing returns the datagrams that the member has not received, and the refusals that no event has counted.
func missing(list []measurement) (datagrams, refusals uint64) {
	for i := range list {
		datagrams += list[i].Sent - list[i].Received
		refusals += list[i].Refused - min(list[i].Summed, list[i].Refused)
	}
	return datagrams, refusals
}

// ratio is the member's CPU time with refusals, divided by that without.
func (r *report) ratio() harness.Distribution {
	quiet, refused := values(r.Quiet, memberCPU), values(r.Refused, memberCPU)
	ratios := make([]float64, len(quiet))
	for i := range quiet {
		ratios[i] = refused[i] / quiet[i]
	}
	return harness.DistributionOf(ratios)
}

// values returns a figure of all rounds.
func values(list []measurement, f func(*measurement) float64) []float64 {
	v := make([]float64, len(list))
	for i := range list {
		v[i] = f(&list[i])
	}
	return v
}

// Charts implements harness.Report.
func (r *report) Charts() map[string]chart.Chart { return nil }
