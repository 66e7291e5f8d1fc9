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

// Incompatibility is something on the host that does not work with large packets, or
// that reports them wrongly.
type Incompatibility struct {
	// Name is a fixed identifier: length_filter, header_filter, queue, shaper, ipsec,
	// capture, ipv4_alone, ipv6_forwarding, small_frags, driver, tunnel, offload_off,
	// iptables_legacy.
	Name   string `json:"name"`
	Detail string `json:"detail"` // the finding and its consequence
	Hint   string `json:"hint,omitempty"`
}

// The names of incompatibilities.
const (
	lengthFilter   = "length_filter" // packet filters that match on the length
	headerFilter   = "header_filter" // packet filters that match on the next header of IPv6
	queueFilter    = "queue"         // packet filters that queue packets to programs
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

// maxListed bounds the rules, processes and interfaces that an incompatibility names.
const maxListed = 5

// Find returns the known incompatibilities of a namespace and of its interfaces, the
// latter by name. It changes nothing, and loads no kernel module where that can be
// avoided. ifaces must be all interfaces of the namespace, because tunnels are
// reported for their lower interfaces. Missing permission is reported as an
// incompatibility. Other failures are returned as an error beside the results of the
// remaining checks.
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
		ofInterface := slices.Concat(
			checkCaptures(captures[i.Index], kernel),
			checkIPv4Alone(i, s, kernel, n.Path()),
			checkDriver(i),
			checkOffloads(i),
			checkTunnels(i, over[i.Index], kernel),
			checkShapers(i, shapers[i.Index]),
		)
		if len(ofInterface) > 0 {
			byInterface[i.Name] = ofInterface
		}
	}
	return host, byInterface, errors.Join(failed...)
}

// jumbogramsUntil is the first kernel that does not insert a hop-by-hop option into
// IPv6 packets above 65535 bytes.
var jumbogramsUntil = linux.Version{7, 0, 0}

// checkForwarding reports routers whose kernel counts the option: packets with
// segments that fill the MTU are 8 bytes too large (ip6_forward, ip6_pkt_too_big).
// TestVerifyRefusedByRouter reproduces it.
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
		return nil, fmt.Errorf("read sysctl net.ipv6.conf.all.forwarding: %w", err)
	}
	return []Incompatibility{{
		Name: ipv6Forwarding,
		Detail: "this host forwards IPv6, and kernels before 7.0 count 8 bytes more for each segment of a packet above 65535 bytes: " +
			"on an interface with the MTU of the connection they drop the packet as too big",
		Hint: "raise the MTU of the outgoing interfaces by 8 bytes or more, or keep the IPv6 sizes of the incoming interfaces at 65536",
	}}, nil
}

// listed joins the first maxListed words and counts the others.
func listed(words []string, separator string) string {
	if len(words) <= maxListed {
		return strings.Join(words, separator)
	}
	return fmt.Sprintf("%s and %d more", strings.Join(words[:maxListed], separator), len(words)-maxListed)
}

// checkCaptures reports packet sockets, by the names of their processes.
func checkCaptures(processes []string, kernel linux.Version) []Incompatibility {
	if len(processes) == 0 {
		return nil
	}
	detail := "packet sockets are open in " + listed(processes, ", ") + ": in captures, packets above 65535 bytes have " +
		"a length of 0 in their headers, which tcpdump 4.99.3 prints as \"IP bad-len 0\""
	if kernel.Before(linux.Version{7, 0, 0}) {
		detail += "; capture filters such as \"tcp\" and \"port 443\" do not match those of IPv6, which have hop-by-hop options before TCP"
	}
	return []Incompatibility{{
		Name:   capture,
		Detail: detail,
		Hint: "the length of the captured packet is correct up to the snapshot length (262144 bytes for tcpdump); " +
			"set the sizes to 65536 while captures need correct headers",
	}}
}

// checkIPsec reports transformations: sk_setup_caps of net/core/sock.c turns GSO off
// for their sockets.
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
	// The kernel has no IPsec, or permission is missing.
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
		Detail: fmt.Sprintf("%d outbound IPsec policies: the connections that match send packets of one segment each, "+
			"unless the interface offloads the encryption", out),
		Hint: "only connections without IPsec have large packets",
	}}, nil
}

const maxSkbFrags = "/proc/sys/net/core/max_skb_frags"

// checkFragments reports a small max_skb_frags: MAX_SKB_FRAGS in net/Kconfig,
// skb_splice_from_iter in net/core/skbuff.c.
func checkFragments(ifaces []netif.Interface) ([]Incompatibility, error) {
	text, err := os.ReadFile(maxSkbFrags)
	// The sysctl exists in the initial network namespace only.
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read sysctl net.core.max_skb_frags: %w", err)
	}
	frags, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 31)
	if err != nil {
		return nil, fmt.Errorf("read sysctl net.core.max_skb_frags: %w", err)
	}
	return compareFragments(frags, uint64(os.Getpagesize()), ifaces), nil
}

// compareFragments compares the capacity of a packet's fragments with the largest GSO
// size of all interfaces, or with 192 KB if BIG TCP is off.
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
		Detail: fmt.Sprintf("net.core.max_skb_frags is %d: a packet of zero-copy data (sendfile, splice, MSG_ZEROCOPY) "+
			"has as many pages of %d bytes, %d bytes, unless the pages are contiguous in memory; "+
			"ordinary writes are not affected, their fragments have 32768 bytes", frags, page, frags*page),
		Hint: "the maximum is the kernel's CONFIG_MAX_SKB_FRAGS: 17 by default, up to 45 from Linux 6.4",
	}}
}

// checkIPv4Alone reports kernels that compare packets of both families with the GSO
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
		Detail: fmt.Sprintf("IPv4 has %d bytes and IPv6 %d: Linux %s segments packets of both families above the size of IPv6 in software, before the driver",
			i.Sizes.GSOIPv4, i.Sizes.GSO, kernel),
		Hint: command + "; fixed in Linux 6.12, 6.11.3, 6.10.14 and 6.6.55",
	}}
}

// cutsIPv4Alone tells whether gso_features_check compares IPv4 packets with
// gso_max_size: since commit 24ab059d2ebd (6.7, 6.6.9) and until e609c959a939 (6.12,
// 6.11.3, 6.10.14, 6.6.55).
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

// checkDriver reports an interface that does not support large packets itself;
// interfaces that inherit the limit are not reported.
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
			Detail: strings.TrimSpace(fmt.Sprintf("%s supports packets of at most %d bytes (tso_max_size): larger packets cannot be sent; "+
				"received packets may be merged to larger ones", named, i.TSOMaxSize)),
			Hint: "drivers with larger packets are mlx5, mlx4, bnxt, ice, gve and mana, and lo, veth and netkit; later kernels may have others",
		}}
	}
	// IPv4 and TCP with timestamps.
	const headers = 52
	if most := uint64(i.TSOMaxSegs) * uint64(max(i.MTU-headers, 0)); i.TSOMaxSegs > 0 && most <= netif.Legacy {
		return []Incompatibility{{
			Name:   driver,
			Detail: fmt.Sprintf("%s supports at most %d segments per packet (tso_max_segs), %d bytes at an MTU of %d", named, i.TSOMaxSegs, most, i.MTU),
			Hint:   "a larger MTU allows larger packets",
		}}
	}
	return nil
}

// checkOffloads reports features that are off. GSO is not among them: TCP builds large
// packets without it (sk_setup_caps in net/core/sock.c), which an interface with TSO
// gets.
func checkOffloads(i *netif.Interface) []Incompatibility {
	var found []Incompatibility
	if !i.Offloads.TSO {
		hint := fmt.Sprintf("ethtool -K %s sg on tso on", i.Name)
		if i.Kind == "veth" {
			hint += "; a native XDP program on the peer turns TSO off while it is attached"
		}
		found = append(found, Incompatibility{
			Name:   offloadOff,
			Detail: "TSO is off: the kernel segments packets to the MTU in software, before the driver",
			Hint:   hint,
		})
	}
	if !i.Offloads.GRO && i.Kind != "veth" && i.Sizes.GRO > netif.Legacy {
		found = append(found, Incompatibility{
			Name:   offloadOff,
			Detail: "GRO is off: received packets are not merged, whatever gro_max_size is",
			Hint:   fmt.Sprintf("ethtool -K %s gro on", i.Name),
		})
	}
	return found
}

// tunnelsByLower returns the names of tunnels without large packets, by the index of
// their lower interfaces.
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

// checkTunnels reports a tunnel, and the lower interface of tunnels.
func checkTunnels(i *netif.Interface, over []string, kernel linux.Version) []Incompatibility {
	var found []Incompatibility
	switch {
	case !netif.LegacyTunnel(i, kernel):
	case i.Sizes.GSO > netif.Legacy || i.Sizes.GSOIPv4 > netif.Legacy:
		hint := fmt.Sprintf("ip link set %s gso_max_size %d", i.Name, netif.Legacy)
		if i.Sizes.GSO <= netif.Legacy {
			// The kernel resets this size only if gso_max_size changes.
			hint = fmt.Sprintf("ip link set %s gso_ipv4_max_size %d", i.Name, netif.Legacy)
		}
		found = append(found, Incompatibility{
			Name: tunnel,
			Detail: fmt.Sprintf("%s has sizes above %d bytes: the outer headers have lengths of 16 bits, which are truncated for larger packets; "+
				"the receiver drops these, so that connections can be many times slower", i.Kind, netif.Legacy),
			Hint: hint,
		})
	default:
		found = append(found, Incompatibility{
			Name:   tunnel,
			Detail: fmt.Sprintf("%s encapsulates packets of at most %d bytes", i.Kind, netif.Legacy),
			Hint:   "do not raise its sizes, even where the kernel accepts larger ones, as for VXLAN before Linux 7.3",
		})
	}
	if len(over) > 0 {
		found = append(found, Incompatibility{
			Name:   tunnel,
			Detail: fmt.Sprintf("it is the lower interface of tunnels (%s), which encapsulate packets of at most %d bytes", listed(over, ", "), netif.Legacy),
			Hint:   "connections outside the tunnels have large packets",
		})
	}
	return found
}
