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
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/config"
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
}

type fleetHost struct {
	*host
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
}

// addHost starts the agent and the members of a further host. lines are further keys of the fleet in the policy.
func (f *fleet) addHost(lines ...string) *fleetHost {
	f.Helper()
	number := len(f.hosts)
	name := string(rune('a' + number))
	n, err := f.lab.Attach("host-"+name, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 77, 0, byte(210 + number)}), 24),
		netip.PrefixFrom(netip.MustParseAddr(fmt.Sprintf("fd77::2%d", 10+number)), 64))
	f.must(err)
	f.must(swarm.Reach(n))
	for _, a := range []netip.Addr{fleetService4, fleetService6} {
		f.must(n.AddAddress("lo", netip.PrefixFrom(a, a.BitLen())))
	}
	h := &fleetHost{name: name, number: number, host: &host{T: f.T, lab: f.lab, mode: config.Reuseport, collectors: n, devices: f.devices,
		pins: filepath.Join(testenv.BPFFS(f.T), "sockeye"), dir: filepath.Join(f.lab.Dir(), name), binary: os.Getenv(binaryEnv),
		members: map[int]*member{}, got: map[arrival]int{}, texts: map[arrival][]string{}, prefix: name + "/"}}
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
	for _, a := range []netip.Addr{fleetService4, fleetService6} {
		route := &netlink.Route{Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
		for _, h := range hosts {
			gateway := netip.AddrFrom4([4]byte{10, 77, 0, byte(210 + h.number)})
			if a.Is6() {
				gateway = netip.MustParseAddr(fmt.Sprintf("fd77::2%d", 10+h.number))
			}
			link, err := nl.LinkByName("eth0")
			f.must(err)
			route.MultiPath = append(route.MultiPath, &netlink.NexthopInfo{Gw: gateway.AsSlice(), LinkIndex: link.Attrs().Index})
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
	const devices = 24
	f.must(f.swarm.StartDevices(t.Context(), swarm.Load{Devices: devices, TCP: bmpPort, UDP: ipfixPort, Rate: togetherRate, Exporters: 2, Routes: 10,
		Service4: fleetService4, Service6: fleetService6, Noted: true}))
	begun, err := f.swarm.Send()
	f.must(err)
	f.analysis.Begin, f.analysis.Silence, f.analysis.Period = begun.At, silence, time.Second/togetherRate
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

	_, err = f.swarm.Stop()
	f.must(err)
	time.Sleep(judgeDelay)
	f.analysis.End = planned
	f.must(f.swarm.Read(&f.analysis))
	f.analysis.Finish()
	for _, s := range f.analysis.Splits {
		if d := s.Length(); d > splitLimit {
			t.Errorf("split for %v: %v", d, s)
		}
	}
	missing := f.analysis.Missing()
	if len(missing) > 0 {
		t.Errorf("%d datagrams lost by planned changes, the first one %v after the beginning", len(missing), missing[0]-begun.At)
	}
	t.Logf("%d datagrams received, %d connections closed, %d splits, %d without routes, %d undecodable", f.analysis.Received, f.analysis.Closed, len(f.analysis.Splits), f.analysis.WithoutRoutes, f.analysis.Undecodable)
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

var _ = unix.IFF_UP
