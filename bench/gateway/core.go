// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"sockeye/bench/harness"
)

// The limit of one core: what a gateway forwards with all of the time of one CPU, over a link of 10 Gbit/s with a round-trip time
// of 1 ms.

const (
	coreRate        = 10e9 // bits/s of the link
	coreRTT         = 1    // ms
	coreConnections = 16
)

// A coreRun is a load of the limit of one core on one side.
type coreRun struct {
	Mbit     harness.Figure `json:"mbit"`
	CPUs     harness.Figure `json:"cpus"`               // CPU time of the gateway in relation to the duration
	Packets  harness.Figure `json:"packets_per_s"`      // of the guest's interface in both directions; a GSO packet counts once
	CoreGbit harness.Figure `json:"core_gbit"`          // per second of CPU time
	CoreRate harness.Figure `json:"core_packets_per_s"` // per second of CPU time
}

// gatewayCore contains the runs of a load, by side.
type gatewayCore struct {
	MTU       int                  `json:"mtu"`
	Direction string               `json:"direction"`
	Runs      map[string][]coreRun `json:"runs"`
}

func (x *gatewayCore) name() string { return fmt.Sprintf("MTU %d, %s", x.MTU, x.Direction) }

func (x *gatewayCore) String() string {
	s := "core, " + x.name() + ": Gbit/s of one core:"
	for _, side := range gatewaysOf(having(x.Runs)) {
		s += fmt.Sprintf(" %s %.1f", side, x.median(side, func(r *coreRun) harness.Figure { return r.CoreGbit }))
	}
	return s
}

// core measures the limit of one core.
func (b *bench) core(ctx context.Context) error {
	p, err := newGatewayPath(ctx, b.lab, linkCore, b.newPasta)
	if err != nil {
		return err
	}
	if err := p.delay(coreRTT * time.Millisecond); err != nil {
		return err
	}
	for _, mtu := range b.MTUs {
		if err := b.coreMTU(ctx, p, mtu); err != nil {
			return fmt.Errorf("limit of one core, MTU %d: %w", mtu, err)
		}
	}
	return nil
}

func (b *bench) coreMTU(ctx context.Context, p *gatewayPath, mtu int) (err error) {
	sides, stop, err := p.newSides(ctx, b.Sides, mtu)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	if err := choose(p, sides, "cubic"); err != nil {
		return err
	}
	rounds, duration := 5*b.Rounds, 3*time.Second
	if b.Quick {
		rounds, duration = b.Rounds, time.Second
	}
	for _, direction := range b.Directions {
		x := &gatewayCore{MTU: mtu, Direction: direction, Runs: map[string][]coreRun{}}
		for range rounds {
			for _, name := range harness.Turn(b.Sides, b.round) {
				t := task{Kind: direction, CC: "cubic", Connections: coreConnections, Duration: duration}
				run, err := b.coreRun(p, sides[name], t)
				if err != nil {
					return err
				}
				x.Runs[name] = append(x.Runs[name], *run)
			}
			b.round++
		}
		b.report.Core = append(b.report.Core, x)
		fmt.Fprintln(os.Stderr, x)
	}
	return nil
}

// coreRun runs a load on a side.
func (b *bench) coreRun(p *gatewayPath, s *gatewaySide, t task) (*coreRun, error) {
	packets, err := s.packets()
	if err != nil {
		return nil, err
	}
	cpu, err := s.cpu()
	if err != nil {
		return nil, err
	}
	begun := time.Now()
	load, err := b.load(p, s, t, t.Duration/4)
	if err != nil {
		return nil, err
	}
	if load.Error != "" {
		return nil, fmt.Errorf("%s: %s", s.name, load.Error)
	}
	took := time.Since(begun).Seconds()
	cpuAfter, err := s.cpu()
	if err != nil {
		return nil, err
	}
	packetsAfter, err := s.packets()
	if err != nil {
		return nil, err
	}
	used, n := (cpuAfter - cpu).Seconds(), float64(packetsAfter-packets)
	return &coreRun{
		Mbit: harness.Figure(load.Mbit), CPUs: harness.Figure(used / took), Packets: harness.Figure(n / took),
		CoreGbit: harness.Figure(8 / load.CPU), CoreRate: harness.Figure(n / used),
	}, nil
}

// packets returns the number of packets of the interface in the client's namespace.
func (s *gatewaySide) packets() (uint64, error) {
	pid, err := s.program()
	if err != nil {
		return 0, err
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/dev", pid))
	if err != nil {
		return 0, fmt.Errorf("count packets of %s: %w", s.name, err)
	}
	for line := range strings.Lines(string(text)) {
		name, fields, ok := strings.Cut(strings.TrimSpace(line), ":")
		if !ok || name != s.device {
			continue
		}
		var received, sent, skip uint64
		if _, err := fmt.Sscan(fields, &skip, &received, &skip, &skip, &skip, &skip, &skip, &skip, &skip, &sent); err != nil {
			return 0, fmt.Errorf("count packets of %s: %w", s.name, err)
		}
		return received + sent, nil
	}
	return 0, fmt.Errorf("count packets of %s: there is no interface %s", s.name, s.device)
}

func (r *gatewayReport) printCore(p harness.Printf) {
	if len(r.Core) == 0 {
		return
	}
	sides := r.Options.Sides
	through := gatewaysOf(sides)
	p("\nThe limit of one core: a link of 10 Gbit/s with %d ms, %d connections, medians of %d rounds. Packets: of the guest's interface, a GSO\n",
		coreRTT, coreConnections, len(r.Core[0].Runs[sides[0]]))
	p("packet counts once. For each second of the gateway's CPU time: Gbit and packets.\n")
	empty := func(sides []string) string { return strings.Repeat("\t", len(sides)-1) }
	p("\tMbit/s%s\tCPUs of the gateway%s\tGbit per CPU second%s\tpackets per CPU second\n", empty(sides), empty(through), empty(through))
	p("\t%s%s\n", strings.Join(sides, "\t"), strings.Repeat("\t"+strings.Join(through, "\t"), 3))
	for _, x := range r.Core {
		p("%s", x.name())
		for _, column := range []struct {
			of     func(*coreRun) harness.Figure
			format string
			sides  []string
		}{
			{func(r *coreRun) harness.Figure { return r.Mbit }, "%.0f", sides},
			{func(r *coreRun) harness.Figure { return r.CPUs }, "%.2f", through},
			{func(r *coreRun) harness.Figure { return r.CoreGbit }, "%.1f", through},
			{func(r *coreRun) harness.Figure { return r.CoreRate }, "%.0f", through},
		} {
			for _, side := range column.sides {
				p("\t%s", orDash(column.format, x.median(side, column.of)))
			}
		}
		p("\n")
	}
}

func (x *gatewayCore) median(side string, of func(*coreRun) harness.Figure) float64 {
	var v []float64
	for i := range x.Runs[side] {
		v = append(v, float64(of(&x.Runs[side][i])))
	}
	return harness.SpreadOf(v).Median
}
