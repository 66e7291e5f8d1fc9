// SPDX-License-Identifier: Apache-2.0

package config

import "fmt"

// String gives the sampling as the policy file does: 1/100, or 100/s.
func (s TraceSampling) String() string {
	if s.PerSecond > 0 {
		return fmt.Sprintf("%d/s", s.PerSecond)
	}
	return fmt.Sprintf("1/%d", s.OneIn)
}

// String gives the kind, of remote with its bits: remote/24 where IPv6 has twice
// as many, or remote ipv4/24 ipv6/56.
func (g TraceGroupBy) String() string {
	switch {
	case g.Kind != GroupRemote:
		return string(g.Kind)
	case g.IPv6 == 2*g.IPv4:
		return fmt.Sprintf("remote/%d", g.IPv4)
	}
	return fmt.Sprintf("remote ipv4/%d ipv6/%d", g.IPv4, g.IPv6)
}
