// SPDX-License-Identifier: Apache-2.0

package swarm

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"sockeye/lab"
)

// TestSwarm starts a swarm without Sockeye: the kernel's hash splits devices, and the analysis finds all of them. All
// datagrams are accounted for. A member that is killed and started again closes the connections of its devices only.
func TestSwarm(t *testing.T) {
	l, err := lab.New(t.Context(), lab.Options{Log: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	namespace, err := Attach(l)
	must(err)
	s, err := New(l, namespace)
	must(err)
	const members, devices = 3, 20
	start := func(slot int) *Process {
		t.Helper()
		p, err := s.StartMember(Member{Slot: slot, TCP: 1790, UDP: 4739}, fmt.Sprintf("member-%d", slot), "")
		must(err)
		must(p.Listening())
		return p
	}
	var all []*Process
	for slot := range members {
		all = append(all, start(slot))
	}
	must(s.StartDevices(t.Context(), Load{Devices: devices, TCP: 1790, UDP: 4739, Rate: 100, Exporters: 2, Routes: 50, DumpRate: 5000, Noted: true}))
	a := &Analysis{}
	begun, err := s.Send()
	must(err)
	a.Begin = begun.At
	wait := func(what string, done func() bool) {
		t.Helper()
		must(l.WaitFor(t.Context(), what, func() (bool, error) {
			err := s.Read(a)
			a.Judge(Now() - time.Second)
			return done(), err
		}))
	}
	wait("datagrams", func() bool { return a.Received > 1000 })
	must(all[0].Kill())
	killed := Now()
	wait("new connections", func() bool { return a.Opened > 0 && a.judged > killed })
	all[0] = start(0)
	state, err := s.Stop()
	must(err)
	// All members have read what they received when they answer after a pause in which nothing arrives.
	wait("the end", func() bool { return a.judged > state.At })
	for _, p := range all {
		if memory, err := p.PeakMemory(); err != nil || memory < 1<<20 {
			t.Errorf("%s: peak memory %d, %v", p.Name, memory, err)
		}
		member, err := p.State()
		must(err)
		if p != all[0] && member.Messages == 0 {
			t.Errorf("%s: no BMP messages", p.Name)
		}
	}
	a.End = state.At
	a.Finish()
	// Only datagrams in the receive buffer of the killed member can be lost: those of a second if it waits for a CPU that long.
	if a.Received > state.Sent || a.Received < state.Sent-1000 || a.Late > 0 {
		t.Errorf("%d of %d datagrams received, %d late", a.Received, state.Sent, a.Late)
	}
	// The two ports of a device and its connection are at three members at random: one device of nine is together.
	if n, longest := a.SplitDevices(100 * time.Millisecond); n < devices/2 || longest < 500*time.Millisecond {
		t.Errorf("%d of %d devices split, at most for %v", n, devices, longest)
	}
	if a.WithoutRoutes == 0 || a.WithoutRoutes > a.Received {
		t.Errorf("%d datagrams without routes", a.WithoutRoutes)
	}
	if a.Closed == 0 || a.Closed == devices || a.Opened < a.Closed || len(a.Gaps) != a.Closed || len(a.Needless) > 0 {
		t.Errorf("%d connections closed, %d opened, %d gaps, %d needless", a.Closed, a.Opened, len(a.Gaps), len(a.Needless))
	}
	if state, err := s.State(); err != nil || state.Open != devices {
		t.Errorf("%d connections, %v", state.Open, err)
	}
}
