// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"github.com/prometheus/client_golang/prometheus"

	"sockeye/internal/bpf"
	"sockeye/internal/format"
	"sockeye/internal/histogram"
)

// Counters start at 0 when the options of a rule change.
var (
	tuneLabels          = []string{"cgroup", "rule", "arm"}
	descTuneAttached    = prometheus.NewDesc("sockeye_tune_attached", "1 while the cgroup is tuned.", []string{"cgroup"}, nil)
	descTuneConnections = prometheus.NewDesc("sockeye_tune_connections_total",
		"Connections that the rule matched.", tuneLabels, nil)
	descTuneEstablished = prometheus.NewDesc("sockeye_tune_established_total",
		"Connections of the rule that were established.", tuneLabels, nil)
	descTuneClosed = prometheus.NewDesc("sockeye_tune_closed_total",
		"Connections of the rule that have closed, as far as it observes that.", tuneLabels, nil)
	descTuneOptions = prometheus.NewDesc("sockeye_tune_options_set_total",
		"Socket options set by the rule.", []string{"cgroup", "rule"}, nil)
	descTuneFailures = prometheus.NewDesc("sockeye_tune_options_failed_total",
		"Socket options of the rule that the kernel refused.", []string{"cgroup", "rule", "option", "error"}, nil)
	descTuneBytes = prometheus.NewDesc("sockeye_tune_acked_bytes_total",
		"Bytes that peers acknowledged.", tuneLabels, nil)
	descTuneSegments = prometheus.NewDesc("sockeye_tune_segments_total",
		"Segments sent with data, retransmissions included.", tuneLabels, nil)
	descTuneRetransmits = prometheus.NewDesc("sockeye_tune_retransmits_total",
		"Retransmitted segments.", tuneLabels, nil)
	descTuneRTOs = prometheus.NewDesc("sockeye_tune_rtos_total",
		"Retransmission timeouts.", tuneLabels, nil)
	descTuneReactions = prometheus.NewDesc("sockeye_tune_reactions_total",
		"Connections to which the rule reacted.", []string{"cgroup", "rule"}, nil)
	descTuneRTT = prometheus.NewDesc("sockeye_tune_rtt_seconds",
		"Smoothed RTT, sampled at most once a second and connection.", tuneLabels, nil)
	descTuneConnect = prometheus.NewDesc("sockeye_tune_connect_seconds",
		"Time from the SYN to the established connection.", tuneLabels, nil)
)

var tuneArms = [bpf.TuneArms]string{bpf.TuneArmTreated: "treated", bpf.TuneArmControl: "control"}

// tuneBounds are the bounds of the histograms in microseconds: powers of two, which are also bounds of the program's
// buckets.
var tuneBounds = func() (bounds []uint64) {
	for b := uint64(16); b <= 1<<25; b *= 2 {
		bounds = append(bounds, b)
	}
	return bounds
}()

// Collect sends the metrics of all tuned cgroups.
func (d *Domain) Collect(out chan<- prometheus.Metric) {
	tuners, err := d.tunersOf("")
	if err != nil {
		d.log.Error("metrics failed", "error", err)
		return
	}
	for _, t := range tuners {
		if err := t.collect(out); err != nil {
			d.log.Error("metrics failed", "cgroup", t.name, "error", err)
		}
	}
}

func (t *tuner) collect(out chan<- prometheus.Metric) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	out <- prometheus.MustNewConstMetric(descTuneAttached, prometheus.GaugeValue, format.Bool(t.inForce()), t.name)
	if t.tune == nil {
		return nil
	}
	ids, _, _, err := t.ruleIDs()
	if err != nil {
		return err
	}
	failures, err := t.tune.Failures()
	if err != nil {
		return err
	}
	counter := func(desc *prometheus.Desc, value uint64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(value), append([]string{t.name}, labels...)...)
	}
	for _, rule := range t.rules {
		id := ids[rule.Name]
		for _, f := range failuresOf(id, failures) {
			counter(descTuneFailures, f.Count, rule.Name, f.Option, f.Error)
		}
		for arm, name := range tuneArms {
			if arm == bpf.TuneArmControl && rule.Trial == nil {
				continue
			}
			s, err := t.tune.Stats(id, arm)
			if err != nil {
				return err
			}
			counter(descTuneConnections, s.Connections, rule.Name, name)
			counter(descTuneEstablished, s.Established, rule.Name, name)
			counter(descTuneClosed, s.Closed, rule.Name, name)
			counter(descTuneBytes, s.Bytes, rule.Name, name)
			counter(descTuneSegments, s.Segments, rule.Name, name)
			counter(descTuneRetransmits, s.Retransmits, rule.Name, name)
			counter(descTuneRTOs, s.Rtos, rule.Name, name)
			distribution(out, descTuneRTT, s.Rtt, t.name, rule.Name, name)
			distribution(out, descTuneConnect, s.Connect, t.name, rule.Name, name)
			if arm == bpf.TuneArmTreated {
				counter(descTuneOptions, s.Options, rule.Name)
				counter(descTuneReactions, s.Reactions, rule.Name)
			}
		}
	}
	return nil
}

func distribution(out chan<- prometheus.Metric, desc *prometheus.Desc, counts histogram.Quarters, labels ...string) {
	h := histogram.Of[float64](counts)
	buckets := make(map[float64]uint64, len(tuneBounds))
	for i, below := range h.Cumulative(tuneBounds...) {
		buckets[float64(tuneBounds[i])/1e6] = below
	}
	out <- prometheus.MustNewConstHistogram(desc, h.Count, float64(h.Sum)/1e6, buckets, labels...)
}
