// SPDX-License-Identifier: Apache-2.0

package bpf

// The compiler, its flags and the tool that strips the objects come from the
// Makefile by BPF2GO_CC, BPF2GO_CFLAGS and BPF2GO_STRIP: run "make generate".

//go:generate go tool bpf2go -target bpfel -type steer_table -type steer_prefix -type steer_device_id steerReuseport ../../bpf/steer_reuseport.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types steerLookup ../../bpf/steer_lookup.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types -type steer_limit -type steer_reason -type steer_event_kind -type steer_event steerMembers ../../bpf/steer_members.bpf.c
