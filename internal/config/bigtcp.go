// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"path"
	"strconv"
	"strings"
)

// BigTCPRule is one rule of bigtcp: the maximum packet sizes of matching network interfaces (GSO and GRO). The first
// matching rule of a network namespace applies.
type BigTCPRule struct {
	// Interface is a name, or a glob as of [path.Match].
	Interface string `yaml:"interface" required:"true" form:"interface" doc:"The name of the interface, or a glob on names, which also matches interfaces that appear later."`
	// Netns is an absolute path, or "" for the agent's own network namespace.
	Netns string `yaml:"netns" form:"netns" doc:"The path of the network namespace, which may appear later; the agent's own by default."`
	// IPv6 and IPv4 are in bytes, 65536 to 524280; 0 does not change the family.
	IPv6 uint32 `yaml:"ipv6" form:"bigtcp_size" doc:"The largest packet of TCP over IPv6, 65536 to 524280 bytes (KB is 1000, KiB 1024); off is 65536. Linux 5.19 or later. Unchanged if omitted."`
	IPv4 uint32 `yaml:"ipv4" form:"bigtcp_size" doc:"The same over IPv4. Linux 6.3 or later."`
}

// The sizes of a packet, in bytes.
const (
	bigTCPOff  = 65536     // maximum without BIG TCP
	bigTCPMost = 8 * 65535 // maximum of the kernel
)

// Named reports whether the rule names one interface, without a glob.
func (r BigTCPRule) Named() bool { return !strings.ContainsAny(r.Interface, `*?[\`) }

// Matches reports whether the rule matches an interface name of its network namespace.
func (r BigTCPRule) Matches(name string) bool {
	if r.Named() {
		return name == r.Interface
	}
	matches, _ := path.Match(r.Interface, name) // the glob is valid
	return matches
}

// String returns the rule in the form eth*: ipv6 192KB, ipv4 off, with its network namespace if it has one.
func (r BigTCPRule) String() string {
	text := r.Interface
	if r.Netns != "" {
		text += " of " + r.Netns
	}
	var sizes []string
	if r.IPv6 > 0 {
		sizes = append(sizes, "ipv6 "+formatBigTCPSize(r.IPv6))
	}
	if r.IPv4 > 0 {
		sizes = append(sizes, "ipv4 "+formatBigTCPSize(r.IPv4))
	}
	return text + ": " + strings.Join(sizes, ", ")
}

func formatBigTCPSize(size uint32) string {
	if size == bigTCPOff {
		return "off"
	}
	return notations[KindSize].format(int64(size))
}

// ParseBigTCPSize parses a size in the notation of the policy file: 192KB, 192KiB, 192000 or off. The result is 65536 to
// 524280 bytes.
func ParseBigTCPSize(s string) (uint32, error) {
	size, message, hint := parseBigTCPSize(s)
	if message == "" {
		return size, nil
	}
	if hint != "" {
		message += "; " + hint
	}
	return 0, fmt.Errorf("size %s %s", quoteShort(s), message)
}

// parseBigTCPSize returns a message if s is not a valid size.
func parseBigTCPSize(s string) (size uint32, message, hint string) {
	if s == "off" {
		return bigTCPOff, "", ""
	}
	n := notations[KindSize]
	value, bare, ok := n.parse(s)
	if !ok || bare && !decimal.MatchString(s) {
		hint = "units: " + n.names()
		if near := n.nearest(s); near != "" {
			hint = "write " + near
		}
		return 0, "must be off or a size such as 192KB", hint
	}
	if !value.IsInt() {
		return 0, "must be whole bytes", ""
	}
	if i := value.Num(); !i.IsInt64() || i.Int64() < bigTCPOff || i.Int64() > bigTCPMost {
		return 0, fmt.Sprintf("must be off or %d to %d bytes", bigTCPOff, bigTCPMost), ""
	}
	return uint32(value.Num().Int64()), "", ""
}

// maxInterfaceName is the maximum length of an interface name in bytes (IFNAMSIZ without the terminating zero).
const maxInterfaceName = 15

// parseInterface parses an interface name or a glob on names.
func parseInterface(s string) (any, string, string) {
	const hint = `one name, or a glob with *, ? or [a-z]`
	switch {
	case strings.ContainsAny(s, "/: ") || s == "." || s == "..":
		return nil, "is not an interface name: " + strconv.Quote(s), hint
	case (BigTCPRule{Interface: s}).Named() && len(s) > maxInterfaceName:
		return nil, fmt.Sprintf("is longer than an interface name, %d bytes: %s", maxInterfaceName, quoteShort(s)), hint
	}
	return parseGlob(s)
}
