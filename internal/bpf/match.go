// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"encoding/binary"
	"net/netip"
)

// MatchTerms is the maximum number of terms of a ruleset (bpf/include/match.h).
const MatchTerms = int(tuneSockopsMatchLimitMATCH_TERMS)

// Criteria of rules, and roles of connections (bpf/include/match.h).
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
	MatchRoles      = int(tuneSockopsMatchRoleMATCH_ROLES)
)

type (
	MatchAddress  = tuneSockopsMatchAddress
	MatchPrefix   = tuneSockopsMatchPrefix
	MatchPort     = tuneSockopsMatchPort
	MatchTag      = tuneSockopsMatchTag
	MatchSet      = tuneSockopsMatchSet
	MatchRuleset  = tuneSockopsMatchRuleset
	MatchActive   = tuneSockopsMatchActive
	MatchQuestion = tuneSockopsMatchQuestion
)

//revive:enable:exported

// MatchRules is the compiled match of a list of rules.
type MatchRules struct {
	// Ruleset.Rule has indexes of rules, which start at 1.
	Ruleset     MatchRuleset
	Remotes     []MatchPrefixEntry
	Locals      []MatchPrefixEntry
	RemotePorts []MatchPortEntry
	LocalPorts  []MatchPortEntry
	Tags        []MatchTagEntry
}

// MatchPrefixEntry contains the terms that match the addresses whose longest prefix it
// is.
type MatchPrefixEntry struct {
	Prefix MatchPrefix
	Set    MatchSet
}

// MatchPortEntry contains the terms that match a port.
type MatchPortEntry struct {
	Port MatchPort
	Set  MatchSet
}

// MatchTagEntry contains the terms that match a peer's tag.
type MatchTagEntry struct {
	Tag MatchTag
	Set MatchSet
}

// MappedAddress converts an address to the form of the programs: IPv6, or IPv4-mapped.
func MappedAddress(a netip.Addr) MatchAddress {
	var m MatchAddress
	b := a.As16()
	for i := range m.Word {
		m.Word[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return m
}

// UnmappedAddress is the inverse of MappedAddress.
func UnmappedAddress(m MatchAddress) netip.Addr {
	var b [16]byte
	for i, word := range m.Word {
		binary.NativeEndian.PutUint32(b[4*i:], word)
	}
	return netip.AddrFrom16(b).Unmap()
}

// Text converts a C string.
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
