// SPDX-License-Identifier: Apache-2.0

// Package match compiles the matches of policy rules for the BPF programs, and explains which rule applies to a
// connection.
package match

import (
	"cmp"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
)

// term is a conjunction of conditions. A rule is a disjunction of one or more terms.
type term struct {
	rule        int // index into the rules
	remote      []config.PrefixTerm
	local       []config.PrefixTerm
	remotePorts []config.PortRange // empty: all ports
	localPorts  []config.PortRange
	roles       [bpf.MatchRoles]bool
	same        *config.SamePrefix
	tag         []byte
}

// Compile compiles the matches of the rules of one cgroup, in their order, into the format of the programs. protocols
// are the protocols of each rule; nil means TCP for all rules. services are the services of the policy. Compile returns
// an error if the rules have more than bpf.MatchTerms terms.
func Compile(matches []config.Match, protocols [][]config.Protocol, services []config.Service) (*bpf.MatchRules, error) {
	compiled := &bpf.MatchRules{}
	set := &compiled.Ruleset
	var all []term
	for i, m := range matches {
		of := []config.Protocol{config.TCP}
		if protocols != nil {
			of = protocols[i]
		}
		all = append(all, terms(i, m, of, services)...)
	}
	if len(all) > bpf.MatchTerms {
		return nil, fmt.Errorf("compile rules: %d terms, maximum %d; a list of ports counts twice, a service once per listener", len(all), bpf.MatchTerms)
	}
	set.Terms = uint32(len(all))
	tags := make(map[bpf.MatchTag]int)
	for i, t := range all {
		set.Rule[i] = uint32(t.rule + 1)
		for role, is := range t.roles {
			if is {
				mark(&set.Role[role], i)
			}
		}
		for shared := range set.Same4 {
			if t.same == nil || t.same.IPv4 >= 0 && shared >= t.same.IPv4 {
				mark(&set.Same4[shared], i)
			}
		}
		for shared := range set.Same6 {
			if t.same == nil || t.same.IPv6 >= 0 && shared >= t.same.IPv6 {
				mark(&set.Same6[shared], i)
			}
		}
		if t.tag == nil {
			mark(&set.Untagged, i)
		} else {
			key := TagOf(t.tag)
			at, ok := tags[key]
			if !ok {
				at = len(compiled.Tags)
				tags[key] = at
				compiled.Tags = append(compiled.Tags, bpf.MatchTagEntry{Tag: key})
			}
			mark(&compiled.Tags[at].Set, i)
		}
		set.Uses |= usesOf(t)
	}
	compiled.Remotes = prefixEntries(all, func(t *term) []config.PrefixTerm { return t.remote })
	compiled.Locals = prefixEntries(all, func(t *term) []config.PrefixTerm { return t.local })
	compiled.RemotePorts = portEntries(all, func(t *term) []config.PortRange { return t.remotePorts })
	compiled.LocalPorts = portEntries(all, func(t *term) []config.PortRange { return t.localPorts })
	return compiled, nil
}

// terms splits the rule with the given index into terms. services are the services of the policy.
func terms(index int, m config.Match, protocols []config.Protocol, services []config.Service) []term {
	base := term{rule: index, remote: m.Remote, local: m.Local, same: m.SamePrefix, tag: m.Tag,
		remotePorts: m.RemotePorts, localPorts: m.LocalPorts}
	for _, p := range protocols {
		base.roles[roleOf(bpf.MatchConnect, p)] = m.Role != config.RoleAccept
		base.roles[roleOf(bpf.MatchAccept, p)] = m.Role != config.RoleConnect
	}
	var split []term
	switch {
	case m.Service != "":
		for _, s := range services {
			if s.Name != m.Service {
				continue
			}
			for _, l := range s.Listeners {
				if slices.Contains(protocols, l.Protocol) {
					split = append(split, base.narrowTo(l))
				}
			}
		}
	case len(m.Ports) > 0:
		for _, side := range []uint32{bpf.MatchConnect, bpf.MatchAccept} {
			t := base
			t.roles = [bpf.MatchRoles]bool{}
			for _, p := range protocols {
				t.roles[roleOf(side, p)] = base.roles[roleOf(side, p)]
			}
			ports := &t.remotePorts
			if side == bpf.MatchAccept {
				ports = &t.localPorts
			}
			if *ports = intersectPorts(*ports, m.Ports); len(*ports) > 0 && t.roles != [bpf.MatchRoles]bool{} {
				split = append(split, t)
			}
		}
	default:
		split = append(split, base)
	}
	return split
}

// narrowTo returns the term restricted to the connections that a listener accepts.
func (t term) narrowTo(l config.Listener) term {
	t.roles = [bpf.MatchRoles]bool{}
	t.roles[roleOf(bpf.MatchAccept, l.Protocol)] = true
	t.localPorts = []config.PortRange{{First: l.Address.Port(), Last: l.Address.Port()}}
	addr := l.Address.Addr()
	switch {
	case !addr.IsUnspecified():
		t.local = []config.PrefixTerm{{Prefix: netip.PrefixFrom(addr, addr.BitLen())}}
	case addr.Is4() || l.V6Only:
		t.local = []config.PrefixTerm{{Prefix: netip.PrefixFrom(addr, 0)}}
	}
	return t
}

// roleOf returns the role number for a side (MatchConnect or MatchAccept) and a protocol.
func roleOf(side uint32, p config.Protocol) uint32 {
	if p == config.UDP {
		return bpf.MatchUDPConnect + side
	}
	return side
}

// intersectPorts returns the intersection of two lists of ranges. An empty a means all ports.
func intersectPorts(a, b []config.PortRange) []config.PortRange {
	if len(a) == 0 {
		return b
	}
	var shared []config.PortRange
	for _, x := range a {
		for _, y := range b {
			if r := (config.PortRange{First: max(x.First, y.First), Last: min(x.Last, y.Last)}); r.First <= r.Last {
				shared = append(shared, r)
			}
		}
	}
	return shared
}

func mark(s *bpf.MatchSet, i int)   { s.Word[i/64] |= 1 << (i % 64) }
func unmark(s *bpf.MatchSet, i int) { s.Word[i/64] &^= 1 << (i % 64) }

func usesOf(t term) uint32 {
	var uses uint32
	for _, u := range []struct {
		use  bool
		flag uint32
	}{
		{t.remote != nil, bpf.MatchUseRemote},
		{t.local != nil, bpf.MatchUseLocal},
		{len(t.remotePorts) > 0, bpf.MatchUseRemotePort},
		{len(t.localPorts) > 0, bpf.MatchUseLocalPort},
		{t.same != nil, bpf.MatchUseSame},
		{t.tag != nil, bpf.MatchUseTag},
	} {
		if u.use {
			uses |= u.flag
		}
	}
	return uses
}

// TagOf returns a tag in the format of the programs, truncated to 16 bytes.
func TagOf(tag []byte) bpf.MatchTag {
	var t bpf.MatchTag
	t.Length = uint8(copy(t.Byte[:], tag))
	return t
}

// prefixEntries returns, for each prefix of any term, the terms that match an address whose longest prefix is this
// prefix. Each family has an entry of length 0, so that a lookup always finds an entry.
func prefixEntries(all []term, of func(*term) []config.PrefixTerm) []bpf.MatchPrefixEntry {
	type use struct {
		term int
		not  bool
	}
	uses := map[netip.Prefix][]use{
		netip.PrefixFrom(netip.IPv4Unspecified(), 0): nil,
		netip.PrefixFrom(netip.IPv6Unspecified(), 0): nil,
	}
	var free bpf.MatchSet // terms without prefixes
	used := false
	for i := range all {
		prefixes := of(&all[i])
		if prefixes == nil {
			mark(&free, i)
			continue
		}
		used = true
		for _, p := range prefixes {
			uses[p.Prefix] = append(uses[p.Prefix], use{i, p.Not})
		}
	}
	if !used {
		return nil
	}
	ordered := make([]netip.Prefix, 0, len(uses))
	for p := range uses {
		ordered = append(ordered, p)
	}
	// Sort a prefix before the prefixes that it contains.
	slices.SortFunc(ordered, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	type open struct {
		prefix netip.Prefix
		set    bpf.MatchSet
	}
	var stack []open
	entries := make([]bpf.MatchPrefixEntry, 0, len(ordered))
	for _, p := range ordered {
		for len(stack) > 0 && !stack[len(stack)-1].prefix.Overlaps(p) {
			stack = stack[:len(stack)-1]
		}
		set := free
		if len(stack) > 0 {
			set = stack[len(stack)-1].set
		}
		for _, u := range uses[p] {
			if u.not {
				unmark(&set, u.term)
			} else {
				mark(&set, u.term)
			}
		}
		stack = append(stack, open{p, set})
		length := p.Bits()
		if p.Addr().Is4() {
			length += 96
		}
		entries = append(entries, bpf.MatchPrefixEntry{
			Prefix: bpf.MatchPrefix{Prefixlen: uint32(length), Address: bpf.MappedAddress(p.Addr())}, Set: set,
		})
	}
	return entries
}

// portEntries returns prefixes of port numbers that cover all ports, with the terms that match each prefix.
func portEntries(all []term, of func(*term) []config.PortRange) []bpf.MatchPortEntry {
	type change struct{ at, term, by int }
	var changes []change
	var set bpf.MatchSet
	for i := range all {
		ranges := of(&all[i])
		if len(ranges) == 0 {
			mark(&set, i)
		}
		for _, r := range ranges {
			changes = append(changes, change{int(r.First), i, 1}, change{int(r.Last) + 1, i, -1})
		}
	}
	if changes == nil {
		return nil
	}
	slices.SortFunc(changes, func(a, b change) int { return cmp.Compare(a.at, b.at) })
	var entries []bpf.MatchPortEntry
	holding := make([]int, len(all)) // number of ranges of each term that contain the current port
	for first, next := 0, 0; first < 1<<16; {
		for ; next < len(changes) && changes[next].at == first; next++ {
			c := changes[next]
			if holding[c.term] += c.by; holding[c.term] > 0 {
				mark(&set, c.term)
			} else {
				unmark(&set, c.term)
			}
		}
		end := 1 << 16
		if next < len(changes) {
			end = changes[next].at
		}
		entries = appendPorts(entries, first, end, set)
		first = end
	}
	return entries
}

// appendPorts appends the prefixes that cover the ports first to end-1.
func appendPorts(entries []bpf.MatchPortEntry, first, end int, set bpf.MatchSet) []bpf.MatchPortEntry {
	for first < end {
		size := 1 << 16
		if first > 0 {
			size = 1 << bits.TrailingZeros(uint(first))
		}
		for first+size > end {
			size /= 2
		}
		entry := bpf.MatchPortEntry{Set: set}
		entry.Port.Prefixlen = uint32(16 - bits.TrailingZeros(uint(size)))
		entry.Port.Port = [2]uint8{uint8(first >> 8), uint8(first)}
		entries = append(entries, entry)
		first += size
	}
	return entries
}
