// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"io/fs"
	"log/slog"
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
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/clsact"
	"sockeye/internal/config"
	"sockeye/internal/domain/domaintest"
	"sockeye/internal/fleet/forward"
	"sockeye/internal/fleet/lead"
	"sockeye/internal/fleet/store"
	"sockeye/internal/fleet/table"
	"sockeye/internal/sockdiag"
	"sockeye/internal/testenv"
)

func TestMain(m *testing.M) { testenv.MainWithMaps(m) }

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// services are the services of a host.
type services struct {
	mu        sync.Mutex
	addresses []netip.Addr
	host      func(netip.Addr) (string, int, bool)
	problem   error
}

func (s *services) SetFleet(addresses []netip.Addr, host func(netip.Addr) (string, int, bool)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addresses, s.host = addresses, host
}
func (s *services) FindLeaving([]netip.Addr, func(netip.Addr) (string, int, bool)) ([]sockdiag.Socket, func() func()) {
	return nil, func() func() { return func() {} }
}
func (s *services) CanServe(func(*config.Service) bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.problem
}
func (s *services) HandOver(func(netip.Addr) bool, time.Time) (map[netip.Addr][]byte, error) {
	return nil, nil
}
func (s *services) TakeOver(map[netip.Addr][]byte, bool) {}
func (s *services) CopyTemplates(func(netip.Addr) (time.Time, bool, bool), int) (map[netip.Addr][]byte, error) {
	return nil, nil
}
func (s *services) IsTakingOver() bool                   { return false }
func (s *services) Where([]netip.Addr) []api.WhereStatus { return nil }

// hostOf returns the host of a device as the services know it.
func (s *services) hostOf(device string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.host == nil {
		return ""
	}
	name, _, _ := s.host(netip.MustParseAddr(device))
	return name
}

// waitsForTable reports whether the services know the addresses of a fleet without a table.
func (s *services) waitsForTable() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.addresses) > 0 && s.host == nil
}

const (
	policyText = `services:
  telemetry:
    slots: 2
    user: root
    listeners: [{protocol: tcp, address: "[::]:1790"}, {protocol: udp, address: "0.0.0.0:4739"}]
fleet: {host: a, interfaces: [fleet0], addresses: [192.0.2.53], file: hosts.yaml}
`
	hostsText = `epoch: 1
nonce: 7
hosts:
  - {name: a, addresses: [198.51.100.1]}
  - {name: b, addresses: [198.51.100.2], macs: ["02:00:00:00:00:02"]}
  - {name: c, addresses: [203.0.113.3]}
`
)

// plug creates the interface fleet0 with an address.
func plug(t testing.TB) netlink.Link {
	t.Helper()
	check(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "fleet0"}, PeerName: "fleet1"}))
	t.Cleanup(func() {
		if l, err := netlink.LinkByName("fleet0"); err == nil {
			check(t, netlink.LinkDel(l))
		}
	})
	lo, err := netlink.LinkByName("lo")
	check(t, err)
	for _, service := range []string{"192.0.2.53/32", "2001:db8::53/128"} {
		address, err := netlink.ParseAddr(service)
		check(t, err)
		check(t, netlink.AddrReplace(lo, address))
		t.Cleanup(func() {
			if err := netlink.AddrDel(lo, address); !errors.Is(err, unix.EADDRNOTAVAIL) { // a test may plug twice
				check(t, err)
			}
		})
	}
	link, err := netlink.LinkByName("fleet0")
	check(t, err)
	check(t, netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: net.IP{198, 51, 100, 1}, Mask: net.CIDRMask(24, 32)}}))
	check(t, netlink.LinkSetUp(link))
	// Host b answers.
	check(t, netlink.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: net.IP{198, 51, 100, 2}, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 2}}))
	return link
}

func runner(t testing.TB, s *services, stateDir, pins string) *domaintest.Runner {
	t.Helper()
	h := domaintest.Host(t, stateDir, pins, slog.DiscardHandler)
	return domaintest.New(h, New(h, s))
}

func status(t testing.TB, r *domaintest.Runner) *api.FleetStatus {
	t.Helper()
	return r.Status(t).Fleet
}

// filters returns the names of the filters at the ingress of an interface.
func filters(t testing.TB, name string) (names []string) {
	t.Helper()
	link, err := netlink.LinkByName(name)
	if err != nil {
		return nil
	}
	all, err := clsact.Open()
	check(t, err)
	defer all.Close()
	for _, name := range []string{"sockeye-fleet/ingress", "sockeye-fleet/tunnel"} {
		has, err := all.Has(link.Attrs().Index, clsact.Ingress, name)
		check(t, err)
		if has {
			names = append(names, name)
		}
	}
	return names
}

// TestDomain takes a host through its life in a fleet with a file: the first table, a crash, a start without the file, and
// the end.
func TestDomain(t *testing.T) {
	link := plug(t)
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	check(t, os.WriteFile(filepath.Join(dir, "hosts.yaml"), []byte(hostsText), 0o644))
	s := new(services)
	r := runner(t, s, dir, pins)
	r.Start(t, policyText)
	testenv.Within(t, "the table", func() bool { s := status(t, r); return s.Epoch == 1 && len(s.Hosts) == 3 })
	first := status(t, r)
	paths := make(map[string]string)
	for _, h := range first.Hosts {
		paths[h.Name] = h.Path
	}
	if paths["a"] != "self" || paths["b"] != "link" || paths["c"] != "none" || len(first.Problems) != 1 || !strings.Contains(first.Problems[0], "there is no route to host c") {
		t.Errorf("%+v", first)
	}
	var frame api.Frame
	check(t, r.Domains[0].Frame(&frame))
	if frame.Fleet == nil || frame.Fleet.Epoch != 1 || len(frame.Fleet.Hosts) != 3 || frame.Fleet.Packets == nil {
		t.Errorf("a frame has %+v", frame.Fleet)
	}
	owners := make(map[string]int)
	for i := range 200 {
		owners[s.hostOf(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}).String())]++
	}
	if len(owners) != 3 || owners["a"] < 30 || owners["b"] < 30 || owners["c"] < 30 {
		t.Errorf("devices %v", owners)
	}
	was := s.hostOf("10.0.0.1")

	stop := r.Serve(t, "127.0.0.1:9732")
	text := regexp.MustCompile(`(?m)^(sockeye_.*) \S+$`).ReplaceAllString(domaintest.Scrape(t, "127.0.0.1:9732"), "$1 N")
	stop()
	const file = "testdata/metrics.golden"
	if os.Getenv("UPDATE") != "" {
		check(t, os.MkdirAll("testdata", 0o755))
		check(t, os.WriteFile(file, []byte(text), 0o644))
	}
	if want, err := os.ReadFile(file); err != nil || text != string(want) {
		t.Errorf("the metrics changed; run with UPDATE=1 if they should, and mend docs/metrics.md: %v\n%s", err, text)
	}

	// A route to c appears: the agent creates the tunnel.
	route := &netlink.Route{Dst: &net.IPNet{IP: net.IP{203, 0, 113, 0}, Mask: net.CIDRMask(24, 32)}, Gw: net.IP{198, 51, 100, 254}, LinkIndex: link.Attrs().Index}
	peer, err := netlink.LinkByName("fleet1")
	check(t, err)
	check(t, netlink.LinkSetUp(peer))
	testenv.Within(t, "the route", func() bool { return netlink.RouteReplace(route) == nil })
	testenv.Within(t, "the tunnel", func() bool {
		_, err := netlink.LinkByName(forward.TunnelName)
		return err == nil && len(status(t, r).Problems) == 0
	})
	attached := func() (links []string) {
		links = append(filters(t, "fleet0"), filters(t, forward.TunnelName)...)
		all, err := filepath.Glob(pins + "/fleet@*/*")
		check(t, err)
		for _, path := range all {
			if name := filepath.Base(path); strings.HasPrefix(name, "ingress_") || name == "tunnel" {
				links = append(links, name)
			}
		}
		return links
	}
	testenv.Within(t, "two links", func() bool { return len(attached()) == 2 })

	// The others do not know the source address of the route.
	check(t, netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: net.IP{198, 51, 100, 77}, Mask: net.CIDRMask(24, 32)}}))
	route.Src = net.IP{198, 51, 100, 77}
	check(t, netlink.RouteReplace(route))
	testenv.Within(t, "the source address", func() bool {
		return strings.Contains(strings.Join(status(t, r).Problems, "\n"), "packets to host c leave with the address 198.51.100.77, which is none of those of this host in the table, [198.51.100.1]")
	})
	route.Src = nil
	check(t, netlink.RouteReplace(route))
	testenv.Within(t, "no problem", func() bool { return len(status(t, r).Problems) == 0 })

	// The agent ends; the next one has no file, and serves the same devices.
	r.Stop()
	if len(attached()) != 2 {
		t.Errorf("attached are %v", attached())
	}
	check(t, os.Remove(filepath.Join(dir, "hosts.yaml")))
	s = new(services)
	r = runner(t, s, dir, pins)
	r.Start(t, policyText)
	testenv.Within(t, "the last table", func() bool { return s.hostOf("10.0.0.1") == was })
	testenv.Within(t, "the problem", func() bool { return strings.Contains(strings.Join(status(t, r).Problems, "\n"), "hosts.yaml") })

	// An interface that disappears is a problem until it is back.
	check(t, netlink.LinkDel(link))
	testenv.Within(t, "the interface to be missed", func() bool {
		return strings.Contains(strings.Join(status(t, r).Problems, "\n"), `there is no interface "fleet0"`)
	})
	plug(t)
	testenv.Within(t, "the interface", func() bool {
		return !strings.Contains(strings.Join(status(t, r).Problems, "\n"), "fleet0")
	})

	if _, err := r.Plan(strings.Replace(policyText, "fleet0", "fleet9", 1)); err == nil || !strings.Contains(err.Error(), `there is no interface "fleet9"`) {
		t.Errorf("a policy with another interface: %v", err)
	}
	changes, err := r.Plan(strings.Replace(policyText, "host: a", "host: b", 1))
	if err != nil || len(changes) != 1 || changes[0].What != "fleet main, as host a -> fleet main, as host b" {
		t.Errorf("%+v, %v", changes, err)
	}
	if changes, err := r.Plan(policyText); err != nil || len(changes) > 0 {
		t.Errorf("%+v, %v", changes, err)
	}
	if _, err := r.Plan(strings.Replace(policyText, "hosts.yaml", "others.yaml", 1)); err == nil || !strings.Contains(err.Error(), "others.yaml: no such file") {
		t.Errorf("a policy with another file of hosts: %v", err)
	}
	r.Retire(t)
	defer r.Stop()
	frame = api.Frame{}
	check(t, r.Domains[0].Frame(&frame))
	if len(attached()) > 0 || frame.Fleet != nil || s.hostOf("10.0.0.1") != "" || status(t, r) != nil {
		t.Errorf("after the end: attached %v, the services know %q, status %+v", attached(), s.hostOf("10.0.0.1"), status(t, r))
	}
	if _, err := netlink.LinkByName(forward.TunnelName); err == nil {
		t.Error("the tunnel is left")
	}
	for _, name := range []string{tableFile, instanceFile} {
		if _, err := os.Stat(filepath.Join(dir, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestJoinedWhileServing lets a host that serves alone join a fleet: nothing is attached, and the services know no fleet, until
// there is a table, also after another change of the policy.
func TestJoinedWhileServing(t *testing.T) {
	plug(t)
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	s := new(services)
	r := runner(t, s, dir, pins)
	alone, _, _ := strings.Cut(policyText, "fleet: ")
	r.Start(t, alone)
	defer r.Stop()
	changes, err := r.Apply(policyText)
	if err != nil || len(changes) != 1 || changes[0].Effect != "this host serves what reaches it until it has the table" {
		t.Errorf("%+v, %v", changes, err)
	}
	links := func() int {
		all, err := filepath.Glob(pins + "/fleet@*/ingress_*")
		check(t, err)
		return len(all) + len(filters(t, "fleet0"))
	}
	serves := func(when string) {
		t.Helper()
		testenv.Within(t, "the problem", func() bool { return strings.Contains(strings.Join(status(t, r).Problems, "\n"), "hosts.yaml") })
		time.Sleep(2 * refreshInterval)
		if st := status(t, r); links() > 0 || s.waitsForTable() || st.Healthy {
			t.Errorf("%s: %d links, waits %v, %+v", when, links(), s.waitsForTable(), st)
		}
	}
	serves("joined")
	if _, err := r.Apply(strings.Replace(policyText, "{host: a", "{host: a, weight: 50", 1)); err != nil {
		t.Fatal(err)
	}
	serves("with another weight")
	check(t, os.WriteFile(filepath.Join(dir, "hosts.yaml"), []byte(hostsText), 0o644))
	testenv.Within(t, "the table", func() bool { return s.hostOf("10.0.0.1") != "" })
	if links() != 1 {
		t.Errorf("with a table: %d links", links())
	}
}

// TestLeaveEffect is that a plan tells what becomes of the devices of a host that leaves.
func TestLeaveEffect(t *testing.T) {
	etcd := &config.FleetEtcd{}
	for _, test := range []struct {
		fleet config.Fleet
		want  string
	}{
		{config.Fleet{Etcd: etcd, OnHostDeath: config.NextHost}, "the devices of this host move to the others at once; run sockeye host set a drain first, and nothing is lost"},
		{config.Fleet{Etcd: etcd, OnHostDeath: config.WaitForHost}, "the others take over the devices of this host only after sockeye host set a drain; run it first, and nothing is lost"},
		{config.Fleet{File: "/etc/sockeye/hosts.yaml"}, "the other hosts send devices to this host until /etc/sockeye/hosts.yaml says otherwise"},
	} {
		if got := (&settings{Fleet: test.fleet, host: "a"}).leaveEffect(); got != test.want {
			t.Errorf("%+v: %s", test.fleet, got)
		}
	}
}

// TestHealth is that a host is healthy while it has devices, and can serve them.
func TestHealth(t *testing.T) {
	plug(t)
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	s := new(services)
	r := runner(t, s, dir, pins)
	r.Start(t, policyText)
	defer r.Stop()
	defer r.Retire(t)
	d := r.Domains[0].(*Domain)
	want := func(reason string) {
		t.Helper()
		testenv.Within(t, "health: "+reason, func() bool { h := d.Health(); return h.Reason == reason && h.Healthy == (reason == "") })
	}
	want("this host has no table of the fleet yet")
	if !s.waitsForTable() {
		t.Error("without a table, the services do not know of the fleet")
	}
	check(t, os.WriteFile(filepath.Join(dir, "hosts.yaml"), []byte(hostsText), 0o644))
	want("")
	s.mu.Lock()
	s.problem = errors.New("service telemetry has no ready slot")
	s.mu.Unlock()
	want("service telemetry has no ready slot")
	if st := status(t, r); st.Hosts[0].Name != "a" || st.Hosts[0].Healthy || !st.Hosts[1].Healthy {
		t.Errorf("a host that cannot serve, with a file: %+v", st.Hosts)
	}
	s.mu.Lock()
	s.problem = nil
	s.mu.Unlock()
	want("")
	text := strings.Replace(strings.Replace(hostsText, "epoch: 1", "epoch: 2", 1), "{name: a,", "{name: a, state: drain,", 1)
	check(t, os.WriteFile(filepath.Join(dir, "hosts.yaml"), []byte(text), 0o644))
	want("this host has no devices: its state is drain")
	text = strings.Replace(strings.Replace(hostsText, "epoch: 1", "epoch: 3", 1), "{name: a,", "{name: d,", 1)
	check(t, os.WriteFile(filepath.Join(dir, "hosts.yaml"), []byte(text), 0o644))
	want("this host has no devices: " + filepath.Join(dir, "hosts.yaml") + " has no host a")
}

// TestBrokenChange is that a host is not healthy after a change of the fleet that could neither be made nor be rolled back: it
// would be announced as a host without a fleet. The next change mends it.
func TestBrokenChange(t *testing.T) {
	plug(t)
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	s := new(services)
	r := runner(t, s, dir, pins)
	d := r.Domains[0].(*Domain)
	withEtcd := strings.Replace(policyText, "file: hosts.yaml", "etcd: {endpoints: ['http://127.0.0.1:1']}", 1)
	r.Start(t, withEtcd)
	defer r.Stop()
	defer r.Retire(t)
	want := func(reason string) {
		t.Helper()
		if h := d.Health(); h.Healthy || h.Reason != reason {
			t.Errorf("%+v, want %s", h, reason)
		}
	}
	want("this host has no table of the fleet yet")
	root := r.Host.Root.Dir
	r.Host.Root.Dir = "/proc/none" // no pin can be created
	changed := strings.Replace(withEtcd, "{host: a", "{host: a, weight: 50", 1)
	if _, err := r.Apply(changed); err == nil {
		t.Error("the change succeeds without pins")
	}
	want("the fleet does not run: its last change runs or has failed")
	r.Host.Root.Dir = root
	if _, err := r.Apply(changed); err != nil {
		t.Error(err)
	}
	want("this host has no table of the fleet yet")
	if !s.waitsForTable() {
		t.Error("the services serve all devices")
	}
	// Instead of another change, the fleet is removed.
	r.Host.Root.Dir = "/proc/none"
	if _, err := r.Apply(withEtcd); err == nil {
		t.Error("the change succeeds without pins")
	}
	r.Host.Root.Dir = root
	changes, err := r.Apply(policyText[:strings.Index(policyText, "fleet:")])
	check(t, err)
	if len(changes) != 1 || changes[0].Action != "remove" || changes[0].Effect != "this host serves all devices that reach it" {
		t.Errorf("%+v", changes)
	}
	if h := d.Health(); !h.Healthy || s.waitsForTable() {
		t.Errorf("without a fleet: %+v", h)
	}
}

// TestDead is that a host that has died stays dead while it is not known after a new connection to the store.
func TestDead(t *testing.T) {
	p := new(participation)
	dead := func(connected, alive, unknown bool) bool {
		p.state.Snapshot = &store.Snapshot{Connected: connected, Hosts: []lead.Host{{Host: table.Host{Name: "b"}, Alive: alive, Unknown: unknown}}}
		return p.deadHosts()["b"]
	}
	for i, c := range []struct{ connected, alive, unknown, want bool }{
		{true, false, true, false}, {true, false, false, true}, {true, false, true, true}, {false, false, false, false}, {true, false, true, true},
		{true, true, false, false}, {true, false, true, false},
	} {
		if got := dead(c.connected, c.alive, c.unknown); got != c.want {
			t.Errorf("look %d: dead %v", i, got)
		}
	}
}

// TestLies is that a host whose MAC address is another one than the kernel knows is not reached, and is not a peer.
func TestLies(t *testing.T) {
	link := plug(t)
	nics, err, _ := findInterfaces([]string{"fleet0"}, nil)
	check(t, err)
	h := &table.Host{Name: "b", Weight: 1, Addresses: []netip.Addr{netip.MustParseAddr("198.51.100.2")}, MACs: []string{"02:00:00:00:00:02"}}
	silent := false
	here := origin{links: newLinks(nics), silent: func(netip.Addr) bool { return silent }, tunnel: func() (int, uint32, error) { return 0, 0, errors.New("no tunnel is needed") }}
	check(t, netlink.NeighDel(&netlink.Neigh{LinkIndex: link.Attrs().Index, IP: net.IP{198, 51, 100, 2}}))
	if p := here.findPath(h); p.kind != "link" || p.MAC != [6]byte{} || p.problem != "" {
		t.Errorf("%+v", p)
	}
	silent = true // the kernel has looked for the host in vain
	if p := here.findPath(h); p.kind != "none" || p.problem != "host b does not answer on the link at 198.51.100.2 (ip neigh): packets to the host are dropped" {
		t.Errorf("%+v", p)
	}
	neighbor := &netlink.Neigh{LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: net.IP{198, 51, 100, 2}, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9}}
	check(t, netlink.NeighSet(neighbor))
	here.links = newLinks(nics)
	if p := here.findPath(h); p.kind != "none" || p.Interface != 0 || !strings.Contains(p.problem, "the kernel knows 02:00:00:00:00:09 at 198.51.100.2") {
		t.Errorf("%+v", p)
	}
	neighbor.HardwareAddr[5] = 2
	check(t, netlink.NeighSet(neighbor))
	here.links = newLinks(nics)
	if p := here.findPath(h); p.kind != "link" || p.MAC != [6]byte{2, 0, 0, 0, 0, 2} || p.problem != "" {
		t.Errorf("%+v", p)
	}
	// One of two addresses is silent: packets go to the other one.
	two := *h
	two.Addresses = []netip.Addr{netip.MustParseAddr("198.51.100.9"), h.Addresses[0]}
	if p := here.findPath(&two); p.kind != "link" || p.MAC != [6]byte{2, 0, 0, 0, 0, 2} || !slices.Equal(p.Addresses, h.Addresses) || p.problem != "host b does not answer on the link at 198.51.100.9 (ip neigh)" {
		t.Errorf("%+v", p)
	}
	here.services = []netip.Addr{netip.MustParseAddr("192.0.2.53"), netip.MustParseAddr("2001:db8::53")}
	if p := here.findPath(h); p.kind != "link" || p.problem != "host b has no IPv6 address on the link: packets to 2001:db8::53 for devices of host b are dropped" {
		t.Errorf("%+v", p)
	}
	here.services = nil
	without := *h
	without.MACs = nil
	if p := here.findPath(&without); p.kind != "none" || p.problem != "host b has no macs: packets to the host are dropped; the kernel knows 02:00:00:00:00:02 at 198.51.100.2" {
		t.Errorf("%+v", p)
	}
	here.routers = map[[6]byte]netip.Addr{{2, 0, 0, 0, 0, 2}: netip.MustParseAddr("198.51.100.254")}
	if p := here.findPath(h); p.kind != "link" || p.MAC != [6]byte{} || !strings.Contains(p.problem, "02:00:00:00:00:02, which is that of the router 198.51.100.254") {
		t.Errorf("%+v", p)
	}
	check(t, netlink.RouteAdd(&netlink.Route{Gw: net.IP{198, 51, 100, 2}, LinkIndex: link.Attrs().Index}))
	if got := newLinks(nics).defaultRouters(); len(got) != 1 || got[[6]byte{2, 0, 0, 0, 0, 2}] != h.Addresses[0] {
		t.Errorf("routers: %v", got)
	}
	taken := map[netip.Addr]string{h.Addresses[0]: "the services"}
	if got := conflict(h, taken, nil); got != "host b says that its address is 198.51.100.2, which is that of the services: packets to the host are dropped; compare the interfaces of the hosts with ADDRESSES" {
		t.Error(got)
	}
	// A new host takes the address of another one. It is the first one by name.
	before := newLinks(nil).holders(&table.Table{Hosts: []table.Host{*h}}, nil, nil)
	thief := table.Host{Name: "a", Addresses: h.Addresses}
	for range 2 {
		before = newLinks(nil).holders(&table.Table{Hosts: []table.Host{thief, *h}}, nil, before)
		if got := conflict(h, nil, before); got != "" {
			t.Error(got)
		}
		if got := conflict(&thief, nil, before); got != "host a says that its address is 198.51.100.2, which is that of host b: packets to the host are dropped; compare the interfaces of the hosts with ADDRESSES" {
			t.Error(got)
		}
	}
	before = newLinks(nil).holders(&table.Table{Hosts: []table.Host{thief}}, nil, before)
	if got := conflict(&thief, nil, before); got != "" {
		t.Errorf("after the other host has left: %s", got)
	}
	both := &table.Table{Hosts: []table.Host{thief, *h}}
	if got := newLinks(nics).holders(both, nil, before)[h.Addresses[0]]; got != "b" {
		t.Errorf("the kernel knows b at the address, which counts for %s", got)
	}
	if got := newLinks(nics).holders(both, map[string]bool{"b": true}, nil)[h.Addresses[0]]; got != "a" {
		t.Errorf("b has died, and the address counts for %s", got)
	}
}

// TestCredentials is that files of etcd that cannot be used are refused by a plan, and do not keep an agent from starting: it uses
// them when they are there.
func TestCredentials(t *testing.T) {
	plug(t)
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	text := strings.Replace(policyText, "file: hosts.yaml", "etcd: {endpoints: [http://127.0.0.1:2], user: sockeye, password_file: password}", 1)
	s := new(services)
	r := runner(t, s, dir, pins)
	r.Start(t, text)
	defer r.Stop()
	defer r.Retire(t)
	has := func(want string) {
		t.Helper()
		testenv.Within(t, want, func() bool { return strings.Contains(strings.Join(status(t, r).Problems, "\n"), want) })
	}
	has("read password of etcd")
	if _, err := r.Plan(strings.Replace(text, "host: a", "host: b", 1)); err == nil || !strings.Contains(err.Error(), "read password of etcd") {
		t.Errorf("plan: %v", err)
	}
	check(t, os.WriteFile(filepath.Join(dir, "password"), []byte("secret\n"), 0o644))
	has("has mode 0644")
	check(t, os.Chmod(filepath.Join(dir, "password"), 0o600))
	has("not connected to etcd")
}

// TestMissingInterface restarts the agent while one of two interfaces is missing: the programs of the other one stay attached.
func TestMissingInterface(t *testing.T) {
	plug(t)
	check(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "fleet2"}, PeerName: "fleet3"}))
	second, err := netlink.LinkByName("fleet2")
	check(t, err)
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	check(t, os.WriteFile(filepath.Join(dir, "hosts.yaml"), []byte(hostsText), 0o644))
	policy := strings.Replace(policyText, "[fleet0]", "[fleet0, fleet2]", 1)
	links := func() int {
		all, err := filepath.Glob(pins + "/fleet@*/ingress_*")
		check(t, err)
		return len(all) + len(filters(t, "fleet0")) + len(filters(t, "fleet2"))
	}
	s := new(services)
	r := runner(t, s, dir, pins)
	r.Start(t, policy)
	testenv.Within(t, "both interfaces", func() bool { return links() == 2 })
	r.Stop()
	check(t, netlink.LinkDel(second))
	s = new(services)
	r = runner(t, s, dir, pins)
	r.Start(t, policy)
	defer r.Stop()
	defer r.Retire(t)
	testenv.Within(t, "the table", func() bool { return s.hostOf("10.0.0.1") != "" })
	time.Sleep(2 * refreshInterval)
	if st := status(t, r); links() != 1 || !slices.Contains(st.Problems, `there is no interface "fleet2"`) || st.Reason != "an interface of the fleet is missing" {
		t.Errorf("%d links, %+v", links(), st)
	}
}

// TestSavedTable checks that a table that could not be saved is saved later, and that an agent whose saved table is older than the one
// in force does not put it in force.
func TestSavedTable(t *testing.T) {
	plug(t)
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	hosts, saved := filepath.Join(dir, "hosts.yaml"), filepath.Join(dir, tableFile)
	check(t, os.WriteFile(hosts, []byte(hostsText), 0o644))
	check(t, os.MkdirAll(filepath.Join(saved, "x"), 0o755)) // no file can take its place
	r := runner(t, new(services), dir, pins)
	r.Start(t, policyText)
	unsaved := func() bool {
		return strings.Contains(strings.Join(status(t, r).Problems, "\n"), "the table is not saved")
	}
	testenv.Within(t, "the problem", unsaved)
	check(t, os.RemoveAll(saved))
	testenv.Within(t, "the table to be saved", func() bool { return !unsaved() })
	first, err := os.ReadFile(saved)
	check(t, err)
	check(t, os.WriteFile(hosts, []byte(strings.Replace(hostsText, "epoch: 1", "epoch: 2", 1)), 0o644))
	testenv.Within(t, "the second table", func() bool { return status(t, r).Epoch == 2 })
	r.Stop()

	check(t, os.WriteFile(saved, first, 0o600))
	check(t, os.Remove(hosts))
	s := new(services)
	r = runner(t, s, dir, pins)
	r.Start(t, policyText)
	defer r.Stop()
	defer r.Retire(t)
	time.Sleep(2 * refreshInterval)
	all, err := filepath.Glob(pins + "/fleet@*/ingress_*")
	check(t, err)
	if st := status(t, r); st.Epoch != 0 || s.hostOf("10.0.0.1") != "" || len(all)+len(filters(t, "fleet0")) != 1 {
		t.Errorf("with an older table: %q, host %q, %+v", all, s.hostOf("10.0.0.1"), st)
	}
	check(t, os.WriteFile(hosts, []byte(strings.Replace(hostsText, "epoch: 1", "epoch: 2", 1)), 0o644))
	testenv.Within(t, "the table in force", func() bool { return status(t, r).Epoch == 2 && s.hostOf("10.0.0.1") != "" })
}

// TestTakenName checks that a host whose name another one has is not healthy, and has no devices.
func TestTakenName(t *testing.T) {
	r, p, here := settled(t)
	d := r.Domains[0].(*Domain)
	taken := p.state
	taken.Snapshot = &store.Snapshot{Table: taken.Table, Hosts: taken.Hosts, Connected: true, Taken: true}
	free := p.state
	p.changed(taken)
	if h := d.Health(); h.Healthy || h.Reason != "another host has the name a" || here() != 0 {
		t.Errorf("%+v, %d devices", h, here())
	}
	if st := status(t, r); len(st.Hosts) != 3 || st.Hosts[0].Name != "a" || st.Hosts[0].Path == "self" {
		t.Errorf("%+v", st.Hosts)
	}
	p.changed(free)
	if h := d.Health(); !h.Healthy || here() == 0 {
		t.Errorf("%+v, %d devices", h, here())
	}
}

// TestRenamed checks that a host that got another name serves the devices of its former name until it is in a table, unless another
// process has the former name.
func TestRenamed(t *testing.T) {
	r, p, here := settled(t)
	all := here()
	former := *p.state.Table
	former.Hosts = slices.Clone(former.Hosts)
	former.Hosts[0].Name = "former"
	hosts := slices.Clone(p.state.Hosts)
	hosts[0].Name, hosts[0].Alive = "former", false
	state := p.state
	state.Snapshot = &store.Snapshot{Table: &former, Hosts: hosts, Connected: true}
	p.changed(state)
	p.mu.Lock()
	err := p.install(&former)
	p.mu.Unlock()
	check(t, err)
	if n := here(); n != all {
		t.Errorf("%d devices are here, %d were before the host got another name", n, all)
	}
	if st := status(t, r); strings.Contains(strings.Join(st.Problems, "\n"), "is that of this host") {
		t.Errorf("problems: %q", st.Problems)
	}

	hosts = slices.Clone(hosts)
	hosts[0].Alive = true
	state.Snapshot = &store.Snapshot{Table: &former, Hosts: hosts, Connected: true}
	p.changed(state)
	if n := here(); n != 0 {
		t.Errorf("%d devices of another living host are here", n)
	}
}

// settled starts an agent with a file of hosts. From then on, the states of the participation are those of the test. here returns how many of a
// hundred devices are at this host; some are at first.
func settled(t *testing.T) (r *domaintest.Runner, p *participation, here func() int) {
	t.Helper()
	plug(t)
	dir, pins := t.TempDir(), testenv.BPFFS(t)+"/sockeye"
	check(t, os.WriteFile(filepath.Join(dir, "hosts.yaml"), []byte(hostsText), 0o644))
	s := new(services)
	r = runner(t, s, dir, pins)
	r.Start(t, policyText)
	t.Cleanup(r.Stop)
	t.Cleanup(func() { r.Retire(t) })
	d := r.Domains[0].(*Domain)
	testenv.Within(t, "health", func() bool { return d.Health().Healthy })
	here = func() (n int) {
		for i := range 100 {
			if _, _, here := s.host(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})); here {
				n++
			}
		}
		return n
	}
	if here() == 0 {
		t.Error("no device is here")
	}
	p, err := d.current()
	check(t, err)
	p.cancel()
	p.done.Wait()
	return r, p, here
}

// TestInstanceNotSaved checks that a host takes part in a fleet although its state directory is full.
func TestInstanceNotSaved(t *testing.T) {
	dir := t.TempDir()
	check(t, os.MkdirAll(filepath.Join(dir, instanceFile, "x"), 0o755))
	p := &participation{stateDir: dir, log: slog.New(slog.DiscardHandler)}
	if name, err := p.instance(); name == "" || err != nil {
		t.Errorf("%q, %v", name, err)
	}
}
