// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package tune_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/match"
	"sockeye/internal/tune"
)

// bytesDrawn reads values from a fuzzer's input, and 0 after its end.
type bytesDrawn struct{ rest []byte }

func (d *bytesDrawn) IntN(n int) int {
	var word [4]byte
	d.rest = d.rest[copy(word[:], d.rest):]
	return int(binary.LittleEndian.Uint32(word[:]) % uint32(n))
}

func (d *bytesDrawn) chance(percent int) bool { return d.IntN(100) < percent }

// wild makes rules, including rules that the policy file would refuse.
func (d *bytesDrawn) wild(i int) config.TuneRule {
	r := config.TuneRule{Name: fmt.Sprintf("r%d", i)}
	if d.chance(30) {
		r.Match.Role = []config.Role{config.RoleAccept, config.RoleConnect}[d.IntN(2)]
	}
	if d.chance(10) {
		r.Match.Service = "none"
	}
	if d.chance(20) {
		r.Tag, r.Match.Tag = make([]byte, d.IntN(300)), make([]byte, d.IntN(300))
	}
	settings := func() (set []config.Setting) {
		for range d.IntN(60) {
			s := config.Setting{Option: config.TuneOptions[d.IntN(len(config.TuneOptions))].Name, Value: int64(d.IntN(1<<31)) << d.IntN(32), Text: r.Name}
			if d.chance(5) {
				s.Option = "unknown"
			}
			if d.chance(10) {
				s.Explore = &config.Explore{Candidates: make([]int, d.IntN(20)), IPv4: d.IntN(40), IPv6: d.IntN(140), Share: float64(d.IntN(5)) / 2, Probe: -1}
			}
			set = append(set, s)
		}
		return set
	}
	if d.chance(30) {
		r.Set = settings()
	}
	if d.chance(20) {
		r.React = &config.React{Retransmits: float64(d.IntN(100)) / 50, RTOs: d.IntN(200) - 2, Sample: d.IntN(3) - 1, Set: settings()}
		r.Trial = &config.Trial{Control: float64(d.IntN(4)) / 2}
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
		d := &bytesDrawn{input}
		var rules []config.TuneRule
		for i := range d.IntN(80) {
			rules = append(rules, d.wild(i))
		}
		c, err := tune.Compile(rules, nil, nil)
		if err != nil {
			return
		}
		if len(c.Rules) != len(rules) {
			t.Errorf("%d rules gave %d", len(rules), len(c.Rules))
		}
		for i, r := range c.Rules {
			if int(r.Options) > bpf.TuneOptionsMax || bpf.Text(r.Name[:]) != rules[i].Name {
				t.Errorf("%+v gave %+v", rules[i], r)
			}
		}
		for _, index := range c.Ruleset.Rule[:c.Ruleset.Terms] {
			if index < 1 || int(index) > len(rules) {
				t.Errorf("a term of rule %d", index)
			}
		}
		tune.Explain(rules, nil, match.Question{Role: config.RoleAccept})
	})
}
