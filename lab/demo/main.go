// SPDX-License-Identifier: Apache-2.0

// Command demo demonstrates Sockeye with real programs: six routers (FRR) send BMP
// over TCP and IPFIX over UDP to four unmodified collectors (nfacctd), first
// distributed by the kernel's hash, then with Sockeye, then while a collector is
// killed, while slots are added and drained, and while a collector is replaced by
// another process. With -chain, the collectors write into Kafka, and the records are
// counted there. With -fleet, three hosts with collectors share twelve routers. "make demo", "make demo-chain" and "make demo-fleet"
// run it in a new mount namespace.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/chart"
	"sockeye/internal/doctor"
	"sockeye/lab"
)

const (
	routers    = 6
	collectors = 4
	lineCards  = 4 // exporters of one router, each with its own socket
	measure    = 4 * time.Second
	limit      = 150 * time.Second
	chainLimit = 220 * time.Second // with the start of Kafka, and records that arrive a second later
	bmpPort    = 1790
	ipfixPort  = 4739
)

const policy = `services:
  telemetry:
    slots: %d
    user: root
    cgroup: %s
    listeners:
      - {protocol: tcp, address: "[::]:1790"}
      - {protocol: udp, address: "[::]:4739"}
    members:
      - {match: {command_line: 'nfacctd-(\d+)(\.conf|\])'}, slot: group}
`

type options struct {
	binary, out        string
	chain, fleet, keep bool
}

func main() {
	binary := flag.String("sockeye", "", "path of the sockeye binary")
	out := flag.String("out", "", "directory for demo.json and demo.svg, or chain.json (default: do not write files)")
	chain := flag.Bool("chain", false, "let the collectors write into Kafka, and count the records there")
	fleet := flag.Bool("fleet", false, "three hosts behind a router, with ECMP alone and with Sockeye")
	keep := flag.Bool("keep", false, "keep the network and the programs running until Ctrl-C")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	defer stop()
	if *chain && *fleet {
		fmt.Fprintln(os.Stderr, "demo: -chain and -fleet exclude each other")
		os.Exit(2)
	}
	o := options{*binary, *out, *chain, *fleet, *keep}
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// demo is a running demonstration.
type demo struct {
	*lab.Lab
	binary, runDir string
	output         lab.Output // of the collectors; nil: files
	result         result
	slots          string                // as last shown
	before         map[netip.Addr]int    // slots of the routers before a change; nil: the table does not show them
	takeover       bool                  // key of the policy
	name           func(slot int) string // of a collector
	perRouter      int                   // exporters
}

// result is the content of demo.json.
type result struct {
	Routers []router `json:"routers"`
	Share   share    `json:"correlated_share"`
}

type router struct {
	Address netip.Addr `json:"address"`
	TCPSlot int        `json:"tcp_slot"`
	UDPSlot int        `json:"udp_slot"`
}

type share struct {
	Sockeye    float64 `json:"sockeye"`
	KernelHash float64 `json:"kernel_hash"`
}

func run(ctx context.Context, o options) (err error) {
	if doctor.InOwnPIDs() {
		return errors.New("the demo needs the host's PID namespace: the agent would not find new members (KNOWN-ISSUES.md)")
	}
	if err := lab.CheckPrograms(); err != nil {
		return err
	}
	if o.out != "" { // before the minutes of the demo
		if err := os.MkdirAll(o.out, 0o755); err != nil {
			return fmt.Errorf("make the directory of the results: %w", err)
		}
	}
	most := limit
	var jars []string
	count := routers
	switch {
	case o.fleet:
		most, count = fleetLimit, fleetRouters
	case o.chain:
		most = chainLimit
		if jars, err = fetchKafka(ctx); err != nil {
			return err
		}
	}
	bounded, cancel := context.WithTimeoutCause(ctx, most, fmt.Errorf("the demo took more than %v", most))
	defer cancel()
	l, err := lab.New(bounded, lab.Options{Routers: count})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	d := &demo{Lab: l, binary: o.binary, runDir: filepath.Join(l.Dir(), "run"), name: nfacctd, perRouter: lineCards}
	if o.fleet {
		f, err := d.newFleet(bounded)
		if err == nil {
			err = f.run(bounded, o.out)
		}
		if err != nil || !o.keep {
			return err
		}
		return f.wait(ctx)
	}
	d.unmountAtClose(filepath.Join(l.Dir(), "bpf"))
	if o.chain {
		err = d.chain(bounded, jars, o.out)
	} else {
		err = d.steer(bounded, o.out)
	}
	if err != nil || !o.keep {
		return err
	}
	return d.wait(ctx)
}

// nfacctd is the name of the collector in a slot.
func nfacctd(slot int) string { return fmt.Sprintf("nfacctd-%d", slot) }

// unmountAtClose unmounts a bpffs, which an agent mounts in the mount namespace that "make demo" created.
func (d *demo) unmountAtClose(bpffs string) {
	d.AtClose(func() error {
		if err := unix.Unmount(bpffs, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", bpffs, err)
		}
		return nil
	})
}

// steer is the demonstration of make demo. It writes its results into the directory
// out, unless out is empty.
func (d *demo) steer(ctx context.Context, out string) error {
	say("Six routers (FRR: BGP, BMP over TCP; pmacctd: IPFIX over UDP, four line cards each)")
	say("and four unmodified nfacctd that all listen on tcp [::]:%d and udp [::]:%d.", bmpPort, ipfixPort)
	say("\n== 1. Without Sockeye: the kernel's hash of addresses and ports decides")
	if err := d.startAll(ctx); err != nil {
		return err
	}
	// The kernel's hash selects a collector again for each new socket of a line card.
	before, err := d.outcome(ctx, 3)
	if err != nil {
		return err
	}
	d.result.Share.KernelHash = before.CorrelatedShare

	say("\n== 2. With Sockeye: the router decides")
	if err := d.startSockeye(ctx); err != nil {
		return err
	}
	after, err := d.outcome(ctx, 1)
	if err != nil {
		return err
	}
	d.result.Share.Sockeye = after.CorrelatedShare
	for _, r := range after.Routers {
		d.result.Routers = append(d.result.Routers, router{r.Address, r.TCPSlot, r.UDPSlot})
	}
	for _, command := range [][]string{{"slots"}, {"devices"}} {
		if err := d.show(ctx, command...); err != nil {
			return err
		}
	}

	say("\n== 3. kill -9 of one nfacctd: its routers wait for it, the others are not affected")
	back, err := d.crash(ctx, after)
	if err != nil {
		return err
	}

	say("\n== 4. A slot is added and one is drained: BMP and IPFIX of a router move together")
	added, err := d.addSlot(ctx, back)
	if err != nil {
		return err
	}
	moved, err := d.drain(ctx, added)
	if err != nil {
		return err
	}

	say("\n== 5. An nfacctd is replaced by another one under traffic: no flow record is lost")
	if _, err := d.upgrade(ctx, moved); err != nil {
		return err
	}
	say("\nFlow records that carry BGP communities: %s without Sockeye, %s with it.",
		percent(before.CorrelatedShare), percent(after.CorrelatedShare))
	if out == "" {
		return nil
	}
	return d.write(out)
}

func say(format string, args ...any) { fmt.Printf(format+"\n", args...) }

func percent(share float64) string { return fmt.Sprintf("%.0f %%", 100*share) }

// startAll starts all programs except Sockeye.
func (d *demo) startAll(ctx context.Context) error {
	for slot := range collectors {
		if _, err := d.startCollector(slot, ""); err != nil {
			return err
		}
	}
	if err := d.WaitListeners(ctx); err != nil {
		return err
	}
	for i := range routers {
		// Two of the six routers use IPv6.
		collector := lab.CollectorIPv4
		if i%3 == 2 {
			collector = lab.CollectorIPv6
		}
		if _, err := d.StartRouter(lab.RouterConfig{Router: i, Collector: netip.AddrPortFrom(collector, bmpPort)}); err != nil {
			return err
		}
	}
	if _, err := d.StartTraffic(lab.TrafficConfig{}); err != nil {
		return err
	}
	if err := d.WaitCollectors(ctx); err != nil {
		return err
	}
	if err := d.WaitSessions(ctx); err != nil {
		return err
	}
	return d.startExporters()
}

// startCollector starts the nfacctd of a slot. records is the name of its flow records
// (empty: the same for each nfacctd of the slot).
func (d *demo) startCollector(slot int, records string) (*lab.Collector, error) {
	return d.StartCollector(lab.CollectorConfig{Slot: slot, Records: records, Output: d.output})
}

// startSockeye stops the collectors, starts the agent, and starts the collectors
// again.
func (d *demo) startSockeye(ctx context.Context) error {
	var stops []func() error
	for _, c := range d.Collectors() {
		stops = append(stops, func() error { return c.Stop(time.Second) })
	}
	if err := together(stops); err != nil {
		return err
	}
	text, err := d.writePolicy(collectors)
	if err != nil {
		return err
	}
	say("\n%s", text)
	n, err := d.Namespace("collector")
	if err != nil {
		return err
	}
	p := n.Command(context.WithoutCancel(ctx), d.binary, "agent", "--policy", d.policyPath(), "--run-dir", d.runDir,
		"--state-dir", filepath.Join(d.Dir(), "state"), "--pins", filepath.Join(d.Dir(), "bpf", "sockeye"))
	p.Name = "agent"
	if err := p.Start(); err != nil {
		return err
	}
	var status api.Status
	err = d.WaitFor(ctx, "the agent", func() (bool, error) {
		err := api.NewClient(api.SocketPath(d.runDir)).Get(ctx, "/v1/status", nil, &status)
		if errors.Is(err, api.ErrNoAgent) {
			return false, p.Err()
		}
		return err == nil, err
	})
	if err != nil {
		return err
	}
	for slot := range collectors {
		if _, err := d.startCollector(slot, ""); err != nil {
			return err
		}
	}
	return d.waitReady(ctx, collectors)
}

func (d *demo) policyPath() string { return filepath.Join(d.Dir(), "policy.yaml") }

// writePolicy writes the policy file with a number of slots, and returns its text.
func (d *demo) writePolicy(slots int) (string, error) {
	text := fmt.Sprintf(policy, slots, "/"+d.CgroupPath())
	if d.takeover {
		text += "    takeover: true\n"
	}
	return text, os.WriteFile(d.policyPath(), []byte(text), 0o600)
}

// crash kills the collector with the most routers and starts it again. It returns the
// outcome afterwards.
func (d *demo) crash(ctx context.Context, o lab.Outcome) (back lab.Outcome, err error) {
	victim, load := busiest(o)
	before, err := d.connections(ctx, victim)
	if err != nil {
		return back, err
	}
	if err := d.Collectors()[victim].Kill(); err != nil {
		return back, err
	}
	say("nfacctd-%d killed, with %d routers", victim, load)
	if err := d.waitReady(ctx, collectors-1); err != nil {
		return back, err
	}
	if _, err := d.startCollector(victim, ""); err != nil {
		return back, err
	}
	if err := d.waitReady(ctx, collectors); err != nil {
		return back, err
	}
	if err := d.WaitSessions(ctx); err != nil {
		return back, err
	}
	back, err = d.outcome(ctx, 1)
	if err != nil {
		return back, err
	}
	for i, r := range back.Routers {
		if r.TCPSlot != o.Routers[i].TCPSlot || !r.Together() {
			return back, fmt.Errorf("router %s moved from nfacctd-%d to nfacctd-%d", r.Address, o.Routers[i].TCPSlot, r.TCPSlot)
		}
	}
	after, err := d.connections(ctx, victim)
	if err != nil {
		return back, err
	}
	if !maps.Equal(before, after) {
		return back, fmt.Errorf("routers of the other collectors connected again: %v, before %v", after, before)
	}
	say("its %d routers came back to it; the %d others kept their connections", load, routers-load)
	return back, nil
}

// waitReady shows the slots until as many as wanted are ready.
func (d *demo) waitReady(ctx context.Context, want int) error {
	return d.WaitFor(ctx, "ready slots", func() (bool, error) {
		var slots []api.SlotStatus
		if err := api.NewClient(api.SocketPath(d.runDir)).Get(ctx, "/v1/slots", nil, &slots); err != nil {
			return false, err
		}
		ready := 0
		line := "slots:"
		for _, s := range slots {
			if s.Ready {
				ready++
				line += fmt.Sprintf("  %d pid %d", s.Slot, s.PID)
			} else {
				line += fmt.Sprintf("  %d -", s.Slot)
			}
		}
		if line != d.slots {
			say("%s", line)
			d.slots = line
		}
		return ready == want, nil
	})
}

// outcome waits until all sessions are established, then measures and shows a live
// table. It restarts the line cards before each further round.
func (d *demo) outcome(ctx context.Context, rounds int) (lab.Outcome, error) {
	for _, wait := range []func(context.Context) error{d.WaitSessions, d.WaitBGP, d.WaitRecords, d.settle} {
		if err := wait(ctx); err != nil {
			return lab.Outcome{}, err
		}
	}
	m, err := d.NewMeter()
	if err != nil {
		return lab.Outcome{}, err
	}
	table := newLive()
	for round := 1; ; round++ {
		o, err := d.watch(ctx, m, table, round == rounds)
		for _, c := range d.Collectors() {
			err = errors.Join(err, c.Err())
		}
		if err != nil || round == rounds {
			return o, err
		}
		if err := d.restartExporters(); err != nil {
			return o, err
		}
		if err := d.WaitRecords(ctx); err != nil {
			return o, err
		}
	}
}

func (d *demo) restartExporters() error {
	var stops []func() error
	for _, r := range d.Routers() {
		for _, exporter := range r.Exporters {
			stops = append(stops, func() error { return exporter.Stop(time.Second) })
		}
		r.Exporters = nil
	}
	if err := together(stops); err != nil {
		return err
	}
	return d.startExporters()
}

func (d *demo) startExporters() error {
	for i := range d.Routers() {
		for card := range d.perRouter {
			if _, err := d.StartExporter(lab.ExporterConfig{Router: i, Instance: card}); err != nil {
				return err
			}
		}
	}
	return nil
}

// together calls all functions at once.
func together(calls []func() error) error {
	results := make(chan error)
	for _, call := range calls {
		go func() { results <- call() }()
	}
	var errs []error
	for range calls {
		errs = append(errs, <-results)
	}
	return errors.Join(errs...)
}

// live redraws a table in place on a terminal. Without a terminal, it prints only the
// last state.
type live struct {
	terminal bool
	lines    int
}

// watch shows the counts of the meter for a limited time.
func (d *demo) watch(ctx context.Context, m *lab.Meter, table *live, last bool) (lab.Outcome, error) {
	end := time.Now().Add(measure)
	for {
		o, err := m.Read()
		if err != nil {
			return o, err
		}
		done := !time.Now().Before(end)
		if err := table.draw(last && done, func(w io.Writer) { d.outcomeTable(w, o) }); err != nil || done {
			return o, err
		}
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
			return o, context.Cause(ctx)
		}
	}
}

// settle waits until exactly the records that reach the BMP session of their router
// are correlated. The first records of a collector can be older than the routes.
func (d *demo) settle(ctx context.Context) error {
	return d.WaitFor(ctx, "routes in all collectors", func() (bool, error) {
		o, err := d.Measure(ctx, time.Second)
		return err == nil && !slices.ContainsFunc(o.Routers, func(r lab.RouterOutcome) bool {
			return r.Records == 0 || r.Correlated != r.WithBMP
		}), err
	})
}

// outcomeTable writes the collectors of each router, and the collectors before a
// change of the slots.
func (d *demo) outcomeTable(w io.Writer, o lab.Outcome) {
	before := func(r *lab.RouterOutcome) string { return d.name(d.before[r.Address]) + "\t" }
	heading, blank := "BEFORE\t", "\t"
	if d.before == nil {
		before, heading, blank = func(*lab.RouterOutcome) string { return "" }, "", ""
	}
	records := "FLOW RECORDS"
	if d.output != nil {
		records = "RECORDS IN KAFKA"
	}
	fmt.Fprintf(w, "ROUTER\t%sBMP (TCP) IN\tIPFIX (UDP) IN\t%s\tWITH COMMUNITIES\n", heading, records)
	for _, r := range o.Routers {
		share := "-"
		if r.Records > 0 {
			share = percent(float64(r.Correlated) / float64(r.Records))
		}
		fmt.Fprintf(w, "%s\t%s%s\t%s\t%d\t%s\n", r.Address, before(&r), d.name(r.TCPSlot), d.names(r.UDPSlots), r.Records, share)
	}
	fmt.Fprintf(w, "all\t%s\t\t\t%s\n", blank, percent(o.CorrelatedShare))
}

func (d *demo) names(slots []int) string {
	texts := make([]string, len(slots))
	for i, slot := range slots {
		texts[i] = d.name(slot)
	}
	return strings.Join(texts, ", ")
}

// busiest returns the slot with the most routers among the first four, and their
// number.
func busiest(o lab.Outcome) (slot, load int) {
	count := make([]int, collectors)
	for _, r := range o.Routers {
		if r.TCPSlot < collectors {
			count[r.TCPSlot]++
		}
	}
	slot = slices.Index(count, slices.Max(count))
	return slot, count[slot]
}

// connections returns the number of connections of each router, except the routers of
// one slot.
func (d *demo) connections(ctx context.Context, but int) (map[netip.Addr]uint64, error) {
	devices, err := d.devices(ctx)
	if err != nil {
		return nil, err
	}
	count := make(map[netip.Addr]uint64)
	for _, device := range devices {
		if device.Slot != but {
			count[device.Address] = device.Connections
		}
	}
	return count, nil
}

func (d *demo) devices(ctx context.Context) (list []api.DeviceStatus, err error) {
	return list, api.NewClient(api.SocketPath(d.runDir)).Get(ctx, "/v1/devices", nil, &list)
}

// show runs a command of Sockeye and prints its output.
func (d *demo) show(ctx context.Context, args ...string) error {
	say("\n$ sockeye %s", strings.Join(args, " "))
	cmd := exec.CommandContext(ctx, d.binary, append([]string{"--run-dir", d.runDir}, args...)...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return cmd.Run()
}

func (d *demo) write(dir string) error {
	if err := writeJSON(dir, "demo.json", d.result); err != nil {
		return err
	}
	drawing := chart.Chart{
		Title: "Flow records that carry BGP communities",
		Panels: []chart.Panel{{Title: "six routers, four nfacctd", Most: 1, Bars: []chart.Bar{
			{Label: "the kernel's hash", Note: percent(d.result.Share.KernelHash), Parts: []float64{d.result.Share.KernelHash}},
			{Label: "Sockeye", Note: percent(d.result.Share.Sockeye), Parts: []float64{d.result.Share.Sockeye}},
		}}},
	}
	return os.WriteFile(filepath.Join(dir, "demo.svg"), drawing.SVG(), 0o644)
}

// writeJSON writes a value into a file of a directory.
func writeJSON(dir, name string, value any) error {
	data, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, name), append(data, '\n'), 0o644)
}

// wait keeps the network and the programs running until Ctrl-C.
func (d *demo) wait(ctx context.Context) error {
	n, err := d.Namespace("collector")
	if err != nil {
		return err
	}
	say("\nAll is up until Ctrl-C. In another terminal, for example:")
	say("  %s --run-dir %s slots", d.binary, d.runDir)
	say("  %s --run-dir %s devices", d.binary, d.runDir)
	say("  kill -9 %d        # nfacctd-1", d.Collectors()[1].Pid())
	say("  nsenter --net=%s ss -tunap", n.Path())
	say("Files and logs: %s", d.Dir())
	<-ctx.Done()
	return nil
}

func newLive() *live {
	_, err := unix.IoctlGetTermios(int(os.Stdout.Fd()), unix.TCGETS)
	return &live{terminal: err == nil}
}

func (l *live) draw(last bool, table func(io.Writer)) error {
	if !l.terminal && !last {
		return nil
	}
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	table(w)
	if err := w.Flush(); err != nil {
		return err
	}
	if l.lines > 0 {
		fmt.Printf("\x1b[%dA\x1b[J", l.lines)
	}
	fmt.Print(b.String())
	l.lines = strings.Count(b.String(), "\n")
	return nil
}
