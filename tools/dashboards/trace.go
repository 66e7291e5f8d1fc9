// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"

	"sockeye/internal/config"
	"sockeye/internal/trace/measure"
)

// stageColors are the same in all panels.
var stageColors = map[string]string{
	string(config.StageSend): "purple", string(config.StageStack): "blue", string(config.StageQdisc): "orange", string(config.StageNIC): "yellow",
	string(config.StageNetwork): "green", string(measure.Total): "text", string(config.StageRXStack): "super-light-blue", string(config.StageReader): "red",
}

// trace shows where traced messages spend their time.
func trace() *dashboard {
	d := newDashboard("trace", "trace", "Where messages spend their time, their outcomes, and how far readers are behind. "+
		"From native histograms where Prometheus has them, else from classic ones.", "sockeye_trace_chosen_total")
	for _, v := range [][3]string{
		{"cgroup", "Cgroup", "As the policy names it."},
		{"rule", "Rule", "Of trace."},
		{"protocol", "Protocol", "tcp, udp, or any for groups that are counted together."},
		{"remote", "Remote", "Prefixes of the peers, where rules group by remote."},
		{"port", "Port", "The port of the listening side, where rules group by port."},
	} {
		d.choose(v[0], v[1], v[2], "sockeye_trace_chosen_total")
	}
	var stages []string
	for _, s := range measure.Stages {
		stages = append(stages, string(s))
	}
	d.offer("stage", "Slowest by", "The stage by which the slowest groups are found.", append([]string{string(measure.Total)}, without(stages, string(measure.Total))...))

	cgroups, all := selected("instance", "cgroup"), selected("instance", "cgroup", "rule", "protocol", "remote", "port")
	stage := func(s string) metrics { return all.with(`stage="` + s + `"`) }
	const group = "instance, cgroup, rule, protocol, remote, port, service, group_cgroup, tune_rule, arm"
	const groupLegend = "{{rule}} {{protocol}} {{remote}} {{port}} {{service}} {{group_cgroup}} {{tune_rule}} {{arm}} {{instance}}"
	const by, legend = "instance, cgroup, rule, protocol", "{{rule}} {{protocol}} {{cgroup}} {{instance}}"
	const logarithmic = " The axis is logarithmic. From classic histograms, whose bounds are powers of two, the value is interpolated and can be wrong by up to a factor of two; from native ones by 9 %."

	d.stat("Traced cgroups", "Cgroups of the policy that are traced, and those that are not, because their unit does not run.", "none", [2]float64{},
		query{sum("", cgroups.gauge("trace_attached")), "traced"},
		query{"count (" + cgroups.gauge("trace_attached") + ") - sum (" + cgroups.gauge("trace_attached") + ")", "not traced"})
	d.stat("Messages traced", "Messages that were chosen to be traced. The policy has the share of connections and messages.", "mps", [2]float64{},
		query{sum("", all.rate("trace_chosen_total")), "chosen"})
	d.stat("Total, p50", "Half of the traced messages take less time from sendmsg to the acknowledgement.", "s", [2]float64{},
		query{stage("total").quantile(0.5, "trace_stage_seconds", "", recently), "p50"})
	d.stat("Total, p99", "1 of 100 traced messages takes more time from sendmsg to the acknowledgement.", "s", [2]float64{},
		query{stage("total").quantile(0.99, "trace_stage_seconds", "", recently), "p99"})
	d.stat("Retransmitted", "Part of the traced messages whose last segment was sent more than once.", "percentunit", [2]float64{0.01, 0.05},
		query{part(all.with(`outcome="retransmitted"`).rate("trace_messages_total"), all.rate("trace_messages_total")), "retransmitted"})
	d.stat("Furthest behind", "Age of the oldest segment or datagram that waits in a socket. Only for rules with the stage reader.", "s", [2]float64{1, 10},
		query{"max (" + all.gauge("trace_reader_oldest_seconds") + ")", "oldest"})

	d.row("Where messages spend their time")
	d.graph("Mean time by stage, stacked", "What the mean traced message waits for. send: inside sendmsg. stack: in TCP, for the window, pacing or the send buffer. qdisc: in the queue of the interface. "+
		"network: from the driver to the acknowledgement. The dashed line is the mean of total. Datagrams have stack and qdisc only.",
		style{unit: "s", stacked: true, colors: stageColors, dashed: "total"},
		query{all.with(`stage=~"send|stack|qdisc|network|total"`).mean("trace_stage_seconds", "stage"), "{{stage}}"})
	sent := all.with(`stage!~"rx_stack|reader"`)
	d.graph("p50 by stage", "Half of the traced messages spend less time in the stage."+logarithmic, style{unit: "s", log: true, colors: stageColors},
		query{sent.quantile(0.5, "trace_stage_seconds", "stage", recently), "{{stage}}"})
	d.graph("p99 by stage", "1 of 100 traced messages spends more time in the stage."+logarithmic, style{unit: "s", log: true, colors: stageColors},
		query{sent.quantile(0.99, "trace_stage_seconds", "stage", recently), "{{stage}}"})
	for _, h := range [][3]string{
		{"Total: sendmsg to acknowledgement", "total", "Distribution of the time from sendmsg to the acknowledgement. Two bands are two kinds of messages or of peers."},
		{"Network: driver to acknowledgement", "network", "Distribution of the time from the driver to the acknowledgement: the network, and the peer. A band near 40 ms is often a delayed acknowledgement."},
	} {
		d.heatmap(h[0], h[2], sum("", stage(h[1]).rate("trace_stage_seconds"))+" or "+sum("le", stage(h[1]).rate("trace_stage_seconds_bucket")))
	}
	columns := []column{
		{"p99", "s", stage("$stage").quantile(0.99, "trace_stage_seconds", group, shown)},
		{"p50", "s", stage("$stage").quantile(0.5, "trace_stage_seconds", group, shown)},
	}
	for _, s := range []string{"stack", "qdisc", "network"} {
		columns = append(columns, column{s + " p99", "s", stage(s).quantile(0.99, "trace_stage_seconds", group, shown)})
	}
	columns[0].expr = "topk(20, (" + columns[0].expr + ") > 0)"
	d.table("Slowest groups, by p99 of $stage", "The 20 groups with the highest p99 of the chosen stage over the time shown, and the p99 of the stages of sending. Empty labels: the rule does not group by them. Remote other: groups beyond the bound of the rule.",
		24, strings.Split(strings.ReplaceAll(group, " ", ""), ","), append(columns, column{"chosen", "mps", sum(group, "rate("+all.gauge("trace_chosen_total")+"["+shown+"])")})...)
	d.graph("Slowest groups over time, p99 of $stage", "The 10 groups with the highest p99 of the chosen stage at each time."+logarithmic, style{unit: "s", log: true, width: 24},
		query{"topk(10, (" + stage("$stage").quantile(0.99, "trace_stage_seconds", group, recently) + ") > 0)", groupLegend})

	d.row("Outcomes")
	d.graph("Chosen messages by outcome, stacked", "Each chosen message has one outcome; the dashed line has those chosen, and the difference is in flight. Only acked, retransmitted and coalesced messages are in the times above. docs/metrics.md lists the outcomes.",
		style{unit: "mps", width: 12, stacked: true, dashed: "chosen", colors: map[string]string{"acked": "green", "sent": "green", "retransmitted": "orange", "coalesced": "light-green",
			"missed": "light-blue", "parted": "super-light-blue", "overwritten": "blue", "full": "purple", "application": "light-purple", "refused": "dark-purple",
			"unacknowledged": "red", "discarded": "dark-red", "split": "yellow", "chosen": "text"}},
		query{sum("outcome", all.rate("trace_messages_total")), "{{outcome}}"},
		query{sum("", all.rate("trace_chosen_total")), "chosen"})
	ended := func(outcomes, name string) query {
		return query{part(all.with(`outcome=~"`+outcomes+`"`).rate("trace_messages_total"), all.rate("trace_messages_total")), name}
	}
	d.graph("Part retransmitted, unacknowledged and not measured", "Of the chosen messages that ended. unacknowledged: the connection ended first. not measured: if this is large, the times above lack the messages of busy moments.",
		style{unit: "percentunit", width: 12, colors: map[string]string{"retransmitted": "orange", "unacknowledged": "red", "not measured": "blue"}},
		ended("retransmitted", "retransmitted"), ended("unacknowledged|discarded", "unacknowledged"), ended("overwritten|missed|parted|full|application|refused|split", "not measured"))
	d.graph("Groups with most retransmissions", "The 10 groups with the highest part of retransmitted messages at each time: paths that lose packets.", style{unit: "percentunit"},
		query{"topk(10, " + sum(group, all.with(`outcome="retransmitted"`).rate("trace_messages_total")) + " / " + sum(group, all.rate("trace_messages_total")) + ")", groupLegend})
	d.graph("In flight", "Chosen messages that are sent and not acknowledged. A high level without acknowledgements is a peer or a path that has stopped.", style{unit: "short"},
		query{sum(by, all.gauge("trace_in_flight")), legend})
	d.graph("Traced bytes acknowledged", "Bytes of the traced messages that peers acknowledged; not the throughput of the connections.", style{unit: "Bps"},
		query{sum(by, all.rate("trace_acked_bytes_total")), legend})

	d.row("Readers")
	d.graph("Time until read, p99", "1 of 100 traced segments and datagrams waits longer in the socket until the application reads it. Only for rules with the stage reader."+logarithmic, style{unit: "s", log: true},
		query{stage("reader").quantile(0.99, "trace_stage_seconds", by, recently), legend})
	d.graph("How far behind now", "Age of the oldest traced segment or datagram that waits in a socket. It grows while a reader is stopped.", style{unit: "s"},
		query{"max by (" + by + ") (" + all.gauge("trace_reader_oldest_seconds") + ")", legend})
	d.graph("Waiting", "Traced segments and datagrams that wait in a socket.", style{unit: "short"},
		query{sum(by, all.gauge("trace_reader_waiting")), legend})
	d.graph("Received by outcome, stacked", "read: the application has read it. dropped: the socket had no space. unread: the socket was closed first. rx_full: too many others waited.",
		style{unit: "cps", stacked: true, colors: map[string]string{"read": "green", "dropped": "red", "unread": "orange", "rx_full": "purple"}},
		query{sum("outcome", all.rate("trace_received_total")), "{{outcome}}"})
	d.graph("Part dropped", "Part of the traced segments and datagrams for which the socket had no space: the reader is too slow, or its buffer too small. TCP sends them again, datagrams are lost.", style{unit: "percentunit"},
		query{part(all.with(`outcome="dropped"`).rate("trace_received_total"), all.rate("trace_received_total")), "dropped"})
	d.graph("Host to socket, p99", "1 of 100 traced segments and datagrams takes more time from its arrival at the host to its socket: interrupts, softirqs, firewall. Only for rules with the stage rx_stack."+logarithmic,
		style{unit: "s", log: true}, query{stage("rx_stack").quantile(0.99, "trace_stage_seconds", by, recently), legend})
	return d
}

func without(list []string, one string) (others []string) {
	for _, s := range list {
		if s != one {
			others = append(others, s)
		}
	}
	return others
}
