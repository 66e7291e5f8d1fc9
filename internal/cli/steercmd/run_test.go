// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"testing"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/cli/isolatecmd"
	"sockeye/internal/fault"
	"sockeye/internal/isolate"
)

// TestRunIsolatedAsAnotherUser checks that run --isolated refuses a --user that is not the user of the members.
func TestRunIsolatedAsAnotherUser(t *testing.T) {
	i := isolatecmd.Options{User: "nobody"}
	slot := 0
	place := api.ClaimedSlot{Membership: api.Membership{Slot: &slot}, User: "daemon", Listeners: []api.MemberListener{{Protocol: "tcp"}}}
	if err := (&commands{&command.Command{}}).runIsolated(t.Context(), &i, &place, isolate.Setup{}); fault.Code(err) != fault.CodeConflict {
		t.Errorf("run --isolated --user nobody: %v", err)
	}
}
