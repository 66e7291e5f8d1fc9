// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"time"

	"sockeye/bench/harness"
)

const (
	large = 1_000_000 // size of a large RPC in bytes
	small = 10_000
)

var incastFlows = []int{1, 2, 4, 8, 16} // numbers of flows with large RPCs

// incastWarmup is the time in which the connections find their windows. It is not measured.
const incastWarmup = time.Second

// incastRun is one run of one arm.
type incastRun struct {
	Arm         string  `json:"arm"`
	X           int     `json:"x"`
	Round       int     `json:"round"`
	Retransmits uint64  `json:"retransmits"`
	Segments    uint64  `json:"segments"`
	Drops       uint64  `json:"bottleneck_drops"`
	Rate        float64 `json:"rate_1mb_mbit"` // mean of the X flows
	SmallRate   float64 `json:"rpc_10kb_per_second"`
	StreamRate  float64 `json:"rate_stream_mbit"`
	CPU         float64 `json:"cpu_share"` // share of all CPUs

	large, small []float64 // ms
}

// incastArm contains the sender processes of an arm.
type incastArm struct {
	name    string
	target  netip.AddrPort
	clients []*harness.Worker
}

func (t *bench) incast(ctx context.Context) ([]incastRun, error) {
	n, err := newIncastNet(t.Lab, t.Rate, t.Queue)
	if err != nil {
		return nil, err
	}
	var arms []*incastArm
	for i, name := range []string{baseline, tuned} {
		a := &incastArm{name: name, target: netip.AddrPortFrom(incastHost(senders), tunePort+uint16(i))}
		group, err := t.Group("incast-" + name)
		if err != nil {
			return nil, err
		}
		if err := t.server(ctx, n.receiver, group, a.target.String()); err != nil {
			return nil, err
		}
		for _, s := range n.senders {
			c, err := t.Worker(ctx, s, group, clientRole)
			if err != nil {
				return nil, err
			}
			a.clients = append(a.clients, c)
		}
		arms = append(arms, a)
	}
	fmt.Fprint(os.Stderr, "incast: ")
	defer fmt.Fprintln(os.Stderr)
	var runs []incastRun
	for round := range t.Rounds {
		for _, x := range incastFlows {
			for _, a := range arms {
				r, err := t.incastRun(ctx, n, a, x)
				if err != nil {
					return nil, fmt.Errorf("incast, %d flows, %s: %w", x, a.name, err)
				}
				r.Round = round
				runs = append(runs, r)
				fmt.Fprint(os.Stderr, ".")
			}
		}
	}
	return runs, nil
}

// loadOf returns the part of one sender in a load of x flows: the large RPC flows are distributed over all senders in
// turn, the small ones over the first two senders, and the last sender sends the stream.
func loadOf(sender, x int) []rpcFlows {
	flows := []rpcFlows{{Size: large, Count: (x + senders - 1 - sender) / senders}}
	if sender < senders-1 {
		return append(flows, rpcFlows{Size: small, Count: 1})
	}
	return append(flows, rpcFlows{Size: 0, Count: 1})
}

func (t *bench) incastRun(ctx context.Context, n *incastNet, a *incastArm, x int) (incastRun, error) {
	r := incastRun{Arm: a.name, X: x}
	window := time.Duration(t.Seconds * float64(time.Second))
	for i, c := range a.clients {
		l := &rpcLoad{Flows: loadOf(i, x), Warmup: incastWarmup, Duration: window}
		if err := c.Ask(task{Target: a.target.String(), Load: l}, &struct{}{}); err != nil {
			return r, err
		}
	}
	for _, c := range a.clients {
		if err := c.Send(struct{}{}); err != nil {
			return r, err
		}
	}
	if err := harness.Pause(ctx, incastWarmup); err != nil {
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
	r.Retransmits, r.Segments, r.Drops = after.retransmits-before.retransmits, after.segments-before.segments, after.drops-before.drops
	for _, c := range a.clients {
		var results []rpcResult
		if err := c.Answer(&results); err != nil {
			return r, err
		}
		for _, f := range results {
			mbit := float64(f.Bytes) * 8 / 1e6 / window.Seconds()
			switch f.Size {
			case large:
				r.Rate += mbit / float64(x)
				r.large = appendMilliseconds(r.large, f.Took)
			case small:
				r.SmallRate += float64(f.Bytes) / small / window.Seconds()
				r.small = appendMilliseconds(r.small, f.Took)
			default:
				r.StreamRate += mbit
			}
		}
	}
	return r, nil
}

func appendMilliseconds(to []float64, microseconds []int64) []float64 {
	for _, us := range microseconds {
		to = append(to, float64(us)/1000)
	}
	return to
}
