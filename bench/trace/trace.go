// SPDX-License-Identifier: Apache-2.0

// Package trace is the benchmark of tracing. It measures the cost of tracing for a load.
package trace

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/internal/cgroup"
	"sockeye/lab"
)

const command = "trace"

// Benchmark is the command bench trace.
var Benchmark = harness.Benchmark{
	Name: command, Run: insideTrace, Sandboxed: true,
	Workers: map[string]func([]string) error{role: worker},
}

type options struct {
	Quick  bool          `json:"quick"`
	For    time.Duration `json:"for_ns"`    // time in which rounds start
	Slice  time.Duration `json:"slice_ns"`  // duration of a measurement
	Warmup time.Duration `json:"warmup_ns"` // warm-up of its connection
	Seed   uint64        `json:"seed"`      // seed of the order
	Arms   string        `json:"arms,omitempty"`
	Binary string        `json:"-"`
}

// leastRounds is the minimum number of rounds.
const leastRounds = 3

// Attached programs.
const (
	traceOff = "off" // no program and no agent
	tX       = "tx"  // sent messages are traced
	rX       = "rx"  // received messages too

	// Without an agent; see bench_trace.bpf.c.
	called        = "called"
	marking       = "marking"
	fentry        = "fentry"
	fentryReading = "fentry_reading"
	kprobe        = "kprobe"
)

const (
	armOff      = "off"
	armOffAgain = "off_again"
	armOthers   = "others"
	armSampled  = "sampled_100"
	armEvery    = "every"
	armRX       = "rx"
	armOthersRX = "others_rx"
	armStamping = "so_timestamping"
	armCalled   = "called"
	armMarking  = "marking"
	armFentry   = "fentry"
	armReading  = "fentry_reading"
	armKprobe   = "kprobe"

	tracedGroup  = "traced"  // cgroup with rules
	outsideGroup = "outside" // cgroup without rules

	plainPort   = 5100
	sampledPort = 5101 // port of the load with 1/100 traced messages
)

// traceArm runs the loads in one of the two cgroups, with the programs of a state attached.
type traceArm struct {
	name, title string
	state       string
	traced      bool
	port        int     // port of the server
	stamped     bool    // the application requests timestamps
	aim         float64 // minimum ratio of the throughput; 0 for none
	rrAim       float64 // of the requests
}

var traceArms = []traceArm{
	{name: armOff, title: "off", state: traceOff, port: plainPort},
	{name: armOffAgain, title: "off, again", state: traceOff, port: plainPort},
	{name: armOthers, title: "on for others", state: tX, port: plainPort, aim: 1},
	{name: armSampled, title: "1/100 messages", state: tX, traced: true, port: sampledPort, aim: 0.99, rrAim: 0.98},
	{name: armEvery, title: "every message", state: tX, traced: true, port: plainPort, aim: 0.97, rrAim: 0.93},
	{name: armRX, title: "1/100, and received", state: rX, traced: true, port: plainPort},
	{name: armOthersRX, title: "on for others, and received", state: rX, port: plainPort},
	{name: armStamping, title: "SO_TIMESTAMPING", state: traceOff, port: plainPort, stamped: true},
	{name: armCalled, title: "empty program, called", state: called, traced: true, port: plainPort},
	{name: armMarking, title: "empty program, marks all", state: marking, traced: true, port: plainPort},
	{name: armFentry, title: "fentry, empty", state: fentry, port: plainPort},
	{name: armReading, title: "fentry, reads addresses", state: fentryReading, port: plainPort},
	{name: armKprobe, title: "kprobes, a histogram", state: kprobe, port: plainPort},
}

// visits contains the states of a round with their arms. The two arms without a program run far apart in time, so that
// their ratio includes all changes during a round.
var visits = [][]string{
	{armOff},
	{armOffAgain, armStamping},
	{armOthers, armSampled, armEvery},
	{armRX, armOthersRX},
	{armCalled},
	{armMarking},
	{armFentry},
	{armReading},
	{armKprobe},
}

const (
	loadStream = "stream"
	loadRR     = "rr"
)

// traceLoad is one connection between two namespaces.
type traceLoad struct {
	name    string
	message int // bytes
	answers bool
}

var traceLoads = []traceLoad{
	{name: loadStream, message: 64 << 10},
	{name: loadRR, message: 1 << 10, answers: true},
}

// sample is one measurement.
type sample struct {
	Rate  float64 `json:"per_second"` // messages or requests per second
	CPU   float64 `json:"cpu_us"`     // per message or request, both ends together
	Share float64 `json:"share"`      // CPU time of both ends by elapsed time
	Agent float64 `json:"agent"`      // CPU time of the agent by elapsed time
}

// traceRound contains a sample for each arm and load.
type traceRound map[string]map[string]sample

type bench struct {
	options
	harness.LabBench

	cpu            int // CPU reserved for the loads
	client, server *harness.Worker
	workers        []int // processes of a load, and ksoftirqd

	state string
	agent *lab.Process
	// others are the links of the programs of a state without an agent, and left the states whose programs this kernel
	// does not run, with the reason.
	others []link.Link
	left   map[string]string
}

func insideTrace(args []string) (err error) {
	var o options
	fs := flag.NewFlagSet(command, flag.ContinueOnError)
	fs.BoolVar(&o.Quick, "quick", false, "run for one minute instead of six, with wider confidence intervals")
	fs.DurationVar(&o.For, "for", 0, "time in which new rounds start (default 5m, quick 40s)")
	fs.DurationVar(&o.Slice, "slice", 200*time.Millisecond, "measured time per arm and load in a round")
	fs.DurationVar(&o.Warmup, "warmup", 40*time.Millisecond, "warm-up of each connection before it is measured")
	fs.Uint64Var(&o.Seed, "seed", uint64(time.Now().UnixNano()), "seed of the random order in which a round runs the arms")
	fs.StringVar(&o.Arms, "arms", "", "arms to run in addition to off and off_again, comma-separated (default: all)")
	fs.StringVar(&o.Binary, "sockeye", "", "binary to measure (default: build ./cmd/sockeye)")
	if ok, err := harness.ParseFlags(fs, args); !ok {
		return err
	}
	unknown := false
	for arm := range strings.SplitSeq(o.Arms, ",") {
		unknown = unknown || arm != "" && !slices.ContainsFunc(traceArms, func(a traceArm) bool { return a.name == arm })
	}
	if unknown || o.Slice < tracePieces*time.Millisecond || o.Warmup < 0 || o.For < 0 {
		return harness.Misused(fs)
	}
	if o.For == 0 {
		o.For = 5 * time.Minute
		if o.Quick {
			o.For = 40 * time.Second
		}
	}
	t := &bench{options: o, state: traceOff}
	if err := t.share(); err != nil {
		return err
	}
	return harness.InLab(func(ctx context.Context, l *lab.Lab) error {
		t.Lab = l
		return t.run(ctx)
	})
}

// share reserves a CPU for the loads. This process and its children use the other CPUs, unless they bind themselves to
// the reserved one.
func (t *bench) share() error {
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return fmt.Errorf("find own CPUs: %w", err)
	}
	var cpus []int
	for cpu := range len(all) * 64 {
		if all.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	t.cpu = cpus[len(cpus)-1]
	if len(cpus) == 1 {
		return nil
	}
	all.Clear(t.cpu)
	threads, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return fmt.Errorf("leave CPU %d: %w", t.cpu, err)
	}
	for _, thread := range threads {
		id, _ := strconv.Atoi(thread.Name())
		if err := unix.SchedSetaffinity(id, &all); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("leave CPU %d: %w", t.cpu, err)
		}
	}
	return nil
}

func (t *bench) run(ctx context.Context) error {
	r := &report{Options: t.options, Run: harness.Begin()}
	var err error
	agents := slices.ContainsFunc(traceArms, func(a traceArm) bool { return (a.state == tX || a.state == rX) && t.includes(a) })
	if t.Binary == "" && agents {
		if t.Binary, err = harness.BuildSockeye(ctx, t.Lab.Dir()); err != nil {
			return err
		}
	}
	if err := t.prepare(ctx); err != nil {
		return err
	}
	t.left, r.left = map[string]string{}, map[string]string{}
	for _, a := range traceArms {
		if others[a.state] == nil || !t.includes(a) {
			continue
		}
		if why := t.forbidden(a.state); why != "" {
			t.left[a.state], r.left[a.name] = why, why
		}
	}
	for _, state := range []string{tX, rX} {
		if !slices.ContainsFunc(traceArms, func(a traceArm) bool { return a.state == state && t.includes(a) }) {
			continue
		}
		programs, rules, err := t.tracing(ctx, state)
		if err != nil {
			return err
		}
		r.programs, r.rules = append(r.programs, programs...), append(r.rules, rules...)
	}
	random := rand.New(rand.NewPCG(t.Seed, 0))
	fmt.Fprint(os.Stderr, "rounds: ")
	for begun := time.Now(); len(r.rounds) < leastRounds || time.Since(begun) < t.For; {
		round, err := t.round(ctx, random)
		if err != nil {
			return err
		}
		r.rounds = append(r.rounds, round)
		fmt.Fprint(os.Stderr, ".")
	}
	fmt.Fprintln(os.Stderr)
	if err := t.attach(ctx, traceOff); err != nil {
		return err
	}
	r.End()
	return harness.Publish(command, r)
}

// prepare creates cgroups, namespaces and workers.
func (t *bench) prepare(ctx context.Context) error {
	for _, cgroup := range []string{tracedGroup, outsideGroup} {
		if _, err := t.Group(cgroup); err != nil {
			return err
		}
	}
	t.Lab.AtClose(func() error {
		if err := unix.Unmount(t.bpffs(), unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", t.bpffs(), err)
		}
		return nil
	})
	hosts, err := connectedHosts(t.Lab)
	if err != nil {
		return err
	}
	if t.client, err = t.Worker(ctx, hosts[0], outsideGroup, role); err != nil {
		return err
	}
	if t.server, err = t.Worker(ctx, hosts[1], outsideGroup, role); err != nil {
		return err
	}
	t.workers = append(harness.SoftirqThread(t.cpu), t.client.Pid(), t.server.Pid())
	return nil
}

// round runs all arms with all loads, in random order.
func (t *bench) round(ctx context.Context, random *rand.Rand) (traceRound, error) {
	round := traceRound{}
	for _, v := range random.Perm(len(visits)) {
		var arms []traceArm
		for _, a := range traceArms {
			if slices.Contains(visits[v], a.name) && t.includes(a) && t.left[a.state] == "" {
				arms = append(arms, a)
			}
		}
		if len(arms) == 0 {
			continue
		}
		if err := t.attach(ctx, arms[0].state); err != nil {
			return nil, err
		}
		for _, i := range random.Perm(len(arms) * len(traceLoads)) {
			a, l := arms[i%len(arms)], traceLoads[i/len(arms)]
			s, err := t.slice(ctx, a, l)
			if err != nil {
				return nil, fmt.Errorf("%s, %s: %w", l.name, a.name, err)
			}
			if round[a.name] == nil {
				round[a.name] = map[string]sample{}
			}
			round[a.name][l.name] = s
		}
	}
	return round, nil
}

// includes reports whether an arm is run.
func (o *options) includes(a traceArm) bool {
	return o.Arms == "" || a.name == armOff || a.name == armOffAgain || slices.Contains(strings.Split(o.Arms, ","), a.name)
}

// slice runs a load once. Its figures are medians of the pieces.
func (t *bench) slice(ctx context.Context, a traceArm, l traceLoad) (s sample, err error) {
	agent, start := t.agentCPU(), time.Now()
	pieces, err := t.drive(ctx, a, l, t.Warmup)
	if err != nil {
		return s, err
	}
	s.Agent = (t.agentCPU() - agent).Seconds() / time.Since(start).Seconds()
	var rates, cpus, shares []float64
	var messages, stamps int64
	for _, p := range pieces {
		elapsed := p.Elapsed.Seconds()
		rates = append(rates, float64(p.Messages)/elapsed)
		cpus = append(cpus, p.CPU.Seconds()*1e6/float64(p.Messages))
		shares = append(shares, p.CPU.Seconds()/elapsed)
		messages += p.Messages
		stamps += p.Stamps
	}
	if a.stamped && stamps < messages {
		return s, fmt.Errorf("the application received %d timestamps for %d messages", stamps, messages)
	}
	s.Rate, s.CPU, s.Share = harness.SpreadOf(rates).Median, harness.SpreadOf(cpus).Median, harness.SpreadOf(shares).Median
	return s, nil
}

// drive moves the ends to the cgroup of an arm and runs a load.
func (t *bench) drive(ctx context.Context, a traceArm, l traceLoad, warmup time.Duration) (pieces []piece, err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	group := outsideGroup
	if a.traced {
		group = tracedGroup
	}
	for _, w := range []*harness.Worker{t.client, t.server} {
		if err := cgroup.Move(filepath.Join(t.Lab.Cgroup(), group), w.Pid()); err != nil {
			return nil, fmt.Errorf("move an end to cgroup %s: %w", group, err)
		}
	}
	address := netip.AddrPortFrom(traceHost(1), uint16(a.port))
	task := traceTask{CPU: t.cpu, Listen: address, Message: l.message, Answers: l.answers, Stamped: a.stamped}
	if err := t.server.Ask(task, &struct{}{}); err != nil {
		return nil, err
	}
	task.Listen, task.Target = netip.AddrPort{}, address
	task.Warmup, task.Duration, task.PIDs = warmup, t.Slice, t.workers
	if err := t.client.Ask(task, &pieces); err != nil {
		return nil, err
	}
	for _, p := range pieces {
		if p.Messages == 0 {
			return nil, fmt.Errorf("no message was transferred in %v", p.Elapsed)
		}
	}
	return pieces, t.server.Answer(&struct{}{})
}
