// SPDX-License-Identifier: Apache-2.0

package capture

//go:generate go tool bpf2go -target bpfel -no-global-types -type packets_limit -type packets_kind -type packets_flag -type packets_event -type packets_packet tracePackets ../../../bpf/trace_packets.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types traceUDPPackets ../../../bpf/trace_udp_packets.bpf.c
