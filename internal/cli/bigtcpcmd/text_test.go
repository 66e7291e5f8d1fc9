// SPDX-License-Identifier: Apache-2.0

package bigtcpcmd

import (
	"fmt"
	"strings"
	"testing"

	"sockeye/internal/bigtcp/compat"
	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/sizing"
	"sockeye/internal/cli/clitest"
	"sockeye/internal/cli/command"
)

// sameSizes returns four sizes of n bytes.
func sameSizes(n uint32) netif.Sizes { return netif.Sizes{GSO: n, GRO: n, GSOIPv4: n, GROIPv4: n} }

// judged returns an interface with the given verdict and reason.
func judged(i netif.Interface, support netif.Support) Interface {
	i.Offloads = netif.Offloads{GSO: true, TSO: true, GRO: true}
	one := Interface{Interface: i, Verdict: i.Verdict(support)}
	one.Bound.Size, one.Bound.By = i.Bound()
	return one
}

// shownHost has interfaces of all kinds.
func shownHost() *Shown {
	both := netif.Support{IPv6: true, IPv4: true}
	nic := netif.Interface{Index: 2, Name: "eth0", Driver: "virtio_net", MTU: 1500, Up: true, TSOMaxSize: 65536, Sizes: sameSizes(65536)}
	fast := netif.Interface{Index: 3, Name: "enp129s0f0np0", Driver: "mlx5_core", MTU: 9000, Up: true, TSOMaxSize: 524280, Sizes: sameSizes(192000)}
	lower := func(name string, index int, most, size uint32) netif.Related {
		return netif.Related{Relation: netif.Lower, Index: index, Name: name, Driver: "mlx5_core", TSOMaxSize: most, Sizes: sameSizes(size)}
	}
	fast.Related = []netif.Related{{Relation: netif.Upper, Index: 5, Name: "bond0", Kind: "bond", TSOMaxSize: 524280, Sizes: sameSizes(192000)}}
	bond := netif.Interface{Index: 5, Name: "bond0", Kind: "bond", Driver: "bonding", MTU: 9000, Up: true, TSOMaxSize: 524280, Sizes: sameSizes(192000),
		Related: []netif.Related{lower("enp129s0f0np0", 3, 524280, 192000), lower("enp129s0f1np1", 4, 262144, 65536)}}
	container := netif.Interface{Index: 7, Name: "veth1a2b3c4", Kind: "veth", Driver: "veth", MTU: 1500, Up: true, TSOMaxSize: 524280,
		Sizes: netif.Sizes{GSO: 192000, GRO: 192000, GSOIPv4: 65536, GROIPv4: 65536},
		Related: []netif.Related{
			{Relation: netif.Peer, Index: 2, Name: "eth0", Netns: "/run/netns/cni-01234567-89ab-cdef-0123-456789abcdef", Kind: "veth", Driver: "veth", TSOMaxSize: 524280, Sizes: sameSizes(65536)},
			{Relation: netif.Upper, Index: 6, Name: "br0", Kind: "bridge", TSOMaxSize: 524280, Sizes: sameSizes(65536)},
		}}
	hidden := netif.Interface{Index: 8, Name: "veth7\x1b[2J", Kind: "veth", Driver: "veth", MTU: 1500, Up: true, TSOMaxSize: 524280, Sizes: sameSizes(65536),
		Related: []netif.Related{{Relation: netif.Peer, Index: 77, Netns: "unknown"}}}
	bridge := netif.Interface{Index: 6, Name: "br0", Kind: "bridge", MTU: 1500, Up: true, TSOMaxSize: 524280, Sizes: sameSizes(65536)}
	for i := range 20 {
		bridge.Related = append(bridge.Related, netif.Related{Relation: netif.Lower, Index: 100 + i, Name: fmt.Sprintf("tap%d", i), Kind: "tun", Driver: "tun", TSOMaxSize: 65536, Sizes: sameSizes(65536)})
	}
	lo := netif.Interface{Index: 1, Name: "lo", MTU: 65536, Up: true, TSOMaxSize: 524280, Sizes: sameSizes(65536)}
	unused := netif.Interface{Index: 9, Name: "dummy0", Kind: "dummy", MTU: 1500, TSOMaxSize: 524280, Sizes: sameSizes(65536)}
	s := &Shown{Support: both}
	for _, i := range []netif.Interface{lo, nic, fast, bond, bridge, container, hidden, unused} {
		s.Interfaces = append(s.Interfaces, judged(i, both))
	}
	large := sizing.Want{IPv6: 192000, IPv4: 192000}
	s.Interfaces[1].Requested = &Requested{Want: large, By: byFile, State: requestUnset}
	s.Interfaces[2].Requested = &Requested{Want: large, By: "command", State: requestSet, For: []string{"bond0"}}
	s.Interfaces[3].Requested = &Requested{Want: large, By: "command", State: requestSet}
	s.Interfaces[5].Requested = &Requested{Want: sizing.Want{IPv6: 192000, IPv4: 65536}, By: "policy", State: requestSet}
	s.Interfaces[6].Requested = &Requested{Want: sizing.Want{IPv6: 192000}, By: "command", State: requestChanged}
	tunnel := compat.Incompatibility{Name: "tunnel", Detail: "vxlan7 sends through it: packets that are wrapped have at most 65536 bytes before", Hint: "connections that do not go through it have large packets all the same"}
	for _, n := range []int{2, 3, 4} {
		s.Interfaces[n].Incompatibilities = []compat.Incompatibility{tunnel}
	}
	s.Interfaces[1].Incompatibilities = []compat.Incompatibility{{Name: "driver", Detail: "virtio_net takes no large packets"}}
	s.Incompatibilities = []compat.Incompatibility{{Name: "length_filter", Detail: "rule 4 of chain input of table inet filter matches on ip length, which is 0 in the header of a packet above 65535 bytes, so that it does not match these",
		Hint: "match on meta length, or on nothing"}}
	s.Problems = []string{"records of changed sizes: open /var/lib/sockeye/bigtcp: permission denied"}
	return s
}

func TestBigTCPText(t *testing.T) {
	clitest.GoldenText(t, "bigtcp", func(t *command.Text) { bigtcpText(t, shownHost(), false) })
	clitest.GoldenText(t, "bigtcp-all", func(t *command.Text) {
		s := shownHost()
		s.Netns = "/run/netns/blue"
		bigtcpText(t, s, true)
	})

	old := netif.Support{IPv6: true}
	sizes := netif.Sizes{GSO: 192000, GRO: 192000}
	clitest.GoldenText(t, "bigtcp-6.1", func(t *command.Text) {
		bigtcpText(t, &Shown{Support: old, Interfaces: []Interface{
			judged(netif.Interface{Index: 2, Name: "eth0", Driver: "ice", MTU: 1500, Up: true, TSOMaxSize: 185000, Sizes: sizes}, old)}}, false)
	})
	older := netif.Support{}
	sizes = netif.Sizes{GSO: 65536}
	clitest.GoldenText(t, "bigtcp-5.10", func(t *command.Text) {
		bigtcpText(t, &Shown{Support: older, Interfaces: []Interface{
			judged(netif.Interface{Index: 2, Name: "eth0", Driver: "ice", MTU: 1500, Up: true, Sizes: sizes}, older)}}, false)
	})
	clitest.GoldenText(t, "bigtcp-none", func(t *command.Text) {
		bigtcpText(t, &Shown{Support: old, Interfaces: []Interface{judged(netif.Interface{Index: 1, Name: "lo", TSOMaxSize: 524280, Sizes: sameSizes(65536)}, old)}}, false)
	})
}

// TestBigTCPManyInterfaces checks that the table of a host with many containers stays short and includes each
// interface with configured sizes.
func TestBigTCPManyInterfaces(t *testing.T) {
	both := netif.Support{IPv6: true, IPv4: true}
	s := &Shown{Support: both}
	bridge := netif.Related{Relation: netif.Upper, Index: 2, Name: "br0", Kind: "bridge", TSOMaxSize: 524280, Sizes: sameSizes(65536)}
	for n := range 1000 {
		i := netif.Interface{Index: 10 + n, Name: fmt.Sprintf("veth%d", n), Kind: "veth", Driver: "veth", MTU: 1500, Up: true, TSOMaxSize: 524280, Sizes: sameSizes(65536), Related: []netif.Related{
			{Relation: netif.Peer, Index: 2, Name: "eth0", Netns: fmt.Sprintf("/proc/%d/ns/net", 1000+n), Kind: "veth", Driver: "veth", TSOMaxSize: 524280, Sizes: sameSizes(65536)}, bridge,
		}}
		if n == 0 {
			i.Up, i.Related = false, []netif.Related{} // not shown without --all
		}
		if n%4 == 3 {
			i.Sizes = sameSizes(192000)
		}
		one := judged(i, both)
		if n%4 == 3 {
			one.Requested = &Requested{Want: sizing.Want{IPv6: 192000, IPv4: 192000}, By: "policy", State: requestSet}
		}
		one.Incompatibilities = []compat.Incompatibility{{Name: "capture", Detail: "tcpdump listens on " + i.Name}}
		if n == 7 {
			one.Name = "v6" // as in IPv6
			one.Incompatibilities[0].Detail = "tcpdump listens on v6"
		}
		s.Interfaces = append(s.Interfaces, one)
	}
	clitest.GoldenText(t, "bigtcp-many", func(t *command.Text) { bigtcpText(t, s, false) })

	for n := range 40 {
		i := netif.Interface{Index: 2000 + n, Name: fmt.Sprintf("port%d", n), Driver: "ice", MTU: 1500, Up: true, TSOMaxSize: uint32(100000 + n), Sizes: sameSizes(65536)}
		s.Interfaces = append(s.Interfaces, judged(i, both))
	}
	s.Interfaces[len(s.Interfaces)-1].Requested = &Requested{Want: sizing.Want{IPv4: 192000}, By: byFile, State: requestUnset}
	var short, long command.Text
	bigtcpText(&short, s, false)
	for _, want := range []string{"\nport39 ", "\nport20 ", "\nveth3 ", "and 18 more interfaces; --all shows all\n1 interface is not shown: "} {
		if !strings.Contains(short.String(), want) {
			t.Errorf("%q is not in\n%s", want, short.String())
		}
	}
	bigtcpText(&long, s, true)
	for _, i := range s.Interfaces {
		if !strings.Contains(long.String(), "\n"+i.Name+" ") {
			t.Fatalf("%s is not in\n%s", i.Name, long.String())
		}
	}
}

func TestBigTCPManyChanges(t *testing.T) {
	var all []sizing.Change
	for n := range 100 {
		c := sizing.Change{Interface: fmt.Sprintf("veth%d", n), From: sameSizes(65536), To: sameSizes(192000), UpperInterface: "br0", Notes: []string{"larger packets are cut at " + fmt.Sprintf("veth%d", n)}}
		if n == 50 {
			c.To.GSO = 185000
		}
		all = append(all, c)
	}
	all = append(all, sizing.Change{Interface: "br0", From: sameSizes(65536), To: sameSizes(192000)})
	clitest.GoldenText(t, "bigtcp-plan-many", func(t *command.Text) { changesText(t, &Changes{Changes: all}, "would change") })

	var done []sizing.Reverted
	for n, c := range all {
		c.Notes, c.UpperInterface = nil, ""
		done = append(done, sizing.Reverted{Change: c, Result: []string{"reverted", "gone", "already", "changed"}[n%4]})
	}
	clitest.GoldenText(t, "bigtcp-revert-many", func(t *command.Text) { revertedText(t, &Reverted{Reverted: done}) })
}

func TestBigTCPChangesText(t *testing.T) {
	change := func(name, because string, from, to netif.Sizes, notes ...string) sizing.Change {
		return sizing.Change{Interface: name, From: from, To: to, UpperInterface: because, Notes: notes}
	}
	off, on := sameSizes(65536), sameSizes(192000)
	bounded := netif.Sizes{GSO: 185000, GRO: 192000, GSOIPv4: 185000, GROIPv4: 192000}
	elsewhere := change("eth0", "", off, on)
	elsewhere.Netns = "/run/netns/blue"
	answer := &Changes{
		Changes: []sizing.Change{
			change("enp129s0f0np0", "bond0", off, bounded, "IPv6: 185000 bytes instead of 192000 for sending, since enp129s0f0np0 (mlx5_core) supports packets of at most 185000 bytes"),
			change("enp129s0f1np1", "bond0", on, on),
			change("bond0", "", off, netif.Sizes{GSO: 192000, GRO: 65536, GSOIPv4: 65536, GROIPv4: 65536}),
			change("lo", "", on, on, "keeps what it has"),
			elsewhere,
		},
		Skipped:  []Skipped{{Interface: "eth0", Reason: "impossible: eth0 (virtio_net) supports packets of at most 65536 bytes"}, {Netns: "/run/netns/red", Interface: "eth*", Reason: "there is no such network namespace"}},
		Problems: []string{"owners of the sizes: open /var/lib/sockeye/bigtcp: permission denied"},
	}
	clitest.GoldenText(t, "bigtcp-plan", func(t *command.Text) { changesText(t, answer, "would change") })
	answer.Changes = answer.Changes[1:2]
	answer.Skipped, answer.Problems = nil, nil
	clitest.GoldenText(t, "bigtcp-apply-nothing", func(t *command.Text) { changesText(t, answer, "changed") })

	gone := sizing.Reverted{Change: change("veth7", "", netif.Sizes{}, off), Result: sizing.ResultGone}
	gone.Netns = "/run/netns/blue"
	clitest.GoldenText(t, "bigtcp-revert", func(t *command.Text) {
		revertedText(t, &Reverted{Reverted: []sizing.Reverted{
			{Change: change("bond0", "", on, off), Result: sizing.ResultReverted},
			{Change: change("enp129s0f0np0", "", netif.Sizes{GSO: 192000, GRO: 192000}, netif.Sizes{GSO: 65536, GRO: 65536}), Result: sizing.ResultReverted},
			{Change: change("eth0", "", off, off), Result: sizing.ResultAlready},
			{Change: change("eth1", "", on, off), Result: sizing.ResultChanged},
			gone,
		}})
	})
}
