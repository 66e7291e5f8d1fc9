// SPDX-License-Identifier: Apache-2.0

package sizing

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"sockeye/internal/bigtcp/netif"
	"sockeye/internal/bigtcp/netif/netiftest"
	"sockeye/internal/fault"
)

// tree builds interfaces from the names of their lower interfaces, in the order of their indexes: NAME(tso_max_size):
// LOWER LOWER.
func tree(lines ...string) []netif.Interface {
	var ifaces []netif.Interface
	find := func(name string) netif.Interface { return *byName(ifaces, name) }
	for n, line := range lines {
		head, lowers, _ := strings.Cut(line, ":")
		i := netif.Interface{Index: n + 1, TSOMaxSize: netif.MaxSize, Sizes: sizesOff, Driver: "mlx5_core"}
		var name string
		if _, err := fmt.Sscanf(strings.NewReplacer("(", " ", ")", "").Replace(head), "%s %d", &name, &i.TSOMaxSize); err != nil {
			name = head
		}
		i.Name = name
		seen := map[int]bool{}
		for _, lower := range strings.Fields(lowers) {
			l := find(lower)
			below := []netif.Related{{Relation: netif.Lower, Index: l.Index, Name: l.Name, Driver: l.Driver, TSOMaxSize: l.TSOMaxSize, Sizes: l.Sizes}}
			for _, r := range append(below, l.Related...) {
				if !seen[r.Index] {
					seen[r.Index] = true
					i.Related = append(i.Related, r)
				}
			}
		}
		ifaces = append(ifaces, i)
	}
	return ifaces
}

var supportBoth = netif.Support{IPv6: true, IPv4: true}

// list prints one step per line.
func list(steps []step) string {
	var lines []string
	for _, p := range steps {
		line := fmt.Sprintf("%s %s", p.Interface, short(p.To))
		if p.From == p.To {
			line = fmt.Sprintf("%s stays", p.Interface)
		}
		if p.UpperInterface != "" {
			line += " for " + p.UpperInterface
		}
		if len(p.Notes) > 0 {
			line += " [" + strings.Join(p.Notes, "; ") + "]"
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

func short(s netif.Sizes) string {
	if s.GSO == s.GRO && s.GSOIPv4 == s.GROIPv4 {
		return fmt.Sprintf("%d/%d", s.GSO, s.GSOIPv4)
	}
	return fmt.Sprintf("%d,%d/%d,%d", s.GSO, s.GRO, s.GSOIPv4, s.GROIPv4)
}

func TestPlan(t *testing.T) {
	off := Want{IPv6: netif.Legacy, IPv4: netif.Legacy}
	other := Want{IPv6: 100000, IPv4: 100000}
	stack := []string{"eth0", "eth1", "bond0: eth0 eth1", "vlan1: bond0", "vlan2: bond0"}
	with := func(s netif.Sizes, lines []string, names ...string) []netif.Interface {
		ifaces := tree(lines...)
		for _, name := range names {
			byName(ifaces, name).Sizes = s
		}
		return ifaces
	}
	tests := map[string]struct {
		interfaces []netif.Interface
		support    netif.Support
		held       map[int]Want
		targets    []Target
		want       string
	}{
		"one": {
			tree("eth0", "eth1"), supportBoth, nil,
			[]Target{{"eth0", wantOn}},
			"eth0 196608/196608",
		},
		"one that has it": {
			with(sizesOn, []string{"eth0"}, "eth0"), supportBoth, nil,
			[]Target{{"eth0", wantOn}},
			"eth0 stays",
		},
		"IPv6 alone": {
			tree("eth0"), supportBoth, nil,
			[]Target{{"eth0", Want{IPv6: large}}},
			"eth0 196608/65536",
		},
		"IPv4 alone": {
			tree("eth0"), supportBoth, nil,
			[]Target{{"eth0", Want{IPv4: large}}},
			"eth0 65536/196608",
		},
		"IPv6 off, IPv4 as it is": {
			with(sizesOn, []string{"eth0"}, "eth0"), supportBoth, nil,
			[]Target{{"eth0", Want{IPv6: netif.Legacy}}},
			"eth0 65536/196608",
		},
		"growing from below": {
			tree(stack...), supportBoth, nil,
			[]Target{{"vlan1", wantOn}},
			"eth0 196608/196608 for vlan1\neth1 196608/196608 for vlan1\nbond0 196608/196608 for vlan1\nvlan1 196608/196608",
		},
		"shrinking from above": {
			with(sizesOn, stack, "eth0", "eth1", "bond0", "vlan1"), supportBoth, nil,
			[]Target{{"vlan1", off}},
			"vlan1 65536/65536\nbond0 65536/65536 for vlan1\neth0 65536/65536 for vlan1\neth1 65536/65536 for vlan1",
		},
		"another sends as much": {
			with(sizesOn, stack, "eth0", "eth1", "bond0", "vlan1", "vlan2"), supportBoth, nil,
			[]Target{{"vlan1", Want{IPv6: netif.Legacy}}},
			`eth0 stays for vlan1 [keeps 196608 bytes for IPv6, which its upper interface vlan2 has]
eth1 stays for vlan1 [keeps 196608 bytes for IPv6, which its upper interface vlan2 has]
bond0 stays for vlan1 [keeps 196608 bytes for IPv6, which its upper interface vlan2 has]
vlan1 65536/196608`,
		},
		"the larger of two": {
			tree(stack...), supportBoth, nil,
			[]Target{{"vlan1", other}, {"vlan2", Want{IPv6: large}}},
			"eth0 196608/100000 for vlan1\neth1 196608/100000 for vlan1\nbond0 196608/100000 for vlan1\nvlan1 100000/100000\nvlan2 196608/65536",
		},
		"one below is asked for itself": {
			tree(stack...), supportBoth, nil,
			[]Target{{"vlan1", wantOn}, {"eth1", Want{IPv6: 100000}}},
			`eth0 196608/196608 for vlan1
eth1 100000/196608 [the kernel segments larger IPv6 packets of its upper interfaces]
bond0 196608/196608 for vlan1
vlan1 196608/196608`,
		},
		"one below was asked for before": {
			with(netiftest.Sizes(100000, 100000, netif.Legacy, netif.Legacy), []string{"eth0", "vlan1: eth0"}, "eth0"), supportBoth, map[int]Want{1: {IPv6: 100000}},
			[]Target{{"vlan1", wantOn}},
			`eth0 100000/196608 for vlan1 [keeps 100000 bytes for IPv6, which were requested for it; the kernel segments larger IPv6 packets of its upper interfaces]
vlan1 196608/196608`,
		},
		"one below was asked for more before": {
			with(sizesOn, []string{"eth0", "vlan1: eth0"}, "eth0", "vlan1"), supportBoth, map[int]Want{1: wantOn},
			[]Target{{"vlan1", off}},
			`eth0 stays for vlan1 [keeps 196608 bytes for IPv6, which were requested for it; keeps 196608 bytes for IPv4, which were requested for it]
vlan1 65536/65536`,
		},
		"clamped": {
			tree("eth0(131072)", "eth1", "br0(131072): eth0 eth1"), supportBoth, nil,
			[]Target{{"br0", wantOn}},
			`eth0 131072,196608/131072,196608 for br0 [sends packets of at most 131072 bytes, the tso_max_size of eth0 (mlx5_core)]
eth1 196608/196608 for br0
br0 131072,196608/131072,196608 [sends packets of at most 131072 bytes, the tso_max_size of eth0 (mlx5_core)]`,
		},
		"off where the device takes less": {
			with(netiftest.Sizes(32768, netif.Legacy, 32768, netif.Legacy), []string{"eth0(32768)"}, "eth0"), supportBoth, nil,
			[]Target{{"eth0", off}},
			"eth0 stays",
		},
		"a kernel without IPv4": {
			with(netiftest.Sizes(netif.Legacy, netif.Legacy, 0, 0), []string{"eth0"}, "eth0"), netif.Support{IPv6: true}, nil,
			[]Target{{"eth0", wantOn}},
			"eth0 196608/0 [IPv4 is not changed: IPv4 packets above 65536 bytes need Linux 6.3]",
		},
		"a kernel without IPv4, which is off": {
			with(netiftest.Sizes(netif.Legacy, netif.Legacy, 0, 0), []string{"eth0"}, "eth0"), netif.Support{IPv6: true}, nil,
			[]Target{{"eth0", Want{IPv4: netif.Legacy}}},
			"eth0 stays",
		},
		"a kernel without anything, off": {
			with(netif.Sizes{GSO: netif.Legacy}, []string{"eth0(0)"}, "eth0"), netif.Support{}, nil,
			[]Target{{"eth0", off}},
			"eth0 stays",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			for _, targets := range permutations(test.targets) {
				steps, err := plan(test.interfaces, test.support, targets, test.held)
				if err != nil {
					t.Fatal(err)
				}
				if got := list(steps); got != test.want {
					t.Errorf("the plan for %v is\n%s\nnot\n%s", targets, got, test.want)
				}
			}
		})
	}
}

func permutations[T any](list []T) [][]T {
	if len(list) <= 1 {
		return [][]T{list}
	}
	var all [][]T
	for i := range list {
		rest := slices.Delete(slices.Clone(list), i, i+1)
		for _, p := range permutations(rest) {
			all = append(all, append([]T{list[i]}, p...))
		}
	}
	return all
}

// TestPlanOrder plans all mixtures of growing and shrinking interfaces of a stack: while an interface grows, it may
// never exceed its lower interfaces.
func TestPlanOrder(t *testing.T) {
	lines := []string{"eth0", "eth1", "bond0: eth0 eth1", "vlan1: bond0", "br0: vlan1"}
	for _, before := range ladder {
		for _, after := range ladder {
			ifaces := tree(lines...)
			for i := range ifaces {
				ifaces[i].Sizes = netiftest.Sizes(before, before, before, before)
			}
			var targets []Target
			for _, i := range ifaces {
				targets = append(targets, Target{i.Name, Want{IPv6: after, IPv4: after}})
			}
			for _, targets := range permutations(targets) {
				steps, err := plan(ifaces, supportBoth, targets, nil)
				if err != nil {
					t.Fatal(err)
				}
				now := map[int]netif.Sizes{}
				for _, i := range ifaces {
					now[i.Index] = i.Sizes
				}
				for _, p := range steps {
					now[p.Index] = p.To
					for _, i := range ifaces {
						for _, r := range i.Related {
							if now[i.Index].GSO > now[r.Index].GSO {
								t.Fatalf("from %d to %d, asked for %v: %s is larger than %s below it, in\n%s",
									before, after, targets, i.Name, r.Name, list(steps))
							}
						}
					}
				}
				if len(steps) != len(ifaces) {
					t.Fatalf("%d steps for %d interfaces", len(steps), len(ifaces))
				}
			}
		}
	}
}

func TestPlanElsewhere(t *testing.T) {
	ifaces := tree("macvlan0")
	ifaces[0].Related = []netif.Related{{Relation: netif.Lower, Index: 7, Name: "eth0", Netns: "/run/netns/a", TSOMaxSize: 131072}}
	steps, err := plan(ifaces, supportBoth, []Target{{"macvlan0", Want{IPv6: large}}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	const want = "macvlan0 131072,196608/65536,65536 [its lower interface eth0 in another network namespace (/run/netns/a) is not changed; " +
		"sends packets of at most 131072 bytes, the tso_max_size of eth0 in /run/netns/a]"
	if got := list(steps); got != want {
		t.Errorf("the plan is\n%s\nnot\n%s", got, want)
	}
}

func TestPlanRefuses(t *testing.T) {
	virtio := tree("eth0(65536)", "vlan1: eth0")
	virtio[0].Driver = "virtio_net"
	virtio[1].Related[0].Driver = "virtio_net"
	tests := map[string]struct {
		interfaces []netif.Interface
		support    netif.Support
		targets    []Target
		code       int
		want       string
	}{
		"none":         {tree("eth0"), supportBoth, []Target{{"eth1", wantOn}}, fault.CodeUsage, `there is no interface "eth1"`},
		"nothing":      {tree("eth0"), supportBoth, []Target{{"eth0", Want{}}}, fault.CodeUsage, "no size is requested for eth0"},
		"small":        {tree("eth0"), supportBoth, []Target{{"eth0", Want{IPv4: 65535}}}, fault.CodeUsage, "IPv4 size of eth0: 65535 is not from 65536 to 524280 bytes"},
		"large":        {tree("eth0"), supportBoth, []Target{{"eth0", Want{IPv6: 524281}}}, fault.CodeUsage, "IPv6 size of eth0: 524281 is not from 65536 to 524280 bytes"},
		"twice":        {tree("eth0"), supportBoth, []Target{{"eth0", wantOn}, {"eth0", Want{IPv6: netif.MaxSize}}}, fault.CodeUsage, "two different sizes are requested for eth0"},
		"virtio":       {virtio, supportBoth, []Target{{"eth0", wantOn}}, fault.CodeUnsupported, "eth0 (virtio_net) supports packets of at most 65536 bytes"},
		"above virtio": {virtio, supportBoth, []Target{{"vlan1", Want{IPv4: large}}}, fault.CodeUnsupported, "eth0 (virtio_net) supports packets of at most 65536 bytes"},
		"no IPv4":      {tree("eth0"), netif.Support{IPv6: true}, []Target{{"eth0", Want{IPv4: large}}}, fault.CodeUnsupported, "eth0: IPv4 packets above 65536 bytes need Linux 6.3"},
		"neither":      {tree("eth0(0)"), netif.Support{}, []Target{{"eth0", wantOn}}, fault.CodeUnsupported, "eth0: packets above 65536 bytes need Linux 5.19"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			steps, err := plan(test.interfaces, test.support, test.targets, nil)
			failsAs(t, err, test.code)
			if err.Error() != test.want {
				t.Errorf("error is %q, not %q", err, test.want)
			}
			if steps != nil {
				t.Errorf("there is a plan: %s", list(steps))
			}
		})
	}
}

func TestPlanTwiceTheSame(t *testing.T) {
	steps, err := plan(tree("eth0"), supportBoth, []Target{{"eth0", wantOn}, {"eth0", wantOn}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := list(steps); got != "eth0 196608/196608" {
		t.Errorf("the plan is %s", got)
	}
}
