// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"time"

	"sockeye/bench/harness"
)

// Sizes of the RPCs of an incast in bytes; stream is the size of a flow that sends without answers.
const (
	large  = 1_000_000
	small  = 10_000
	stream = 0
)

// The load of the TCP-BPF paper: each sender has X flows of large RPCs, one stream and two flows of small RPCs.
const (
	streamFlows = 1
	smallFlows  = 2
)

// paperX are the X of the paper. beyondX has so many flows that their smallest windows fill the queue.
var paperX = []int{1, 2, 4, 8, 16}

const beyondX = 32

// flowsOf returns the number of flows of all senders.
func flowsOf(x int) int { return senders * (x + streamFlows + smallFlows) }

// loadOf returns the load of each sender.
func loadOf(x int) []rpcFlows {
	return []rpcFlows{{Size: large, Count: x}, {Size: stream, Count: streamFlows}, {Size: small, Count: smallFlows}}
}

// flowClasses are the classes of flows, with their names in the figures.
var flowClasses = []struct {
	size       int
	title, key string
}{{large, "1 MB", "1mb"}, {stream, "stream", "stream"}, {small, "10 KB", "10kb"}}

// incastWarmup is the time in which the connections find their windows, unless the options say otherwise. It is not
// measured.
const incastWarmup = time.Second

// Arms of the incast in addition to baseline and tuned. The application of the arm setsockopt limits windows and buffers
// itself. The routes of the arm route limit the windows. bpftune tunes the whole host, and DCTCP is a module that the host
// may not have: they are arms in a virtual machine.
const (
	byRoute   = "route"
	byApp     = "setsockopt"
	byDCTCP   = "dctcp"
	appDCTCP  = "setsockopt_dctcp"
	byBPFTune = "bpftune"
)

// incastRun is one run of one arm.
type incastRun struct {
	Arm      string               `json:"arm"`
	X        int                  `json:"x"`
	Round    int                  `json:"round"`
	Segments uint64               `json:"segments"`
	Drops    uint64               `json:"bottleneck_drops"`
	Marks    uint64               `json:"bottleneck_marks"` // packets that the bottleneck marked by ECN
	CPU      float64              `json:"cpu_share"`        // share of all CPUs
	Classes  map[string]*classRun `json:"classes"`          // by flowClasses.key
}

// classRun has the flows of one class in one run.
type classRun struct {
	Retransmits uint64  `json:"retransmits"`
	Rate        float64 `json:"rate_mbit"` // mean of the flows

	took []float64 // ms, of an RPC or of 1 MB of a stream
}

// incastArm contains the processes of an arm.
type incastArm struct {
	name    string
	options socketOptions
	target  netip.AddrPort
	clients []*harness.Worker
}

// receiveBuffer returns the SO_RCVBUF for about a window in segments of 1428 bytes: the kernel doubles it, and counts the
// memory of the packets. The factor is from the queue of the bottleneck, which X = 1 fills with the windows of all flows.
func receiveBuffer(window int) int { return window * segment * 7 / 8 }

// segment is the payload of a full segment over IPv6 with timestamps, in bytes.
const segment = 1500 - 40 - 20 - 12

func (t *bench) incast(ctx context.Context) ([]incastRun, error) {
	n, err := newIncastNet(t.Lab, t.Rate, t.Queue, len(t.Arms), t.Mark)
	if err != nil {
		return nil, err
	}
	var arms []*incastArm
	for i, name := range t.Arms {
		a := &incastArm{name: name, target: netip.AddrPortFrom(incastTarget(i), tunePort)}
		switch name {
		case byApp:
			a.options = socketOptions{SendBuffer: t.Buffers, ReceiveBuffer: receiveBuffer(t.Clamp), Window: t.Clamp * segment}
		case appDCTCP:
			a.options = socketOptions{Congestion: "dctcp"}
		case byRoute:
			if err := n.limitRoutes(i, t.Clamp); err != nil {
				return nil, err
			}
		}
		if err := t.startArm(ctx, n, a); err != nil {
			return nil, fmt.Errorf("start arm %s: %w", name, err)
		}
		arms = append(arms, a)
	}
	fmt.Fprint(os.Stderr, "incast: ")
	defer fmt.Fprintln(os.Stderr)
	var runs []incastRun
	run := func(round, x int, a *incastArm) error {
		r, err := t.incastRun(ctx, n, a, x)
		if err != nil {
			return fmt.Errorf("%d flows, %s: %w", flowsOf(x), a.name, err)
		}
		r.Round = round
		runs = append(runs, r)
		fmt.Fprint(os.Stderr, ".")
		return nil
	}
	others := slices.DeleteFunc(slices.Clone(arms), func(a *incastArm) bool { return a.name == byBPFTune })
	for round := range t.Rounds {
		for _, x := range t.X {
			for _, a := range harness.Turn(others, round) {
				if err := run(round, x, a); err != nil {
					return nil, err
				}
			}
		}
		if len(others) == len(arms) {
			continue
		}
		// bpftune tunes all namespaces, and learns from one run to the next: it runs during its own runs only.
		stop, err := t.startBPFTune(ctx)
		if err != nil {
			return nil, err
		}
		for _, x := range t.X {
			if err := run(round, x, arms[len(arms)-1]); err != nil {
				return nil, err
			}
		}
		if err := stop(); err != nil {
			return nil, err
		}
	}
	return runs, nil
}

// startArm starts the processes of an arm in its cgroup. Each sender closes one connection: the kernel applies the locked
// cwnd of a route only to destinations to which a connection was closed before.
func (t *bench) startArm(ctx context.Context, n *incastNet, a *incastArm) error {
	group, err := t.Group("incast-" + a.name)
	if err != nil {
		return err
	}
	if err := t.server(ctx, n.receiver, group, a.target.String(), a.options); err != nil {
		return err
	}
	for _, s := range n.senders {
		c, err := t.Worker(ctx, s, group, clientRole)
		if err != nil {
			return err
		}
		if err := c.Ask(task{Target: a.target.String(), Fetch: small}, new(int64)); err != nil {
			return err
		}
		a.clients = append(a.clients, c)
	}
	return nil
}

func (t *bench) incastRun(ctx context.Context, n *incastNet, a *incastArm, x int) (incastRun, error) {
	r := incastRun{Arm: a.name, X: x, Classes: map[string]*classRun{}}
	window := time.Duration(t.Seconds * float64(time.Second))
	for _, c := range a.clients {
		l := &rpcLoad{Flows: loadOf(x), Warmup: t.Warmup, Duration: window}
		if err := c.Ask(task{Target: a.target.String(), Options: a.options, Load: l}, &struct{}{}); err != nil {
			return r, err
		}
	}
	for _, c := range a.clients {
		if err := c.Send(struct{}{}); err != nil {
			return r, err
		}
	}
	if err := harness.Pause(ctx, t.Warmup); err != nil {
		return r, err
	}
	before, err := n.counts()
	if err != nil {
		return r, err
	}
	start, cpu := time.Now(), harness.MachineCPU()
	if err := harness.Pause(ctx, window); err != nil {
		return r, err
	}
	took := time.Since(start)
	r.CPU = (harness.MachineCPU() - cpu).Seconds() / took.Seconds() / float64(runtime.NumCPU())
	after, err := n.counts()
	if err != nil {
		return r, err
	}
	r.Segments, r.Drops, r.Marks = after.segments-before.segments, after.drops-before.drops, after.marks-before.marks
	var results []rpcResult
	for _, c := range a.clients {
		var some []rpcResult
		if err := c.Answer(&some); err != nil {
			return r, err
		}
		results = append(results, some...)
	}
	for _, class := range flowClasses {
		c := &classRun{}
		flows := 0
		for _, f := range results {
			if f.Size != class.size {
				continue
			}
			flows++
			c.Retransmits += f.Retransmits
			c.Rate += float64(f.Bytes) * 8 / 1e6 / window.Seconds()
			c.took = appendMilliseconds(c.took, f.Took)
		}
		c.Rate /= float64(flows)
		r.Classes[class.key] = c
	}
	return r, nil
}

func appendMilliseconds(to []float64, microseconds []int64) []float64 {
	for _, us := range microseconds {
		to = append(to, float64(us)/1000)
	}
	return to
}
