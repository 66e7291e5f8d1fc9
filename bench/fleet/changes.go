// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"time"

	"sockeye/bench/harness"
	"sockeye/internal/api"
	"sockeye/internal/chart"
	"sockeye/internal/fleet/table"
	"sockeye/internal/stats"
	labfleet "sockeye/lab/fleet"
	"sockeye/lab/swarm"
)

const (
	role = "swarm" // worker role of members and devices

	changeDevices = 96
	changeFlows   = 2  // UDP ports of a device
	changeRate    = 25 // datagrams per second of a device
	changeSlots   = 2  // of each host
	// changePeriod is the time between two datagrams of a flow.
	changePeriod = changeFlows * time.Second / changeRate
	// noticed is the time in which the router in front notices that a host has died: BFD with three times 300 ms.
	noticed = 900 * time.Millisecond
	// changePatience is the timeout of a change that needs seconds.
	changePatience = time.Minute
	// reconnect is the time that a device needs to connect again: the first retransmission of a SYN (RFC 6298).
	reconnect = time.Second
	// silence is the time without datagrams after which a device is at no member.
	silence = time.Second
)

// change is a change of the hosts under load.
type change struct {
	Name string `json:"name"`
	// Moved are the buckets that got another host, and Ideal those that must.
	Moved int     `json:"moved"`
	Ideal float64 `json:"ideal"`
	Took  float64 `json:"took_s"`
	// Lost are the datagrams that no member received, of Sent.
	Lost int `json:"lost"`
	Sent int `json:"sent"`
	// Misdirected are the datagrams of a device at one member while its connection was at another one that lives, and Split is the
	// longest time of a device.
	Misdirected int     `json:"misdirected"`
	Split       float64 `json:"split_ms"`
	// Overtook are the datagrams that reached the new member after the former host had closed the connection of their device, and before the
	// RST reached the device. Early is the longest such time.
	Overtook int     `json:"overtook"`
	Early    float64 `json:"early_ms"`
	// Forwarded is the share of the packets of devices that a host has sent to another one.
	Forwarded float64 `json:"share_forwarded"`
	// Reconnected are the connections that were closed and opened again. Gap is the longest time of a device without a connection
	// with a living member, or between two datagrams of one UDP port that a member received.
	Reconnected int     `json:"reconnected"`
	Gap         float64 `json:"gap_s"`

	swarm.Interval `json:"-"`
	dead           []int // IDs of members
}

// changesPart contains the changes in their order.
type changesPart struct{ changes []change }

// changed is a fleet under load.
type changed struct {
	*labfleet.Fleet
	swarm   *swarm.Swarm
	members map[string][]int // IDs, by host
	part    changesPart
	// analysis has all records.
	analysis swarm.Analysis
}

// changes lets hosts join, drain, return and die while devices send through a router that hashes ports.
func (b *bench) changes(ctx context.Context) (part, error) {
	c, err := b.newFleet(ctx)
	if err != nil {
		return nil, err
	}
	x, y := c.Hosts[0], c.Hosts[1]
	if err := c.await(ctx, c.Hosts, labfleet.Shared("a", "b")); err != nil {
		return nil, err
	}
	if err := c.Route(x, y); err != nil {
		return nil, err
	}
	load := swarm.Load{Devices: changeDevices, TCP: labfleet.BMP, UDP: labfleet.IPFIX, Rate: changeRate, Exporters: changeFlows, Routes: 10,
		Service4: labfleet.Service4, Service6: labfleet.Service6, Noted: true}
	if err := c.swarm.StartDevices(ctx, load); err != nil {
		return nil, err
	}
	begun, err := c.swarm.Send()
	if err != nil {
		return nil, err
	}
	c.analysis = swarm.Analysis{Begin: begun.At, Silence: silence, Period: changePeriod}
	z, err := c.NewHost()
	if err != nil {
		return nil, err
	}
	third := float64(table.Buckets) / 3
	join := func() error {
		if err := c.start(ctx, z); err != nil {
			return err
		}
		if err := c.await(ctx, c.Hosts, labfleet.Shared("a", "b", "c")); err != nil {
			return err
		}
		return c.Route(x, y, z)
	}
	if err := c.change(ctx, "join", third, join); err != nil {
		return nil, err
	}
	for range b.Cycles {
		drain := func() error {
			if err := x.Set(ctx, z.Name, "drain"); err != nil {
				return err
			}
			if err := c.await(ctx, c.Hosts, labfleet.Shared("a", "b")); err != nil {
				return err
			}
			return c.Route(x, y)
		}
		if err := c.change(ctx, "drain", third, drain); err != nil {
			return nil, err
		}
		back := func() error {
			if err := x.Set(ctx, z.Name, "ready"); err != nil {
				return err
			}
			if err := c.await(ctx, c.Hosts, labfleet.Shared("a", "b", "c")); err != nil {
				return err
			}
			return c.Route(x, y, z)
		}
		if err := c.change(ctx, "return", third, back); err != nil {
			return nil, err
		}
	}
	living := []*labfleet.Host{x, y}
	kill := func() error {
		if err := z.Kill(); err != nil {
			return err
		}
		time.Sleep(noticed)
		if err := c.Route(x, y); err != nil {
			return err
		}
		if err := c.await(ctx, living, labfleet.Shared("a", "b")); err != nil {
			return err
		}
		return c.WaitFor(ctx, "connections", func() (bool, error) {
			err := c.swarm.Read(&c.analysis)
			return c.analysis.Connected(func(member int) bool { return !slices.Contains(c.members[z.Name], member) }) == changeDevices, err
		})
	}
	c.Hosts = living // the dead host has no events
	if err := c.change(ctx, "kill", third, kill); err != nil {
		return nil, err
	}
	c.part.changes[len(c.part.changes)-1].dead = c.members[z.Name]
	return c.judge()
}

// newFleet starts two hosts.
func (b *bench) newFleet(ctx context.Context) (*changed, error) {
	pins := func(host string) string { return b.pins("host-" + host) }
	f, err := labfleet.New(ctx, b.lab, labfleet.Options{Binary: b.Binary, Pins: pins, Slots: changeSlots})
	if err != nil {
		return nil, err
	}
	devices, err := swarm.Attach(b.lab)
	if err != nil {
		return nil, err
	}
	if err := swarm.Reach(f.Front); err != nil {
		return nil, err
	}
	if err := f.Reach(devices, netip.Addr{}, netip.Addr{}); err != nil {
		return nil, err
	}
	c := &changed{Fleet: f, members: map[string][]int{}}
	if c.swarm, err = swarm.New(b.lab, devices, role); err != nil {
		return nil, err
	}
	for range 2 {
		h, err := f.NewHost()
		if err != nil {
			return nil, err
		}
		if err := c.start(ctx, h); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// start starts the agent and the members of a host.
func (c *changed) start(ctx context.Context, h *labfleet.Host) error {
	if err := h.Start(ctx); err != nil {
		return err
	}
	for slot := range changeSlots {
		m := swarm.Member{Slot: h.Collector(slot), TCP: labfleet.BMP, UDP: labfleet.IPFIX, Resets: true}
		p, err := c.swarm.StartMemberIn(h.Namespace, m, fmt.Sprintf("%s/receiver-%d", h.Name, slot), "root")
		if err != nil {
			return err
		}
		c.members[h.Name] = append(c.members[h.Name], p.ID)
	}
	return nil
}

// await waits until hosts agree and a condition holds.
func (c *changed) await(ctx context.Context, hosts []*labfleet.Host, condition func(*api.FleetStatus) error) error {
	ctx, cancel := context.WithTimeout(ctx, changePatience)
	defer cancel()
	var last error
	err := c.WaitFor(ctx, "the hosts", func() (bool, error) {
		err := labfleet.Agree(ctx, hosts, condition)
		if ctx.Err() == nil {
			last = err
		}
		return err == nil, nil
	})
	if err != nil && last != nil {
		err = fmt.Errorf("%w: %w", err, last)
	}
	return err
}

// change makes a change, and notes its time and the buckets that moved.
func (c *changed) change(ctx context.Context, name string, ideal float64, f func() error) error {
	fmt.Fprint(os.Stderr, ".")
	before, err := c.gained(ctx)
	if err != nil {
		return err
	}
	packets, err := c.packets(ctx)
	if err != nil {
		return err
	}
	from, begun := swarm.Now(), time.Now()
	if err := f(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	took := time.Since(begun)
	time.Sleep(time.Second) // the last connections
	after, err := c.gained(ctx)
	if err != nil {
		return err
	}
	now, err := c.packets(ctx)
	if err != nil {
		return err
	}
	c.part.changes = append(c.part.changes, change{Name: name, Moved: after - before, Ideal: ideal, Took: took.Seconds(), Forwarded: forwardedShare(packets, now),
		Interval: swarm.Interval{From: from, To: swarm.Now()}})
	return nil
}

// packets returns the packets by outcome at each host that has an agent.
func (c *changed) packets(ctx context.Context) (map[string]map[string]uint64, error) {
	all := make(map[string]map[string]uint64)
	for _, h := range c.Hosts {
		if h.Agent == nil {
			continue
		}
		s, err := h.Status(ctx)
		if err != nil {
			return nil, err
		}
		all[h.Name] = s.Packets
	}
	return all, nil
}

// forwardedShare returns the packets that hosts have sent to others, divided by those that hosts have passed to their services. A host that has
// started in between counts from its start.
func forwardedShare(before, now map[string]map[string]uint64) float64 {
	var forwarded, served uint64
	for host, counts := range now {
		for outcome, n := range counts {
			switch n -= min(n, before[host][outcome]); outcome {
			case "forwarded", "second_chance":
				forwarded += n
			case "local", "disagreed":
				served += n
			}
		}
	}
	return float64(forwarded) / float64(max(served, 1))
}

// gained returns the buckets that all hosts have got since they started.
func (c *changed) gained(ctx context.Context) (sum int, err error) {
	for _, h := range c.Hosts {
		if h.Agent == nil {
			continue
		}
		list, err := h.Events(ctx, "fleet_table")
		if err != nil {
			return 0, err
		}
		for _, e := range list {
			n, err := strconv.Atoi(e.Details["gained"])
			if err != nil {
				return 0, fmt.Errorf("read events of host %s: %w", h.Name, err)
			}
			sum += n
		}
	}
	return sum, nil
}

// judge stops the devices, and finds out what each change has cost.
func (c *changed) judge() (part, error) {
	stopped, err := c.swarm.Stop()
	if err != nil {
		return nil, err
	}
	time.Sleep(time.Second) // the members receive what is on the way
	if err := c.swarm.Read(&c.analysis); err != nil {
		return nil, err
	}
	c.analysis.End = stopped.At
	c.part.judge(&c.analysis)
	return &c.part, nil
}

// judge finds out what each change has cost. All records have been added to the analysis.
func (p *changesPart) judge(a *swarm.Analysis) {
	for i := range p.changes { // before the end of the analysis, which forgets connections
		if one := &p.changes[i]; len(one.dead) > 0 {
			one.Gap = a.LongestWithout(one.From, func(member int) bool { return slices.Contains(one.dead, member) }).Seconds()
		}
	}
	a.Finish()
	missing := a.Missing()
	for i := range p.changes {
		one := &p.changes[i]
		within := func(at time.Duration) bool { return at >= one.From && at < one.To }
		one.Sent = a.SentWithin(one.Interval)
		for _, at := range missing {
			if within(at) {
				one.Lost++
			}
		}
		one.Gap = max(one.Gap, a.LongestSilence(one.Interval).Seconds())
		for _, s := range a.Splits {
			if within(s.From) && !slices.Contains(one.dead, s.Connection) { // a device does not know yet that its connection has no other end
				one.Misdirected += s.Count
				one.Split = max(one.Split, s.Length(a.Stalls...).Seconds()*1000)
			}
		}
		for _, g := range a.Overtook {
			if within(g.From) {
				one.Overtook++
				one.Early = max(one.Early, g.Length().Seconds()*1000)
			}
		}
		for _, g := range a.Gaps {
			if within(g.From) {
				one.Reconnected++
				one.Gap = max(one.Gap, g.Length().Seconds())
			}
		}
	}
}

func (p *changesPart) print(w harness.Printf) {
	w("\nThree hosts on a link, %d devices with a TCP connection and %d UDP flows, %d datagrams per second each; the router hashes ports\n", changeDevices, changeFlows, changeRate)
	w("change\tseconds\tbuckets moved\tmoved / ideal\tdatagrams\tlost\tmisdirected\tlongest split, ms\tbefore the RST\tlongest, ms\tforwarded\tconnections opened again\tlongest gap, s\n")
	for _, c := range p.changes {
		w("%s\t%.1f\t%d\t%.3f\t%d\t%d\t%d\t%.1f\t%d\t%.1f\t%.0f %%\t%d\t%.2f\n",
			c.Name, c.Took, c.Moved, float64(c.Moved)/c.Ideal, c.Sent, c.Lost, c.Misdirected, c.Split, c.Overtook, c.Early, 100*c.Forwarded, c.Reconnected, c.Gap)
	}
	w("Misdirected: at one member while the connection of the device was at another one that lives, until the kernel of its host has closed it. Before the\n")
	w("RST: at the new member after this, and before the RST of the former host has reached the device. Gap: of a device, without a connection with a\n")
	w("living member, or between two datagrams of one UDP port that arrived, which are sent %v apart.\n", changePeriod)
	w("Kill: all processes and the link of the host at once; the router in front notices it after %v.\n", noticed)
}

func (p *changesPart) figures() map[string]any {
	all := map[string]any{"changes": p.changes}
	misdirected, shares := 0, []float64{}
	for _, c := range p.changes {
		shares = append(shares, c.Forwarded)
	}
	all["share_forwarded"] = harness.Figure(stats.Median(shares))
	for _, name := range []string{"join", "drain", "return", "kill"} {
		list := p.named(name)
		if len(list) == 0 {
			continue
		}
		lost, gap := 0, 0.0
		for _, c := range list {
			lost, gap = lost+c.Lost, max(gap, c.Gap)
			misdirected += c.Misdirected
		}
		switch name {
		case "join":
			all[name] = map[string]any{"moved": list[0].Moved, "ideal": harness.Figure(list[0].Ideal), "lost": lost}
		case "kill":
			all[name] = map[string]any{"gap_s": harness.Figure(gap), "lost": lost}
		default:
			all[name] = map[string]any{"lost": lost}
		}
	}
	all["misdirected"] = misdirected
	return all
}

func (p *changesPart) targets() []harness.Target {
	lost, misdirected, moved := 0, 0, 0.0
	for _, c := range p.changes {
		misdirected += c.Misdirected
		if c.Name == "kill" {
			continue
		}
		lost += c.Lost
		moved = max(moved, float64(c.Moved)/c.Ideal, c.Ideal/float64(c.Moved))
	}
	gap := 0.0
	for _, c := range p.named("kill") {
		gap = max(gap, c.Gap)
	}
	return []harness.Target{
		exact("buckets that move when a host joins, drains or returns, divided by the ideal number, the worst", "%.3f", mostMoved, moved),
		exact("datagrams lost while hosts join, drain and return", "%.0f", 0, float64(lost)),
		exact("datagrams at one member while the connection of the device was at another one", "%.0f", 0, float64(misdirected)),
		exact("longest gap of a device after a host has died, seconds", "%.2f", (labfleet.Lease + reconnect).Seconds(), gap),
	}
}

// named returns the changes with a name.
func (p *changesPart) named(name string) (list []change) {
	for _, c := range p.changes {
		if c.Name == name {
			list = append(list, c)
		}
	}
	return list
}

// exact is a target for a figure without a confidence interval.
func exact(claim, format string, most, measured float64) harness.Target {
	f := harness.Figure(measured)
	t := harness.AtMost(claim, format, most, harness.Distribution{Median: f, Low: f, High: f})
	t.Measured = fmt.Sprintf(format, measured)
	return t
}

func (p *changesPart) panels() []chart.Panel {
	panel := chart.Panel{Title: "Longest gap of a device, s"}
	for _, c := range p.changes {
		panel.Bars = append(panel.Bars, chart.Bar{Label: c.Name, Note: fmt.Sprintf("%.2f", c.Gap), Parts: []float64{c.Gap}})
	}
	return []chart.Panel{panel}
}
