// SPDX-License-Identifier: Apache-2.0

package steercmd

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"sockeye/internal/api"
	"sockeye/internal/cli/clitest"
	"sockeye/internal/cli/command"
)

// fullWhy is an answer that needs more lines and columns than there are.
func fullWhy(now time.Time) *api.Why {
	slot, target, planned := 2, 3, 1
	until := now.Add(90 * time.Minute)
	w := &api.Why{
		Service: "telemetry", Address: netip.MustParseAddr("2001:db8:1234:5678:9abc:def0:1234:5678"), Device: strings.Repeat("edge-router-", 10), Prefix: "2001:db8::/32",
		Bucket: 16383, Slot: 2, Because: "pin", Until: &until, Target: &target, Effect: "wait",
		Reason: "slot 2 has no member; 100000 datagrams wait for the next one",
		Member: &api.WhyMember{Slot: 2, PID: 4194304, Command: "nfacctd " + clitest.Hostile + strings.Repeat("x", 100), Source: "members[12]", Since: now.Add(-100 * time.Hour)},
		Seen:   &api.WhySeen{Connections: 12, Datagrams: 1 << 40, Refused: 3, LastSeen: now.Add(-3 * time.Second), LastSlot: &slot},
		Rates:  api.WhyRates{Seconds: 1, Datagrams: 12345.6, Bytes: 1.5e6, Refused: 0.5}, SessionCount: 300, Split: true,
		Plan: api.WhyPlan{Slot: &planned, Device: "core", Changes: []api.Change{{What: "slots: 4 -> 2"}, {What: "device_map: 1 prefix of 1 device -> 2 prefixes of 2 devices"}}},
	}
	for i := range 100 {
		one := api.WhySession{Local: netip.AddrPortFrom(w.Address, 1790), Remote: netip.AddrPortFrom(w.Address, uint16(40000+i)), PID: 4194304, Received: 1 << 50, Unread: 1 << 20}
		if i > 0 {
			one.Slot = &slot
		}
		w.Sessions = append(w.Sessions, one)
	}
	for i := range 10 {
		w.Events = append(w.Events, api.Event{Time: now.Add(time.Duration(i-10) * time.Hour), Kind: "slot_closed", Slot: &slot, Text: "slot cleared " + clitest.Hostile,
			Details: map[string]string{"reason": fmt.Sprintf("process ended by SIGKILL, %d", i)}})
	}
	return w
}

// TestWhyText compares the text of full and of empty answers, and checks the size of the screen.
func TestWhyText(t *testing.T) {
	now := time.Date(2026, 1, 2, 15, 4, 5, 0, time.UTC)
	c := &command.Command{Environment: command.Environment{Now: func() time.Time { return now }}}
	planned := 0
	short := &api.Why{Service: "flows", Address: netip.MustParseAddr("192.0.2.1"), Because: "bucket", Effect: "refused", Reason: "slot 0 has no member",
		Plan: api.WhyPlan{Slot: &planned}}
	away, gone, own := fullWhy(now), *short, fullWhy(now)
	away.Effect, away.Host, away.Reason, away.Member = "elsewhere", "collector2", "host collector2 of the fleet serves the device", nil
	gone.Effect, gone.Reason = "dropped", "this host has no table of the fleet yet"
	own.Host = "collector1"
	for name, one := range map[string]struct {
		w    *api.Why
		most int
	}{"why-full": {fullWhy(now), whyLines}, "why-many-services": {fullWhy(now), leastWhyLines}, "why-empty": {short, whyLines},
		"why-elsewhere": {away, whyLines}, "why-dropped": {&gone, whyLines}, "why-host": {own, leastWhyLines}} {
		clitest.GoldenText(t, name, func(text *command.Text) { (&whyWriter{text, c, one.most, true}).write(one.w) })
		var text command.Text
		(&whyWriter{&text, c, one.most, true}).write(one.w)
		if lines := strings.Count(text.String(), "\n"); lines > one.most {
			t.Errorf("%s: %d lines, at most %d are allowed", name, lines, one.most)
		}
	}
	// A pipe gets whole lines: a script searches them.
	var text command.Text
	(&whyWriter{&text, c, whyLines, false}).write(fullWhy(now))
	if !strings.Contains(text.String(), "device_map: 1 prefix of 1 device -> 2 prefixes of 2 devices\n") {
		t.Errorf("lines are cut without a terminal:\n%s", text.String())
	}
}
