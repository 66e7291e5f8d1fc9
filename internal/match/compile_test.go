// SPDX-License-Identifier: Apache-2.0

package match_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/match"
	"sockeye/internal/testenv"
)

// draws is the source of a maker's choices: random numbers or a fuzzer's bytes.
type draws interface{ IntN(n int) int }

// maker generates matches and questions from a small set of addresses, ports and tags, so that prefixes nest, and
// questions match the rules or narrowly miss them.
type maker struct {
	draws
	prefixes []netip.Prefix
	ports    []int
	services []config.Service
}

var (
	someAddresses = parseAll(netip.MustParseAddr, "10.0.0.0", "10.1.128.7", "10.1.128.128", "192.0.2.255", "0.0.0.0", "255.255.255.255",
		"::", "::1", "2001:db8::", "2001:db8:0:8000::1", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", "fe80::1",
		"::fffe:ffff:ffff", "::1:0:0:0", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")
	someTags = [][]byte{[]byte("a"), []byte("b"), []byte("aa"), []byte("a\x00"), []byte("0123456789abcdef"), []byte("0123456789abcdeg")}
)

func parseAll[T any](parse func(string) T, texts ...string) []T {
	all := make([]T, len(texts))
	for i, text := range texts {
		all[i] = parse(text)
	}
	return all
}

func (m *maker) chance(percent int) bool { return m.IntN(100) < percent }

func pick[T any](m *maker, from []T) T { return from[m.IntN(len(from))] }

func (m *maker) address() netip.Addr { return pick(m, someAddresses) }

func (m *maker) prefix() netip.Prefix {
	a := m.address()
	length := pick(m, []int{0, 1, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 44, 64, 80, 95, 97, 126, 127, 128})
	p := netip.PrefixFrom(a, min(length, a.BitLen())).Masked()
	m.prefixes = append(m.prefixes, p)
	return p
}

func (m *maker) set(most int) []config.PrefixTerm {
	var set []config.PrefixTerm
	for range 1 + m.IntN(most) {
		set = append(set, config.PrefixTerm{Prefix: m.prefix(), Not: m.chance(30)})
	}
	return set
}

func (m *maker) port() int {
	port := pick(m, []int{0, 1, 2, 80, 127, 128, 1790, 32767, 32768, 65534, 65535})
	m.ports = append(m.ports, port)
	return port
}

func (m *maker) ranges() []config.PortRange {
	var ranges []config.PortRange
	for range 1 + m.IntN(4) {
		a, b := m.port(), m.port()
		if m.chance(50) {
			b = a
		}
		ranges = append(ranges, config.PortRange{First: uint16(min(a, b)), Last: uint16(max(a, b))})
	}
	return ranges
}

func (m *maker) makeServices() {
	for i := range 4 {
		s := config.Service{Name: fmt.Sprintf("s%d", i)}
		for range 1 + m.IntN(4) {
			a := m.address()
			if m.chance(50) {
				a = pick(m, []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()})
			}
			s.Listeners = append(s.Listeners, config.Listener{
				Protocol: pick(m, []config.Protocol{config.TCP, config.UDP}), Address: netip.AddrPortFrom(a, uint16(m.port())),
				V6Only: a == netip.IPv6Unspecified() && m.chance(50)})
			m.prefixes = append(m.prefixes, netip.PrefixFrom(a, a.BitLen()))
		}
		m.services = append(m.services, s)
	}
}

func (m *maker) match() config.Match {
	var r config.Match
	if m.chance(30) {
		r.Role = pick(m, []config.Role{config.RoleAccept, config.RoleConnect})
	}
	if m.chance(20) && len(m.services) > 0 {
		r.Service, r.Role = pick(m, m.services).Name, ""
	} else {
		if m.chance(25) {
			r.Ports = m.ranges()
		}
		if m.chance(20) {
			r.LocalPorts = m.ranges()
		}
		if m.chance(20) {
			r.Local = m.set(8)
		}
	}
	if m.chance(20) {
		r.RemotePorts = m.ranges()
	}
	if m.chance(45) {
		r.Remote = m.set(12)
	}
	if m.chance(25) {
		r.SamePrefix = &config.SamePrefix{IPv4: m.IntN(33), IPv6: m.IntN(129)}
		if m.chance(30) {
			*pick(m, []*int{&r.SamePrefix.IPv4, &r.SamePrefix.IPv6}) = -1
		}
	}
	if m.chance(20) {
		r.Tag = pick(m, someTags)
	}
	return r
}

func (m *maker) matches(n int) []config.Match {
	matches := make([]config.Match, n)
	for i := range matches {
		matches[i] = m.match()
	}
	return matches
}

// near returns the first or last address of a prefix of a rule, or an address next to one of them.
func (m *maker) near() netip.Addr {
	if len(m.prefixes) == 0 || m.chance(10) {
		return m.address()
	}
	p := pick(m, m.prefixes)
	first, last := p.Addr(), lastOf(p)
	a := pick(m, []netip.Addr{first, last, first.Prev(), last.Next(), first.Next()})
	if !a.IsValid() || a.Is4In6() {
		return first
	}
	return a
}

func lastOf(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < 8*len(b); i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// sharing returns an address that shares its first bits with another address.
func (m *maker) sharing(a netip.Addr) netip.Addr {
	b := a.AsSlice()
	from := m.IntN(8*len(b) + 1)
	for i := from; i < 8*len(b); i++ {
		if i == from || m.chance(50) {
			b[i/8] ^= 1 << (7 - i%8)
		}
	}
	other, _ := netip.AddrFromSlice(b)
	if other.Is4In6() {
		return a
	}
	return other
}

func (m *maker) question() match.Question {
	remote := m.near()
	local := m.near()
	if local.Is4() != remote.Is4() || m.chance(40) {
		local = m.sharing(remote)
	}
	port := func() uint16 {
		if len(m.ports) == 0 || m.chance(10) {
			return uint16(m.IntN(1 << 16))
		}
		return uint16(pick(m, m.ports) + m.IntN(3) - 1)
	}
	q := match.Question{Local: netip.AddrPortFrom(local, port()), Remote: netip.AddrPortFrom(remote, port()),
		Role: pick(m, []config.Role{config.RoleAccept, config.RoleConnect})}
	if m.chance(40) {
		q.Tag = pick(m, someTags)
	}
	return q
}

// finder runs a program that finds rules in the given maps.
type finder struct {
	*bpf.Tune
	t       testing.TB
	dir     string
	matches []config.Match
}

func newFinder(t testing.TB) *finder {
	t.Helper()
	dir := filepath.Join(testenv.BPFFS(t), "match_test")
	b, err := bpf.OpenTune(bpf.TuneConfig{Dir: dir, Cgroup: testenv.Cgroup()})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() {
		if err := bpf.RemoveTune(dir); err != nil {
			t.Error(err)
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return &finder{Tune: b, t: t, dir: dir}
}

// installed compiles and installs rules without settings. The learning parameter of a rule is its index.
func (f *finder) installed(matches []config.Match, services []config.Service) {
	f.t.Helper()
	compiled, err := match.Compile(matches, nil, services)
	if err != nil {
		f.t.Fatal(err)
	}
	rules := make([]bpf.TuneRule, len(matches))
	for i := range rules {
		rules[i].Learn = uint32(i)
	}
	if err := f.Install(&bpf.TuneRules{MatchRules: *compiled, Rules: rules}); err != nil {
		f.t.Fatal(err)
	}
	f.matches = matches
}

// none is the rule index of a connection without a rule.
const none = -1

// judged returns the index of the first rule that matches according to Judge, and all evaluated steps.
func judged(matches []config.Match, services []config.Service, q match.Question) (rule int, steps []match.Step) {
	for i, m := range matches {
		step := match.Judge(q, fmt.Sprint(i), m, services)
		steps = append(steps, step)
		if step.Matches {
			return i, steps
		}
	}
	return none, steps
}

// agree compares the program with Judge, and returns the number of questions by rule index.
func (f *finder) agree(services []config.Service, questions []match.Question) map[int]int {
	f.t.Helper()
	asked := make([]bpf.MatchQuestion, len(questions))
	for i, q := range questions {
		asked[i] = q.BPF()
	}
	answers, err := f.Decide(asked...)
	if err != nil {
		f.t.Fatal(err)
	}
	rules, err := f.Rules()
	if err != nil {
		f.t.Fatal(err)
	}
	hits := make(map[int]int)
	for i, q := range questions {
		got := none
		if answers[i] != 0 {
			got = int(rules[answers[i]].Learn)
		}
		want, steps := judged(f.matches, services, q)
		hits[want]++
		if got != want {
			f.t.Fatalf("%v from %v, %s, tag %q: the program finds rule %d, the reference model rule %d: %+v", q.Local, q.Remote, q.Role, q.Tag, got, want, steps)
		}
	}
	return hits
}

// TestReferenceModel compares the program with the reference model for random connections and rules.
func TestReferenceModel(t *testing.T) {
	f := newFinder(t)
	hits, missed, late := 0, 0, 0
	for seed := range uint64(twinRulesets) {
		m := &maker{draws: rand.New(rand.NewPCG(seed, 1))}
		m.makeServices()
		f.installed(m.matches(m.IntN(61)), m.services)
		asked := make([]match.Question, twinQuestions)
		for i := range asked {
			asked[i] = m.question()
		}
		t.Log("seed", seed)
		for rule, n := range f.agree(m.services, asked) {
			if rule == none {
				missed += n
				continue
			}
			hits += n
			if rule != 0 {
				late += n
			}
		}
	}
	t.Logf("%d questions match a rule, %d of them not the first rule, %d match none", hits, late, missed)
	if total := twinRulesets * twinQuestions; hits < total/4 || missed < total/50 || late < total/4 {
		t.Errorf("too few matching or too few non-matching questions for a comparison")
	}
}

// TestReferenceModelFewDimensions tests rulesets with one dimension each: the program skips the dimensions that no rule uses.
func TestReferenceModelFewDimensions(t *testing.T) {
	f := newFinder(t)
	keep := []func(to, from *config.Match){
		func(to, from *config.Match) { to.Remote = from.Remote },
		func(to, from *config.Match) { to.Local = from.Local },
		func(to, from *config.Match) { to.Ports = from.Ports },
		func(to, from *config.Match) { to.RemotePorts = from.RemotePorts },
		func(to, from *config.Match) { to.LocalPorts = from.LocalPorts },
		func(to, from *config.Match) { to.Role = from.Role },
		func(to, from *config.Match) { to.SamePrefix = from.SamePrefix },
		func(to, from *config.Match) { to.Service = from.Service },
		func(to, from *config.Match) { to.Tag = from.Tag },
	}
	for d, only := range keep {
		m := &maker{draws: rand.New(rand.NewPCG(uint64(d), 2))}
		m.makeServices()
		var matches []config.Match
		for len(matches) < 8 {
			full, one := m.match(), config.Match{}
			if only(&one, &full); one.String() == "all" {
				continue
			}
			matches = append(matches, one)
		}
		f.installed(matches, m.services)
		asked := make([]match.Question, twinQuestions)
		for i := range asked {
			asked[i] = m.question()
		}
		t.Log("dimension", d)
		if hits := f.agree(m.services, asked); len(hits) < 2 {
			t.Errorf("all questions have the same result: %v", hits)
		}
	}
}

// prefixesOf returns many nested prefixes, alternating between both families.
func prefixesOf(r *rand.Rand, n int) []config.PrefixTerm {
	set := make([]config.PrefixTerm, n)
	for i := range set {
		b := [16]byte{0x20, 0x01, 0x0d, 0xb8}
		binary.BigEndian.PutUint64(b[4:], r.Uint64())
		p := netip.PrefixFrom(netip.AddrFrom16(b), 33+r.IntN(96))
		if i%2 == 0 {
			binary.BigEndian.PutUint32(b[:], r.Uint32()&0x0fffffff|10<<24)
			p = netip.PrefixFrom(netip.AddrFrom4([4]byte(b[:])), 9+r.IntN(24))
		}
		set[i] = config.PrefixTerm{Prefix: p.Masked(), Not: r.IntN(3) == 0}
	}
	return set
}

// TestManyPrefixes tests two rules with manyPrefixes prefixes in total.
func TestManyPrefixes(t *testing.T) {
	f := newFinder(t)
	r := rand.New(rand.NewPCG(1, 3))
	m := &maker{draws: r}
	a, b := prefixesOf(r, manyPrefixes*7/10), prefixesOf(r, manyPrefixes*3/10)
	f.installed([]config.Match{{Remote: a}, {Remote: b}, {Role: config.RoleAccept}}, nil)
	for _, p := range slices.Concat(a, b) {
		m.prefixes = append(m.prefixes, p.Prefix)
	}
	asked := make([]match.Question, manyQuestions)
	for i := range asked {
		asked[i] = m.question()
	}
	hits := f.agree(nil, asked)
	t.Log(hits)
	for _, rule := range []int{0, 1, 2, none} {
		if hits[rule] < manyQuestions/60 {
			t.Errorf("rule %d matches %d of %d questions", rule, hits[rule], len(asked))
		}
	}
}

// TestMostTerms tests a full ruleset: each rule with a port and both roles has two terms.
func TestMostTerms(t *testing.T) {
	f := newFinder(t)
	var matches []config.Match
	var asked []match.Question
	for i := range bpf.MatchTerms / 2 {
		port := uint16(1000 + i)
		matches = append(matches, config.Match{Ports: []config.PortRange{{First: port, Last: port}}})
		for _, role := range []config.Role{config.RoleAccept, config.RoleConnect} {
			asked = append(asked, match.Question{Local: netip.MustParseAddrPort("10.0.0.1:1"), Remote: netip.MustParseAddrPort("10.0.0.2:1"), Role: role})
			end := &asked[len(asked)-1].Local
			if role == config.RoleConnect {
				end = &asked[len(asked)-1].Remote
			}
			*end = netip.AddrPortFrom(end.Addr(), port)
		}
	}
	f.installed(matches, nil)
	if hits := f.agree(nil, asked); len(hits) != len(matches) || hits[none] > 0 {
		t.Errorf("%d of %d rules match connections, %d connections match none", len(hits), len(matches), hits[none])
	}
	if _, err := match.Compile(append(matches, config.Match{}), nil, nil); err == nil || !strings.Contains(err.Error(), "513 terms, maximum 512") {
		t.Errorf("513 terms: got %v", err)
	}
}

// TestNoRules tests an empty ruleset and an empty bank.
func TestNoRules(t *testing.T) {
	f := newFinder(t)
	q := match.Question{Local: netip.MustParseAddrPort("10.0.0.1:1"), Remote: netip.MustParseAddrPort("10.0.0.2:1"), Role: config.RoleAccept}
	f.agree(nil, []match.Question{q})
	f.installed([]config.Match{{}}, nil)
	if hits := f.agree(nil, []match.Question{q}); hits[0] != 1 {
		t.Errorf("empty bank: got %v", hits)
	}
	f.installed(nil, nil)
	f.agree(nil, []match.Question{q})
}

// BenchmarkDecide measures the time in which the program finds a rule, by BPF_PROG_TEST_RUN with repetitions for one
// connection after another. The time must not depend on the number of rules, and must depend on the number of prefixes
// only through the depth of the LPM trie.
func BenchmarkDecide(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 5))
	remotes := func(n int) []config.PrefixTerm {
		set := prefixesOf(r, n)
		for i := range set {
			set[i].Not = false
		}
		return set
	}
	for _, test := range []struct {
		rules, prefixes int // prefixes per rule
	}{{0, 0}, {1, 1}, {10, 1}, {250, 1}, {10, 100}, {10, 1000}, {10, 10000}} {
		b.Run(fmt.Sprintf("rules=%d/prefixes=%d", test.rules, test.rules*test.prefixes), func(b *testing.B) {
			f := newFinder(b)
			var matches []config.Match
			m := &maker{draws: r}
			for range test.rules {
				set := remotes(test.prefixes)
				for _, p := range set {
					m.prefixes = append(m.prefixes, p.Prefix)
				}
				matches = append(matches, config.Match{Remote: set, Ports: []config.PortRange{{First: 1024, Last: 65535}}})
			}
			f.installed(matches, nil)
			program := decider(b, f.dir)
			const questions = 64
			packets := make([][]byte, questions)
			for i := range packets {
				q := m.question()
				q.Local, q.Remote = netip.AddrPortFrom(q.Local.Addr(), 2000), netip.AddrPortFrom(q.Remote.Addr(), 2000)
				asked := q.BPF()
				packets[i] = append(make([]byte, 14), unsafe.Slice((*byte)(unsafe.Pointer(&asked)), unsafe.Sizeof(asked))...)
			}
			total := 0.0
			for b.Loop() {
				for _, packet := range packets {
					_, each, err := program.Benchmark(packet, 2000, nil)
					if err != nil {
						b.Fatal(err)
					}
					total += float64(each.Nanoseconds())
				}
			}
			b.ReportMetric(total/float64(b.N*questions), "ns/decision")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// decider loads the program that only finds rules, with the maps pinned in dir.
func decider(t testing.TB, dir string) *ebpf.Program {
	t.Helper()
	spec, err := ebpf.LoadCollectionSpec("../bpf/tunelive_bpfel.o")
	if err != nil {
		t.Fatal(err)
	}
	replaced := make(map[string]*ebpf.Map)
	for name := range spec.Maps {
		if name[0] == '.' {
			continue
		}
		if replaced[name], err = ebpf.LoadPinnedMap(filepath.Join(dir, name), nil); err != nil {
			t.Fatal(err)
		}
		defer replaced[name].Close()
	}
	var loaded struct {
		Decide *ebpf.Program `ebpf:"tune_decide"`
	}
	if err := spec.LoadAndAssign(&loaded, &ebpf.CollectionOptions{MapReplacements: replaced}); err != nil {
		t.Fatalf("%+v", err)
	}
	t.Cleanup(func() { loaded.Decide.Close() })
	return loaded.Decide
}
