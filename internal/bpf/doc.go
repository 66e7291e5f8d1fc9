// SPDX-License-Identifier: Apache-2.0

// Package bpf loads and pins the BPF programs and gives access to their maps. The sources are in bpf/; types and
// constants are generated from them.
package bpf
