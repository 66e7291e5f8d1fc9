// SPDX-License-Identifier: Apache-2.0

// Package bpf holds Sockeye's BPF programs and what loads, pins and adopts
// them. The programs' sources are in bpf/, their types and constants come
// from there by generation.
package bpf
