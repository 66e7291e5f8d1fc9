// SPDX-License-Identifier: Apache-2.0

package config

import "fmt"

// String returns the sampling in the notation of the policy file: 1/100 or 100/s.
func (s TraceSampling) String() string {
	if s.PerSecond > 0 {
		return fmt.Sprintf("%d/s", s.PerSecond)
	}
	return fmt.Sprintf("1/%d", s.OneIn)
}

// String returns the kind, for remote with the prefix lengths: remote/24 if that of IPv6 is twice as long, or remote
// ipv4/24 ipv6/56.
func (g TraceGroupBy) String() string {
	switch {
	case g.Kind != GroupRemote:
		return string(g.Kind)
	case g.IPv6 == 2*g.IPv4:
		return fmt.Sprintf("remote/%d", g.IPv4)
	}
	return fmt.Sprintf("remote ipv4/%d ipv6/%d", g.IPv4, g.IPv6)
}
