// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"fmt"
	"math"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/match"
)

// Skips reports whether a rule skips an option because the kernel lacks it.
type Skips func(rule config.TuneRule, option string) bool

// Compile compiles the rules of one cgroup, in their order, for the BPF program. It returns an error if the rules
// have more than bpf.MatchTerms terms, or one rule has more than bpf.TuneOptionsMax options.
func Compile(rules []config.TuneRule, services []config.Service, skip Skips) (*bpf.TuneRules, error) {
	compiled := &bpf.TuneRules{}
	matches := make([]config.Match, len(rules))
	for i, rule := range rules {
		matches[i] = rule.Match
		r := compileRule(rule, skip)
		if int(r.Options) > bpf.TuneOptionsMax {
			return nil, fmt.Errorf("compile rule %s: it has %d options, including those of its reaction; at most %d are possible", rule.Name, r.Options, bpf.TuneOptionsMax)
		}
		compiled.Rules = append(compiled.Rules, r)
	}
	found, err := match.Compile(matches, nil, services)
	if err != nil {
		return nil, err
	}
	compiled.MatchRules = *found
	set := &compiled.Ruleset
	for i := range int(set.Terms) {
		accepts := set.Role[bpf.MatchAccept].Word[i/64]>>(i%64)&1 != 0
		set.Uses |= callbackFlags(&compiled.Rules[set.Rule[i]-1], accepts)
	}
	return compiled, nil
}

// compileRule compiles the settings of a rule. The match of the rule is compiled separately.
func compileRule(rule config.TuneRule, skip Skips) bpf.TuneRule {
	r := bpf.TuneRule{}
	copyText(r.Name[:], rule.Name)
	switch rule.Observe {
	case config.ObserveClose:
		r.Flags |= bpf.TuneFlagClose
	case config.ObserveOff:
	default:
		r.Flags |= bpf.TuneFlagLive
	}
	if rule.Tag != nil {
		r.Tag = match.TagOf(rule.Tag)
	}
	if rule.Trial != nil {
		r.Control = probability32(rule.Trial.Control)
	}
	for _, s := range rule.Set {
		o, ok := FindOption(s.Option)
		switch {
		case !ok || skip != nil && skip(rule, s.Option):
		case s.Explore != nil:
			setExploration(&r, rule.Name, o, s.Explore)
		case o.Phases == 0:
			setReply(&r, o, s)
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

// addOption appends an option to a rule. The number of options also counts those beyond bpf.TuneOptionsMax, so that
// the caller can report them.
func addOption(r *bpf.TuneRule, o Option, s config.Setting, phases uint16, reaction int) {
	entry := bpf.TuneOption{Level: o.Level, Name: o.Number, Value: o.value(s), Phases: phases, Id: uint16(o.ID)}
	if o.Level == bpf.TuneLevelCongestion {
		copyText(r.Congestion[reaction][:], s.Text)
		entry.Value = int32(reaction)
	}
	if int(r.Options) < len(r.Option) {
		r.Option[r.Options] = entry
	}
	r.Options++
}

// setReply sets the program's reply to a request of the kernel, such as TIMEOUT_INIT.
func setReply(r *bpf.TuneRule, o Option, s config.Setting) {
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

// probability32 converts a probability to the program's unit, 1/2^32.
func probability32(p float64) uint32 { return uint32(min(math.Round(p*(1<<32)), math.MaxUint32)) }

func copy32(to []uint32, from []int) int {
	n := min(len(to), len(from))
	for i := range n {
		to[i] = uint32(from[i])
	}
	return n
}

func copyText(to []int8, s string) {
	for i := range min(len(s), len(to)-1) {
		to[i] = int8(s[i])
	}
}

// callbackFlags returns the callbacks (BPF_SOCK_OPS_*_CB_FLAG) that the program needs for a rule. accepts reports
// that the rule matches accepted connections.
func callbackFlags(r *bpf.TuneRule, accepts bool) uint32 {
	var uses uint32
	for _, u := range []struct {
		use  bool
		flag uint32
	}{
		{r.Tag.Length > 0 && accepts, bpf.TuneUseWrite},
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
