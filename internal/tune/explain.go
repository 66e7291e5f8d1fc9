// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"sockeye/internal/config"
	"sockeye/internal/match"
)

// Explain tells which of the rules of one cgroup a connection gets, and why not
// the earlier ones: the reference model of the program. The last step is the rule
// that matches; if none does, all rules have a step. Services are those of the
// policy.
func Explain(rules []config.TuneRule, services []config.Service, q match.Question) []match.Step {
	var steps []match.Step
	for _, rule := range rules {
		step := match.Judge(q, rule.Name, rule.Match, services)
		steps = append(steps, step)
		if step.Matches {
			break
		}
	}
	return steps
}
