// SPDX-License-Identifier: Apache-2.0

package split

import (
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sockeye/internal/bpf"
	"sockeye/internal/config"
	"sockeye/internal/fault"
	"sockeye/internal/member"
	"sockeye/internal/placement"
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

// TestHandshakesOfAFormerMember checks that the handshakes of devices that have moved are closed if their former member
// still runs, and stay open if it has exited: then they are at the member that serves the device now.
func TestHandshakesOfAFormerMember(t *testing.T) {
	const standby = 1
	mapping, err := placement.NewMapping(2, standby, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	self, err := member.Read(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	exited := exec.Command("true")
	if err := exited.Run(); err != nil {
		t.Fatal(err)
	}
	serves := func(slot int, who member.ID) *core.Serving {
		s := &core.Service{Config: config.Service{WhenEmpty: config.WhenEmpty{Standby: new(int)}}, Mapping: mapping}
		*s.Config.WhenEmpty.Standby = standby
		v := s.Serving()
		v.Members[slot] = who
		return v
	}
	var device netip.Addr
	for device = netip.MustParseAddr("192.0.2.1"); ; device = device.Next() {
		if slot, _ := mapping.Slot(device); slot != standby {
			break
		}
	}
	handshake := session.Session{Socket: sockdiag.Socket{Cookie: 7, State: sockdiag.SynRecv}, Address: device}
	for _, test := range []struct {
		name      string
		former    member.ID
		misplaced int
	}{
		{"runs", member.ID{PID: self.PID, StartTime: self.StartTime}, 1},
		{"has exited", member.ID{PID: exited.Process.Pid, StartTime: self.StartTime}, 0},
		{"process id is that of another process", member.ID{PID: self.PID, StartTime: self.StartTime + 1}, 0},
	} {
		c := New(&core.Service{Config: config.Service{OnMove: config.CloseMoved}}, nil, nil)
		c.served = serves(0, test.former)
		now := serves(standby, member.ID{PID: 1})
		if misplaced := c.misplacedSessions(now, []session.Session{handshake}, nil, nil); len(misplaced) != test.misplaced {
			t.Errorf("the former member %s: %d handshakes are closed, want %d", test.name, len(misplaced), test.misplaced)
		}
	}
}
