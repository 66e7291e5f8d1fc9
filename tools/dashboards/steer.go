// SPDX-License-Identifier: Apache-2.0

package main

// steer shows the slots, members, devices and waiting rooms of services.
func steer() *dashboard {
	d := newDashboard("steer", "steer", "Slots and their members, devices, waiting rooms and templates of services.", "sockeye_slot_ready")
	d.choose("service", "Service", "As the policy names it.", "sockeye_slot_ready")
	d.choose("slot", "Slot", "Panels of devices and templates show all slots.", "sockeye_slot_ready")
	all, slots := selected("instance", "service"), selected("instance", "service", "slot")
	const bySlot, slotLegend = "instance, service, slot", "{{service}} {{slot}} {{instance}}"
	const byService, serviceLegend = "instance, service", "{{service}} {{instance}}"

	d.row("Slots")
	d.table("Slots", "ready is 1 while the slot receives traffic. share is the part of the devices by the table in force.", 12, []string{"service", "slot", "instance"},
		column{"share", "percentunit", sum(bySlot, slots.gauge("slot_share"))},
		column{"ready", "none", sum(bySlot, slots.gauge("slot_ready"))},
		column{"drain", "none", sum(bySlot, slots.with(`state="drain"`).gauge("slot_state"))},
		column{"maint", "none", sum(bySlot, slots.with(`state="maint"`).gauge("slot_state"))},
		column{"weight", "none", sum(bySlot, slots.gauge("slot_weight"))},
		column{"connections", "none", sum(bySlot, slots.gauge("connections_total"))},
		column{"datagrams", "none", sum(bySlot, slots.gauge("datagrams_total"))})
	d.graph("Ready", "1 while the slot has a member that listens on all listeners.", style{unit: "none", width: 6},
		query{sum(bySlot, slots.gauge("slot_ready")), slotLegend})
	d.graph("Members registered", "Registrations per slot over the time shown. More than a few mean that the member starts again and again.", style{unit: "none", width: 6},
		query{sum(bySlot, slots.increase("registrations_total")), slotLegend})
	d.graph("Connection requests", "TCP connection requests that were steered to the slot.", style{unit: "reqps"},
		query{sum(bySlot, slots.rate("connections_total")), slotLegend})
	d.graph("Datagrams", "UDP datagrams that were steered to the slot.", style{unit: "pps"},
		query{sum(bySlot, slots.rate("datagrams_total")), slotLegend})
	d.graph("Refused", "Connection requests (tcp) and datagrams (udp) that were refused. Without a slot: the source address could not be read, or there is no table.",
		style{unit: "pps", stacked: true}, query{sum("service, slot, protocol, reason", slots.rate("refused_total")), "{{service}} {{slot}} {{protocol}} {{reason}}"})
	d.graph("Diverted to the standby slot", "Connection requests and datagrams for the slot that the standby slot received.", style{unit: "pps"},
		query{sum(bySlot, slots.rate("diverted_total")), slotLegend})
	d.graph("Ports steered", "1 while the ports stay steered even if all members exit; keeper: 1 while the process that holds them runs.", style{unit: "none"},
		query{sum(byService, all.gauge("service_ports_steered")), serviceLegend},
		query{sum(byService, all.gauge("keeper_running")), "keeper " + serviceLegend})
	d.graph("Run time of the programs", "Time in the steering programs, as part of one CPU. Counted only while kernel.bpf_stats_enabled is 1.", style{unit: "percentunit"},
		query{sum(byService, all.rate("program_run_seconds_total")), serviceLegend})
	d.graph("Runs of the programs", "Runs of the steering programs. Counted only while kernel.bpf_stats_enabled is 1.", style{unit: "ops"},
		query{sum(byService, all.rate("program_runs_total")), serviceLegend})
	d.graph("Packets past the service", "Steering programs that another process has replaced, and sockets that the kernel prefers to those of the service.", style{unit: "none"},
		query{sum(byService, all.increase("programs_replaced_total")), "programs " + serviceLegend},
		query{sum(byService, all.gauge("bypass_sockets")), "sockets " + serviceLegend})

	d.row("Members")
	d.graph("Receive buffers", "Part of the receive buffer of a member's UDP sockets that datagrams fill. A full buffer drops.", style{unit: "percentunit"},
		query{sum(bySlot, slots.gauge("member_receive_queue_bytes")) + " / " + sum(bySlot, slots.gauge("member_receive_buffer_bytes")), slotLegend})
	d.graph("Accept queues", "TCP connections that the member has not accepted, as part of the backlog. A full queue drops connection requests.", style{unit: "percentunit"},
		query{sum(bySlot, slots.gauge("member_accept_queue")) + " / " + sum(bySlot, slots.gauge("member_accept_backlog")), slotLegend})
	d.graph("Drops", "Datagrams (udp) without space in the receive buffer, and connection requests (tcp) beyond the backlog.", style{unit: "pps"},
		query{sum(bySlot+", protocol", slots.rate("member_drops_total")), "{{protocol}} " + slotLegend})
	d.graph("Processes without a slot", "Processes that match a rule and wait for a condition of membership, and those that are not admitted.", style{unit: "none"},
		query{sum(byService, all.gauge("members_waiting")), "waiting " + serviceLegend},
		query{sum(byService, all.gauge("members_refused")), "refused " + serviceLegend})

	d.row("Devices")
	d.graph("Devices with one stream", "tcp: devices that have a connection and have sent no datagrams in the last 10 minutes or none yet. udp: devices that send datagrams and have no connection.", style{unit: "none"},
		query{sum(byService+", stream", all.gauge("devices_one_stream")), "{{stream}} " + serviceLegend})
	d.graph("Split, moving and adopted devices", "Split: connections and datagrams are at different members. Running and waiting: devices that move to another slot. Adopted: devices that stay with the member that has their connections.",
		style{unit: "none"},
		query{sum(byService, all.gauge("devices_split")), "split " + serviceLegend},
		query{sum(byService+", state", all.gauge("devices_moving")), "{{state}} " + serviceLegend},
		query{sum(byService, all.gauge("devices_adopted")), "adopted " + serviceLegend})
	d.graph("Sessions closed", "TCP connections that the agent closed, because their device has another slot.", style{unit: "cps"},
		query{sum(byService, all.rate("sessions_closed_total")), serviceLegend})
	d.graph("Packets of unlisted sources", "Packets from sources that do not fit into the table of devices: forged sources, or a small track_devices.", style{unit: "pps"},
		query{sum(byService, all.rate("unlisted_total")), serviceLegend})

	d.row("Waiting rooms")
	d.graph("Fill", "Datagrams that wait for the next member, as part of those that may wait. Only with when_empty: {wait: ...} or takeover.", style{unit: "percentunit"},
		query{slots.gauge("room_waiting_datagrams") + " / on (job, instance, service) group_left () " + all.gauge("room_limit_datagrams"), slotLegend})
	d.graph("Stored and replayed", "Datagrams (udp) and connection requests (tcp) that came while the slot was empty, and datagrams that a member has received later.", style{unit: "pps"},
		query{sum(bySlot+", protocol", slots.rate("room_stored_total")), "stored {{protocol}} " + slotLegend},
		query{sum(bySlot, slots.rate("room_replayed_total")), "replayed " + slotLegend})
	d.graph("Lost", "Datagrams that were refused because the room was full, and datagrams that waited and were discarded.", style{unit: "pps"},
		query{sum(bySlot, slots.rate("room_full_total")), "full " + slotLegend},
		query{sum(bySlot, slots.rate("room_lost_total")), "lost " + slotLegend})

	d.row("Templates of IPFIX and NetFlow v9")
	d.graph("Kept", "Templates that the agent keeps for new members, and their exporters.", style{unit: "none"},
		query{sum(byService, all.gauge("templates")), "templates " + serviceLegend},
		query{sum(byService, all.gauge("template_exporters")), "exporters " + serviceLegend})
	d.graph("Read and replayed", "Datagrams with templates that the agent has read, and exporters whose templates were sent to a member.", style{unit: "pps"},
		query{sum(byService, all.rate("template_datagrams_total")), "read " + serviceLegend},
		query{sum(byService, all.rate("template_replays_total")), "replayed " + serviceLegend})
	d.graph("Not kept", "Malformed datagrams, templates beyond the bounds, and datagrams that did not fit into the ring buffer.", style{unit: "pps"},
		query{sum(byService, all.rate("template_malformed_total")), "malformed " + serviceLegend},
		query{sum(byService, all.rate("templates_refused_total")), "refused " + serviceLegend},
		query{sum(byService, all.rate("templates_lost_total")), "lost " + serviceLegend})
	return d
}
