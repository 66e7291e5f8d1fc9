// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/format"
	"sockeye/internal/steer/stored"
)

// Counters are totals since the creation of the pins. A restart of the agent does not reset them.
var (
	descReady = prometheus.NewDesc("sockeye_slot_ready",
		"1 while the slot has a member that listens on all listeners.", []string{"service", "slot"}, nil)
	descConnections = prometheus.NewDesc("sockeye_connections_total",
		"TCP connection requests steered to the slot.", []string{"service", "slot"}, nil)
	descDatagrams = prometheus.NewDesc("sockeye_datagrams_total",
		"UDP datagrams steered to the slot.", []string{"service", "slot"}, nil)
	descDiverted = prometheus.NewDesc("sockeye_diverted_total",
		"Connection requests and datagrams for the slot that were sent to the standby slot.", []string{"service", "slot"}, nil)
	descRefused = prometheus.NewDesc("sockeye_refused_total",
		"Refused connection requests (tcp) and datagrams (udp), by their slot; the label is empty if no slot was found.",
		[]string{"service", "slot", "protocol", "reason"}, nil)
	descRegistrations = prometheus.NewDesc("sockeye_registrations_total",
		"Members registered in the slot since the agent started.", []string{"service", "slot"}, nil)
	descWaiting = prometheus.NewDesc("sockeye_members_waiting",
		"Processes that match a rule and cannot be registered yet.", []string{"service"}, nil)
	descNotAdmitted = prometheus.NewDesc("sockeye_members_refused",
		"Processes that match a rule and listen on the ports, but are not admitted, at most 16.", []string{"service"}, nil)
	descDrops = prometheus.NewDesc("sockeye_member_drops_total",
		"Packets that the kernel dropped at the sockets of the member: datagrams (udp) without space in the receive buffer, connection requests (tcp) beyond the backlog.",
		[]string{"service", "slot", "protocol"}, nil)
	descQueue = prometheus.NewDesc("sockeye_member_receive_queue_bytes",
		"Memory of the datagrams that the member has not read.", []string{"service", "slot"}, nil)
	descBuffer = prometheus.NewDesc("sockeye_member_receive_buffer_bytes",
		"Size of the receive buffer of the member's UDP sockets.", []string{"service", "slot"}, nil)
	descAccept = prometheus.NewDesc("sockeye_member_accept_queue",
		"TCP connections that the member has not accepted.", []string{"service", "slot"}, nil)
	descBacklog = prometheus.NewDesc("sockeye_member_accept_backlog",
		"TCP connections that may wait for the member to accept them.", []string{"service", "slot"}, nil)
	descOneStream = prometheus.NewDesc("sockeye_devices_one_stream",
		"Devices that send only one stream: tcp have a connection and have sent no datagrams in the last 10 minutes or none yet, udp send datagrams and have no connection.",
		[]string{"service", "stream"}, nil)
	descHeld = prometheus.NewDesc("sockeye_service_ports_steered",
		"1 while the service's ports stay steered even if all members exit.", []string{"service"}, nil)
	descKeeper = prometheus.NewDesc("sockeye_keeper_running",
		"1 while the keeper process of the service runs; absent for a service that needs none.", []string{"service"}, nil)
	descReplacedPrograms = prometheus.NewDesc("sockeye_programs_replaced_total",
		"Steering programs that another process has replaced or detached since the agent started; the agent attaches them again within a second.", []string{"service"}, nil)
	descBypass = prometheus.NewDesc("sockeye_bypass_sockets",
		"Sockets of other processes that receive packets to a listener past the service.", []string{"service"}, nil)
	descUnlisted = prometheus.NewDesc("sockeye_unlisted_total",
		"Connection requests and datagrams from sources that did not fit into the table of devices.", []string{"service"}, nil)
	descRuns = prometheus.NewDesc("sockeye_program_runs_total",
		"Runs of the steering programs; counted while kernel.bpf_stats_enabled is 1.", []string{"service"}, nil)
	descRunSeconds = prometheus.NewDesc("sockeye_program_run_seconds_total",
		"Time spent in the steering programs; counted while kernel.bpf_stats_enabled is 1.", []string{"service"}, nil)
	descSplit = prometheus.NewDesc("sockeye_devices_split",
		"Devices that have TCP connections with another member than that of their slot.", []string{"service"}, nil)
	descClosed = prometheus.NewDesc("sockeye_sessions_closed_total",
		"TCP connections that the agent closed since its start, because their device has another slot.", []string{"service"}, nil)
	descMoving = prometheus.NewDesc("sockeye_devices_moving",
		"Devices that move to another slot: running devices connect and send their initial dump, waiting devices wait for their turn.",
		[]string{"service", "state"}, nil)
	descShare = prometheus.NewDesc("sockeye_slot_share",
		"Share of the devices that the slot has by the bucket table, 0 to 1.", []string{"service", "slot"}, nil)
	descWeight = prometheus.NewDesc("sockeye_slot_weight",
		"Weight of the slot, 0 to 256.", []string{"service", "slot"}, nil)
	descState = prometheus.NewDesc("sockeye_slot_state",
		"1 for the state that the operator gave the slot: ready, drain or maint.", []string{"service", "slot", "state"}, nil)
	descWaiters = prometheus.NewDesc("sockeye_room_waiting_datagrams",
		"Datagrams that wait for the next member of the empty slot.", []string{"service", "slot"}, nil)
	descStored = prometheus.NewDesc("sockeye_room_stored_total",
		"Datagrams (udp) and connection requests (tcp) that came while the slot was empty, and waited.", []string{"service", "slot", "protocol"}, nil)
	descRoomLimit = prometheus.NewDesc("sockeye_room_limit_datagrams",
		"Datagrams that may wait in the waiting room of a slot.", []string{"service"}, nil)
	descFull = prometheus.NewDesc("sockeye_room_full_total",
		"Datagrams that were refused because the waiting room of the slot was full.", []string{"service", "slot"}, nil)
	descReplayed = prometheus.NewDesc("sockeye_room_replayed_total",
		"Datagrams that have waited and that a member has received, since the agent started.", []string{"service", "slot"}, nil)
	descLost = prometheus.NewDesc("sockeye_room_lost_total",
		"Datagrams that waited and were discarded, since the agent started.", []string{"service", "slot"}, nil)
	descExporters = prometheus.NewDesc("sockeye_template_exporters",
		"Source addresses whose templates of IPFIX and NetFlow v9 the agent keeps.", []string{"service"}, nil)
	descTemplates = prometheus.NewDesc("sockeye_templates",
		"Templates of IPFIX and NetFlow v9 that the agent keeps.", []string{"service"}, nil)
	descTemplateDatagrams = prometheus.NewDesc("sockeye_template_datagrams_total",
		"Datagrams with templates that the agent has read since its start.", []string{"service"}, nil)
	descMalformed = prometheus.NewDesc("sockeye_template_malformed_total",
		"Datagrams with templates that were discarded since the agent started, because they are malformed.", []string{"service"}, nil)
	descTemplatesRefused = prometheus.NewDesc("sockeye_templates_refused_total",
		"Templates that exceeded the bounds of their device or of the service since the agent started.", []string{"service"}, nil)
	descTemplatesLost = prometheus.NewDesc("sockeye_templates_lost_total",
		"Datagrams with templates that did not fit into the ring buffer.", []string{"service"}, nil)
	descReplays = prometheus.NewDesc("sockeye_template_replays_total",
		"Exporters whose templates were sent to a member since the agent started.", []string{"service"}, nil)
	descAdopted = prometheus.NewDesc("sockeye_devices_adopted",
		"Devices that on_start: adopt assigned to another member than that of their slot by the hash.", []string{"service"}, nil)
)

// Collect sends the metrics of all services.
func (d *Domain) Collect(out chan<- prometheus.Metric) {
	services, err := d.selectServices("")
	if err != nil {
		d.log.Error("metrics failed", "error", err)
		return
	}
	for _, s := range services {
		if err := s.collect(out); err != nil {
			d.log.Error("metrics failed", "service", s.Name, "error", err)
		}
	}
}

func (s *service) collect(out chan<- prometheus.Metric) error {
	status := s.status()
	s.Mu.Lock()
	defer s.Mu.Unlock()
	switch err := s.CheckOpen(); {
	case s.Removed:
		return nil
	case err != nil:
		out <- prometheus.MustNewConstMetric(descHeld, prometheus.GaugeValue, 0, s.Name)
		return err
	}
	counters, err := s.Path.Counters(s.Config.Slots)
	if err != nil {
		return err
	}
	stats, err := s.Path.RunStats()
	if err != nil {
		return err
	}
	unlisted, err := s.Path.Unlisted()
	if err != nil {
		return err
	}
	// Without sock_diag, the other metrics are sent.
	datagramQueues, failed := s.traffic.Queues(config.UDP)
	acceptQueues, err := s.traffic.Queues(config.TCP)
	failed = errors.Join(failed, err)
	shares := s.shares()
	name := s.Name
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, append([]string{name}, labels...)...)
	}
	counter := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, value, append([]string{name}, labels...)...)
	}
	gauge(descWaiting, float64(len(status.Waiting)))
	gauge(descNotAdmitted, float64(len(status.Refused)))
	gauge(descHeld, format.Bool(status.PortsSteered))
	if s.needsKeeper() {
		gauge(descKeeper, format.Bool(s.keeper != nil))
	}
	counter(descReplacedPrograms, float64(status.ProgramsReplaced))
	gauge(descBypass, float64(len(status.Bypass)))
	gauge(descSplit, float64(status.SplitDevices))
	gauge(descAdopted, float64(status.AdoptedDevices))
	counter(descClosed, float64(s.checks.ClosedSessions()))
	running, waiting := s.moves.Count()
	gauge(descMoving, float64(running), "running")
	gauge(descMoving, float64(waiting), "waiting")
	counter(descUnlisted, float64(unlisted))
	if tcp, udp, known, err := s.traffic.OneStream(); err != nil {
		failed = errors.Join(failed, err)
	} else if known {
		gauge(descOneStream, float64(tcp), "tcp")
		gauge(descOneStream, float64(udp), "udp")
	}
	if s.rooms.Exist() {
		gauge(descRoomLimit, float64(s.rooms.Room().Datagrams))
	}
	if s.rooms.KeepsTemplates() {
		kept := s.rooms.TemplateStats()
		lost, err := s.Path.LostTemplates()
		if err != nil {
			return err
		}
		malformed := uint64(0)
		for _, n := range kept.Malformed {
			malformed += n
		}
		gauge(descExporters, float64(kept.Sources))
		gauge(descTemplates, float64(kept.Templates))
		counter(descTemplateDatagrams, float64(kept.Datagrams))
		counter(descMalformed, float64(malformed))
		counter(descTemplatesRefused, float64(kept.RefusedDevice+kept.RefusedTotal))
		counter(descTemplatesLost, float64(lost))
		counter(descReplays, float64(s.rooms.TemplateReplays()))
	}
	counter(descRuns, float64(stats.Runs))
	counter(descRunSeconds, time.Duration(stats.Nanoseconds).Seconds())
	for i, c := range counters {
		slot := strconv.Itoa(i)
		if i == s.Config.Slots {
			slot = ""
		} else {
			gauge(descReady, format.Bool(s.IsReady(i)), slot)
			gauge(descShare, shares[i], slot)
			gauge(descWeight, float64(s.SlotState(i).Weight), slot)
			for _, state := range stored.States {
				gauge(descState, format.Bool(string(s.SlotState(i).State) == state), slot, state)
			}
			if room, err := s.rooms.Status(i); err != nil {
				return err
			} else if room != nil {
				gauge(descWaiters, float64(room.Waiting), slot)
				counter(descStored, float64(room.Datagrams), slot, "udp")
				counter(descStored, float64(room.Connections), slot, "tcp")
				counter(descFull, float64(room.Full), slot)
				counter(descReplayed, float64(room.Replayed), slot)
				counter(descLost, float64(room.Lost), slot)
			}
			counter(descRegistrations, float64(s.registrations[i]), slot)
			if q := datagramQueues[i]; q != nil {
				counter(descDrops, float64(q.Dropped), slot, "udp")
				gauge(descQueue, float64(q.Used), slot)
				gauge(descBuffer, float64(q.Limit), slot)
			}
			if q := acceptQueues[i]; q != nil {
				counter(descDrops, float64(q.Dropped), slot, "tcp")
				gauge(descAccept, float64(q.Used), slot)
				gauge(descBacklog, float64(q.Limit), slot)
			}
			counter(descConnections, float64(c.Connections), slot)
			counter(descDatagrams, float64(c.Datagrams), slot)
			counter(descDiverted, float64(c.Diverted), slot)
		}
		for reason, text := range bpf.Reasons {
			if (slot != "") != bpf.ReasonOfSlot(reason) {
				continue
			}
			counter(descRefused, float64(c.RefusedConnections[reason]), slot, "tcp", text)
			counter(descRefused, float64(c.RefusedDatagrams[reason]), slot, "udp", text)
		}
	}
	return failed
}
