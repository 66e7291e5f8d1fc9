// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"fmt"

	"sockeye/internal/api"
	"sockeye/internal/config"
)

// CheckPolicy checks the rules of a policy for the command check. The options that the kernel lacks are those of the agent,
// or are probed if no agent runs; a note gives the reason if neither is possible.
func CheckPolicy(ctx context.Context, agent *api.Client, policy *config.Policy) (notes []string, err error) {
	if err := CheckNested(policy); err != nil || len(policy.Tune) == 0 {
		return nil, err
	}
	var lacks []api.TuneSkipped
	if agent.Get(ctx, "/v1/tune/options", nil, &lacks) != nil {
		if lacks, err = ProbeOptions(); err != nil {
			return []string{"tune options were not checked on this kernel: " + err.Error()}, nil
		}
	}
	byRule, err := Check(policy.Tune, lacks)
	for _, rule := range policy.Tune {
		for _, s := range byRule[rule.Name] {
			notes = append(notes, fmt.Sprintf("rule %s skips %s, which needs %s", rule.Name, s.Option, s.Needs))
		}
	}
	return notes, err
}
