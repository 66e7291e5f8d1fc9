// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"strconv"
	"strings"
)

// String returns the setting in the form sndbuf 150KB.
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

// String returns all parameters in one line: explore 10, 16, 24 by remote/24, share 10%, probe 2%, bytes 64KB,
// evidence 8, forget 1h.
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

// String returns the reaction in the form retransmits > 2%, rtos > 2, sample 1/100: congestion reno.
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

// String returns the trial in the form control 10%.
func (t Trial) String() string { return "control " + formatPercentage(t.Control) }
