// SPDX-License-Identifier: Apache-2.0

package member

// ID names a process for as long as the host is up.
type ID struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time"`
}
