// SPDX-License-Identifier: Apache-2.0

// Package format has the words and numbers that many messages share.
package format

import "fmt"

// Count returns a number with its noun, as in "1 service" and "2 services".
func Count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// OrNone returns s, or "none" if s is empty.
func OrNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

// Bool returns the value of a gauge that is 1 for true.
func Bool(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
