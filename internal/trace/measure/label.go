// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"sockeye/internal/config"
)

// Label returns the name of a group on one line: replies 192.0.2.0/24 :1790 udp tune_rule=x arm=control, or replies
// other. Groups of different rules have different labels. Label omits TCP and unknown values, and quotes text with
// spaces.
func (g Group) Label() string {
	var words []string
	add := func(key, value string) {
		if value != "" {
			words = append(words, key+word(value))
		}
	}
	add("", g.Rule)
	if g.Other {
		words = append(words, "other")
	}
	switch {
	case !g.Remote.IsValid():
	case g.Remote.IsSingleIP():
		words = append(words, g.Remote.Addr().String())
	default:
		words = append(words, g.Remote.String())
	}
	if g.Port != 0 {
		words = append(words, ":"+strconv.Itoa(int(g.Port)))
	}
	if g.Protocol != config.TCP {
		add("", string(g.Protocol))
	}
	add("service=", g.Service)
	add("cgroup=", g.Cgroup)
	add("tune_rule=", g.TuneRule)
	add("arm=", g.Arm)
	if len(words) == 0 {
		return "all"
	}
	return strings.Join(words, " ")
}

// word quotes text that would be parsed as several words or as none.
func word(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool {
		return r == '"' || r == unicode.ReplacementChar || unicode.IsSpace(r) || !unicode.IsPrint(r)
	}) {
		return strconv.Quote(s)
	}
	return s
}

// SelectorError is the error for an invalid selector of groups.
type SelectorError struct {
	Selector string
	Message  string
	Hint     string // "" for none
}

// Error returns one line, followed by a line "  hint: ..." if there is a hint.
func (e *SelectorError) Error() string {
	s := fmt.Sprintf("selector %q: %s", e.Selector, e.Message)
	if e.Hint != "" {
		s += "\n  hint: " + e.Hint
	}
	return s
}

// condition is one condition of a selector.
type condition func(Group) bool

func oneOf(field func(Group) string, known ...string) func(string) (condition, string) {
	return func(value string) (condition, string) {
		if !slices.Contains(known, value) {
			return nil, "use one of " + strings.Join(known, ", ")
		}
		return textOf(field)(value)
	}
}

func textOf(field func(Group) string) func(string) (condition, string) {
	return func(value string) (condition, string) {
		return func(g Group) bool { return field(g) == value }, ""
	}
}

func readRemote(value string) (condition, string) {
	prefix, err := netip.ParsePrefix(value)
	if err != nil {
		a, err := netip.ParseAddr(value)
		if err != nil || a.Zone() != "" {
			return nil, "use a prefix such as 192.0.2.0/24, or an address"
		}
		prefix = netip.PrefixFrom(a, a.BitLen())
	}
	if a := prefix.Addr(); a.Is4In6() {
		if prefix.Bits() < 96 {
			return nil, "use IPv4 prefixes such as 192.0.2.0/24"
		}
		prefix = netip.PrefixFrom(a.Unmap(), prefix.Bits()-96)
	}
	return func(g Group) bool { return g.Remote.IsValid() && g.Remote.Overlaps(prefix) }, ""
}

func readPort(value string) (condition, string) {
	port, err := strconv.ParseUint(value, 10, 16)
	if err != nil || port == 0 {
		return nil, "use a number from 1 to 65535"
	}
	return func(g Group) bool { return g.Port == uint16(port) }, ""
}

func readCgroup(value string) (condition, string) {
	value = strings.Trim(value, "/")
	return func(g Group) bool { return strings.Trim(g.Cgroup, "/") == value }, ""
}

func readOther(value string) (condition, string) {
	if value != "true" && value != "false" {
		return nil, "use true or false"
	}
	return func(g Group) bool { return g.Other == (value == "true") }, ""
}

// MatchGroup returns whether a selector matches a group. A selector has the form key=value[,key=value] with the keys
// rule, protocol, remote, port, service, cgroup, tune_rule, arm and other; a group must meet all conditions. A remote
// prefix or address matches groups whose prefix overlaps with it; other=true matches messages that were counted as
// "other" because there were too many groups. service, tune_rule and arm may be none. The empty selector matches all
// groups. The error is a [*SelectorError].
func MatchGroup(selector string, g Group) (bool, error) {
	conditions, err := parseSelector(selector)
	if err != nil {
		return false, err
	}
	return meets(g, conditions), nil
}

// selectorKeys are the keys of selectors, with the parser of their values. A parser returns nil and a hint for an
// invalid value.
var selectorKeys = []struct {
	key  string
	read func(value string) (condition, string)
}{
	{"rule", textOf(func(g Group) string { return g.Rule })},
	{"protocol", oneOf(func(g Group) string { return string(g.Protocol) }, string(config.TCP), string(config.UDP))},
	{"remote", readRemote},
	{"port", readPort},
	{"service", textOf(func(g Group) string { return g.Service })},
	{"cgroup", readCgroup},
	{"tune_rule", textOf(func(g Group) string { return g.TuneRule })},
	{"arm", oneOf(func(g Group) string { return g.Arm }, "treated", "control", "none")},
	{"other", readOther},
}

// parseSelector parses key=value[,key=value]. A group must meet all conditions.
func parseSelector(selector string) ([]condition, error) {
	refuse := func(message, hint string) error {
		return &SelectorError{Selector: selector, Message: message, Hint: hint}
	}
	if selector == "" {
		return nil, nil
	}
	known := make([]string, len(selectorKeys))
	for i, k := range selectorKeys {
		known[i] = k.key
	}
	keys := "keys: " + strings.Join(known, ", ")
	var conditions []condition
	seen := map[string]bool{}
	for part := range strings.SplitSeq(selector, ",") {
		key, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok {
			return nil, refuse(fmt.Sprintf("%q is not key=value", part), keys)
		}
		i := slices.Index(known, key)
		if i < 0 {
			hint := keys
			if nearest := config.Nearest(key, known); nearest != "" {
				hint = "did you mean " + nearest + "?"
			}
			return nil, refuse(fmt.Sprintf("unknown key %q", key), hint)
		}
		if seen[key] {
			return nil, refuse(key+" is given twice", "a group must meet all conditions: select groups one by one, or by a shorter prefix")
		}
		seen[key] = true
		c, hint := selectorKeys[i].read(value)
		if c == nil {
			return nil, refuse(fmt.Sprintf("%s cannot be %q", key, value), hint)
		}
		conditions = append(conditions, c)
	}
	return conditions, nil
}

func meets(g Group, conditions []condition) bool {
	for _, holds := range conditions {
		if !holds(g) {
			return false
		}
	}
	return true
}
