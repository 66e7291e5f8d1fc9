// SPDX-License-Identifier: Apache-2.0

//go:build vm

package bpf_test

// The amount of work of the tests under software emulation.
const (
	twinAddresses = 20_000
	datagrams     = 300
	connections   = 60
	flips         = 100
	opens         = 1
	forged        = 20_000
	exactly       = 20_000
	layoutStep    = 4
	pinStep       = 6
)
