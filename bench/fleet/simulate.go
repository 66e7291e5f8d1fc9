// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
	"sockeye/lab/simulate/model"
)

const mostMoved = 1.05 // of the ideal

// simulatedPart contains the simulations by the number of hosts.
type simulatedPart struct {
	days   int
	fleets []model.Result
}

// simulate lets fleets run for a simulated time, with the decisions of the agent.
func (b *bench) simulate(ctx context.Context) (part, error) {
	p := &simulatedPart{days: b.Days}
	for _, hosts := range b.Fleets {
		c := model.Usual(hosts)
		c.Duration, c.Seed = time.Duration(b.Days)*model.Day, 1
		result := make(chan model.Result, 1)
		go func() { result <- model.Run(c) }()
		select {
		case r := <-result:
			p.fleets = append(p.fleets, r)
		case <-ctx.Done(): // the simulation ends with this process
			return nil, ctx.Err()
		}
		fmt.Fprint(os.Stderr, ".")
	}
	return p, nil
}

func (p *simulatedPart) print(w harness.Printf) {
	w("\nFleets of %d devices for %d simulated days, with the decisions of the agent\n", p.devices(), p.days)
	w("hosts\tdeaths\tdrains\tpartitions\tepochs\tmoved buckets\tmoved / ideal\tmost devices of a host, to its share\tlost\tmisdirected\n")
	for _, r := range p.fleets {
		w("%d\t%d\t%d\t%d\t%d\t%d\t%.3f\t%.2f\t%d\t%d\n", r.Hosts, r.Deaths, r.Drains, r.Partitions, r.Epochs, r.Moved, r.MovedOverIdeal, r.PeakDevices,
			r.Packets.Lost, r.Packets.Misdirected)
	}
	w("Lost, misdirected: of %d packets that were followed while buckets moved.\n", p.followed())
}

func (p *simulatedPart) devices() int { return model.Usual(3).Devices }

func (p *simulatedPart) followed() (sum int) {
	for _, r := range p.fleets {
		sum += r.Packets.Followed
	}
	return sum
}

func (p *simulatedPart) figures() map[string]any {
	hosts := make([]int, 0, len(p.fleets))
	for _, r := range p.fleets {
		hosts = append(hosts, r.Hosts)
	}
	return map[string]any{"simulated": map[string]any{
		"hosts": slices.Max(hosts), "devices": p.devices(), "days": p.days, "moved_over_ideal": harness.Figure(p.worst()), "fleets": p.fleets,
	}}
}

func (p *simulatedPart) targets() []harness.Target {
	worst := harness.Figure(p.worst())
	claim := fmt.Sprintf("buckets that move in %d simulated days, divided by the ideal number, the worst of fleets of %d to %d hosts", p.days, p.fleets[0].Hosts, p.fleets[len(p.fleets)-1].Hosts)
	t := harness.AtMost(claim, "%.3f", mostMoved, harness.Distribution{Median: worst, Low: worst, High: worst})
	t.Measured = fmt.Sprintf("%.3f", worst) // the simulation has no noise
	return []harness.Target{t}
}

// worst returns the largest ratio of moved buckets to the ideal.
func (p *simulatedPart) worst() (worst float64) {
	for _, r := range p.fleets {
		worst = max(worst, r.MovedOverIdeal)
	}
	return worst
}

func (p *simulatedPart) panels() []chart.Panel {
	panel := chart.Panel{Title: "Moved buckets, divided by the ideal number, simulated"}
	for _, r := range p.fleets {
		panel.Bars = append(panel.Bars, chart.Bar{Label: fmt.Sprintf("%d hosts", r.Hosts), Note: fmt.Sprintf("%.3f", r.MovedOverIdeal), Parts: []float64{r.MovedOverIdeal}})
	}
	return []chart.Panel{panel}
}
