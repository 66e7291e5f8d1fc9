// SPDX-License-Identifier: Apache-2.0

package bigtcp

import (
	"github.com/prometheus/client_golang/prometheus"

	"sockeye/internal/format"
)

var (
	bigTCPLabels    = []string{"netns", "interface"}
	descBigTCPSize  = prometheus.NewDesc("sockeye_bigtcp_max_size_bytes", "GSO (send) or GRO (receive) maximum size of an interface that a rule matches, or of its lower interface.", append(bigTCPLabels, "family", "direction"), nil)
	descBigTCPState = prometheus.NewDesc("sockeye_bigtcp_state", "1, labelled with the state of an interface that a rule matches, or of its lower interface.", append(bigTCPLabels, "state"), nil)
	descBigTCPSeen  = prometheus.NewDesc("sockeye_bigtcp_changes_seen_total",
		"Changes of sizes by other programs that the agent has observed since it started.", []string{"netns"}, nil)
	descBigTCPOpen = prometheus.NewDesc("sockeye_bigtcp_namespace_entered", "1 while the network namespace exists and the agent applies its rules.", []string{"netns"}, nil)
)

// Collect sends the metrics of all network namespaces that have rules.
func (d *Domain) Collect(out chan<- prometheus.Metric) {
	for _, s := range d.allReconcilers() {
		s.collect(out)
	}
}

func (s *reconciler) collect(out chan<- prometheus.Metric) {
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, append([]string{s.netns}, labels...)...)
	}
	for _, i := range s.status() {
		gauge(descBigTCPState, 1, i.Interface, i.State)
		if i.Index == 0 {
			continue
		}
		for _, size := range []struct {
			family, direction string
			bytes             uint32
		}{
			{"ipv6", "send", i.Sizes.GSO},
			{"ipv6", "receive", i.Sizes.GRO},
			{"ipv4", "send", i.Sizes.GSOIPv4},
			{"ipv4", "receive", i.Sizes.GROIPv4},
		} {
			if size.bytes > 0 {
				gauge(descBigTCPSize, float64(size.bytes), i.Interface, size.family, size.direction)
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	gauge(descBigTCPOpen, format.Bool(s.network != nil && s.problem == nil))
	out <- prometheus.MustNewConstMetric(descBigTCPSeen, prometheus.CounterValue, float64(s.changes), s.netns)
}
