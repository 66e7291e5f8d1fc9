// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"

	"sockeye/internal/api"
	"sockeye/internal/bigtcp"
	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/doctor"
	"sockeye/internal/fleet"
	"sockeye/internal/rights"
	"sockeye/internal/steer"
	"sockeye/internal/steer/checkup"
	"sockeye/internal/trace"
	"sockeye/internal/tune"
)

// offline is what the commands that need no agent know of a domain. A function is nil if the domain has nothing to do.
type offline struct {
	one, many string // an entry of the policy
	count     func(*config.Policy) int
	// needs lists the capabilities that a policy needs beyond those of the unit.
	needs func(*config.Policy) []rights.Need
	// check checks a policy as far as that needs no running domain. notes has a sentence for each option that the kernel
	// lacks and that a rule skips, for what this host lacks so that apply refuses the policy, and for what was not checked.
	// check asks the agent, if one runs.
	check func(ctx context.Context, agent *api.Client, policy *config.Policy) (notes []string, err error)
	// examineKernel, examine and examineAgent add findings of doctor: about the kernel, about the host and a policy, and about
	// a running agent.
	examineKernel func(*doctor.Report)
	examine       func(*doctor.Report, *config.Policy)
	examineAgent  func(context.Context, *doctor.Report, *api.Client, *api.Status)
	pins          string // prefix of names in the pin directory; "" for none
	// retire ends the processes that outlive the agents of a pin directory, and revert restores the values that are recorded
	// in a state directory and returns the names of what it has restored; both are for reset.
	retire func(pins string) error
	revert func(stateDir string) ([]string, error)
}

// domains lists the domains of the policy. The order is that of findings and of checks.
func domains() []offline {
	return []offline{
		{one: "service", many: "services", count: func(p *config.Policy) int { return len(p.Services) },
			needs: steer.Needs, check: checkup.CheckPolicy, examine: checkup.Examine, examineAgent: checkup.ExamineAgent, pins: bpf.ServicePrefix, retire: steer.Retire},
		{one: "tune rule", many: "tune rules", count: func(p *config.Policy) int { return len(p.Tune) },
			needs: tune.Needs, check: tune.CheckPolicy, examineAgent: tune.ExamineAgent, pins: bpf.TunePins},
		{one: "trace rule", many: "trace rules", count: func(p *config.Policy) int { return len(p.Trace) },
			needs: trace.Needs, check: trace.CheckPolicy, pins: bpf.TracePins},
		{one: "bigtcp rule", many: "bigtcp rules", count: func(p *config.Policy) int { return len(p.BigTCP) },
			needs: bigtcp.Needs, examineKernel: bigtcp.Examine, revert: bigtcp.Revert},
		{one: "fleet", many: "fleets", count: func(p *config.Policy) int {
			if p.Fleet == nil {
				return 0
			}
			return 1
		}, needs: fleet.Needs, check: fleet.CheckPolicy, examineAgent: fleet.ExamineAgent, pins: bpf.FleetPins, retire: fleet.Retire},
	}
}
