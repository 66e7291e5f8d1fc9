// SPDX-License-Identifier: Apache-2.0

package main

// overview shows all hosts: whether anything is wrong, and where to look.
func overview() *dashboard {
	d := newDashboard("overview", "overview", "All hosts with Sockeye: whether devices are served, and what is wrong.", "sockeye_build_info")
	d.choose("service", "Service", "As the policy names it; other parts of Sockeye have none.", "sockeye_slot_ready")
	hosts, all := selected("instance"), selected("instance", "service")

	d.stat("Agents", "Agents that Prometheus reads.", "none", [2]float64{}, query{"count (" + hosts.gauge("build_info") + ")", "agents"})
	d.stat("Slots not ready", "Slots without a ready member; those in maint count, too.", "none", [2]float64{0, 1},
		query{"count (" + all.gauge("slot_ready") + ") - sum (" + all.gauge("slot_ready") + ")", "slots"})
	d.stat("Split devices", "Devices whose connections are at another member than their datagrams.", "none", [2]float64{0, 1},
		query{sum("", all.gauge("devices_split")), "devices"})
	d.stat("Devices with one stream", "Devices that send TCP without UDP, or UDP without TCP.", "none", [2]float64{1, 0},
		query{sum("", all.gauge("devices_one_stream")), "devices"})
	d.stat("Policies not in force", "Hosts whose policy file has errors, or was changed and not applied.", "none", [2]float64{1, 0},
		query{"count (" + hosts.gauge("policy_in_force") + ") - sum (" + hosts.gauge("policy_in_force") + ")", "hosts"})
	d.stat("Alerts", "Alerts of the rules of Sockeye that fire; 0 if Prometheus does not have the rules.", "none", [2]float64{1, 0},
		query{`count (ALERTS{alertname=~"Sockeye.*",alertstate="firing",instance=~"$instance"}) or vector(0)`, "alerts"})

	d.row("Devices")
	d.graph("Connection requests", "TCP connection requests that were steered to slots.", style{unit: "reqps"},
		query{sum("instance, service", all.rate("connections_total")), "{{service}} {{instance}}"})
	d.graph("Datagrams", "UDP datagrams that were steered to slots.", style{unit: "pps"},
		query{sum("instance, service", all.rate("datagrams_total")), "{{service}} {{instance}}"})
	d.graph("Refused", "Connection requests and datagrams that were refused, by reason.", style{unit: "pps", stacked: true},
		query{sum("service, reason", all.rate("refused_total")), "{{service}} {{reason}}"})
	d.graph("Dropped at members", "Packets that the kernel dropped at the sockets of members, because the members do not read fast enough.", style{unit: "pps", stacked: true},
		query{sum("instance, service, protocol", all.rate("member_drops_total")), "{{service}} {{protocol}} {{instance}}"})
	d.graph("Ready slots", "Slots that receive traffic.", style{unit: "none"},
		query{sum("instance, service", all.gauge("slot_ready")), "{{service}} {{instance}}"})
	d.graph("Processes without a slot", "Processes that match a rule of the policy and wait for a condition of membership, and processes that are not admitted.", style{unit: "none"},
		query{sum("instance, service", all.gauge("members_waiting")), "waiting {{service}} {{instance}}"},
		query{sum("instance, service", all.gauge("members_refused")), "refused {{service}} {{instance}}"})

	d.row("Agents")
	own := " and on (job, instance) " + hosts.gauge("build_info")
	d.table("Versions", "The agents, their versions, and the starts since the state directory was created.", 8, []string{"instance", "version"},
		column{"starts", "none", `max by (instance, version) (` + hosts.gauge("agent_starts_total") + ` * on (job, instance) group_left (version) ` + hosts.gauge("build_info") + ")"})
	d.graph("Memory", "Resident memory of the agents.", style{unit: "bytes"},
		query{`process_resident_memory_bytes{instance=~"$instance"}` + own, "{{instance}}"})
	d.graph("CPU", "CPU time of the agents, as part of one CPU. Steering in the kernel is not part of it.", style{unit: "percentunit"},
		query{`rate(process_cpu_seconds_total{instance=~"$instance"}[$__rate_interval])` + own, "{{instance}}"})
	return d
}
