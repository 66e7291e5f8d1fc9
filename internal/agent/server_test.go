// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"

	"sockeye/internal/fault"
)

func TestHTTPStatus(t *testing.T) {
	for _, code := range []int{fault.CodeFailed, fault.CodeUsage, fault.CodeUnsupported, fault.CodeNotPermitted, fault.CodeConflict} {
		if httpStatus[code] == 0 {
			t.Errorf("code %d has no HTTP status", code)
		}
	}
}
