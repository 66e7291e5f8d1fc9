// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"math/bits"
	"net/netip"
	"slices"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
)

// term is a conjunction of what a connection must be. A rule is one or more of
// them: it matches if one does.
type term struct {
	rule        int // index into the rules
	remote      []config.PrefixTerm
	local       []config.PrefixTerm
	remotePorts []config.PortRange // none: all
	localPorts  []config.PortRange
	roles       [2]bool
	same        *config.SamePrefix
	tag         []byte
}

// terms splits a rule. Services are those of the policy.
func terms(index int, m config.TuneMatch, services []config.Service) []term {
	base := term{rule: index, remote: m.Remote, local: m.Local, same: m.SamePrefix, tag: m.Tag,
		remotePorts: m.RemotePorts, localPorts: m.LocalPorts}
	base.roles[bpf.TuneConnect] = m.Role != config.RoleAccept
	base.roles[bpf.TuneAccept] = m.Role != config.RoleConnect
	var split []term
	switch {
	case m.Service != "":
		for _, s := range services {
			if s.Name != m.Service {
				continue
			}
			for _, l := range s.Listeners {
				if l.Protocol == config.TCP {
					split = append(split, base.at(l))
				}
			}
		}
	case len(m.Ports) > 0:
		for role := range base.roles {
			if !base.roles[role] {
				continue
			}
			t := base
			t.roles = [2]bool{}
			t.roles[role] = true
			ports := &t.remotePorts
			if role == int(bpf.TuneAccept) {
				ports = &t.localPorts
			}
			if *ports = common(*ports, m.Ports); len(*ports) > 0 {
				split = append(split, t)
			}
		}
	default:
		split = append(split, base)
	}
	return split
}

// at narrows a term to what a listener accepts.
func (t term) at(l config.Listener) term {
	t.roles = [2]bool{}
	t.roles[bpf.TuneAccept] = true
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

// common is what two lists of ranges share; an empty a is all ports.
func common(a, b []config.PortRange) []config.PortRange {
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

// Skips tells which options a rule leaves out because the kernel has not them.
type Skips func(rule config.TuneRule, option string) bool

// Compile makes what the program reads of the rules of one cgroup, in their
// order. It fails if they have more than bpf.TuneTerms terms, or one of them
// more than bpf.TuneOptionsMax options.
func Compile(rules []config.TuneRule, services []config.Service, skip Skips) (*bpf.TuneRules, error) {
	compiled := &bpf.TuneRules{}
	set := &compiled.Ruleset
	var all []term
	for i, rule := range rules {
		all = append(all, terms(i, rule.Match, services)...)
		r := ruleOf(rule, skip)
		if int(r.Options) > bpf.TuneOptionsMax {
			return nil, fmt.Errorf("compile rule %s: it sets %d options, those of its reaction included, at most %d", rule.Name, r.Options, bpf.TuneOptionsMax)
		}
		compiled.Rules = append(compiled.Rules, r)
	}
	if len(all) > bpf.TuneTerms {
		return nil, fmt.Errorf("compile rules: they have %d terms, at most %d; a list of ports counts twice, a service once a listener", len(all), bpf.TuneTerms)
	}
	set.Terms = uint32(len(all))
	tags := make(map[bpf.TuneTag]int)
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
			key := tagOf(t.tag)
			at, ok := tags[key]
			if !ok {
				at = len(compiled.Tags)
				tags[key] = at
				compiled.Tags = append(compiled.Tags, bpf.TuneTagEntry{Tag: key})
			}
			mark(&compiled.Tags[at].Set, i)
		}
		set.Uses |= usesOf(t, &compiled.Rules[t.rule])
	}
	compiled.Remotes = prefixEntries(all, func(t *term) []config.PrefixTerm { return t.remote })
	compiled.Locals = prefixEntries(all, func(t *term) []config.PrefixTerm { return t.local })
	compiled.RemotePorts = portEntries(all, func(t *term) []config.PortRange { return t.remotePorts })
	compiled.LocalPorts = portEntries(all, func(t *term) []config.PortRange { return t.localPorts })
	return compiled, nil
}

func mark(s *bpf.TuneSet, i int)   { s.Word[i/64] |= 1 << (i % 64) }
func unmark(s *bpf.TuneSet, i int) { s.Word[i/64] &^= 1 << (i % 64) }

func usesOf(t term, r *bpf.TuneRule) uint32 {
	var uses uint32
	for _, u := range []struct {
		use  bool
		flag uint32
	}{
		{t.remote != nil, bpf.TuneUseRemote},
		{t.local != nil, bpf.TuneUseLocal},
		{len(t.remotePorts) > 0, bpf.TuneUseRemotePort},
		{len(t.localPorts) > 0, bpf.TuneUseLocalPort},
		{t.same != nil, bpf.TuneUseSame},
		{t.tag != nil, bpf.TuneUseTag},
		{r.Tag.Length > 0 && t.roles[bpf.TuneAccept], bpf.TuneUseWrite},
		{r.SynRto > 0, bpf.TuneUseSynRTO},
		{r.SynackRto > 0, bpf.TuneUseSynackRTO},
		{r.Rwnd > 0, bpf.TuneUseRwnd},
		{r.Ecn > 0, bpf.TuneUseECN},
		{r.BaseRtt > 0, bpf.TuneUseBaseRTT},
	} {
		if u.use {
			uses |= u.flag
		}
	}
	return uses
}

// share is a probability as the program draws it, of 2^32.
func share(p float64) uint32 { return uint32(min(math.Round(p*(1<<32)), math.MaxUint32)) }

// ruleOf makes what the program does of a rule.
func ruleOf(rule config.TuneRule, skip Skips) bpf.TuneRule {
	r := bpf.TuneRule{}
	putText(r.Name[:], rule.Name)
	switch rule.Observe {
	case config.ObserveClose:
		r.Flags |= bpf.TuneFlagClose
	case config.ObserveOff:
	default:
		r.Flags |= bpf.TuneFlagLive
	}
	if rule.Tag != nil {
		r.Tag = tagOf(rule.Tag)
	}
	if rule.Trial != nil {
		r.Control = share(rule.Trial.Control)
	}
	for _, s := range rule.Set {
		o, ok := FindOption(s.Option)
		switch {
		case !ok || skip != nil && skip(rule, s.Option):
		case s.Explore != nil:
			explore(&r, rule.Name, o, s.Explore)
		case o.Phases == 0:
			answer(&r, o, s)
		default:
			addOption(&r, o, s, o.Phases, 0)
		}
	}
	if rule.React != nil {
		r.Flags |= bpf.TuneFlagReact
		r.ReactSample = math.MaxUint32 / uint32(max(rule.React.Sample, 1))
		r.ReactRetransmits = uint32(math.Round(rule.React.Retransmits * 10000))
		r.ReactRtos = uint32(rule.React.RTOs + 1)
		for _, s := range rule.React.Set {
			o, ok := FindOption(s.Option)
			if !ok || skip != nil && skip(rule, s.Option) {
				continue
			}
			families := o.Phases & (bpf.TunePhaseIPv4 | bpf.TunePhaseIPv6)
			addOption(&r, o, s, bpf.TunePhaseReact|families, 1)
		}
	}
	return r
}

// addOption counts an option that finds no place, too.
func addOption(r *bpf.TuneRule, o Option, s config.Setting, phases uint16, reaction int) {
	entry := bpf.TuneOption{Level: o.Level, Name: o.Number, Value: o.value(s), Phases: phases, Id: uint16(o.ID)}
	if o.Level == bpf.TuneLevelCongestion {
		putText(r.Congestion[reaction][:], s.Text)
		entry.Value = int32(reaction)
	}
	if int(r.Options) < len(r.Option) {
		r.Option[r.Options] = entry
	}
	r.Options++
}

// answer sets what the program replies to a question of the kernel.
func answer(r *bpf.TuneRule, o Option, s config.Setting) {
	v := uint32(s.Value / o.Unit)
	switch o.Name {
	case "syn_rto":
		r.SynRto = v
	case "synack_rto":
		r.SynackRto = v
	case "initial_rwnd":
		r.Rwnd = v
	case "ecn":
		r.Ecn = v
	case "base_rtt":
		r.BaseRtt = v
	}
}

func explore(r *bpf.TuneRule, name string, o Option, e *config.Explore) {
	r.Flags |= bpf.TuneFlagLearn
	r.Learn = LearnKey(name)
	r.LearnOption = uint8(o.ID)
	r.Candidates = uint32(copy32(r.Candidate[:], e.Candidates))
	r.Explore, r.Probe = share(e.Share), share(e.Probe)
	r.FirstBytes = uint32(e.Bytes)
	r.Evidence = uint32(e.Evidence)
	r.Forget = uint64(e.Forget) * 1000
	r.LearnBits4 = uint8(96 + e.IPv4)
	r.LearnBits6 = uint8(e.IPv6)
}

func copy32(to []uint32, from []int) int {
	n := min(len(to), len(from))
	for i := range n {
		to[i] = uint32(from[i])
	}
	return n
}

// LearnKey stands for a rule in what is learned, so that it survives a change
// of the rule, and not one of its name.
func LearnKey(rule string) uint32 {
	h := fnv.New32a()
	h.Write([]byte(rule))
	return h.Sum32()
}

func tagOf(tag []byte) bpf.TuneTag {
	var t bpf.TuneTag
	t.Length = uint8(copy(t.Byte[:], tag))
	return t
}

func putText(to []int8, s string) {
	for i := range min(len(s), len(to)-1) {
		to[i] = int8(s[i])
	}
}

// Text reads a string of the program's.
func Text(from []int8) string {
	var b []byte
	for _, c := range from {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}
	return string(b)
}

// Mapped is an address as the program has it: IPv6, or IPv4 mapped into it.
func Mapped(a netip.Addr) bpf.TuneAddress {
	var m bpf.TuneAddress
	b := a.As16()
	for i := range m.Word {
		m.Word[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return m
}

// Unmapped is the reverse of Mapped.
func Unmapped(m bpf.TuneAddress) netip.Addr {
	var b [16]byte
	for i, word := range m.Word {
		binary.NativeEndian.PutUint32(b[4*i:], word)
	}
	return netip.AddrFrom16(b).Unmap()
}

// prefixEntries lists, for every prefix of any term, the terms that allow an
// address of it. For each family there is one of length 0, so that a lookup
// always finds an entry. In a term, the longest prefix decides.
func prefixEntries(all []term, of func(*term) []config.PrefixTerm) []bpf.TunePrefixEntry {
	type use struct {
		term int
		not  bool
	}
	uses := map[netip.Prefix][]use{
		netip.PrefixFrom(netip.IPv4Unspecified(), 0): nil,
		netip.PrefixFrom(netip.IPv6Unspecified(), 0): nil,
	}
	var free bpf.TuneSet // terms that take any address
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
	// A prefix comes before those that it holds.
	slices.SortFunc(ordered, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	type open struct {
		prefix netip.Prefix
		set    bpf.TuneSet
	}
	var stack []open
	entries := make([]bpf.TunePrefixEntry, 0, len(ordered))
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
		entries = append(entries, bpf.TunePrefixEntry{
			Prefix: bpf.TunePrefix{Prefixlen: uint32(length), Address: Mapped(p.Addr())}, Set: set,
		})
	}
	return entries
}

// portEntries lists prefixes of port numbers that cover all ports, with the
// terms that allow them.
func portEntries(all []term, of func(*term) []config.PortRange) []bpf.TunePortEntry {
	type change struct{ at, term, by int }
	var changes []change
	var set bpf.TuneSet
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
	var entries []bpf.TunePortEntry
	holding := make([]int, len(all)) // ranges of a term that hold the port at hand
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

// appendPorts appends the prefixes that cover the ports from first to before
// end.
func appendPorts(entries []bpf.TunePortEntry, first, end int, set bpf.TuneSet) []bpf.TunePortEntry {
	for first < end {
		size := 1 << 16
		if first > 0 {
			size = 1 << bits.TrailingZeros(uint(first))
		}
		for first+size > end {
			size /= 2
		}
		entry := bpf.TunePortEntry{Set: set}
		entry.Port.Prefixlen = uint32(16 - bits.TrailingZeros(uint(size)))
		entry.Port.Port = [2]uint8{uint8(first >> 8), uint8(first)}
		entries = append(entries, entry)
		first += size
	}
	return entries
}
