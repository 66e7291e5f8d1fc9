// SPDX-License-Identifier: Apache-2.0

// Learned initial windows: the settings of a rule for the program, and what the program has learned. The learner is tune_learn in
// bpf/include/tune_learn.bpf.h.

package tune

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sockeye/internal/api"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
)

// setExploration adds the settings of the learner to a rule.
func setExploration(r *bpf.TuneRule, name string, o Option, e *config.Explore) {
	r.Flags |= bpf.TuneFlagLearn
	r.Learn = learnKey(name)
	r.LearnOption = uint8(o.ID)
	r.Candidates = uint32(copy32(r.Candidate[:], e.Candidates))
	r.Explore, r.Probe = probability32(e.Share), probability32(e.Probe)
	r.FirstBytes = uint32(e.Bytes)
	r.Evidence = uint32(e.Evidence)
	r.Forget = uint64(e.Forget) * 1000
	r.LearnBits4 = uint8(96 + e.IPv4)
	r.LearnBits6 = uint8(e.IPv6)
}

// Learned returns the learned windows of one rule, or of all rules for "".
func (d *Domain) Learned(name string) ([]api.TuneLearned, error) {
	if name != "" {
		_, rule, err := d.findRule(name)
		if err != nil {
			return nil, err
		}
		if exploreOf(rule) == nil {
			return nil, fault.Usage(fmt.Errorf("rule %s does not learn", name), "add set: {initial_cwnd: {explore: [10, 16, 24, 40, 64]}}")
		}
	}
	tuners, err := d.tunersOf("")
	if err != nil {
		return nil, err
	}
	list := []api.TuneLearned{}
	for _, t := range tuners {
		part, err := t.learned(name)
		if err != nil {
			return nil, tuneError(t.name, err)
		}
		list = append(list, part...)
	}
	return list, nil
}

// learned returns the learned windows of one rule of a cgroup, or of all its rules for "".
func (t *tuner) learned(name string) ([]api.TuneLearned, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.tune == nil {
		return nil, nil
	}
	known, err := t.tune.Learned()
	if err != nil {
		return nil, err
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return nil, fmt.Errorf("read clock: %w", err)
	}
	var list []api.TuneLearned
	for _, rule := range t.rules {
		e := exploreOf(rule)
		if e == nil || name != "" && name != rule.Name {
			continue
		}
		for key, l := range known {
			if key.Learn != learnKey(rule.Name) {
				continue
			}
			entry := api.TuneLearned{
				Cgroup: t.name, Rule: rule.Name, Prefix: learnedPrefix(key).String(), Settled: l.Settled != 0,
				Last: time.Now().Add(time.Duration(int64(l.Last) - now.Nano())),
			}
			for i, window := range e.Candidates {
				c := api.TuneCandidate{Window: window, Tries: l.Candidate[i].Tries, Connections: l.Candidate[i].Connections, Lossy: l.Candidate[i].Lossy}
				if c.Connections > 0 {
					c.Time = float64(l.Candidate[i].Time) / float64(c.Connections) / 1000
				}
				entry.Candidates = append(entry.Candidates, c)
				if l.Settled != 0 && uint32(i) == l.Chosen {
					entry.Window = window
				}
			}
			list = append(list, entry)
		}
	}
	slices.SortFunc(list, func(a, b api.TuneLearned) int {
		return cmp.Or(strings.Compare(a.Rule, b.Rule), strings.Compare(a.Prefix, b.Prefix))
	})
	return list, nil
}

// learnKey returns the key of a rule in the map of learned windows: a hash of its name, so that learned values
// survive a change of the rule's content.
func learnKey(rule string) uint32 {
	h := fnv.New32a()
	h.Write([]byte(rule))
	return h.Sum32()
}

// exploreOf returns the settings of the learner of a rule, or nil.
func exploreOf(rule config.TuneRule) *config.Explore {
	for _, s := range rule.Set {
		if s.Explore != nil {
			return s.Explore
		}
	}
	return nil
}

// learnedPrefix returns the prefix of a key in the map of learned windows.
func learnedPrefix(key bpf.TuneLearnedKey) netip.Prefix {
	addr, length := bpf.UnmappedAddress(key.Prefix), int(key.Bits)
	if addr.Is4() {
		length -= 96
	}
	return netip.PrefixFrom(addr, length)
}
