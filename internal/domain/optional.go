// SPDX-License-Identifier: Apache-2.0

package domain

import (
	"context"
	"io"
	"net/http"
	"net/netip"
	"net/url"

	"sockeye/internal/api"
	"sockeye/internal/config"
)

// With returns the domains that have the methods of T, one of the interfaces below, in their order.
func With[T any](domains []Domain) []T {
	var found []T
	for _, d := range domains {
		if t, ok := d.(T); ok {
			found = append(found, t)
		}
	}
	return found
}

// Retirer is a domain with processes that outlive the agent. The methods also work before Start and after Close.
type Retirer interface {
	// Outlives reports whether such a process has run since before start, in clock ticks since boot.
	Outlives(start uint64) (bool, error)
	// Retire ends the processes, before the pins are removed.
	Retire() error
}

// Reverter is a domain that records in the state directory what it changes on the host besides pins. Revert also works
// before Start and after Close.
type Reverter interface {
	// Revert restores the recorded values, and returns the names of what it has restored.
	Revert() ([]string, error)
}

// Explainer is a domain that explains how it treats the packets of an address, for /v1/why.
type Explainer interface {
	// Why explains a device at the named part of the policy, or at all parts for "". The agent adds Plan and Events.
	Why(ctx context.Context, name, device string) ([]api.Why, error)
	// PlanFor returns what a policy would change for an address.
	PlanFor(policy *config.Policy, name string, address netip.Addr) api.WhyPlan
}

// Scoped is a domain that works on cgroups, for the metrics of their sockets.
type Scoped interface {
	// Paths returns the names in the policy of the cgroups that exist, by their directories.
	Paths() map[string]string
}

// Measurer is a domain whose measurements of messages are in the report of the web page.
type Measurer interface {
	// Cgroups returns the state of the measured cgroups, of all for "".
	Cgroups(cgroup string) (*api.TraceStatus, error)
	// History returns the measurements of a time, and Slow its slowest messages, by the parameters of the API.
	History(q url.Values) (*api.TraceHistory, error)
	Slow(q url.Values) ([]api.TraceSlow, error)
}

// HealthReporter is the domain that says whether routers should send packets to this host. There is one.
type HealthReporter interface {
	Health() api.Health
}

// ServeHealth answers probes by HTTP: with the status 200 while routers should send packets to this host, and 503 otherwise.
func ServeHealth(d HealthReporter) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		h := d.Health()
		text := "healthy\n"
		if !h.Healthy {
			w.WriteHeader(http.StatusServiceUnavailable)
			text = h.Reason + "\n"
		}
		_, _ = io.WriteString(w, text) // a client that has gone needs no answer
	}
}
