// SPDX-License-Identifier: Apache-2.0

package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"sockeye/internal/api"
	"sockeye/internal/config"
	"sockeye/internal/netns"
	"sockeye/internal/testenv"
	"sockeye/lab"
	"sockeye/lab/swarm"
)

// Addresses of the fleet.
var (
	fleetService4 = netip.MustParseAddr("192.0.2.53")
	fleetService6 = netip.MustParseAddr("2001:db8::53")
	fleetEtcd     = netip.MustParseAddr("10.77.0.230")
)

const fleetSlots = 2

// fleet is a fleet of hosts on one link, and the devices, whose namespace is also the router in front: it chooses a host for
// each flow (ECMP).
type fleet struct {
	*testing.T
	lab      *lab.Lab
	devices  *lab.Namespace
	hosts    []*fleetHost
	etcd     *lab.Process
	etcdNS   *lab.Namespace
	swarm    *swarm.Swarm
	analysis swarm.Analysis
	waits    []*waits // of etcd and the agents
	etcdWait *waits
}

type fleetHost struct {
	*host
	waits   *waits // of the agent
	name    string
	number  int
	members []*swarm.Process
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	h := newHost(t, config.Reuseport) // the lab, and the namespace of the devices
	f := &fleet{T: t, lab: h.lab, devices: h.devices}
	var err error
	f.etcdNS, err = f.lab.Attach("etcd", netip.PrefixFrom(fleetEtcd, 24))
	h.must(err)
	f.startEtcd()
	h.must(f.devices.Sysctl("ipv4.fib_multipath_hash_policy", "1"))
	h.must(f.devices.Sysctl("ipv6.fib_multipath_hash_policy", "1"))
	f.swarm, err = swarm.New(f.lab, f.devices)
	h.must(err)
	return f
}

func (f *fleet) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

func (f *fleet) startEtcd() {
	f.Helper()
	url := "http://" + netip.AddrPortFrom(fleetEtcd, 2379).String()
	f.etcd = f.etcdNS.Command(context.Background(), "etcd", "--data-dir", filepath.Join(f.lab.Dir(), "etcd"),
		"--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", "http://127.0.0.1:0", "--unsafe-no-fsync")
	f.etcd.Name = "etcd"
	f.must(f.etcd.Start())
	if f.etcdWait == nil {
		f.etcdWait = f.sample()
	}
	f.etcdWait.pid.Store(int64(f.etcd.Pid()))
}

// sample samples the waits of a process for a CPU until the test ends.
func (f *fleet) sample() *waits {
	w := new(waits)
	stop := make(chan struct{})
	var sampling sync.WaitGroup
	sampling.Go(func() { w.sample(stop) })
	f.Cleanup(sampling.Wait)
	f.Cleanup(func() { close(stop) })
	f.waits = append(f.waits, w)
	return w
}

// startAgent starts the agent of a host.
func (h *fleetHost) startAgent() {
	h.Helper()
	h.host.startAgent()
	h.waits.pid.Store(int64(h.agent.Pid()))
}

// addHost starts the agent and the members of a further host. lines are further keys of the fleet in the policy.
func (f *fleet) addHost(lines ...string) *fleetHost {
	f.Helper()
	number := len(f.hosts)
	name := string(rune('a' + number))
	h := &fleetHost{name: name, number: number}
	n, err := f.lab.Attach("host-"+name, h.addresses()...)
	f.must(err)
	f.must(swarm.Reach(n))
	for _, a := range []netip.Addr{fleetService4, fleetService6} {
		f.must(n.AddAddress("lo", netip.PrefixFrom(a, a.BitLen())))
	}
	h.host = &host{T: f.T, lab: f.lab, mode: config.Reuseport, collectors: n, devices: f.devices,
		pins: filepath.Join(testenv.BPFFS(f.T), "sockeye"), dir: filepath.Join(f.lab.Dir(), name), binary: os.Getenv(binaryEnv),
		members: map[int]*member{}, got: map[arrival]int{}, texts: map[arrival][]string{}, prefix: name + "/"}
	f.must(os.Mkdir(h.dir, 0o755))
	f.must(os.Mkdir(filepath.Join(f.lab.Cgroup(), name), 0o755))
	h.setPolicy(fleetSlots)
	text, err := os.ReadFile(h.policyPath())
	f.must(err)
	keys := append([]string{"host: " + name, "interfaces: [eth0]", fmt.Sprintf("addresses: [%v, %q]", fleetService4, fleetService6),
		fmt.Sprintf("etcd: {endpoints: [http://%v:2379]}", fleetEtcd), "settle: 1s", "min_hosts: 2"}, lines...)
	h.replaceFile(h.policyPath(), string(text)+"fleet:\n  "+strings.Join(keys, "\n  ")+"\n")
	f.Cleanup(func() {
		if f.Failed() && h.agent != nil {
			f.Logf("end of the log of host %s:\n%s", name, h.agent.LogTail(30))
		}
	})
	h.waits = f.sample()
	h.startAgent()
	for slot := range fleetSlots {
		p, err := f.swarm.StartMemberIn(n, swarm.Member{Slot: number*fleetSlots + slot, TCP: bmpPort, UDP: ipfixPort}, fmt.Sprintf("%s/receiver-%d", name, slot), "root")
		f.must(err)
		h.members = append(h.members, p)
	}
	f.hosts = append(f.hosts, h)
	return h
}

// route makes the router choose among hosts.
func (f *fleet) route(hosts ...*fleetHost) {
	f.Helper()
	nl := f.devices.Netlink()
	link, err := nl.LinkByName("eth0")
	f.must(err)
	for i, a := range []netip.Addr{fleetService4, fleetService6} {
		route := &netlink.Route{Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
		for _, h := range hosts {
			route.MultiPath = append(route.MultiPath, &netlink.NexthopInfo{Gw: h.addresses()[i].Addr().AsSlice(), LinkIndex: link.Attrs().Index})
		}
		f.must(nl.RouteReplace(route))
	}
}

// status returns the fleet as a host sees it.
func (h *fleetHost) status() (s api.FleetStatus, err error) { return s, h.get("/v1/fleet", &s) }

// await waits until all hosts agree, no bucket moves, and the condition holds.
func (f *fleet) await(what string, hosts []*fleetHost, condition func(s *api.FleetStatus) error) {
	f.Helper()
	hosts[0].eventually(what, func() error {
		var first *api.FleetStatus
		for _, h := range hosts {
			s, err := h.status()
			switch {
			case err != nil:
				return err
			case s.Moving > 0:
				return fmt.Errorf("host %s: %d buckets move", h.name, s.Moving)
			case first != nil && first.Epoch != s.Epoch:
				return fmt.Errorf("host %s has epoch %d, host %s %d", hosts[0].name, first.Epoch, h.name, s.Epoch)
			case s.Epoch == 0:
				return fmt.Errorf("host %s has no table: %v", h.name, s.Problems)
			}
			if err := condition(&s); err != nil {
				return fmt.Errorf("host %s: %w", h.name, err)
			}
			first = &s
		}
		return nil
	})
}

// shared returns the condition that hosts with these names share the devices.
func shared(names ...string) func(s *api.FleetStatus) error {
	return func(s *api.FleetStatus) error {
		for _, h := range s.Hosts {
			want := false
			for _, name := range names {
				want = want || name == h.Name
			}
			fair := 1 / float64(len(names))
			if want && (h.Share < 0.8*fair || h.Share > 1.2*fair) || !want && h.Share > 0 {
				return fmt.Errorf("host %s has %.3f of the devices", h.Name, h.Share)
			}
		}
		return nil
	}
}

// TestFleet is that each device has one member of one host while hosts join, drain, return and die, and the router changes its
// mind: no device is split, and planned changes lose nothing.
func TestFleet(t *testing.T) {
	f := newFleet(t)
	a, b := f.addHost(), f.addHost()
	f.await("the first table", f.hosts, shared("a", "b"))
	f.route(a, b)
	begun := f.load(24)
	pause := func() { time.Sleep(500 * time.Millisecond) }
	pause()
	closedBefore := f.closed()

	// The router changes its mind: connections survive.
	f.route(b)
	pause()
	f.route(a)
	pause()
	f.route(a, b)
	pause()
	if closed := f.closed(); closed != closedBefore {
		t.Errorf("%d connections were closed by changes of the router", closed-closedBefore)
	}

	c := f.addHost()
	f.await("host c to share", f.hosts, shared("a", "b", "c"))
	f.route(a, b, c)
	pause()
	if out, errs, code := c.cli("host", "set", "b", "drain", "--dry-run"); code != 0 || !regexp.MustCompile(`ready -> drain +(2[6-9]|3[0-9]|40)\.\d % of the devices move`).MatchString(out) {
		t.Errorf("dry run: %s%s", out, errs)
	}
	if _, errs, code := a.cli("host", "set", "b", "drain"); code != 0 {
		t.Fatal(errs)
	}
	f.await("host b to drain", f.hosts, shared("a", "c"))
	if _, _, code := b.cli("health"); code != 1 {
		t.Errorf("health of a drained host: exit code %d, want 1", code)
	}
	f.route(a, c)
	pause()
	if _, errs, code := c.cli("host", "set", "b", "ready"); code != 0 {
		t.Fatal(errs)
	}
	f.await("host b to return", f.hosts, shared("a", "b", "c"))
	f.route(a, b, c)
	pause()
	planned := swarm.Now()

	f.finish(planned)
	missing := f.analysis.Missing()
	if len(missing) > 0 {
		t.Errorf("%d datagrams lost by planned changes, the first one %v after the beginning", len(missing), missing[0]-begun)
	}
	for _, h := range f.hosts {
		s, err := h.status()
		f.must(err)
		t.Logf("host %s: %v %v", h.name, s.Packets, s.Problems)
		if s.Packets["forwarded"] == 0 || s.Packets["disagreed"] > 0 {
			t.Errorf("host %s: %v", h.name, s.Packets)
		}
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

// load starts the devices and their datagrams.
func (f *fleet) load(devices int) (begun time.Duration) {
	f.Helper()
	f.must(f.swarm.StartDevices(f.Context(), swarm.Load{Devices: devices, TCP: bmpPort, UDP: ipfixPort, Rate: togetherRate, Exporters: 2, Routes: 10,
		Service4: fleetService4, Service6: fleetService6, Noted: true}))
	state, err := f.swarm.Send()
	f.must(err)
	f.analysis.Begin, f.analysis.Silence, f.analysis.Period = state.At, silence, time.Second/togetherRate
	return state.At
}

// finish stops the devices and judges what has happened until a time: no device was split.
func (f *fleet) finish(until time.Duration) {
	f.Helper()
	_, err := f.swarm.Stop()
	f.must(err)
	time.Sleep(judgeDelay)
	f.analysis.End = until
	f.must(f.swarm.Read(&f.analysis))
	f.analysis.Finish()
	for _, s := range f.analysis.Splits {
		length, waited := s.Length(f.analysis.Stalls...), time.Duration(0)
		for _, w := range f.waits { // a busy host lets agents and etcd wait one after the other
			waited += w.between(s.Interval)
		}
		if length-waited > splitLimit {
			f.Errorf("split for %v, %v of them without the waits for a CPU: %v", length, length-waited, s)
		}
	}
	f.Logf("%d datagrams received, %d connections closed, %d splits, %d without routes, %d undecodable", f.analysis.Received, f.analysis.Closed, len(f.analysis.Splits), f.analysis.WithoutRoutes, f.analysis.Undecodable)
}

// cut sets the interface of a host down, or up again.
func (h *fleetHost) cut(down bool) {
	h.Helper()
	nl := h.collectors.Netlink()
	link, err := nl.LinkByName("eth0")
	h.must(err)
	if down {
		h.must(h.collectors.Sysctl("ipv6.conf.eth0.keep_addr_on_down", "1"))
		h.must(nl.LinkSetDown(link))
		return
	}
	h.must(nl.LinkSetUp(link))
	for _, a := range h.addresses() {
		if a.Addr().Is6() {
			h.must(netns.AwaitLocal(nl, a.Addr(), time.Minute))
		}
	}
	h.must(swarm.Reach(h.collectors)) // the kernel has removed the routes
}

// addresses returns the addresses of a host on the link.
func (h *fleetHost) addresses() []netip.Prefix {
	return []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 77, 0, byte(210 + h.number)}), 24),
		netip.PrefixFrom(netip.MustParseAddr(fmt.Sprintf("fd77::2%d", 10+h.number)), 64)}
}

// connected returns an error unless all devices have a connection.
func (f *fleet) connected(devices int) error {
	state, err := f.swarm.State()
	if err == nil && state.Open < devices {
		err = fmt.Errorf("%d of %d devices have a connection", state.Open, devices)
	}
	return err
}

// TestFleetLoses is that the other hosts take over the devices of a host that dies, that a host that returns gets them back,
// and that without etcd, and while agents restart, nothing moves.
func TestFleetLoses(t *testing.T) {
	f := newFleet(t)
	a, b, c := f.addHost(), f.addHost(), f.addHost()
	f.await("the first table", f.hosts, shared("a", "b", "c"))
	f.route(a, b, c)
	const devices = 24
	begun := f.load(devices)
	pause := func() { time.Sleep(500 * time.Millisecond) }
	epoch := func() uint64 {
		s, err := a.status()
		f.must(err)
		return s.Epoch
	}

	// An agent that is killed and starts again continues; so do all of them, and they do without etcd.
	before, closed := epoch(), f.closed()
	f.must(b.agent.Kill())
	b.startAgent()
	f.await("host b to be alive", f.hosts, alive("a", "b", "c"))
	f.must(f.etcd.Kill())
	<-f.etcd.Done()
	pause()
	f.route(b)
	for _, h := range f.hosts {
		f.must(h.agent.Kill())
		h.startAgent()
	}
	pause()
	f.route(a, b, c)
	for _, h := range f.hosts {
		h.eventually("the problem", func() error {
			s, err := h.status()
			if err == nil && (s.Connected || s.Epoch != before || len(s.Problems) == 0) {
				err = fmt.Errorf("without etcd: %+v", s)
			}
			return err
		})
	}
	if _, errs, code := a.cli("host", "set", "b", "drain"); code == 0 || !strings.Contains(errs, "does not answer") {
		t.Errorf("drain without etcd: exit code %d, %s", code, errs)
	}
	f.startEtcd()
	f.await("etcd", f.hosts, alive("a", "b", "c"))
	pause()
	if now := f.closed(); now != closed {
		t.Errorf("%d connections were closed while nothing should move", now-closed)
	}
	if now := epoch(); now != before {
		t.Errorf("epoch %d, before etcd was lost %d", now, before)
	}
	quiet := swarm.Now()

	// A host dies with its links; the routers notice it by the protocol that they speak with it.
	died := swarm.Now()
	b.cut(true)
	f.route(a, c)
	f.await("the death of b", []*fleetHost{a, c}, shared("a", "c"))
	took := swarm.Now() - died
	a.eventually("all devices to connect", func() error { return f.connected(devices) })
	t.Logf("after the death of a host, its devices had another one in %v, and all were connected after %v", took.Round(time.Millisecond), (swarm.Now() - died).Round(time.Millisecond))
	b.eventually("the host that was cut off", func() error {
		s, err := b.status()
		if err == nil && (s.Connected || s.Epoch != before) {
			err = fmt.Errorf("connected %v, epoch %d, before %d", s.Connected, s.Epoch, before)
		}
		return err
	})
	b.cut(false)
	f.await("the return of b", f.hosts, shared("a", "b", "c"))
	f.route(a, b, c)
	a.eventually("all devices to connect", func() error { return f.connected(devices) })
	f.finish(quiet)
	var gap []time.Duration
	for _, at := range f.analysis.Missing() {
		if at < quiet {
			t.Fatalf("a datagram was lost %v after the beginning, although nothing should move until %v", at-begun, quiet-begun)
		}
		gap = append(gap, at)
	}
	if len(gap) > 0 {
		t.Logf("the death of a host has cost %d datagrams in %v", len(gap), (gap[len(gap)-1] - gap[0]).Round(time.Millisecond))
	}
}

// alive returns the condition that hosts renew their leases.
func alive(names ...string) func(s *api.FleetStatus) error {
	return func(s *api.FleetStatus) error {
		if !s.Connected {
			return errors.New("the store does not answer")
		}
		for _, h := range s.Hosts {
			if slices.Contains(names, h.Name) && (!h.Alive || !h.Healthy) {
				return fmt.Errorf("host %s: alive %v, healthy %v", h.Name, h.Alive, h.Healthy)
			}
		}
		return nil
	}
}
