// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"sockeye/internal/linux"
)

const network = unix.NFT_PAYLOAD_NETWORK_HEADER

// ruleCases are expressions of a rule, and the properties that they inspect.
var ruleCases = []struct {
	name        string
	family      uint8
	expressions []*nl.RtAttr
	inspects    inspected
}{
	{"meta length", unix.NFPROTO_INET, longer(1500), packetLength},
	{"ip length", unix.NFPROTO_IPV4, []*nl.RtAttr{payload(network, 2, 2), compare(unix.NFT_CMP_GT, 5, 220)}, ipv4TotalLength},
	{"ip length in inet", unix.NFPROTO_INET, slices.Concat(isIPv4, []*nl.RtAttr{payload(network, 2, 2)}), ipv4TotalLength},
	{"ip6 length", unix.NFPROTO_IPV6, []*nl.RtAttr{payload(network, 4, 2), compare(unix.NFT_CMP_LT, 0, 100)}, ipv6PayloadLength},
	{"ip6 length in inet", unix.NFPROTO_INET, slices.Concat(isIPv6, []*nl.RtAttr{payload(network, 4, 2)}), ipv6PayloadLength},
	{"ip6 length and nexthdr as one", unix.NFPROTO_IPV6, []*nl.RtAttr{payload(network, 4, 3)}, ipv6PayloadLength | nextHeader},
	{"ip length in bridge", unix.NFPROTO_BRIDGE, []*nl.RtAttr{
		meta(unix.NFT_META_PROTOCOL), compare(unix.NFT_CMP_EQ, 0x08, 0x00), payload(network, 2, 2),
	}, ipv4TotalLength},
	{"ip6 length by ether type", unix.NFPROTO_BRIDGE, []*nl.RtAttr{
		payload(unix.NFT_PAYLOAD_LL_HEADER, 12, 2), compare(unix.NFT_CMP_EQ, 0x86, 0xdd), payload(network, 4, 2),
	}, ipv6PayloadLength},
	{"@nh,16,16", unix.NFPROTO_INET, []*nl.RtAttr{payload(network, 2, 2)}, ipv4TotalLength},
	{"ip6 nexthdr", unix.NFPROTO_IPV6, []*nl.RtAttr{payload(network, 6, 1), compare(unix.NFT_CMP_EQ, 6)}, nextHeader},
	{"exthdr hbh", unix.NFPROTO_INET, slices.Concat(isIPv6, []*nl.RtAttr{extension(unix.IPPROTO_HOPOPTS)}), nextHeader},
	{"queue", unix.NFPROTO_IPV4, []*nl.RtAttr{expr("queue")}, queued},
	{"-m length", unix.NFPROTO_IPV4, []*nl.RtAttr{notLength(), counter()}, xtLength},
	{"-j NFQUEUE", unix.NFPROTO_IPV4, []*nl.RtAttr{notLength(), expr("target", nl.NewRtAttr(unix.NFTA_TARGET_NAME, nl.ZeroTerminated("NFQUEUE")),
		be32(unix.NFTA_TARGET_REV, 0), nl.NewRtAttr(unix.NFTA_TARGET_INFO, make([]byte, 8)))}, xtLength | queued},

	{"ip length in netdev", unix.NFPROTO_NETDEV, []*nl.RtAttr{
		meta(unix.NFT_META_PROTOCOL), compare(unix.NFT_CMP_EQ, 0x08, 0x00), payload(network, 2, 2),
	}, ipv4TotalLength},

	{"ip id", unix.NFPROTO_IPV4, []*nl.RtAttr{payload(network, 4, 2)}, 0},
	{"ip saddr", unix.NFPROTO_IPV4, []*nl.RtAttr{payload(network, 12, 4)}, 0},
	{"ip protocol", unix.NFPROTO_IPV4, []*nl.RtAttr{payload(network, 9, 1)}, 0},
	{"ip frag-off in inet", unix.NFPROTO_INET, slices.Concat(isIPv4, []*nl.RtAttr{payload(network, 6, 2)}), 0},
	{"ip6 flowlabel", unix.NFPROTO_IPV6, []*nl.RtAttr{payload(network, 1, 3)}, 0},
	{"ip6 saddr", unix.NFPROTO_IPV6, []*nl.RtAttr{payload(network, 8, 16)}, 0},
	{"ip6 hoplimit", unix.NFPROTO_IPV6, []*nl.RtAttr{payload(network, 7, 1)}, 0},
	{"tcp dport", unix.NFPROTO_INET, []*nl.RtAttr{payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2)}, 0},
	{"udp length", unix.NFPROTO_IPV6, []*nl.RtAttr{payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 4, 2)}, 0},
	{"meta mark", unix.NFPROTO_INET, []*nl.RtAttr{meta(unix.NFT_META_MARK)}, 0},
	{"exthdr frag", unix.NFPROTO_IPV6, []*nl.RtAttr{extension(unix.IPPROTO_FRAGMENT)}, 0},
	{"arp operation", unix.NFPROTO_ARP, []*nl.RtAttr{payload(network, 6, 2)}, 0},
	{"other protocol", unix.NFPROTO_BRIDGE, []*nl.RtAttr{
		meta(unix.NFT_META_PROTOCOL), compare(unix.NFT_CMP_EQ, 0x08, 0x00), payload(network, 4, 2),
	}, 0},
	{"nothing", unix.NFPROTO_INET, nil, 0},
}

// nftMessageOf returns the message with which the kernel reports a rule.
func nftMessageOf(family uint8, expressions []*nl.RtAttr) []byte {
	list := nl.NewRtAttr(unix.NFTA_RULE_EXPRESSIONS|unix.NLA_F_NESTED, nil)
	for _, e := range expressions {
		list.AddChild(e)
	}
	return nftMessage(unix.NFT_MSG_NEWRULE, family, 0,
		nl.NewRtAttr(unix.NFTA_RULE_TABLE, nl.ZeroTerminated("filter")),
		nl.NewRtAttr(unix.NFTA_RULE_CHAIN, nl.ZeroTerminated("input")),
		nl.NewRtAttr(unix.NFTA_RULE_HANDLE, []byte{0, 0, 0, 0, 0, 0, 1, 2}),
		list).Serialize()[unix.SizeofNlMsghdr:]
}

func TestParseNftRule(t *testing.T) {
	for _, c := range ruleCases {
		r := parseNftRule(nftMessageOf(c.family, c.expressions))
		if r.inspects != c.inspects {
			t.Errorf("%s: sees %b, not %b", c.name, r.inspects, c.inspects)
		}
		if want := fmt.Sprintf("nft %s filter input, handle 258", nftFamilies[c.family]); r.where != want {
			t.Errorf("%s: is at %q, not %q", c.name, r.where, want)
		}
	}
}

func FuzzParseNftRule(f *testing.F) {
	for _, c := range ruleCases {
		f.Add(nftMessageOf(c.family, c.expressions))
	}
	cut := nftMessageOf(unix.NFPROTO_INET, isIPv4)
	for k := range cut {
		f.Add(cut[:k])
	}
	f.Fuzz(func(t *testing.T, message []byte) {
		r := parseNftRule(message)
		if len(r.where) > len(message)+100 {
			t.Errorf("%d bytes make %q", len(message), r.where)
		}
	})
}

// TestNftRulesAreFound creates rules in a namespace and finds them.
func TestNftRulesAreFound(t *testing.T) {
	kernel := mustKernel(t)
	for family, name := range nftFamilies {
		t.Run(name, func(t *testing.T) {
			n := newNamespace(t)
			host, _ := findAll(t, n)
			for _, kind := range filterKinds {
				wantNotFound(t, host, kind.name)
			}
			var cases []inspected
			var rules [][]*nl.RtAttr
			for _, c := range ruleCases {
				// Kernels may lack the expression queue; most have -j NFQUEUE.
				if c.family == family && c.name != "queue" {
					cases, rules = append(cases, c.inspects), append(rules, c.expressions)
				}
			}
			nftTable(t, n, family, unix.NF_INET_LOCAL_IN, rules...)
			host, _ = findAll(t, n)
			for k, s := range cases {
				where := fmt.Sprintf("nft %s t c, handle %d", name, k+2)
				for _, kind := range filterKinds {
					there := kind.until == linux.Version{} || kernel.Before(kind.until)
					// Kinds with the same name differ in their details.
					found := mentions(host, kind.name, kind.detail, where+";", where+":")
					if want := there && s&kind.inspects != 0; found != want {
						t.Errorf("%s is in an incompatibility %s: %v, not %v: %+v", where, kind.name, found, want, host)
					}
				}
			}
		})
	}
}

// mentions reports whether an incompatibility has this name, the detail and one of the words.
func mentions(all []Incompatibility, name, detail string, words ...string) bool {
	return slices.ContainsFunc(words, func(w string) bool {
		_, found := find(all, name, detail, w)
		return found
	})
}

func mustKernel(t testing.TB) linux.Version {
	t.Helper()
	v, err := linux.Running()
	must(t, err)
	return v
}

// TestFiltersMatchAsDescribed sends large packets through rules with counters, and compares
// the counters with the descriptions in filterKinds.
func TestFiltersMatchAsDescribed(t *testing.T) {
	kernel := mustKernel(t)
	if kernel.Before(linux.Version{6, 3, 0}) {
		t.Skip("kernel: there are no large packets of IPv4 before 6.3")
	}
	a, b := newPair(t)
	counted := func(expressions ...*nl.RtAttr) []*nl.RtAttr { return append(expressions, counter()) }
	large := counted(longer(65535)...)
	const ipv6Header = 40 // the length field of IPv6 does not count it (RFC 8200): a packet of 65,575 bytes still has its length there
	nftTable(t, b, unix.NFPROTO_IPV4, unix.NF_INET_LOCAL_IN,
		large,
		counted(payload(network, 2, 2), compare(unix.NFT_CMP_EQ, 0, 0)),
		counted(notLength()),
	)
	nftTable(t, b, unix.NFPROTO_IPV6, unix.NF_INET_LOCAL_IN,
		large,
		counted(payload(network, 4, 2), compare(unix.NFT_CMP_EQ, 0, 0)),
		counted(notLength()),
		counted(payload(network, 6, 1), compare(unix.NFT_CMP_EQ, 0)),
		counted(extension(unix.IPPROTO_HOPOPTS), compare(unix.NFT_CMP_EQ, 1)),
		// These rules count smaller packets, which the rules above must not count.
		counted(payload(network, 6, 1), compare(unix.NFT_CMP_EQ, unix.IPPROTO_TCP)),
		counted(longer(65535+ipv6Header)...),
	)
	// Handles are unique in a table only, so that the two tables are read one after the other.
	for _, c := range []struct {
		address string
		family  uint8
		same    map[uint64]uint64 // handles of rules that must see the same as a rule of meta length
		none    []uint64
	}{
		{"10.9.0.2", unix.NFPROTO_IPV4, map[uint64]uint64{3: 2, 4: 2}, nil},
		{"fd09::2", unix.NFPROTO_IPV6, map[uint64]uint64{3: 8, 4: 2, 5: 8, 6: 8}, []uint64{7}},
	} {
		before := nftCounters(t, b, c.family)
		stream(t, a, b, c.address, time.Second)
		after := nftCounters(t, b, c.family)
		for handle, reference := range c.same {
			got, many := after[handle]-before[handle], after[reference]-before[reference]
			if many == 0 {
				t.Fatalf("%s: no packet is above 65535 bytes", c.address)
			}
			// The rules on the next header are compatible from 7.0 on.
			if handle >= 5 && !kernel.Before(linux.Version{7, 0, 0}) {
				if got != 0 {
					t.Errorf("%s: rule %d sees %d packets, not none", c.address, handle, got)
				}
			} else if got != many {
				t.Errorf("%s: rule %d sees %d packets, not %d", c.address, handle, got, many)
			}
		}
		for _, handle := range c.none {
			if after[handle] == 0 {
				t.Errorf("%s: rule %d sees no packet", c.address, handle)
			}
		}
	}
}

// longer returns the expressions of nft(8) for meta length > size.
func longer(size uint32) []*nl.RtAttr {
	return []*nl.RtAttr{
		meta(unix.NFT_META_LEN),
		expr("byteorder", be32(unix.NFTA_BYTEORDER_SREG, unix.NFT_REG_1), be32(unix.NFTA_BYTEORDER_DREG, unix.NFT_REG_1),
			be32(unix.NFTA_BYTEORDER_OP, unix.NFT_BYTEORDER_HTON), be32(unix.NFTA_BYTEORDER_LEN, 4), be32(unix.NFTA_BYTEORDER_SIZE, 4)),
		compare(unix.NFT_CMP_GT, binary.BigEndian.AppendUint32(nil, size)...),
	}
}

func TestManyNftRules(t *testing.T) {
	n := newNamespace(t)
	const many = 30_000
	rules := make([][]*nl.RtAttr, many)
	for k := range rules {
		rules[k] = []*nl.RtAttr{payload(network, 12, 4), compare(unix.NFT_CMP_EQ, 10, byte(k>>16), byte(k>>8), byte(k)), counter()}
		if k%1000 == 0 {
			rules[k] = []*nl.RtAttr{payload(network, 2, 2), counter()}
		}
	}
	nftTable(t, n, unix.NFPROTO_IPV4, unix.NF_INET_LOCAL_IN, rules...)
	start := time.Now()
	host, _ := findAll(t, n)
	took := time.Since(start)
	t.Logf("%d rules take %v", many, took)
	if took > 20*time.Second {
		t.Errorf("%d rules take %v", many, took)
	}
	wantFound(t, host, lengthFilter, "nft ip t c, handle 2;", "and 25 more:")
}
