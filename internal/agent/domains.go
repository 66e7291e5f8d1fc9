// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"sockeye/internal/bigtcp"
	"sockeye/internal/domain"
	"sockeye/internal/fleet"
	"sockeye/internal/steer"
	"sockeye/internal/trace"
	"sockeye/internal/tune"
)

// newDomains returns the domains of the policy, in the order of their start and of the steps of an apply. The services are one of them.
func newDomains(h *domain.Host) (services *steer.Domain, all []domain.Domain) {
	services = steer.New(h)
	tuning := tune.New(h)
	return services, []domain.Domain{services, tuning, trace.New(h, tuning), bigtcp.New(h), fleet.New(h, services)}
}
