// SPDX-License-Identifier: Apache-2.0

// Package format has the words and numbers that many messages share.
package format

import "fmt"

func Count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

func OrNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

func Bool(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
