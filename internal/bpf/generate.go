// SPDX-License-Identifier: Apache-2.0

package bpf

// Run "make generate": BPF2GO_CC, BPF2GO_CFLAGS and BPF2GO_STRIP of the Makefile select the compiler, its flags and
// the strip tool.

//go:generate go tool bpf2go -target bpfel -type steer_table -type steer_prefix -type steer_device_id -type steer_wait -type steer_room -type steer_refusal steerReuseport ../../bpf/steer_reuseport.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types steerLookup ../../bpf/steer_lookup.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types -type steer_limit -type steer_reason -type steer_event_kind -type steer_event steerMembers ../../bpf/steer_members.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types steerDrops ../../bpf/steer_drops.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types -type steer_templates steerTemplates ../../bpf/steer_templates.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types -type match_address -type match_prefix -type match_port -type match_tag -type match_set -type match_ruleset -type tune_rule -type tune_option -type tune_connection -type tune_stats -type tune_stats_key -type tune_failure -type tune_learned -type tune_learned_key -type tune_evidence -type match_active -type match_tuple -type match_question -type match_limit -type match_use -type tune_limit -type tune_use -type match_role -type tune_phase -type tune_flag -type tune_level -type tune_arm -type tune_connection_flag tuneSockops ../../bpf/tune_sockops.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types -type tune_live_name -type tune_live_request tuneLive ../../bpf/tune_live.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types -type trace_rule -type trace_group -type trace_listener -type trace_message -type trace_connection -type trace_histogram -type trace_stats -type trace_sample -type trace_minute -type trace_slowest -type trace_state -type trace_counts -type trace_limit -type trace_stage -type trace_outcome -type trace_rule_flag -type trace_group_by -type trace_message_flag traceSockops ../../bpf/trace_sockops.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types -type trace_live_name -type trace_live_request traceLive ../../bpf/trace_live.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types traceSend ../../bpf/trace_send.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types traceChoose ../../bpf/trace_choose.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types -type trace_rx_stats -type trace_waiting_key -type trace_waiting -type trace_rx_stage -type trace_rx_outcome traceRX ../../bpf/trace_rx.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types -type trace_sending traceUDP ../../bpf/trace_udp.bpf.c
