// SPDX-License-Identifier: Apache-2.0

package events

import (
	"log/slog"
	"slices"
	"strings"

	"sockeye/internal/api"
)

// A Kind is a kind of events. docs/events.md lists the kinds.
type Kind struct {
	Name string
	Doc  string // when the event occurs, as a sentence without a subject
}

var kinds []Kind

// Problem is the kind of warnings and errors without the attribute [Key].
const Problem = "problem"

// Kinds returns all kinds, in the order of the documentation.
func Kinds() []Kind { return append(slices.Clone(kinds), own...) }

// Known reports whether there is a kind with a name, or kinds whose first words are the name.
func Known(name string) bool {
	return slices.ContainsFunc(Kinds(), func(k Kind) bool { return k.Name == name || strings.HasPrefix(k.Name, name+"_") })
}

// Words returns the first words of the kinds, sorted.
func Words() []string {
	var words []string
	for _, k := range Kinds() {
		word, _, _ := strings.Cut(k.Name, "_")
		words = append(words, word)
	}
	slices.Sort(words)
	return slices.Compact(words)
}

// own are the kinds that no log record names.
var own = []Kind{
	{Problem, "A warning or an error without a kind of its own."},
	{api.EventsSuppressed, "Events of a kind were too frequent, and were counted instead of recorded."},
	{api.EventsMissing, "Events are missing, because they were removed before they were read or are damaged. This event is not recorded, and has no `id`."},
}

// kind adds a kind and returns the attribute for log records.
func kind(name, doc string) slog.Attr {
	kinds = append(kinds, Kind{name, doc})
	return slog.String(Key, name)
}

// Members and slots.
var (
	MemberRegistered = kind("member_registered", "A process has taken a slot, and the slot is open. `source` is the rule, or the command.")
	MemberRestored   = kind("member_restored", "A new agent has found the member of a slot unchanged.")
	MemberWaiting    = kind("member_waiting", "A process matches a rule and cannot take its slot yet. `problem` is the reason.")
	MemberRefused    = kind("member_refused", "A process matches a rule and has the ports, but is not admitted. At most one event a minute.")
	SlotClosed       = kind("slot_closed", "A slot has lost its member. `reason` is the exit status or the signal of its process (not on kernels whose release hook cannot read it), a command, or a change of the policy.")
	SlotTakenOver    = kind("slot_taken_over", "A new process has taken the slot of a process that still runs.")
	FormerExited     = kind("former_exited", "A process whose slot was taken over has exited.")
	SlotChanged      = kind("slot_changed", "A command has changed the state or the weight of a slot, or a pin.")
	SocketIdle       = kind("socket_without_traffic", "A member has a socket that can receive nothing.")
)

// Devices.
var (
	DeviceMoved     = kind("device_moved", "The connections of a device were closed at a member of another slot, so that the device connects to the member of its slot.")
	DevicesMoved    = kind("devices_moved", "The summary of `device_moved`: numbers of devices and connections.")
	MovesBegun      = kind("moves_begun", "Devices begin to move to other slots one after the other (`pace`). `cause` is the change.")
	MovesEnded      = kind("moves_ended", "All devices that moved one after the other are at their slots.")
	GateOpened      = kind("gate_opened", "A new member accepts all devices; before, devices had to wait for their turn.")
	PinEnded        = kind("pin_ended", "The time of a pin is over.")
	DevicesSplit    = kind("devices_split", "Devices have connections at the wrong member (not that of their slot), and the agent leaves them open.")
	DevicesRepaired = kind("devices_repaired", "All connections of devices are at the member of their slot again.")
	DevicesAdopted  = kind("devices_adopted", "Devices were assigned to the member that has their connections (on_start: adopt).")
	DevicesReturned = kind("devices_returned", "Adopted devices are back at their own slots.")
	DeviceRefused   = kind("device_refused", "The kernel has refused packets of a device. At most one event for a device in ten seconds.")
	Refusals        = kind("refusals", "The number of refused packets of a service by reason, every ten seconds and when the agent stops, including packets without a `device_refused`. Packets refused while no agent ran are only in `sockeye_refused_total`.")
)

// Fleet.
var (
	DevicesLeft   = kind("devices_left", "Another host of the fleet serves the devices now; their connections on this host were closed.")
	FleetTable    = kind("fleet_table", "A new table of the fleet is in force on this host. `epoch` is its number, `gained` and `lost` are the buckets that this host serves from now on or no longer.")
	FleetHost     = kind("fleet_host", "A host of the fleet has joined, left, died or changed its state. `state` is ready, drain, maint, unhealthy, dead, unknown (it may not have registered again) or removed.")
	FleetProblem  = kind("fleet_problem", "The fleet has a problem: etcd does not answer, a table or a registration is refused, or a host cannot be reached. The last good table stays in force.")
	FleetSolved   = kind("fleet_solved", "The fleet has no problem any more.")
	HostRequested = kind("fleet_host_set", "A command on this host has changed the state or the weight of a host of the fleet.")
)

// Waiting rooms and templates.
var (
	TrafficHeld        = kind("traffic_held", "A slot is empty, and the packets of its devices wait for the next member.")
	TrafficReleased    = kind("traffic_released", "A new member has received the packets that waited for its slot.")
	TrafficDiscarded   = kind("traffic_discarded", "No member came in time; the waiting packets were discarded, and the devices are refused.")
	TemplatesReplayed  = kind("templates_replayed", "A member has received the templates of the exporters that it newly serves.")
	TemplatesDiscarded = kind("templates_discarded", "The saved templates could not be read.")
	ReplayedToMember   = kind("datagrams_replayed", "Datagrams that had waited were sent to the member that serves their devices now.")
	ReplayIncomplete   = kind("datagrams_lost", "Datagrams that had waited did not reach the member.")
	MemberNotReachable = kind("fill_failed", "A member did not receive the packets that waited for its slot.")
)

// Ports and keepers.
var (
	PortsHeld       = kind("ports_held", "The keeper sockets of a service are open again: its ports stay steered without members.")
	PortsNotHeld    = kind("ports_not_held", "The keeper sockets of a service could not be opened.")
	ProgramReplaced = kind("program_replaced", "Another process has replaced or detached the steering program of a listener; the agent has attached it again.")
	SocketBypasses  = kind("socket_bypasses", "A socket of another process can receive packets to a listener past the service.")
	NoneBypasses    = kind("no_socket_bypasses", "There is no longer a socket that can receive packets to a listener past the service.")
	KeeperStarted   = kind("keeper_started", "A keeper process was started.")
	KeeperRestored  = kind("keeper_restored", "A new agent has found the keeper process of the previous one.")
	KeeperExited    = kind("keeper_exited", "A keeper process has exited; the agent starts another one.")
	ServiceRemoved  = kind("service_removed", "A service of a previous agent is not in the policy, and was removed.")
)

// Agent and policy.
var (
	AgentStarted     = kind("agent_started", "The agent is ready.")
	AgentStopped     = kind("agent_stopped", "The agent stops. Pinned programs stay attached.")
	PolicyApplied    = kind("policy_applied", "One change of an apply. `action` and `what` describe the change.")
	PolicyNotApplied = kind("policy_not_applied", "A policy was refused, or could not be applied. Nothing has changed.")
	PolicyRefused    = kind("policy_refused", "The policy file is invalid at the start; the last applied policy is in force.")
	Requested        = kind("requested", "A process has changed something through the API of the agent. `pid`, `user`, `login` and `command` describe the process.")
)

// Tune, trace, and bigtcp.
var (
	CgroupTuned     = kind("cgroup_tuned", "The connections of a cgroup are tuned.")
	CgroupNotTuned  = kind("cgroup_not_tuned", "A cgroup cannot be tuned now.")
	TuningRemoved   = kind("tuning_removed", "A cgroup is no longer tuned.")
	CgroupTraced    = kind("cgroup_traced", "The connections of a cgroup are traced.")
	CgroupNotTraced = kind("cgroup_not_traced", "A cgroup cannot be traced now.")
	TracingRemoved  = kind("tracing_removed", "A cgroup is no longer traced.")
	SizesApplied    = kind("sizes_applied", "The packet sizes of an interface were set.")
	SizesChanged    = kind("sizes_changed", "Another program has changed the packet sizes of an interface; the agent does not overwrite them.")
	SizesNotSet     = kind("sizes_not_set", "The packet sizes of an interface could not be set.")
	SizesReverted   = kind("sizes_reverted", "The packet sizes of an interface are as before Sockeye changed them.")
)
