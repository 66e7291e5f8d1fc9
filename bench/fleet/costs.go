// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
	"sockeye/internal/fleet/forward"
	"sockeye/internal/fleet/table"
	"sockeye/internal/placement"
	"sockeye/internal/stats"
)

const (
	largeMap = 10_000 // addresses
	// costRounds is the number of rounds of a launch, and costRuns that of the runs of an arm in a round. costRepeat is the number
	// of repetitions in a run, each of which uses up a hop of the TTL of a forwarded packet.
	costRounds, costRuns, costRepeat = 50, 8, 250
	mostNS                           = 60
)

// Verdicts of programs.
const (
	verdictPass     = 1<<32 - 1 // TC_ACT_UNSPEC
	verdictRedirect = 7         // TC_ACT_REDIRECT
)

// costKinds are the kinds of packets.
var costKinds = []struct{ name, title string }{
	{"local", "decided locally"}, {"forwarded", "forwarded"}, {"other", "to no service"},
}

// costPart contains, by size of the device map and kind of packet, the nanoseconds above the empty program: of each launch,
// the median of its rounds.
type costPart struct {
	empty []float64
	above map[int]map[string][]float64
}

// costArm is a program and its input.
type costArm struct {
	program *ebpf.Program
	frame   []byte
	verdict uint32
	devices int
	kind    string // "" of the empty program
}

// costs measures the program of the interfaces by BPF_PROG_TEST_RUN, next to an empty program. The kernel repeats one packet,
// so that the caches are hot. The placement of programs and maps in memory changes the figures by more than the variation
// between rounds, so the benchmark loads them again for each launch.
func (b *bench) costs(ctx context.Context) (part, error) {
	n, err := b.lab.Namespace("costs")
	if err != nil {
		return nil, err
	}
	p := &costPart{above: map[int]map[string][]float64{0: {}, largeMap: {}}}
	for range b.Launches {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := n.Do(func() error { return p.launch(b) }); err != nil {
			return nil, err
		}
		fmt.Fprint(os.Stderr, ".")
	}
	return p, nil
}

func (p *costPart) launch(b *bench) (err error) {
	empty, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}})
	if err != nil {
		return fmt.Errorf("load empty program: %w", err)
	}
	defer empty.Close()
	arms := []costArm{{program: empty, frame: datagram(device(0), port), verdict: verdictPass}}
	for _, size := range []int{0, largeMap} {
		base := b.pins(fmt.Sprintf("costs-%d", size))
		more, remove, failed := costArms(base, size)
		defer func() { err = errors.Join(err, remove()) }()
		if failed != nil {
			return failed
		}
		arms = append(arms, more...)
	}
	ns := make([][]float64, len(arms))
	order := make([]int, len(arms))
	for i := range order {
		order[i] = i
	}
	for round := range costRounds {
		sums := make([]float64, len(arms))
		for run := range costRuns {
			for _, i := range harness.Turn(order, round*costRuns+run) {
				a := &arms[i]
				verdict, took, err := a.program.Benchmark(a.frame, costRepeat, nil)
				if err != nil {
					return fmt.Errorf("run program: %w", err)
				}
				if verdict != a.verdict {
					return fmt.Errorf("verdict %d of a packet %s, want %d", int32(verdict), a.kind, int32(a.verdict))
				}
				sums[i] += float64(took.Nanoseconds()) / costRuns
			}
		}
		for i, sum := range sums {
			ns[i] = append(ns[i], sum-sums[0])
		}
		p.empty = append(p.empty, sums[0])
	}
	for i, a := range arms[1:] {
		p.above[a.devices][a.kind] = append(p.above[a.devices][a.kind], stats.Median(ns[i+1]))
	}
	return nil
}

// costArms loads the program of a host that owns half of the buckets. remove must be called also after an error.
func costArms(base string, size int) (arms []costArm, remove func() error, err error) {
	remove = func() error { return nil }
	path, err := forward.Open(base)
	if err != nil {
		return nil, remove, err
	}
	var program *ebpf.Program
	remove = func() error {
		if program != nil {
			program.Close()
		}
		return errors.Join(path.Close(), forward.Remove(base))
	}
	names, err := newDeviceMap(size)
	if err != nil {
		return nil, remove, err
	}
	t := newTable(func(bucket int) uint16 { return uint16(bucket % 2) })
	next := func(*table.Host) forward.Next {
		return forward.Next{Addresses: []netip.Addr{netip.MustParseAddr("10.90.2.2")}, Interface: 1, MAC: [6]byte{2, 0, 0, 0, 0, 2}}
	}
	if err := errors.Join(path.SetListeners(listeners()), path.Set(t, first, next, names, forward.Flip{})); err != nil {
		return nil, remove, err
	}
	if program, err = attachedProgram(path); err != nil {
		return nil, remove, err
	}
	mapping, err := placement.NewMapping(1, 0, t.Nonce, names)
	if err != nil {
		return nil, remove, err
	}
	var owned [2]netip.Addr // a device of each host
	for i := rand.IntN(largeMap / 2); !owned[0].IsValid() || !owned[1].IsValid(); i++ {
		owned[mapping.Locate(device(i)).Bucket%2] = device(i)
	}
	return []costArm{
		{program, datagram(owned[0], port), verdictPass, size, "local"},
		{program, datagram(owned[1], port), verdictRedirect, size, "forwarded"},
		{program, datagram(owned[0], 53), verdictPass, size, "other"},
	}, remove, nil
}

// attachedProgram attaches a data path to lo of the calling thread's namespace, and returns its program.
func attachedProgram(path *forward.Path) (*ebpf.Program, error) {
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		return nil, fmt.Errorf("find lo: %w", err)
	}
	if err := path.Attach([]int{lo.Index}, 0); err != nil {
		return nil, err
	}
	attached, err := link.QueryPrograms(link.QueryOptions{Target: lo.Index, Attach: ebpf.AttachTCXIngress})
	if err != nil {
		return nil, fmt.Errorf("find program of lo: %w", err)
	}
	// The path that was attached last is the first one.
	return ebpf.NewProgramFromID(attached.Programs[0].ID)
}

// datagram returns a frame with a datagram of 100 bytes from a device to a port of the service.
func datagram(from netip.Addr, to uint16) []byte {
	frame := make([]byte, 14, 14+128)
	frame[12] = 0x08
	ip := []byte{0x45, 0, 0, 128, 0, 0, 0, 0, 255, 17, 0, 0}
	ip = append(append(ip, from.AsSlice()...), service.AsSlice()...)
	udp := []byte{0x80, 0, byte(to >> 8), byte(to), 0, 108, 0, 0}
	return append(append(append(frame, ip...), udp...), make([]byte, 100)...)
}

// distribution returns the distribution over the launches.
func (p *costPart) distribution(devices int, kind string) harness.Distribution {
	return harness.DistributionOf(p.above[devices][kind])
}

func (p *costPart) print(w harness.Printf) {
	w("\nNanoseconds per packet above an empty program, by BPF_PROG_TEST_RUN with hot caches: median [95 %% confidence interval] over\n")
	w("%d launches of %d rounds. The empty program takes %.0f ns.\n", len(p.above[0]["local"]), costRounds, stats.Median(p.empty))
	for _, k := range costKinds {
		w("\t%s", k.title)
	}
	w("\n")
	for _, size := range []int{0, largeMap} {
		if size == 0 {
			w("no device map")
		} else {
			w("device map of %d addresses", size)
		}
		for _, k := range costKinds {
			d := p.distribution(size, k.name)
			w("\t%.0f [%.0f .. %.0f]", d.Median, d.Low, d.High)
		}
		w("\n")
	}
}

func (p *costPart) figures() map[string]any {
	medians := func(size int) map[string]any {
		m := map[string]any{}
		for _, k := range costKinds {
			m[k.name] = p.distribution(size, k.name).Median
		}
		return m
	}
	ns, named := medians(0), medians(largeMap)
	named["addresses"] = largeMap
	ns["device_map"], ns["empty"] = named, harness.Figure(stats.Median(p.empty))
	all := map[string]any{"no_device_map": p.launches(0), "device_map": p.launches(largeMap)}
	return map[string]any{"ns": ns, "ns_launches": all}
}

// launches returns the distributions and all values by kind.
func (p *costPart) launches(size int) map[string]any {
	m := map[string]any{}
	for _, k := range costKinds {
		m[k.name] = map[string]any{"above_empty": p.distribution(size, k.name), "launches": p.above[size][k.name]}
	}
	return m
}

func (p *costPart) targets() []harness.Target {
	const format = "%.0f ns"
	return []harness.Target{
		harness.AtMost("packet that is decided locally, above the empty program", format, mostNS, p.distribution(0, "local")),
		harness.AtMost("packet that is forwarded, above the empty program", format, mostNS, p.distribution(0, "forwarded")),
	}
}

func (p *costPart) panels() []chart.Panel {
	panel := chart.Panel{Title: "Nanoseconds per packet above an empty program"}
	for _, size := range []int{0, largeMap} {
		for _, k := range costKinds {
			d := p.distribution(size, k.name)
			label := k.title
			if size > 0 {
				label += ", device map"
			}
			panel.Bars = append(panel.Bars, chart.Bar{Label: label, Note: fmt.Sprintf("%.0f [%.0f .. %.0f]", d.Median, d.Low, d.High), Parts: []float64{float64(d.Median)}})
		}
	}
	return []chart.Panel{panel}
}
