// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"sockeye/bench/harness"
	"sockeye/lab"
)

// Datagrams go over a veth pair between the far host and a program of the host or of a guest. Inbound datagrams pass a
// forwarded port, as IPFIX to a collector does.
const (
	inbound  = "inbound"
	outbound = "outbound"
)

// farDatagramPort is the port on which the far host receives datagrams.
const farDatagramPort = 7100

// datagramPort returns the port of a side's program. Each side has its own, because all are on the same host.
func datagramPort(side string) uint16 {
	return farDatagramPort + 1 + uint16(slices.Index(gatewaySides, side))
}

// datagramLost contains the number of lost datagrams by place, from the counters of the kernel.
type datagramLost struct {
	Socket    int `json:"gateway_socket"` // socket of the host
	Interface int `json:"guest_interface"`
	Program   int `json:"program_socket"` // socket of the program
	Elsewhere int `json:"elsewhere"`
}

func (l datagramLost) String() string {
	var parts []string
	for _, x := range []struct {
		n     int
		where string
	}{
		{l.Socket, "at the gateway's socket"}, {l.Interface, "at the guest's interface"},
		{l.Program, "at the program's socket"}, {l.Elsewhere, "elsewhere"},
	} {
		if x.n != 0 {
			parts = append(parts, fmt.Sprintf("%d %s", x.n, x.where))
		}
	}
	return strings.Join(parts, ", ")
}

// A datagramLoad is a burst of datagrams, or datagrams at a fixed rate, on all sides.
type datagramLoad struct {
	Burst int                      `json:"datagrams,omitempty"`
	Rate  int                      `json:"per_second,omitempty"`
	Runs  map[string][]datagramRun `json:"runs"`
}

// datagramBuffers contains the sizes of receive buffers, in bytes as the kernel counts them.
type datagramBuffers struct {
	Program int `json:"program"` // of all sides
	Sockeye int `json:"sockeye"` // of the gateway's socket of the host
	Pasta   int `json:"pasta"`
	// PastaNew is 0 without sidePastaNew.
	PastaNew int `json:"pasta_new"`
}

// A datagramRun is the result of one load on one side.
type datagramRun struct {
	Sent    int            `json:"sent"`
	Arrived int            `json:"arrived"`
	Elapsed float64        `json:"sending_s"`
	CPU     harness.Figure `json:"cpu_us_per_datagram"` // of the gateway, per received datagram
	Lost    datagramLost   `json:"lost"`
}

func (l *datagramLoad) name() string {
	if l.Rate > 0 {
		return fmt.Sprintf("%d/s", l.Rate)
	}
	return fmt.Sprintf("burst of %d", l.Burst)
}

// lost returns the number of datagrams that a side sent and lost in all rounds.
func (l *datagramLoad) lost(side string) (sent int, lost datagramLost) {
	for _, r := range l.Runs[side] {
		sent += r.Sent
		lost.Socket += r.Lost.Socket
		lost.Interface += r.Lost.Interface
		lost.Program += r.Lost.Program
		lost.Elsewhere += r.Lost.Elsewhere
	}
	return sent, lost
}

func (r *datagramRun) loss() float64 { return 1 - float64(r.Arrived)/float64(r.Sent) }

const (
	datagramMTU   = 65520 // of the guest, the default of both gateways
	datagramTries = 2     // attempts per rate; the better one counts
	// datagramLoss is the share of datagrams that a side may lose at a rate. datagramPace is the share of the rate that
	// the sender must reach.
	datagramLoss = 0.001
	datagramPace = 0.95
)

// carried returns whether a side received nearly all datagrams of a rate.
func (l *datagramLoad) carried(side string) bool {
	return slices.ContainsFunc(l.Runs[side], func(r datagramRun) bool { return r.loss() < datagramLoss && r.sentAt(l.Rate) })
}

// slow returns whether the sender did not reach the rate, although nearly all datagrams that it sent arrived.
func (l *datagramLoad) slow(side string) bool {
	return !l.carried(side) && slices.ContainsFunc(l.Runs[side], func(r datagramRun) bool { return r.loss() < datagramLoss })
}

func (r *datagramRun) sentAt(rate int) bool {
	return float64(r.Sent) >= datagramPace*float64(rate)*r.Elapsed
}

// gatewayDatagrams contains all loads of datagrams of one direction and size.
type gatewayDatagrams struct {
	Direction string          `json:"direction"`
	Bytes     int             `json:"bytes"`
	Bursts    []*datagramLoad `json:"bursts"`
	Rates     []*datagramLoad `json:"rates"`
}

func (d *gatewayDatagrams) name() string { return fmt.Sprintf("%s, %d bytes", d.Direction, d.Bytes) }

func (d *gatewayDatagrams) String() string {
	s := "udp " + d.name() + ":"
	for _, side := range d.sides() {
		s += " " + side
		for _, l := range d.Bursts {
			s += fmt.Sprintf(" %.0f of %d,", l.arrived(side), l.Burst)
		}
		s += " " + d.highestText(side) + "/s;"
	}
	return strings.TrimSuffix(s, ";")
}

// highestText formats the highest rate, with a + if the sender was the limit.
func (d *gatewayDatagrams) highestText(side string) string {
	text := strconv.Itoa(d.highest(side))
	if slices.ContainsFunc(d.Rates, func(l *datagramLoad) bool { return l.slow(side) }) {
		return text + "+"
	}
	return text
}

// highest returns the highest rate that a side carried; 0 for none.
func (d *gatewayDatagrams) highest(side string) (rate int) {
	for _, l := range d.Rates {
		if l.carried(side) {
			rate = max(rate, l.Rate)
		}
	}
	return rate
}

// sides returns the sides that were measured.
func (d *gatewayDatagrams) sides() []string {
	if len(d.Bursts) == 0 {
		return nil
	}
	return having(d.Bursts[0].Runs)
}

var (
	datagramSizes  = []int{200, 1400} // bytes of payload
	datagramBursts = []int{2_000, 20_000}
	datagramRates  = []int{20_000, 50_000, 100_000, 150_000, 200_000, 300_000} // per second
)

// datagrams measures all loads of datagrams.
func (b *bench) datagrams(ctx context.Context) (err error) {
	p, far, sides, err := b.datagramSides(ctx, b.Sides)
	defer func() {
		for _, s := range sides {
			err = errors.Join(err, s.stop())
		}
	}()
	if err != nil {
		return err
	}
	for _, direction := range []string{inbound, outbound} {
		for _, size := range datagramSizes {
			d := &gatewayDatagrams{Direction: direction, Bytes: size}
			if err := b.datagramLoads(p, far, sides, d); err != nil {
				return fmt.Errorf("datagrams %s: %w", direction, err)
			}
			b.report.Datagrams = append(b.report.Datagrams, d)
			fmt.Fprintln(os.Stderr, d)
		}
	}
	return nil
}

// datagramSides starts the far host and sides whose programs send and receive datagrams. The caller must stop the
// sides, also after an error.
func (b *bench) datagramSides(ctx context.Context, names []string) (p *gatewayPath, far *harness.Worker, sides map[string]*gatewaySide, err error) {
	sides = map[string]*gatewaySide{}
	if p, err = newGatewayPath(ctx, b.lab, linkDatagrams, b.newPasta); err != nil {
		return p, far, sides, err
	}
	buffers := &b.report.DatagramBuffers
	ready := func(w *harness.Worker) error {
		var r datagramReady
		if err := w.Answer(&r); err != nil {
			return err
		}
		if buffers.Program != 0 && r.Buffer != buffers.Program {
			return fmt.Errorf("start %s: receive buffer of %d bytes, other processes have %d", w.Name, r.Buffer, buffers.Program)
		}
		buffers.Program = r.Buffer
		return nil
	}
	far, err = harness.StartWorker(ctx, b.lab, p.far, datagramRole+"-far", "/proc/self/exe", datagramRole, "-port", strconv.Itoa(farDatagramPort))
	if err == nil {
		err = ready(far)
	}
	for _, name := range names {
		if err != nil {
			break
		}
		port := datagramPort(name)
		if sides[name], err = p.startSide(ctx, name, datagramMTU, port, datagramRole, "-port", strconv.Itoa(int(port))); err == nil {
			err = ready(sides[name].client)
		}
		if s := sides[name]; err == nil && s.around != nil {
			to := map[string]*int{sideSockeye: &buffers.Sockeye, sidePasta: &buffers.Pasta, sidePastaNew: &buffers.PastaNew}[name]
			*to, err = receiveBufferOf(s.around.Pid(), port)
		}
	}
	return p, far, sides, err
}

func (b *bench) datagramLoads(p *gatewayPath, far *harness.Worker, sides map[string]*gatewaySide, d *gatewayDatagrams) error {
	measure := func(l *datagramLoad, name string) error {
		r, err := b.datagramLoad(p, far, sides[name], d, l)
		if err == nil {
			l.Runs[name] = append(l.Runs[name], *r)
		}
		return err
	}
	for _, name := range b.Sides {
		// Warm-up: resolve the addresses of neighbours and create the flows.
		l := &datagramLoad{Burst: 10, Runs: map[string][]datagramRun{}}
		if err := measure(l, name); err != nil {
			return err
		}
		if l.arrived(name) == 0 {
			return fmt.Errorf("%s: no datagram arrives", name)
		}
	}
	for _, n := range datagramBursts {
		l := &datagramLoad{Burst: n, Runs: map[string][]datagramRun{}}
		for range b.datagramRounds() {
			for _, name := range harness.Turn(b.Sides, b.round) {
				if err := measure(l, name); err != nil {
					return err
				}
			}
			b.round++
		}
		d.Bursts = append(d.Bursts, l)
	}
	left := slices.Clone(b.Sides) // sides that carried the previous rate
	for _, rate := range datagramRates {
		l := &datagramLoad{Rate: rate, Runs: map[string][]datagramRun{}}
		for range datagramTries {
			for _, name := range harness.Turn(b.Sides, b.round) {
				if !slices.Contains(left, name) || l.carried(name) {
					continue
				}
				if err := measure(l, name); err != nil {
					return err
				}
			}
			b.round++
		}
		left = slices.DeleteFunc(left, func(name string) bool { return !l.carried(name) })
		if len(l.Runs) > 0 {
			d.Rates = append(d.Rates, l)
		}
	}
	return nil
}

// datagramRounds returns the number of times that each burst is sent.
func (o *options) datagramRounds() int {
	if o.Quick {
		return o.Rounds
	}
	return 3 * o.Rounds
}

// arrived returns the median number of datagrams of a burst that a side's program received, and NaN without a run.
func (l *datagramLoad) arrived(side string) float64 {
	var v []float64
	for _, r := range l.Runs[side] {
		v = append(v, float64(r.Arrived))
	}
	return harness.SpreadOf(v).Median
}

// A load ends when all datagrams have arrived or none arrives for datagramQuiet.
const (
	datagramLook  = 10 * time.Millisecond
	datagramQuiet = 250 * time.Millisecond
	datagramWait  = 3 * time.Second
)

func (b *bench) datagramLoad(p *gatewayPath, far *harness.Worker, s *gatewaySide, d *gatewayDatagrams, l *datagramLoad) (*datagramRun, error) {
	b.loads++
	from, to := s.client, far
	t := datagramTask{
		Run: b.loads, Bytes: d.Bytes, Count: l.Burst, Rate: l.Rate, Target: netip.AddrPortFrom(p.addresses[1], farDatagramPort),
	}
	if l.Rate > 0 {
		t.Count = int(float64(l.Rate) * b.datagramSteady().Seconds())
	}
	if d.Direction == inbound {
		from, to = to, from
		t.Target = netip.AddrPortFrom(p.addresses[0], datagramPort(s.name))
	}
	var count datagramCount
	if err := to.Ask(datagramTask{Run: t.Run, Bytes: t.Bytes}, &count); err != nil {
		return nil, err
	}
	before, err := p.lost(s, d.Direction)
	if err != nil {
		return nil, err
	}
	cpu, err := s.cpu()
	if err != nil {
		return nil, err
	}
	var sent datagramSent
	if err := from.Ask(t, &sent); err != nil {
		return nil, err
	}
	start, changed, arrived := time.Now(), time.Now(), -1
	for arrived < sent.Datagrams && time.Since(changed) < datagramQuiet && time.Since(start) < datagramWait {
		if arrived >= 0 {
			time.Sleep(datagramLook)
		}
		if err := to.Ask(datagramTask{}, &count); err != nil {
			return nil, err
		}
		if count.Datagrams != arrived {
			arrived, changed = count.Datagrams, time.Now()
		}
	}
	cpuAfter, err := s.cpu()
	if err != nil {
		return nil, err
	}
	after, err := p.lost(s, d.Direction)
	if err != nil {
		return nil, err
	}
	r := &datagramRun{
		Sent: sent.Datagrams, Arrived: arrived, Elapsed: sent.Elapsed.Seconds(), CPU: harness.Figure(math.NaN()),
		Lost: datagramLost{
			Socket: after.Socket - before.Socket, Interface: after.Interface - before.Interface, Program: after.Program - before.Program,
		},
	}
	// The drop counters also count other packets, such as the guest's IPv6 neighbour discovery.
	r.Lost.Elsewhere = max(0, r.Sent-r.Arrived-r.Lost.Socket-r.Lost.Interface-r.Lost.Program)
	if s.around != nil && arrived > 0 {
		r.CPU = harness.Figure(float64((cpuAfter - cpu).Microseconds()) / float64(arrived))
	}
	return r, nil
}

// datagramSteady returns the duration of a load with a rate.
func (o *options) datagramSteady() time.Duration {
	if o.Quick {
		return 200 * time.Millisecond
	}
	return 400 * time.Millisecond
}

// cpu returns the CPU time of a side's gateway for each datagram at the lowest rate, in microseconds.
func (d *gatewayDatagrams) cpu(side string) float64 {
	if len(d.Rates) > 0 {
		if r := d.Rates[0].best(side); r != nil {
			return float64(r.CPU)
		}
	}
	return math.NaN()
}

// best returns the attempt that lost the smallest share of its datagrams, and nil if there was no attempt.
func (l *datagramLoad) best(side string) *datagramRun {
	runs := l.Runs[side]
	if len(runs) == 0 {
		return nil
	}
	r := slices.MinFunc(runs, func(a, b datagramRun) int { return cmp.Compare(a.loss(), b.loss()) })
	return &r
}

// lost returns the number of datagrams lost on the path of a side since its start.
func (p *gatewayPath) lost(s *gatewaySide, direction string) (l datagramLost, err error) {
	errorsOf := func(n *lab.Namespace, names ...string) (sum int) {
		if err != nil {
			return 0
		}
		err = n.Do(func() error {
			b, err := os.ReadFile("/proc/thread-self/net/snmp")
			for _, name := range names {
				sum += int(harness.SNMP(string(b), "Udp", name))
			}
			return err
		})
		return sum
	}
	if direction == outbound {
		l.Program = errorsOf(p.far, "RcvbufErrors")
	}
	if s.around == nil {
		if direction == inbound {
			l.Program = errorsOf(p.host, "RcvbufErrors")
		}
		return l, err
	}
	l.Socket = errorsOf(p.host, "RcvbufErrors", "SndbufErrors")
	if err != nil {
		return l, err
	}
	pid, err := s.program()
	if err != nil {
		return l, err
	}
	dir := filepath.Join("/proc", strconv.Itoa(pid), "net")
	text, err := os.ReadFile(filepath.Join(dir, "dev"))
	if err != nil {
		return l, fmt.Errorf("count drops of %s: %w", s.name, err)
	}
	l.Interface = deviceDrops(string(text), s.device)
	if direction == inbound {
		text, err := os.ReadFile(filepath.Join(dir, "snmp"))
		if err != nil {
			return l, fmt.Errorf("count drops of %s: %w", s.name, err)
		}
		l.Program = int(harness.SNMP(string(text), "Udp", "RcvbufErrors"))
	}
	return l, nil
}

// deviceDrops returns the number of packets that an interface dropped in both directions, from /proc/net/dev.
func deviceDrops(text, device string) (sum int) {
	for line := range strings.Lines(text) {
		name, counters, ok := strings.Cut(line, ":")
		if f := strings.Fields(counters); ok && strings.TrimSpace(name) == device && len(f) == 16 {
			for _, i := range []int{3, 11} {
				n, _ := strconv.Atoi(f[i])
				sum += n
			}
		}
	}
	return sum
}
