// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"net/netip"
	"strings"
	"testing"

	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/sockdiag"
)

// The hint about split devices depends on the next action of the agent.
func TestSplitHint(t *testing.T) {
	split := []splitDevice{{address: netip.MustParseAddr("192.0.2.1"), connections: []sockdiag.Socket{{Cookie: 7}}}}
	for _, test := range []struct {
		onStart config.OnStart
		left    int
		suspect uint64
		hint    string
	}{
		{config.Report, 5, 7, "set on_start: reset, "},
		{config.Reset, 5, 7, "on_start: reset acts on them within seconds"},
		{config.Adopt, 5, 7, "on_start: adopt acts on them within seconds"},
		{config.Reset, 0, 7, "restart the agent, and on_start: reset acts on them; "}, // it has tried often enough
		{config.Reset, 5, 8, "restart the agent, and on_start: reset acts on them; "}, // what a policy moved
	} {
		s := &service{config: config.Service{OnStart: test.onStart}}
		s.checks.split, s.checks.left, s.checks.suspects = split, test.left, map[uint64]bool{test.suspect: true}
		if hint := fault.Hint(s.splitProblem()); !strings.HasPrefix(hint, test.hint) {
			t.Errorf("%+v: %q", test, hint)
		}
	}
}
