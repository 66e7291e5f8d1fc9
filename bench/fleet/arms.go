// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/fleet/forward"
	"sockeye/internal/fleet/table"
	"sockeye/lab"
)

// arm forwards the packets of the service from host first to host second.
type arm struct {
	name, title string
	to          string // arm of the ratios; "" of those themselves
	set         func(ctx context.Context, b *bench, l *lane) error
}

const (
	armDropped    = "dropped" // has no stream
	armForwarding = "forwarding"
	armVXLAN      = "vxlan"
	armSockeye    = "sockeye"
)

var arms = []arm{
	{armDropped, "none, dropped at host 1", "", func(context.Context, *bench, *lane) error { return nil }},
	{armForwarding, "kernel", "", func(_ context.Context, _ *bench, l *lane) error { return l.route() }},
	{"forwarding_again", "kernel, again", armForwarding, func(_ context.Context, _ *bench, l *lane) error { return l.route() }},
	{armSockeye, "Sockeye", armForwarding, func(_ context.Context, b *bench, l *lane) error { return l.sockeye(b, 0, false) }},
	{"sockeye_device_map", "Sockeye, device map", armForwarding, func(_ context.Context, b *bench, l *lane) error { return l.sockeye(b, largeMap, false) }},
	{"nft", "nftables, fwd by jhash", armForwarding, func(ctx context.Context, _ *bench, l *lane) error { return l.nft(ctx) }},
	{"ipvs", "IPVS, direct, sh", armForwarding, func(ctx context.Context, _ *bench, l *lane) error { return l.ipvs(ctx) }},
	{armVXLAN, "tunnel: kernel, a route", "", func(_ context.Context, _ *bench, l *lane) error { return l.vxlan() }},
	{"sockeye_tunnel", "tunnel: Sockeye", armVXLAN, func(_ context.Context, b *bench, l *lane) error { return l.sockeye(b, 0, true) }},
}

// missingError is the reason for which a peer cannot run on this host.
type missingError struct{ reason string }

func (e *missingError) Error() string { return e.reason }

// route is a route of the service's address by way of host second.
func (l *lane) route() error {
	return errors.Join(l.first.Sysctl("ipv4.ip_forward", "1"), l.first.AddRoute(netip.PrefixFrom(service, 32), secondIn))
}

// sockeye makes the hosts a fleet in which host second owns all buckets.
func (l *lane) sockeye(b *bench, size int, tunnel bool) error {
	names, err := newDeviceMap(size)
	if err != nil {
		return err
	}
	t := newTable(func(int) uint16 { return 1 })
	hosts := []struct {
		*lab.Namespace
		name, link string
		interfaces []string
		other      *lab.Namespace
		otherLink  string
		otherIP    netip.Addr
	}{
		{l.first, first, "next", []string{"in", "next"}, l.second, "in", secondIn},
		{l.second, second, "in", []string{"in", "back"}, l.first, "next", firstNext},
	}
	if err := l.first.AddAddress("lo", netip.PrefixFrom(service, 32)); err != nil {
		return err
	}
	for _, h := range hosts {
		var indexes []int
		for _, name := range h.interfaces {
			index, _, err := interfaceOf(h.Namespace, name)
			if err != nil {
				return err
			}
			indexes = append(indexes, index)
		}
		index, _, err := interfaceOf(h.Namespace, h.link)
		if err != nil {
			return err
		}
		_, mac, err := interfaceOf(h.other, h.otherLink)
		if err != nil {
			return err
		}
		err = h.Do(func() error {
			path, err := forward.Open(b.pins(l.arm.name + "-" + h.name))
			if err != nil {
				return err
			}
			b.lab.AtClose(path.Close)
			next := forward.Next{Addresses: []netip.Addr{h.otherIP}, Interface: index, MAC: mac}
			at := 0
			if tunnel {
				if at, err = path.OpenTunnel([]netip.Addr{service}); err != nil {
					return err
				}
				next = forward.Next{Addresses: next.Addresses, Interface: at, Sources: next.Addresses, VNI: forward.VNI(t.Nonce), Room: forward.TunnelMTU - forward.TunnelOverhead4}
			}
			if h.name == first {
				l.forwarded = func() (uint64, error) {
					counts, err := path.Counts()
					return counts[forward.Forwarded], err
				}
			}
			return errors.Join(path.SetListeners(listeners()),
				path.Set(t, h.name, func(*table.Host) forward.Next { return next }, names, forward.Flip{}), path.Attach(indexes, at))
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// nft forwards by a hash of the source address, all of whose values stand for host second.
func (l *lane) nft(ctx context.Context) error {
	return run(ctx, l.first, fmt.Sprintf(`table netdev fleet {
  chain fleet {
    type filter hook ingress device "in" priority 0
    ip daddr %[1]v udp dport %[2]d fwd ip to jhash ip saddr mod 2 seed 0x50c4e7e map { 0 : %[3]v, 1 : %[3]v } device "next"
    ip daddr %[1]v tcp dport %[2]d fwd ip to jhash ip saddr mod 2 seed 0x50c4e7e map { 0 : %[3]v, 1 : %[3]v } device "next"
  }
}
`, service, port, secondIn), "nft", "-f", "-")
}

// ipvs forwards by direct routing with the scheduler sh, which hashes the source address. It has one destination.
func (l *lane) ipvs(ctx context.Context) error {
	at := netip.AddrPortFrom(service, port).String()
	for _, protocol := range []string{"-u", "-t"} {
		if err := errors.Join(run(ctx, l.first, "", "ipvsadm", "-A", protocol, at, "-s", "sh"),
			run(ctx, l.first, "", "ipvsadm", "-a", protocol, at, "-r", netip.AddrPortFrom(secondIn, port).String(), "-g")); err != nil {
			return err
		}
	}
	return l.first.AddAddress("lo", netip.PrefixFrom(service, 32))
}

// run runs a program of a peer in a namespace. The error is a missingError if the host does not have the peer.
func run(ctx context.Context, n *lab.Namespace, stdin string, argv ...string) error {
	p := n.Command(ctx, argv...)
	var out bytes.Buffer
	p.Cmd.Stdin, p.Cmd.Stdout, p.Cmd.Stderr = strings.NewReader(stdin), &out, &out
	err := p.Start()
	if err == nil {
		err = p.Wait()
	}
	if err == nil || ctx.Err() != nil {
		return err
	}
	if errors.Is(err, exec.ErrNotFound) {
		return &missingError{argv[0] + " is not installed"}
	}
	said, _, _ := strings.Cut(strings.TrimSpace(out.String()), "\n")
	for _, e := range []unix.Errno{unix.ENOPROTOOPT, unix.EOPNOTSUPP, unix.ENOENT} { // no IPVS, no nftables, an unknown expression
		if strings.Contains(strings.ToLower(said), e.Error()) {
			return &missingError{fmt.Sprintf("%s: %s", argv[0], said)}
		}
	}
	return fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, said)
}

var firstInside, secondInside = netip.MustParseAddr("10.90.4.1"), netip.MustParseAddr("10.90.4.2")

// vxlan is a route of the service's address through a VXLAN interface, with the checksums of UDP that Sockeye has too.
func (l *lane) vxlan() error {
	const vni, vxlanPort, name = 1, 4789, "vxlan0"
	ends := []struct {
		*lab.Namespace
		link           string
		own, other     netip.Addr
		inside, behind netip.Addr
	}{
		{l.first, "next", firstNext, secondIn, firstInside, secondInside},
		{l.second, "in", secondIn, firstNext, secondInside, firstInside},
	}
	macs := make([][6]byte, len(ends))
	for i, e := range ends {
		index, _, err := interfaceOf(e.Namespace, e.link)
		if err != nil {
			return err
		}
		device := &netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: name, MTU: forward.TunnelMTU - forward.TunnelOverhead4}, VxlanId: vni,
			VtepDevIndex: index, SrcAddr: e.own.AsSlice(), Group: e.other.AsSlice(), Port: vxlanPort, UDPCSum: true}
		if err := e.Netlink().LinkAdd(device); err != nil {
			return fmt.Errorf("create interface %s: %w", name, err)
		}
		if _, macs[i], err = interfaceOf(e.Namespace, name); err != nil {
			return err
		}
		made, err := e.Netlink().LinkByName(name)
		if err == nil {
			err = errors.Join(e.Netlink().LinkSetUp(made), e.AddAddress(name, netip.PrefixFrom(e.inside, 24)))
		}
		if err != nil {
			return fmt.Errorf("set up interface %s: %w", name, err)
		}
	}
	for i, e := range ends {
		if err := addNeighbor(e.Namespace, name, e.behind, macs[1-i]); err != nil {
			return err
		}
	}
	return errors.Join(l.first.Sysctl("ipv4.ip_forward", "1"), l.first.AddRoute(netip.PrefixFrom(service, 32), secondInside))
}
