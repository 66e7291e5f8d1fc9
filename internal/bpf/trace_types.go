// SPDX-License-Identifier: Apache-2.0

package bpf

// Limits of the trace programs (bpf/include/trace.h).
const (
	TraceSlowestOf = int(traceSockopsTraceLimitTRACE_SLOWEST)
	TraceMinutes   = int(traceSockopsTraceLimitTRACE_MINUTES)
	// TraceMinuteShift converts nanoseconds to minutes of 2^36 ns.
	TraceMinuteShift = int(traceSockopsTraceLimitTRACE_MINUTE_SHIFT)
	TraceServices    = int(traceSockopsTraceLimitTRACE_SERVICES)
	traceLiveLevel   = int(traceSockopsTraceLimitTRACE_LIVE_LEVEL)
)

// Selection and grouping of trace rules, and the order of counters (bpf/include/trace.h).
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

// Outcomes and stages of received data, and outcomes of sent datagrams (bpf/include/trace.h).
//
//revive:disable:exported
const (
	TraceReaderSamples = int(traceSockopsTraceLimitTRACE_READER_SAMPLES)

	TraceRXStack  = int(traceRXTraceRxStageTRACE_RX_STACK)
	TraceRXReader = int(traceRXTraceRxStageTRACE_RX_READER)

	TraceRXRead    = int(traceRXTraceRxOutcomeTRACE_RX_READ)
	TraceRXDropped = int(traceRXTraceRxOutcomeTRACE_RX_DROPPED)
	TraceRXUnread  = int(traceRXTraceRxOutcomeTRACE_RX_UNREAD)
	TraceRXFull    = int(traceRXTraceRxOutcomeTRACE_RX_FULL)

	TraceMissed    = int(traceSockopsTraceOutcomeTRACE_MISSED)
	TraceSent      = int(traceSockopsTraceOutcomeTRACE_SENT)
	TraceDiscarded = int(traceSockopsTraceOutcomeTRACE_DISCARDED)
	TraceSplit     = int(traceSockopsTraceOutcomeTRACE_SPLIT)
)

type TraceRXStats = traceRXTraceRxStats

//revive:enable:exported
