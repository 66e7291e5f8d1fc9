// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"errors"
	"io/fs"

	"github.com/cilium/ebpf/rlimit"

	"sockeye/internal/api"
	"sockeye/internal/config"
)

// Check says which stages each rule goes without on this kernel, as far as
// the caller may know. It fails for a rule that none are left of.
func Check(rules []config.TraceRule) (map[string][]api.TraceSkipped, error) {
	// Probes load programs, which kernels before 5.11 charge to RLIMIT_MEMLOCK.
	// Where it cannot be raised, they say so.
	_ = rlimit.RemoveMemlock()
	skipped, err := new(sendProbe).lackingStages(rules)
	if errors.Is(err, fs.ErrPermission) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return skipped, nothingLeft(rules, skipped)
}
