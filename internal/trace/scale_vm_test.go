// SPDX-License-Identifier: Apache-2.0

//go:build vm

package trace_test

import "time"

// Under software emulation: see scale_test.go.
const (
	fewer    = 10
	slower   = 10
	patience = 2 * time.Minute
)
