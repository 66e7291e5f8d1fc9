// SPDX-License-Identifier: Apache-2.0

package forward

//go:generate go tool bpf2go -target bpfel -no-global-types -type fleet_limit -type fleet_outcome -type fleet_bucket -type fleet_host -type fleet_table -type fleet_listener -type fleet_peer -type fleet_sender -type fleet_sender_kind -type fleet_connection fleetForward ../../../bpf/fleet_forward.bpf.c
