// SPDX-License-Identifier: Apache-2.0

// Package compat finds what on a host is incompatible with packets above 64 KB:
// packet filters, shapers, captures, tunnels, drivers and faults of kernel versions.
package compat

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"sockeye/internal/bigtcp/linux"
	"sockeye/internal/bigtcp/netif"
)

// Trouble is something on the host that does not go with large packets, or makes
// them look wrong.
type Incompatibility struct {
	// Name is a short fixed one: length_filter, header_filter, queue, shaper, ipsec,
	// capture, ipv4_alone, ipv6_forwarding, small_frags, driver, tunnel, offload_off,
	// iptables_legacy.
	Name   string `json:"name"`
	Detail string `json:"detail"` // what was found, and what comes of it
	Hint   string `json:"hint,omitempty"`
}

// The names of troubles.
const (
	lengthFilter   = "length_filter" // packet filters that look at the length
	headerFilter   = "header_filter" // packet filters that look at the next header of IPv6
	queueFilter    = "queue"         // packet filters that give packets to programs
	capture        = "capture"
	ipsec          = "ipsec"
	smallFrags     = "small_frags"
	ipv6Forwarding = "ipv6_forwarding"
	ipv4Alone      = "ipv4_alone"
	driver         = "driver"
	offloadOff     = "offload_off"
	tunnel         = "tunnel"
	shaperCuts     = "shaper"
	iptablesLegacy = "iptables_legacy"
)

// shown is how many rules, processes or interfaces a trouble names; of more it says
// how many.
const maxListed = 5

// Troubles looks for what is on the host that does not go with large packets, or
// makes them look wrong. It changes nothing, and asks no module of the kernel that
// would be loaded for it, where that can be seen. The troubles of the host are in a
// fixed order, those of interfaces are under their names; ifaces are all that there
// are, or tunnels over others are missed. What may not be looked at is a trouble too;
// any other failure is an error, beside which the rest is still returned.
func Find(n *netif.Namespace, ifaces []netif.Interface, s netif.Support) (host []Incompatibility, byInterface map[string][]Incompatibility, err error) {
	kernel, err := linux.Running()
	if err != nil {
		return nil, nil, err
	}
	var failed []error
	found := func(t []Incompatibility, err error) {
		host = append(host, t...)
		failed = append(failed, err)
	}
	found(checkFilters(n, kernel))
	captures, err := captures(n)
	found(checkCaptures(captures[0], kernel), err)
	shapers, err := shapers(n)
	found(nil, err)
	found(checkIPsec(n))
	found(checkFragments(ifaces))
	found(checkForwarding(n, ifaces, kernel))
	byInterface = map[string][]Incompatibility{}
	over := tunnelsByLower(ifaces, kernel)
	for k := range ifaces {
		i := &ifaces[k]
		troubles := slices.Concat(
			checkCaptures(captures[i.Index], kernel),
			checkIPv4Alone(i, s, kernel, n.Path()),
			checkDriver(i),
			checkOffloads(i),
			checkTunnels(i, over[i.Index], kernel),
			checkShapers(i, shapers[i.Index]),
		)
		if len(troubles) > 0 {
			byInterface[i.Name] = troubles
		}
	}
	return host, byInterface, errors.Join(failed...)
}

// jumbogramsUntil is the first kernel that does not mark IPv6 packets above 65535 bytes
// by a hop-by-hop option.
var jumbogramsUntil = linux.Version{7, 0, 0}

// forwardingTrouble is of a router whose packets that fill the MTU are 8 bytes too
// large with the option (ip6_forward, ip6_pkt_too_big); TestVerifyRefusedByRouter has
// seen it.
func checkForwarding(n *netif.Namespace, ifaces []netif.Interface, kernel linux.Version) ([]Incompatibility, error) {
	joined := slices.ContainsFunc(ifaces, func(i netif.Interface) bool { return i.Name != "lo" && max(i.Sizes.GSO, i.Sizes.GRO) > netif.Legacy })
	if !joined || !kernel.Before(jumbogramsUntil) {
		return nil, nil
	}
	var text []byte
	err := n.Do(func() (err error) {
		text, err = os.ReadFile("/proc/sys/net/ipv6/conf/all/forwarding")
		return err
	})
	if errors.Is(err, fs.ErrNotExist) || err == nil && strings.TrimSpace(string(text)) == "0" {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read whether IPv6 is forwarded: %w", err)
	}
	return []Incompatibility{{
		Name: ipv6Forwarding,
		Detail: "this host forwards IPv6, and kernels before 7.0 count 8 bytes more for each segment of a packet above 65535 bytes: " +
			"to an interface with the MTU that the connection has, they refuse it as too big",
		Hint: "let MTUs grow by 8 bytes or more along the way, or keep the IPv6 sizes of the interfaces on which it comes in at 65536",
	}}, nil
}

// listed joins the first few words, and says how many more there are.
func listed(words []string, separator string) string {
	if len(words) <= maxListed {
		return strings.Join(words, separator)
	}
	return fmt.Sprintf("%s and %d more", strings.Join(words[:maxListed], separator), len(words)-maxListed)
}

// captureTrouble is that of packet sockets, by the names of their processes.
func checkCaptures(processes []string, kernel linux.Version) []Incompatibility {
	if len(processes) == 0 {
		return nil
	}
	detail := "packet sockets are open in " + listed(processes, ", ") + ": in captures, packets above 65535 bytes have " +
		"a length of 0 in their headers, of which tcpdump 4.99.3 makes \"IP bad-len 0\""
	if kernel.Before(linux.Version{7, 0, 0}) {
		detail += "; capture filters as \"tcp\" and \"port 443\" leave those of IPv6 out, which have hop-by-hop options before TCP"
	}
	return []Incompatibility{{
		Name:   capture,
		Detail: detail,
		Hint: "the length of the captured packet is the true one, up to the capture's snapshot length " +
			"(tcpdump's is 262144 bytes); set the sizes to 65536 for as long as captures are to look as before",
	}}
}

// ipsecTrouble tells of transformations: net/core/sock.c, sk_setup_caps.
func checkIPsec(n *netif.Namespace) ([]Incompatibility, error) {
	var policies []netlink.XfrmPolicy
	err := n.Do(func() error {
		there, err := moduleLoaded("xfrm_user")
		if err != nil || !there {
			return err
		}
		policies, err = netlink.XfrmPolicyList(netlink.FAMILY_ALL)
		return err
	})
	switch {
	// A kernel without it, or no right to look.
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EINVAL), errors.Is(err, fs.ErrPermission):
		return nil, nil
	case err != nil && !errors.Is(err, netlink.ErrDumpInterrupted):
		return nil, fmt.Errorf("list IPsec policies: %w", err)
	}
	out := 0
	for _, p := range policies {
		if p.Dir == netlink.XFRM_DIR_OUT && len(p.Tmpls) > 0 {
			out++
		}
	}
	if out == 0 {
		return nil, nil
	}
	return []Incompatibility{{
		Name: ipsec,
		Detail: fmt.Sprintf("%d IPsec policies for what is sent: connections that they are for send packets of one segment each, "+
			"unless the device encrypts", out),
		Hint: "the sizes are of use to the other connections only",
	}}, nil
}

const maxSkbFrags = "/proc/sys/net/core/max_skb_frags"

// fragsTrouble tells of packets with few fragments: the kernel's net/Kconfig,
// MAX_SKB_FRAGS, and net/core/skbuff.c, skb_splice_from_iter.
func checkFragments(ifaces []netif.Interface) ([]Incompatibility, error) {
	text, err := os.ReadFile(maxSkbFrags)
	// Only the host's own network namespace shows it.
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read number of fragments: %w", err)
	}
	frags, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 31)
	if err != nil {
		return nil, fmt.Errorf("read number of fragments: %w", err)
	}
	return compareFragments(frags, uint64(os.Getpagesize()), ifaces), nil
}

// judgeFrags compares with the largest size that is set, if there is one, else with
// what would be.
func compareFragments(frags, page uint64, ifaces []netif.Interface) []Incompatibility {
	const usual = 192000
	var largest uint32
	for _, i := range ifaces {
		largest = max(largest, i.Sizes.GSO, i.Sizes.GSOIPv4)
	}
	if largest <= netif.Legacy {
		largest = usual
	}
	if frags*page >= uint64(largest) {
		return nil
	}
	return []Incompatibility{{
		Name: smallFrags,
		Detail: fmt.Sprintf("net.core.max_skb_frags is %d: a packet of what is sent without a copy (sendfile, splice, MSG_ZEROCOPY) "+
			"has as many pages of %d bytes, %d bytes, unless pages lie side by side in memory; "+
			"what programs write otherwise is not concerned, it has 32768 bytes a fragment", frags, page, frags*page),
		Hint: "the most that can be set is the kernel's CONFIG_MAX_SKB_FRAGS, 17 unless it was built with more (up to 45, from Linux 6.4)",
	}}
}

// ipv4AloneTrouble tells of kernels that compare packets of both families with the
// size of IPv6.
func checkIPv4Alone(i *netif.Interface, s netif.Support, kernel linux.Version, netns string) []Incompatibility {
	if !s.IPv4 || i.Sizes.GSOIPv4 <= netif.Legacy || i.Sizes.GSOIPv4 <= i.Sizes.GSO || !cutsIPv4Alone(kernel) {
		return nil
	}
	command := fmt.Sprintf("sockeye bigtcp apply %s --ipv6 %d --ipv4 %[2]d", i.Name, i.Sizes.GSOIPv4)
	if netns != "" {
		command += " --netns " + netns
	}
	return []Incompatibility{{
		Name: ipv4Alone,
		Detail: fmt.Sprintf("IPv4 has %d bytes and IPv6 %d: Linux %s cuts packets of both above the size of IPv6 in software, before the driver",
			i.Sizes.GSOIPv4, i.Sizes.GSO, kernel),
		Hint: command + "; Linux 6.12, 6.11.3, 6.10.14 and 6.6.55 have it right",
	}}
}

// cutsIPv4Alone says whether gso_features_check compares packets of IPv4 with
// gso_max_size: since commit 24ab059d2ebd (6.7, 6.6.9) and until e609c959a939
// (6.12, 6.11.3, 6.10.14, 6.6.55).
func cutsIPv4Alone(v linux.Version) bool {
	for _, r := range []struct{ from, until linux.Version }{
		{linux.Version{6, 6, 9}, linux.Version{6, 6, 55}},
		{linux.Version{6, 7, 0}, linux.Version{6, 10, 14}},
		{linux.Version{6, 11, 0}, linux.Version{6, 11, 3}},
	} {
		if !v.Before(r.from) && v.Before(r.until) {
			return true
		}
	}
	return false
}

// deviceTrouble tells of a device that takes no large packets itself; those that
// inherit it from another have that one's.
func checkDriver(i *netif.Interface) []Incompatibility {
	if netif.IsTunnel(i.Kind) || i.TSOMaxSize == 0 {
		return nil
	}
	named := i.Driver
	if named == "" {
		named = i.Kind
	}
	if i.TSOMaxSize <= netif.Legacy {
		if slices.ContainsFunc(i.Related, func(r netif.Related) bool { return r.Relation == netif.Lower && r.TSOMaxSize == i.TSOMaxSize }) {
			return nil
		}
		return []Incompatibility{{
			Name: driver,
			Detail: strings.TrimSpace(fmt.Sprintf("%s supports packets of at most %d bytes (tso_max_size), so that none larger can be sent; "+
				"those that are received may be joined to more", named, i.TSOMaxSize)),
			Hint: "drivers that take more are mlx5, mlx4, bnxt, ice, gve and mana, and lo, veth and netkit; later kernels may have others",
		}}
	}
	// With the timestamps that TCP mostly has.
	const headers = 52
	if most := uint64(i.TSOMaxSegs) * uint64(max(i.MTU-headers, 0)); i.TSOMaxSegs > 0 && most <= netif.Legacy {
		return []Incompatibility{{
			Name:   driver,
			Detail: fmt.Sprintf("%s takes at most %d segments a packet (tso_max_segs), %d bytes with an MTU of %d", named, i.TSOMaxSegs, most, i.MTU),
			Hint:   "a larger MTU makes larger packets",
		}}
	}
	return nil
}

// offloadTrouble tells of what was turned off. GSO is not of them: TCP builds large
// packets all the same (net/core/sock.c, sk_setup_caps), and a device that has TSO
// gets them.
func checkOffloads(i *netif.Interface) []Incompatibility {
	var troubles []Incompatibility
	if !i.Offloads.TSO {
		hint := fmt.Sprintf("ethtool -K %s sg on tso on", i.Name)
		if i.Kind == "veth" {
			hint += "; an XDP program in driver mode on the other end turns it off for as long as it is attached"
		}
		troubles = append(troubles, Incompatibility{
			Name:   offloadOff,
			Detail: "TSO is off: the kernel cuts packets to the MTU in software, before the driver",
			Hint:   hint,
		})
	}
	if !i.Offloads.GRO && i.Kind != "veth" && i.Sizes.GRO > netif.Legacy {
		troubles = append(troubles, Incompatibility{
			Name:   offloadOff,
			Detail: "GRO is off: packets that are received are not joined, whatever gro_max_size is",
			Hint:   fmt.Sprintf("ethtool -K %s gro on", i.Name),
		})
	}
	return troubles
}

// tunnelsOver are the names of such tunnels by the index of the device through which
// they send.
func tunnelsByLower(ifaces []netif.Interface, kernel linux.Version) map[int][]string {
	over := map[int][]string{}
	for _, i := range ifaces {
		if !netif.LegacyTunnel(&i, kernel) {
			continue
		}
		for _, r := range i.Related {
			if r.Relation == netif.Lower && r.Netns == "" && !slices.Contains(over[r.Index], i.Name) {
				over[r.Index] = append(over[r.Index], i.Name)
			}
		}
	}
	return over
}

// tunnelTrouble is that of a tunnel, or of the device below tunnels.
func checkTunnels(i *netif.Interface, over []string, kernel linux.Version) []Incompatibility {
	var troubles []Incompatibility
	switch {
	case !netif.LegacyTunnel(i, kernel):
	case i.Sizes.GSO > netif.Legacy || i.Sizes.GSOIPv4 > netif.Legacy:
		hint := fmt.Sprintf("ip link set %s gso_max_size %d", i.Name, netif.Legacy)
		if i.Sizes.GSO <= netif.Legacy {
			// The kernel resets it with the other one only where that changes.
			hint = fmt.Sprintf("ip link set %s gso_ipv4_max_size %d", i.Name, netif.Legacy)
		}
		troubles = append(troubles, Incompatibility{
			Name: tunnel,
			Detail: fmt.Sprintf("%s has sizes above %d bytes: what it wraps has a length of 16 bits, wrong in packets above it, "+
				"which the other end drops: connections through it can be many times slower", i.Kind, netif.Legacy),
			Hint: hint,
		})
	default:
		troubles = append(troubles, Incompatibility{
			Name:   tunnel,
			Detail: fmt.Sprintf("%s wraps packets of at most %d bytes", i.Kind, netif.Legacy),
			Hint:   "leave its sizes as they are, also where the kernel would take larger ones, as for VXLAN before Linux 7.3",
		})
	}
	if len(over) > 0 {
		troubles = append(troubles, Incompatibility{
			Name:   tunnel,
			Detail: fmt.Sprintf("tunnels send through it (%s): what they wrap has at most %d bytes before", listed(over, ", "), netif.Legacy),
			Hint:   "connections that do not go through the tunnel have large packets all the same",
		})
	}
	return troubles
}
