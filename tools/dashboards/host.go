// SPDX-License-Identifier: Apache-2.0

package main

// host shows the sizes of packets, the fleet, the TCP sockets, and the agent as a process.
func host() *dashboard {
	d := newDashboard("host", "BIG TCP, fleet and sockets", "Sizes of packets per interface (BIG TCP), the hosts of a fleet, what limits TCP connections, and the agent as a process.", "sockeye_build_info")
	all := selected("instance")

	d.row("BIG TCP")
	d.graph("Maximum sizes", "GSO (send) and GRO (receive) maximum sizes of the interfaces that rules match, and of their lower interfaces.", style{unit: "bytes"},
		query{"max by (instance, netns, interface, family, direction) (" + all.gauge("bigtcp_max_size_bytes") + ")", "{{interface}} {{family}} {{direction}} {{netns}} {{instance}}"})
	d.table("States", "applied: as the policy. changed: another program has set other sizes. impossible: not supported. conflict: a command has set the sizes. waiting: not there yet.", 8,
		[]string{"interface", "netns", "instance", "state"},
		column{"interfaces", "none", sum("interface, netns, instance, state", all.gauge("bigtcp_state")+" == 1")})
	d.graph("Changes by other programs", "Changes of sizes by other programs over the time shown.", style{unit: "none"},
		query{sum("instance, netns", all.increase("bigtcp_changes_seen_total")), "{{netns}} {{instance}}"})
	d.graph("Network namespaces", "1 while the network namespace exists and the agent applies its rules.", style{unit: "none"},
		query{"min by (instance, netns) (" + all.gauge("bigtcp_namespace_entered") + ")", "{{netns}} {{instance}}"})

	d.row("Fleet")
	d.table("Hosts of the fleet", "buckets are those of 16384 in the table of the instance; alive is 1 while the host renews its lease.", 12, []string{"fleet", "host", "instance"},
		column{"buckets", "none", sum("fleet, host, instance", all.gauge("fleet_buckets"))},
		column{"alive", "none", sum("fleet, host, instance", all.gauge("fleet_host_alive"))})
	d.graph("Packets to the services", "What the hosts do with the packets that arrive: local, forwarded to another host, and dropped ones by reason.", style{unit: "pps", stacked: true},
		query{sum("fleet, outcome", all.rate("fleet_packets_total")), "{{outcome}} {{fleet}}"})
	d.graph("Tables", "The number of the table in force on each host; the hosts have the same, apart from the moment of a change.", style{unit: "none"},
		query{sum("fleet, instance", all.gauge("fleet_epoch")), "{{fleet}} {{instance}}"},
		query{"max by (fleet) (" + all.gauge("fleet_moving_buckets") + ")", "moving buckets {{fleet}}"})
	d.graph("State of the hosts", "1: etcd answers, the host leads, routers should send packets to the host. Problems: what sockeye fleet lists.", style{unit: "none"},
		query{sum("fleet, instance", all.gauge("fleet_connected")), "connected {{fleet}} {{instance}}"},
		query{sum("fleet, instance", all.gauge("fleet_leader")), "leader {{fleet}} {{instance}}"},
		query{sum("fleet, instance", all.gauge("fleet_healthy")), "healthy {{fleet}} {{instance}}"},
		query{sum("fleet, instance", all.gauge("fleet_problems")), "problems {{fleet}} {{instance}}"})

	const by, legend = "instance, service, cgroup", "{{service}} {{cgroup}} {{instance}}"
	d.row("TCP sockets of services and cgroups")
	d.graph("Connections by bottleneck", "application: nothing to send. receive_window: the peer does not read. congestion_window: the network. send_buffer: a larger buffer would help. transmit: the host.", style{unit: "none", stacked: true},
		query{sum("limit", all.gauge("sockets")), "{{limit}}"})
	d.graph("Closed windows", "Connections that the application does not read, so that the peer cannot send. Always 0 before Linux 6.2.", style{unit: "none"},
		query{sum(by, all.gauge("sockets_zero_window")), legend})
	d.graph("Unread data", "Received data that the applications have not read.", style{unit: "bytes"}, query{sum(by, all.gauge("sockets_unread_bytes")), legend})
	d.graph("Payload in the send queues", "Payload that is not acknowledged, and of that, what is not sent.", style{unit: "bytes"},
		query{sum(by, all.gauge("sockets_payload_bytes")), legend},
		query{sum(by, all.gauge("sockets_unsent_bytes")), "unsent " + legend})
	d.graph("Memory of the send queues", "Kernel memory of the send queues.", style{unit: "bytes"}, query{sum(by, all.gauge("sockets_queued_bytes")), legend})
	d.graph("Room", "Bytes that all sockets together accept now without a partial send.", style{unit: "bytes"}, query{sum(by, all.gauge("sockets_room_bytes")), legend})

	own := " and on (job, instance) " + all.gauge("build_info")
	d.row("Agent")
	d.graph("Starts", "Starts of the agent since its state directory was created.", style{unit: "none"}, query{all.gauge("agent_starts_total"), "{{instance}}"})
	d.graph("Events", "Events that were recorded, and events that could not be recorded, as on a full disk.", style{unit: "cps"},
		query{all.rate("events_recorded_total"), "recorded {{instance}}"}, query{all.rate("events_lost_total"), "lost {{instance}}"})
	d.graph("Files of events", "Size of the files of events.", style{unit: "bytes"}, query{all.gauge("events_bytes"), "{{instance}}"})
	d.graph("Descriptors", "Open descriptors of the agent, as part of its limit.", style{unit: "percentunit"},
		query{`process_open_fds{instance=~"$instance"} / process_max_fds{instance=~"$instance"}` + own, "{{instance}}"})
	d.graph("Goroutines", "Goroutines of the agent.", style{unit: "none"}, query{`go_goroutines{instance=~"$instance"}` + own, "{{instance}}"})
	return d
}
