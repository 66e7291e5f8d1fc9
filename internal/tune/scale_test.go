// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package tune_test

// The amount of work of the tests.
const (
	clampedBytes = 4 << 20
	clampedWrite = 1000
	flows        = 3 // of each family, through which data flows while rules change
	tagStep      = 1 // between lengths of tags, 1 to 16
	killings     = 3 // of processes that are tuned meanwhile
)
