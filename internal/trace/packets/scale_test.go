// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package packets_test

// slower multiplies the times that tests permit.
const slower = 1
