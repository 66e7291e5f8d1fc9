// SPDX-License-Identifier: Apache-2.0

package netif_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/netif/netiftest"
	"sockeye/internal/fault"
	"sockeye/internal/netns"
	"sockeye/internal/testenv"
)

var legacy = netif.Sizes{GSO: netif.Legacy, GRO: netif.Legacy, GSOIPv4: netif.Legacy, GROIPv4: netif.Legacy}

// interfaces reads all interfaces of a namespace, by name.
func interfaces(t testing.TB, n *netif.Namespace) map[string]netif.Interface {
	t.Helper()
	list, err := n.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	byName := map[string]netif.Interface{}
	for i, iface := range list {
		if i > 0 && list[i-1].Index >= iface.Index {
			t.Errorf("index %d is before %d", list[i-1].Index, iface.Index)
		}
		if iface.Related == nil {
			t.Errorf("%s: no list of related devices", iface.Name)
		}
		byName[iface.Name] = iface
	}
	return byName
}

// relations describes the relations of an interface.
func relations(i netif.Interface) string {
	var list []string
	for _, r := range i.Related {
		s := fmt.Sprintf("%s %s", r.Relation, r.Name)
		if r.Netns != "" {
			s += " in " + r.Netns
		}
		list = append(list, s)
	}
	return strings.Join(list, ", ")
}

func checkRelations(t testing.TB, got map[string]netif.Interface, want map[string]string) {
	t.Helper()
	for name, w := range want {
		if r := relations(got[name]); r != w {
			t.Errorf("%s: got %q, want %q", name, r, w)
		}
	}
}

func TestInterfaces(t *testing.T) {
	path := netiftest.NamedNetns(t, "kinds")
	h := netiftest.Kernel(t, path)
	netiftest.AddVeth(t, h, "veth0", "veth1", nil)
	netiftest.AddVeth(t, h, "veth2", "veth3", nil)
	bridge := &netlink.Bridge{LinkAttrs: netiftest.Named("bridge0")}
	netiftest.Add(t, h, bridge)
	for _, port := range []string{"veth0", "veth2"} {
		l, err := h.LinkByName(port)
		if err != nil {
			t.Fatal(err)
		}
		if err := h.LinkSetMaster(l, bridge); err != nil {
			t.Fatal(err)
		}
	}
	attrs := netiftest.Named("macvlan0")
	attrs.ParentIndex = bridge.Index
	netiftest.Add(t, h, &netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE})
	netiftest.Add(t, h, &netlink.Vxlan{LinkAttrs: netiftest.Named("vxlan0"), VxlanId: 1, Port: 4789, VtepDevIndex: bridge.Index})
	netiftest.Add(t, h, &netlink.Vxlan{LinkAttrs: netiftest.Named("vxlan1"), VxlanId: 2, Port: 4790})
	netiftest.Add(t, h, &netlink.Ifb{LinkAttrs: netiftest.Named("ifb0")})
	n := netiftest.Open(t, path)
	addTun(t, n, "tun0")
	veth3, err := h.LinkByName("veth3")
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{
		h.LinkSetMTU(veth3, 9000),
		h.LinkSetUp(veth3),
		h.LinkSetGSOMaxSize(veth3, 100001),
		h.LinkSetGROMaxSize(veth3, 100002),
		h.LinkSetGSOIPv4MaxSize(veth3, 100003),
		h.LinkSetGROIPv4MaxSize(veth3, 100004),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}

	got := interfaces(t, n)
	checkRelations(t, got, map[string]string{
		"lo":       "",
		"veth0":    "peer veth1, upper bridge0",
		"veth1":    "peer veth0",
		"bridge0":  "lower veth0, lower veth2",
		"macvlan0": "lower bridge0, lower veth0, lower veth2",
		"vxlan0":   "lower bridge0, lower veth0, lower veth2",
		"vxlan1":   "",
		"ifb0":     "",
		"tun0":     "",
	})
	sizes, none := netif.Sizes{GSO: 100001, GRO: 100002, GSOIPv4: 100003, GROIPv4: 100004}, legacy
	if olderThan(t, 6, 3) {
		sizes.GSOIPv4, sizes.GROIPv4 = 0, 0
		none.GSOIPv4, none.GROIPv4 = 0, 0
	}
	if v := got["veth3"]; v.MTU != 9000 || !v.Up || v.Sizes != sizes {
		t.Errorf("veth3 is %+v", v)
	}
	if v := got["veth2"]; v.MTU != 1500 || v.Up || v.Sizes != none || v.TSOMaxSize != netif.MaxSize || v.TSOMaxSegs != 65535 ||
		v.Offloads != (netif.Offloads{GSO: true, TSO: true}) || v.Related[0].Sizes != got["veth3"].Sizes {
		t.Errorf("veth2 is %+v", v)
	}
	for name, want := range map[string][2]string{
		"lo": {}, "veth0": {"veth", "veth"}, "bridge0": {"bridge", "bridge"}, "macvlan0": {"macvlan", "macvlan"},
		"vxlan0": {"vxlan", "vxlan"}, "ifb0": {"ifb", "ifb"}, "tun0": {"tun", "tun"},
	} {
		if i := got[name]; i.Kind != want[0] || i.Driver != want[1] {
			t.Errorf("%s: kind %q, driver %q", name, i.Kind, i.Driver)
		}
	}
	if tun := got["tun0"]; tun.Offloads.TSO || tun.TSOMaxSize != netif.Legacy {
		t.Errorf("tun0 is %+v", tun)
	}
}

// addTun adds a TUN interface without offloads.
func addTun(t testing.TB, n *netif.Namespace, name string) {
	t.Helper()
	err := n.Do(func() error {
		tun, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		t.Cleanup(func() { unix.Close(tun) })
		request, err := unix.NewIfreq(name)
		if err != nil {
			return err
		}
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		return unix.IoctlIfreq(tun, unix.TUNSETIFF, request)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestInterface(t *testing.T) {
	path := netiftest.NamedNetns(t, "byname")
	h := netiftest.Kernel(t, path)
	netiftest.AddVeth(t, h, "left0", "right0", nil)
	n := netiftest.Open(t, path)
	right, err := n.Interface("right0")
	if err != nil || right.Name != "right0" || relations(*right) != "peer left0" {
		t.Errorf("got %+v, %v", right, err)
	}
	l, err := h.LinkByName("right0")
	if err != nil {
		t.Fatal(err)
	}
	if err := h.LinkAddAltName(l, "the-long-name-of-the-right-end"); err != nil {
		t.Fatal(err)
	}
	if again, err := n.Interface("the-long-name-of-the-right-end"); err != nil || again.Index != right.Index || again.Name != "right0" {
		t.Errorf("by its other name: %+v, %v", again, err)
	}
	for name, hint := range map[string]string{
		"rihgt0":    "did you mean right0?",
		"Left0":     "did you mean left0?",
		"":          "sockeye bigtcp --all --netns " + path + " lists them",
		"enp101s0f": "sockeye bigtcp --all --netns " + path + " lists them",
	} {
		i, err := n.Interface(name)
		var e *fault.Error
		if !errors.As(err, &e) || e.Code != fault.CodeUsage || e.Hint != hint || !strings.Contains(err.Error(), path) {
			t.Errorf("%q gives %v, %v", name, i, err)
		}
	}
}

// The kernels of the tests support both families; older ones only IPv6.
func TestSupport(t *testing.T) {
	if s := netiftest.Open(t, "").Support(); s != (netif.Support{IPv6: true, IPv4: !olderThan(t, 6, 3)}) {
		t.Errorf("got %+v", s)
	}
}

func TestPeerElsewhere(t *testing.T) {
	here := netiftest.NamedNetns(t, "here")
	there := netiftest.NamedNetns(t, "there")
	process := processNetns(t)
	h := netiftest.Kernel(t, here)
	netiftest.AddVeth(t, h, "named0", "end0", netiftest.OpenFile(t, there))
	netiftest.AddVeth(t, h, "process0", "end1", netiftest.OpenFile(t, process))
	netiftest.AddVeth(t, h, "held0", "end2", netiftest.HeldNetns(t))
	other := netiftest.Kernel(t, there)
	end, err := other.LinkByName("end0")
	if err != nil {
		t.Fatal(err)
	}
	if err := other.LinkSetGSOMaxSize(end, 150000); err != nil {
		t.Fatal(err)
	}

	n := netiftest.Open(t, here)
	got := interfaces(t, n)
	checkRelations(t, got, map[string]string{
		"named0":   "peer end0 in " + there,
		"process0": "peer end1 in " + process,
		"held0":    "peer  in unknown",
	})
	if r := got["named0"].Related[0]; r.Sizes.GSO != 150000 || r.Driver != "veth" || r.TSOMaxSize != netif.MaxSize || r.Index != end.Attrs().Index {
		t.Errorf("the peer of named0 is %+v", r)
	}
	if r := got["held0"].Related[0]; r.Sizes != (netif.Sizes{}) || r.Index == 0 {
		t.Errorf("the peer of held0 is %+v", r)
	}
	one, err := n.Interface("named0")
	if err != nil || relations(*one) != "peer end0 in "+there {
		t.Errorf("named0 alone is %+v, %v", one, err)
	}
	checkRelations(t, interfaces(t, netiftest.Open(t, there)), map[string]string{"end0": "peer named0 in " + here})
}

// The ends of a pair in two namespaces may have the same index.
func TestPeerOfSameIndex(t *testing.T) {
	here, there := netiftest.NamedNetns(t, "here"), netiftest.NamedNetns(t, "there")
	netiftest.AddVeth(t, netiftest.Kernel(t, here), "end0", "end1", netiftest.OpenFile(t, there))
	n := netiftest.Open(t, here)
	got := interfaces(t, n)
	if i := got["end0"]; i.Index != i.Related[0].Index || relations(i) != "peer end1 in "+there {
		t.Errorf("got %+v", i)
	}
}

// An interface may have been moved away from its lower interface.
func TestLowerElsewhere(t *testing.T) {
	host, pod := netiftest.NamedNetns(t, "host"), netiftest.NamedNetns(t, "pod")
	h := netiftest.Kernel(t, host)
	netiftest.AddVeth(t, h, "port0", "port1", nil)
	bridge := &netlink.Bridge{LinkAttrs: netiftest.Named("bridge0")}
	netiftest.Add(t, h, bridge)
	port, err := h.LinkByName("port0")
	if err != nil {
		t.Fatal(err)
	}
	if err := h.LinkSetMaster(port, bridge); err != nil {
		t.Fatal(err)
	}
	attrs := netiftest.Named("macvlan0")
	attrs.ParentIndex = bridge.Index
	moved := []netlink.Link{
		&netlink.Macvlan{LinkAttrs: attrs, Mode: netlink.MACVLAN_MODE_BRIDGE},
		&netlink.Vxlan{LinkAttrs: netiftest.Named("vxlan0"), VxlanId: 1, Port: 4789, VtepDevIndex: bridge.Index},
		&netlink.Vxlan{LinkAttrs: netiftest.Named("vxlan1"), VxlanId: 2, Port: 4790},
	}
	for _, l := range moved {
		netiftest.Add(t, h, l)
		if err := h.LinkSetNsFd(l, int(netiftest.OpenFile(t, pod).Fd())); err != nil {
			t.Fatal(err)
		}
	}
	got := interfaces(t, netiftest.Open(t, pod))
	below := fmt.Sprintf("lower bridge0 in %s, lower port0 in %[1]s", host)
	checkRelations(t, got, map[string]string{"macvlan0": below, "vxlan0": below, "vxlan1": ""})
	macvlan := got["macvlan0"]
	if size, by := macvlan.Bound(); size != netif.MaxSize || by != "port0 in "+host {
		t.Errorf("macvlan0 is bound to %d by %s", size, by)
	}
}

// Without privileges, peers in other namespaces are reported without details.
func TestPeerWithoutRights(t *testing.T) {
	there := netiftest.NamedNetns(t, "there")
	h := netiftest.Kernel(t, "")
	netiftest.AddVeth(t, h, "here0", "there0", netiftest.OpenFile(t, there))
	testenv.WithoutRights(t, func() {
		n, err := netif.OpenNamespace("")
		if err != nil {
			t.Fatal(err)
		}
		defer n.Close()
		checkRelations(t, interfaces(t, n), map[string]string{"here0": "peer  in unknown"})
	})
	checkRelations(t, interfaces(t, netiftest.Open(t, "")), map[string]string{"here0": "peer there0 in " + there})
}

func TestNamespaceVanishes(t *testing.T) {
	here, there := netiftest.NamedNetns(t, "here"), netiftest.NamedNetns(t, "there")
	netiftest.AddVeth(t, netiftest.Kernel(t, here), "here0", "there0", netiftest.OpenFile(t, there))
	n, gone := netiftest.Open(t, here), netiftest.Open(t, there)
	checkRelations(t, interfaces(t, n), map[string]string{"here0": "peer there0 in " + there})
	// An open Namespace keeps its network namespace alive, also after the name is removed.
	netiftest.RemoveNetns(there)
	checkRelations(t, interfaces(t, gone), map[string]string{"there0": "peer here0 in " + here})
	if _, err := netif.OpenNamespace(there); err == nil {
		t.Error("the path still leads to a namespace")
	}
}

func TestConcurrentReads(t *testing.T) {
	n := netiftest.Open(t, netiftest.NamedNetns(t, "shared"))
	done := make(chan error)
	for range 4 {
		go func() {
			for range 20 {
				list, err := n.Interfaces()
				if err == nil && (len(list) != 1 || list[0].Name != "lo") {
					err = fmt.Errorf("read %+v", list)
				}
				if err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for range 4 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// Interfaces and namespaces come and go while they are read.
func TestReadsWhileAllChanges(t *testing.T) {
	here := netiftest.NamedNetns(t, "here")
	netiftest.Add(t, netiftest.Kernel(t, here), &netlink.Bridge{LinkAttrs: netiftest.Named("renamed0")})
	n := netiftest.Open(t, here)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	done := make(chan error)
	for _, change := range []func(*netlink.Handle, int) error{comeAndGo, comeAndGoElsewhere, rename} {
		h := netiftest.Kernel(t, here)
		go func() {
			for i := 0; ctx.Err() == nil; i++ {
				if err := change(h, i); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	reads, seen := 0, 0
	for begin := time.Now(); ctx.Err() == nil && (reads < 10 || seen < 2 || time.Since(begin) < 2*time.Second); reads++ {
		list, err := n.Interfaces()
		if err != nil {
			t.Error(err)
			break
		}
		for _, i := range list {
			if strings.HasPrefix(i.Name, "renamed") && i.Driver != "bridge" {
				t.Errorf("read %+v", i)
			}
		}
		seen = max(seen, len(list))
	}
	cancel()
	for range 3 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if reads < 10 || seen < 2 {
		t.Errorf("read %d times, at most %d interfaces", reads, seen)
	}
}

func comeAndGo(h *netlink.Handle, i int) error {
	v := &netlink.Veth{LinkAttrs: netiftest.Named(fmt.Sprintf("come%d", i)), PeerName: fmt.Sprintf("go%d", i)}
	if err := h.LinkAdd(v); err != nil {
		return err
	}
	return h.LinkDel(v)
}

func rename(h *netlink.Handle, i int) error {
	l, err := h.LinkByName(fmt.Sprintf("renamed%d", i))
	if err != nil {
		return err
	}
	return h.LinkSetName(l, fmt.Sprintf("renamed%d", i+1))
}

// comeAndGoElsewhere adds a veth pair into a namespace that is removed at once, together
// with the pair.
func comeAndGoElsewhere(h *netlink.Handle, i int) error {
	return netns.Thread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		there, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			return err
		}
		defer there.Close()
		return h.LinkAdd(&netlink.Veth{
			LinkAttrs:     netiftest.Named(fmt.Sprintf("far%d", i)),
			PeerName:      "away0",
			PeerNamespace: netlink.NsFd(int(there.Fd())),
		})
	})
}

func TestNoDescriptorLeaks(t *testing.T) {
	here, there, process := netiftest.NamedNetns(t, "here"), netiftest.NamedNetns(t, "there"), processNetns(t)
	h := netiftest.Kernel(t, here)
	netiftest.AddVeth(t, h, "named0", "end0", netiftest.OpenFile(t, there))
	netiftest.AddVeth(t, h, "process0", "end1", netiftest.OpenFile(t, process))
	netiftest.AddVeth(t, h, "held0", "end2", netiftest.HeldNetns(t))
	use := func() {
		n, err := netif.OpenNamespace(here)
		if err != nil {
			t.Fatal(err)
		}
		interfaces(t, n)
		if _, err := n.Interface("none"); err == nil {
			t.Error("there is an interface none")
		}
		watchOnce(t, n)
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		for _, path := range []string{"/no/such", "/dev/null", "/etc/passwd"} {
			if _, err := netif.OpenNamespace(path); err == nil {
				t.Errorf("%s is a network namespace", path)
			}
		}
		testenv.WithoutRights(t, func() {
			if _, err := netif.OpenNamespace(there); err == nil {
				t.Error("entered without rights")
			}
		})
	}
	use()
	before := netiftest.Descriptors(t)
	for range 20 {
		use()
	}
	if after := netiftest.Descriptors(t); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}
