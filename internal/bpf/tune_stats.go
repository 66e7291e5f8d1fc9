// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// Stats returns the counts of an arm of a rule, 0 to TuneArms-1; zero for an unknown rule.
func (t *Tune) Stats(rule uint32, arm int) (*TuneStats, error) {
	var s TuneStats
	err := t.maps["stats"].Lookup(TuneStatsKey{Rule: rule, Arm: uint32(arm)}, &s)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil, fmt.Errorf("read counts of rule %d: %w", rule, err)
	}
	return &s, nil
}

// Failures counts the options that could not be set, by rule, option and errno.
func (t *Tune) Failures() (map[TuneFailure]uint64, error) {
	failures := make(map[TuneFailure]uint64)
	var (
		key   TuneFailure
		count uint64
	)
	entries := t.maps["failures"].Iterate()
	for entries.Next(&key, &count) {
		failures[key] = count
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read failures: %w", err)
	}
	return failures, nil
}

// Learned returns the learned windows by rule and prefix.
func (t *Tune) Learned() (map[TuneLearnedKey]TuneLearned, error) {
	learned := make(map[TuneLearnedKey]TuneLearned)
	var (
		key   TuneLearnedKey
		value TuneLearned
	)
	entries := t.maps["learned"].Iterate()
	for entries.Next(&key, &value) {
		learned[key] = value
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read what is learned: %w", err)
	}
	return learned, nil
}
