// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"errors"
	"fmt"
	"sync"

	"github.com/cilium/ebpf"
)

// banks are the maps of the rule search: two of each, one of which is in force (bpf/include/match.bpf.h).
type banks struct {
	// maps contains all maps of the program by name, also those outside of the banks.
	maps map[string]*ebpf.Map
	// inner contains the specs of the inner maps.
	inner map[string]*ebpf.MapSpec
}

// install replaces the rules atomically: a connection is decided by the old rules or by the new ones. ids are the
// numbers of the rules by index.
func (b *banks) install(r *MatchRules, ids []uint32) error {
	ruleset := r.Ruleset
	for term := range ruleset.Terms {
		index := ruleset.Rule[term]
		if index == 0 || int(index) > len(ids) {
			return fmt.Errorf("install rules: term %d of rule %d", term, index)
		}
		ruleset.Rule[term] = ids[index-1]
	}
	var state MatchActive
	if err := b.maps["active"].Lookup(uint32(0), &state); err != nil {
		return fmt.Errorf("read active bank: %w", err)
	}
	bank := 1 - state.Bank&1
	if err := b.build(bank, r, &ruleset); err != nil {
		return err
	}
	state.Used |= ruleset.Uses
	if err := b.maps["active"].Put(uint32(0), state); err != nil {
		return fmt.Errorf("write active bank: %w", err)
	}
	state.Bank = bank
	if err := b.maps["active"].Put(uint32(0), state); err != nil {
		return fmt.Errorf("write active bank: %w", err)
	}
	// A write to a map of maps waits for programs that may use the previous map (maybe_wait_bpf_programs,
	// kernel/bpf/syscall.c). Afterwards, the other bank may be rebuilt.
	return b.putRuleset(bank, &ruleset)
}

// build fills the bank that is not in force. Each write to a map of maps waits for an RCU grace period, 20 ms at rest
// and seconds on a loaded host. The writes run concurrently, so that all wait for the same one.
func (b *banks) build(bank uint32, r *MatchRules, ruleset *MatchRuleset) error {
	prefixes := func(entries []MatchPrefixEntry) func(*ebpf.Map) error {
		return func(m *ebpf.Map) error {
			return putAll(m, entries, func(e *MatchPrefixEntry) (any, any) { return &e.Prefix, &e.Set })
		}
	}
	ports := func(entries []MatchPortEntry) func(*ebpf.Map) error {
		return func(m *ebpf.Map) error {
			return putAll(m, entries, func(e *MatchPortEntry) (any, any) { return &e.Port, &e.Set })
		}
	}
	tags := func(m *ebpf.Map) error {
		return putAll(m, r.Tags, func(e *MatchTagEntry) (any, any) { return &e.Tag, &e.Set })
	}
	parts := []func() error{
		func() error { return b.putInner("remotes", bank, len(r.Remotes), prefixes(r.Remotes)) },
		func() error { return b.putInner("locals", bank, len(r.Locals), prefixes(r.Locals)) },
		func() error { return b.putInner("remote_ports", bank, len(r.RemotePorts), ports(r.RemotePorts)) },
		func() error { return b.putInner("local_ports", bank, len(r.LocalPorts), ports(r.LocalPorts)) },
		func() error { return b.putInner("peer_tags", bank, len(r.Tags), tags) },
		func() error { return b.putRuleset(bank, ruleset) },
	}
	errs := make([]error, len(parts))
	var all sync.WaitGroup
	for i, part := range parts {
		all.Go(func() { errs[i] = part() })
	}
	all.Wait()
	return errors.Join(errs...)
}

func putAll[E any](m *ebpf.Map, entries []E, of func(*E) (key, value any)) error {
	for i := range entries {
		key, value := of(&entries[i])
		if err := m.Put(key, value); err != nil {
			return err
		}
	}
	return nil
}

func (b *banks) putRuleset(bank uint32, ruleset *MatchRuleset) error {
	return b.putInner("rulesets", bank, 1, func(m *ebpf.Map) error { return m.Put(uint32(0), ruleset) })
}

// putInner creates a map, fills it, and puts it into a bank.
func (b *banks) putInner(name string, bank uint32, entries int, fill func(*ebpf.Map) error) error {
	spec := b.inner[name].Copy()
	spec.Name = name[:min(len(name), 12)] + "_in"
	spec.MaxEntries = uint32(max(entries, 1))
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return fmt.Errorf("create map %s: %w", name, err)
	}
	defer m.Close()
	if err := fill(m); err != nil {
		return fmt.Errorf("fill map %s: %w", name, err)
	}
	if err := b.maps[name].Put(bank, uint32(m.FD())); err != nil {
		return fmt.Errorf("install map %s: %w", name, err)
	}
	return nil
}
