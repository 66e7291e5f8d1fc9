// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package packets_test

// slower is how many times longer the machine may take.
const slower = 1
