// SPDX-License-Identifier: Apache-2.0

package bpf

// Limits of the tune programs (bpf/include/tune.h).
const (
	TuneOptionsMax = int(tuneSockopsTuneLimitTUNE_OPTIONS)
	TuneTagExID    = int(tuneSockopsTuneLimitTUNE_TAG_EXID)
	TuneLiveLevel  = int(tuneSockopsTuneLimitTUNE_LIVE_LEVEL)
	TuneArms       = int(tuneSockopsTuneArmTUNE_ARMS)
)

// Settings of tune rules, phases, and states of connections (bpf/include/tune.h).
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
