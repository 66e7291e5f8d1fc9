// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"sockeye/lab"
	"sockeye/lab/fleet"
)

const (
	fleetRouters = 12
	fleetSlots   = 2 // of each host
	fleetCards   = 2 // exporters of one router
	fleetLimit   = 280 * time.Second
	// statsInterval is the interval of BMP statistics reports. A router notices the loss of a session when it sends.
	statsInterval = 2 * time.Second
)

// fleetDemo is the demonstration of make demo-fleet.
type fleetDemo struct {
	*demo
	net    *fleet.Fleet
	living []*fleet.Host // whose collectors run
}

// fleetResult is the content of demo-fleet.json.
type fleetResult struct {
	Routers []fleetRouter `json:"routers"`          // at the end
	Share   fleetShare    `json:"correlated_share"` // of the flow records
}

type fleetRouter struct {
	Address netip.Addr `json:"address"`
	TCP     fleetPlace `json:"tcp"`
	UDP     fleetPlace `json:"udp"`
}

// fleetPlace is a collector.
type fleetPlace struct {
	Host string `json:"host"`
	Slot int    `json:"slot"`
}

type fleetShare struct {
	Sockeye float64 `json:"sockeye"`
	ECMP    float64 `json:"ecmp"`
}

// newFleet makes the router in front, three hosts and three etcd servers.
func (d *demo) newFleet(ctx context.Context) (*fleetDemo, error) {
	pins := func(host string) string { return filepath.Join(d.Dir(), host+".bpf", "sockeye") }
	f, err := fleet.New(ctx, d.Lab, fleet.Options{Binary: d.binary, Pins: pins, Servers: 3, Slots: fleetSlots, Daemon: fleet.FRR, Examples: "examples"})
	if err != nil {
		return nil, err
	}
	for range 3 {
		h, err := f.NewHost()
		if err != nil {
			return nil, err
		}
		d.unmountAtClose(filepath.Dir(pins(h.Name)))
	}
	for _, r := range d.Routers() {
		if err := f.Reach(r.Namespace, r.IPv4, r.IPv6); err != nil {
			return nil, err
		}
	}
	d.perRouter = fleetCards
	demo := &fleetDemo{demo: d, net: f}
	d.name = demo.place
	return demo, nil
}

// place is the name of a collector.
func (f *fleetDemo) place(slot int) string {
	p := placeOf(slot)
	if p.Host == "" {
		return "-"
	}
	return fmt.Sprintf("host %s, slot %d", p.Host, p.Slot)
}

// run is the demonstration. It writes its results into the directory out, unless out is empty.
func (f *fleetDemo) run(ctx context.Context, out string) error {
	a, b, c := f.net.Hosts[0], f.net.Hosts[1], f.net.Hosts[2]
	say("Twelve routers (FRR: BGP, BMP over TCP; pmacctd: IPFIX over UDP, two line cards each), a router in front (FRR: BGP,")
	say("BFD, ECMP by addresses and ports), and three hosts that serve %v and %v, with two unmodified nfacctd each.", fleet.Service4, fleet.Service6)
	say("\n== 1. Without Sockeye: the router in front hashes flows to hosts, and each kernel hashes them to processes")
	if err := f.startAllHosts(ctx); err != nil {
		return err
	}
	before, err := f.outcome(ctx, 1)
	if err != nil {
		return err
	}

	say("\n== 2. With Sockeye on hosts a and b: the router decides")
	if err := f.startFleet(ctx, a, b); err != nil {
		return err
	}
	if _, err := f.settled(ctx, "a", "b"); err != nil {
		return err
	}

	say("\n== 3. Host c joins: it gets its share of the routers, each with BMP and IPFIX")
	if err := f.startHost(ctx, c); err != nil {
		return err
	}
	if _, err := f.settled(ctx, "a", "b", "c"); err != nil {
		return err
	}

	say("\n== 4. Host a drains, and returns")
	if err := f.set(ctx, b, "a", "drain"); err != nil {
		return err
	}
	if _, err := f.settled(ctx, "b", "c"); err != nil {
		return err
	}
	if err := f.set(ctx, b, "a", "ready"); err != nil {
		return err
	}
	if _, err := f.settled(ctx, "a", "b", "c"); err != nil {
		return err
	}

	say("\n== 5. Host b dies with all of its processes and links")
	if err := b.Kill(); err != nil {
		return err
	}
	died := time.Now()
	f.without(b)
	if err := f.routesTo(ctx, "a", "c"); err != nil {
		return err
	}
	say("%.1f s: BFD has removed the host from the routes of the router in front", time.Since(died).Seconds())
	if err := f.shared(ctx, a, "a", "c"); err != nil {
		return err
	}
	say("%.1f s: its routers belong to hosts a and c", time.Since(died).Seconds())
	if err := f.WaitSessions(ctx); err != nil {
		return err
	}
	say("%.1f s: all routers have a BMP session", time.Since(died).Seconds())
	after, err := f.settled(ctx, "a", "c")
	if err != nil {
		return err
	}
	if err := f.show(ctx, a, "fleet"); err != nil {
		return err
	}

	say("\nFlow records that carry BGP communities: %s with ECMP alone, %s with Sockeye.", percent(before.CorrelatedShare), percent(after.CorrelatedShare))
	if out == "" {
		return nil
	}
	r := fleetResult{Share: fleetShare{Sockeye: after.CorrelatedShare, ECMP: before.CorrelatedShare}}
	for _, o := range after.Routers {
		r.Routers = append(r.Routers, fleetRouter{o.Address, placeOf(o.TCPSlot), placeOf(o.UDPSlot)})
	}
	return writeJSON(out, "demo-fleet.json", r)
}

// startAllHosts starts the collectors of all hosts, the routers and their traffic. The router in front has static routes.
func (f *fleetDemo) startAllHosts(ctx context.Context) error {
	if err := f.net.Route(f.net.Hosts...); err != nil {
		return err
	}
	for _, h := range f.net.Hosts {
		if err := f.startCollectors(h); err != nil {
			return err
		}
	}
	if err := f.WaitListeners(ctx); err != nil {
		return err
	}
	for i := range fleetRouters {
		service := fleet.Service4
		if i%3 == 2 { // four of the twelve routers use IPv6
			service = fleet.Service6
		}
		if _, err := f.StartRouter(lab.RouterConfig{Router: i, Collector: netip.AddrPortFrom(service, fleet.BMP), Stats: statsInterval}); err != nil {
			return err
		}
	}
	if _, err := f.StartTraffic(lab.TrafficConfig{}); err != nil {
		return err
	}
	if err := f.WaitCollectors(ctx); err != nil {
		return err
	}
	if err := f.WaitSessions(ctx); err != nil {
		return err
	}
	for _, r := range f.Routers() {
		for card := range fleetCards {
			service := fleet.Service4
			if r.BMP.Is6() {
				service = fleet.Service6
			}
			if _, err := f.StartExporter(lab.ExporterConfig{Router: r.Index, Instance: card, Collector: netip.AddrPortFrom(service, fleet.IPFIX)}); err != nil {
				return err
			}
		}
	}
	return nil
}

// startFleet stops all collectors, and starts Sockeye and the collectors on two hosts.
func (f *fleetDemo) startFleet(ctx context.Context, hosts ...*fleet.Host) error {
	var stops []func() error
	for _, c := range f.Collectors() {
		stops = append(stops, func() error { return c.Stop(time.Second) })
	}
	if err := together(stops); err != nil {
		return err
	}
	for _, h := range f.net.Hosts {
		f.without(h)
	}
	if err := f.net.Route(); err != nil { // from now on, by BGP
		return err
	}
	text, err := os.ReadFile(hosts[0].PolicyPath())
	if err != nil {
		return err
	}
	say("\n%s", text)
	for _, h := range hosts {
		if err := f.startHost(ctx, h); err != nil {
			return err
		}
	}
	return nil
}

// without forgets the collectors of a host.
func (f *fleetDemo) without(h *fleet.Host) {
	for slot := range fleetSlots {
		f.RemoveCollector(h.Collector(slot))
	}
	f.living = slices.DeleteFunc(f.living, func(o *fleet.Host) bool { return o == h })
}

func (f *fleetDemo) startHost(ctx context.Context, h *fleet.Host) error {
	if err := h.Start(ctx); err != nil {
		return err
	}
	return f.startCollectors(h)
}

// startCollectors starts the collectors of a host.
func (f *fleetDemo) startCollectors(h *fleet.Host) error {
	for slot := range fleetSlots {
		if _, err := h.StartCollector(slot); err != nil {
			return err
		}
	}
	f.living = append(f.living, h)
	return nil
}

// settled waits until the hosts with these names share the routers, and the router in front sends to them alone. It measures and
// shows the outcome. A router with separated streams is an error, and so are flow records without communities.
func (f *fleetDemo) settled(ctx context.Context, names ...string) (lab.Outcome, error) {
	if err := f.shared(ctx, f.living[0], names...); err != nil {
		return lab.Outcome{}, err
	}
	if err := f.routesTo(ctx, names...); err != nil {
		return lab.Outcome{}, err
	}
	for _, wait := range []func(context.Context) error{f.WaitSessions, f.rejoin} {
		if err := wait(ctx); err != nil {
			return lab.Outcome{}, err
		}
	}
	o, err := f.outcome(ctx, 1)
	if err != nil {
		return o, err
	}
	f.before = map[netip.Addr]int{}
	for _, r := range o.Routers {
		if err := f.separated(&r); err != nil {
			return o, err
		}
		if host := placeOf(r.TCPSlot).Host; !slices.Contains(names, host) {
			return o, fmt.Errorf("router %s is at host %s", r.Address, host)
		}
		f.before[r.Address] = r.TCPSlot
	}
	if o.CorrelatedShare < 1 {
		return o, fmt.Errorf("only %s of the flow records carry BGP communities", percent(o.CorrelatedShare))
	}
	return o, nil
}

func placeOf(slot int) fleetPlace {
	if slot < 0 {
		return fleetPlace{Slot: -1}
	}
	return fleetPlace{string(rune('a' + slot/fleetSlots)), slot % fleetSlots}
}

// shared waits until the hosts with these names share the devices, as a host sees it.
func (f *fleetDemo) shared(ctx context.Context, on *fleet.Host, names ...string) error {
	var last error
	err := f.WaitFor(ctx, "hosts "+strings.Join(names, ", ")+" to share the routers", func() (bool, error) {
		last = fleet.Agree(ctx, []*fleet.Host{on}, fleet.Shared(names...))
		return last == nil, nil
	})
	if err != nil && last != nil {
		err = fmt.Errorf("%w: %w", err, last)
	}
	return err
}

// routesTo waits until the router in front sends to exactly these hosts.
func (f *fleetDemo) routesTo(ctx context.Context, names ...string) error {
	return f.WaitFor(ctx, "routes to "+strings.Join(names, ", "), func() (bool, error) {
		found, same, err := f.net.Routes()
		return err == nil && same && slices.Equal(found, names), err
	})
}

// set changes the state of a host.
func (f *fleetDemo) set(ctx context.Context, on *fleet.Host, name, state string) error {
	return f.show(ctx, on, "host", "set", name, state)
}

// show runs a command of Sockeye on a host and prints its output.
func (f *fleetDemo) show(ctx context.Context, h *fleet.Host, args ...string) error {
	say("\n%s# sockeye %s", h.Name, strings.Join(args, " "))
	cmd := exec.CommandContext(ctx, f.binary, append([]string{"--run-dir", h.Dir}, args...)...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return cmd.Run()
}

// wait keeps the network and the programs running until Ctrl-C.
func (f *fleetDemo) wait(ctx context.Context) error {
	say("\nAll is up until Ctrl-C. In another terminal, for example:")
	say("  %s --run-dir %s fleet", f.binary, f.net.Hosts[0].Dir)
	say("  nsenter --net=%s ip route", f.net.Front.Path())
	say("  nsenter --net=%s tcpdump -ni eth0", f.net.Hosts[0].Namespace.Path())
	say("Files and logs: %s", f.Dir())
	<-ctx.Done()
	return nil
}
