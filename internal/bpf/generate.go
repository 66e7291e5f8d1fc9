// SPDX-License-Identifier: Apache-2.0

package bpf

// The compiler, its flags and the tool that strips the objects come from the
// Makefile by BPF2GO_CC, BPF2GO_CFLAGS and BPF2GO_STRIP: run "make generate".

//go:generate go tool bpf2go -target bpfel -type steer_table -type steer_prefix -type steer_device_id steerReuseport ../../bpf/steer_reuseport.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types steerLookup ../../bpf/steer_lookup.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types -type steer_limit -type steer_reason -type steer_event_kind -type steer_event steerMembers ../../bpf/steer_members.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types -type tune_address -type tune_prefix -type tune_port -type tune_tag -type tune_set -type tune_ruleset -type tune_rule -type tune_option -type tune_connection -type tune_stats -type tune_stats_key -type tune_failure -type tune_learned -type tune_learned_key -type tune_evidence -type tune_active -type tune_request_key -type tune_question -type tune_limit -type tune_use -type tune_role -type tune_phase -type tune_flag -type tune_level -type tune_arm -type tune_connection_flag tuneSockops ../../bpf/tune_sockops.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types -type tune_live_name -type tune_live_request tuneLive ../../bpf/tune_live.bpf.c
