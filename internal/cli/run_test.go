// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"sockeye/internal/api"
	"sockeye/internal/fault"
	"sockeye/internal/isolate"
	"testing"
)

// A program that becomes another user than the members is no member.
func TestRunIsolatedAsAnotherUser(t *testing.T) {
	i := isolation{user: "nobody"}
	slot := 0
	place := api.Place{Membership: api.Membership{Slot: &slot}, User: "daemon", Listeners: []api.MemberListener{{Protocol: "tcp"}}}
	if err := (&steerCommands{&command{}}).runIsolated(t.Context(), &i, &place, isolate.Setup{}); fault.Code(err) != fault.CodeConflict {
		t.Errorf("run --isolated --user nobody: %v", err)
	}
}
