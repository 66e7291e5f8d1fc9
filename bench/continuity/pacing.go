// SPDX-License-Identifier: Apache-2.0

package continuity

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/internal/api"
	"sockeye/internal/sockdiag"
	"sockeye/internal/stats"
	"sockeye/lab"
	"sockeye/lab/swarm"
	"sockeye/lab/traffic"
)

// The comparison of pacing: routers (FRR's bgpd) with a large table send initial dumps by BMP to nfacctd. Two events make
// all routers send their dumps: the member of all routers restarts, and its slot is drained.

const (
	pacingPart  = "pace"
	pacingSlots = 2
	// routesPerUpdate is the number of routes with the same attributes.
	routesPerUpdate = 100
	// sampleInterval is the time between two samples of the member's connections.
	sampleInterval = 50 * time.Millisecond
	// pollInterval is the time between two requests to the routers and to the agent.
	pollInterval = 500 * time.Millisecond
	// dumpPatience is the timeout of the dumps of all routers.
	dumpPatience = 8 * time.Minute
	// gatePatience is the timeout of the opening of the gates after the drain.
	gatePatience = time.Minute
	// feederAS and feederAddress are of the BGP speaker from which the routers have their routes.
	feederAS = 64900
	// maxTable is the number of routes below 224.0.0.0.
	maxTable = (224 - 32) << 16
)

var feederAddress = netip.MustParseAddr("10.76.0.250")

// pacingArms are the arms of the comparison of pacing.
var pacingArms = []arm{
	{name: "without", title: "without pacing", agent: true, onMove: "reset"},
	{name: "with", title: "pace: {devices: 2}", agent: true, onMove: "reset", pace: "{devices: 2, timeout: 2m}"},
}

// pacing is the load of the comparison of pacing.
type pacing struct {
	Routers int `json:"routers"`
	Routes  int `json:"routes"` // of each router
	Rounds  int `json:"rounds"`
}

// pacedRun is one run of both events in one arm.
type pacedRun struct {
	Arm     string `json:"arm"`
	Round   int    `json:"round"`
	Restart dumps  `json:"restart"`
	Drain   dumps  `json:"drain"`
}

// dumps describes the initial dumps after an event. The times begin when the new member is ready to receive them.
type dumps struct {
	Routers int `json:"routers"`       // with a connection to the member at the end
	Queue   int `json:"queue_bytes"`   // largest sum of the receive queues of the member's connections (Recv-Q)
	Deepest int `json:"deepest_bytes"` // largest receive queue of one connection
	Memory  int `json:"memory_bytes"`  // peak resident set of the member's main process
	AtOnce  int `json:"dumps_at_once"` // largest number of routers that sent at the same time
	// Seconds is the time until the member has read the last dump, and Settled the time until Sockeye considered all dumps
	// as sent. Each is the median time between the first and the last byte of a dump, in which the member has a part of the
	// routes of a router. Idle is the part of Seconds in which no router sent its dump.
	Seconds float64 `json:"seconds"`
	Settled float64 `json:"settled_seconds"`
	Each    float64 `json:"seconds_of_each"`
	Idle    float64 `json:"idle_seconds"`
	Bytes   uint64  `json:"bytes"` // of all dumps
	// Refused are the SYNs that the member's slot refused, Failed the connection attempts of routers that failed, and Resets
	// the connections of routers that were reset.
	Refused uint64 `json:"refused"`
	Failed  uint64 `json:"failed_attempts"`
	Resets  uint64 `json:"resets"`
	// Dumps are the dumps in the order of their ends.
	Dumps []dumpTime `json:"dumps"`
}

// dumpTime is the dump of one router: seconds from the begin until its first and its last byte was received.
type dumpTime struct {
	Router netip.Addr `json:"router"`
	From   float64    `json:"from"`
	To     float64    `json:"to"`
}

// worse returns the figures of the worse of two rounds, each for itself.
func (d dumps) worse(o dumps) dumps {
	d.Routers = max(d.Routers, o.Routers)
	d.Queue, d.Deepest, d.Memory, d.AtOnce = max(d.Queue, o.Queue), max(d.Deepest, o.Deepest), max(d.Memory, o.Memory), max(d.AtOnce, o.AtOnce)
	if o.Seconds > d.Seconds {
		d.Seconds, d.Dumps = o.Seconds, o.Dumps
	}
	d.Settled, d.Each, d.Idle = max(d.Settled, o.Settled), max(d.Each, o.Each), max(d.Idle, o.Idle)
	d.Bytes = max(d.Bytes, o.Bytes)
	d.Refused, d.Failed, d.Resets = max(d.Refused, o.Refused), max(d.Failed, o.Failed), max(d.Resets, o.Resets)
	return d
}

// comparePacing runs the rounds of the comparison.
func (b *bench) comparePacing(ctx context.Context) (runs []pacedRun, err error) {
	// Routers run as user frr, who cannot access the scratch directory.
	l, err := lab.New(ctx, lab.Options{Routers: b.Pacing.Routers})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	own := *b
	own.Lab, own.match = l, `nfacctd-(\d+)(\.conf|\])`
	own.onlyBMP = true // nfacctd opens its UDP socket 5 s after its start
	own.unmountAtClose()
	if err := own.startRouters(ctx); err != nil {
		return nil, err
	}
	for round := range b.Pacing.Rounds {
		for _, a := range harness.Turn(pacingArms, round) {
			run, err := own.measurePacing(ctx, a)
			if err != nil {
				return runs, fmt.Errorf("%s, round %d: %w", a.name, round+1, err)
			}
			run.Round = round
			runs = append(runs, run)
			fmt.Fprint(os.Stderr, ".")
		}
	}
	return runs, nil
}

// startRouters starts the routers, and gives them their routes.
func (b *bench) startRouters(ctx context.Context) error {
	feeder, err := b.Lab.Attach("feeder", netip.PrefixFrom(feederAddress, 24))
	if err != nil {
		return err
	}
	routes := table(b.Pacing.Routes)
	for i, r := range b.Lab.Routers() {
		_, err := b.Lab.StartRouter(lab.RouterConfig{
			Router: i, Collector: netip.AddrPortFrom(lab.CollectorIPv4, bmpPort), Neighbors: []int{},
			Extra: []string{
				fmt.Sprintf("router bgp %d", r.ASN),
				fmt.Sprintf(" neighbor %v remote-as %d", feederAddress, feederAS),
				fmt.Sprintf(" neighbor %v passive", feederAddress),
				" address-family ipv4 unicast",
				fmt.Sprintf("  neighbor %v activate", feederAddress),
				" exit-address-family",
				"exit",
			},
		})
		if err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, dumpPatience)
	defer cancel()
	for _, r := range b.Lab.Routers() {
		var last error
		err := b.Lab.WaitFor(ctx, "BGP session of "+r.Name, func() (bool, error) {
			last = feeder.Do(func() error {
				s, err := traffic.DialBGP(ctx, traffic.BGPConfig{
					Local:  traffic.Peer{Address: feederAddress, AS: feederAS},
					Target: netip.AddrPortFrom(r.BGP4, 179), Routes: routes,
				})
				if err == nil {
					b.Lab.AtClose(s.Close)
				}
				return err
			})
			return last == nil, r.BGP.Err()
		})
		if err != nil {
			return errors.Join(err, last)
		}
	}
	return b.waitRouters(ctx, "the routes of the routers", "show bgp ipv4 unicast summary json", func(_ *lab.Router, answer string) bool {
		return acceptedRoutes(answer) == b.Pacing.Routes
	})
}

// table returns n IPv4 routes, in groups with the same attributes.
func table(n int) (routes []traffic.Route) {
	const first = 32 << 24 // 32.0.0.0
	for from := 0; from < n; from += routesPerUpdate {
		r := traffic.Route{
			NextHop: feederAddress, ASPath: []uint32{feederAS, 65536 + uint32(len(routes)), 65000},
			Communities: []uint32{traffic.Community(feederAS, uint16(len(routes)))},
		}
		for i := from; i < min(from+routesPerUpdate, n); i++ {
			var a [4]byte
			binary.BigEndian.PutUint32(a[:], first+uint32(i)<<8)
			r.Prefixes = append(r.Prefixes, netip.PrefixFrom(netip.AddrFrom4(a), 24))
		}
		routes = append(routes, r)
	}
	return routes
}

// acceptedRoutes returns the number of routes from the feeder, by the answer to "show bgp ipv4 unicast summary json".
func acceptedRoutes(answer string) int {
	var summary struct {
		Peers map[string]struct {
			Routes int `json:"pfxRcd"`
		} `json:"peers"`
	}
	if json.Unmarshal([]byte(answer), &summary) != nil {
		return 0
	}
	return summary.Peers[feederAddress.String()].Routes
}

// measurePacing runs both events in one arm.
func (b *bench) measurePacing(ctx context.Context, a arm) (run pacedRun, err error) {
	run.Arm = a.name
	s := &service{bench: b, arm: a}
	members := make([]*lab.Collector, pacingSlots)
	defer func() {
		for _, m := range members {
			if m != nil {
				err = errors.Join(err, m.Stop(grace))
			}
		}
		err = errors.Join(err, s.close())
	}()
	starting := func(slot int) func() error {
		return func() (err error) {
			members[slot], err = b.startCollector(slot)
			return err
		}
	}
	// The first dumps are needed, and not measured. At first, slot 0 has almost all routers.
	s.arm.pace = ""
	err = inOrder(
		func() error { return s.policy(pacingSlots) }, func() error { return s.startAgent(ctx, b.Binary) },
		s.running(ctx, "slot", "set", "0", "--weight", "256"), s.running(ctx, "slot", "set", "1", "--weight", "1"),
		starting(0), starting(1), s.readying(ctx, pacingSlots),
		func() error {
			return b.waitRouters(ctx, "the first dumps", "show bmp", func(_ *lab.Router, answer string) bool { return sentDump(answer, b.Pacing.Routes) })
		},
	)
	if err != nil {
		return run, err
	}
	s.arm = a
	if err := s.apply(ctx, pacingSlots); err != nil {
		return run, err
	}

	sessions, err := b.Lab.Sessions()
	if err != nil {
		return run, err
	}
	here := slices.DeleteFunc(b.Lab.Routers(), func(r *lab.Router) bool { return sessions[r.BMP] != 0 })
	err = inOrder(func() error { return members[0].Stop(grace) }, starting(0), s.readying(ctx, pacingSlots))
	if err != nil {
		return run, err
	}
	nothing := func() error { return nil }
	if run.Restart, err = s.watchDumps(ctx, members[0], here, nothing); err != nil {
		return run, fmt.Errorf("restart: %w", err)
	}
	drained := time.Now()
	if run.Drain, err = s.watchDumps(ctx, members[1], here, s.running(ctx, "slot", "set", "0", "drain")); err != nil {
		return run, fmt.Errorf("drain: %w", err)
	}
	err = b.Lab.WaitFor(ctx, "the gates to open", func() (bool, error) {
		moves, err := s.movesNow(ctx)
		if err == nil && len(moves.Gates) > 0 && time.Since(drained) > gatePatience {
			err = fmt.Errorf("timeout: %+v", moves)
		}
		return len(moves.Gates) == 0, err
	})
	return run, err
}

// startCollector starts nfacctd as the member of a slot.
func (b *bench) startCollector(slot int) (*lab.Collector, error) {
	c := lab.CollectorConfig{Slot: slot, MaxPeers: b.Pacing.Routers + 4}
	if b.lookup() {
		c.BMP = netip.AddrPortFrom(netip.IPv6Unspecified(), ownTCP+uint16(slot))
		c.IPFIX = netip.AddrPortFrom(netip.IPv6Unspecified(), ownUDP+uint16(slot))
	}
	return b.Lab.StartCollector(c)
}

// watchDumps measures the dumps of routers to a member after an event.
func (s *service) watchDumps(ctx context.Context, member *lab.Collector, routers []*lab.Router, event func() error) (d dumps, err error) {
	samples, err := s.startSampler(member, routers)
	if err != nil {
		return d, err
	}
	defer func() { err = errors.Join(err, samples.stop()) }()
	before, err := s.countRefusals(ctx)
	if err != nil {
		return d, err
	}
	if err := event(); err != nil {
		return d, err
	}
	// A router has sent its dump if it has sent all routes on a connection to the member.
	wait := func(what string, done func(*lab.Router, string) bool) error {
		return s.waitRouters(ctx, what, "show bmp", func(r *lab.Router, answer string) bool { return !slices.Contains(routers, r) || done(r, answer) })
	}
	err = wait("dumps", func(r *lab.Router, answer string) bool {
		return samples.has(r.BMP) && sentDump(answer, s.Pacing.Routes)
	})
	if err == nil {
		err = wait("the member to read the dumps", func(r *lab.Router, _ string) bool { return samples.idle(r.BMP) })
	}
	if err != nil {
		moves, _ := s.movesNow(ctx)
		return d, fmt.Errorf("%w\nmoves: %+v", err, moves)
	}
	settled := samples.since()
	err = s.Lab.WaitFor(ctx, "the end of the moves", func() (bool, error) {
		moves, err := s.movesNow(ctx)
		settled = samples.since()
		if err == nil && settled > dumpPatience {
			err = fmt.Errorf("timeout: %+v", moves)
		}
		return len(moves.Running)+moves.Waiting == 0, err
	})
	if err != nil {
		return d, err
	}
	d = samples.result()
	d.Settled = settled.Seconds()
	after, err := s.countRefusals(ctx)
	if err != nil {
		return d, err
	}
	d.Refused, d.Failed, d.Resets = after.refused-before.refused, after.failed-before.failed, after.resets-before.resets
	d.Memory, err = swarm.PeakMemory(member.Pid())
	return d, err
}

// sentDump reads the answer to "show bmp", and reports whether the router has sent n routes and has nothing left to send.
// The answer has a line for each connection: remote, uptime, monitoring messages, mirrored messages, lost messages, bytes
// sent, bytes queued, and bytes queued in the kernel.
func sentDump(answer string, n int) bool {
	for line := range strings.Lines(answer) {
		f := strings.Fields(line)
		if len(f) != 8 {
			continue
		}
		messages, err := strconv.Atoi(f[2])
		if err == nil && messages >= n && f[6] == "0" && f[7] == "0" {
			return true
		}
	}
	return false
}

// waitRouters sends a command to each router until the answer is good.
func (b *bench) waitRouters(ctx context.Context, what, command string, good func(r *lab.Router, answer string) bool) error {
	waiting := b.Lab.Routers()
	var last string
	for end := time.Now().Add(dumpPatience); ; {
		waiting = slices.DeleteFunc(waiting, func(r *lab.Router) bool {
			answer, err := r.Vty(command)
			if err != nil { // a busy bgpd
				last = err.Error()
				return false
			}
			last = answer
			return good(r, answer)
		})
		if len(waiting) == 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("wait for %s: timeout; %d routers are left; last answer of %s:\n%s", what, len(waiting), waiting[len(waiting)-1].Name, last)
		}
		for _, r := range waiting {
			if err := r.BGP.Err(); err != nil {
				return fmt.Errorf("wait for %s: %w", what, err)
			}
		}
		if err := harness.Pause(ctx, pollInterval); err != nil {
			return fmt.Errorf("wait for %s: %w", what, err)
		}
	}
}

// movesNow returns the progress of the moves.
func (s *service) movesNow(ctx context.Context) (api.MovesStatus, error) {
	var all []api.MovesStatus
	err := s.Ask(ctx, "/v1/moves", &all)
	if err == nil && len(all) != 1 {
		err = fmt.Errorf("moves of %d services", len(all))
	}
	if err != nil {
		return api.MovesStatus{}, err
	}
	return all[0], nil
}

// refusals counts what routers notice.
type refusals struct {
	refused        uint64 // SYNs, by the agent
	failed, resets uint64 // of all routers, by the kernel
}

func (s *service) countRefusals(ctx context.Context) (n refusals, err error) {
	var slots []api.SlotStatus
	if err := s.Ask(ctx, "/v1/slots", &slots); err != nil {
		return n, err
	}
	for _, slot := range slots {
		for _, count := range slot.Refused {
			n.refused += count
		}
	}
	for _, r := range s.Lab.Routers() {
		err := r.Namespace.Do(func() error {
			text, err := os.ReadFile("/proc/thread-self/net/snmp")
			n.failed += harness.SNMP(string(text), "Tcp", "AttemptFails")
			n.resets += harness.SNMP(string(text), "Tcp", "EstabResets")
			return err
		})
		if err != nil {
			return n, fmt.Errorf("count resets of %s: %w", r.Name, err)
		}
	}
	return n, nil
}

// sampler samples the connections of routers to a member.
type sampler struct {
	conn    *sockdiag.Conn
	cgroup  uint64
	routers map[netip.Addr]bool // by the source address of BMP
	begun   time.Time
	end     chan struct{}
	running sync.WaitGroup

	mu      sync.Mutex
	err     error
	sampled sampled
}

// sampled contains the figures of a sampler.
type sampled struct {
	queue, deepest, atOnce int
	now                    time.Duration // of the last sample
	dumps                  map[netip.Addr]*sampledDump
}

// sampledDump is the dump of one router, in time since the begin.
type sampledDump struct {
	cookie   uint64
	received uint64
	from, to time.Duration
}

// startSampler starts to sample. Connections belong to the member whose cgroup they were created in.
func (s *service) startSampler(member *lab.Collector, routers []*lab.Router) (*sampler, error) {
	var stat unix.Stat_t
	if err := unix.Stat(member.CgroupDir(), &stat); err != nil {
		return nil, fmt.Errorf("find cgroup of %s: %w", member.Name, err)
	}
	n, err := s.Lab.Namespace("collector")
	if err != nil {
		return nil, err
	}
	p := &sampler{cgroup: stat.Ino, routers: map[netip.Addr]bool{}, begun: time.Now(), end: make(chan struct{}), sampled: sampled{dumps: map[netip.Addr]*sampledDump{}}}
	for _, r := range routers {
		p.routers[r.BMP] = true
	}
	if err := n.Do(func() (err error) { p.conn, err = sockdiag.Open(); return err }); err != nil {
		return nil, err
	}
	p.running.Go(func() {
		tick := time.NewTicker(sampleInterval)
		defer tick.Stop()
		for p.sample() == nil {
			select {
			case <-p.end:
				return
			case <-tick.C:
			}
		}
	})
	return p, nil
}

// sample takes one sample.
func (p *sampler) sample() error {
	var sockets []sockdiag.Socket
	err := p.conn.Dump(sockdiag.Query{States: sockdiag.States(0).With(sockdiag.Established), LocalPort: bmpPort}, func() { sockets = sockets[:0] }, func(s *sockdiag.Socket) {
		if s.Cgroup == p.cgroup && p.routers[s.Remote.Addr()] {
			sockets = append(sockets, *s)
		}
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
	p.sampled.add(time.Since(p.begun), sockets)
	return err
}

// add adds a sample.
func (m *sampled) add(now time.Duration, sockets []sockdiag.Socket) {
	m.now = now
	queue, sending := 0, 0
	for i := range sockets {
		s := &sockets[i]
		queue += int(s.Unread)
		m.deepest = max(m.deepest, int(s.Unread))
		if s.Info.Bytes_received == 0 {
			continue
		}
		d := m.dumps[s.Remote.Addr()]
		if d == nil || d.cookie != s.Cookie {
			d = &sampledDump{cookie: s.Cookie, from: now}
			m.dumps[s.Remote.Addr()] = d
		}
		if s.Unread > 0 || s.Info.Bytes_received != d.received {
			sending++
			d.received, d.to = s.Info.Bytes_received, now
		}
	}
	m.queue, m.atOnce = max(m.queue, queue), max(m.atOnce, sending)
}

// idle reports whether a router has sent nothing for a while, and everything was read.
func (m *sampled) idle(router netip.Addr) bool {
	d := m.dumps[router]
	return d != nil && m.now-d.to > 10*sampleInterval
}

// result returns the figures.
func (m *sampled) result() dumps {
	d := dumps{Routers: len(m.dumps), Queue: m.queue, Deepest: m.deepest, AtOnce: m.atOnce, Dumps: []dumpTime{}}
	var each []float64
	for router, one := range m.dumps {
		each = append(each, (one.to - one.from).Seconds())
		d.Bytes += one.received
		d.Seconds = max(d.Seconds, one.to.Seconds())
		d.Dumps = append(d.Dumps, dumpTime{Router: router, From: one.from.Seconds(), To: one.to.Seconds()})
	}
	if len(each) > 0 {
		d.Each = stats.Median(each)
	}
	slices.SortFunc(d.Dumps, func(a, b dumpTime) int { return cmp.Compare(a.To, b.To) })
	d.Idle = idleTime(d.Dumps)
	return d
}

// idleTime returns the time without a dump, from the begin to the end of the last dump.
func idleTime(all []dumpTime) (idle float64) {
	busy := 0.0
	for _, d := range slices.SortedFunc(slices.Values(all), func(a, b dumpTime) int { return cmp.Compare(a.From, b.From) }) {
		idle += max(0, d.From-busy)
		busy = max(busy, d.To)
	}
	return idle
}

func (p *sampler) since() time.Duration { return time.Since(p.begun) }

// has reports whether the member has data from a router.
func (p *sampler) has(router netip.Addr) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sampled.dumps[router] != nil
}

func (p *sampler) idle(router netip.Addr) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sampled.idle(router)
}

func (p *sampler) result() dumps {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.sampled.result()
}

// stop ends the sampling.
func (p *sampler) stop() error {
	close(p.end)
	p.running.Wait()
	return errors.Join(p.err, p.conn.Close())
}
