// SPDX-License-Identifier: Apache-2.0

package main

// tune shows the connections that rules tune, and those of the control arms.
func tune() *dashboard {
	d := newDashboard("tune", "tune", "Connections that rules of tune match, by rule and arm: the control arm of a trial is not tuned.", "sockeye_tune_attached")
	d.choose("cgroup", "Cgroup", "As the policy names it.", "sockeye_tune_attached")
	cgroups := selected("instance", "cgroup")
	d.choose("rule", "Rule", "Of tune.", "sockeye_tune_connections_total")
	rules := selected("instance", "cgroup", "rule")
	const by, legend = "instance, cgroup, rule, arm", "{{rule}} {{arm}} {{cgroup}} {{instance}}"
	const byRule, ruleLegend = "instance, cgroup, rule", "{{rule}} {{cgroup}} {{instance}}"

	d.stat("Tuned cgroups", "Cgroups of the policy that are tuned.", "none", [2]float64{}, query{sum("", cgroups.gauge("tune_attached")), "tuned"})
	d.stat("Not tuned", "Cgroups of the policy that are not tuned, because their unit does not run.", "none", [2]float64{1, 0},
		query{"count (" + cgroups.gauge("tune_attached") + ") - sum (" + cgroups.gauge("tune_attached") + ")", "not tuned"})
	d.stat("Connections", "New connections that rules match.", "cps", [2]float64{}, query{sum("", rules.rate("tune_connections_total")), "connections"})
	d.stat("Retransmitted", "Part of the segments with data that were retransmissions.", "percentunit", [2]float64{0.01, 0.05},
		query{part(rules.rate("tune_retransmits_total"), rules.rate("tune_segments_total")), "retransmitted"})
	d.stat("RTT, p50", "Half of the smoothed RTTs are lower.", "s", [2]float64{}, query{rules.quantile(0.5, "tune_rtt_seconds", "", recently), "p50"})
	d.stat("Options failed", "Socket options that the kernel refused over the time shown.", "none", [2]float64{1, 0},
		query{"(" + sum("", rules.increase("tune_options_failed_total")) + ") or vector(0)", "failed"})

	d.row("Connections")
	d.graph("Connections", "Connections that the rule matched.", style{unit: "cps"}, query{sum(by, rules.rate("tune_connections_total")), legend})
	d.graph("Established", "Connections of the rule that were established.", style{unit: "cps"}, query{sum(by, rules.rate("tune_established_total")), legend})
	d.graph("Closed", "Connections of the rule that have closed; not with observe: off.", style{unit: "cps"}, query{sum(by, rules.rate("tune_closed_total")), legend})
	d.graph("Options set", "Socket options that were set.", style{unit: "ops"}, query{sum(byRule, rules.rate("tune_options_set_total")), ruleLegend})
	d.graph("Options refused", "Socket options that the kernel refused, by error. Empty if none was refused.", style{unit: "ops"},
		query{sum(byRule+", option, error", rules.rate("tune_options_failed_total")), "{{option}} {{error}} " + ruleLegend})
	d.graph("Reactions", "Connections on which the reaction of the rule was applied.", style{unit: "cps"}, query{sum(byRule, rules.rate("tune_reactions_total")), ruleLegend})

	d.row("Effect")
	d.graph("RTT, p50 and p99", "Smoothed RTTs, at most one a second and connection.", style{unit: "s", log: true},
		query{rules.quantile(0.5, "tune_rtt_seconds", by, recently), "p50 " + legend},
		query{rules.quantile(0.99, "tune_rtt_seconds", by, recently), "p99 " + legend})
	d.graph("Time to connect, p50 and p99", "From the SYN to the established connection.", style{unit: "s", log: true},
		query{rules.quantile(0.5, "tune_connect_seconds", by, recently), "p50 " + legend},
		query{rules.quantile(0.99, "tune_connect_seconds", by, recently), "p99 " + legend})
	d.graph("Retransmitted", "Part of the segments with data that were retransmissions.", style{unit: "percentunit"},
		query{sum(by, rules.rate("tune_retransmits_total")) + " / " + sum(by, rules.rate("tune_segments_total")), legend})
	d.graph("Bytes", "Bytes that peers acknowledged.", style{unit: "Bps"}, query{sum(by, rules.rate("tune_acked_bytes_total")), legend})
	d.graph("Segments", "Segments with data, retransmissions included.", style{unit: "pps"}, query{sum(by, rules.rate("tune_segments_total")), legend})
	d.graph("Timeouts", "Retransmission timeouts.", style{unit: "ops"}, query{sum(by, rules.rate("tune_rtos_total")), legend})
	return d
}
