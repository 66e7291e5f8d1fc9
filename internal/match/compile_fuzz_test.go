// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package match_test

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/match"
)

// bytesDrawn draws from a fuzzer's input, and returns 0 after its end.
type bytesDrawn struct{ rest []byte }

func (b *bytesDrawn) IntN(n int) int {
	var word [4]byte
	b.rest = b.rest[copy(word[:], b.rest):]
	return int(binary.LittleEndian.Uint32(word[:]) % uint32(n))
}

// wild returns matches that are not valid in a policy file.
func (m *maker) wild() config.Match {
	r := m.match()
	if m.chance(20) {
		r.Ports = append(r.Ports, config.PortRange{First: uint16(m.IntN(1 << 16)), Last: uint16(m.IntN(1 << 16))})
	}
	if m.chance(10) {
		r.Remote, r.Local, r.LocalPorts = []config.PrefixTerm{}, []config.PrefixTerm{{}}, []config.PortRange{}
	}
	if m.chance(10) {
		r.SamePrefix = &config.SamePrefix{IPv4: m.IntN(400) - 200, IPv6: m.IntN(400) - 200}
	}
	if m.chance(10) {
		r.Service = "none"
	}
	if m.chance(20) {
		r.Tag = make([]byte, m.IntN(300))
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
		var matches []config.Match
		prefixes, ranges := 0, 0
		for range m.IntN(80) {
			r := m.wild()
			matches = append(matches, r)
			prefixes += len(r.Remote) + len(r.Local)
			ranges += len(r.Ports) + len(r.RemotePorts) + len(r.LocalPorts)
		}
		for _, s := range m.services {
			prefixes += len(s.Listeners)
			ranges += len(s.Listeners)
		}
		c, err := match.Compile(matches, nil, m.services)
		if err != nil {
			return
		}
		if c.Ruleset.Terms > uint32(bpf.MatchTerms) || len(c.Tags) > len(matches) {
			t.Errorf("%d matches gave %d terms and %d tags", len(matches), c.Ruleset.Terms, len(c.Tags))
		}
		for _, index := range c.Ruleset.Rule[:c.Ruleset.Terms] {
			if index < 1 || int(index) > len(matches) {
				t.Errorf("term of an unknown rule %d", index)
			}
		}
		// There is at most one entry per prefix and one per family.
		for _, entries := range [][]bpf.MatchPrefixEntry{c.Remotes, c.Locals} {
			if len(entries) > prefixes+2 {
				t.Errorf("%d prefixes gave %d entries", prefixes, len(entries))
			}
		}
		for _, entries := range [][]bpf.MatchPortEntry{c.RemotePorts, c.LocalPorts} {
			// A range has two ends; at most 30 prefixes cover the ports between two adjacent ends.
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
		judged(matches, m.services, m.question())
	})
}
