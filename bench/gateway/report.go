// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
)

type gatewayReport struct {
	Options options `json:"options"`
	harness.Run
	Points   []*gatewayPoint   `json:"-"`
	Requests []gatewayRequests `json:"-"`
	Seeds    []gatewaySeed     `json:"-"`

	Datagrams       []*gatewayDatagrams `json:"-"`
	DatagramBuffers datagramBuffers     `json:"udp_receive_buffers"`
}

// gatewayPoint is a load, with the runs of all sides under it.
type gatewayPoint struct {
	Link        string
	RTT         int // in milliseconds
	MTU         int // MTU of the guest
	CC          string
	Direction   string
	Connections int

	sides map[string][]gatewayRun // round by round
}

// gatewayRequests contains the rates of consecutive requests of one byte, by side.
type gatewayRequests struct {
	Link      string                    `json:"link"`
	RTT       int                       `json:"rtt_ms"`
	MTU       int                       `json:"mtu"`
	PerSecond map[string]harness.Figure `json:"per_second"`
}

func (r gatewayRequests) String() string {
	return fmt.Sprintf("%s %d ms, MTU %d: requests/s: native %.0f, sockeye %.0f, pasta %.0f", r.Link, r.RTT, r.MTU,
		r.PerSecond[sideNative], r.PerSecond[sideSockeye], r.PerSecond[sidePasta])
}

func runMbit(r *gatewayRun) float64    { return r.Mbit }
func runCPU(r *gatewayRun) float64     { return r.CPU }
func runFirst(r *gatewayRun) float64   { return r.First }
func runGap(r *gatewayRun) float64     { return r.Gap }
func runPartial(r *gatewayRun) float64 { return float64(r.Partial) }
func runResent(r *gatewayRun) float64  { return float64(r.Resent) }
func runInside(r *gatewayRun) float64  { return float64(r.Inside) }

// median returns the median of a figure over a side's rounds. NaN, a figure that could not be measured, ranks above all
// others.
func (p *gatewayPoint) median(side string, of func(*gatewayRun) float64) float64 {
	var v []float64
	for i := range p.sides[side] {
		x := of(&p.sides[side][i])
		if math.IsNaN(x) {
			x = math.Inf(1)
		}
		v = append(v, x)
	}
	m := harness.SpreadOf(v).Median
	if math.IsInf(m, 1) {
		return math.NaN()
	}
	return m
}

// sum returns the sum of a figure over a side's rounds.
func (p *gatewayPoint) sum(side string, of func(*gatewayRun) float64) (sum int) {
	for i := range p.sides[side] {
		sum += int(of(&p.sides[side][i]))
	}
	return sum
}

// ratio returns the ratio of the medians of two sides.
func (p *gatewayPoint) ratio(side, to string, of func(*gatewayRun) float64) float64 {
	return p.median(side, of) / p.median(to, of)
}

func (p *gatewayPoint) name() string {
	s := fmt.Sprintf("%s %d ms, MTU %d, %s, %s, %d", p.Link, p.RTT, p.MTU, p.CC, p.Direction, p.Connections)
	if p.Connections == 1 {
		return s + " connection"
	}
	return s + " connections"
}

func (p *gatewayPoint) String() string {
	s := p.name() + ": Mbit/s"
	for _, side := range gatewaySides {
		s += fmt.Sprintf(" %s %.0f", side, p.median(side, runMbit))
		for _, r := range p.sides[side] {
			if r.Error != "" {
				s += " (" + r.Error + ")"
			}
		}
	}
	return s + fmt.Sprintf("; s/GB sockeye %.2f pasta %.2f", p.median(sideSockeye, runCPU), p.median(sidePasta, runCPU))
}

// longestGap returns the longest gap of all rounds, in seconds.
func (p *gatewayPoint) longestGap(side string) (gap float64) {
	for _, r := range p.sides[side] {
		gap = max(gap, r.Gap)
	}
	return gap
}

// stalled returns whether no byte of a side's load arrived for more than a second and more than three round-trip times, in
// any round. A native load that stalls too shows that the machine was busy.
func (p *gatewayPoint) stalled(side string) bool {
	limit := max(1, 3*float64(p.RTT)/1000)
	return p.longestGap(side) > limit && p.longestGap(sideNative) < limit
}

// gatewayAim is an aim, and the points that it applies to.
type gatewayAim struct {
	title string
	of    func(*gatewayPoint) bool // which points
	met   func(*gatewayPoint) bool
	// describe returns the figure of a point that misses the aim. It is nil if another aim prints the point.
	describe func(*gatewayPoint) string
}

const (
	aimNative = 0.95
	aimPasta  = 1.5
)

func (p *gatewayPoint) likeNative() bool {
	return p.ratio(sideSockeye, sideNative, runMbit) >= aimNative
}
func (p *gatewayPoint) beatsPasta() bool {
	return p.ratio(sideSockeye, sidePasta, runMbit) >= aimPasta
}
func (p *gatewayPoint) ratiosText() string {
	return fmt.Sprintf("%.2f times pasta, %.2f times native", p.ratio(sideSockeye, sidePasta, runMbit), p.ratio(sideSockeye, sideNative, runMbit))
}

var gatewayAims = []gatewayAim{
	{
		"with delay, at least 0.95 times native", func(p *gatewayPoint) bool { return p.RTT > 0 },
		(*gatewayPoint).likeNative,
		func(p *gatewayPoint) string {
			return fmt.Sprintf("%.2f times native", p.ratio(sideSockeye, sideNative, runMbit))
		},
	},
	{
		"without delay, at least 1.5 times pasta", func(p *gatewayPoint) bool { return p.RTT == 0 },
		(*gatewayPoint).beatsPasta, (*gatewayPoint).ratiosText,
	},
	{ // neither side can exceed the rate of a link that pasta saturates
		"without delay, at least 1.5 times pasta, or 0.95 times native", func(p *gatewayPoint) bool { return p.RTT == 0 },
		func(p *gatewayPoint) bool { return p.beatsPasta() || p.likeNative() }, nil,
	},
	{
		"no partial send", everyPoint,
		func(p *gatewayPoint) bool { return p.sum(sideSockeye, runPartial) == 0 },
		func(p *gatewayPoint) string { return fmt.Sprint(p.sum(sideSockeye, runPartial)) },
	},
	{
		"no stall", everyPoint,
		func(p *gatewayPoint) bool { return !p.stalled(sideSockeye) },
		func(p *gatewayPoint) string { return fmt.Sprintf("%.1f s", p.longestGap(sideSockeye)) },
	},
	{
		"less CPU per GB than pasta", everyPoint,
		func(p *gatewayPoint) bool {
			theirs := p.median(sidePasta, runCPU)
			return math.IsNaN(theirs) || p.median(sideSockeye, runCPU) < theirs // NaN: pasta transferred less than 10 MB or nothing
		},
		func(p *gatewayPoint) string {
			return fmt.Sprintf("%.2f to %.2f s", p.median(sideSockeye, runCPU), p.median(sidePasta, runCPU))
		},
	},
}

func everyPoint(*gatewayPoint) bool { return true }

// held returns the number of points that an aim applies to, and the points that miss it.
func (r *gatewayReport) held(a gatewayAim) (all int, missed []*gatewayPoint) {
	for _, p := range r.Points {
		if !a.of(p) {
			continue
		}
		if all++; !a.met(p) {
			missed = append(missed, p)
		}
	}
	return all, missed
}

// Print implements harness.Report.
func (r *gatewayReport) Print(p harness.Printf) {
	p("\nGuest of Sockeye, guest of pasta, and native; %d CPUs, Linux %s; medians of %d rounds, sides in rotating order\n", r.CPUs, r.Kernel, r.Options.Rounds)
	if len(r.Points) > 0 {
		p("\tMbit/s\t\t\tratio to native\tfirst 10 MB, s\t\t\tCPU, s/GB\t\tpartial\tretransmitted segments\t\t\n")
		p("\tnative\tsockeye\tpasta\tsockeye\tnative\tsockeye\tpasta\tsockeye\tpasta\tsends\tnative\tsockeye\tpasta\n")
	}
	for _, x := range r.Points {
		p("%s", x.name())
		for _, side := range gatewaySides {
			p("\t%.0f", x.median(side, runMbit))
		}
		p("\t%.2f", x.ratio(sideSockeye, sideNative, runMbit))
		for _, side := range gatewaySides {
			p("\t%s", orDash("%.2f", x.median(side, runFirst)))
		}
		p("\t%s\t%s\t%d", orDash("%.2f", x.median(sideSockeye, runCPU)), orDash("%.2f", x.median(sidePasta, runCPU)), x.sum(sideSockeye, runPartial))
		p("\t%d\t%d+%d\t%d+%d\n", x.sum(sideNative, runResent), x.sum(sideSockeye, runResent), x.sum(sideSockeye, runInside),
			x.sum(sidePasta, runResent), x.sum(sidePasta, runInside))
	}
	if len(r.Points) > 0 {
		p("Partial sends and retransmitted segments are sums over all rounds. Retransmitted segments: host and server + guest and gateway; with pasta, the guest only.\n")
		p("-: less than 10 MB was transferred, or nothing.\n")
	}
	if len(r.Requests) > 0 {
		p("\nRequests per second, request and response of one byte\n\tnative\tsockeye\tpasta\n")
		for _, x := range r.Requests {
			p("%s %d ms, MTU %d", x.Link, x.RTT, x.MTU)
			for _, side := range gatewaySides {
				p("\t%s", orDash("%.0f", float64(x.PerSecond[side])))
			}
			p("\n")
		}
	}
	if len(r.Seeds) > 0 {
		p("\niperf3, upload over one connection: mean Mbit/s received, and Mbit/s sent in each second\n")
		for _, x := range r.Seeds {
			for _, side := range gatewaySides {
				p("%d ms, %s\t%.0f\t%s\n", x.RTT, side, x.Mean[side], strings.Trim(fmt.Sprintf("%.0f", x.Seconds[side]), "[]"))
			}
		}
	}
	r.printDatagrams(p)
	if len(r.Points) > 0 {
		p("\nAims\n")
	}
	for _, a := range gatewayAims {
		if all, missed := r.held(a); all > 0 {
			p("%s: met at %d of %d points\n", a.title, all-len(missed), all)
			for _, x := range missed {
				if a.describe == nil {
					break
				}
				p("  missed: %s: %s\n", x.name(), a.describe(x))
			}
		}
	}
	p("\nDuration %s.\n", r.Took)
}

func (r *gatewayReport) printDatagrams(p harness.Printf) {
	if len(r.Datagrams) == 0 {
		return
	}
	p("\nUDP over veth: datagrams received of a burst that one sender sends at full speed (medians of %d), and the highest rate with\n",
		r.Options.datagramRounds())
	p("less than %g %% lost (tested: %s per second; the better of %d attempts; +: the sender did not reach the next rate).\n",
		100*datagramLoss, strings.ReplaceAll(strings.Trim(fmt.Sprint(datagramRates), "[]"), " ", ", "), datagramTries)
	p("Receive buffers, in bytes: programs %d, Sockeye's gateway %d, pasta %d.\n",
		r.DatagramBuffers.Program, r.DatagramBuffers.Sockeye, r.DatagramBuffers.Pasta)
	for _, n := range datagramBursts {
		p("\tburst of %d\t\t", n)
	}
	p("\thighest rate/s\t\t\tgateway CPU, us/datagram at %d/s\n", datagramRates[0])
	p("%s\tsockeye\tpasta\n", strings.Repeat("\tnative\tsockeye\tpasta", len(datagramBursts)+1))
	for _, d := range r.Datagrams {
		p("%s", d.name())
		for _, l := range d.Bursts {
			for _, side := range gatewaySides {
				p("\t%.0f", l.arrived(side))
			}
		}
		for _, side := range gatewaySides {
			p("\t%s", d.highestText(side))
		}
		p("\t%s\t%s\n", orDash("%.1f", d.cpu(sideSockeye)), orDash("%.1f", d.cpu(sidePasta)))
	}
	p("Losses in all rounds, of bursts and at the lowest rate that was not carried:\n")
	for _, d := range r.Datagrams {
		for _, l := range slices.Concat(d.Bursts, d.Rates) {
			for _, side := range gatewaySides {
				if l.Rate > 0 && (l.carried(side) || l.slow(side)) {
					continue
				}
				if sent, lost := l.lost(side); lost != (datagramLost{}) {
					p("  %s, %s, %s: of %d sent: %v\n", d.name(), l.name(), side, sent, lost)
				}
			}
		}
	}
}

func orDash(format string, v float64) string {
	if math.IsNaN(v) {
		return "-"
	}
	return fmt.Sprintf(format, v)
}

// Figures implements harness.Report.
func (r *gatewayReport) Figures() any {
	type gateways struct {
		Sockeye harness.Figure `json:"sockeye"`
		Pasta   harness.Figure `json:"pasta"`
	}
	type sides struct {
		Native  harness.Figure `json:"native"`
		Sockeye harness.Figure `json:"sockeye"`
		Pasta   harness.Figure `json:"pasta"`
	}
	type point struct {
		RTT         int                     `json:"rtt_ms"`
		Link        string                  `json:"link"`
		MTU         int                     `json:"mtu"`
		CC          string                  `json:"cc"`
		Direction   string                  `json:"direction"`
		Connections int                     `json:"connections"`
		Native      harness.Figure          `json:"native_mbit"`
		Sockeye     harness.Figure          `json:"sockeye_mbit"`
		Pasta       harness.Figure          `json:"pasta_mbit"`
		Partial     int                     `json:"partial_sends"`
		Resent      int                     `json:"retransmits"`
		CPU         gateways                `json:"cpu_s_per_gb"`
		First       sides                   `json:"first_10mb_s"`
		Gap         sides                   `json:"longest_gap_s"`
		Runs        map[string][]gatewayRun `json:"runs"`
	}
	type aim struct {
		Title  string `json:"title"`
		Points int    `json:"points"`
		Met    int    `json:"met"`
	}
	points, aims := []point{}, []aim{}
	for _, p := range r.Points {
		m := func(side string, of func(*gatewayRun) float64) harness.Figure {
			return harness.Figure(p.median(side, of))
		}
		all := func(of func(*gatewayRun) float64) sides {
			return sides{m(sideNative, of), m(sideSockeye, of), m(sidePasta, of)}
		}
		points = append(points, point{
			RTT: p.RTT, Link: p.Link, MTU: p.MTU, CC: p.CC, Direction: p.Direction, Connections: p.Connections,
			Native: m(sideNative, runMbit), Sockeye: m(sideSockeye, runMbit), Pasta: m(sidePasta, runMbit),
			Partial: p.sum(sideSockeye, runPartial), Resent: p.sum(sideSockeye, runResent) + p.sum(sideSockeye, runInside),
			CPU: gateways{m(sideSockeye, runCPU), m(sidePasta, runCPU)}, First: all(runFirst), Gap: all(runGap), Runs: p.sides,
		})
	}
	for _, a := range gatewayAims {
		n, missed := r.held(a)
		aims = append(aims, aim{a.title, n, n - len(missed)})
	}
	type counts struct {
		Native  int `json:"native"`
		Sockeye int `json:"sockeye"`
		Pasta   int `json:"pasta"`
	}
	type datagrams struct {
		*gatewayDatagrams
		Highest counts   `json:"highest_per_second"`
		CPU     gateways `json:"cpu_us_per_datagram"`
	}
	udp := []datagrams{}
	for _, d := range r.Datagrams {
		udp = append(udp, datagrams{
			d, counts{d.highest(sideNative), d.highest(sideSockeye), d.highest(sidePasta)},
			gateways{harness.Figure(d.cpu(sideSockeye)), harness.Figure(d.cpu(sidePasta))},
		})
	}
	return struct {
		Points   []point           `json:"points"`
		Requests []gatewayRequests `json:"requests"`
		Seeds    []gatewaySeed     `json:"iperf3"`
		UDP      []datagrams       `json:"udp"`
		Aims     []aim             `json:"aims"`
		Run      *gatewayReport    `json:"run"`
	}{points, r.Requests, r.Seeds, udp, aims, r}
}

// chart draws the throughput of one connection with cubic by RTT.
func (r *gatewayReport) chart() chart.Chart {
	drawing := chart.Chart{
		Title: "Throughput of one cubic connection, Mbit/s: native, guest of Sockeye, guest of pasta", Legend: gatewaySides,
	}
	for _, link := range r.Options.Links {
		for _, direction := range r.Options.Directions {
			for _, mtu := range r.Options.MTUs {
				p := chart.Panel{Title: fmt.Sprintf("%s, %s, guest MTU %d", link, direction, mtu)}
				for _, x := range r.Points {
					if x.Link != link || x.Direction != direction || x.MTU != mtu || x.Connections != 1 || x.CC != r.Options.CCs[0] {
						continue
					}
					for i, side := range gatewaySides {
						v := x.median(side, runMbit)
						parts := make([]float64, i+1)
						parts[i] = v
						p.Bars = append(p.Bars, chart.Bar{Label: fmt.Sprintf("%d ms, %s", x.RTT, side), Note: fmt.Sprintf("%.0f", v), Parts: parts})
					}
				}
				if len(p.Bars) > 0 {
					drawing.Panels = append(drawing.Panels, p)
				}
			}
		}
	}
	return drawing
}

// Charts implements harness.Report.
func (r *gatewayReport) Charts() map[string]chart.Chart { return map[string]chart.Chart{"": r.chart()} }
