// SPDX-License-Identifier: Apache-2.0

package scope

import (
	"slices"

	"sockeye/internal/config"
	"sockeye/internal/rights"
)

// Rules are the rules of one kind that a policy has for one cgroup.
type Rules[R any] struct {
	// Cgroup is the name of the cgroup in the policy.
	Cgroup string
	// Rules are in the order of the policy; nil if the policy has none for the cgroup.
	Rules []R
	// Services are all services of the policy, to which rules may refer.
	Services []config.Service
}

// ByCgroup groups the rules of a policy by the cgroups that they name.
func ByCgroup[R any](rules []R, cgroup func(R) string, services []config.Service) []Rules[R] {
	var all []Rules[R]
	for _, rule := range rules {
		i := slices.IndexFunc(all, func(c Rules[R]) bool { return c.Cgroup == cgroup(rule) })
		if i < 0 {
			i = len(all)
			all = append(all, Rules[R]{Cgroup: cgroup(rule), Services: services})
		}
		all[i].Rules = append(all[i].Rules, rule)
	}
	return all
}

// Listeners returns the listeners of services by the name of the service.
func Listeners(services []config.Service) map[string][]config.Listener {
	listeners := make(map[string][]config.Listener)
	for _, s := range services {
		listeners[s.Name] = s.Listeners
	}
	return listeners
}

// Leftovers returns the pin directories, by their names, of cgroups for which the policy has no rules.
func Leftovers[R any](pinned []string, wanted []Rules[R]) []string {
	return slices.DeleteFunc(slices.Clone(pinned), func(name string) bool {
		return slices.ContainsFunc(wanted, func(c Rules[R]) bool { return PinName(c.Cgroup) == name })
	})
}

// Needs lists the capabilities that the agent needs beyond those of its unit to create the cgroup of a rule.
func Needs(cgroup, rule string) []rights.Need {
	if !Creates(cgroup) {
		return nil
	}
	return []rights.Need{{Right: rights.DACOverride, For: "cgroup " + cgroup + " of " + rule + ", which the agent creates where there is none"}}
}
