// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package tune_test

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/tune"
)

// bytesDrawn is a fuzzer's input; it draws 0 when it has come to its end.
type bytesDrawn struct{ rest []byte }

func (b *bytesDrawn) IntN(n int) int {
	var word [4]byte
	b.rest = b.rest[copy(word[:], b.rest):]
	return int(binary.LittleEndian.Uint32(word[:]) % uint32(n))
}

// wild makes rules that the policy file would refuse, too.
func (m *maker) wild(i int) config.TuneRule {
	r := m.rule(i)
	if m.chance(20) {
		r.Match.Ports = append(r.Match.Ports, config.PortRange{First: uint16(m.IntN(1 << 16)), Last: uint16(m.IntN(1 << 16))})
	}
	if m.chance(10) {
		r.Match.Remote, r.Match.Local, r.Match.LocalPorts = []config.PrefixTerm{}, []config.PrefixTerm{{}}, []config.PortRange{}
	}
	if m.chance(10) {
		r.Match.SamePrefix = &config.SamePrefix{IPv4: m.IntN(400) - 200, IPv6: m.IntN(400) - 200}
	}
	if m.chance(10) {
		r.Match.Service = "none"
	}
	if m.chance(20) {
		r.Tag, r.Match.Tag = make([]byte, m.IntN(300)), make([]byte, m.IntN(300))
	}
	settings := func() (set []config.Setting) {
		for range m.IntN(60) {
			s := config.Setting{Option: pick(m, config.TuneOptions).Name, Value: int64(m.IntN(1<<31)) << m.IntN(32), Text: r.Name}
			if m.chance(5) {
				s.Option = "unknown"
			}
			if m.chance(10) {
				s.Explore = &config.Explore{Candidates: make([]int, m.IntN(20)), IPv4: m.IntN(40), IPv6: m.IntN(140), Share: float64(m.IntN(5)) / 2, Probe: -1}
			}
			set = append(set, s)
		}
		return set
	}
	if m.chance(30) {
		r.Set = settings()
	}
	if m.chance(20) {
		r.React = &config.React{Retransmits: float64(m.IntN(100)) / 50, RTOs: m.IntN(200) - 2, Sample: m.IntN(3) - 1, Set: settings()}
		r.Trial = &config.Trial{Control: float64(m.IntN(4)) / 2}
	}
	return r
}

func FuzzCompile(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 4))
	for n := range 20 {
		seed := make([]byte, 40*n*n)
		for i := range seed {
			seed[i] = byte(r.Uint32())
		}
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, input []byte) {
		m := &maker{draws: &bytesDrawn{input}}
		m.makeServices()
		var rules []config.TuneRule
		prefixes, ranges := 0, 0
		for i := range m.IntN(80) {
			rule := m.wild(i)
			rules = append(rules, rule)
			prefixes += len(rule.Match.Remote) + len(rule.Match.Local)
			ranges += len(rule.Match.Ports) + len(rule.Match.RemotePorts) + len(rule.Match.LocalPorts)
		}
		for _, s := range m.services {
			prefixes += len(s.Listeners)
			ranges += len(s.Listeners)
		}
		c, err := tune.Compile(rules, m.services, nil)
		if err != nil {
			return
		}
		if len(c.Rules) != len(rules) || c.Ruleset.Terms > uint32(bpf.TuneTerms) || len(c.Tags) > len(rules) {
			t.Errorf("%d rules gave %d, %d terms and %d tags", len(rules), len(c.Rules), c.Ruleset.Terms, len(c.Tags))
		}
		for _, index := range c.Ruleset.Rule[:c.Ruleset.Terms] {
			if index < 1 || int(index) > len(rules) {
				t.Errorf("a term of rule %d", index)
			}
		}
		// One entry for each prefix and one for each family.
		for _, entries := range [][]bpf.TunePrefixEntry{c.Remotes, c.Locals} {
			if len(entries) > prefixes+2 {
				t.Errorf("%d prefixes gave %d entries", prefixes, len(entries))
			}
		}
		for _, entries := range [][]bpf.TunePortEntry{c.RemotePorts, c.LocalPorts} {
			// A range has two ends, and what is between two of them is at most 30
			// prefixes.
			if len(entries) > 30*(2*2*ranges+1) {
				t.Errorf("%d ranges gave %d entries", ranges, len(entries))
			}
			next := 0
			for _, e := range entries {
				if int(e.Port.Port[0])<<8|int(e.Port.Port[1]) != next {
					t.Fatalf("port entries %v: want one for port %d", e.Port, next)
				}
				next += 1 << (16 - e.Port.Prefixlen)
			}
			if entries != nil && next != 1<<16 {
				t.Errorf("port entries end at %d", next)
			}
		}
		tune.Explain(rules, m.services, m.question())
	})
}
