// SPDX-License-Identifier: Apache-2.0

package programs

//go:generate go tool bpf2go -target bpfel -no-global-types -type bigtcp_limit -type bigtcp_point -type bigtcp_family -type bigtcp_size -type bigtcp_segment -type bigtcp_counts -type bigtcp_flow_key -type bigtcp_flow bigtcpCount ../../../bpf/bigtcp_count.bpf.c
//go:generate go tool bpf2go -target bpfel -no-global-types bigtcpDriver ../../../bpf/bigtcp_driver.bpf.c
