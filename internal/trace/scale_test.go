// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package trace_test

import "time"

const (
	// fewer divides the amount of data that tests send.
	fewer = 1
	// slower multiplies the times that tests permit.
	slower = 1
	// patience bounds the wait for an event.
	patience = time.Minute
)
