// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/internal/bpf/probe"
	"sockeye/internal/chart"
	"sockeye/internal/netns"
	"sockeye/internal/stats"
)

// steered are the arms of Sockeye.
var steered = []string{"reuseport", "lookup", "reuseport_device_map", "lookup_device_map"}

// A pass is a load under which programs are measured.
type pass struct {
	name string
	l    load
}

// programRuns contains the mean run times of a program in nanoseconds, from the kernel's BPF statistics. They include two
// clock reads by the statistics, whose cost the empty program shows.
type programRuns struct {
	name, title, mode string
	ns                map[string][][]float64 // by the name of the pass: for each launch, a value for each round
}

// programSet contains the run times of several programs, measured in the same rounds.
type programSet []*programRuns

// programReport is the report of the flag -programs.
type programReport struct {
	Options options `json:"options"`
	harness.Run
	programs programSet
}

// Print implements harness.Report.
func (r *programReport) Print(p harness.Printf) {
	p("\n%d routers, four members, Linux %s, %d CPUs for routers and members together.\n", r.Options.Routers, r.Kernel, r.CPUs)
	r.programs.print(p, r.Options.Rounds)
	p("\nDuration %s.\n", r.Took)
}

// launchRounds is the number of rounds of each launch.
const launchRounds = 4

func (s programSet) print(p harness.Printf, launches int) {
	if len(s) == 0 {
		return
	}
	p("\nNanoseconds per run of the BPF program, from the kernel's BPF statistics, whose own cost the empty program shows: median\n")
	p("[95 %% confidence interval] over %d launches of %d rounds. Cold: 20,000 datagrams per second. Hot: the full rate of one sender.\n", launches, launchRounds)
	if launches < 6 {
		p("The intervals of fewer than six launches are their extremes, with less confidence.\n")
	}
	p("\tcold\tabove empty\tabove select\thot\tabove empty\tabove select\tSYN\n")
	show := func(d harness.Distribution) string {
		if math.IsNaN(float64(d.Median)) {
			return "-"
		}
		return fmt.Sprintf("%.0f [%.0f .. %.0f]", d.Median, d.Low, d.High)
	}
	for _, a := range s {
		p("%s", a.title)
		for _, pass := range []string{"cold", "hot"} {
			p("\t%s\t%s\t%s", show(a.distribution(pass)),
				show(a.above(s.find(a.mode+"_empty"), pass)), show(a.above(s.find(a.mode+"_select"), pass)))
		}
		p("\t%s\n", show(a.distribution("syn")))
	}
}

// Figures implements harness.Report.
func (r *programReport) Figures() any {
	return map[string]any{"run": r, "ns_above_empty": r.programs.aboveEmpty(), "programs_ns": r.programs.figures()}
}

// figures returns the run times of the programs and their differences for the JSON.
func (s programSet) figures() map[string]any {
	out := make(map[string]any)
	for _, a := range s {
		passes := make(map[string]any)
		for pass := range a.ns {
			passes[pass] = map[string]any{
				"ns": a.distribution(pass), "above_empty": a.above(s.find(a.mode+"_empty"), pass),
				"above_select": a.above(s.find(a.mode+"_select"), pass), "launches": a.ns[pass],
			}
		}
		out[a.name] = passes
	}
	return out
}

// aboveEmpty returns the medians of the differences to the empty program by mode of steering and pass.
func (s programSet) aboveEmpty() map[string]map[string]harness.Figure {
	out := map[string]map[string]harness.Figure{}
	for _, mode := range []string{"reuseport", "lookup"} {
		out[mode] = map[string]harness.Figure{}
		for _, pass := range []string{"cold", "hot"} {
			out[mode][pass] = s.find(mode).above(s.find(mode+"_empty"), pass).Median
		}
	}
	return out
}

// above returns the distribution over the launches of the median difference to another program in their rounds.
func (p *programRuns) above(other *programRuns, pass string) harness.Distribution {
	difference := &programRuns{ns: map[string][][]float64{}}
	for launch := range min(len(p.ns[pass]), len(other.ns[pass])) {
		var d []float64
		for i := range min(len(p.ns[pass][launch]), len(other.ns[pass][launch])) {
			d = append(d, p.ns[pass][launch][i]-other.ns[pass][launch][i])
		}
		difference.ns[pass] = append(difference.ns[pass], d)
	}
	return difference.distribution(pass)
}

// distribution returns the distribution over the launches of the median of their rounds. The rounds of a launch have the
// same processes, keys and memory and are not independent.
func (p *programRuns) distribution(pass string) harness.Distribution {
	var medians []float64
	for _, rounds := range p.ns[pass] {
		medians = append(medians, stats.Median(rounds))
	}
	return harness.DistributionOf(medians)
}

// find returns the run times of an arm. They are empty if the arm was not measured.
func (s programSet) find(name string) *programRuns {
	for _, p := range s {
		if p.name == name {
			return p
		}
	}
	return &programRuns{}
}

// Charts implements harness.Report.
func (*programReport) Charts() map[string]chart.Chart { return nil }

// referenceArm has the least programs with which to compare: an empty one, or one that reads the last byte of an IPv4
// source address and selects one of four sockets by it.
type referenceArm struct {
	mode    string
	selects bool
	link    link.Link // of sk_lookup
}

// programTimes measures the run times of the steering programs, of the empty program and of the program that only selects
// a socket, one after the other in each round.
func (b *bench) programTimes(ctx context.Context) (all programSet, err error) {
	sockeyes := b.arms(steered...)
	for _, a := range slices.Clone(sockeyes) {
		for binary := range strings.SplitSeq(b.Against, ",") {
			if binary != "" {
				other := *a.(*sockeyeArm)
				other.binary, other.against = binary, filepath.Base(binary)
				sockeyes = append(sockeyes, &other)
			}
		}
	}
	var arms []arm
	for _, mode := range []string{"reuseport", "lookup"} {
		if len(b.arms(mode)) > 0 {
			arms = append(arms, &referenceArm{mode: mode}, &referenceArm{mode: mode, selects: true})
		}
	}
	arms = append(arms, sockeyes...)
	if len(arms) == 0 {
		return nil, nil
	}
	enabled, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, fmt.Errorf("enable BPF statistics: %w", err)
	}
	defer enabled.Close()
	fmt.Fprint(os.Stderr, "programs: ")
	defer fmt.Fprintln(os.Stderr)
	for _, a := range arms {
		all = append(all, &programRuns{name: a.name(), title: a.title(), ns: map[string][][]float64{}})
	}
	for launch := range b.Rounds {
		if err := b.programLaunch(ctx, arms, all, launch); err != nil {
			return nil, err
		}
		fmt.Fprint(os.Stderr, ".")
	}
	return all, nil
}

// measuredProgram is a fleet and the programs that select its members.
type measuredProgram struct {
	*fleet
	programs []*ebpf.Program
	runs     *programRuns
}

// programLaunch starts the fleets of all arms and measures them for some rounds. The placement of a fleet's memory and
// its secret keys change its figures by more than the variation between rounds, so the benchmark starts fleets again.
func (b *bench) programLaunch(ctx context.Context, arms []arm, all programSet, launch int) error {
	var measured []*measuredProgram
	defer func() {
		for _, m := range measured {
			m.close()
		}
	}()
	for i, a := range arms {
		m, err := b.measureProgram(ctx, a, all[i])
		if m != nil {
			measured = append(measured, m)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", a.name(), err)
		}
	}
	for round := range launchRounds {
		for _, m := range harness.Turn(measured, launch*launchRounds+round) {
			for _, pass := range b.passes() {
				if err := m.round(pass); err != nil {
					return fmt.Errorf("%s: %w", m.arm.name(), err)
				}
			}
		}
	}
	return nil
}

func (b *bench) measureProgram(ctx context.Context, a arm, runs *programRuns) (*measuredProgram, error) {
	f, err := b.launch(ctx, a, kindPlain, b.Routers)
	if f == nil {
		return nil, err
	}
	m := &measuredProgram{fleet: f, runs: runs}
	for _, p := range b.passes() {
		runs.ns[p.name] = append(runs.ns[p.name], nil)
	}
	if err != nil {
		return m, err
	}
	if err := f.ready(ctx); err != nil {
		return m, err
	}
	if reference, ok := a.(*referenceArm); ok {
		m.runs.mode = reference.mode
		m.programs, err = reference.attach(f)
	} else {
		m.runs.mode = a.(*sockeyeArm).steering
		m.programs, err = steeringPrograms(f.pins())
	}
	return m, err
}

// passes returns the loads: datagrams at 20,000 a second, between which other code evicts the program's data from the
// caches; datagrams at the full rate of one sender; and connections.
func (b *bench) passes() []pass {
	datagrams := load{Routers: b.Routers, Records: 1, Prefixes: 1, IPFIX: collector(ipfixPort), Datagrams: 20000, Duration: 250 * time.Millisecond}
	hot := datagrams
	hot.Datagrams = 0
	return []pass{{"cold", datagrams}, {"hot", hot}, {"syn", load{Routers: 250, Prefixes: 1, BMP: collector(bmpPort)}}}
}

func (m *measuredProgram) round(p pass) error {
	if reference, ok := m.arm.(*referenceArm); ok && reference.selects && p.l.BMP != "" {
		return nil // it selects for datagrams only
	}
	before, runs, err := runTime(m.programs)
	if err != nil {
		return err
	}
	if err := m.send(p.l); err != nil {
		return err
	}
	after, more, err := runTime(m.programs)
	if err != nil {
		return err
	}
	if more == runs {
		return errors.New("the program did not run")
	}
	m.runs.add(p.name, float64(after-before)/float64(more-runs))
	return nil
}

// add adds a value to the last launch.
func (p *programRuns) add(pass string, ns float64) {
	last := len(p.ns[pass]) - 1
	p.ns[pass][last] = append(p.ns[pass][last], ns)
}

// send sends a load. Unlike measure it does not wait for the members: the programs run in the sender's system calls.
func (m *measuredProgram) send(l load) error {
	if err := netns.Enter(m.net); err != nil {
		return err
	}
	gen, err := m.b.Start(m.group(generatorGroup), "generator", "/proc/self/exe", "generator")
	if err != nil {
		return err
	}
	spec, err := json.Marshal(l)
	if err != nil {
		return err
	}
	if err := gen.Ask(string(spec), &struct{}{}); err != nil {
		return err
	}
	var s sent
	if err := gen.Ask("go", &s); err != nil {
		return err
	}
	gen.In.Close()
	<-gen.Done
	return nil
}

func (m *measuredProgram) close() {
	if reference, ok := m.arm.(*referenceArm); ok && reference.link != nil {
		reference.link.Close()
	}
	for _, p := range m.programs {
		p.Close()
	}
	m.fleet.close()
}

func runTime(programs []*ebpf.Program) (total time.Duration, runs uint64, err error) {
	for _, p := range programs {
		s, err := p.Stats()
		if err != nil {
			return 0, 0, fmt.Errorf("read statistics of program: %w", err)
		}
		total += s.Runtime
		runs += s.RunCount
	}
	return total, runs, nil
}

// steeringPrograms opens the programs pinned below a directory, and the copies of them that the agent has attached to the SO_REUSEPORT groups:
// those that share their maps.
func steeringPrograms(dir string) ([]*ebpf.Program, error) {
	pinned, err := pinnedPrograms(dir)
	if err != nil {
		return nil, err
	}
	programs := slices.Clone(pinned)
	err = probe.EachProgram(func(_ ebpf.ProgramID, p *ebpf.Program) (keep bool, err error) {
		keep, err = isCopy(p, pinned)
		if keep {
			programs = append(programs, p)
		}
		return keep, err
	})
	return programs, err
}

// pinnedPrograms opens the socket selecting programs pinned below a directory.
func pinnedPrograms(dir string) (programs []*ebpf.Program, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		p, err := ebpf.LoadPinnedProgram(path, nil)
		if err != nil {
			return nil // a map or a link
		}
		if p.Type() == ebpf.SkReuseport || p.Type() == ebpf.SkLookup {
			programs = append(programs, p)
		} else {
			p.Close()
		}
		return nil
	})
	if err == nil && len(programs) == 0 {
		err = errors.New("no pinned programs found")
	}
	if err != nil {
		return nil, fmt.Errorf("find programs in %s: %w", dir, err)
	}
	return programs, nil
}

// isCopy reports whether a program shares maps with one of the pinned programs, and is another one. The constants of each program are in a
// map of its own.
func isCopy(p *ebpf.Program, pinned []*ebpf.Program) (bool, error) {
	info, err := p.Info()
	if err != nil {
		return false, fmt.Errorf("read program: %w", err)
	}
	id, _ := info.ID()
	maps, _ := info.MapIDs()
	copied := false
	for _, other := range pinned {
		of, err := other.Info()
		if err != nil {
			return false, fmt.Errorf("read program: %w", err)
		}
		if same, _ := of.ID(); same == id {
			return false, nil
		}
		needed, _ := of.MapIDs()
		shared := slices.DeleteFunc(needed, func(m ebpf.MapID) bool { return !slices.Contains(maps, m) })
		copied = copied || p.Type() == other.Type() && len(shared) > 0
	}
	return copied, nil
}

func (a *referenceArm) name() string {
	if a.selects {
		return a.mode + "_select"
	}
	return a.mode + "_empty"
}

func (*referenceArm) start(context.Context, *fleet) error { return nil }
func (*referenceArm) ready(context.Context, *fleet) error { return nil }

// ports returns ports for TCP that the members share, because the program selects for datagrams only.
func (a *referenceArm) ports(slot int) (tcp, udp uint16) {
	if a.mode == "lookup" && a.selects {
		return bmpPort, ownUDP + uint16(slot)
	}
	return bmpPort, ipfixPort
}

// attach loads the program and attaches it to the members' namespace, or to their SO_REUSEPORT groups. It adds a socket
// to each group for this purpose only, because the program belongs to the group.
func (a *referenceArm) attach(f *fleet) (programs []*ebpf.Program, err error) {
	spec := &ebpf.ProgramSpec{Type: ebpf.SkReuseport, AttachType: ebpf.AttachSkReuseportSelect, License: "GPL"}
	if a.mode == "lookup" {
		spec.Type, spec.AttachType = ebpf.SkLookup, ebpf.AttachSkLookup
	}
	if a.selects {
		sockets, err := f.memberSockets(a.mode)
		if err != nil {
			return nil, err
		}
		defer sockets.Close()
		spec.Instructions = selectSocket(a.mode, sockets)
	}
	spec.Instructions = append(spec.Instructions, asm.Mov.Imm(asm.R0, 1).WithSymbol("pass"), asm.Return()) // SK_PASS
	p, err := ebpf.NewProgram(spec)
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", a.title(), err)
	}
	programs = append(programs, p)
	if a.mode == "lookup" {
		if a.link, err = link.AttachNetNs(int(f.net.Fd()), p); err != nil {
			return programs, fmt.Errorf("attach %s: %w", a.title(), err)
		}
		return programs, nil
	}
	for kind, port := range map[int]uint16{unix.SOCK_STREAM: bmpPort, unix.SOCK_DGRAM: ipfixPort} {
		if a.selects && kind == unix.SOCK_STREAM {
			continue
		}
		fd, err := listen(kind, port)
		if err != nil {
			return programs, err
		}
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_EBPF, p.FD())
		unix.Close(fd)
		if err != nil {
			return programs, fmt.Errorf("attach %s to port %d: %w", a.title(), port, err)
		}
	}
	return programs, nil
}

func (a *referenceArm) title() string {
	if a.selects {
		return "address and socket, " + a.mode
	}
	return "empty program, " + a.mode
}

// memberSockets returns a map with the UDP sockets of the members.
func (f *fleet) memberSockets(mode string) (_ *ebpf.Map, err error) {
	spec := &ebpf.MapSpec{Type: ebpf.ReusePortSockArray, KeySize: 4, ValueSize: 8, MaxEntries: slots}
	if mode == "lookup" {
		spec.Type = ebpf.SockMap
	}
	sockets, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, fmt.Errorf("create map of sockets: %w", err)
	}
	defer func() {
		if err != nil {
			sockets.Close()
		}
	}()
	members, err := f.counters()
	if err != nil {
		return nil, err
	}
	for slot, m := range members {
		process, err := unix.PidfdOpen(m.PID, 0)
		if err != nil {
			return nil, fmt.Errorf("open process %d: %w", m.PID, err)
		}
		fd, err := unix.PidfdGetfd(process, m.FD, 0)
		unix.Close(process)
		if err != nil {
			return nil, fmt.Errorf("duplicate descriptor of %d: %w", m.PID, err)
		}
		err = sockets.Put(uint32(slot), uint64(fd))
		unix.Close(fd)
		if err != nil {
			return nil, fmt.Errorf("store socket of slot %d: %w", slot, err)
		}
	}
	return sockets, nil
}

// selectSocket returns instructions that select a socket, and continue at the symbol pass.
func selectSocket(mode string, sockets *ebpf.Map) asm.Instructions {
	const (
		source  = 12 // offset in struct iphdr
		network = 1  // BPF_HDR_START_NET
		// Offsets in struct bpf_sk_lookup, and BPF_SK_LOOKUP_F_NO_REUSEPORT.
		protocol, remote = 12, 16
		noReuseport      = 2
	)
	key := func(r asm.Register) asm.Instructions { // r becomes the address of the key on the stack
		return asm.Instructions{asm.Mov.Reg(r, asm.RFP), asm.Add.Imm(r, -8)}
	}
	in := asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}
	if mode == "lookup" {
		in = append(in,
			asm.LoadMem(asm.R1, asm.R6, protocol, asm.Word),
			asm.JNE.Imm(asm.R1, unix.IPPROTO_UDP, "pass"),
			asm.LoadMem(asm.R1, asm.R6, remote, asm.Word),
			asm.RSh.Imm(asm.R1, 24),
			asm.And.Imm(asm.R1, slots-1),
			asm.StoreMem(asm.RFP, -8, asm.R1, asm.Word),
			asm.LoadMapPtr(asm.R1, sockets.FD()))
		in = append(in, key(asm.R2)...)
		return append(in,
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "pass"),
			asm.Mov.Reg(asm.R7, asm.R0),
			asm.Mov.Reg(asm.R1, asm.R6),
			asm.Mov.Reg(asm.R2, asm.R7),
			asm.Mov.Imm(asm.R3, noReuseport),
			asm.FnSkAssign.Call(),
			asm.Mov.Reg(asm.R1, asm.R7),
			asm.FnSkRelease.Call())
	}
	in = append(in, asm.Mov.Imm(asm.R2, source))
	in = append(in, key(asm.R3)...)
	in = append(in,
		asm.StoreImm(asm.RFP, -8, 0, asm.Word),
		asm.Mov.Imm(asm.R4, 4),
		asm.Mov.Imm(asm.R5, network),
		asm.FnSkbLoadBytesRelative.Call(),
		asm.LoadMem(asm.R1, asm.RFP, -8, asm.Word),
		asm.RSh.Imm(asm.R1, 24),
		asm.And.Imm(asm.R1, slots-1),
		asm.StoreMem(asm.RFP, -8, asm.R1, asm.Word),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.LoadMapPtr(asm.R2, sockets.FD()))
	in = append(in, key(asm.R3)...)
	return append(in, asm.Mov.Imm(asm.R4, 0), asm.FnSkSelectReuseport.Call())
}
