// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"sockeye/internal/config"
	"sockeye/internal/match"
)

// Explain returns which rule of one cgroup a connection gets, and why the earlier rules do not match. Explain is the
// reference model of the program. The last step is the matching rule; if no rule matches, there is a step for every
// rule. services are those of the policy.
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
