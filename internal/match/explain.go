// SPDX-License-Identifier: Apache-2.0

package match

import (
	"bytes"
	"fmt"
	"math/bits"
	"net/netip"
	"strings"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
)

// Question describes an existing or hypothetical connection. Local and Remote have the same family; an IPv4-mapped
// address is IPv4, and zones are ignored. Role is never "". Tag is the tag that the peer sent, 1 to 16 bytes; nil for
// none or an unknown tag.
type Question struct {
	Local, Remote netip.AddrPort
	Role          config.Role
	Tag           []byte
}

// Step is the evaluation of one rule for a connection.
type Step struct {
	Rule    string `json:"rule"`
	Matches bool   `json:"matches"`
	// Why describes the first condition that does not hold, or all conditions if all hold.
	Why string `json:"why"`
}

// BPF returns the question in the format of the programs.
func (q Question) BPF() bpf.MatchQuestion {
	q = q.normalized()
	b := bpf.MatchQuestion{Role: bpf.MatchAccept, Tag: TagOf(q.Tag)}
	if q.Role == config.RoleConnect {
		b.Role = bpf.MatchConnect
	}
	b.Tuple.Local, b.Tuple.LocalPort = bpf.MappedAddress(q.Local.Addr()), q.Local.Port()
	b.Tuple.Remote, b.Tuple.RemotePort = bpf.MappedAddress(q.Remote.Addr()), q.Remote.Port()
	return b
}

// condition is the evaluation of one key of a match.
type condition struct {
	holds bool
	why   string // "": the match does not have the key
}

// Judge evaluates a rule, given by its name and its match, for a connection. Judge is the reference model of the
// programs in user space. services are the services of the policy.
func Judge(q Question, rule string, m config.Match, services []config.Service) Step {
	q = q.normalized()
	port := q.Local.Port()
	if q.Role == config.RoleConnect {
		port = q.Remote.Port()
	}
	var reasons []string
	for _, c := range []condition{
		q.role(m.Role),
		q.service(m.Service, services),
		inPorts("port", port, m.Ports),
		inPorts("remote port", q.Remote.Port(), m.RemotePorts),
		inPorts("local port", q.Local.Port(), m.LocalPorts),
		inPrefixes("remote", q.Remote.Addr(), m.Remote),
		inPrefixes("local", q.Local.Addr(), m.Local),
		q.samePrefix(m.SamePrefix),
		q.tag(m.Tag),
	} {
		if !c.holds {
			return Step{Rule: rule, Why: c.why}
		}
		if c.why != "" {
			reasons = append(reasons, c.why)
		}
	}
	if reasons == nil {
		return Step{Rule: rule, Matches: true, Why: "the rule matches all connections"}
	}
	return Step{Rule: rule, Matches: true, Why: strings.Join(reasons, ", ")}
}

// normalized returns the question with unmapped addresses and without zones.
func (q Question) normalized() Question {
	for _, end := range []*netip.AddrPort{&q.Local, &q.Remote} {
		*end = netip.AddrPortFrom(end.Addr().Unmap().WithZone(""), end.Port())
	}
	return q
}

func (q Question) role(want config.Role) condition {
	if want == "" {
		return condition{holds: true}
	}
	is := fmt.Sprintf("role is %s", q.Role)
	return conditionOf(q.Role == want, is, fmt.Sprintf("%s, not %s", is, want))
}

// service finds the listener that accepted the connection.
func (q Question) service(name string, services []config.Service) condition {
	if name == "" {
		return condition{holds: true}
	}
	if q.Role == config.RoleConnect {
		return condition{false, "role is connect, service " + name + " requires accept"}
	}
	for _, s := range services {
		for _, l := range s.Listeners {
			if s.Name == name && l.Protocol == config.TCP && accepts(l, q.Local) {
				return condition{true, fmt.Sprintf("local %v is listener %v of service %s", q.Local, l, name)}
			}
		}
	}
	return condition{false, fmt.Sprintf("local %v is not a listener of service %s", q.Local, name)}
}

// accepts returns whether a connection to an address reaches a listener. A listener on [::] also accepts IPv4 unless
// V6Only is set.
func accepts(l config.Listener, local netip.AddrPort) bool {
	addr := l.Address.Addr()
	if l.Address.Port() != local.Port() {
		return false
	}
	if !addr.IsUnspecified() {
		return addr == local.Addr()
	}
	return addr.Is6() && !l.V6Only || addr.Is4() == local.Addr().Is4()
}

func inPorts(name string, port uint16, ranges []config.PortRange) condition {
	if len(ranges) == 0 {
		return condition{holds: true}
	}
	is := fmt.Sprintf("%s %d is ", name, port)
	for _, r := range ranges {
		switch {
		case port < r.First || r.Last < port:
		case r.First == r.Last:
			return condition{true, fmt.Sprintf("%s is %d", name, port)}
		default:
			return condition{true, fmt.Sprintf("%sin %v", is, r)}
		}
	}
	switch r := ranges[0]; {
	case len(ranges) > 1:
		return condition{false, fmt.Sprintf("%snot in any of %d ranges", is, len(ranges))}
	case r.First == r.Last:
		return condition{false, fmt.Sprintf("%snot %v", is, r)}
	default:
		return condition{false, fmt.Sprintf("%snot in %v", is, r)}
	}
}

// inPrefixes evaluates a set of prefixes: the longest prefix that contains the address decides. An empty non-nil set
// contains no address.
func inPrefixes(name string, addr netip.Addr, set []config.PrefixTerm) condition {
	if set == nil {
		return condition{holds: true}
	}
	var longest *config.PrefixTerm
	for i := range set {
		if p := &set[i]; p.Prefix.Contains(addr) && (longest == nil || p.Prefix.Bits() >= longest.Prefix.Bits()) {
			longest = p
		}
	}
	is := fmt.Sprintf("%s %v is ", name, addr)
	switch {
	case longest != nil:
		return condition{!longest.Not, fmt.Sprintf("%sin %v", is, longest)}
	case len(set) == 1:
		return condition{false, fmt.Sprintf("%snot in %v", is, set[0])}
	}
	return condition{false, fmt.Sprintf("%snot in any of %d prefixes", is, len(set))}
}

func (q Question) samePrefix(want *config.SamePrefix) condition {
	if want == nil {
		return condition{holds: true}
	}
	least, other := want.IPv6, "address family is IPv6, same_prefix requires IPv4"
	if q.Remote.Addr().Is4() {
		least, other = want.IPv4, "address family is IPv4, same_prefix requires IPv6"
	}
	if least < 0 {
		return condition{false, other}
	}
	shared := sharedBits(q.Local.Addr(), q.Remote.Addr())
	is := fmt.Sprintf("addresses share %d bits", shared)
	return conditionOf(shared >= least, is, fmt.Sprintf("%s, not %d", is, least))
}

// sharedBits returns the length of the common prefix of two addresses of one family.
func sharedBits(a, b netip.Addr) int {
	x, y := a.AsSlice(), b.AsSlice()
	for i := range min(len(x), len(y)) {
		if differ := x[i] ^ y[i]; differ != 0 {
			return 8*i + bits.LeadingZeros8(differ)
		}
	}
	return 8 * len(x)
}

func (q Question) tag(want []byte) condition {
	switch {
	case want == nil:
		return condition{holds: true}
	case len(q.Tag) == 0:
		return condition{false, "the peer sent no tag"}
	}
	is := "the peer's tag is " + config.FormatTag(q.Tag)
	return conditionOf(bytes.Equal(q.Tag, want), is, is+", not "+config.FormatTag(want))
}

// conditionOf returns the condition of a key, with the text yes if the condition holds, and otherwise with the text no.
func conditionOf(holds bool, yes, no string) condition {
	if holds {
		return condition{true, yes}
	}
	return condition{false, no}
}
