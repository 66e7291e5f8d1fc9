// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
)

const sizingPolicy = "bigtcp:\n  - {interface: \"big*\", ipv6: 192KB, ipv4: 192KB}\n"

// newSizingHost returns a host whose kernel supports BIG TCP for both families, with an interface NAME for each name.
func newSizingHost(t *testing.T, policy string, names ...string) *host {
	t.Helper()
	n, err := netif.OpenNamespace("")
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if s := n.Support(); !s.IPv6 || !s.IPv4 {
		t.Skip("kernel: BIG TCP for both families needs Linux 6.3")
	}
	h := newHost(t, policy)
	for _, name := range names {
		h.plug(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "peer-" + name})
	}
	return h
}

// plug creates an interface and deletes it when the test ends.
func (h *host) plug(l netlink.Link) {
	h.t.Helper()
	if err := netlink.LinkAdd(l); err != nil {
		h.t.Fatalf("add %s: %v", l.Attrs().Name, err)
	}
	h.t.Cleanup(func() {
		if err := netlink.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.EINVAL) {
			h.t.Error(err)
		}
	})
}

// size returns the largest IPv6 packet that an interface sends, in bytes.
func (h *host) size(name string) uint32 {
	h.t.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		h.t.Fatal(err)
	}
	return l.Attrs().GSOMaxSize
}

func (h *host) wantSize(name string, want uint32) {
	h.t.Helper()
	if got := h.size(name); got != want {
		h.t.Errorf("%s has %d, want %d", name, got, want)
	}
}

// TestSizesByAgent runs the agent as a separate process that has dropped its capabilities: it sets and reports the
// sizes of existing interfaces and of interfaces that appear later.
func TestSizesByAgent(t *testing.T) {
	h := newSizingHost(t, sizingPolicy+"  - {interface: inner, netns: DIR/netns/blue, ipv6: 192KB}\n", "big0", "big1")
	// The process starts before the agent: with Pdeathsig, it would end with the thread that started it.
	spare := h.newNetns("spare", nil)
	h.start()
	h.wantSize("big0", 192000)
	table := func() string { return regexp.MustCompile(` +`).ReplaceAllString(h.plain(h.sockeye("status").out), " ") }
	const head = "BIG TCP IN RULES APPLIED CHANGED IMPOSSIBLE CONFLICT WAITING\n"
	if got := table(); !strings.Contains(got, head+"this network namespace 1 2 0 0 0 0\nDIR/netns/blue 1 0 0 0 0 1\n\n"+
		"DIR/netns/blue: there is no network namespace DIR/netns/blue\nhint: its interfaces are set when the namespace appears\n") {
		t.Errorf("status:\n%s", got)
	}

	blue := filepath.Join(h.dir, "netns", "blue")
	if err := os.Mkdir(filepath.Dir(blue), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(blue, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(spare, blue, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(blue, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	f, err := os.Open(blue)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h.plug(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "outer"}, PeerName: "inner", PeerNamespace: netlink.NsFd(f.Fd())})
	h.eventually("inner is set", func() bool {
		return strings.Contains(table(), "DIR/netns/blue 1 1 0 0 0 0\n")
	})

	var all api.BigTCPStatus
	if err := api.NewClient(api.SocketPath(h.run)).Get(t.Context(), "/v1/bigtcp", nil, &all); err != nil || len(all.Interfaces) != 3 {
		t.Errorf("%+v, %v", all, err)
	}
	var one api.BigTCPStatus
	query := url.Values{"netns": {blue}, "interface": {"inner"}}
	if err := api.NewClient(api.SocketPath(h.run)).Get(t.Context(), "/v1/bigtcp", query, &one); err != nil || len(one.Interfaces) != 1 ||
		one.Interfaces[0].Rule != "inner of "+blue+": ipv6 192KB" || one.Interfaces[0].Sizes.GSO != 192000 || one.Interfaces[0].Index == 0 {
		t.Errorf("%+v, %v", one, err)
	}

	// Another program changes a size.
	big1, err := netlink.LinkByName("big1")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetGSOMaxSize(big1, 100000); err != nil {
		t.Fatal(err)
	}
	h.eventually("the change is seen", func() bool {
		return strings.Contains(table(), "\nbig1: changed: its sizes were changed externally and are kept\nhint: sockeye apply sets the sizes of the policy again\n")
	})
	status := must[api.Status](h, "status")
	if n := status.BigTCP[0]; n.Applied != 1 || n.Changed != 1 || len(n.Problems) != 1 || n.Problems[0].Sizes.GSO != 100000 {
		t.Errorf("%+v", status.BigTCP)
	}
	const row = "interface big1 change sizes ipv6 send 100000 -> 192000 overwrites sizes that were set externally\n"
	for _, command := range []string{"plan", "apply"} {
		if got := regexp.MustCompile(` +`).ReplaceAllString(h.sockeye(command).out, " "); got != "WHERE ACTION WHAT EFFECT\n"+row {
			t.Errorf("%s:\n%s", command, got)
		}
	}
	h.wantSize("big1", 192000)

	// The sizes stay when the agent exits, and the next agent can revert them.
	h.kill()
	h.wantSize("big0", 192000)
	h.write("policy.yaml", "bigtcp:\n  - {interface: big1, ipv6: 192KB}\n")
	h.start()
	h.wantSize("big0", 65536)
	h.wantSize("big1", 192000)
	n, err := netif.OpenNamespace(blue)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if inner, err := n.Interface("inner"); err != nil || inner.Sizes.GSO != 65536 {
		t.Errorf("inner has %+v, %v", inner, err)
	}

	// This agent may no longer enter namespaces.
	h.write("policy.yaml", "bigtcp:\n  - {interface: inner, netns: DIR/netns/blue, ipv6: 192KB}\n")
	h.refused(4, "bigtcp in DIR/netns/blue: the agent is not permitted to enter network namespaces",
		"restart the agent: it keeps the capability if a bigtcp rule has a netns at startup", nil, "apply")
	h.wantSize("big1", 192000)

	h.write("policy.yaml", "bigtcp:\n  - {interface: bigtun, ipv6: 192KB}\n")
	h.plug(&netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "bigtun"}, Mode: netlink.TUNTAP_MODE_TUN})
	r := h.sockeye("apply")
	if r.code != 3 || !strings.Contains(r.err, "bigtun") || !strings.Contains(r.err, "65536 bytes") {
		t.Errorf("interface without support: %+v", r)
	}
	h.wantSize("big1", 192000)
}

// TestResetSizes checks that reset reverts the sizes that agents and commands have set.
func TestResetSizes(t *testing.T) {
	h := newSizingHost(t, sizingPolicy, "big0", "own0")
	h.start()
	n, err := netif.OpenNamespace("")
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	store, err := sizing.OpenStore(h.state)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Apply(n, sizing.ByCommand, []sizing.Target{{Interface: "own0", Want: sizing.Want{IPv6: 100000}}}, false); err != nil {
		t.Fatal(err)
	}
	h.kill()
	args := []string{"reset", "--state-dir", h.state, "--pins", h.pins}
	if r := h.sockeye(args...); r.code != 0 || !strings.HasPrefix(h.plain(r.out), "removed PINS\nremoved DIR/run/agent.sock\nrestored the sizes of big0, own0\nkept ") {
		t.Errorf("%+v", r)
	}
	h.wantSize("big0", 65536)
	h.wantSize("own0", 65536)
	if r := h.sockeye(args...); r.code != 0 || !strings.HasPrefix(r.out, "there was nothing to remove\nkept ") {
		t.Errorf("again: %+v", r)
	}
}

func TestCheckCountsSizes(t *testing.T) {
	h := newHost(t, sizingPolicy+"  - {interface: eth0, netns: /run/netns/none, ipv4: off}\n")
	if r := h.sockeye("check", h.policy); r.code != 0 || h.plain(r.out) != "DIR/policy.yaml is valid, 2 bigtcp rules\n" {
		t.Errorf("%+v", r)
	}
	if c := must[checked](h, "check", h.policy); !c.Valid || c.BigTCP != 2 {
		t.Errorf("%+v", c)
	}
}

// TestSizesOfKilledAgent kills an agent while it sets sizes: each interface has its old or its new sizes, the next
// agent continues, and everything can be reverted.
func TestSizesOfKilledAgent(t *testing.T) {
	var names []string
	for i := range 40 {
		names = append(names, fmt.Sprintf("big%d", i))
	}
	h := newSizingHost(t, sizingPolicy, names...)
	cut := 0
	for round := range 6 {
		cmd := process("sockeye", h.agentArgs()...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		end := func() {
			_ = cmd.Process.Kill() // the process may have exited
			_ = cmd.Wait()
		}
		t.Cleanup(end)
		least := 1 + round*7 // records, at the time
		h.eventually("records are written", func() bool {
			files, err := filepath.Glob(h.state + "/bigtcp/*.json")
			return err == nil && len(files) >= least
		})
		end()
		on := 0
		for _, name := range names {
			switch h.size(name) {
			case 192000:
				on++
			case 65536:
			default:
				t.Errorf("%s has %d", name, h.size(name))
			}
		}
		if on < len(names) {
			cut++
		}
		if round%2 == 0 {
			if r := h.sockeye("reset", "--state-dir", h.state, "--pins", h.pins); r.code != 0 {
				t.Fatalf("%+v", r)
			}
			for _, name := range names {
				h.wantSize(name, 65536)
			}
		}
	}
	if cut == 0 {
		t.Error("no agent was killed in the middle")
	}
	h.start()
	for _, name := range names {
		h.wantSize(name, 192000)
	}
	if n := must[api.Status](h, "status").BigTCP[0]; n.Applied != len(names) {
		t.Errorf("%+v", n)
	}
	h.write("policy.yaml", "bigtcp: []\n")
	if r := h.sockeye("apply"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	for _, name := range names {
		h.wantSize(name, 65536)
	}
}
