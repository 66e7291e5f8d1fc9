// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"sockeye/internal/clock"
)

// Install replaces the rules atomically: a connection is decided by the old rules or by the new ones. Open
// connections keep their rule. A rule with unchanged content keeps its number and its counts.
func (t *Tune) Install(r *TuneRules) error {
	ids, err := t.installRules(r.Rules)
	if err != nil {
		return err
	}
	if err := t.install(&r.MatchRules, ids); err != nil {
		return err
	}
	return t.retireRules(ids)
}

// installRules finds or assigns the numbers of rules.
func (t *Tune) installRules(wanted []TuneRule) ([]uint32, error) {
	known, err := t.Rules()
	if err != nil {
		return nil, err
	}
	last := uint32(0)
	for id := range known {
		last = max(last, id)
	}
	ids := make([]uint32, len(wanted))
	for i, rule := range wanted {
		for _, id := range slices.Sorted(maps.Keys(known)) {
			if !slices.Contains(ids[:i], id) && sameRule(&known[id].TuneRule, &rule) {
				ids[i] = id
			}
		}
		if ids[i] != 0 {
			if known[ids[i]].Retired != 0 {
				if err := t.maps["retired"].Delete(ids[i]); err != nil {
					return nil, fmt.Errorf("restore rule: %w", err)
				}
			}
			continue
		}
		last++
		ids[i] = last
		rule.Seed = randomSeed()
		// The counters are created first, because a rule counts from its first connection on.
		for arm := range TuneArms {
			if err := t.maps["stats"].Put(TuneStatsKey{Rule: last, Arm: uint32(arm)}, &TuneStats{}); err != nil {
				return nil, fmt.Errorf("make counts of rule: %w", err)
			}
		}
		if err := t.maps["rules"].Update(last, &rule, ebpf.UpdateNoExist); err != nil {
			return nil, fmt.Errorf("write rule: %w", err)
		}
	}
	return ids, nil
}

func randomSeed() uint32 {
	var b [4]byte
	rand.Read(b[:])
	return binary.LittleEndian.Uint32(b[:])
}

// sameRule reports whether two rules have the same settings.
func sameRule(a, b *TuneRule) bool {
	x, y := *a, *b
	x.Seed, y.Seed = 0, 0
	return x == y
}

// handshakes is the maximum duration of a handshake, which keeps the rule of its start: SYNs are repeated for less
// than this time (tcp_syn_retries of 6).
const handshakes = 150 * time.Second

// maxRetired is the maximum number of rules kept for connections that still have them.
const maxRetired = 1024

// retireRules marks the rules that are not in force, and deletes those that no connection can have.
func (t *Tune) retireRules(inForce []uint32) error {
	rules, err := t.Rules()
	if err != nil {
		return err
	}
	now := clock.Boottime()
	var retired []uint32
	for _, id := range slices.Sorted(maps.Keys(rules)) {
		rule := rules[id]
		switch {
		case slices.Contains(inForce, id):
		case rule.Retired == 0:
			rule.Retired = now
			if err := t.maps["retired"].Put(id, uint64(now)); err != nil {
				return fmt.Errorf("retire rule: %w", err)
			}
			retired = append(retired, id)
		default:
			retired = append(retired, id)
		}
	}
	for i, id := range retired {
		used, err := t.used(id, &rules[id].TuneRule)
		if err != nil {
			return err
		}
		age := now - rules[id].Retired
		if used && len(retired)-i <= maxRetired || age < handshakes && len(retired)-i <= maxRetired {
			continue
		}
		if err := t.forgetRule(id); err != nil {
			return err
		}
	}
	return nil
}

// InstalledRule is a rule in the maps.
type InstalledRule struct {
	TuneRule
	// Retired is the CLOCK_BOOTTIME at which the rule was removed from the policy, 0 for a rule in force.
	Retired time.Duration
}

// Rules returns all rules by number: those in force, and those that connections still have.
func (t *Tune) Rules() (map[uint32]*InstalledRule, error) {
	rules := make(map[uint32]*InstalledRule)
	var (
		id      uint32
		rule    TuneRule
		retired uint64
	)
	entries := t.maps["rules"].Iterate()
	for entries.Next(&id, &rule) {
		rules[id] = &InstalledRule{TuneRule: rule}
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read rules: %w", err)
	}
	entries = t.maps["retired"].Iterate()
	for entries.Next(&id, &retired) {
		if rules[id] != nil {
			rules[id].Retired = time.Duration(retired)
		}
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read retired rules: %w", err)
	}
	return rules, nil
}

// used reports whether a connection may still have the rule.
func (t *Tune) used(id uint32, rule *TuneRule) (bool, error) {
	if rule.Flags&(TuneFlagLive|TuneFlagClose) == 0 {
		return false, nil
	}
	for arm := range TuneArms {
		s, err := t.Stats(id, arm)
		if err != nil {
			return false, err
		}
		if s.Connections > s.Closed {
			return true, nil
		}
	}
	return false, nil
}

func (t *Tune) forgetRule(id uint32) error {
	errs := []error{t.maps["rules"].Delete(id), t.maps["retired"].Delete(id)}
	for arm := range TuneArms {
		errs = append(errs, t.maps["stats"].Delete(TuneStatsKey{Rule: id, Arm: uint32(arm)}))
	}
	failures, err := t.Failures()
	errs = append(errs, err)
	for f := range failures {
		if f.Rule == id {
			errs = append(errs, t.maps["failures"].Delete(f))
		}
	}
	for i, err := range errs {
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			errs[i] = nil
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("forget rule %d: %w", id, err)
	}
	return nil
}
