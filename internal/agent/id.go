// SPDX-License-Identifier: Apache-2.0

package agent

// process names a process for as long as the host is up.
type process struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time"`
}
