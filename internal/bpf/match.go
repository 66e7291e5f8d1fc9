// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"
)

// MatchTerms is the number of terms that a ruleset has at most; see
// bpf/include/match.h.
const MatchTerms = int(tuneSockopsMatchLimitMATCH_TERMS)

// What rules match on, and the sides of a connection; see bpf/include/match.h.
//
//revive:disable:exported
const (
	MatchUseRemote     = uint32(tuneSockopsMatchUseMATCH_USE_REMOTE)
	MatchUseLocal      = uint32(tuneSockopsMatchUseMATCH_USE_LOCAL)
	MatchUseRemotePort = uint32(tuneSockopsMatchUseMATCH_USE_REMOTE_PORT)
	MatchUseLocalPort  = uint32(tuneSockopsMatchUseMATCH_USE_LOCAL_PORT)
	MatchUseSame       = uint32(tuneSockopsMatchUseMATCH_USE_SAME)
	MatchUseTag        = uint32(tuneSockopsMatchUseMATCH_USE_TAG)

	MatchConnect = uint32(tuneSockopsMatchRoleMATCH_CONNECT)
	MatchAccept  = uint32(tuneSockopsMatchRoleMATCH_ACCEPT)

	MatchUDPConnect = uint32(tuneSockopsMatchRoleMATCH_UDP_CONNECT)
	MatchUDPAccept  = uint32(tuneSockopsMatchRoleMATCH_UDP_ACCEPT)
	MatchRoles      = int(tuneSockopsMatchRoleMATCH_ROLES)
)

type (
	MatchAddress  = tuneSockopsMatchAddress
	MatchPrefix   = tuneSockopsMatchPrefix
	MatchPort     = tuneSockopsMatchPort
	MatchTag      = tuneSockopsMatchTag
	MatchSet      = tuneSockopsMatchSet
	MatchRuleset  = tuneSockopsMatchRuleset
	MatchTuple    = tuneSockopsMatchTuple
	MatchActive   = tuneSockopsMatchActive
	MatchQuestion = tuneSockopsMatchQuestion
)

//revive:enable:exported

// MatchRules is what finds the rule of a connection, compiled.
type MatchRules struct {
	// Ruleset.Rule holds indexes into the rules, which start at 1.
	Ruleset     MatchRuleset
	Remotes     []MatchPrefixEntry
	Locals      []MatchPrefixEntry
	RemotePorts []MatchPortEntry
	LocalPorts  []MatchPortEntry
	Tags        []MatchTagEntry
}

// MatchPrefixEntry gives the terms that allow the addresses of a prefix and of
// no longer one.
type MatchPrefixEntry struct {
	Prefix MatchPrefix
	Set    MatchSet
}

// MatchPortEntry is the same for ports.
type MatchPortEntry struct {
	Port MatchPort
	Set  MatchSet
}

// MatchTagEntry gives the terms that ask for a peer's tag.
type MatchTagEntry struct {
	Tag MatchTag
	Set MatchSet
}

// MappedAddress is an address as the programs have it: IPv6, or IPv4 mapped
// into it.
func MappedAddress(a netip.Addr) MatchAddress {
	var m MatchAddress
	b := a.As16()
	for i := range m.Word {
		m.Word[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return m
}

// UnmappedAddress is the reverse of MappedAddress.
func UnmappedAddress(m MatchAddress) netip.Addr {
	var b [16]byte
	for i, word := range m.Word {
		binary.NativeEndian.PutUint32(b[4*i:], word)
	}
	return netip.AddrFrom16(b).Unmap()
}

// Text reads a string of a program's.
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

// banks are the maps by which a program finds rules: two of each, of which one
// is in force. See bpf/include/match.bpf.h.
type banks struct {
	// maps has all maps of the program by name, more than the banks too.
	maps map[string]*ebpf.Map
	// inner says of the maps of maps what is in them.
	inner map[string]*ebpf.MapSpec
}

// install makes rules take effect, in one step: a connection is decided by the
// rules before or by these. ids are the numbers of the rules, by index.
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
	// A write to a map of maps waits until no program runs that may have seen
	// what was there before (maybe_wait_bpf_programs, kernel/bpf/syscall.c): the
	// other bank may be built anew from here on.
	return b.putRuleset(bank, &ruleset)
}

// build fills a bank that is not in force. Each write to a map of maps waits for
// a grace period of RCU, 20 ms at rest and seconds on a loaded host: all wait for
// the same one.
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

// putInner makes a map, has it filled, and puts it into a bank.
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
