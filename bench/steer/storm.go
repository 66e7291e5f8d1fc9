// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"sockeye/bench/harness"
	"sockeye/internal/chart"
	"sockeye/internal/netns"
)

// The storm: all routers open their sessions at the same moment and begin to send flow records, as after the restart of a
// collector or of the network. The members are nfacctd, whose listeners have a backlog of one connection.

const (
	stormRouters = 512
	// stormTime is the time in which a session must be open and read. It is longer than HAProxy's attempts to connect:
	// four, of up to five seconds each.
	stormTime = 30 * time.Second
	// stormTries is how often a storm is tried until no member ends: nfacctd 1.7.7 sometimes has a segmentation fault when
	// many sessions begin at once while it receives flow records, whatever is before it. At 4000 datagrams per second more
	// than half of the storms had one; each exporter therefore sends one per second.
	stormTries = 4
	// stormPoll is the interval between two looks at the sockets.
	stormPoll = 200 * time.Millisecond
)

// A stormRun is one storm of one arm.
type stormRun struct {
	Arm   string `json:"arm"`
	Round int    `json:"round"`
	onset
	// Served is the number of sessions that a member has accepted and whose data it has read.
	Served int `json:"served"`
	// Failed is the number of sessions that were not both open and served at the end of the storm.
	Failed  int           `json:"failed"`
	Took    time.Duration `json:"took_ns"` // until the last session was served, or stormTime
	Dropped uint64        `json:"dropped"` // datagrams dropped at a full receive buffer
	// Exits describes the end of members, which ends the storm. Such a storm does not count.
	Exits []string `json:"member_exits,omitempty"`
	// Usage is the CPU time by role, from the start of the storm until Took.
	Usage map[string]harness.Usage `json:"usage"`
}

func stormFailed(r *stormRun) float64 { return float64(r.Failed) }

// A stormSet contains the storms of all arms.
type stormSet []stormRun

// stormReport is the report of the flag -storm.
type stormReport struct {
	Options options `json:"options"`
	harness.Run

	arms   []armTitle
	storms stormSet
}

// Print implements harness.Report.
func (r *stormReport) Print(p harness.Printf) {
	p("\nLinux %s, %d CPUs for routers, balancing and members together.\n", r.Kernel, r.CPUs)
	r.storms.print(p, r.arms)
	p("\nDuration %s.\n", r.Took)
}

func (s stormSet) print(p harness.Printf, arms []armTitle) {
	if len(s) == 0 {
		return
	}
	p("\nConnection storm: %d BMP sessions at once and as many exporters, four nfacctd: sessions that were not open and read after %.0f s\n", stormRouters, stormTime.Seconds())
	p("\tfailed\tof these: never open\tclosed by the other end\tseconds until all were read\tdatagrams dropped\tCPU s\tnot counted: a member crashed\n")
	for _, a := range arms {
		if !slices.ContainsFunc(s, func(r stormRun) bool { return r.Arm == a.name }) {
			continue
		}
		count := func(figure func(*stormRun) float64) string { return s.of(a.name, figure).Format("%.0f") }
		took := s.of(a.name, func(r *stormRun) float64 { return r.Took.Seconds() }).Format("%.1f")
		if s.of(a.name, stormFailed).Min > 0 {
			took = "never"
		}
		p("%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\n", a.title, count(stormFailed),
			count(func(r *stormRun) float64 { return float64(r.Refused + r.Pending) }), count(func(r *stormRun) float64 { return float64(r.Closed) }),
			took, count(func(r *stormRun) float64 { return float64(r.Dropped) }),
			s.of(a.name, func(r *stormRun) float64 {
				return (r.Usage[membersGroup].Total() + r.Usage[balanceGroup].Total()).Seconds()
			}).Format("%.2f"), s.crashes(a.name))
	}
}

// Figures implements harness.Report.
func (r *stormReport) Figures() any { return map[string]any{"run": r, "storm": r.storms.figures()} }

// figures returns the medians of the failed sessions: of HAProxy those of its best configuration, of Sockeye those of its
// worst mode, or null if a mode has no storm that counts.
func (s stormSet) figures() map[string]any {
	var proxies, sockeyes []float64
	arms := map[string]any{}
	for i := range s {
		name := s[i].Arm
		median := s.of(name, stormFailed).Median
		if _, ok := arms[name]; ok {
			continue
		}
		arms[name] = map[string]any{"failed": harness.Number(median), "crashes": s.crashes(name)}
		switch {
		case slices.Contains(steered, name):
			sockeyes = append(sockeyes, median)
		case strings.HasPrefix(name, "proxy") && !math.IsNaN(median):
			proxies = append(proxies, median)
		}
	}
	out := map[string]any{"sessions": stormRouters, "seconds": stormTime.Seconds(), "arms": arms, "runs": s}
	if len(proxies) > 0 {
		out["haproxy_failed"] = harness.Number(slices.Min(proxies))
	}
	if len(sockeyes) > 0 {
		out["sockeye_failed"] = harness.Number(slices.Max(sockeyes))
	}
	return out
}

func (s stormSet) of(arm string, figure func(*stormRun) float64) harness.Spread {
	var v []float64
	for i := range s {
		if s[i].Arm == arm && s[i].Exits == nil {
			v = append(v, figure(&s[i]))
		}
	}
	return harness.SpreadOf(v)
}

// crashes returns the number of storms of an arm in which a member ended.
func (s stormSet) crashes(arm string) (n int) {
	for i := range s {
		if s[i].Arm == arm && s[i].Exits != nil {
			n++
		}
	}
	return n
}

// Charts implements harness.Report.
func (*stormReport) Charts() map[string]chart.Chart { return nil }

func (b *bench) stormOnly(ctx context.Context, arms []arm) error {
	r := &stormReport{Options: b.options, Run: begin(ctx), arms: titles(arms)}
	var err error
	if r.storms, err = b.storms(ctx, arms); err != nil {
		return err
	}
	r.End()
	return harness.Publish(command+"-storm", r)
}

// storms lets all arms have a storm in each of two rounds, or in one if the benchmark is quick.
func (b *bench) storms(ctx context.Context, arms []arm) (runs stormSet, err error) {
	rounds := 2
	if b.Quick {
		rounds = 1
	}
	l := load{
		Routers: stormRouters, Records: b.Records, Prefixes: 16, BMP: collector(bmpPort), IPFIX: collector(ipfixPort),
		Datagrams: stormRouters, Duration: 2 * time.Second, Within: stormTime,
	}
	for round := range rounds {
		for _, a := range harness.Turn(arms, round) {
			// One fleet at a time: four nfacctd with so many sessions have 5 GB of memory.
			for whole, try := false, 0; !whole && try < stormTries; try++ {
				err := b.withFleets(ctx, "storm of "+a.name(), []arm{a}, kindNfacctd, l.Routers, func(fleets []*fleet) error {
					r, err := fleets[0].storm(ctx, l)
					if err != nil {
						return fmt.Errorf("storm of %s: %w", a.name(), err)
					}
					r.Round = round
					whole = r.Exits == nil
					runs = append(runs, r)
					return nil
				})
				if err != nil {
					return nil, err
				}
			}
		}
	}
	return runs, nil
}

func (f *fleet) storm(ctx context.Context, l load) (r stormRun, err error) {
	r.Arm = f.arm.name()
	if err := netns.Enter(f.net); err != nil {
		return r, err
	}
	gen, err := f.b.Start(f.group(generatorGroup), "generator", "/proc/self/exe", "generator")
	if err != nil {
		return r, err
	}
	spec, err := json.Marshal(l)
	if err != nil {
		return r, err
	}
	if err := gen.Ask(string(spec), &struct{}{}); err != nil {
		return r, err
	}
	dropped := harness.Drops()
	r.Usage = map[string]harness.Usage{}
	for _, role := range roles {
		r.Usage[role.group] = f.b.Usage(f.group(role.group))
	}
	start := time.Now()
	for {
		if err := gen.Ask("state", &r.onset); err != nil {
			return r, err
		}
		r.Took = time.Since(start)
		r.Served = 0
		for _, file := range []string{"tcp", "tcp6"} {
			b, err := os.ReadFile("/proc/thread-self/net/" + file)
			if err != nil {
				return r, fmt.Errorf("count sessions: %w", err)
			}
			r.Served += served(string(b), f.memberPorts())
		}
		r.Failed = l.Routers - min(r.Open, r.Served)
		for i, m := range f.members {
			if m.Ended() {
				r.Exits = append(r.Exits, fmt.Sprintf("member %d: %v %s", i, m.Exit(), m.LastWords()))
			}
		}
		if r.Exits != nil || r.Failed <= 0 && !r.Sending || r.Took >= l.Within {
			break
		}
		if err := harness.Pause(ctx, stormPoll); err != nil {
			return r, err
		}
	}
	for _, role := range roles {
		r.Usage[role.group] = f.b.Usage(f.group(role.group)).Sub(r.Usage[role.group])
	}
	r.Dropped = harness.Drops() - dropped
	gen.In.Close()
	<-gen.Done
	return r, nil
}

// memberPorts returns the local ports of accepted connections of the members.
func (f *fleet) memberPorts() []uint16 {
	var ports []uint16
	for slot := range slots {
		tcp, _ := f.arm.ports(slot)
		ports = append(ports, tcp)
	}
	if s, ok := f.arm.(*sockeyeArm); ok && s.steering == "lookup" {
		ports = append(ports, bmpPort) // an accepted connection has the port to which the router connected
	}
	return ports
}

// served returns the number of connections at ports that a process has accepted and whose data it has read, from the
// text of /proc/net/tcp. A connection in the accept queue has no inode.
func served(text string, ports []uint16) (n int) {
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 10 || f[3] != "01" { // TCP_ESTABLISHED
			continue
		}
		_, local, _ := strings.Cut(f[1], ":")
		port, err := strconv.ParseUint(local, 16, 16)
		_, unread, _ := strings.Cut(f[4], ":")
		if err == nil && slices.Contains(ports, uint16(port)) && unread == "00000000" && f[9] != "0" {
			n++
		}
	}
	return n
}
