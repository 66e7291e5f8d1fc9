// SPDX-License-Identifier: Apache-2.0

//go:build vm

package tune_test

// The amount of work of the tests under software emulation.
const (
	clampedBytes = 512 << 10
	clampedWrite = 32 << 10 // less leaves a window unused
	flows        = 1        // of each family, through which data flows while rules change
	tagStep      = 5        // between lengths of tags, 1 to 16
	killings     = 1        // of processes that are tuned meanwhile
)
