// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/testenv"
	"sockeye/lab"
	labfleet "sockeye/lab/fleet"
	"sockeye/lab/swarm"
)

// fleetCompleteEnv is set by make test-fleet, for tests in more forms than make test has time for.
const fleetCompleteEnv = "SOCKEYE_FLEET_COMPLETE"

const fleetSlots = 2

// fleet is a fleet of hosts in the lab, and a swarm of devices behind its front router.
type fleet struct {
	*testing.T
	*labfleet.Fleet
	host     *host // the lab, and the namespace of the devices
	swarm    *swarm.Swarm
	analysis swarm.Analysis
	waits    []*waits         // of etcd and the agents
	away     []swarm.Interval // times in which a host that lives was dead for the others
	pids     map[string]*waits
	members  map[string][]int // IDs, by host
}

// newFleet makes a fleet without hosts.
func newFleet(t *testing.T, o labfleet.Options) *fleet {
	t.Helper()
	h := newHost(t, config.Reuseport)
	f := &fleet{T: t, host: h, pids: map[string]*waits{}, members: map[string][]int{}}
	pins := testenv.BPFFS(t)
	o.Binary, o.Examples, o.Slots = os.Getenv(binaryEnv), examples, fleetSlots
	o.Pins = func(name string) string { return filepath.Join(pins, "sockeye-"+name) }
	o.Fleet = append(o.Fleet, "min_hosts: 2")
	var err error
	f.Fleet, err = labfleet.New(t.Context(), h.lab, o)
	f.must(err)
	for _, s := range f.Etcd {
		f.watch("etcd at "+s.Address.String(), s.Process)
	}
	f.must(f.Reach(h.devices, netip.Addr{}, netip.Addr{}))
	f.must(swarm.Reach(f.Front))
	f.swarm, err = swarm.New(f.Lab, h.devices)
	f.must(err)
	return f
}

func (f *fleet) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

// watch samples the waits of a process for a CPU until the test ends. name is that of the process in all of its runs.
func (f *fleet) watch(name string, p *lab.Process) {
	w := f.pids[name]
	if w == nil {
		w = new(waits)
		f.pids[name] = w
		stop := make(chan struct{})
		var sampling sync.WaitGroup
		sampling.Go(func() { w.sample(stop) })
		f.Cleanup(sampling.Wait)
		f.Cleanup(func() { close(stop) })
		f.waits = append(f.waits, w)
	}
	w.pid.Store(int64(p.Pid()))
}

// addHost starts the agent and the members of a further host.
func (f *fleet) addHost() *labfleet.Host {
	f.Helper()
	h, err := f.NewHost()
	f.must(err)
	f.startHost(h)
	return h
}

// startHost starts the agent and the members of a host.
func (f *fleet) startHost(h *labfleet.Host) {
	f.Helper()
	f.must(h.Start(f.Context()))
	f.Cleanup(func() {
		if f.Failed() {
			f.Logf("end of the log of host %s:\n%s", h.Name, h.Agent.LogTail(300))
		}
	})
	f.watch(h.Name, h.Agent)
	for slot := range fleetSlots {
		p, err := f.swarm.StartMemberIn(h.Namespace, swarm.Member{Slot: h.Collector(slot), TCP: bmpPort, UDP: ipfixPort, Resets: true}, fmt.Sprintf("%s/receiver-%d", h.Name, slot), "root")
		f.must(err)
		f.members[h.Name] = append(f.members[h.Name], p.ID)
	}
}

// restartAgent kills the agent of a host and starts it again.
func (f *fleet) restartAgent(h *labfleet.Host) {
	f.Helper()
	f.must(h.Agent.Kill())
	f.must(h.StartAgent(f.Context()))
	f.watch(h.Name, h.Agent)
}

// registered waits until a host is registered again whose agent was killed at a time.
func (f *fleet) registered(h *labfleet.Host, killed time.Duration) {
	f.Helper()
	f.host.eventually("host "+h.Name+" to register", func() error {
		s, err := h.Status(f.Context())
		if err == nil && !s.Connected {
			err = errors.New("not yet")
		}
		return err
	})
	// On a busy machine, the start takes longer than the lease: the others take the host for dead, and serve its devices.
	if now := swarm.Now(); now-killed > labfleet.Lease {
		f.Logf("the agent of host %s was away for %v", h.Name, (now - killed).Round(time.Millisecond))
		f.away = append(f.away, swarm.Interval{From: killed + labfleet.Lease, To: now + labfleet.Lease})
	}
}

// startEtcd starts a server again.
func (f *fleet) startEtcd(s *labfleet.Server) {
	f.Helper()
	f.must(s.Start())
	f.watch("etcd at "+s.Address.String(), s.Process)
}

// killEtcd kills a server.
func (f *fleet) killEtcd(s *labfleet.Server) {
	f.Helper()
	f.must(s.Kill())
}

// route makes the router choose among hosts.
func (f *fleet) route(hosts ...*labfleet.Host) {
	f.Helper()
	f.must(f.Route(hosts...))
}

// await waits until hosts agree, no bucket moves, and the condition holds.
func (f *fleet) await(what string, hosts []*labfleet.Host, condition func(s *api.FleetStatus) error) {
	f.Helper()
	f.host.eventually(what, func() error { return labfleet.Agree(f.Context(), hosts, condition) })
}

// pause is a time in which datagrams arrive.
func (f *fleet) pause() { time.Sleep(500 * time.Millisecond) }

// set changes the state of a host by a command on another one.
func (f *fleet) set(on, h *labfleet.Host, state string) {
	f.Helper()
	f.must(on.Set(f.Context(), h.Name, state))
}

// fleetForms returns the forms of a test: all of them in make test-fleet, and otherwise the first one.
func fleetForms(all ...labfleet.Options) []labfleet.Options {
	if os.Getenv(fleetCompleteEnv) == "" {
		return all[:1]
	}
	return all
}

// TestFleet is that each device has one member of one host while hosts join, drain and return, and the router changes its mind,
// also during the initial dumps: no device is split, and nothing is lost.
func TestFleet(t *testing.T) {
	for _, o := range fleetForms(labfleet.Options{}, labfleet.Options{Routed: true}) {
		t.Run(formName(o), func(t *testing.T) { fleetChanges(t, o) })
	}
}

// formName names a form of a test.
func formName(o labfleet.Options) string {
	name := "link"
	if o.Routed {
		name = "tunnel"
	}
	if o.Daemon != "" {
		name += "-" + string(o.Daemon)
	}
	return name
}

func fleetChanges(t *testing.T, o labfleet.Options) {
	f := newFleet(t, o)
	a, b := f.addHost(), f.addHost()
	f.await("the first table", f.Hosts, labfleet.Shared("a", "b"))
	f.route(a, b)
	const devices = 24
	begun := f.load(devices, 500)
	closedBefore := f.closed()

	// The router changes its mind, while the devices send their dumps: connections survive.
	f.route(b)
	f.pause()
	f.route(a)
	f.pause()
	f.must(f.Hash(labfleet.BySource))
	f.route(a, b)
	f.pause()
	f.must(f.Hash(labfleet.ByPorts))
	f.pause()
	for _, hosts := range [][]*labfleet.Host{{a, b}, {b}, {a, b}} {
		f.must(f.RouteResilient(t.Context(), hosts...))
		f.pause()
	}
	if closed := f.closed(); closed != closedBefore {
		t.Errorf("%d connections were closed by changes of the router", closed-closedBefore)
	}
	if f.analysis.Dumped() == devices {
		t.Logf("the dumps ended %v after the beginning", f.analysis.LastDump()-begun)
	}

	c := f.addHost()
	f.await("host c to share", f.Hosts, labfleet.Shared("a", "b", "c"))
	f.route(a, b, c)
	f.pause()
	out, errs, err := c.Command(t.Context(), "host", "set", "b", "drain", "--dry-run")
	if err != nil || !regexp.MustCompile(`ready -> drain +(2[6-9]|3[0-9]|40)\.\d % of the devices would move\n`).MatchString(out) {
		t.Errorf("dry run: %v: %s%s", err, out, errs)
	}
	heavier := filepath.Join(c.Dir, "heavier.yaml") // host c with a share of 1/2 instead of 1/3
	text, err := os.ReadFile(c.PolicyPath())
	f.must(err)
	f.must(os.WriteFile(heavier, []byte(strings.Replace(string(text), "fleet:\n", "fleet:\n  weight: 200\n", 1)), 0o600))
	out, errs, err = c.Command(t.Context(), "plan", heavier)
	if err != nil || !regexp.MustCompile(`fleet main: weight 100 -> 200 +1[4-9]\.\d % of the devices move\n`).MatchString(out) {
		t.Errorf("plan of another weight: %v: %s%s", err, out, errs)
	}
	f.sameSlots()
	f.set(a, b, "drain")
	f.await("host b to drain", f.Hosts, labfleet.Shared("a", "c"))
	if out, _, err := b.Command(t.Context(), "health"); err == nil {
		t.Errorf("health of a drained host: %s", out)
	}
	f.route(a, c)
	f.pause()
	f.set(c, b, "ready")
	f.await("host b to return", f.Hosts, labfleet.Shared("a", "b", "c"))
	f.route(a, b, c)
	f.pause()
	planned := swarm.Now()

	f.finish(planned)
	if len(f.analysis.Splits) > 0 {
		t.Errorf("planned changes split devices: %v", f.analysis.Splits)
	}
	if n := f.analysis.Needless; len(n) > 0 {
		t.Errorf("%d connections were closed, although their devices did not move: %v", len(n), n)
	}
	missing := f.analysis.Missing()
	if len(missing) > 0 {
		t.Errorf("%d datagrams lost by planned changes, the first one %v after the beginning", len(missing), missing[0]-begun)
		f.logDrops("the router in front", f.Front)
		for _, h := range f.Hosts {
			f.logDrops("host "+h.Name, h.Namespace)
		}
	}
	if n := f.analysis.Undecodable; n > 0 {
		t.Errorf("%d datagrams reached members without their templates", n)
	}
	path := "link"
	if o.Routed {
		path = "tunnel"
	}
	for _, h := range f.Hosts {
		s, err := h.Status(t.Context())
		f.must(err)
		t.Logf("host %s: %v %v", h.Name, s.Packets, s.Problems)
		if s.Packets["forwarded"] == 0 || s.Packets["disagreed"] > 0 || len(s.Problems) > 0 {
			t.Errorf("host %s: %v %v", h.Name, s.Packets, s.Problems)
		}
		for _, other := range s.Hosts {
			if other.Name != h.Name && other.Path != path {
				t.Errorf("host %s reaches host %s by %q, want %q", h.Name, other.Name, other.Path, path)
			}
		}
	}
}

// logDrops logs what the kernel has counted in a namespace, to tell where a datagram was lost.
func (f *fleet) logDrops(name string, n *lab.Namespace) {
	f.Helper()
	f.must(n.Do(func() error {
		for _, file := range []string{"snmp", "snmp6", "dev", "stat/arp_cache", "stat/ndisc_cache"} {
			text, err := os.ReadFile("/proc/thread-self/net/" + file)
			f.Logf("%s: /proc/net/%s: %v\n%s", name, file, err, text)
		}
		return nil
	}))
}

// sameSlots checks that where on each host tells the same host and slot for a device.
func (f *fleet) sameSlots() {
	f.Helper()
	args := []string{"where", "-o", "json"}
	for i := range 30 {
		args = append(args, fmt.Sprintf("10.9.8.%d", i), fmt.Sprintf("fd00::%x", i))
	}
	var first []api.WhereStatus
	hosts := make(map[string]bool)
	for _, h := range f.Hosts {
		var list []api.WhereStatus
		f.host.eventually("the slots, on host "+h.Name, func() error { // a busy host may not answer in time
			out, errs, err := h.Command(f.Context(), args...)
			if err != nil {
				return fmt.Errorf("%w: %s", err, errs)
			}
			list = nil
			if err := json.Unmarshal([]byte(out), &list); err != nil {
				return err
			}
			if i := slices.IndexFunc(list, func(w api.WhereStatus) bool { return w.Ready == nil }); i >= 0 {
				return fmt.Errorf("%+v", list[i])
			}
			return nil
		})
		if first == nil {
			first = list
		}
		if len(list) != len(first) || len(list) == 0 {
			f.Fatalf("where on host %s has %d lines, and %d on the first host", h.Name, len(list), len(first))
		}
		for i, w := range list {
			hosts[w.Host] = true
			if !*w.Ready || w.Host != first[i].Host || w.Slot != first[i].Slot || w.Bucket != first[i].Bucket {
				f.Errorf("where on host %s: %+v; on the first host: %+v", h.Name, w, first[i])
			}
		}
	}
	if len(hosts) != len(f.Hosts) {
		f.Errorf("the devices are on hosts %v", hosts)
	}
}

// closed returns the number of connections that the agents have closed or that the devices have lost.
func (f *fleet) closed() int {
	f.Helper()
	state, err := f.swarm.State()
	f.must(err)
	if state.Open == 0 {
		f.must(errors.New("no device is connected"))
	}
	f.must(f.swarm.Read(&f.analysis))
	return f.analysis.Closed + len(f.analysis.Gaps)
}

// undecodable returns the number of datagrams that members could not decode until now.
func (f *fleet) undecodable() uint64 {
	f.Helper()
	f.must(f.swarm.Read(&f.analysis))
	f.analysis.Judge(swarm.Now() - judgeDelay)
	return f.analysis.Undecodable
}

// load starts the devices and their datagrams. The dump of a device takes two seconds.
func (f *fleet) load(devices, routes int) (begun time.Duration) {
	f.Helper()
	f.must(f.swarm.StartDevices(f.Context(), swarm.Load{Devices: devices, TCP: bmpPort, UDP: ipfixPort, Rate: togetherRate, Exporters: 2,
		Routes: routes, DumpRate: float64(routes) / 2, Service4: labfleet.Service4, Service6: labfleet.Service6, Noted: true}))
	state, err := f.swarm.Send()
	f.must(err)
	f.analysis.Begin, f.analysis.Silence, f.analysis.Period = state.At, silence, time.Second/togetherRate
	return state.At
}

// stop stops the devices, and reads all records, for what has happened until a time.
func (f *fleet) stop(until time.Duration) {
	f.Helper()
	_, err := f.swarm.Stop()
	f.must(err)
	time.Sleep(judgeDelay)
	f.analysis.End = until
	f.must(f.swarm.Read(&f.analysis))
	f.analysis.Finish()
}

// finish stops the devices and judges what has happened until a time: no device was split.
func (f *fleet) finish(until time.Duration) {
	f.Helper()
	f.stop(until)
	for _, s := range f.analysis.Splits {
		if slices.ContainsFunc(f.away, func(a swarm.Interval) bool { return s.From < a.To && s.To > a.From }) {
			continue
		}
		length, waited := s.Length(f.analysis.Stalls...), f.waited(s.Interval)
		if length-waited > splitLimit {
			f.Errorf("split for %v, %v of them without the waits for a CPU: %v", length, length-waited, s)
		}
	}
	f.Logf("%d datagrams received, %d connections closed, %d splits, %d without routes, %d undecodable", f.analysis.Received, f.analysis.Closed, len(f.analysis.Splits), f.analysis.WithoutRoutes, f.analysis.Undecodable)
}

// waited returns how long the agents and etcd have waited for a CPU in an interval: a busy host lets them wait one after the other.
func (f *fleet) waited(i swarm.Interval) (sum time.Duration) {
	for _, w := range f.waits {
		sum += w.between(i)
	}
	return sum
}

// connected returns an error unless all devices have a connection with a host that is not dead. A device does not know at once
// that its connection has no other end.
func (f *fleet) connected(devices int, dead ...*labfleet.Host) error {
	if err := f.swarm.Read(&f.analysis); err != nil {
		return err
	}
	n := f.analysis.Connected(func(member int) bool {
		return !slices.ContainsFunc(dead, func(h *labfleet.Host) bool { return slices.Contains(f.members[h.Name], member) })
	})
	if n < devices {
		return fmt.Errorf("%d of %d devices have a connection with a living host", n, devices)
	}
	return nil
}

// TestFleetBegins is that hosts that serve alone become a fleet, while the devices of one of them send: nothing is lost, and the
// devices of this host keep their connections.
func TestFleetBegins(t *testing.T) {
	f := newFleet(t, labfleet.Options{})
	for range 2 {
		h, err := f.NewHost()
		f.must(err)
		f.must(h.WriteServicePolicy())
		f.startHost(h)
	}
	a, b := f.Hosts[0], f.Hosts[1]
	f.route(a)
	const devices = 24
	begun := f.load(devices, 10)
	join := func(h *labfleet.Host) {
		t.Helper()
		f.must(h.WritePolicy())
		if out, errs, err := h.Command(t.Context(), "apply"); err != nil || !strings.Contains(out, "this host serves what reaches it until it has the table") {
			t.Fatalf("%v: %s%s", err, out, errs)
		}
	}
	join(a)
	f.host.eventually("host a to wait for another one", func() error {
		s, err := a.Status(t.Context())
		if err == nil && (!s.Connected || s.Epoch > 0 || s.Healthy) {
			err = fmt.Errorf("%+v", s)
		}
		return err
	})
	f.pause()
	f.pause() // longer than settle
	if closed := f.closed(); closed > 0 {
		t.Errorf("%d connections were closed before the first table", closed)
	}
	join(b)
	f.await("the first table", f.Hosts, labfleet.Shared("a", "b"))
	f.host.eventually("all devices to connect", func() error { return f.connected(devices) })
	f.route(a, b)
	moved := time.Now()
	f.host.eventually("host b to have the templates of its devices", func() error {
		if time.Since(moved) < judgeDelay {
			return errors.New("not judged yet")
		}
		before := f.undecodable()
		f.pause()
		if n := f.undecodable() - before; n > 0 {
			return fmt.Errorf("%d datagrams were not decodable", n)
		}
		return nil
	})
	planned := swarm.Now()
	f.finish(planned)
	if missing := f.analysis.Missing(); len(missing) > 0 {
		t.Errorf("%d datagrams were lost, the first one %v after the beginning", len(missing), missing[0]-begun)
	}
	if n := f.analysis.Closed; n == 0 || n >= devices {
		t.Errorf("%d of %d connections were closed, want those of the devices of host b", n, devices)
	}
}

// TestFleetLoses is that the other hosts take over the devices of a host that dies, that a host that returns gets them back, that
// changes work without a minority of the etcd servers, and that without a majority, and while agents restart, nothing moves.
func TestFleetLoses(t *testing.T) {
	f := newFleet(t, labfleet.Options{Servers: 3})
	a, b, c := f.addHost(), f.addHost(), f.addHost()
	f.await("the first table", f.Hosts, labfleet.Shared("a", "b", "c"))
	f.route(a, b, c)
	const devices = 24
	begun := f.load(devices, 10)
	epoch := func() uint64 {
		s, err := a.Status(t.Context())
		f.must(err)
		return s.Epoch
	}

	f.host.eventually("copies of all templates", func() error {
		copies := 0
		for _, h := range f.Hosts {
			s, err := h.Status(t.Context())
			if err != nil {
				return err
			}
			copies += s.Copies
		}
		if copies < devices {
			return fmt.Errorf("%d of %d", copies, devices)
		}
		return nil
	})

	// An agent that is killed and starts again continues.
	before, closed, killed := epoch(), f.closed(), swarm.Now()
	f.restartAgent(b)
	f.await("host b to be alive", f.Hosts, labfleet.Alive("a", "b", "c"))
	// The agent renews its lease each second, but later if it waits for a CPU, or etcd does.
	alive := swarm.Now()
	waited := f.waited(swarm.Interval{From: killed - labfleet.Lease, To: alive})
	switch took := alive - killed; {
	case took > labfleet.Lease-time.Second-waited: // a busy host: its devices may have moved
		t.Logf("the agent was alive again after %v, with waits for a CPU of %v", took, waited)
		f.await("host b to share again", f.Hosts, labfleet.Shared("a", "b", "c"))
		f.host.eventually("all devices to connect", func() error { return f.connected(devices) })
		closed, f.analysis.Begin = f.closed(), swarm.Now()
	case epoch() != before:
		t.Errorf("epoch %d, before the restart of an agent, %v ago with waits for a CPU of %v, %d", epoch(), took, waited, before)
	}

	// Without one of three servers, everything works.
	f.killEtcd(f.Etcd[0])
	if now := f.closed(); now != closed {
		t.Errorf("%d connections were closed while nothing should move", now-closed)
	}
	f.host.eventually("a drain without a server", func() error { return a.Set(t.Context(), "c", "drain") })
	f.await("host c to drain", f.Hosts, labfleet.Shared("a", "b"))
	f.set(b, c, "ready")
	f.await("host c to return", f.Hosts, labfleet.Shared("a", "b", "c"))

	// Without two of them for longer than a lease, nothing moves, also while all agents restart.
	before, closed = epoch(), f.closed()
	f.killEtcd(f.Etcd[1])
	outage := time.Now()
	f.pause()
	f.route(b)
	for _, h := range f.Hosts {
		f.restartAgent(h)
	}
	f.pause()
	f.route(a, b, c)
	for _, h := range f.Hosts {
		f.host.eventually("the problem", func() error {
			s, err := h.Status(t.Context())
			if err == nil && (s.Connected || s.Epoch != before || len(s.Problems) == 0) {
				err = fmt.Errorf("without etcd: %+v", s)
			}
			return err
		})
	}
	if _, errs, err := a.Command(t.Context(), "host", "set", "b", "drain"); err == nil || !strings.Contains(errs, "does not answer") {
		t.Errorf("drain without etcd: %v: %s", err, errs)
	}
	time.Sleep(labfleet.Lease + time.Second - time.Since(outage)) // the test is about this time
	f.startEtcd(f.Etcd[0])
	f.startEtcd(f.Etcd[1])
	f.await("etcd", f.Hosts, labfleet.Alive("a", "b", "c"))
	f.pause()
	if now := f.closed(); now != closed {
		t.Errorf("%d connections were closed while nothing should move", now-closed)
	}
	if now := epoch(); now != before {
		t.Errorf("epoch %d, before etcd was lost %d", now, before)
	}
	quiet := swarm.Now()
	f.pause() // what was sent until now has arrived

	// A host dies with its links; the routers notice it by the protocol that they speak with it.
	died := swarm.Now()
	f.must(b.Cut())
	f.route(a, c)
	f.await("the death of b", []*labfleet.Host{a, c}, labfleet.Shared("a", "c"))
	took := swarm.Now() - died
	f.host.eventually("all devices to connect", func() error { return f.connected(devices, b) })
	f.away = append(f.away, swarm.Interval{From: died, To: swarm.Now()}) // a device does not know that its connection has no other end
	// A device connects again after a retransmission, the second one at the latest: the first one may come before the table.
	const retransmissions = 7 * time.Second
	gap := f.analysis.LongestWithout(died, func(member int) bool { return slices.Contains(f.members[b.Name], member) })
	if waited := f.waited(swarm.Interval{From: died, To: died + gap}); gap-waited > labfleet.Lease+retransmissions {
		t.Errorf("a device was without a connection for %v, %v of them without the waits for a CPU", gap, gap-waited)
	}
	t.Logf("after the death of a host, its devices had another one in %v, and all were connected after %v", took.Round(time.Millisecond), (swarm.Now() - died).Round(time.Millisecond))
	// The exporters have sent their templates once, at the beginning.
	f.host.eventually("records to be decoded", func() error {
		n, received := f.undecodable(), f.analysis.Received
		f.pause()
		if again := f.undecodable(); again != n || f.analysis.Received == received {
			return fmt.Errorf("%d of %d datagrams cannot be decoded", again-n, f.analysis.Received-received)
		}
		return nil
	})
	f.host.eventually("the host that was cut off", func() error {
		s, err := b.Status(t.Context())
		if err == nil && (s.Connected || s.Epoch != before) {
			err = fmt.Errorf("connected %v, epoch %d, before %d", s.Connected, s.Epoch, before)
		}
		return err
	})
	// A host that has died, and that no device has any more, can be removed: it has no devices at its return.
	f.set(a, b, "removed")
	f.must(b.Mend())
	f.host.eventually("the return of a removed host", func() error {
		s, err := a.Status(t.Context())
		if err != nil {
			return err
		}
		at := slices.IndexFunc(s.Hosts, func(h api.FleetHost) bool { return h.Name == "b" })
		if at < 0 || !s.Hosts[at].Alive || s.Hosts[at].State != "removed" || s.Hosts[at].Share != 0 {
			return fmt.Errorf("%+v", s.Hosts)
		}
		return nil
	})
	f.set(a, b, "ready")
	f.await("the return of b", f.Hosts, labfleet.Shared("a", "b", "c"))
	f.route(a, b, c)
	f.host.eventually("all devices to connect", func() error { return f.connected(devices) })
	if os.Getenv(fleetCompleteEnv) != "" {
		// A host that is cut off, from etcd or from all, serves the devices whose packets reach it, as the others do.
		from := swarm.Now()
		f.isolated(b)
		f.flapping(b)
		f.host.eventually("all devices to connect", func() error { return f.connected(devices) })
		f.away = append(f.away, swarm.Interval{From: from, To: swarm.Now()})
	}
	f.pause()
	f.finish(swarm.Now())
	var lost []time.Duration
	for _, at := range f.analysis.Missing() {
		if at < f.analysis.Begin {
			continue
		}
		if at < quiet {
			t.Fatalf("a datagram was lost %v after the beginning, although nothing should move until %v", at-begun, quiet-begun)
		}
		lost = append(lost, at)
	}
	if len(lost) > 0 {
		t.Logf("the death of a host has cost %d datagrams in %v", len(lost), (slices.Max(lost) - slices.Min(lost)).Round(time.Millisecond))
	}
}

// isolated cuts a host off from etcd, and from nothing else: it keeps its epoch, the others take over its devices with a newer one,
// and the newer one wins at its return.
func (f *fleet) isolated(h *labfleet.Host) {
	f.Helper()
	others := otherHosts(f.Hosts, h)
	before, err := h.Status(f.Context())
	f.must(err)
	f.must(h.Isolate(true))
	f.await("the others without the isolated host", others, labfleet.Shared(hostNames(others)...))
	// The client looks twice a second whether its lease has ended, and so notices it later than the servers.
	f.host.eventually("the host that is cut off to notice it", func() error {
		s, err := h.Status(f.Context())
		if err == nil && s.Connected {
			err = errors.New("connected")
		}
		return err
	})
	s, err := h.Status(f.Context())
	f.must(err)
	if s.Epoch != before.Epoch || !s.Healthy {
		f.Errorf("a host that is cut off from etcd has epoch %d, before %d; healthy %v", s.Epoch, before.Epoch, s.Healthy)
	}
	f.must(h.Isolate(false))
	f.await("the return of the isolated host", f.Hosts, labfleet.Shared(hostNames(f.Hosts)...))
}

// flapping cuts a host several times, for shorter and for longer than its lease. The fleet agrees after the last time.
func (f *fleet) flapping(h *labfleet.Host) {
	f.Helper()
	for _, down := range []time.Duration{labfleet.Lease / 3, labfleet.Lease * 4 / 3, labfleet.Lease / 2, labfleet.Lease} {
		f.must(h.Cut())
		time.Sleep(down)
		f.must(h.Mend())
		time.Sleep(down / 2)
	}
	f.await("the flapping host", f.Hosts, labfleet.Shared(hostNames(f.Hosts)...))
}

func otherHosts(all []*labfleet.Host, h *labfleet.Host) (others []*labfleet.Host) {
	for _, o := range all {
		if o != h {
			others = append(others, o)
		}
	}
	return others
}

func hostNames(hosts []*labfleet.Host) (names []string) {
	for _, h := range hosts {
		names = append(names, h.Name)
	}
	return names
}

// TestFleetContradicts is that two hosts whose files contradict each other forward no packet twice and lose none, report the
// contradiction, and agree after the files have been corrected.
func TestFleetContradicts(t *testing.T) {
	f := newFleet(t, labfleet.Options{})
	for range 2 {
		h, err := f.NewHost()
		f.must(err)
		f.must(h.WriteFilePolicy("hosts.yaml"))
	}
	a, b := f.Hosts[0], f.Hosts[1]
	f.writeHosts(a, 1, "drain", "ready") // all devices are on the other host
	f.writeHosts(b, 1, "ready", "drain")
	f.startHost(a)
	f.startHost(b)
	f.await("the contradicting tables", f.Hosts, func(*api.FleetStatus) error { return nil })
	for _, h := range f.Hosts {
		f.host.eventually("the members of host "+h.Name, func() error {
			var s api.Status
			err := api.NewClient(api.SocketPath(h.Dir)).Get(t.Context(), "/v1/status", nil, &s)
			if err == nil && (len(s.Services) == 0 || s.Services[0].Ready < fleetSlots) {
				err = fmt.Errorf("%+v", s.Services)
			}
			return err
		})
	}
	f.route(a, b)
	const devices = 12
	begun := f.load(devices, 10)
	f.pause()
	if os.Getenv(fleetCompleteEnv) != "" { // the agents allow for a minute in which hosts get another table
		for _, h := range f.Hosts {
			f.host.eventually("the problem on host "+h.Name, func() error {
				list, err := h.Events(t.Context(), "fleet_problem")
				if err == nil && !strings.Contains(fmt.Sprint(list), "(disagreed)") {
					err = fmt.Errorf("events %v", list)
				}
				return err
			})
		}
	}
	f.pause()
	contradicted := swarm.Now()
	f.pause()
	before := f.packets()
	for i, h := range f.Hosts {
		if own := before[i]; own["forwarded"] == 0 || own["disagreed"] == 0 || own["local"] > 0 || own["ttl"] > 0 {
			t.Errorf("host %s: %v", h.Name, own)
		}
	}

	f.writeHosts(a, 2, "ready", "ready")
	f.writeHosts(b, 2, "ready", "ready")
	f.await("the same table", f.Hosts, labfleet.Shared("a", "b"))
	f.host.eventually("all devices to connect", func() error { return f.connected(devices) })
	f.pause()
	agreed := f.packets()
	f.pause()
	for i, now := range f.packets() {
		if now["local"] == agreed[i]["local"] || now["disagreed"] != agreed[i]["disagreed"] {
			t.Errorf("host %s with the same table: %v, and later %v", f.Hosts[i].Name, agreed[i], now)
		}
	}
	f.stop(contradicted)
	for _, at := range f.analysis.Missing() {
		if at < contradicted {
			t.Fatalf("a datagram was lost %v after the beginning, while the tables contradicted each other", at-begun)
		}
	}
}

// writeHosts writes the file of hosts of one host, with the states of all hosts.
func (f *fleet) writeHosts(on *labfleet.Host, epoch int, states ...string) {
	f.Helper()
	text := fmt.Sprintf("epoch: %d\nnonce: 0x5eed\nhosts:\n", epoch)
	for i, h := range f.Hosts {
		entry, err := h.FileEntry(states[i])
		f.must(err)
		text += "  - " + entry + "\n"
	}
	f.host.replaceFile(filepath.Join(on.Dir, "hosts.yaml"), text)
}

// packets returns the counts of packets of each host.
func (f *fleet) packets() (counts []map[string]uint64) {
	f.Helper()
	for _, h := range f.Hosts {
		s, err := h.Status(f.Context())
		f.must(err)
		counts = append(counts, s.Packets)
	}
	return counts
}

// TestFleetAnnounced is that the example fleet announces the addresses: the router in front sends to a host from the moment at
// which it has devices until its last one has moved, and not to a host that has died.
func TestFleetAnnounced(t *testing.T) {
	for _, o := range fleetForms(labfleet.Options{Daemon: labfleet.FRR, Routed: true}, labfleet.Options{Daemon: labfleet.GoBGP}) {
		t.Run(formName(o), func(t *testing.T) { fleetAnnounced(t, o) })
	}
}

func fleetAnnounced(t *testing.T, o labfleet.Options) {
	f := newFleet(t, o)
	a, b := f.addHost(), f.addHost()
	f.await("the first table", f.Hosts, labfleet.Shared("a", "b"))
	f.routed("a", "b")
	const devices = 12
	begun := f.load(devices, 10)
	c := f.addHost()
	f.await("host c to share", f.Hosts, labfleet.Shared("a", "b", "c"))
	t.Logf("host c shares %v after the beginning", swarm.Now()-begun)
	f.routed("a", "b", "c")
	f.set(a, b, "drain")
	f.await("host b to drain", f.Hosts, labfleet.Shared("a", "c"))
	f.routed("a", "c")
	f.set(a, b, "ready")
	f.await("host b to return", f.Hosts, labfleet.Shared("a", "b", "c"))
	f.routed("a", "b", "c")
	killed := swarm.Now()
	f.restartAgent(a)
	f.registered(a, killed)
	f.pause()
	f.routed("a", "b", "c")
	planned := swarm.Now()
	f.pause() // the members read what was sent until now: a member that is killed loses its queue

	died := swarm.Now()
	f.must(c.Kill())
	f.routed("a", "b")
	took := swarm.Now() - died
	f.await("the death of c", []*labfleet.Host{a, b}, labfleet.Shared("a", "b"))
	f.host.eventually("all devices to connect", func() error { return f.connected(devices, c) })
	t.Logf("the router knew after %v of the death of a host, and all devices were connected after %v", took.Round(time.Millisecond), (swarm.Now() - died).Round(time.Millisecond))
	f.finish(planned)
	var lost []time.Duration
	for _, at := range f.analysis.Missing() {
		if at < planned {
			lost = append(lost, at-begun)
		}
	}
	if len(lost) > 0 {
		for _, h := range []*labfleet.Host{a, b} {
			s, err := h.Status(t.Context())
			t.Logf("host %s: %v %v %v", h.Name, s.Packets, s.Problems, err)
		}
		t.Errorf("%d datagrams were lost before the death of a host, %v after the beginning, from %v to %v", len(lost), planned-begun, slices.Min(lost), slices.Max(lost))
	}
}

// routed waits until the front router sends to exactly these hosts.
func (f *fleet) routed(hosts ...string) {
	f.Helper()
	began := swarm.Now()
	defer func() {
		f.Logf("routes to %v after %v", hosts, (swarm.Now() - began).Round(time.Millisecond))
		if f.Failed() {
			f.Log(f.ExplainRouting())
		}
	}()
	f.host.eventually("routes to "+strings.Join(hosts, " "), func() error {
		found, same, err := f.Routes()
		if err == nil && (strings.Join(found, " ") != strings.Join(hosts, " ") || !same) {
			err = fmt.Errorf("the router sends IPv4 to %v, and IPv6 to the same: %v", found, same)
		}
		return err
	})
}
