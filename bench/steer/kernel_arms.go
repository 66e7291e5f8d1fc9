// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// Balancers in the kernel: nftables and IPVS. Both translate the destination to the own ports of a member, selected by a
// hash of the source address. The kernel keeps an entry for each TCP connection and each UDP flow.

var loopback = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}

// nftArm is destination NAT of nftables.
type nftArm struct {
	// replace is what happens when a member dies. False: the hash is taken modulo the number of the remaining members.
	// True: the number stays, and the place of the member in the map gets another member.
	replace bool
}

func (n *nftArm) name() string {
	if n.replace {
		return "nft-replace"
	}
	return "nft"
}

func (n *nftArm) title() string {
	if n.replace {
		return "nftables, entry replaced"
	}
	return "nftables, jhash of source"
}

func (*nftArm) ports(slot int) (tcp, udp uint16) {
	return ownTCP + uint16(slot), ownUDP + uint16(slot)
}

func (n *nftArm) start(ctx context.Context, _ *fleet) error {
	return n.load(ctx, []int{0, 1, 2, 3})
}

func (*nftArm) ready(context.Context, *fleet) error { return nil }

func (n *nftArm) remove(ctx context.Context, _ *fleet, slot int) error {
	members := []int{0, 1, 2, 3}
	if n.replace {
		members[slot] = (slot + 1) % slots
	} else {
		members = slices.Delete(members, slot, slot+1)
	}
	return n.load(ctx, members)
}

// load replaces the ruleset. The rules of TCP and UDP have the same seed and thus the same hash. Routers of the benchmark
// send from this host; for others the chain has the hook prerouting.
func (n *nftArm) load(ctx context.Context, members []int) error {
	var rules strings.Builder
	rules.WriteString("table inet steer\ndelete table inet steer\ntable inet steer {\n  chain steer {\n    type nat hook output priority -100\n")
	for i, family := range []string{"ip", "ip6"} {
		for _, protocol := range []string{"tcp", "udp"} {
			var places []string
			port := uint16(bmpPort)
			for place, slot := range members {
				to, udp := n.ports(slot)
				if protocol == "udp" {
					port, to = ipfixPort, udp
				}
				places = append(places, fmt.Sprintf("%d : %s . %d", place, loopback[i], to))
			}
			fmt.Fprintf(&rules, "    %s dport %d dnat %s addr . port to jhash %s saddr mod %d seed 0x50c4e7e map { %s }\n",
				protocol, port, family, family, len(members), strings.Join(places, ", "))
		}
	}
	rules.WriteString("  }\n}\n")
	return runHere(ctx, rules.String(), "nft", "-f", "-")
}

// ipvsArm is IPVS with masquerading and a scheduler that hashes the source address: sh or mh (Maglev).
type ipvsArm struct{ scheduler string }

func (v *ipvsArm) name() string {
	if v.scheduler == "sh" {
		return "ipvs"
	}
	return "ipvs-" + v.scheduler
}

func (v *ipvsArm) title() string { return "IPVS, scheduler " + v.scheduler }

func (*ipvsArm) ports(slot int) (tcp, udp uint16) {
	return ownTCP + uint16(slot), ownUDP + uint16(slot)
}

func (*ipvsArm) ready(context.Context, *fleet) error { return nil }

func (v *ipvsArm) start(ctx context.Context, _ *fleet) error {
	return v.services(func(flag, service string, member func(int) string) error {
		if err := runHere(ctx, "", "ipvsadm", "-A", flag, service, "-s", v.scheduler); err != nil {
			return err
		}
		for slot := range slots {
			if err := runHere(ctx, "", "ipvsadm", "-a", flag, service, "-r", member(slot), "-m"); err != nil {
				return err
			}
		}
		return nil
	})
}

func (v *ipvsArm) remove(ctx context.Context, _ *fleet, slot int) error {
	return v.services(func(flag, service string, member func(int) string) error {
		return runHere(ctx, "", "ipvsadm", "-d", flag, service, "-r", member(slot))
	})
}

// runHere runs a program in the network namespace of this thread.
func runHere(ctx context.Context, stdin, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s%s", name, strings.Join(args, " "), err, out, stdin)
	}
	return nil
}

// services calls do with the flag and the address of each virtual service, and those of the member of a slot.
func (v *ipvsArm) services(do func(flag, service string, member func(slot int) string) error) error {
	for _, ip := range loopback {
		for _, flag := range []string{"-t", "-u"} {
			port := uint16(bmpPort)
			if flag == "-u" {
				port = ipfixPort
			}
			err := do(flag, netip.AddrPortFrom(ip, port).String(), func(slot int) string {
				to, udp := v.ports(slot)
				if flag == "-u" {
					to = udp
				}
				return netip.AddrPortFrom(ip, to).String()
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// missing returns what keeps an arm from running on this host, or nil.
func missing(a arm) error {
	switch a := a.(type) {
	case *proxyArm:
		for _, program := range []string{"haproxy", "nfacctd"} {
			if _, err := exec.LookPath(program); err != nil {
				return fmt.Errorf("%w (Debian's packages haproxy, pmacct)", err)
			}
		}
	case *pmacctArm:
		if a.dir == "" {
			return errors.New("-pmacct is not given")
		}
	case *nftArm:
		if _, err := exec.LookPath("nft"); err != nil {
			return fmt.Errorf("%w (Debian's package nftables)", err)
		}
	case *ipvsArm:
		if _, err := os.Stat("/proc/net/ip_vs"); err != nil {
			return errors.New("the kernel has no IPVS")
		}
		if _, err := exec.LookPath("ipvsadm"); err != nil {
			return fmt.Errorf("%w (Debian's package ipvsadm)", err)
		}
	}
	return nil
}
