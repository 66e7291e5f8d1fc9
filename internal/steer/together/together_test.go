// SPDX-License-Identifier: Apache-2.0

package together

import (
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/sockdiag"
	"sockeye/internal/steer/core"
	"sockeye/internal/steer/session"
)

// TestSplitHint checks that the hint about split devices depends on the next action of the agent.
func TestSplitHint(t *testing.T) {
	before := bpf.Owner{PID: 1, StartTime: 1}
	steered := bpf.Owner{PID: 1, StartTime: 1, Steered: true}
	for _, test := range []struct {
		onStart config.OnStart
		onMove  config.OnMove
		owner   bpf.Owner
		placed  bool
		err     error
		hint    string
	}{
		{config.Report, config.CloseMoved, before, false, nil, "set on_start: reset, "},
		{config.Report, config.CloseMoved, before, true, nil, "sockeye devices marks them; "},
		{config.Report, config.CloseMoved, steered, false, nil, "sockeye devices marks them; "},
		{config.Reset, config.CloseMoved, before, false, nil, "sockeye devices marks them; "},
		{config.Reset, config.KeepMoved, steered, false, nil, "set on_move: reset, "},
		{config.Reset, config.KeepMoved, before, false, nil, "sockeye devices marks them; "},
		{config.Reset, config.KeepMoved, before, true, nil, "set on_move: reset, "},
		{config.Reset, config.CloseMoved, steered, false, unix.EPERM, "the agent needs CAP_NET_ADMIN"},
		{config.Reset, config.CloseMoved, steered, false, sockdiag.ErrCannotDestroy, "restart these members, "},
	} {
		c := New(&core.Service{Config: config.Service{OnStart: test.onStart, OnMove: test.onMove}}, nil, nil)
		one := session.Session{Socket: sockdiag.Socket{Cookie: 7}, Owner: test.owner, Owned: true}
		c.split = []splitDevice{{Device: session.Device{Address: netip.MustParseAddr("192.0.2.1"), Sessions: []session.Session{one}}}}
		c.placed, c.err = map[uint64]bool{7: test.placed}, test.err
		if hint := fault.Hint(c.Problem()); !strings.HasPrefix(hint, test.hint) {
			t.Errorf("%+v: %q", test, hint)
		}
	}
}
