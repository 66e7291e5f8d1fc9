// SPDX-License-Identifier: Apache-2.0

// Package format formats counts and values for messages and metrics.
package format

import "fmt"

// Count returns a number with its noun: 1 slot, 2 slots.
func Count[N int | uint32 | uint64](n N, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// OrNone returns s, or none for the empty string.
func OrNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// Bool returns the value of a boolean gauge: 1 or 0.
func Bool(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
