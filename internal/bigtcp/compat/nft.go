// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"sockeye/internal/nlattr"
)

// inspected is a set of properties that a rule of a packet filter inspects and that
// differ in large packets.
type inspected uint8

const (
	ipv4TotalLength   inspected = 1 << iota // total length in the IPv4 header
	ipv6PayloadLength                       // payload length in the IPv6 header
	packetLength                            // length of the packet in memory
	xtLength                                // packetLength, with a range that ends at 65535
	nextHeader                              // next header in the IPv6 header, or hop-by-hop options
	queued                                  // the rule queues packets to a program
)

// filterRule is a rule of a packet filter that inspects such properties.
type filterRule struct {
	inspects inspected
	where    string // as in "nft inet filter input, handle 7"
}

// nftRules returns the rules of nftables in the thread's network namespace that inspect
// properties which differ in large packets. Needs CAP_NET_ADMIN. All tables are read in
// one dump, whose messages are parsed as they arrive. An interrupted dump is repeated.
func nftRules() ([]filterRule, error) {
	if loaded, err := moduleLoaded("nf_tables"); err != nil || !loaded {
		return nil, err
	}
	var rules []filterRule
	// A change of the rules interrupts a dump. If they change continuously, the last
	// dump is used.
	for range 3 {
		rules = nil
		request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP)
		request.AddData(&nl.Nfgenmsg{NfgenFamily: unix.NFPROTO_UNSPEC, Version: nl.NFNETLINK_V0})
		err := request.ExecuteIter(unix.NETLINK_NETFILTER, 0, func(message []byte) bool {
			if r := parseNftRule(message); r.inspects != 0 {
				rules = append(rules, r)
			}
			return true
		})
		switch {
		case errors.Is(err, nl.ErrDumpInterrupted), errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPROTONOSUPPORT):
			return nil, nil // the kernel has no nftables
		case err != nil:
			return nil, fmt.Errorf("read rules of nftables: %w", err)
		}
		break
	}
	return rules, nil
}

// nftFamilies contains the names of the families in nft(8).
var nftFamilies = map[uint8]string{
	unix.NFPROTO_INET:   "inet",
	unix.NFPROTO_IPV4:   "ip",
	unix.NFPROTO_ARP:    "arp",
	unix.NFPROTO_NETDEV: "netdev",
	unix.NFPROTO_BRIDGE: "bridge",
	unix.NFPROTO_IPV6:   "ip6",
}

// nftParser parses the expressions of a rule in their order.
type nftParser struct {
	family uint8
	// protocol is NFPROTO_IPV4 or NFPROTO_IPV6 if the preceding expressions match only
	// one of them. loaded is set if the previous expression loaded a field that
	// identifies the protocol.
	protocol uint8
	loaded   bool
	inspects inspected
}

// parseNftRule parses a message NFT_MSG_NEWRULE, from struct nfgenmsg on. Unknown
// attributes and expressions are skipped.
func parseNftRule(message []byte) filterRule {
	if len(message) < nl.SizeofNfgenmsg {
		return filterRule{}
	}
	family := message[0]
	var (
		table, chain string
		handle       uint64
		parser       = nftParser{family: family}
	)
	switch family {
	case unix.NFPROTO_IPV4, unix.NFPROTO_IPV6:
		parser.protocol = family
	}
	for kind, value := range nlattr.Attributes(message[nl.SizeofNfgenmsg:]).All {
		switch kind {
		case unix.NFTA_RULE_TABLE:
			table = unix.ByteSliceToString(value)
		case unix.NFTA_RULE_CHAIN:
			chain = unix.ByteSliceToString(value)
		case unix.NFTA_RULE_HANDLE:
			if len(value) == 8 {
				handle = binary.BigEndian.Uint64(value)
			}
		case unix.NFTA_RULE_EXPRESSIONS:
			for _, expression := range nlattr.Attributes(value).All {
				parser.expression(expression)
			}
		}
	}
	name, known := nftFamilies[family]
	if !known {
		name = fmt.Sprintf("family %d", family)
	}
	return filterRule{parser.inspects, fmt.Sprintf("nft %s %s %s, handle %d", name, table, chain, handle)}
}

func (p *nftParser) expression(expression []byte) {
	var name string
	var data []byte
	for kind, value := range nlattr.Attributes(expression).All {
		switch kind {
		case unix.NFTA_EXPR_NAME:
			name = unix.ByteSliceToString(value)
		case unix.NFTA_EXPR_DATA:
			data = value
		}
	}
	compares := p.loaded
	p.loaded = false
	switch name {
	case "meta":
		p.meta(data)
	case "cmp":
		if compares {
			p.compare(data)
		}
	case "payload":
		p.payload(data)
	case "exthdr":
		p.extension(data)
	case "match":
		p.inspects |= inspectedByMatch(nlattr.String(data, unix.NFTA_MATCH_NAME))
	case "target":
		p.inspects |= inspectedByTarget(nlattr.String(data, unix.NFTA_TARGET_NAME))
	case "queue":
		p.inspects |= queued
	}
}

// inspectedByMatch returns the properties that a match of xtables inspects. Rules of
// iptables-nft have such expressions (nft_compat).
func inspectedByMatch(name string) inspected {
	switch name {
	case "length":
		return xtLength
	case "hbh", "ipv6header":
		return nextHeader
	}
	return 0
}

// inspectedByTarget returns the properties that a target of xtables inspects.
func inspectedByTarget(name string) inspected {
	if name == "NFQUEUE" {
		return queued
	}
	return 0
}

func (p *nftParser) meta(data []byte) {
	key, ok := nlattr.Uint32(data, unix.NFTA_META_KEY)
	switch {
	case !ok:
	case key == unix.NFT_META_LEN:
		p.inspects |= packetLength
	case key == unix.NFT_META_NFPROTO, key == unix.NFT_META_PROTOCOL:
		p.loaded = true
	}
}

func (p *nftParser) compare(data []byte) {
	if op, ok := nlattr.Uint32(data, unix.NFTA_CMP_OP); !ok || op != unix.NFT_CMP_EQ {
		return
	}
	var constant []byte
	for kind, value := range nlattr.Attributes(data).All {
		if kind == unix.NFTA_CMP_DATA {
			constant = nlattr.Find(value, unix.NFTA_DATA_VALUE)
		}
	}
	switch {
	case len(constant) == 1:
		p.protocol = constant[0]
	case len(constant) != 2:
	case binary.BigEndian.Uint16(constant) == unix.ETH_P_IP:
		p.protocol = unix.NFPROTO_IPV4
	case binary.BigEndian.Uint16(constant) == unix.ETH_P_IPV6:
		p.protocol = unix.NFPROTO_IPV6
	}
}

// payload parses a load of header bytes. nft(8) merges loads of adjacent fields.
func (p *nftParser) payload(data []byte) {
	base, ok := nlattr.Uint32(data, unix.NFTA_PAYLOAD_BASE)
	if !ok || p.family == unix.NFPROTO_ARP {
		return
	}
	offset, _ := nlattr.Uint32(data, unix.NFTA_PAYLOAD_OFFSET)
	size, _ := nlattr.Uint32(data, unix.NFTA_PAYLOAD_LEN)
	if base == unix.NFT_PAYLOAD_LL_HEADER {
		p.loaded = offset == 12 && size == 2 // the type of an Ethernet frame
	}
	if base != unix.NFT_PAYLOAD_NETWORK_HEADER {
		return
	}
	covers := func(from, to uint32) bool {
		return offset < to && uint64(offset)+uint64(size) > uint64(from)
	}
	switch p.protocol {
	case unix.NFPROTO_IPV4:
		if covers(2, 4) {
			p.inspects |= ipv4TotalLength
		}
	case unix.NFPROTO_IPV6:
		if covers(4, 6) {
			p.inspects |= ipv6PayloadLength
		}
		if covers(6, 7) {
			p.inspects |= nextHeader
		}
	default:
		// The protocol is unknown: a load of exactly the field is assumed to be the field.
		if offset == 2 && size == 2 {
			p.inspects |= ipv4TotalLength
		}
		if offset == 4 && size == 2 {
			p.inspects |= ipv6PayloadLength
		}
	}
}

// extension parses a match on an IPv6 extension header; the number of hop-by-hop
// options is 0.
func (p *nftParser) extension(data []byte) {
	op, _ := nlattr.Uint32(data, unix.NFTA_EXTHDR_OP)
	kind := nlattr.Find(data, unix.NFTA_EXTHDR_TYPE)
	if op == 0 && len(kind) == 1 && kind[0] == unix.IPPROTO_HOPOPTS {
		p.inspects |= nextHeader
	}
}
