// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"github.com/prometheus/client_golang/prometheus"

	"sockeye/internal/format"
)

var (
	descEpoch     = prometheus.NewDesc("sockeye_fleet_epoch", "The number of the table of the fleet that is in force on this host; 0 before the first one.", []string{"fleet"}, nil)
	descConnected = prometheus.NewDesc("sockeye_fleet_connected", "1 while the store of the fleet answers.", []string{"fleet"}, nil)
	descLeads     = prometheus.NewDesc("sockeye_fleet_leader", "1 on the host that writes the table.", []string{"fleet"}, nil)
	descMoving    = prometheus.NewDesc("sockeye_fleet_moving_buckets", "Buckets that move from one host to another now, of 16384.", []string{"fleet"}, nil)
	descProblems  = prometheus.NewDesc("sockeye_fleet_problems", "Problems of the fleet that sockeye fleet lists.", []string{"fleet"}, nil)
	descHealthy   = prometheus.NewDesc("sockeye_fleet_healthy", "1 while routers should send packets to this host, as sockeye health says.", []string{"fleet"}, nil)
	descBuckets   = prometheus.NewDesc("sockeye_fleet_buckets", "Buckets of a host in the table that is in force on this host, of 16384.", []string{"fleet", "host"}, nil)
	descAlive     = prometheus.NewDesc("sockeye_fleet_host_alive", "1 while a host renews its lease.", []string{"fleet", "host"}, nil)
	descPackets   = prometheus.NewDesc("sockeye_fleet_packets_total", "Packets to the services that arrived at the interfaces of this host, by what the program did with them. Totals since the creation of the pins.", []string{"fleet", "outcome"}, nil)
)

// Collect sends the metrics of the fleet.
func (d *Domain) Collect(out chan<- prometheus.Metric) {
	p, err := d.current()
	if err != nil {
		return
	}
	s, err := p.statusIfAny()
	if s == nil && err == nil {
		return
	}
	if err != nil {
		out <- prometheus.NewInvalidMetric(descPackets, err)
		return
	}
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, append([]string{s.Fleet}, labels...)...)
	}
	gauge(descEpoch, float64(s.Epoch))
	gauge(descConnected, format.Bool(s.Connected))
	gauge(descLeads, format.Bool(p.leads()))
	gauge(descMoving, float64(s.Moving))
	gauge(descProblems, float64(len(s.Problems)))
	gauge(descHealthy, format.Bool(s.Healthy))
	for _, h := range s.Hosts {
		gauge(descBuckets, float64(h.Buckets), h.Name)
		gauge(descAlive, format.Bool(h.Alive), h.Name)
	}
	for outcome, packets := range s.Packets {
		out <- prometheus.MustNewConstMetric(descPackets, prometheus.CounterValue, float64(packets), s.Fleet, outcome)
	}
}
