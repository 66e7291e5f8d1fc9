// SPDX-License-Identifier: Apache-2.0

// Package bpf holds Sockeye's BPF programs and what loads, pins and adopts
// them. The programs' sources are in bpf/, their types and constants come
// from there by generation.
package bpf

// Limits of the steering programs; see bpf/include/steer.h.
const (
	MaxSlots     = int(steerMembersSteerLimitSTEER_MAX_SLOTS)
	MaxListeners = int(steerMembersSteerLimitSTEER_MAX_LISTENERS)
	Buckets      = int(steerMembersSteerLimitSTEER_BUCKETS)
	pendingSize  = int(steerMembersSteerLimitSTEER_PENDING)
	NoSlot       = int(steerMembersSteerLimitSTEER_NO_SLOT)
	nextDevices  = uint32(steerMembersSteerLimitSTEER_NEXT_DEVICES)
	NoDevice     = uint32(steerMembersSteerLimitSTEER_NO_DEVICE)
	Schema       = uint32(steerMembersSteerLimitSTEER_SCHEMA)
)

// Reasons names the refusals in the order of the counters' arrays.
var Reasons = [...]string{
	steerMembersSteerReasonSTEER_REASON_EMPTY:   "empty_slot",
	steerMembersSteerReasonSTEER_REASON_SOCKET:  "unusable_socket",
	steerMembersSteerReasonSTEER_REASON_ADDRESS: "unknown_address",
	steerMembersSteerReasonSTEER_REASON_TABLE:   "no_table",
}

// ReasonOfSlot tells whether a refusal for a reason is counted with a slot.
func ReasonOfSlot(reason int) bool {
	return reason == int(steerMembersSteerReasonSTEER_REASON_EMPTY) || reason == int(steerMembersSteerReasonSTEER_REASON_SOCKET)
}

// EventKind says what happened to a socket.
type EventKind = steerMembersSteerEventKind

// The kinds of Event.
const (
	EventBind    = steerMembersSteerEventKindSTEER_EVENT_BIND
	EventListen  = steerMembersSteerEventKindSTEER_EVENT_LISTEN
	EventRelease = steerMembersSteerEventKindSTEER_EVENT_RELEASE
)

// The types that the programs and user space share; see bpf/include/steer.h.
//
//revive:disable:exported
type (
	Address  = steerReuseportSteerAddress
	Table    = steerReuseportSteerTable
	Prefix   = steerReuseportSteerPrefix
	DeviceID = steerReuseportSteerDeviceId
	Slot     = steerReuseportSteerSlot
	Counters = steerReuseportSteerCounters
	Seen     = steerReuseportSteerSeen
	Pending  = steerReuseportSteerPending
	Event    = steerMembersSteerEvent
)

//revive:enable:exported

// Limits of the tune programs; see bpf/include/tune.h.
const (
	TuneOptionsMax = int(tuneSockopsTuneLimitTUNE_OPTIONS)
	TuneTagExID    = int(tuneSockopsTuneLimitTUNE_TAG_EXID)
	TuneLiveLevel  = int(tuneSockopsTuneLimitTUNE_LIVE_LEVEL)
	TuneArms       = int(tuneSockopsTuneArmTUNE_ARMS)
)

// What tune rules use, when options are set, and what connections are; see
// bpf/include/tune.h.
//
//revive:disable:exported
const (
	TuneUseWrite     = uint32(tuneSockopsTuneUseTUNE_USE_WRITE)
	TuneUseSynRTO    = uint32(tuneSockopsTuneUseTUNE_USE_SYN_RTO)
	TuneUseSynackRTO = uint32(tuneSockopsTuneUseTUNE_USE_SYNACK_RTO)
	TuneUseRwnd      = uint32(tuneSockopsTuneUseTUNE_USE_RWND)
	TuneUseECN       = uint32(tuneSockopsTuneUseTUNE_USE_ECN)
	TuneUseBaseRTT   = uint32(tuneSockopsTuneUseTUNE_USE_BASE_RTT)

	TunePhaseConnect = uint16(tuneSockopsTunePhaseTUNE_PHASE_CONNECT)
	TunePhaseActive  = uint16(tuneSockopsTunePhaseTUNE_PHASE_ACTIVE)
	TunePhasePassive = uint16(tuneSockopsTunePhaseTUNE_PHASE_PASSIVE)
	TunePhaseReact   = uint16(tuneSockopsTunePhaseTUNE_PHASE_REACT)
	TunePhaseLive    = uint16(tuneSockopsTunePhaseTUNE_PHASE_LIVE)
	TunePhaseIPv4    = uint16(tuneSockopsTunePhaseTUNE_PHASE_IPV4)
	TunePhaseIPv6    = uint16(tuneSockopsTunePhaseTUNE_PHASE_IPV6)

	TuneFlagLive  = uint32(tuneSockopsTuneFlagTUNE_FLAG_LIVE)
	TuneFlagClose = uint32(tuneSockopsTuneFlagTUNE_FLAG_CLOSE)
	TuneFlagReact = uint32(tuneSockopsTuneFlagTUNE_FLAG_REACT)
	TuneFlagLearn = uint32(tuneSockopsTuneFlagTUNE_FLAG_LEARN)

	TuneLevelCongestion = uint32(tuneSockopsTuneLevelTUNE_LEVEL_CONGESTION)
	TuneLevelTxhash     = uint32(tuneSockopsTuneLevelTUNE_LEVEL_TXHASH)

	TuneArmTreated = int(tuneSockopsTuneArmTUNE_ARM_TREATED)
	TuneArmControl = int(tuneSockopsTuneArmTUNE_ARM_CONTROL)

	TuneConnectionReacted = uint8(tuneSockopsTuneConnectionFlagTUNE_CONNECTION_REACTED)
	TuneConnectionAdopted = uint8(tuneSockopsTuneConnectionFlagTUNE_CONNECTION_ADOPTED)
	TuneConnectionUnseen  = uint8(tuneSockopsTuneConnectionFlagTUNE_CONNECTION_UNSEEN)

	TuneLiveAdopt  = uint32(tuneLiveTuneLiveNameTUNE_LIVE_ADOPT)
	TuneLiveSet    = uint32(tuneLiveTuneLiveNameTUNE_LIVE_SET)
	TuneLiveForget = uint32(tuneLiveTuneLiveNameTUNE_LIVE_FORGET)
	TuneLiveListen = uint32(tuneLiveTuneLiveNameTUNE_LIVE_LISTEN)
)

type (
	TuneRule        = tuneSockopsTuneRule
	TuneOption      = tuneSockopsTuneOption
	TuneConnection  = tuneSockopsTuneConnection
	TuneStats       = tuneSockopsTuneStats
	TuneStatsKey    = tuneSockopsTuneStatsKey
	TuneFailure     = tuneSockopsTuneFailure
	TuneLearned     = tuneSockopsTuneLearned
	TuneLearnedKey  = tuneSockopsTuneLearnedKey
	TuneLiveRequest = tuneLiveTuneLiveRequest
)

//revive:enable:exported

// Limits of the trace programs; see bpf/include/trace.h.
const (
	TraceRulesMax  = int(traceSockopsTraceLimitTRACE_RULES)
	TraceInFlight  = int(traceSockopsTraceLimitTRACE_IN_FLIGHT)
	TraceBuckets   = int(traceSockopsTraceLimitTRACE_BUCKETS)
	TraceSlowestOf = int(traceSockopsTraceLimitTRACE_SLOWEST)
	TraceMinutes   = int(traceSockopsTraceLimitTRACE_MINUTES)
	// TraceMinuteShift makes minutes, of 2^36 ns, of nanoseconds.
	TraceMinuteShift = int(traceSockopsTraceLimitTRACE_MINUTE_SHIFT)
	TraceGroupsMax   = int(traceSockopsTraceLimitTRACE_GROUPS)
	TraceServices    = int(traceSockopsTraceLimitTRACE_SERVICES)
	traceLiveLevel   = int(traceSockopsTraceLimitTRACE_LIVE_LEVEL)
)

// What trace rules choose and group by, and the order of counters; see
// bpf/include/trace.h.
//
//revive:disable:exported
const (
	TraceRuleTX     = uint32(traceSockopsTraceRuleFlagTRACE_RULE_TX)
	TraceRuleRX     = uint32(traceSockopsTraceRuleFlagTRACE_RULE_RX)
	TraceRuleReader = uint32(traceSockopsTraceRuleFlagTRACE_RULE_READER)
	TraceRuleTCP    = uint32(traceSockopsTraceRuleFlagTRACE_RULE_TCP)
	TraceRuleUDP    = uint32(traceSockopsTraceRuleFlagTRACE_RULE_UDP)
	TraceRuleUDPTX  = uint32(traceSockopsTraceRuleFlagTRACE_RULE_UDP_TX)

	TraceByRemote  = uint32(traceSockopsTraceGroupByTRACE_BY_REMOTE)
	TraceByPort    = uint32(traceSockopsTraceGroupByTRACE_BY_PORT)
	TraceByService = uint32(traceSockopsTraceGroupByTRACE_BY_SERVICE)
	TraceByCgroup  = uint32(traceSockopsTraceGroupByTRACE_BY_CGROUP)
	TraceByRule    = uint32(traceSockopsTraceGroupByTRACE_BY_RULE)
	TraceByArm     = uint32(traceSockopsTraceGroupByTRACE_BY_ARM)

	TraceStageSend    = int(traceSockopsTraceStageTRACE_SEND)
	TraceStageStack   = int(traceSockopsTraceStageTRACE_STACK)
	TraceStageQdisc   = int(traceSockopsTraceStageTRACE_QDISC)
	TraceStageNIC     = int(traceSockopsTraceStageTRACE_NIC)
	TraceStageNetwork = int(traceSockopsTraceStageTRACE_NETWORK)
	TraceStageTotal   = int(traceSockopsTraceStageTRACE_TOTAL)

	TraceMessagePaced = uint8(traceSockopsTraceMessageFlagTRACE_MESSAGE_PACED)
	TraceMessageNagle = uint8(traceSockopsTraceMessageFlagTRACE_MESSAGE_NAGLE)
	TraceMessageCork  = uint8(traceSockopsTraceMessageFlagTRACE_MESSAGE_CORK)

	traceLiveAdopt  = uint32(traceLiveTraceLiveNameTRACE_LIVE_ADOPT)
	traceLiveForget = uint32(traceLiveTraceLiveNameTRACE_LIVE_FORGET)
)

type (
	TraceRule       = traceSockopsTraceRule
	TraceGroup      = traceSockopsTraceGroup
	TraceListener   = traceSockopsTraceListener
	TraceMessage    = traceSockopsTraceMessage
	TraceConnection = traceSockopsTraceConnection
	TraceHistogram  = traceSockopsTraceHistogram
	TraceStats      = traceSockopsTraceStats
	TraceSample     = traceSockopsTraceSample
	TraceSlowest    = traceSockopsTraceSlowest
	TraceState      = traceSockopsTraceState
	TraceCounts     = traceSockopsTraceCounts
)

//revive:enable:exported
