// SPDX-License-Identifier: Apache-2.0

package fleet

//go:generate go tool bpf2go -target bpfel -no-global-types benchFleet ../../bpf/bench_fleet.bpf.c
