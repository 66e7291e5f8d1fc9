// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/cli/bigtcpcmd"
	"sockeye/internal/cli/command"
	"sockeye/internal/netns"
)

// newBigTCPHost returns a host without an agent. Its state directory does not exist yet.
func newBigTCPHost(t testing.TB) *host {
	t.Helper()
	h := newHost(t, "bigtcp: []\n")
	network, err := netif.OpenNamespace("")
	if err != nil {
		t.Fatal(err)
	}
	defer network.Close()
	if !network.Support().IPv4 {
		t.Skip("kernel: no sizes of IPv4 before Linux 6.3")
	}
	return h
}

// link creates an interface and deletes it when the test ends.
func (h *host) link(l netlink.Link) {
	h.t.Helper()
	if err := netlink.LinkAdd(l); err != nil {
		h.t.Fatalf("add %s: %v", l.Attrs().Name, err)
	}
	h.t.Cleanup(func() { h.unlink(l.Attrs().Name) })
}

func (h *host) unlink(name string) {
	h.t.Helper()
	if l, err := netlink.LinkByName(name); err == nil {
		if err := netlink.LinkDel(l); err != nil {
			h.t.Errorf("remove %s: %v", name, err)
		}
	}
}

func attributesOf(name string) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name = name
	return a
}

// veth creates a veth pair NAME and NAMEp for each name.
func (h *host) veth(names ...string) {
	h.t.Helper()
	for _, name := range names {
		h.link(&netlink.Veth{LinkAttrs: attributesOf(name), PeerName: name + "p"})
	}
}

// bridge creates a bridge with the given ports.
func (h *host) bridge(name string, ports ...string) {
	h.t.Helper()
	b := &netlink.Bridge{LinkAttrs: attributesOf(name)}
	h.link(b)
	for _, port := range ports {
		l, err := netlink.LinkByName(port)
		if err == nil {
			err = netlink.LinkSetMaster(l, b)
		}
		if err != nil {
			h.t.Fatal(err)
		}
	}
}

// tun creates a TUN interface, whose driver does not support BIG TCP.
func (h *host) tun(name string) {
	h.t.Helper()
	h.link(&netlink.Tuntap{LinkAttrs: attributesOf(name), Mode: netlink.TUNTAP_MODE_TUN})
}

// sizes returns the sizes of an interface as the kernel reports them: gso, gro, gso_ipv4 and gro_ipv4.
func (h *host) sizes(name string) [4]int {
	h.t.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		h.t.Fatal(err)
	}
	a := l.Attrs()
	return [4]int{int(a.GSOMaxSize), int(a.GROMaxSize), int(a.GSOIPv4MaxSize), int(a.GROIPv4MaxSize)}
}

func (h *host) has(name string, want ...int) {
	h.t.Helper()
	if len(want) == 1 {
		want = slices.Repeat(want, 4)
	}
	if got := h.sizes(name); !slices.Equal(got[:], want) {
		h.t.Errorf("%s has %d, want %d", name, got, want)
	}
}

// tamper sets a size of an interface without Sockeye, as another administrator would.
func (h *host) tamper(name string, gso int) {
	h.t.Helper()
	l, err := netlink.LinkByName(name)
	if err == nil {
		err = netlink.LinkSetGSOMaxSize(l, gso)
	}
	if err != nil {
		h.t.Fatal(err)
	}
}

// newNetns creates a network namespace, runs f in it unless f is nil, and returns its path.
func (h *host) newNetns(name string, f func() error) string {
	h.t.Helper()
	path := h.write(name, "")
	err := netns.Thread(func() error {
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
		}
		if err == nil && f != nil {
			err = f()
		}
		return err
	})
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	return path
}

// bigtcp runs a subcommand of bigtcp with the state directory of the host.
func (h *host) bigtcp(args string) result {
	h.t.Helper()
	return h.sockeye(h.bigtcpArgs(args)...)
}

func (h *host) bigtcpArgs(args string) []string {
	return append([]string{"bigtcp"}, append(strings.Fields(strings.ReplaceAll(args, "DIR", h.dir)), "--state-dir", h.state)...)
}

// prints runs a subcommand of bigtcp and compares its output with want.
func (h *host) prints(want, args string) {
	h.t.Helper()
	h.shows(want, nil, h.bigtcpArgs(args)...)
}

// refuses runs a subcommand of bigtcp that must fail.
func (h *host) refuses(code int, message, hint, args string) {
	h.t.Helper()
	h.refused(code, message, hint, nil, h.bigtcpArgs(args)...)
}

// asJSON runs a subcommand of bigtcp with -o json and decodes its output.
func asJSON[T any](h *host, args string) T {
	h.t.Helper()
	return must[T](h, h.bigtcpArgs(args)...)
}

// setBy sets sizes and records them as the work of the given owner.
func (h *host) setBy(owner sizing.Owner, size uint32, names ...string) {
	h.t.Helper()
	store, err := sizing.OpenStore(h.state)
	if err != nil {
		h.t.Fatal(err)
	}
	network, err := netif.OpenNamespace("")
	if err != nil {
		h.t.Fatal(err)
	}
	defer network.Close()
	var targets []sizing.Target
	for _, name := range names {
		targets = append(targets, sizing.Target{Interface: name, Want: sizing.Want{IPv6: size, IPv4: size}})
	}
	if _, err := store.Apply(network, owner, targets, false); err != nil {
		h.t.Fatal(err)
	}
}

const forNew = "only new connections use the new sizes; open ones keep theirs until their route is looked up again\n"

// TestBigTCP runs the commands of an operator in order: show, plan, apply, show, revert.
func TestBigTCP(t *testing.T) {
	h := newBigTCPHost(t)
	h.veth("cli0")
	h.prints(`
INTERFACE  KIND  TSO MAX  IPV6 SEND/RECEIVE  IPV4 SEND/RECEIVE  REQUESTED IPV6/IPV4
cli0  veth  524280  65536/65536  65536/65536  -
  off, possible up to 524280 bytes
  peer cli0p: veth, TSO max 524280, sizes 65536
`, "cli0")
	changes := `
INTERFACE  FAMILY  SEND  RECEIVE
cli0  IPv6  65536 -> 192000  65536 -> 192000
  IPv4  65536 -> 192000  65536 -> 192000
1 interface `
	h.prints(changes+"would change\n"+forNew, "plan cli0")
	h.has("cli0", 65536)
	if _, err := os.Stat(h.state); !os.IsNotExist(err) {
		t.Errorf("plan created the state directory: %v", err)
	}
	h.prints("nothing to revert\n", "revert")
	h.prints(changes+"changed\n"+forNew, "apply cli0")
	h.has("cli0", 192000)
	h.has("cli0p", 65536)
	h.prints("unchanged: cli0\nnothing changed\n", "apply cli0")
	h.prints("unchanged: cli0\nnothing would change\n", "plan cli0")
	h.prints(`
INTERFACE  KIND  TSO MAX  IPV6 SEND/RECEIVE  IPV4 SEND/RECEIVE  REQUESTED IPV6/IPV4
cli0  veth  524280  192000/192000  192000/192000  192000/192000
  on: IPv6 192000 bytes, IPv4 192000 bytes
  requested by sockeye bigtcp apply
  peer cli0p: veth, TSO max 524280, sizes 65536
`, "cli0")
	shown := asJSON[bigtcpcmd.Shown](h, "")
	at := slices.IndexFunc(shown.Interfaces, func(i bigtcpcmd.Interface) bool { return i.Name == "cli0" })
	if at < 0 || shown.Interfaces[0].Name != "lo" || !shown.Support.IPv6 || !shown.Support.IPv4 || len(shown.Problems) > 0 {
		t.Fatalf("%+v", shown)
	}
	i := shown.Interfaces[at]
	want := bigtcpcmd.Requested{Want: sizing.Want{IPv6: 192000, IPv4: 192000}, By: "command", State: "set"}
	if !reflect.DeepEqual(i.Requested, &want) ||
		i.Bound != (bigtcpcmd.Bound{Size: 524280, By: "cli0"}) || i.Verdict.State != netif.On || i.Sizes != allSizes(192000) || len(i.Related) != 1 {
		t.Errorf("%+v, requested %+v", i, i.Requested)
	}
	h.prints(`
INTERFACE  FAMILY  SEND  RECEIVE
cli0  IPv6  192000 -> 65536  192000 -> 65536
  IPv4  192000 -> 65536  192000 -> 65536
1 interface reverted
`+forNew, "revert cli0")
	h.has("cli0", 65536)
	h.prints("nothing to revert\n", "revert cli0")
	h.prints("nothing to revert\n", "revert")
}

// TestBigTCPFamilies checks that each family has its own size, and that a family that the command does not name keeps
// its size.
func TestBigTCPFamilies(t *testing.T) {
	h := newBigTCPHost(t)
	h.veth("cli0", "cli1")
	for _, c := range []struct {
		args string
		want []int
	}{
		{"--ipv6 192KB", []int{192000, 192000, 65536, 65536}},
		{"--ipv4 192KiB", []int{192000, 192000, 196608, 196608}},
		{"--ipv6 off", []int{65536, 65536, 196608, 196608}},
		{"--ipv6 524280 --ipv4=524280B", []int{524280}},
		{"--ipv4 0.1MB", []int{524280, 524280, 100000, 100000}},
		{"--ipv6 64KiB --ipv4 off", []int{65536}},
		{"--ipv4 65537", []int{65536, 65536, 65537, 65537}},
		{"", []int{192000}},
	} {
		if r := h.bigtcp("apply cli0 cli1 " + c.args); r.code != 0 || r.err != "" {
			t.Errorf("%s: %+v", c.args, r)
		}
		h.has("cli0", c.want...)
		h.has("cli1", c.want...)
	}
	if r := h.bigtcp("revert"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	h.has("cli0", 65536)
	h.has("cli1", 65536)
}

// TestBigTCPPath checks that apply changes a bridge and all its ports or nothing, and that revert restores all of
// them.
func TestBigTCPPath(t *testing.T) {
	h := newBigTCPHost(t)
	h.veth("cli0", "cli1")
	h.bridge("clibr", "cli0", "cli1")
	h.prints(`
INTERFACE  FAMILY  SEND  RECEIVE
cli0  IPv6  65536 -> 300000  65536 -> 300000
  as a lower interface of clibr
cli1  IPv6  65536 -> 300000  65536 -> 300000
  as a lower interface of clibr
clibr  IPv6  65536 -> 300000  65536 -> 300000
3 interfaces changed
`+forNew, "apply clibr --ipv6 300KB")
	for _, name := range []string{"cli0", "cli1", "clibr"} {
		h.has(name, 300000, 300000, 65536, 65536)
	}
	if r := h.bigtcp("cli0"); !strings.Contains(r.out, "\n  requested by sockeye bigtcp apply, as a lower interface of clibr\n") {
		t.Errorf("%+v", r)
	}
	if w := asJSON[bigtcpcmd.Shown](h, "cli1").Interfaces[0].Requested; w == nil || !slices.Equal(w.For, []string{"clibr"}) {
		t.Errorf("%+v", w)
	}
	h.refuses(5, "cli0 was set as a lower interface of clibr", "revert the upper interface, or use --force", "revert cli0")
	h.has("cli0", 300000, 300000, 65536, 65536)
	if r := h.bigtcp("revert clibr"); r.code != 0 || !strings.HasSuffix(r.out, "\n3 interfaces reverted\n"+forNew) {
		t.Errorf("%+v", r)
	}
	for _, name := range []string{"cli0", "cli1", "clibr"} {
		h.has(name, 65536)
	}

	h.tun("clitun")
	impossible := "clitun (tun) supports packets of at most 65536 bytes"
	h.refuses(3, impossible, "", "plan cli0 clitun")
	h.refuses(3, impossible, "", "apply cli0 clitun")
	h.has("cli0", 65536)
	// The size "off" is accepted on every interface.
	h.prints("unchanged: clitun\nnothing changed\n", "apply clitun --ipv6 off")
}

// TestBigTCPChangedSince checks that revert reports sizes that another program changed after apply, and does not
// touch them.
func TestBigTCPChangedSince(t *testing.T) {
	h := newBigTCPHost(t)
	h.veth("cli0", "cli1")
	if r := h.bigtcp("apply cli0 cli1"); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	h.tamper("cli0", 100000)
	if r := h.bigtcp("cli0"); !strings.Contains(r.out, "\n  requested by sockeye bigtcp apply; somebody else has changed it since\n") {
		t.Errorf("%+v", r)
	}
	if w := asJSON[bigtcpcmd.Shown](h, "cli0").Interfaces[0].Requested; w == nil || w.State != "changed" {
		t.Errorf("%+v", w)
	}
	for name, noted := range map[string]bool{"cli0": true, "cli1": false} {
		r := h.bigtcp("verify " + name + " --for 100ms")
		if r.code != 0 || strings.Contains(r.out, "\nsizes: requested by sockeye bigtcp apply; somebody else has changed it since\n") != noted {
			t.Errorf("%s: %+v", name, r)
		}
	}
	for _, args := range []string{"plan cli0 --ipv6 200KB", "apply cli0 --ipv6 200KB"} {
		h.refuses(5, "the sizes of cli0 were changed externally: gso_max_size 100000 instead of 192000", "--force overwrites them; its previous sizes stay recorded", args)
	}
	h.has("cli0", 100000, 192000, 192000, 192000)

	// The other interfaces are reverted.
	message, hint := "sizes changed externally: cli0 (gso_max_size 100000 instead of 192000)", "--force restores the previous sizes"
	r := h.bigtcp("revert")
	if r.code != 5 || !strings.Contains(r.out, "1 interface reverted\n") || !strings.Contains(r.out, "not reverted, because somebody else has changed the sizes: cli0\n") || r.err != "sockeye: "+message+"\nhint: "+hint+"\n" {
		t.Errorf("%+v", r)
	}
	h.has("cli0", 100000, 192000, 192000, 192000)
	h.has("cli1", 65536)
	r = h.bigtcp("revert -o json")
	var answer bigtcpcmd.Reverted
	if err := json.Unmarshal([]byte(r.out), &answer); err != nil || r.code != 5 || r.err != "" || len(answer.Reverted) != 1 || answer.Reverted[0].Result != "changed" ||
		answer.Error != message || answer.Hint != hint || answer.Code != 5 {
		t.Errorf("%v in %+v", err, r)
	}
	if r := h.bigtcp("revert --force"); r.code != 0 || r.err != "" {
		t.Errorf("%+v", r)
	}
	h.has("cli0", 65536)
}

// TestBigTCPOfThePolicy checks that commands refuse to change interfaces of the agent's policy.
func TestBigTCPOfThePolicy(t *testing.T) {
	h := newBigTCPHost(t)
	h.veth("cli0", "cli1", "cli2")
	h.setBy(sizing.ByPolicy, 192000, "cli0")
	h.setBy(sizing.ByCommand, 185000, "cli1")
	h.setBy(sizing.ByCommand, 185000, "cli2")
	for _, args := range []string{"plan cli0 --ipv6 off", "apply cli0 --ipv6 off", "apply cli2 cli0"} {
		h.refuses(5, "sizes of cli0 were set by the agent's policy", "--force takes it over; its previous sizes stay recorded", args)
	}
	h.refuses(5, "cli0 was set by the agent for its policy", "remove its rule from the policy file and run sockeye apply, or use --force", "revert cli0")
	h.refuses(5, "cli0 was set by the agent for its policy", "remove its rule from the policy file and run sockeye apply, or use --force", "revert cli2 cli0")
	h.has("cli2", 185000)
	if r := h.bigtcp("revert"); r.code != 0 || !strings.HasSuffix(r.out, "\n2 interfaces reverted\n"+forNew) {
		t.Errorf("%+v", r)
	}
	h.has("cli0", 192000)
	h.has("cli1", 65536)
	h.has("cli2", 65536)
	h.prints("nothing to revert\n", "revert")
	if r := h.bigtcp("cli0"); !strings.Contains(r.out, "\n  requested by the agent's policy\n") {
		t.Errorf("%+v", r)
	}
	if r := h.bigtcp("revert cli0 --force"); r.code != 0 || !strings.HasSuffix(r.out, "\n1 interface reverted\n"+forNew) {
		t.Errorf("%+v", r)
	}
	h.has("cli0", 65536)

	h.setBy(sizing.ByPolicy, 192000, "cli0")
	if r := h.bigtcp("apply cli0 --ipv6 200KB --force"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	h.has("cli0", 200000, 200000, 192000, 192000)
	if r := h.bigtcp("revert cli0"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	h.has("cli0", 65536)
}

// TestBigTCPBesideAgent checks that commands do not revert the sizes of a running agent, and that the agent does not revert
// the sizes of commands.
func TestBigTCPBesideAgent(t *testing.T) {
	h := newBigTCPHost(t)
	h.veth("cli0", "cli1")
	h.write("policy.yaml", "bigtcp:\n  - {interface: cli0, ipv6: 192KB, ipv4: 192KB}\n")
	h.start()
	h.eventually("the agent sets the sizes of its policy", func() bool { return h.sizes("cli0") == [4]int{192000, 192000, 192000, 192000} })
	h.refuses(5, "sizes of cli0 were set by the agent's policy", "--force takes it over; its previous sizes stay recorded", "apply cli0 --ipv4 off")
	h.refuses(5, "sizes of cli0 were set by the agent's policy", "--force takes it over; its previous sizes stay recorded", "apply --policy DIR/policy.yaml")
	h.refuses(5, "cli0 was set by the agent for its policy", "remove its rule from the policy file and run sockeye apply, or use --force", "revert cli0")
	h.has("cli0", 192000)
	if r := h.bigtcp("apply cli1"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	if r := h.bigtcp("cli0"); !strings.Contains(r.out, "\n  requested by the agent's policy\n") {
		t.Errorf("%+v", r)
	}

	h.write("policy.yaml", "bigtcp:\n  - {interface: other0, ipv6: 192KB}\n")
	if r := h.sockeye("apply"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	h.has("cli0", 65536)
	h.has("cli1", 192000)
	if r := h.bigtcp("apply cli0"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	if r := h.bigtcp("revert"); r.code != 0 || !strings.HasSuffix(r.out, "\n2 interfaces reverted\n"+forNew) {
		t.Errorf("%+v", r)
	}
	h.has("cli0", 65536)
	h.has("cli1", 65536)
}

// TestBigTCPGone checks that a deleted interface is forgotten, and that a new interface of the same name is not
// reverted.
func TestBigTCPGone(t *testing.T) {
	h := newBigTCPHost(t)
	h.veth("cli0", "cli1")
	if r := h.bigtcp("apply cli0 cli1"); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	h.unlink("cli0")
	h.veth("cli0")
	h.tamper("cli0", 70000)
	h.prints("nothing to revert\n", "revert cli0")
	h.has("cli0", 70000, 65536, 65536, 65536)
	h.unlink("cli1")
	h.prints("no longer exists: cli1\n", "revert cli1")
	h.refuses(2, `there is no interface "cli1"`, "did you mean cli0?", "revert cli1")
	h.prints("no longer exists: cli0\n", "revert")
	h.prints("nothing to revert\n", "revert")
	h.has("cli0", 70000, 65536, 65536, 65536)
}

func TestBigTCPNetns(t *testing.T) {
	h := newBigTCPHost(t)
	h.veth("cli0")
	path := h.newNetns("blue", func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attributesOf("cli0"), PeerName: "cli1"})
	})
	inside := func(want uint32) {
		t.Helper()
		if got := asJSON[bigtcpcmd.Shown](h, "cli0 --netns "+path).Interfaces[0].Sizes; got != allSizes(want) {
			t.Errorf("inside cli0 has %+v, want %d", got, want)
		}
	}
	h.prints(`
INTERFACE  FAMILY  SEND  RECEIVE
cli0  IPv6  65536 -> 192000  65536 -> 192000
  IPv4  65536 -> 192000  65536 -> 192000
  in DIR/blue
1 interface changed
`+forNew, "apply cli0 --netns DIR/blue")
	h.has("cli0", 65536)
	inside(192000)
	if r := h.bigtcp("cli0 --netns DIR/blue"); !strings.HasPrefix(h.plain(r.out), "network namespace DIR/blue\n\nINTERFACE") || !strings.Contains(r.out, "\n  requested by sockeye bigtcp apply\n") {
		t.Errorf("%+v", r)
	}
	if r := h.bigtcp("cli0"); strings.Contains(r.out, "requested by") {
		t.Errorf("the namesake: %+v", r)
	}
	h.prints("nothing to revert\n", "revert cli0")
	h.refuses(2, `there is no interface "cli00" in DIR/blue`, "did you mean cli0?", "revert cli00 --netns DIR/blue")
	if r := h.bigtcp("revert --netns DIR/blue"); r.code != 0 || !strings.Contains(r.out, "1 interface reverted\n") {
		t.Errorf("%+v", r)
	}
	inside(65536)

	if r := h.bigtcp("apply cli0 --netns DIR/blue"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	h.refuses(2, "open network namespace: open DIR/blue: no such file or directory", "give the path of a network namespace, as in /run/netns/NAME", "revert cli7 --netns DIR/blue")
	h.prints("no longer exists: cli0 in DIR/blue\n", "revert cli0 --netns DIR/blue")
	h.prints("nothing to revert\n", "revert")
}

// TestBigTCPByFile checks that the commands use the policy file if no interface is named.
func TestBigTCPByFile(t *testing.T) {
	h := newBigTCPHost(t)
	h.veth("cli0", "cli1")
	h.tun("clitun")
	path := h.newNetns("blue", func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attributesOf("inner0"), PeerName: "inner1"})
	})
	h.write("policy.yaml", `bigtcp:
  - {interface: cli1, ipv6: 185000}
  - {interface: "cli?", ipv6: 192KB, ipv4: 192KB}
  - {interface: "clit*", ipv6: 192KB, ipv4: 192KB}
  - {interface: eth9, ipv6: 192KB}
  - {interface: inner0, ipv6: 192KB, ipv4: off, netns: DIR/blue}
  - {interface: "*", ipv6: 192KB, netns: DIR/red}
`)
	if r := h.bigtcp("cli0 --policy DIR/policy.yaml"); !strings.Contains(r.out, "192000/192000\n") || !strings.Contains(r.out, "\n  requested by the policy file; not applied\n") {
		t.Errorf("%+v", r)
	}
	if w := asJSON[bigtcpcmd.Shown](h, "inner0 --policy DIR/policy.yaml --netns "+path).Interfaces[0].Requested; w == nil || w.IPv4 != 65536 || w.By != "file" || w.State != "unset" {
		t.Errorf("%+v", w)
	}
	changes := `
INTERFACE  FAMILY  SEND  RECEIVE
cli0  IPv6  65536 -> 192000  65536 -> 192000
  IPv4  65536 -> 192000  65536 -> 192000
cli1  IPv6  65536 -> 185000  65536 -> 185000
inner0  IPv6  65536 -> 192000  65536 -> 192000
  in DIR/blue
skipped clitun: impossible: clitun (tun) supports packets of at most 65536 bytes
skipped eth9: there is no such interface
skipped * in DIR/red: there is no such network namespace
3 interfaces `
	h.prints(changes+"would change\n"+forNew, "plan --policy DIR/policy.yaml")
	h.has("cli0", 65536)
	h.prints(changes+"changed\n"+forNew, "apply --policy DIR/policy.yaml")
	h.has("cli0", 192000)
	h.has("cli1", 185000, 185000, 65536, 65536)
	if r := h.bigtcp("revert"); r.code != 0 || !strings.Contains(r.out, "3 interfaces reverted\n") {
		t.Errorf("%+v", r)
	}

	for file, want := range map[string]string{
		"bad.yaml":  "DIR/bad.yaml has 2 errors; sockeye check DIR/bad.yaml shows them",
		"none.yaml": "read policy file: open DIR/none.yaml: no such file or directory",
	} {
		h.write("bad.yaml", "bigtcp:\n  - {interface: cli0, ipv6: 1KB}\n  - {interface: cli1, ipv6: 1KB}\n")
		shown := asJSON[bigtcpcmd.Shown](h, "cli0 --policy DIR/"+file)
		if len(shown.Problems) != 1 || h.plain(shown.Problems[0]) != "rules of the policy: "+want {
			t.Errorf("%s: %q", file, shown.Problems)
		}
	}

	// An interface on the command line must support the size.
	h.write("policy.yaml", "bigtcp:\n  - {interface: cli0, ipv6: 192KB}\n  - {interface: clitun, ipv6: 192KB}\n")
	h.refuses(3, "clitun (tun) supports packets of at most 65536 bytes", "", "apply --policy DIR/policy.yaml")
	h.has("cli0", 65536)
}

// TestBigTCPRefusals checks that a wrong command prints one line and a hint, and changes nothing.
func TestBigTCPRefusals(t *testing.T) {
	h := newBigTCPHost(t)
	h.veth("cli0")
	h.write("file", "")
	h.write("services.yaml", "services: {a: {slots: 1, listeners: [{protocol: tcp, address: '[::]:1790'}]}}\n")
	h.write("bad.yaml", "bigtcp:\n  - {interface: eth0, ipv6: 1KB}\n")
	if err := unix.Mkfifo(filepath.Join(h.dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	size := "65536 to 524280 bytes, as in 192KB or 192KiB, or off"
	netns := "give the path of a network namespace, as in /run/netns/NAME"
	for _, c := range []struct {
		args          string
		code          int
		message, hint string
	}{
		{"cli1", 2, `there is no interface "cli1"`, "did you mean cli0?"},
		{"zzzzzzzzz", 2, `there is no interface "zzzzzzzzz"`, "sockeye bigtcp --all lists them"},
		{"cli0 plna", 2, `there is no interface "plna"`, "sockeye bigtcp --all lists them"},
		{"aplpy cli0", 2, `unknown command "aplpy"`, "did you mean sockeye bigtcp apply?"},
		{"rever", 2, `unknown command "rever"`, "did you mean sockeye bigtcp revert?"},
		{"plan cli0 cli1", 2, `there is no interface "cli1"`, "did you mean cli0?"},
		{"apply cli0 cli1", 2, `there is no interface "cli1"`, "did you mean cli0?"},
		{"revert cli1", 2, `there is no interface "cli1"`, "did you mean cli0?"},
		{"apply cli0 --ipv6 1KB", 2, `--ipv6 is "1KB"`, size},
		{"apply cli0 --ipv6 65535", 2, `--ipv6 is "65535"`, size},
		{"apply cli0 --ipv4 524281", 2, `--ipv4 is "524281"`, size},
		{"apply cli0 --ipv4 1GB", 2, `--ipv4 is "1GB"`, size},
		{"apply cli0 --ipv4 192kb", 2, `--ipv4 is "192kb"`, size},
		{"apply cli0 --ipv4 many", 2, `--ipv4 is "many"`, size},
		{"apply cli0 --ipv4=-1", 2, `--ipv4 is "-1"`, size},
		{"apply cli0 --ipv4=", 2, `--ipv4 is ""`, size},
		{"apply cli0 --ipv4 99999999999999999999KB", 2, `--ipv4 is "99999999999999999999KB"`, size},
		{"plan cli0 --ipv6 0", 2, `--ipv6 is "0"`, size},
		{"plan cli0 --ip6 192KB", 2, "unknown flag: --ip6", "did you mean --ipv6?"},
		{"apply cli0 --netns /etc/passwd", 2, "open network namespace: /etc/passwd is not a network namespace", netns},
		{"apply cli0 --netns DIR", 2, "open network namespace: DIR is not a network namespace", netns},
		{"apply cli0 --netns DIR/fifo", 2, "open network namespace: DIR/fifo is not a network namespace", netns},
		{"apply cli0 --netns /proc/self/ns/mnt", 2, "open network namespace: /proc/self/ns/mnt is not a network namespace", netns},
		{"apply cli0 --netns /run/netns/nosuch", 2, "open network namespace: open /run/netns/nosuch: no such file or directory", netns},
		{"cli0 --netns /run/netns/nosuch", 2, "open network namespace: open /run/netns/nosuch: no such file or directory", netns},
		{"revert cli0 --netns /etc/passwd", 2, "open network namespace: /etc/passwd is not a network namespace", netns},
		{"apply cli0 --policy DIR/policy.yaml", 2, "--policy and INTERFACE are mutually exclusive", "usage: sockeye bigtcp apply [INTERFACE...] [flags]"},
		{"apply --ipv6 192KB", 2, "--ipv6 requires INTERFACE", "usage: sockeye bigtcp apply [INTERFACE...] [flags]"},
		{"plan --ipv4 192KB", 2, "--ipv4 requires INTERFACE", "usage: sockeye bigtcp plan [INTERFACE...] [flags]"},
		{"plan --netns /proc/self/ns/net", 2, "--netns requires INTERFACE", "usage: sockeye bigtcp plan [INTERFACE...] [flags]"},
		{"apply --policy DIR/none.yaml", 2, "read policy file: open DIR/none.yaml: no such file or directory", "name a policy file"},
		{"apply --policy DIR/services.yaml", 2, "DIR/services.yaml has no bigtcp rules", "name an interface, or another file with --policy"},
		{"apply --policy DIR/bad.yaml", 2, `DIR/bad.yaml:2:29: bigtcp[0].ipv6: must be off or 65536 to 524280 bytes, is "1KB"`, ""},
	} {
		h.refuses(c.code, c.message, c.hint, c.args)
	}
	if _, err := os.Stat(h.state); !os.IsNotExist(err) {
		t.Errorf("the state directory exists: %v", err)
	}
	for _, c := range []struct {
		state         string
		code          int
		message, hint string
	}{
		{"DIR/file", 2, "state directory DIR/file is not a directory", ""},
		{"/proc/nosuch", 1, "create state directory: mkdir /proc/nosuch: no such file or directory", ""},
		{"", 2, "no state directory", ""},
	} {
		h.refused(c.code, c.message, c.hint, nil, "bigtcp", "apply", "cli0", "--state-dir", strings.ReplaceAll(c.state, "DIR", h.dir))
	}
	h.has("cli0", 65536)
}

// TestBigTCPWithoutRights checks that a user without capabilities can read everything and change nothing.
func TestBigTCPWithoutRights(t *testing.T) {
	h := newBigTCPHost(t)
	h.veth("cli0", "cli1")
	h.setBy(sizing.ByCommand, 192000, "cli0")
	ask := func(args string) result {
		t.Helper()
		return h.child(asNobody, "sockeye", h.bigtcpArgs(args)...)
	}
	r := ask("")
	for _, want := range []string{"\n  on: IPv6 192000 bytes, IPv4 192000 bytes\n", "\nnot read: records of changed sizes: open DIR/state/bigtcp: permission denied\n"} {
		// The path of the directory can make the line longer than the terminal is wide.
		if text := strings.ReplaceAll(h.plain(r.out), "permission\n  denied", "permission denied"); !strings.Contains(text, want) || r.code != 0 || r.err != "" {
			t.Errorf("%q is not in %+v", want, r)
		}
	}
	if r := ask("plan cli1"); r.code != 0 || !strings.Contains(strings.ReplaceAll(h.plain(r.out), "permission\n  denied", "permission denied"), "\nnot read: owners of the sizes: open DIR/state/bigtcp: permission denied\n") {
		t.Errorf("%+v", r)
	}
	rights, hint := "setting the sizes of interfaces needs CAP_NET_ADMIN", "run as root, or with that capability"
	h.isFailure(ask("apply cli1 -o json"), 4, rights, hint)
	h.isFailure(ask("apply cli1 -o json --state-dir /tmp/nosuch"), 4, rights, hint)
	h.isFailure(ask("revert -o json"), 4, "open DIR/state/bigtcp: permission denied", "run as root, or with the capabilities that sockeye doctor names")
	h.isFailure(ask("cli0 --netns /proc/1/ns/net -o json"), 4, "open network namespace: open /proc/1/ns/net: permission denied", "run as root, or with the capabilities that sockeye doctor names")
	limited := func(capability int, args string) result {
		return h.child(nil, "limited", append([]string{fmt.Sprint(capability)}, h.bigtcpArgs(args)...)...)
	}
	h.isFailure(limited(unix.CAP_NET_ADMIN, "apply cli1 -o json"), 4, rights, hint)
	h.isFailure(limited(unix.CAP_NET_ADMIN, "revert -o json"), 4, rights, hint)
	h.has("cli0", 192000)
	h.has("cli1", 65536)

	if err := os.RemoveAll(h.state); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(h.state, 0o500); err != nil {
		t.Fatal(err)
	}
	h.isFailure(limited(unix.CAP_DAC_OVERRIDE, "apply cli1 -o json"), 4, "create directory of records: mkdir DIR/state/bigtcp: permission denied",
		"run as root, or with the capabilities that sockeye doctor names")
	h.has("cli1", 65536)
}

// TestBigTCPInterrupted interrupts apply: either nothing is changed or everything is.
func TestBigTCPInterrupted(t *testing.T) {
	h := newBigTCPHost(t)
	h.veth("cli0", "cli1")
	done, cancel := context.WithCancel(context.Background())
	cancel()
	for _, args := range []string{"apply cli0", "revert"} {
		var out, err bytes.Buffer
		if code := Run(done, h.bigtcpArgs(args), command.Environment{Out: &out, Err: &err, Now: time.Now}); code != 1 || !strings.Contains(err.String(), "context canceled") {
			t.Errorf("%s: %d %s%s", args, code, out.String(), err.String())
		}
	}
	h.has("cli0", 65536)

	// The signal arrives while the command waits for the lock.
	h.setBy(sizing.ByCommand, 70000, "cli0")
	folder, err := os.Open(filepath.Join(h.state, "bigtcp"))
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	if err := unix.Flock(int(folder.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	cmd := process("sockeye", h.bigtcpArgs("apply cli0 cli1")...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	h.eventually("apply waits for the lock", func() bool {
		locks, err := os.ReadFile("/proc/locks")
		return err == nil && strings.Contains(string(locks), fmt.Sprintf(" %d ", cmd.Process.Pid))
	})
	if err := cmd.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(folder.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v: %s", err, out.String())
	}
	h.has("cli0", 192000)
	h.has("cli1", 192000)
	if r := h.bigtcp("revert"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	h.has("cli0", 65536)
	h.has("cli1", 65536)
}

// TestBigTCPDamagedRecord checks that a damaged record is reported, and that all other records are still used.
func TestBigTCPDamagedRecord(t *testing.T) {
	h := newBigTCPHost(t)
	h.veth("cli0", "cli1")
	if r := h.bigtcp("apply cli0 cli1"); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	records, err := filepath.Glob(h.state + "/bigtcp/*.json")
	if err != nil || len(records) != 2 {
		t.Fatalf("%v %q", err, records)
	}
	if err := os.WriteFile(records[0], []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := h.bigtcp("revert"); !strings.Contains(r.out, "1 interface reverted\n") || r.code != 0 && r.code != 1 {
		t.Errorf("%+v", r)
	}
	left, err := filepath.Glob(h.state + "/bigtcp/*.json.damaged")
	if err != nil || len(left) != 1 {
		t.Errorf("%v %q", err, left)
	}
	want := "not read: records of changed sizes: " + h.plain(left[0]) + " is not a valid record and cannot be reverted\n"
	if r := h.bigtcp("lo"); r.code != 0 || !strings.HasSuffix(h.plain(strings.ReplaceAll(r.out, "\n  ", " ")), want) {
		t.Errorf("%q is not in %+v", want, r)
	}
	if info, err := os.Stat(h.state + "/bigtcp"); err != nil || info.Mode() != fs.ModeDir|0o700 {
		t.Errorf("%v %v", info.Mode(), err)
	}
}

func TestBigTCPCompletion(t *testing.T) {
	h := newBigTCPHost(t)
	h.veth("cli0")
	for args, want := range map[string][]string{
		"plan":                           {"cli0\tveth\n", "cli0p\tveth\n", "lo\t-\n"},
		"plan cli0p":                     {"cli0\tveth\n", "lo\t-\n"},
		"revert --netns /run/netns/none": {},
		"plan --ipv4":                    {"192KB\n", "off\n"},
	} {
		r := h.sockeye(append(append([]string{"__complete", "bigtcp"}, strings.Fields(args)...), "")...)
		for _, line := range want {
			if !strings.Contains("\n"+r.out, "\n"+line) {
				t.Errorf("%s: %q is not in %q", args, line, r.out)
			}
		}
		if strings.Contains(args, "cli0p") && strings.Contains(r.out, "cli0p") || len(want) == 0 && !strings.HasPrefix(r.out, ":") {
			t.Errorf("%s: %q", args, r.out)
		}
	}
}

// allSizes returns sizes of n bytes each.
func allSizes(n uint32) netif.Sizes { return netif.Sizes{GSO: n, GRO: n, GSOIPv4: n, GROIPv4: n} }
