// SPDX-License-Identifier: Apache-2.0

package bpf

// Limits of the steering programs (bpf/include/steer.h).
const (
	MaxSlots     = int(steerMembersSteerLimitSTEER_MAX_SLOTS)
	MaxListeners = int(steerMembersSteerLimitSTEER_MAX_LISTENERS)
	Buckets      = int(steerMembersSteerLimitSTEER_BUCKETS)
	pendingSize  = int(steerMembersSteerLimitSTEER_PENDING)
	NoSlot       = int(steerMembersSteerLimitSTEER_NO_SLOT)
	nextDevices  = uint32(steerMembersSteerLimitSTEER_NEXT_DEVICES)
	NoDevice     = uint32(steerMembersSteerLimitSTEER_NO_DEVICE)
	Pinned       = uint32(steerMembersSteerLimitSTEER_PINNED) // bit of DeviceID.Device: Hash is the slot
	Gated        = uint16(steerMembersSteerLimitSTEER_GATED)  // bit of Table.Bucket: SYNs wait
	ReplayTTL    = int(steerMembersSteerLimitSTEER_REPLAY_TTL)
	Hold         = uint32(steerMembersSteerLimitSTEER_HOLD)    // bit of Wait.Filling: only datagrams of the agent pass
	Connect      = uint32(steerMembersSteerLimitSTEER_CONNECT) // bit of Wait.Filling: connections pass
	exits        = uint32(steerMembersSteerLimitSTEER_EXITS)   // bit of Event.Pid
	Schema       = uint32(steerMembersSteerLimitSTEER_SCHEMA)
)

// Reasons names the reasons of refusals in the order of the counters.
var Reasons = [...]string{
	steerMembersSteerReasonSTEER_REASON_EMPTY:   "empty_slot",
	steerMembersSteerReasonSTEER_REASON_SOCKET:  "unusable_socket",
	steerMembersSteerReasonSTEER_REASON_ADDRESS: "unknown_address",
	steerMembersSteerReasonSTEER_REASON_TABLE:   "no_table",
}

// ReasonOfSlot reports whether refusals for a reason are counted by slot.
func ReasonOfSlot(reason int) bool {
	return reason == int(steerMembersSteerReasonSTEER_REASON_EMPTY) || reason == int(steerMembersSteerReasonSTEER_REASON_SOCKET)
}

// EventKind is the kind of an event of a socket.
type EventKind = steerMembersSteerEventKind

// The kinds of events.
const (
	EventBind    = steerMembersSteerEventKindSTEER_EVENT_BIND
	EventListen  = steerMembersSteerEventKindSTEER_EVENT_LISTEN
	EventRelease = steerMembersSteerEventKindSTEER_EVENT_RELEASE
)

// Types of bpf/include/steer.h that the programs and user space share.
//
//revive:disable:exported
type (
	Address  = steerReuseportSteerAddress
	Table    = steerReuseportSteerTable
	Prefix   = steerReuseportSteerPrefix
	DeviceID = steerReuseportSteerDeviceId
	Slot     = steerReuseportSteerSlot
	Counters = steerReuseportSteerCounters
	Wait     = steerReuseportSteerWait
	Room     = steerReuseportSteerRoom
	Seen     = steerReuseportSteerSeen
	Pending  = steerReuseportSteerPending
	Event    = steerMembersSteerEvent
	Refusal  = steerReuseportSteerRefusal
)

//revive:enable:exported
