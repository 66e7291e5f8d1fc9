// SPDX-License-Identifier: Apache-2.0

// Package steer is the benchmark of steering. It compares Sockeye with plain SO_REUSEPORT and with HAProxy and a
// replicator.
package steer

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"sockeye/bench/harness"
	"sockeye/internal/netns"
)

const command = "steer"

// Benchmark is the command bench steer.
var Benchmark = harness.Benchmark{
	Name: command, Run: inside, Sandboxed: true,
	Workers: map[string]func([]string) error{"receiver": receiver, "generator": generator},
}

type options struct {
	Quick   bool          `json:"quick"`
	Rounds  int           `json:"rounds"`
	Seconds float64       `json:"seconds_per_run"`
	Routers int           `json:"routers"`
	Records int           `json:"records_per_datagram"`
	Nfacctd rates         `json:"nfacctd"`
	Plain   rates         `json:"plain"`
	Without string        `json:"without"`
	Only    bool          `json:"programs_only"`
	Peers   bool          `json:"peers_only"`
	Storm   bool          `json:"storm_only"`
	Binary  string        `json:"-"`
	Against string        `json:"-"`
	Pmacct  string        `json:"-"`
	Idle    time.Duration `json:"idle_ns,omitempty"`
	// TraitRouters is the number of routers for the properties, and TraitTime the time in which their sessions must be open.
	TraitRouters int           `json:"property_routers"`
	TraitTime    time.Duration `json:"property_time_ns"`
	VM           bool          `json:"vm"`
	// Long is the load of each arm in the long run.
	Long     time.Duration `json:"long_run_ns"`
	LongOnly bool          `json:"long_run_only"`
}

// rates are totals of all routers.
type rates struct {
	Datagrams float64 `json:"datagrams_per_second"`
	Updates   float64 `json:"updates_per_second"`
}

type bench struct {
	*harness.Sandbox
	options
}

// A measurement is one run of one arm.
type measurement struct {
	Arm         string `json:"arm"`
	Round       int    `json:"round"`
	Sent        sent   `json:"sent"`
	Datagrams   uint64 `json:"datagrams"` // received; for nfacctd: sent and not dropped
	FlowRecords uint64 `json:"flow_records"`
	StreamBytes uint64 `json:"stream_bytes,omitempty"`
	Dropped     uint64 `json:"dropped"` // datagrams dropped at a full receive buffer

	// CPU times by cgroup, see harness.Sandbox.CPU.
	Members   time.Duration `json:"members_cpu_ns"`
	Balance   time.Duration `json:"balance_cpu_ns"`
	Generator time.Duration `json:"generator_cpu_ns"`
	// Usage divides these times into user and system, by the name of the cgroup's role.
	Usage map[string]harness.Usage `json:"usage"`
	// Memory is the memory at the end of the run in MB, by role. That of bpf is the memory of the BPF maps and programs of
	// the processes of balance, and is not part of it.
	Memory map[string]float64 `json:"memory_mb"`
	// Machine is the CPU time of all CPUs without idle time, from /proc/stat. It includes other processes.
	Machine time.Duration `json:"machine_cpu_ns"`

	sources []received
}

// million returns the number of records (flow records and route updates) that the members received, in millions.
func (m *measurement) million() float64 { return float64(m.FlowRecords+m.Sent.Updates) / 1e6 }

func collector(port uint16) string {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), port).String()
}

func inside(args []string) error {
	o := options{Nfacctd: rates{4000, 4000}, Plain: rates{30000, 30000}}
	fs := flag.NewFlagSet(command, flag.ContinueOnError)
	fs.BoolVar(&o.Quick, "quick", false, "run for one minute instead of six, with fewer and shorter rounds")
	fs.IntVar(&o.Rounds, "rounds", 0, "number of rounds of all arms (default 5, quick 2)")
	fs.Float64Var(&o.Seconds, "seconds", 0, "duration of each run in seconds (default 2, quick 0.5)")
	fs.IntVar(&o.Routers, "routers", 64, "number of routers, 1 to 4096")
	fs.IntVar(&o.Records, "records", 24, "flow records per datagram, 1 to 25")
	fs.Float64Var(&o.Nfacctd.Datagrams, "nfacctd-datagrams", o.Nfacctd.Datagrams, "datagrams per second to nfacctd, total of all routers")
	fs.Float64Var(&o.Nfacctd.Updates, "nfacctd-updates", o.Nfacctd.Updates, "BMP route updates per second to nfacctd")
	fs.Float64Var(&o.Plain.Datagrams, "plain-datagrams", o.Plain.Datagrams, "datagrams per second to plain receivers")
	fs.Float64Var(&o.Plain.Updates, "plain-updates", o.Plain.Updates, "BMP route updates per second to plain receivers")
	fs.StringVar(&o.Without, "without", "", "arms to omit, comma-separated: reuseport, lookup, reuseport_device_map, lookup_device_map, nft, ipvs, proxy, proxy-buffered, proxy-1, proxy-splice, proxy-splice-1, and others of the report")
	fs.BoolVar(&o.Only, "programs", false, "measure only the run times of the programs")
	fs.BoolVar(&o.Peers, "peers", false, "measure only plain sockets, Sockeye and the balancers in the kernel, with plain receivers")
	fs.BoolVar(&o.Storm, "storm", false, "measure only the connection storm")
	fs.DurationVar(&o.Long, "long", 0, "duration of the load of each arm in the long run (default 10m, quick 4s)")
	fs.BoolVar(&o.LongOnly, "long-only", false, "measure only the long run")
	fs.IntVar(&o.TraitRouters, "property-routers", 512, "number of routers for the properties, 1 to 4096")
	fs.DurationVar(&o.TraitTime, "property-time", 3*time.Second, "time in which a session must be open for the properties")
	fs.DurationVar(&o.Idle, "idle", 0, "CPU time per 200 ms below which processes are idle (default 6ms)")
	fs.BoolVar(&o.VM, "vm", false, "measure IPVS in a virtual machine if this kernel has none (ten minutes; run this in the repository)")
	fs.StringVar(&o.Binary, "sockeye", "", "binary to measure (default: build ./cmd/sockeye)")
	fs.StringVar(&o.Pmacct, "pmacct", "", "`directory` that tools/pmacct-ebpf has printed, for the nfacctd of all arms; empty: the host's nfacctd, without the arms of pmacct's own eBPF option")
	fs.StringVar(&o.Against, "against", "", "further binaries, comma-separated, whose programs are measured in the same rounds")
	if ok, err := harness.ParseFlags(fs, args); !ok {
		return err
	}
	if o.Routers < 1 || o.Routers > maxRouters || o.TraitRouters < 1 || o.TraitRouters > maxRouters || o.Records < 1 || o.Records > 25 || o.Long < 0 {
		return harness.Misused(fs)
	}
	defaults := [2]options{{Rounds: 5, Seconds: 2, Long: 10 * time.Minute}, {Rounds: 2, Seconds: 0.5, Long: 4 * time.Second, Without: "proxy-buffered,proxy-1,proxy-splice-1"}}
	d := defaults[0]
	if o.Quick {
		d = defaults[1]
		o.Without += "," + d.Without
	}
	if o.Rounds == 0 {
		o.Rounds = d.Rounds
	}
	if o.Seconds == 0 {
		o.Seconds = d.Seconds
	}
	if o.Long == 0 {
		o.Long = d.Long
	}
	runtime.LockOSThread() // the kernel kills the children when the thread that started them exits
	return harness.InSandbox(func(ctx context.Context, s *harness.Sandbox) error {
		s.Idle = o.Idle
		b := &bench{Sandbox: s, options: o}
		return b.steer(ctx)
	})
}

func (b *bench) steer(ctx context.Context) error {
	if b.Binary == "" && len(b.arms(steered...)) > 0 {
		var err error
		if b.Binary, err = harness.BuildSockeye(ctx, b.Dir); err != nil {
			return err
		}
	}
	if b.Only {
		r := &programReport{Options: b.options, Run: begin(ctx)}
		var err error
		if r.programs, err = b.programTimes(ctx); err != nil {
			return err
		}
		r.End()
		return harness.Publish(command+"-programs", r)
	}
	window := time.Duration(b.Seconds * float64(time.Second))
	mixed := load{
		Routers: b.Routers, Records: b.Records, Prefixes: 16, Duration: window,
		BMP: collector(bmpPort), IPFIX: collector(ipfixPort),
		Datagrams: b.Plain.Datagrams, Updates: b.Plain.Updates,
	}
	small := mixed
	small.Records, small.BMP, small.Datagrams, small.Updates, small.Duration = 1, "", 0, 0, window/2
	if b.Peers {
		return b.peers(ctx, small, mixed)
	}
	if err := missing(&proxyArm{}); err != nil {
		return err
	}
	storm := b.arms("plain", "reuseport", "lookup", "nft", "ipvs", "pmacct-ebpf", "pmacct-ebpf-4", "proxy", "proxy-1", "proxy-splice", "proxy-splice-1")
	if b.Storm {
		return b.stormOnly(ctx, storm)
	}
	spaced := mixed
	spaced.Datagrams, spaced.Updates, spaced.Spacing = b.Nfacctd.Datagrams, b.Nfacctd.Updates, 10*time.Millisecond
	// The members of each of these arms need 5 GB of memory for 512 sessions.
	lasting := b.arms("plain", "lookup", "proxy")
	if b.LongOnly {
		return b.longRunOnly(ctx, lasting, spaced)
	}
	r := &report{Options: b.options, Run: begin(ctx)}
	all := b.arms("plain", "reuseport", "lookup", "nft", "ipvs", "proxy", "proxy-1", "proxy-splice", "proxy-splice-1", "proxy-buffered")
	examined := b.arms("plain", "reuseport", "lookup", "lookup_device_map", "nft", "nft-replace", "ipvs", "ipvs-mh", "proxy")
	collectors := slices.Concat(all, b.arms("pmacct-ebpf-4"))
	r.arms, r.examined = titles(slices.Concat(all, b.arms("pmacct-ebpf", "pmacct-ebpf-4"))), titles(examined)
	var err error
	if b.Pmacct != "" {
		if r.Versions["nfacctd"], err = pmacctVersion(b.Pmacct); err != nil {
			return err
		}
	}
	if b.VM && missing(&ipvsArm{}) != nil { // first: what fails without a kernel to download must not fail after an hour
		if r.guest, err = measureGuest(ctx); err != nil {
			return err
		}
	}

	l := mixed
	l.Datagrams, l.Updates, l.Duration = 10000, 100, 300*time.Millisecond
	if r.placement, err = b.compare(ctx, "placement", all, kindSources, 1, 0, l); err != nil {
		return err
	}
	if r.traits, err = b.allTraits(ctx, examined); err != nil {
		return err
	}
	if r.rate, err = b.compare(ctx, "rate", b.arms("plain", "reuseport", "lookup", "nft", "ipvs", "proxy"), kindPlain, 2*b.Rounds, b.judgedRounds()-2*b.Rounds, small); err != nil {
		return err
	}
	if r.plain, err = b.compare(ctx, "cpu, plain receivers", all, kindPlain, b.Rounds, 0, mixed); err != nil {
		return err
	}
	if r.nfacctd, err = b.compare(ctx, "cpu, nfacctd", collectors, kindNfacctd, b.Rounds, b.judgedRounds()-b.Rounds, spaced); err != nil {
		return err
	}
	if r.storms, err = b.storms(ctx, storm); err != nil {
		return err
	}
	if r.programs, err = b.programTimes(ctx); err != nil {
		return err
	}
	if r.series, err = b.longRun(ctx, lasting, b.Long, spaced); err != nil {
		return err
	}
	r.End()
	return harness.Publish(command, r)
}

// part is one comparison: the same load for all arms in turn, for several rounds.
type part struct {
	runs []measurement
	// Over all rounds, by arm.
	together map[string]float64 // share of routers with both streams at one member
	records  map[string]uint64  // flow records that nfacctd wrote
	routed   map[string]float64 // share of these records with BMP communities
	lost     map[string]float64 // share of flow records that no member received
}

// judgedRounds is the number of rounds of plain sockets and of the arms with goals, for figures that the goals compare: the goals
// are close to 1, and the speed of a host varies by more than their distance to 1.
func (o *options) judgedRounds() int { return 8 * o.Rounds }

// compare measures all arms for some rounds, and then plain sockets and the arms with goals for more rounds.
func (b *bench) compare(ctx context.Context, title string, arms []arm, kind string, rounds, more int, l load) (*part, error) {
	p := &part{together: map[string]float64{}, records: map[string]uint64{}, routed: map[string]float64{}, lost: map[string]float64{}}
	err := b.withFleets(ctx, title, arms, kind, l.Routers, func(fleets []*fleet) error {
		return p.run(ctx, fleets, kind, rounds, more, l)
	})
	return p, err
}

// parallelStarts is the number of fleets that start at the same time. nfacctd sleeps for five seconds at its start, and
// fills its buffers.
const parallelStarts = 3

// withFleets starts the fleets of arms, calls do when all are ready, and stops them. It prints the title to stderr.
func (b *bench) withFleets(ctx context.Context, title string, arms []arm, kind string, devices int, do func([]*fleet) error) error {
	var fleets []*fleet
	defer func() {
		for _, f := range fleets {
			f.close()
		}
	}()
	fmt.Fprintf(os.Stderr, "%s: ", title)
	defer fmt.Fprintln(os.Stderr)
	for some := range slices.Chunk(arms, parallelStarts) {
		starting := len(fleets)
		for _, a := range some {
			f, err := b.launch(ctx, a, kind, devices)
			if f != nil {
				fleets = append(fleets, f)
			}
			if err != nil {
				return fmt.Errorf("start %s: %w", a.name(), err)
			}
		}
		for _, f := range fleets[starting:] {
			if err := f.ready(ctx); err != nil {
				return fmt.Errorf("start %s: %w", f.arm.name(), err)
			}
		}
	}
	return do(fleets)
}

// run measures the fleets in turn.
func (p *part) run(ctx context.Context, fleets []*fleet, kind string, rounds, more int, l load) error {
	sent, got := map[string]uint64{}, map[string]uint64{}
	for round := range rounds + more {
		for _, f := range harness.Turn(fleets, round) {
			if round >= rounds && f.arm.name() != "plain" && !hasGoal(f.arm.name()) {
				continue
			}
			m, err := f.measure(ctx, l)
			if err != nil {
				return err
			}
			m.Round = round
			sent[m.Arm] += m.Sent.Records
			got[m.Arm] += m.FlowRecords
			if kind == kindSources {
				if p.together[m.Arm], err = together(m.sources, l.Routers); err != nil {
					return fmt.Errorf("%s: %w", m.Arm, err)
				}
			}
			p.runs = append(p.runs, m)
			fmt.Fprint(os.Stderr, ".")
		}
	}
	for _, f := range fleets {
		name := f.arm.name()
		if kind == kindNfacctd {
			for _, m := range f.members { // all fleets in parallel: each stops in two seconds
				m.Signal(harness.Interrupt)
			}
		}
		p.lost[name] = 1 - float64(got[name])/float64(max(1, sent[name]))
	}
	if kind == kindNfacctd {
		for _, f := range fleets {
			name := f.arm.name()
			records, routed, err := f.finish(ctx)
			if err != nil {
				return err
			}
			p.records[name], p.routed[name] = records, float64(routed)/float64(max(1, records))
			p.lost[name] = 1 - float64(records)/float64(max(1, sent[name]))
		}
	}
	return nil
}

func (f *fleet) measure(ctx context.Context, l load) (m measurement, err error) {
	m.Arm = f.arm.name()
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s with members %s: %w", f.arm.name(), f.kind, err)
		}
	}()
	if err := netns.Enter(f.net); err != nil {
		return m, err
	}
	before, err := f.counters()
	if err != nil {
		return m, err
	}
	gen, err := f.b.Start(f.group(generatorGroup), "generator", "/proc/self/exe", "generator")
	if err != nil {
		return m, err
	}
	spec, err := json.Marshal(l)
	if err != nil {
		return m, err
	}
	if err := gen.Ask(string(spec), &struct{}{}); err != nil {
		return m, err
	}
	busy := []string{f.group(membersGroup), f.group(balanceGroup)}
	if err := f.b.Quiesce(ctx, busy...); err != nil {
		return m, err
	}

	machine, dropped := harness.MachineCPU(), harness.Drops()
	used := []struct {
		role string
		cpu  *time.Duration
	}{{membersGroup, &m.Members}, {balanceGroup, &m.Balance}, {generatorGroup, &m.Generator}}
	m.Usage = map[string]harness.Usage{}
	for _, u := range used {
		m.Usage[u.role] = f.b.Usage(f.group(u.role))
	}
	if err := gen.Ask("go", &m.Sent); err != nil {
		return m, err
	}
	if err := f.b.Quiesce(ctx, busy...); err != nil {
		return m, err
	}
	for _, u := range used {
		m.Usage[u.role] = f.b.Usage(f.group(u.role)).Sub(m.Usage[u.role])
		*u.cpu = m.Usage[u.role].Total()
	}
	m.Memory = f.memory()
	m.Machine, m.Dropped = harness.MachineCPU()-machine, harness.Drops()-dropped

	after, err := f.counters()
	if err != nil {
		return m, err
	}
	m.Datagrams = m.Sent.Datagrams - m.Dropped
	if f.kind != kindNfacctd {
		m.Datagrams = 0
		for i := range after {
			m.Datagrams += after[i].Datagrams - before[i].Datagrams
			m.StreamBytes += after[i].StreamBytes - before[i].StreamBytes
		}
		if m.StreamBytes != m.Sent.Bytes {
			return m, fmt.Errorf("the members received %d of %d bytes of BMP", m.StreamBytes, m.Sent.Bytes)
		}
	}
	m.FlowRecords = m.Datagrams * uint64(l.Records)
	m.sources = after
	gen.In.Close()
	<-gen.Done
	return m, nil
}

const bpfMemory = "bpf" // key of the memory of BPF maps and programs

// memory returns the memory of the members and of the processes between them and the routers in MB.
func (f *fleet) memory() map[string]float64 {
	const mb = 1e6
	return map[string]float64{
		membersGroup: float64(f.b.Memory(f.group(membersGroup))) / mb,
		balanceGroup: float64(f.b.Memory(f.group(balanceGroup))) / mb,
		bpfMemory:    float64(f.b.BPFMemory(f.group(balanceGroup))) / mb,
	}
}

// counters returns the counters of the receivers, which are 0 for a killed one. nfacctd reports nothing before it exits.
func (f *fleet) counters() (all []received, err error) {
	if f.kind == kindNfacctd {
		return nil, nil
	}
	for _, p := range f.members {
		var r received
		if err := p.Ask("?", &r); err != nil && p != f.killed {
			return nil, err
		}
		all = append(all, r)
	}
	return all, nil
}

// together returns the share of routers whose BMP session and datagrams reach the same member. It fails if a stream of a
// router is missing or reaches two members.
func together(members []received, routers int) (float64, error) {
	n := 0
	for i := range routers {
		at := map[string]int{}
		for slot, r := range members {
			for protocol, seen := range map[string]map[string]uint64{"tcp": r.TCP, "udp": r.UDP} {
				if seen[routerAddr(i).String()] == 0 {
					continue
				}
				if other, ok := at[protocol]; ok {
					return 0, fmt.Errorf("%s of router %s reached slots %d and %d", protocol, routerAddr(i), other, slot)
				}
				at[protocol] = slot
			}
		}
		if len(at) != 2 {
			return 0, fmt.Errorf("router %s: a stream is missing; received streams and slots: %v", routerAddr(i), at)
		}
		if at["tcp"] == at["udp"] {
			n++
		}
	}
	return float64(n) / float64(routers), nil
}

// arms returns the arms with these names, without those that the options omit or that this host cannot run.
func (b *bench) arms(names ...string) (arms []arm) {
	for _, name := range names {
		if slices.Contains(strings.Split(b.Without, ","), name) {
			continue
		}
		switch name {
		case "plain":
			arms = append(arms, plainArm{})
		case "nft", "nft-replace":
			arms = append(arms, &nftArm{replace: name == "nft-replace"})
		case "ipvs":
			arms = append(arms, &ipvsArm{scheduler: "sh"})
		case "ipvs-mh":
			arms = append(arms, &ipvsArm{scheduler: "mh"})
		case "pmacct-ebpf", "pmacct-ebpf-4":
			buckets := pmacctBuckets
			if name == "pmacct-ebpf-4" {
				buckets = slots
			}
			arms = append(arms, &pmacctArm{dir: b.Pmacct, buckets: buckets})
		case "proxy":
			arms = append(arms, &proxyArm{})
		case "proxy-buffered":
			arms = append(arms, &proxyArm{buffer: 64 << 10})
		case "proxy-1":
			arms = append(arms, &proxyArm{threads: 1})
		case "proxy-splice":
			arms = append(arms, &proxyArm{splice: true})
		case "proxy-splice-1":
			arms = append(arms, &proxyArm{splice: true, threads: 1})
		case "reuseport_device_map", "lookup_device_map":
			arms = append(arms, &sockeyeArm{binary: b.Binary, steering: strings.TrimSuffix(name, "_device_map"), deviceMap: furtherDevices})
		default:
			arms = append(arms, &sockeyeArm{binary: b.Binary, steering: name})
		}
	}
	return slices.DeleteFunc(arms, func(a arm) bool { return missing(a) != nil })
}

// titles returns the names and titles of arms.
func titles(arms []arm) (all []armTitle) {
	for _, a := range arms {
		all = append(all, armTitle{a.name(), a.title()})
	}
	return all
}
