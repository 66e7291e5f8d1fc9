// SPDX-License-Identifier: Apache-2.0

// Package gateway is the benchmark of isolate. It runs loads natively, in a guest of Sockeye and in a guest of pasta.
package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"sockeye/bench/harness"
	"sockeye/internal/isolate"
	"sockeye/lab"
)

const command = "gateway"

// Benchmark is the command bench gateway.
var Benchmark = harness.Benchmark{
	Name: command, Run: insideGateway, Sandboxed: true,
	Workers: map[string]func([]string) error{
		serverRole: gatewayServer, echoRole: echoServer, clientRole: gatewayClient, gatewayRole: worker, datagramRole: datagramWorker,
		isolateCommand:        isolateAsUser,
		isolate.InsideCommand: isolateAsItself, // program of isolateCommand
	},
}

type options struct {
	Quick       bool     `json:"quick"`
	Rounds      int      `json:"rounds"`
	Links       []string `json:"links"`
	RTTs        []int    `json:"rtt_ms"` // RTTs of the limited link
	MTUs        []int    `json:"mtus"`
	CCs         []string `json:"cc"`
	Directions  []string `json:"directions"`
	Connections []int    `json:"connections"`
	Sides       []string `json:"sides"`
	Only        []string `json:"only"` // parts to run

	newPasta   string // directory of tools/pasta-sid
	noNewPasta string // why there is none
}

const (
	partPoints   = "points"
	partRequests = "requests"
	partRR       = "rr"
	partIperf    = "iperf3"
	partUDP      = "udp"
	partRoom     = "room"
	partPrograms = "programs"
	partCore     = "core"
)

type bench struct {
	options
	lab    *lab.Lab
	round  int    // index of the round, which selects the order of the sides
	loads  uint32 // ID of the last load
	report *gatewayReport
}

func insideGateway(args []string) (err error) {
	o := options{
		Links: []string{linkVeth, linkLimited}, RTTs: []int{0, 1, 15, 100, 285}, MTUs: []int{1500, 65520}, CCs: []string{"cubic", "bbr"},
		Directions: []string{upload, download}, Connections: []int{1, 16}, Sides: slices.Clone(gatewaySides),
		Only: []string{partPoints, partRequests, partRR, partIperf, partUDP, partRoom, partPrograms, partCore},
	}
	fs := flag.NewFlagSet(command, flag.ContinueOnError)
	fs.BoolVar(&o.Quick, "quick", false, "run for two minutes instead of twenty, with fewer points")
	fs.IntVar(&o.Rounds, "rounds", 1, "number of runs per point; the report shows medians")
	list(fs, &o.Links, "links", "links to measure: veth, 1gbit", oneOf(linkVeth, linkLimited))
	list(fs, &o.RTTs, "rtts", "round-trip times of the 1gbit link, in milliseconds", strconv.Atoi)
	list(fs, &o.MTUs, "mtus", "MTUs of the guest, in bytes", strconv.Atoi)
	list(fs, &o.CCs, "ccs", "congestion controls: cubic, bbr", oneOf("cubic", "bbr"))
	list(fs, &o.Directions, "directions", "directions: upload, download", oneOf(upload, download))
	list(fs, &o.Connections, "connections", "numbers of connections", strconv.Atoi)
	list(fs, &o.Only, "only", "parts to run: points, requests, rr, iperf3, udp, room, programs, core", oneOf(o.Only...))
	list(fs, &o.Sides, "sides", "sides to measure: native, sockeye, pasta, pasta_new", oneOf(gatewaySides...))
	fs.StringVar(&o.newPasta, "pasta-new", "", "`directory` that tools/pasta-sid has printed; empty: leave this pasta out")
	fs.StringVar(&o.noNewPasta, "no-pasta-new", "-pasta-new is not given", "`reason` for an empty -pasta-new, for the report")
	given := map[string]bool{}
	if ok, err := harness.ParseFlags(fs, args); !ok {
		return err
	}
	if o.Rounds < 1 {
		return harness.Misused(fs)
	}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	if o.Quick && !given["rtts"] {
		o.RTTs = []int{0, 15, 100}
	}
	if o.Quick && !given["ccs"] {
		o.CCs = []string{"cubic"}
	}
	if o.Quick && !given["connections"] {
		o.Connections = []int{1}
	}
	for _, program := range []string{"pasta", "iperf3", "wrk", "redis-benchmark", "redis-server", "nginx", "wget"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("find %s: %w (Debian's packages are passt, iperf3, wrk, redis-server, nginx-light and wget)", program, err)
		}
	}
	if o.newPasta == "" {
		o.Sides = slices.DeleteFunc(o.Sides, func(side string) bool { return side == sidePastaNew })
	}
	if len(o.Sides) == 0 {
		return harness.Misused(fs)
	}
	return harness.InLab(func(ctx context.Context, l *lab.Lab) error {
		b := &bench{options: o, lab: l}
		return b.all(ctx)
	})
}

// list defines a flag with comma-separated values.
func list[T any](fs *flag.FlagSet, to *[]T, name, usage string, parse func(string) (T, error)) {
	fs.Func(name, usage, func(text string) error {
		*to = nil
		for f := range strings.SplitSeq(text, ",") {
			v, err := parse(f)
			if err != nil {
				return err
			}
			*to = append(*to, v)
		}
		return nil
	})
}

// oneOf returns a parser of names.
func oneOf(names ...string) func(string) (string, error) {
	return func(text string) (string, error) {
		if !slices.Contains(names, text) {
			return "", fmt.Errorf("unknown value %q: use one of %s", text, strings.Join(names, ", "))
		}
		return text, nil
	}
}

func (b *bench) all(ctx context.Context) error {
	b.report = &gatewayReport{Options: b.options, Run: harness.Begin()}
	if err := b.readVersions(ctx); err != nil {
		return err
	}
	links := b.Links
	if !slices.Contains(b.Only, partPoints) && !slices.Contains(b.Only, partRequests) {
		links = nil
	}
	for _, link := range links {
		p, err := newGatewayPath(ctx, b.lab, link, b.newPasta)
		if err != nil {
			return err
		}
		rtts := b.RTTs
		if link == linkVeth {
			rtts = []int{0}
		}
		for _, mtu := range b.MTUs {
			if err := b.path(ctx, p, mtu, rtts); err != nil {
				return fmt.Errorf("%s, MTU %d: %w", link, mtu, err)
			}
		}
	}
	if slices.Contains(b.Only, partRR) {
		if err := b.rr(ctx); err != nil {
			return err
		}
	}
	if slices.Contains(b.Only, partIperf) {
		if err := b.seeds(ctx); err != nil {
			return err
		}
	}
	if slices.Contains(b.Only, partUDP) {
		if err := b.datagrams(ctx); err != nil {
			return err
		}
	}
	if slices.Contains(b.Only, partPrograms) {
		if err := b.runPrograms(ctx); err != nil {
			return err
		}
	}
	if slices.Contains(b.Only, partCore) {
		if err := b.core(ctx); err != nil {
			return err
		}
	}
	if slices.Contains(b.Only, partRoom) {
		if err := b.ablation(ctx); err != nil {
			return err
		}
		if len(b.Only) == 1 {
			return nil
		}
	}
	b.report.End()
	return harness.Publish(command, b.report)
}

// readVersions reads the versions of the packages of pasta. The programs of some packages do not know theirs.
func (b *bench) readVersions(ctx context.Context) error {
	out, err := exec.CommandContext(ctx, "dpkg-query", "--show", "--showformat", "${Version}", "passt").Output()
	if err != nil {
		return fmt.Errorf("read the version of passt: %w", err)
	}
	b.report.PastaVersion = string(out)
	b.report.Compare(ctx, map[string]string{"iperf3": "--version", "wrk": "-v", "redis-server": "--version", "nginx": "-v", "wget": "--version"})
	b.report.Versions["pasta"] = b.report.PastaVersion
	if b.newPasta == "" {
		return nil
	}
	text, err := os.ReadFile(filepath.Join(b.newPasta, "version"))
	if err != nil {
		return fmt.Errorf("read the version of the newer pasta: %w", err)
	}
	b.report.PastaNewVersion = strings.TrimSpace(string(text))
	b.report.Versions["pasta_new"] = b.report.PastaNewVersion
	return nil
}

// gatewayRun contains the figures of one side under one load.
type gatewayRun struct {
	Mbit    float64 `json:"mbit"`          // payload received after the warm-up
	First   float64 `json:"first_10mb_s"`  // time since before connect(2); NaN if less than 10 MB arrived
	Gap     float64 `json:"longest_gap_s"` // longest time without a byte on all connections
	CPU     float64 `json:"cpu_s_per_gb"`
	Partial uint64  `json:"partial_sends"`
	Resent  uint64  `json:"retransmits"`       // segments that host and server retransmitted
	Inside  uint64  `json:"retransmits_guest"` // segments retransmitted between guest and gateway in both directions; with pasta, by the guest only
	Seconds []int   `json:"seconds_mbit"`
	Error   string  `json:"error,omitempty"`
}

// path measures all points of a path with one MTU.
func (b *bench) path(ctx context.Context, p *gatewayPath, mtu int, rtts []int) (err error) {
	sides, stop, err := p.newSides(ctx, b.Sides, mtu)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	for _, rtt := range rtts {
		if err := p.delay(time.Duration(rtt) * time.Millisecond); err != nil {
			return err
		}
		if slices.Contains(b.Only, partRequests) {
			if err := b.requests(p, sides, mtu, rtt); err != nil {
				return err
			}
		}
		if !slices.Contains(b.Only, partPoints) {
			continue
		}
		for _, cc := range b.CCs {
			if err := choose(p, sides, cc); err != nil {
				return err
			}
			for _, direction := range b.Directions {
				for _, n := range b.Connections {
					point := &gatewayPoint{Link: p.name, RTT: rtt, MTU: mtu, CC: cc, Direction: direction, Connections: n, sides: map[string][]gatewayRun{}}
					if err := b.point(p, sides, point); err != nil {
						return err
					}
					b.report.Points = append(b.report.Points, point)
					fmt.Fprintln(os.Stderr, point)
				}
			}
		}
	}
	return nil
}

// newSides creates the sides of a path. stop stops all of them.
func (p *gatewayPath) newSides(ctx context.Context, names []string, mtu int) (sides map[string]*gatewaySide, stop func() error, err error) {
	sides = map[string]*gatewaySide{}
	stop = func() (err error) {
		for _, s := range sides {
			err = errors.Join(err, s.stop())
		}
		return err
	}
	for _, name := range names {
		side, err := p.newSide(ctx, name, mtu)
		if side != nil {
			sides[name] = side
		}
		if err != nil {
			return nil, nil, errors.Join(err, stop())
		}
	}
	return sides, stop, nil
}

func (b *bench) point(p *gatewayPath, sides map[string]*gatewaySide, point *gatewayPoint) error {
	all, warmup := b.duration(point.RTT)
	for range b.pointRounds(point.RTT) {
		for _, name := range harness.Turn(b.Sides, b.round) {
			r, err := b.load(p, sides[name], task{
				Kind: point.Direction, CC: point.CC, Connections: point.Connections, Duration: all,
			}, warmup)
			if err != nil {
				return err
			}
			point.sides[name] = append(point.sides[name], *r)
			// Wait until no packet of the previous load is in flight.
			time.Sleep(2*time.Duration(point.RTT)*time.Millisecond + 100*time.Millisecond)
		}
		b.round++
	}
	return nil
}

// duration returns the duration of a load. The warm-up lasts until the load reaches its rate; the measurement lasts as
// long.
func (b *bench) duration(rtt int) (all, warmup time.Duration) {
	if b.Quick {
		all = time.Second + 10*time.Duration(rtt)*time.Millisecond
	} else {
		all = 1500*time.Millisecond + 15*time.Duration(rtt)*time.Millisecond
	}
	return all, all / 2
}

// pointRounds returns the number of runs of a point: short ones vary more.
func (o *options) pointRounds(rtt int) int {
	if o.Quick || rtt > 1 {
		return o.Rounds
	}
	return 3 * o.Rounds
}

// MarshalJSON writes figures that were not measured as null.
func (r gatewayRun) MarshalJSON() ([]byte, error) {
	type plain gatewayRun
	return json.Marshal(struct {
		plain
		Mbit  harness.Figure `json:"mbit"`
		First harness.Figure `json:"first_10mb_s"`
		Gap   harness.Figure `json:"longest_gap_s"`
		CPU   harness.Figure `json:"cpu_s_per_gb"`
	}{plain(r), harness.Figure(r.Mbit), harness.Figure(r.First), harness.Figure(r.Gap), harness.Figure(r.CPU)})
}

func (b *bench) load(p *gatewayPath, s *gatewaySide, t task, warmup time.Duration) (*gatewayRun, error) {
	b.loads++
	t.Run, t.Target = b.loads, p.target()
	resent, err := p.resent()
	if err != nil {
		return nil, err
	}
	counts, err := s.counts()
	if err != nil {
		return nil, err
	}
	cpu, err := s.cpu()
	if err != nil {
		return nil, err
	}
	var result gatewayResult
	if err := s.client.Ask(t, &result); err != nil {
		return nil, err
	}
	cpuAfter, err := s.cpu()
	if err != nil {
		return nil, err
	}
	countsAfter, err := s.counts()
	if err != nil {
		return nil, err
	}
	resentAfter, err := p.resent()
	if err != nil {
		return nil, err
	}
	arrived := result.Arrived
	if t.Kind == upload {
		arrived = &arrivals{}
		if err := p.server.Ask(t.Run, arrived); err != nil {
			return nil, err
		}
	}
	end := result.Start + int64(t.Duration)
	r := &gatewayRun{
		Mbit: arrived.rate(result.Start+int64(warmup), end) / 1e6, First: math.NaN(), Gap: float64(arrived.gap(result.Start, end)) / 1e9,
		CPU: math.NaN(), Error: result.Error,
		Partial: countsAfter.Partial - counts.Partial, Resent: resentAfter - resent,
		Inside: countsAfter.Retransmitted - counts.Retransmitted,
	}
	if s.name != sideNative {
		r.Inside += result.Resent
	}
	if arrived.First > 0 {
		r.First = float64(arrived.First-result.Start) / 1e9
	}
	if bytes := arrived.at(end); bytes > 0 && s.around != nil {
		r.CPU = (cpuAfter - cpu).Seconds() / (bytes / 1e9)
	}
	for at := result.Start; at+1e9 <= end; at += 1e9 {
		r.Seconds = append(r.Seconds, int(arrived.rate(at, at+1e9)/1e6))
	}
	return r, nil
}

// requestsTime is the duration of the requests load, without the round trips that are added.
const requestsTime = time.Second

// requests measures the number of requests per second on one connection.
func (b *bench) requests(p *gatewayPath, sides map[string]*gatewaySide, mtu, rtt int) error {
	if err := choose(p, sides, "cubic"); err != nil {
		return err
	}
	rates := map[string][]float64{}
	for range b.Rounds {
		for _, name := range harness.Turn(b.Sides, b.round) {
			r, err := b.trips(p, sides[name], task{Kind: roundTrips, Connections: 1, Duration: requestsTime + 5*time.Duration(rtt)*time.Millisecond})
			if err != nil {
				return err
			}
			rates[name] = append(rates[name], float64(r.Rate))
		}
		b.round++
	}
	r := gatewayRequests{Link: p.name, RTT: rtt, MTU: mtu, PerSecond: map[string]harness.Figure{}}
	for name, v := range rates {
		r.PerSecond[name] = harness.Figure(harness.SpreadOf(v).Median)
	}
	b.report.Requests = append(b.report.Requests, r)
	fmt.Fprintln(os.Stderr, r)
	return nil
}

func choose(p *gatewayPath, sides map[string]*gatewaySide, cc string) error {
	for _, s := range sides {
		if err := s.choose(p.addresses[1], cc); err != nil {
			return err
		}
	}
	return p.choose(cc)
}
