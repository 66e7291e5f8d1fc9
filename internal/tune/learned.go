// SPDX-License-Identifier: Apache-2.0

// The keys of the map of learned windows, as sockeye tune shows them. The learner is tune_learn in bpf/tune_sockops.bpf.c.

package tune

import (
	"net/netip"

	"sockeye/internal/bpf"
)

// LearnedPrefix returns the prefix of a key in the map of learned windows.
func LearnedPrefix(key bpf.TuneLearnedKey) netip.Prefix {
	addr, length := bpf.UnmappedAddress(key.Prefix), int(key.Bits)
	if addr.Is4() {
		length -= 96
	}
	return netip.PrefixFrom(addr, length)
}
