// SPDX-License-Identifier: Apache-2.0

package member

// ID identifies a process until the next boot.
type ID struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time"` // clock ticks since boot
}
