// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/cilium/ebpf/rlimit"

	"sockeye/internal/api"
	"sockeye/internal/config"
)

// CheckPolicy checks the rules of a policy for the command check, which shows the notes. The probes need no agent.
func CheckPolicy(_ context.Context, _ *api.Client, policy *config.Policy) (notes []string, err error) {
	byRule, err := SkippedStages(policy.Trace)
	for _, rule := range policy.Trace {
		for _, s := range byRule[rule.Name] {
			notes = append(notes, fmt.Sprintf("trace rule %s skips %s, which needs %s", rule.Name, s.Stage, s.Needs))
		}
	}
	return notes, err
}

// SkippedStages returns the stages that each rule skips on this kernel, as far as the rights of the caller allow the probes.
// It returns an error for a rule without any measurable stage.
func SkippedStages(rules []config.TraceRule) (map[string][]api.TraceSkipped, error) {
	// Probes load programs, which kernels before 5.11 charge to RLIMIT_MEMLOCK. The probes report a limit that
	// cannot be raised.
	_ = rlimit.RemoveMemlock()
	skipped, err := new(stageProbe).lackingStages(rules)
	if errors.Is(err, fs.ErrPermission) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return skipped, unmeasurable(rules, skipped)
}
