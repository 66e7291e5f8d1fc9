// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"cmp"
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
	RR       []*gatewayRR      `json:"-"`
	Programs []*gatewayProgram `json:"-"`
	Core     []*gatewayCore    `json:"-"`
	Seeds    []gatewaySeed     `json:"-"`
	// Versions are those of the packages of the two pastas; empty without sidePastaNew.
	PastaVersion    string `json:"-"`
	PastaNewVersion string `json:"-"`

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
	s := fmt.Sprintf("%s %d ms, MTU %d: requests/s:", r.Link, r.RTT, r.MTU)
	for _, side := range having(r.PerSecond) {
		s += fmt.Sprintf(" %s %.0f", side, r.PerSecond[side])
	}
	return s
}

func runMbit(r *gatewayRun) float64    { return r.Mbit }
func runCPU(r *gatewayRun) float64     { return r.CPU }
func runFirst(r *gatewayRun) float64   { return r.First }
func runGap(r *gatewayRun) float64     { return r.Gap }
func runPartial(r *gatewayRun) float64 { return float64(r.Partial) }
func runResent(r *gatewayRun) float64  { return float64(r.Resent) }
func runInside(r *gatewayRun) float64  { return float64(r.Inside) }

// ratio returns the ratio of the medians of two sides.
func (p *gatewayPoint) ratio(side, to string, of func(*gatewayRun) float64) float64 {
	return p.median(side, of) / p.median(to, of)
}

func (p *gatewayPoint) String() string {
	s := p.name() + ": Mbit/s"
	for _, side := range having(p.sides) {
		s += fmt.Sprintf(" %s %.0f", side, p.median(side, runMbit))
		for _, r := range p.sides[side] {
			if r.Error != "" {
				s += " (" + r.Error + ")"
			}
		}
	}
	s += "; s/GB"
	for _, side := range gatewaysOf(having(p.sides)) {
		s += fmt.Sprintf(" %s %.2f", side, p.median(side, runCPU))
	}
	return s
}

// gatewaysOf returns the sides with a gateway.
func gatewaysOf(sides []string) []string {
	return slices.DeleteFunc(slices.Clone(sides), func(side string) bool { return side == sideNative })
}

// stalled returns whether no byte of a side's load arrived for more than a second and more than three round-trip times, in
// any round. A native load that stalls too shows that the machine was busy.
func (p *gatewayPoint) stalled(side string) bool {
	limit := max(1, 3*float64(p.RTT)/1000)
	return p.longestGap(side) > limit && p.longestGap(sideNative) < limit
}

// longestGap returns the longest gap of all rounds, in seconds.
func (p *gatewayPoint) longestGap(side string) (gap float64) {
	for _, r := range p.sides[side] {
		gap = max(gap, r.Gap)
	}
	return gap
}

const (
	aimNative    = 0.95
	aimPasta     = 1.5
	aimUndelayed = 0.6
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

// works reports whether a side transfers more than a hundredth of what goes natively, with a figure of its CPU time: a gateway that has
// failed is not a comparison.
func (p *gatewayPoint) works(side string) bool {
	return p.ratio(side, sideNative, runMbit) > 0.01 && !math.IsNaN(p.median(side, runCPU))
}

func everyPoint(*gatewayPoint) bool { return true }

// gatewayAim is an aim, and the points that it applies to.
type gatewayAim struct {
	title string
	of    func(*gatewayPoint) bool // which points
	met   func(*gatewayPoint) bool
	// describe returns the figure of a point that misses the aim. It is nil if another aim prints the point.
	describe func(*gatewayPoint) string
}

var gatewayAims = []gatewayAim{
	{
		"without delay, at least 0.6 times native", func(p *gatewayPoint) bool { return p.RTT == 0 },
		func(p *gatewayPoint) bool { return p.ratio(sideSockeye, sideNative, runMbit) >= aimUndelayed },
		func(p *gatewayPoint) string {
			return fmt.Sprintf("%.2f times native", p.ratio(sideSockeye, sideNative, runMbit))
		},
	},
	{
		"without delay, at least 1.5 times the newest pasta", func(p *gatewayPoint) bool { return p.RTT == 0 && p.works(sidePastaNew) },
		func(p *gatewayPoint) bool { return p.ratio(sideSockeye, sidePastaNew, runMbit) >= aimPasta },
		nil,
	},
	{
		"with delay, at least 0.95 times native", func(p *gatewayPoint) bool { return p.RTT > 0 },
		(*gatewayPoint).likeNative,
		func(p *gatewayPoint) string {
			return fmt.Sprintf("%.2f times native", p.ratio(sideSockeye, sideNative, runMbit))
		},
	},
	{
		"without delay, at least 1.5 times pasta", func(p *gatewayPoint) bool { return p.RTT == 0 && p.works(sidePasta) },
		(*gatewayPoint).beatsPasta, (*gatewayPoint).ratiosText,
	},
	{ // neither side can exceed the rate of a link that pasta saturates
		"without delay, at least 1.5 times pasta, or 0.95 times native", func(p *gatewayPoint) bool { return p.RTT == 0 && p.works(sidePasta) },
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
		"at least 1.5 times the newest pasta, or 0.95 times native",
		func(p *gatewayPoint) bool { return p.works(sidePastaNew) },
		func(p *gatewayPoint) bool {
			return p.ratio(sideSockeye, sidePastaNew, runMbit) >= aimPasta || p.likeNative()
		},
		func(p *gatewayPoint) string {
			return fmt.Sprintf("%.2f times the newest pasta, %.2f times native", p.ratio(sideSockeye, sidePastaNew, runMbit), p.ratio(sideSockeye, sideNative, runMbit))
		},
	},
	{
		"less CPU per GB than the newest pasta", func(p *gatewayPoint) bool { return p.works(sidePastaNew) },
		func(p *gatewayPoint) bool { return p.median(sideSockeye, runCPU) < p.median(sidePastaNew, runCPU) },
		func(p *gatewayPoint) string {
			return fmt.Sprintf("%.2f to %.2f s", p.median(sideSockeye, runCPU), p.median(sidePastaNew, runCPU))
		},
	},
	{
		"less CPU per GB than pasta", func(p *gatewayPoint) bool { return p.works(sidePasta) },
		func(p *gatewayPoint) bool { return p.median(sideSockeye, runCPU) < p.median(sidePasta, runCPU) },
		func(p *gatewayPoint) string {
			return fmt.Sprintf("%.2f to %.2f s", p.median(sideSockeye, runCPU), p.median(sidePasta, runCPU))
		},
	},
}

// Print implements harness.Report.
func (r *gatewayReport) Print(p harness.Printf) {
	p("\nGuest of Sockeye, guest of pasta, and native; %d CPUs, Linux %s; medians of %d rounds, up to 1 ms of %d, sides in rotating order\n",
		r.CPUs, r.Kernel, r.Options.Rounds, r.Options.pointRounds(0))
	p("%s\n", r.versions())
	sides := r.Options.Sides
	through := gatewaysOf(sides)
	columns := func(title string, sides []string) (above, names string) {
		return "\t" + title + strings.Repeat("\t", len(sides)-1), "\t" + strings.Join(sides, "\t")
	}
	heading := func(titles ...string) {
		var above, below string
		for i, title := range titles {
			of := sides
			if i > 0 && strings.HasPrefix(title, "CPU") {
				of = through
			}
			a, names := columns(title, of)
			above, below = above+a, below+names
		}
		p("%s\n%s\n", above, below)
	}
	if len(r.Points) > 0 {
		heading("Mbit/s", "first 10 MB, s", "CPU, s/GB", "retransmitted segments")
	}
	for _, x := range r.Points {
		p("%s", x.name())
		for _, side := range sides {
			p("\t%s", orDash("%.0f", x.median(side, runMbit)))
		}
		for _, side := range sides {
			p("\t%s", orDash("%.2f", x.median(side, runFirst)))
		}
		for _, side := range through {
			p("\t%s", orDash("%.2f", x.median(side, runCPU)))
		}
		for _, side := range sides {
			if side == sideNative {
				p("\t%d", x.sum(side, runResent))
			} else {
				p("\t%d+%d", x.sum(side, runResent), x.sum(side, runInside))
			}
		}
		p("\n")
	}
	if len(r.Points) > 0 {
		p("Retransmitted segments are sums over all rounds. Retransmitted segments: host and server + guest and gateway; with pasta, the guest only.\n")
		p("-: less than 10 MB was transferred, or nothing.\n")
		r.printFailures(p)
	}
	if len(r.Requests) > 0 {
		p("\nRequests per second on one connection, request and response of one byte\n\t%s\n", strings.Join(sides, "\t"))
		for _, x := range r.Requests {
			p("%s %d ms, MTU %d", x.Link, x.RTT, x.MTU)
			for _, side := range sides {
				p("\t%s", orDash("%.0f", float64(x.PerSecond[side])))
			}
			p("\n")
		}
	}
	if len(r.RR) > 0 {
		p("\nRound trips of one byte over veth, and connects (time of connect; rate and CPU with a round trip and a reset)\n")
		heading("median, us", "P99, us", "per second", "CPU of the gateway, us")
		for _, x := range r.RR {
			x.print(p, "", x.Trips, sides)
			x.print(p, ", connects", x.Connects, sides)
		}
	}
	if len(r.Seeds) > 0 {
		p("\niperf3, upload over one connection: mean Mbit/s received, and Mbit/s sent in each second\n")
		for _, x := range r.Seeds {
			for _, side := range having(x.Mean) {
				p("%d ms, %s\t%.0f\t%s\n", x.RTT, side, x.Mean[side], strings.Trim(fmt.Sprintf("%.0f", x.Seconds[side]), "[]"))
			}
		}
	}
	r.printDatagrams(p)
	r.printPrograms(p)
	r.printCore(p)
	if len(r.Points)+len(r.RR)+len(r.Programs) > 0 {
		p("\nAims\n")
	}
	for _, t := range append(r.tripTargets(), r.programTargets()...) {
		p("%s: %s, %s: %s\n", t.Claim, t.Measured, t.Goal, t.Verdict)
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

// printFailures prints the points at which a side does not work: they are left out of the comparisons with that side.
func (r *gatewayReport) printFailures(p harness.Printf) {
	for _, side := range gatewaysOf(r.Options.Sides) {
		for _, x := range r.Points {
			var errors []string
			for _, run := range x.sides[side] {
				if run.Error != "" && !slices.Contains(errors, run.Error) {
					errors = append(errors, run.Error)
				}
			}
			if !x.works(side) || len(errors) > 0 {
				p("%s does not work, or fails: %s: %.0f Mbit/s; %s\n", side, x.name(), x.median(side, runMbit), cmp.Or(strings.Join(errors, "; "), "no error"))
			}
		}
	}
}

// versions names the versions of pasta.
func (r *gatewayReport) versions() string {
	s := "pasta: passt " + r.PastaVersion
	if r.PastaNewVersion == "" {
		return s + "; pasta_new, that of Debian sid, is left out: " + r.Options.noNewPasta
	}
	return s + "; pasta_new: passt " + r.PastaNewVersion
}

func (r *gatewayReport) printDatagrams(p harness.Printf) {
	if len(r.Datagrams) == 0 {
		return
	}
	p("\nUDP over veth: datagrams received of a burst that one sender sends at full speed (medians of %d), and the highest rate with\n",
		r.Options.datagramRounds())
	p("less than %g %% lost (tested: %s per second; the better of %d attempts; +: the sender did not reach the next rate).\n",
		100*datagramLoss, strings.ReplaceAll(strings.Trim(fmt.Sprint(datagramRates), "[]"), " ", ", "), datagramTries)
	p("Receive buffers, in bytes: programs %d, Sockeye's gateway %d, pasta %d", r.DatagramBuffers.Program, r.DatagramBuffers.Sockeye, r.DatagramBuffers.Pasta)
	if r.DatagramBuffers.PastaNew > 0 {
		p(", pasta_new %d", r.DatagramBuffers.PastaNew)
	}
	p(".\n")
	sides := r.Options.Sides
	empty := strings.Repeat("\t", len(sides)-1)
	for _, n := range datagramBursts {
		p("\tburst of %d%s", n, empty)
	}
	p("\thighest rate/s%s\tgateway CPU, us/datagram at %d/s\n", empty, datagramRates[0])
	p("%s\t%s\n", strings.Repeat("\t"+strings.Join(sides, "\t"), len(datagramBursts)+1), strings.Join(gatewaysOf(sides), "\t"))
	for _, d := range r.Datagrams {
		p("%s", d.name())
		for _, l := range d.Bursts {
			for _, side := range sides {
				p("\t%.0f", l.arrived(side))
			}
		}
		for _, side := range sides {
			p("\t%s", d.highestText(side))
		}
		for _, side := range gatewaysOf(sides) {
			p("\t%s", orDash("%.1f", d.cpu(side)))
		}
		p("\n")
	}
	p("Losses in all rounds, of bursts and at the lowest rate that was not carried:\n")
	for _, d := range r.Datagrams {
		for _, l := range slices.Concat(d.Bursts, d.Rates) {
			for _, side := range sides {
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

func (p *gatewayPoint) name() string {
	s := fmt.Sprintf("%s %d ms, MTU %d, %s, %s, %d", p.Link, p.RTT, p.MTU, p.CC, p.Direction, p.Connections)
	if p.Connections == 1 {
		return s + " connection"
	}
	return s + " connections"
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
		Sockeye  harness.Figure `json:"sockeye"`
		Pasta    harness.Figure `json:"pasta"`
		PastaNew harness.Figure `json:"pasta_new"`
	}
	type sides struct {
		Native harness.Figure `json:"native"`
		gateways
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
		PastaNew    harness.Figure          `json:"pasta_new_mbit"`
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
		through := func(of func(*gatewayRun) float64) gateways {
			return gateways{m(sideSockeye, of), m(sidePasta, of), m(sidePastaNew, of)}
		}
		all := func(of func(*gatewayRun) float64) sides { return sides{m(sideNative, of), through(of)} }
		points = append(points, point{
			RTT: p.RTT, Link: p.Link, MTU: p.MTU, CC: p.CC, Direction: p.Direction, Connections: p.Connections,
			Native: m(sideNative, runMbit), Sockeye: m(sideSockeye, runMbit), Pasta: m(sidePasta, runMbit), PastaNew: m(sidePastaNew, runMbit),
			Partial: p.sum(sideSockeye, runPartial), Resent: p.sum(sideSockeye, runResent) + p.sum(sideSockeye, runInside),
			CPU: through(runCPU), First: all(runFirst), Gap: all(runGap), Runs: p.sides,
		})
	}
	for _, a := range gatewayAims {
		n, missed := r.held(a)
		aims = append(aims, aim{a.title, n, n - len(missed)})
	}
	type trips struct {
		Connections int      `json:"connections"`
		MTU         int      `json:"mtu"`
		sides                // median of a round trip, us
		P99         sides    `json:"p99_us"`
		Rate        sides    `json:"per_second"`
		CPU         gateways `json:"cpu_us"`
		Connect     sides    `json:"connect_us"`
		ConnectP99  sides    `json:"connect_p99_us"`
		ConnectRate sides    `json:"connects_per_second"`
		ConnectCPU  gateways `json:"connect_cpu_us"`

		Runs map[string]map[string][]rrResult `json:"runs"`
	}
	rr := []trips{}
	for _, x := range r.RR {
		through := func(runs map[string][]rrResult, of func(*rrResult) float64) gateways {
			f := func(side string) harness.Figure { return harness.Figure(medianOf(runs[side], of)) }
			return gateways{f(sideSockeye), f(sidePasta), f(sidePastaNew)}
		}
		all := func(runs map[string][]rrResult, of func(*rrResult) float64) sides {
			return sides{harness.Figure(medianOf(runs[sideNative], of)), through(runs, of)}
		}
		rr = append(rr, trips{
			x.Connections, x.MTU, all(x.Trips, rrMedian), all(x.Trips, rrP99), all(x.Trips, rrRate), through(x.Trips, rrCPU),
			all(x.Connects, rrMedian), all(x.Connects, rrP99), all(x.Connects, rrRate), through(x.Connects, rrCPU),
			map[string]map[string][]rrResult{"round_trips": x.Trips, "connects": x.Connects},
		})
	}
	type counts struct {
		Native   int `json:"native"`
		Sockeye  int `json:"sockeye"`
		Pasta    int `json:"pasta"`
		PastaNew int `json:"pasta_new"`
	}
	type datagrams struct {
		*gatewayDatagrams
		Highest counts   `json:"highest_per_second"`
		CPU     gateways `json:"cpu_us_per_datagram"`
	}
	udp := []datagrams{}
	for _, d := range r.Datagrams {
		udp = append(udp, datagrams{
			d, counts{d.highest(sideNative), d.highest(sideSockeye), d.highest(sidePasta), d.highest(sidePastaNew)},
			gateways{harness.Figure(d.cpu(sideSockeye)), harness.Figure(d.cpu(sidePasta)), harness.Figure(d.cpu(sidePastaNew))},
		})
	}
	return struct {
		PastaVersion    string `json:"pasta_version"`
		PastaNewVersion string `json:"pasta_new_version,omitempty"`

		Points   []point           `json:"points"`
		Requests []gatewayRequests `json:"requests"`
		RR       []trips           `json:"rr"`
		Programs []*gatewayProgram `json:"programs"`
		Core     []*gatewayCore    `json:"core"`
		Seeds    []gatewaySeed     `json:"iperf3"`
		UDP      []datagrams       `json:"udp"`
		Aims     []aim             `json:"aims"`
		Run      *gatewayReport    `json:"run"`
	}{r.PastaVersion, r.PastaNewVersion, points, r.Requests, rr, r.Programs, r.Core, r.Seeds, udp, aims, r}
}

// sum returns the sum of a figure over a side's rounds.
func (p *gatewayPoint) sum(side string, of func(*gatewayRun) float64) (sum int) {
	for i := range p.sides[side] {
		sum += int(of(&p.sides[side][i]))
	}
	return sum
}

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

// Charts implements harness.Report.
func (r *gatewayReport) Charts() map[string]chart.Chart { return map[string]chart.Chart{"": r.chart()} }

// chart draws the throughput of one connection with cubic by RTT.
func (r *gatewayReport) chart() chart.Chart {
	drawing := chart.Chart{
		Title: "Throughput of one cubic connection, Mbit/s: native, guest of Sockeye, guests of pasta", Legend: r.Options.Sides,
	}
	for _, link := range r.Options.Links {
		for _, direction := range r.Options.Directions {
			for _, mtu := range r.Options.MTUs {
				p := chart.Panel{Title: fmt.Sprintf("%s, %s, guest MTU %d", link, direction, mtu)}
				for _, x := range r.Points {
					if x.Link != link || x.Direction != direction || x.MTU != mtu || x.Connections != 1 || x.CC != r.Options.CCs[0] {
						continue
					}
					for i, side := range r.Options.Sides {
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
