// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// String gives the prefix, with a ! before it where it is taken out.
func (t PrefixTerm) String() string {
	if t.Not {
		return "!" + t.Prefix.String()
	}
	return t.Prefix.String()
}

// String gives the setting as sndbuf 150KB.
func (s Setting) String() string {
	if s.Explore != nil {
		return s.Option + " " + s.Explore.String()
	}
	o, _ := FindTuneOption(s.Option)
	if o.Kind == KindText {
		return s.Option + " " + s.Text
	}
	return s.Option + " " + FormatValue(o, s.Value)
}

// String gives all parameters in one line: explore 10, 16, 24 by remote/24, share
// 10%, probe 2%, bytes 64KB, evidence 8, forget 1h.
func (e Explore) String() string {
	candidates := make([]string, len(e.Candidates))
	for i, c := range e.Candidates {
		candidates[i] = strconv.Itoa(c)
	}
	by := fmt.Sprintf("remote/%d", e.IPv4)
	if e.IPv6 != exploreIPv6 {
		by = fmt.Sprintf("ipv4 %d, ipv6 %d", e.IPv4, e.IPv6)
	}
	return fmt.Sprintf("explore %s by %s, share %s, probe %s, bytes %s, evidence %d, forget %s", strings.Join(candidates, ", "), by,
		formatPercentage(e.Share), formatPercentage(e.Probe), FormatValue(flight, e.Bytes), e.Evidence, FormatValue(forget, e.Forget))
}

// String gives the reaction as retransmits > 2%, rtos > 2, sample 1/100: congestion reno.
func (r React) String() string {
	var parts []string
	if r.Retransmits > 0 {
		parts = append(parts, "retransmits > "+formatPercentage(r.Retransmits))
	}
	if r.RTOs >= 0 {
		parts = append(parts, fmt.Sprintf("rtos > %d", r.RTOs))
	}
	if r.Sample > 1 {
		parts = append(parts, fmt.Sprintf("sample 1/%d", r.Sample))
	}
	settings := make([]string, len(r.Set))
	for i, s := range r.Set {
		settings[i] = s.String()
	}
	return strings.Join(parts, ", ") + ": " + strings.Join(settings, ", ")
}

// String gives the trial as control 10%.
func (t Trial) String() string { return "control " + formatPercentage(t.Control) }

// String gives the match in one line, of lists the first item and how many more
// there are: remote 10.0.0.0/8, 2 more; port 1790; role accept. It is all where
// everything matches.
func (m TuneMatch) String() string {
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
