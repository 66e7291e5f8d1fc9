// SPDX-License-Identifier: Apache-2.0

//go:build !vm

package trace_test

import "time"

const (
	// fewer is by how much less tests send.
	fewer = 1
	// slower is how many times longer the machine may take.
	slower = 1
	// patience is how long what must come about may take.
	patience = time.Minute
)
