// SPDX-License-Identifier: Apache-2.0

package agent

import "fmt"

func counted(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
