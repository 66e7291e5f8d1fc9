// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/hex"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Role is a connection's side.
type Role string

// The roles.
const (
	RoleConnect Role = "connect"
	RoleAccept  Role = "accept"
)

// Match is what a connection must be; all that is given must hold. Nil, "" and
// zero match everything.
type Match struct {
	// Remote and Local are sets of prefixes: the longest that holds the address
	// decides whether the address is in the set. Remote ends with the prefixes of
	// RemoteFile.
	Remote []PrefixTerm `yaml:"remote" form:"prefixes" doc:"Prefixes of the remote address. Those with ! are taken out; the longest that holds the address decides."`
	// RemoteFile is an absolute path, or "" for none.
	RemoteFile string       `yaml:"remote_file" form:"file" doc:"File of more prefixes for remote, one a line, with # comments; relative to the policy file."`
	Local      []PrefixTerm `yaml:"local" form:"prefixes" doc:"Prefixes of the local address, as in remote."`
	// Ports are the service's: the remote port of a connection made by
	// connect(2), the local port of one made by accept(2).
	Ports       []PortRange `yaml:"port" form:"port_list" doc:"The port that was connected to: the remote port with role connect, the local port with role accept."`
	RemotePorts []PortRange `yaml:"remote_port" form:"port_list" doc:"The remote port."`
	LocalPorts  []PortRange `yaml:"local_port" form:"port_list" doc:"The local port."`
	Role        Role        `yaml:"role" enum:"connect,accept" doc:"The side of the connection that this host is; both by default."`
	SamePrefix  *SamePrefix `yaml:"same_prefix" form:"same_prefix" doc:"How many leading bits the local and the remote address share, at least: N for both families (no IPv4 connection where it is above 32), or {ipv4: N, ipv6: N}, in which a family left out does not match."`
	// Service names one of the policy's services: the connections that its TCP
	// listeners accept.
	Service string `yaml:"service" form:"service" doc:"A service of this policy: the connections that its TCP listeners accept."`
	// Tag is what the peer sent, 1 to 16 bytes.
	Tag []byte `yaml:"tag" form:"tag" doc:"The tag that the peer sent, written as the tag of a rule."`
}

// PrefixTerm is a prefix, masked, of a set, or one that is taken out of it.
type PrefixTerm struct {
	Prefix netip.Prefix
	Not    bool
}

// SamePrefix says how many leading bits both addresses must share; -1: no
// connection of that family matches.
type SamePrefix struct {
	IPv4 int `yaml:"ipv4" min:"0" max:"32" doc:"Leading bits of IPv4 addresses."`
	IPv6 int `yaml:"ipv6" min:"0" max:"128" doc:"Leading bits of IPv6 addresses."`
}

// String gives the prefix, with a ! before it where it is taken out.
func (t PrefixTerm) String() string {
	if t.Not {
		return "!" + t.Prefix.String()
	}
	return t.Prefix.String()
}

// String gives the match in one line, of lists the first item and how many more
// there are: remote 10.0.0.0/8, 2 more; port 1790; role accept. It is all where
// everything matches.
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

// firstOf gives the first of a list and how many more there are.
func firstOf[T fmt.Stringer](items []T) string {
	switch len(items) {
	case 0:
		return ""
	case 1:
		return items[0].String()
	}
	return fmt.Sprintf("%s, %d more", items[0], len(items)-1)
}

// String gives the number of bits where one is enough, or ipv4 24, ipv6 44.
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

// FormatTag writes a tag as the policy file does: in quotes, or as 0x and
// hexadecimal digits where it has other bytes than printable ASCII. It is "" for
// no tag.
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
