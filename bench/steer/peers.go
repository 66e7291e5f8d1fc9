// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
	"sockeye/internal/netns"
)

// Traits are the properties of an arm that do not depend on speed: what it does with the addresses of routers, what the
// kernel keeps, and what becomes of the routers when a member dies. Each is measured.

const (
	deadSlot   = 1
	maxRouters = 4096
	// settle is the time after which a process has read what has arrived, and the agent has noticed an exit.
	settle = 500 * time.Millisecond
)

// traits are shares of routers, 0 to 1, unless they say otherwise.
type traits struct {
	// Entries is the number of entries in the tables of connections of nf_conntrack and IPVS, per router with a session
	// and an exporter.
	Entries harness.Figure `json:"connection_entries_per_router"`
	// KeptTCP and KeptUDP are the shares whose source address the members see.
	KeptTCP harness.Figure `json:"source_kept_tcp"`
	KeptUDP harness.Figure `json:"source_kept_udp"`
	// Together is the share whose session and datagrams reach the same member: from one IPv4 address, from one IPv6
	// address, and from an address for each of the two.
	Together     harness.Figure `json:"together"`
	TogetherIPv6 harness.Figure `json:"together_ipv6"`
	TogetherTwo  harness.Figure `json:"together_two_addresses"`
	// After the death of a member, and what an operator or a health check then changes in the arm:
	// MovedExporters and MovedSessions are the shares of the routers of the other members that reach another member than
	// before: with the sockets of exporters that were open, and with new sessions.
	MovedExporters harness.Figure `json:"moved_exporters"`
	MovedSessions  harness.Figure `json:"moved_sessions"`
	// LostExporters and LostSessions are the shares of the routers of the dead member whose datagrams from open sockets,
	// and whose new sessions, reach no member.
	LostExporters harness.Figure `json:"lost_exporters_of_dead"`
	LostSessions  harness.Figure `json:"lost_sessions_of_dead"`
}

// A remover changes the configuration of an arm after the death of a member. Without one, the arm needs no change, or has
// none.
type remover interface {
	remove(ctx context.Context, f *fleet, slot int) error
}

// places are the slots of the members that have received something from a router, by router.
type places map[int][]int

// peersReport is the report of the flag -peers.
type peersReport struct {
	Options options `json:"options"`
	harness.Run

	arms        []armTitle
	traits      map[string]traits
	rate, plain *part
}

// Print implements harness.Report.
func (r *peersReport) Print(p harness.Printf) {
	p("\n%d routers, four members, %d rounds, arms in rotating order. Linux %s, %d CPUs.\n", r.Options.Routers, r.Options.Rounds, r.Kernel, r.CPUs)
	together := map[string]float64{}
	for name, t := range r.traits {
		together[name] = float64(t.Together)
	}
	printRate(p, r.arms, r.rate, together)
	var measured []armTitle
	for _, a := range r.arms {
		if len(r.plain.by(a.name, collectorsCPU)) > 0 {
			measured = append(measured, a)
		}
	}
	printCPU(p, measured, r.plain, "four plain receivers", r.Options.Plain, r.Options.Records)
	printUsage(p, measured, r.plain, "four plain receivers")
	printTraits(p, r.arms, r.traits, r.Options.TraitRouters)
	p("\nDuration %s.\n", r.Took)
}

// printTraits prints the properties of the arms that have some.
func printTraits(p harness.Printf, arms []armTitle, all map[string]traits, routers int) {
	if len(all) == 0 {
		return
	}
	p("\nProperties with %d routers, in %% of routers. Entries: of nf_conntrack and IPVS, per router with a session and an exporter.\n", routers)
	p("Moved: routers of the other members that reach another one, or none, after a member has died. Lost: routers of that member that reach none.\n")
	p("\tentries\tsource kept: TCP\tUDP\ttogether: IPv4\tIPv6\ttwo addresses\tmoved: open exporters\tnew sessions\tlost: open exporters\tnew sessions\n")
	for _, a := range arms {
		t, ok := all[a.name]
		if !ok {
			continue
		}
		p("%s\t%.1f", a.title, t.Entries)
		for _, share := range []harness.Figure{t.KeptTCP, t.KeptUDP, t.Together, t.TogetherIPv6, t.TogetherTwo, t.MovedExporters, t.MovedSessions, t.LostExporters, t.LostSessions} {
			if math.IsNaN(float64(share)) { // no router was at such a member before
				p("\t-")
				continue
			}
			p("\t%.0f", 100*share)
		}
		p("\n")
	}
}

// Figures implements harness.Report.
func (r *peersReport) Figures() any {
	return map[string]any{
		"run": r, "peers": peerFigures(r.arms, r.traits, r.rate, nil, r.plain),
		"rate": r.rate.runs, "cpu_plain": r.plain.runs,
	}
}

// peerFigures returns the figures of plain sockets, Sockeye and its peers by arm: their properties, and the ratios of rate
// and CPU time to plain sockets. nfacctd may be nil.
func peerFigures(arms []armTitle, all map[string]traits, rate, nfacctd, plain *part) map[string]any {
	out := map[string]any{}
	for _, a := range arms {
		ratio := func(p *part, figure func(m, plain *measurement) float64) *float64 {
			if p == nil {
				return nil
			}
			return harness.Number(p.ratio(a.name, "plain", figure).Median)
		}
		figures := map[string]any{
			"rate_vs_plain": ratio(rate, receivedRate),
			"cpu_vs_plain":  map[string]*float64{"nfacctd": ratio(nfacctd, collectorsCPU), "plain": ratio(plain, collectorsCPU)},
		}
		cpu := map[string]*float64{}
		for _, role := range roles {
			cpu[role.title+"_user"] = harness.Number(harness.SpreadOf(plain.by(a.name, usage(role.group, user))).Median)
			cpu[role.title+"_system"] = harness.Number(harness.SpreadOf(plain.by(a.name, usage(role.group, system))).Median)
		}
		figures["cpu_s_per_million"] = cpu
		if t, ok := all[a.name]; ok {
			figures["properties"] = t
		}
		out[a.name] = figures
	}
	return out
}

// Charts implements harness.Report.
func (*peersReport) Charts() map[string]chart.Chart { return nil }

// peers compares the balancers in the kernel with each other, and with plain sockets.
func (b *bench) peers(ctx context.Context, small, mixed load) error {
	examined := b.arms("plain", "reuseport", "lookup", "lookup_device_map", "nft", "nft-replace", "ipvs", "ipvs-mh", "proxy")
	r := &peersReport{Options: b.options, Run: begin(ctx), arms: titles(examined)}
	var err error
	if r.traits, err = b.allTraits(ctx, examined); err != nil {
		return err
	}
	timed := b.arms("plain", "reuseport", "lookup", "nft", "ipvs")
	if r.rate, err = b.compare(ctx, "rate", timed, kindPlain, 2*b.Rounds, 0, small); err != nil {
		return err
	}
	if r.plain, err = b.compare(ctx, "cpu, plain receivers", timed, kindPlain, b.Rounds, 0, mixed); err != nil {
		return err
	}
	r.End()
	return harness.Publish(command+"-peers", r)
}

// allTraits measures the properties of all arms.
func (b *bench) allTraits(ctx context.Context, arms []arm) (map[string]traits, error) {
	all := map[string]traits{}
	err := b.withFleets(ctx, "properties", arms, kindSources, b.TraitRouters, func(fleets []*fleet) error {
		for _, f := range fleets {
			t, err := f.traits(ctx)
			if err != nil {
				return fmt.Errorf("properties of %s: %w", f.arm.name(), err)
			}
			all[f.arm.name()] = t
			fmt.Fprint(os.Stderr, ".")
		}
		return nil
	})
	return all, err
}

// traits measures the properties of an arm with members of kindSources.
func (f *fleet) traits(ctx context.Context) (t traits, err error) {
	if err := netns.Enter(f.net); err != nil {
		return t, err
	}
	if err := addIPv6(); err != nil {
		return t, err
	}
	entries := connectionEntries()
	before, err := f.counters()
	if err != nil {
		return t, err
	}
	tcp, udp, first, err := f.reach(ctx, fromOne)
	if err != nil {
		return t, err
	}
	defer end(first)
	t.Together = togetherShare(tcp, udp, f.devices)
	t.Entries = harness.Figure(float64(connectionEntries()-entries) / float64(f.devices))
	t.KeptUDP = harness.Figure(float64(len(udp)) / float64(f.devices))
	after, err := f.counters()
	if err != nil {
		return t, err
	}
	for slot := range after {
		t.KeptTCP += harness.Figure(float64(after[slot].Kept-before[slot].Kept) / float64(f.devices))
	}
	for _, more := range []struct {
		from  addresses
		share *harness.Figure
	}{{fromTwo, &t.TogetherTwo}, {fromIPv6, &t.TogetherIPv6}} {
		sessions, datagrams, gen, err := f.reach(ctx, more.from)
		if err != nil {
			return t, err
		}
		end(gen)
		*more.share = togetherShare(sessions, datagrams, f.devices)
	}

	f.killed = f.members[deadSlot]
	f.killed.Stop(unix.SIGKILL)
	if a, ok := f.arm.(remover); ok {
		if err := a.remove(ctx, f, deadSlot); err != nil {
			return t, err
		}
	}
	if err := harness.Pause(ctx, settle); err != nil {
		return t, err
	}
	before, err = f.counters()
	if err != nil {
		return t, err
	}
	if err := f.arrived(ctx, first, "again"); err != nil {
		return t, err
	}
	after, err = f.counters()
	if err != nil {
		return t, err
	}
	_, open := placesOf(before, after)
	t.MovedExporters, t.LostExporters = change(udp, open)
	sessions, _, gen, err := f.reach(ctx, fromOne)
	if err != nil {
		return t, err
	}
	end(gen)
	t.MovedSessions, t.LostSessions = change(tcp, sessions)
	return t, nil
}

// togetherShare returns the share of routers whose two streams have reached the same member and no other.
func togetherShare(tcp, udp places, routers int) harness.Figure {
	n := 0
	for router := range tcp {
		a, ok := tcp.only(router)
		if b, both := udp.only(router); ok && both && a == b {
			n++
		}
	}
	return harness.Figure(float64(n) / float64(routers))
}

// change returns the share of the routers of living members that reach another member than before, and the share of
// those of the dead member that reach none. A router without a place before counts for neither.
func change(before, after places) (moved, lost harness.Figure) {
	var living, movers, ofDead, lostOnes float64
	for router := range before {
		was, ok := before.only(router)
		if !ok {
			continue
		}
		now, served := after.only(router)
		if was == deadSlot {
			ofDead++
			if !served {
				lostOnes++
			}
			continue
		}
		living++
		if !served || now != was {
			movers++
		}
	}
	return harness.Figure(movers / living), harness.Figure(lostOnes / ofDead)
}

// only returns the slot of the only member that a router has reached.
func (p places) only(router int) (slot int, ok bool) {
	if len(p[router]) != 1 {
		return 0, false
	}
	return p[router][0], true
}

// connectionEntries returns the number of entries of nf_conntrack and IPVS in this network namespace.
func connectionEntries() (n int) {
	if b, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count"); err == nil {
		n, _ = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	if b, err := os.ReadFile("/proc/thread-self/net/ip_vs_conn"); err == nil {
		n += max(0, strings.Count(string(b), "\n")-1)
	}
	return n
}

// addIPv6 makes the IPv6 addresses of the routers usable as sources in the namespace of this thread.
func addIPv6() error {
	if err := os.WriteFile("/proc/sys/net/ipv6/ip_nonlocal_bind", []byte("1"), 0); err != nil {
		return fmt.Errorf("permit IPv6 sources: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	dst := &net.IPNet{IP: addresses6.Addr().AsSlice(), Mask: net.CIDRMask(addresses6.Bits(), 128)}
	route := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: dst, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL}
	if err := netlink.RouteAdd(route); err != nil {
		return fmt.Errorf("add route to %s: %w", addresses6, err)
	}
	return nil
}

// reach returns where the sessions and datagrams of routers arrive that start now, and the generator, which keeps them
// open.
func (f *fleet) reach(ctx context.Context, from addresses) (tcp, udp places, gen *harness.Process, err error) {
	before, err := f.counters()
	if err != nil {
		return nil, nil, nil, err
	}
	if gen, err = f.traffic(ctx, from); err != nil {
		return nil, nil, gen, err
	}
	after, err := f.counters()
	if err != nil {
		return nil, nil, gen, err
	}
	tcp, udp = placesOf(before, after)
	return tcp, udp, gen, nil
}

var routerOf = func() map[string]int {
	all := map[string]int{}
	for i := range maxRouters {
		for _, a := range deviceAddrs(i) {
			all[a.String()] = i
		}
	}
	return all
}()

// placesOf returns where the routers' sessions and datagrams have arrived between two readings of the counters. The
// datagrams of an unknown source count for no router.
func placesOf(before, after []received) (tcp, udp places) {
	tcp, udp = places{}, places{}
	for slot := range after {
		for _, c := range []struct {
			to            places
			before, after map[string]uint64
		}{{tcp, before[slot].TCP, after[slot].TCP}, {udp, before[slot].UDP, after[slot].UDP}} {
			for source, n := range c.after {
				if router, ok := routerOf[source]; ok && n > c.before[source] {
					c.to[router] = append(c.to[router], slot)
				}
			}
		}
	}
	return tcp, udp
}

// traffic starts a generator whose routers open sessions and send datagrams, and waits until all has arrived.
func (f *fleet) traffic(ctx context.Context, from addresses) (*harness.Process, error) {
	host := loopback[0]
	if from == fromIPv6 {
		host = loopback[1]
	}
	l := load{
		Routers: f.devices, Records: 1, Prefixes: 1, From: from, Within: f.b.TraitTime,
		BMP: netip.AddrPortFrom(host, bmpPort).String(), IPFIX: netip.AddrPortFrom(host, ipfixPort).String(),
		Datagrams: float64(10 * f.devices), Duration: time.Second,
	}
	gen, err := f.b.Start(f.group(generatorGroup), "generator", "/proc/self/exe", "generator")
	if err != nil {
		return nil, err
	}
	spec, err := json.Marshal(l)
	if err != nil {
		return nil, err
	}
	if err := gen.Ask(string(spec), &struct{}{}); err != nil {
		return nil, err
	}
	return gen, f.arrived(ctx, gen, "go")
}

// arrived tells a generator to send, and waits until it has sent and the members have read.
func (f *fleet) arrived(ctx context.Context, gen *harness.Process, order string) error {
	var state onset
	if err := gen.Ask(order, &state); err != nil {
		return err
	}
	for state.Pending > 0 || state.Sending {
		if err := harness.Pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
		if err := gen.Ask("state", &state); err != nil {
			return err
		}
	}
	return harness.Pause(ctx, settle)
}

func end(gen *harness.Process) {
	gen.In.Close()
	<-gen.Done
}

// begin returns a run with the versions of the programs that Sockeye is compared with.
func begin(ctx context.Context) harness.Run {
	r := harness.Begin()
	r.Compare(ctx, map[string]string{"haproxy": "-v", "ipvsadm": "--version", "nfacctd": "-V", "nft": "--version"})
	return r
}
