// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package bpf_test

// The amount of work of the tests.
const (
	twinAddresses = 1_000_000
	datagrams     = 2000
	connections   = 400
	flips         = 500 // in each mode
	opens         = 3
	forged        = 200_000 // sources of a flood
	exactly       = 100_000 // datagrams, or segments, of which each is accounted for
	layoutStep    = 1       // of the other layouts of an upgrade, each is tried
	pinStep       = 2       // an upgrade is interrupted after each second pin in one mode, and after the others in the other one
)
