// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/hex"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Role is a side of a connection.
type Role string

// The roles.
const (
	RoleConnect Role = "connect"
	RoleAccept  Role = "accept"
)

// Match has the conditions for a connection; all given conditions must hold. Nil, "" and zero match everything.
type Match struct {
	// Remote and Local are sets of prefixes: the longest prefix that contains an address decides whether the
	// address is in the set. The prefixes of RemoteFile are appended to Remote.
	Remote []PrefixTerm `yaml:"remote" form:"prefixes" doc:"Prefixes of the remote address. A prefix with ! is excluded; the longest matching prefix decides."`
	// RemoteFile is an absolute path, or "" for none.
	RemoteFile string       `yaml:"remote_file" form:"file" doc:"File of more prefixes for remote, one a line, with # comments; relative to the policy file."`
	Local      []PrefixTerm `yaml:"local" form:"prefixes" doc:"Prefixes of the local address, as in remote."`
	// Ports are the ports of the accepting side: the remote port of a connection by connect(2), the local port of
	// one by accept(2).
	Ports       []PortRange `yaml:"port" form:"port_list" doc:"The port that was connected to: the remote port with role connect, the local port with role accept."`
	RemotePorts []PortRange `yaml:"remote_port" form:"port_list" doc:"The remote port."`
	LocalPorts  []PortRange `yaml:"local_port" form:"port_list" doc:"The local port."`
	Role        Role        `yaml:"role" enum:"connect,accept" doc:"The side of this host: connect for connections that it opens, accept for those that it accepts; both by default."`
	SamePrefix  *SamePrefix `yaml:"same_prefix" form:"same_prefix" doc:"Minimum length of the common prefix of the local and the remote address: N for both families (above 32, no IPv4 connection matches), or {ipv4: N, ipv6: N}, where an omitted family does not match."`
	// Service names a service of the policy, and matches the connections that its TCP listeners accept.
	Service string `yaml:"service" form:"service" doc:"A service of this policy: the connections that its TCP listeners accept."`
	// Tag is the tag that the peer sent, 1 to 16 bytes.
	Tag []byte `yaml:"tag" form:"tag" doc:"The tag that the peer sent, in the notation of the tag of a rule."`
}

// PrefixTerm is a masked prefix that is included in a set, or excluded with Not.
type PrefixTerm struct {
	Prefix netip.Prefix
	Not    bool
}

// SamePrefix is the minimum length of the common prefix of both addresses; -1: no connection of that family matches.
type SamePrefix struct {
	IPv4 int `yaml:"ipv4" min:"0" max:"32" doc:"Leading bits of IPv4 addresses."`
	IPv6 int `yaml:"ipv6" min:"0" max:"128" doc:"Leading bits of IPv6 addresses."`
}

// String returns the prefix, after a ! if it is excluded.
func (t PrefixTerm) String() string {
	if t.Not {
		return "!" + t.Prefix.String()
	}
	return t.Prefix.String()
}

// String returns the match in one line, with the first item of each list and the number of the others: remote
// 10.0.0.0/8, 2 more; port 1790; role accept. A match without conditions is all.
func (m Match) String() string {
	var parts []string
	add := func(key, value string) {
		if value != "" {
			parts = append(parts, key+" "+value)
		}
	}
	add("remote", firstOf(m.Remote))
	add("local", firstOf(m.Local))
	add("port", firstOf(m.Ports))
	add("remote_port", firstOf(m.RemotePorts))
	add("local_port", firstOf(m.LocalPorts))
	add("role", string(m.Role))
	if m.SamePrefix != nil {
		add("same_prefix", m.SamePrefix.String())
	}
	add("service", m.Service)
	add("tag", FormatTag(m.Tag))
	if len(parts) == 0 {
		return "all"
	}
	return strings.Join(parts, "; ")
}

// firstOf returns the first item of a list and the number of the others.
func firstOf[T fmt.Stringer](items []T) string {
	switch len(items) {
	case 0:
		return ""
	case 1:
		return items[0].String()
	}
	return fmt.Sprintf("%s, %d more", items[0], len(items)-1)
}

// String returns one number of bits if that is sufficient, or the form ipv4 24, ipv6 44.
func (s SamePrefix) String() string {
	switch {
	case s.IPv4 == s.IPv6 || s.IPv4 < 0 && s.IPv6 > 32:
		return strconv.Itoa(s.IPv6)
	case s.IPv4 < 0:
		return fmt.Sprintf("ipv6 %d", s.IPv6)
	case s.IPv6 < 0:
		return fmt.Sprintf("ipv4 %d", s.IPv4)
	}
	return fmt.Sprintf("ipv4 %d, ipv6 %d", s.IPv4, s.IPv6)
}

// FormatTag returns a tag in the notation of the policy file: in quotes, or as 0x and hexadecimal digits if the tag has
// other bytes than printable ASCII. The result for no tag is "".
func FormatTag(tag []byte) string {
	switch text := string(tag); {
	case text == "":
		return ""
	case tagText.MatchString(text) && !strings.HasPrefix(text, "0x"):
		return strconv.Quote(text)
	default:
		return "0x" + hex.EncodeToString(tag)
	}
}
