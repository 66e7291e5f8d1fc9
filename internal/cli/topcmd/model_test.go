// SPDX-License-Identifier: Apache-2.0

package topcmd

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"sockeye/internal/api"
	"sockeye/internal/cli/clitest"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
)

var noon = time.Date(2026, 3, 14, 12, 0, 0, 0, time.UTC)

// sample returns a frame with four slots and some devices, whose rates are their numbers.
func sample(devices int) *api.Frame {
	lag := int64(12_345_678)
	s := api.LiveService{Name: "telemetry", Refused: 3, Slots: []api.LiveSlot{
		{Slot: 0, State: "ready", Ready: true, PID: 812, Command: "nfacctd -f /etc/pmacct/0.conf", Cgroup: "/telemetry.slice", Devices: 1250, Sessions: 1200,
			Datagrams: 12_400, Bytes: 3_400_000, Queued: 50, QueueLimit: 200, ReaderLag: &lag},
		{Slot: 1, State: "ready", Ready: true, PID: 813, Command: "nfacctd -f /etc/pmacct/1.conf", Devices: 1249, Sessions: 1199, Datagrams: 9_800, Drops: 17,
			Queued: 199, QueueLimit: 200, ZeroWindows: 4, Backlog: 12, Unread: 123_456},
		{Slot: 2, State: "drain", Ready: true, PID: 814, Command: "nfacctd -f /etc/pmacct/2.conf"},
		{Slot: 3, State: "ready"},
	}}
	for i := range devices {
		s.Devices = append(s.Devices, api.LiveDevice{Address: address(i), Slot: i % 4, Datagrams: float64(i), Sessions: 1, LastSeen: noon})
	}
	if devices > 2 {
		s.Devices[1].Device, s.Devices[1].Pinned = "edge-router-1", true
		s.Devices[2].Split = true
	}
	return &api.Frame{Time: noon, Seconds: 1, Services: []api.LiveService{s, {Name: "flows"}},
		Groups: []api.LiveGroup{
			{Kind: "tune", Cgroup: "/telemetry.slice", Name: "bulk", Connections: 2400, Rate: 1.5, Retransmits: 0.2},
			{Kind: "trace", Cgroup: "/telemetry.slice", Name: "replies", Rate: 950, Stage: "stack", Median: 12_300, P99: 1_240_000, Oldest: &lag},
			{Kind: "trace", Cgroup: "/gone.slice", Problem: "the cgroup does not exist"},
		},
		Stuck: []api.LiveSocket{{Service: "telemetry", Local: netip.MustParseAddrPort("192.0.2.100:1790"), Remote: netip.MustParseAddrPort("10.0.0.7:41234"),
			PID: 813, Reason: "zero_window", Bytes: 65_536, Since: 75.5}},
	}
}

func address(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}) }

// screen is a model under test. Requests are recorded instead of sent.
type screen struct {
	*testing.T
	*model
	asked []string
	clock time.Time
}

func newScreen(t *testing.T, width, height int, frames ...*api.Frame) *screen {
	s := &screen{T: t, clock: noon}
	record := func(what string) tea.Cmd {
		return func() tea.Msg {
			s.asked = append(s.asked, what)
			return nil
		}
	}
	s.model = newModel(actions{
		events: func(p *page) tea.Cmd { return record(fmt.Sprintf("events %s %d %v", p.service, p.slot, p.device)) },
		slot: func(c api.SlotChange) tea.Cmd {
			return record(fmt.Sprintf("slot %s %d %s", c.Service, *c.Slot, c.State))
		},
		move: func(d api.DeviceMove) tea.Cmd {
			to := "home"
			if d.Slot != nil {
				to = strconv.Itoa(*d.Slot)
			}
			return record(fmt.Sprintf("move %s %s %s", d.Service, d.Device, to))
		},
	})
	s.now = func() time.Time { return s.clock }
	s.send(tea.WindowSizeMsg{Width: width, Height: height})
	for _, f := range frames {
		s.send(frameMsg{f})
	}
	return s
}

// send passes a message to the model, and runs the commands that make a request. In a replay, commands wait for a time.
func (s *screen) send(msg tea.Msg) {
	_, command := s.Update(msg)
	if _, isKey := msg.(tea.KeyPressMsg); isKey && command != nil && s.replay == nil {
		command()
	}
}

var named = map[string]rune{"enter": tea.KeyEnter, "esc": tea.KeyEscape, "up": tea.KeyUp, "down": tea.KeyDown, "tab": tea.KeyTab, "pgdown": tea.KeyPgDown,
	"home": tea.KeyHome, "end": tea.KeyEnd, "backspace": tea.KeyBackspace, "left": tea.KeyLeft, "right": tea.KeyRight, "space": tea.KeySpace}

// press presses keys: names separated by spaces, or characters.
func (s *screen) press(keys ...string) {
	s.Helper()
	for _, key := range keys {
		if code, ok := named[key]; ok {
			s.send(tea.KeyPressMsg{Code: code})
			continue
		}
		for _, r := range key {
			if r == ' ' {
				s.send(tea.KeyPressMsg{Code: tea.KeySpace, Text: " "})
				continue
			}
			s.send(tea.KeyPressMsg{Code: r, Text: string(r)})
		}
	}
}

func (s *screen) text() string { return ansi.Strip(s.View().Content) }

func (s *screen) shows(parts ...string) {
	s.Helper()
	for _, part := range parts {
		if !strings.Contains(s.text(), part) {
			s.Errorf("the screen lacks %q:\n%s", part, s.text())
		}
	}
}

func (s *screen) lacks(part string) {
	s.Helper()
	if strings.Contains(s.text(), part) {
		s.Errorf("the screen has %q:\n%s", part, s.text())
	}
}

// requests checks the requests since the last call.
func (s *screen) requests(want ...string) {
	s.Helper()
	if !slices.Equal(s.asked, want) {
		s.Errorf("requests %q, want %q", s.asked, want)
	}
	s.asked = nil
}

// cursorAt checks the row with the cursor.
func (s *screen) cursorAt(part string) {
	s.Helper()
	for line := range strings.Lines(s.text()) {
		if strings.HasPrefix(line, ">") {
			if !strings.Contains(line, part) {
				s.Errorf("the cursor is at %q, want %q", line, part)
			}
			return
		}
	}
	s.Errorf("no cursor, want %q:\n%s", part, s.text())
}

// fits checks that the screen has the size of the terminal.
func (s *screen) fits() {
	s.Helper()
	lines := strings.Split(s.text(), "\n")
	if len(lines) != s.height {
		s.Errorf("%d lines of %d:\n%s", len(lines), s.height, s.text())
	}
	for _, line := range lines {
		if n := ansi.StringWidth(line); n > s.width {
			s.Errorf("%d columns of %d: %q", n, s.width, line)
		}
	}
}

// TestScreens compares all lists and pages in three sizes with golden files.
func TestScreens(t *testing.T) {
	for _, size := range [][2]int{{80, 24}, {200, 50}, {10, 5}} {
		var all strings.Builder
		for _, keys := range [][]string{{"1"}, {"2"}, {"3"}, {"4"}, {"1", "enter"}, {"2", "down", "enter"}, {"?"}, {"1", "d"}, {"2", "m"}, {"/", "edge"}} {
			s := newScreen(t, size[0], size[1], sample(60))
			s.press(keys...)
			if s.page != nil {
				slot := 1
				s.send(eventsMsg{page: s.page, list: []api.Event{{Time: noon, Level: "info", Text: "member registered", Slot: &slot}, {Time: noon.Add(time.Second), Level: "warning", Text: "device is split"}}})
			}
			s.fits()
			fmt.Fprintf(&all, "--- %s\n%s\n", strings.Join(keys, " "), s.text())
		}
		clitest.Golden(t, fmt.Sprintf("screens-%dx%d", size[0], size[1]), strings.ReplaceAll(all.String(), " \n", "\n"))
	}
}

// TestSizes checks that the screen has the size of the terminal, whatever the size, and follows changes.
func TestSizes(t *testing.T) {
	s := newScreen(t, 80, 24, sample(5000))
	for _, keys := range []string{"1", "2", "3", "4", "?"} {
		s.press(keys)
		for _, width := range []int{1, 2, 3, 10, 40, 80, 81, 200} {
			for _, height := range []int{1, 2, 3, 4, 5, 24, 25, 100} {
				s.send(tea.WindowSizeMsg{Width: width, Height: height})
				s.fits()
			}
		}
	}
	s.press("esc", "1", "d")
	s.send(tea.WindowSizeMsg{Width: 10, Height: 3})
	s.fits()
	s.send(tea.WindowSizeMsg{})
	if got := s.View().Content; got != "" {
		t.Errorf("a screen without size: %q", got)
	}
}

var color = regexp.MustCompile(`\x1b\[[0-9;]*m`)

// TestColors checks that there are no escape sequences without colors, and some with.
func TestColors(t *testing.T) {
	s := newScreen(t, 80, 24, sample(60))
	for _, colors := range []bool{false, true} {
		s.colors = colors
		for _, key := range []string{"1", "2", "3", "4"} {
			s.press(key)
			content := s.View().Content
			if got := color.MatchString(content); got != colors {
				t.Errorf("list %s with colors %v: %q", key, colors, content)
			}
			if !colors {
				clitest.PrintableOnly(t, content)
			}
		}
	}
}

// TestHostileNames checks that no name on the screen has an effect on the terminal, or breaks a line.
func TestHostileNames(t *testing.T) {
	for _, name := range append(slices.Clone(clitest.Commands), clitest.Hostile) {
		f := sample(3)
		v := &f.Services[0]
		v.Name, v.Problem, f.Problem = name, name, name
		v.Slots[0].Command, v.Slots[0].Cgroup, v.Slots[0].State = name, name, name
		v.Waiting = []api.WaitingStatus{{Command: name, Problem: name}}
		v.NotAdmitted = []api.RefusedStatus{{Command: name, Problem: name}}
		for i := range v.Devices {
			v.Devices[i].Device = name
		}
		for i := range f.Groups {
			g := &f.Groups[i]
			g.Kind, g.Cgroup, g.Name, g.Stage, g.Problem = name, name, name, name, name
		}
		f.Stuck[0].Reason = name
		s := newScreen(t, 150, 24, f)
		check := func() {
			t.Helper()
			s.fits()
			if got := s.View().Content; !clitest.Safe(got) {
				t.Errorf("%q becomes %q", name, got)
			}
		}
		for _, keys := range [][]string{{"1"}, {"2"}, {"3"}, {"4"}, {"1", "enter"}, {"2", "enter"}, {"2", "m"}, {"2", "m", "1", "enter"}} {
			s.press(keys...)
			check()
			if s.page != nil {
				s.send(eventsMsg{page: s.page, list: []api.Event{{Text: name, Level: name}}})
				check()
				s.send(eventsMsg{page: s.page, err: errors.New(name)})
				check()
			}
			s.press("esc", "esc")
		}
		s.send(doneMsg{err: errors.New(name)})
		check()
		s.press("1")
		s.send(endedMsg{errors.New(name)})
		check()
		for _, l := range report(f, noon) {
			if !clitest.Safe(l.render(150, false)) {
				t.Errorf("%q in %q", name, l.text)
			}
		}
	}
}

// TestVisibleRows checks that only visible rows are formatted, because a frame has up to 20,000 devices.
func TestVisibleRows(t *testing.T) {
	formatted := 0
	s := newScreen(t, 80, 24)
	s.devices.columns = slices.Clone(deviceColumns)
	cell := s.devices.columns[0].cell
	s.devices.columns[0].cell = func(d *api.LiveDevice) string { formatted++; return cell(d) }
	s.press("2")
	s.send(frameMsg{sample(20_000)})
	for _, keys := range [][]string{{}, {"end"}, {"pgdown"}, {"s", "s", "r"}, {"home"}} {
		s.press(keys...)
		formatted = 0
		if s.shows("2 devices (20000)"); formatted == 0 || formatted > 24 {
			t.Errorf("after %q, %d rows are formatted", keys, formatted)
		}
	}
}

func BenchmarkFrame(b *testing.B) {
	m := newModel(actions{})
	m.width, m.height, m.view = 80, 24, devicesView
	f := sample(5000)
	for b.Loop() {
		m.Update(frameMsg{f})
		_ = m.View()
	}
}

func TestSortAndFilter(t *testing.T) {
	s := newScreen(t, 80, 24, sample(600))
	s.press("2")
	s.shows("sort: DGRAM/s")
	s.cursorAt("10.0.2.87 ") // 599
	s.press("r")
	s.shows("sort: -DGRAM/s")
	s.cursorAt("10.0.0.0 ")
	s.press("sss")
	s.shows("sort: SLOT")
	s.cursorAt("10.0.0.0 ")
	s.press("S")
	s.shows("sort: REF/s")
	s.press("/", "10.0.2.8x")
	s.shows("none of 600 matches the filter", "filter: 10.0.2.8x")
	s.press("backspace")
	s.shows("10.0.2.8 ", "10.0.2.80 ", "10.0.2.87 ")
	s.lacks("10.0.2.79 ")
	s.press("enter", "q") // the filter stays, and q is a key again
	s.shows("filter: 10.0.2.8")
	s.press("esc")
	s.lacks("filter: ")
	s.press("/", "EDGE", "enter")
	s.cursorAt("edge-router-1 pinned")
	s.press("esc", "/", "split", "enter")
	s.cursorAt("SPLIT")
	s.press("/", "esc")
	s.lacks("filter: ")
	s.press("/")
	s.send(tea.PasteMsg{Content: "edge\x1b[2J\n"})
	if s.filter != "edge[2J" {
		t.Errorf("the filter is %q", s.filter)
	}
	s.press(strings.Repeat("é", 200))
	if len(s.filter) > mostText {
		t.Errorf("a filter of %d bytes", len(s.filter))
	}
}

// TestCursorFollows checks that the cursor stays at its device while the order changes, and at its row without it.
func TestCursorFollows(t *testing.T) {
	f := sample(40)
	s := newScreen(t, 80, 24, f)
	s.press("2", "down", "down")
	s.cursorAt("10.0.0.37 ")
	next := sample(40)
	next.Services[0].Devices[37].Datagrams = 0
	s.send(frameMsg{next})
	s.cursorAt("10.0.0.37 ")
	gone := sample(37)
	s.send(frameMsg{gone})
	s.cursorAt("10.0.0.0 ") // the last row
	s.press("home")
	s.send(frameMsg{sample(60)})
	s.cursorAt("10.0.0.59 ") // the first row is not a device
	s.press("end")
	s.cursorAt("10.0.0.0 ")
	s.press("up", "pgdown", "down")
	s.cursorAt("10.0.0.0 ")
}

func TestPause(t *testing.T) {
	s := newScreen(t, 80, 24, sample(10))
	s.press("space")
	later := sample(10)
	later.Time = noon.Add(time.Minute)
	s.send(frameMsg{later})
	s.shows("PAUSED", "12:00:00")
	s.press("space")
	s.shows("12:01:00")
	s.lacks("PAUSED")
}

// TestAgentGone checks that the screen keeps the last frame, says why it is old, and continues with the next one.
func TestAgentGone(t *testing.T) {
	s := newScreen(t, 80, 24)
	s.shows("waiting for the agent")
	s.send(frameMsg{sample(10)})
	s.send(endedMsg{errEnded})
	s.shows("no agent, tried again each second: the agent has ended", "812 ")
	s.send(frameMsg{sample(10)})
	s.lacks("no agent")
	s.clock = noon.Add(staleTime)
	s.shows("the agent has sent nothing for 4s")
	s.send(frameMsg{sample(10)})
	s.lacks("sent nothing")
}

// TestProblems checks that problems of the policy and of the service take lines of their own.
func TestProblems(t *testing.T) {
	f := sample(3)
	f.Problem, f.Services[0].Problem, f.Services[0].Split = "policy: not applied", "no keeper", 1
	s := newScreen(t, 80, 24, f)
	s.shows("policy: not applied\n", "telemetry: no keeper\n", "1 SPLIT device")
	s.fits()
}

func TestServices(t *testing.T) {
	s := newScreen(t, 80, 24, sample(3))
	s.shows("telemetry (of 2)")
	s.press("n")
	s.shows("flows (of 2)", "1 slots (0)", "none")
	s.press("n")
	s.shows("telemetry (of 2)")
	s.service = "gone"
	s.send(frameMsg{sample(3)})
	s.shows("no service gone")
	s.press("n")
	s.shows("telemetry (of 2)")
	without := &api.Frame{Time: noon, Groups: sample(0).Groups}
	s = newScreen(t, 80, 24, without)
	s.shows("no services", "[3 groups (3)]", "replies")
	s.press("1", "enter", "d", "m", "n", "2", "enter", "m")
	s.requests()
}

func TestPages(t *testing.T) {
	f := sample(10)
	s := newScreen(t, 80, 24, f)
	s.press("down", "enter")
	s.requests("events telemetry 1 invalid IP")
	s.shows("slot          1 of telemetry, ready", "member        813 nfacctd", "zero windows  4", "backlog 12", "events\n  none")
	s.lacks("reader lag")
	first := s.page
	s.press("q", "up", "enter")
	s.shows("reader lag    12.3 ms")
	s.requests("events telemetry 0 invalid IP")
	s.send(eventsMsg{page: first, list: []api.Event{{Text: "of another page"}}})
	s.lacks("of another page")
	s.press("2")
	s.lacks("member")
	s.press("/", "edge", "enter", "enter")
	s.requests("events telemetry 0 10.0.0.1")
	s.shows("device      10.0.0.1 edge-router-1 pinned", "slot        1, ready, member 813 nfacctd", "last seen   2026-03-14 12:00:00")
	s.lacks("dropped")
	dropped := uint64(12_345)
	f.Services[0].Devices[1].Drops, f.Services[0].Devices[1].Dropped = 17, &dropped
	s.send(frameMsg{f})
	s.shows("dropped     17/s at the member, 12345 since the start of the agent")
	if deviceMark(&f.Services[0].Devices[1]) != alarm {
		t.Error("a device that loses data is not marked")
	}
	// Events are asked for again with a later frame.
	s.clock = noon.Add(eventsInterval)
	if _, command := s.Update(frameMsg{f}); command == nil {
		t.Error("the events are old")
	}
	f = sample(0)
	s.send(frameMsg{f})
	s.shows("10.0.0.1 is not in the list")
	s.press("esc")
	s.shows("none")
}

// TestDrain checks that a slot is drained only after its number was typed.
func TestDrain(t *testing.T) {
	s := newScreen(t, 80, 24, sample(10))
	s.press("down", "d")
	s.shows("drain slot 1 of telemetry: its 1249 devices move to other slots. Type 1 to")
	s.press("enter")
	s.shows("nothing was changed")
	s.press("d", "0", "enter")
	s.shows("nothing was changed")
	s.press("d", "1", "esc")
	s.shows("nothing was changed")
	s.press("d", "q", "enter") // q is text
	s.requests()
	s.press("d", "x", "backspace", " 1", "enter")
	s.requests("slot telemetry 1 drain")
	s.send(doneMsg{text: "slot 1 is set to drain"})
	s.shows("slot 1 is set to drain")
	s.send(doneMsg{err: fault.Conflict(errors.New("moves are stopped"), "resume them")})
	s.shows("moves are stopped; hint: resume them")
	s.press("down", "d")
	s.shows("set slot 2 of telemetry from drain to ready")
	s.press("2", "enter")
	s.requests("slot telemetry 2 ready")
	s.press("enter", "d", "2", "enter") // on the page
	s.requests("events telemetry 2 invalid IP", "slot telemetry 2 ready")
	s.press("q", "3", "d", "4", "d", "2", "d")
	if s.prompt != nil {
		t.Errorf("%q", s.prompt.text)
	}
}

// TestMove checks that a device is moved only after its name was typed.
func TestMove(t *testing.T) {
	s := newScreen(t, 80, 24, sample(10))
	s.press("m")
	if s.prompt != nil {
		t.Error("a slot is moved")
	}
	s.press("2", "/", "edge", "enter", "m")
	s.shows("move edge-router-1 from slot 1 to slot (a number, or home):")
	for _, to := range []string{"4", "-1", "x", ""} {
		s.press("esc", "m", to, "enter")
		s.shows(fmt.Sprintf("telemetry has no slot %q; nothing was changed", to))
		s.press("m")
	}
	s.press("3", "enter")
	s.shows("pin edge-router-1 to slot 3; its sessions elsewhere are closed. Type\nedge-router-1 to confirm: _\n")
	s.press("edge", "enter")
	s.shows("nothing was changed")
	s.requests()
	s.press("m", "3", "enter", "edge-router-1", "enter")
	s.requests("move telemetry edge-router-1 3")
	s.press("m", "ho", "me", "enter")
	s.shows("remove the pin of edge-router-1. Type")
	s.press("edge-router-1", "enter")
	s.requests("move telemetry edge-router-1 home")
	s.press("esc", "end", "enter", "m", "1", "enter", "10.0.0.0", "enter") // on the page
	s.requests("events telemetry 0 10.0.0.0", "move telemetry 10.0.0.0 1")
}

// TestConfirmationKeepsTarget checks that a change concerns the slot that was selected when the question was asked.
func TestConfirmationKeepsTarget(t *testing.T) {
	s := newScreen(t, 80, 24, sample(10))
	s.press("2", "down", "m", "3", "enter")
	s.send(frameMsg{sample(40)})
	s.shows("pin 10.0.0.8 to slot 3")
	s.press("10.0.0.8", "enter")
	s.requests("move telemetry 10.0.0.8 3")
}

// quits reports whether a key ends the program.
func (s *screen) quits(key tea.KeyPressMsg) bool {
	_, command := s.Update(key)
	if command == nil {
		return false
	}
	_, ok := command().(tea.QuitMsg)
	return ok
}

func TestQuit(t *testing.T) {
	q, interrupt := tea.KeyPressMsg{Code: 'q', Text: "q"}, tea.KeyPressMsg{Code: 'c', Mod: tea.ModCtrl}
	s := newScreen(t, 80, 24, sample(10))
	s.press("enter")
	if s.quits(q) || s.page != nil {
		t.Error("q on a page")
	}
	s.press("?")
	if s.quits(q) || s.help {
		t.Error("q in the help")
	}
	s.press("d")
	if s.quits(q) || !s.quits(interrupt) {
		t.Error("in a question")
	}
	s.press("esc", "/")
	if s.quits(q) || !s.quits(interrupt) {
		t.Error("in a filter")
	}
	s.press("esc")
	if !s.quits(q) {
		t.Error("q does not quit")
	}
}

func TestReplay(t *testing.T) {
	s := newScreen(t, 80, 24)
	s.replay = &replay{speed: 1}
	for i := range 5 {
		f := sample(10)
		f.Time = noon.Add(time.Duration(i)*10*time.Second - time.Hour)
		s.send(frameMsg{f})
	}
	s.shows("REPLAY 1/5 at 10x", "11:00:00")
	next := func() { s.send(playMsg(s.replay.step)) }
	next()
	s.shows("REPLAY 2/5", "11:00:10")
	s.send(playMsg(s.replay.step - 1)) // of an earlier position
	s.shows("REPLAY 2/5")
	s.press("right")
	s.shows("REPLAY 3/5 at 10x  PAUSED")
	next()
	s.shows("REPLAY 3/5")
	s.press("left", "left", "left")
	s.shows("REPLAY 1/5")
	s.press("++++")
	s.shows("at 300x")
	s.press("-----")
	s.shows("at 1x")
	s.press("e", "right")
	s.shows("REPLAY 5/5")
	s.press("b", "space")
	s.lacks("PAUSED")
	s.press("e")
	next()
	s.shows("REPLAY 5/5") // more frames may follow
	s.lacks("PAUSED")
	s.send(loadedMsg{})
	next()
	s.shows("PAUSED", "end of the recording")
	s.press("space")
	s.shows("REPLAY 1/5")
	s.press("d")
	s.shows("a replay changes nothing")
	s.press("2", "m")
	s.shows("a replay changes nothing")
	if s.prompt != nil {
		t.Error("a replay asks for a change")
	}
	s.requests()
	// The page shows the events until then only.
	s.press("enter")
	s.send(eventsMsg{page: s.page, list: []api.Event{{Time: noon.Add(-2 * time.Hour), Text: "before"}, {Time: noon, Text: "after"}}})
	s.shows("before")
	s.lacks("after")
	s.send(loadedMsg{errors.New("cut short")})
	s.shows("cut short")
}

// TestEventsOfPage checks that a page shows an event as the command events does, over several lines of the screen.
func TestEventsOfPage(t *testing.T) {
	s := newScreen(t, 80, 24, sample(10))
	s.press("2", "enter")
	slot := 1
	e := api.Event{Time: noon.Add(-time.Second), Level: "warning", Text: "device moves to another slot", Service: "telemetry", Device: "edge-router-1", Address: "10.0.0.1",
		Slot: &slot, PID: 813, Details: map[string]string{"from": "slot 0", "cause": "sockeye move by root"}}
	s.send(eventsMsg{page: s.page, list: []api.Event{e}})
	s.shows("11:59:59.000  WARNING  telemetry edge-router-1 10.0.0.1 slot 1: device moves",
		"\n    to another slot  (pid 813, cause sockeye move by root, from slot 0)")
	s.fits()
	s.send(tea.WindowSizeMsg{Width: 200, Height: 24})
	s.shows("\n  " + command.EventLine(&e, noon) + "\n")
}

// TestOutside checks that processes that are not members take at most four lines of the list of slots, and none of a low
// screen, of other lists and of pages.
func TestOutside(t *testing.T) {
	f := sample(60)
	v := &f.Services[0]
	v.Waiting = []api.WaitingStatus{{PID: 4711, Command: "nfacctd -f new.conf", Problem: "it does not listen on udp [::]:4739"}}
	v.NotAdmitted = []api.RefusedStatus{{PID: 4712, Command: "nfacctd", Problem: "it runs as user 65534"}}
	waits, refused := "telemetry: process 4711 (nfacctd -f new.conf) is not ready: it does not listen …", "telemetry: process 4712 (nfacctd) is refused as a member: it runs as user 65534\n"
	s := newScreen(t, 80, 24, f)
	s.shows(waits, refused, "    3 empty")
	s.fits()
	s.press("2")
	s.lacks("process 4711")
	s.press("1", "enter")
	s.lacks("process 4711")
	s.press("q", "n")
	s.lacks("process 4711")
	s.press("n")
	s.shows(waits)
	s.send(tea.WindowSizeMsg{Width: 80, Height: heightOfOutside - 1})
	s.lacks("process 4711")
	for range 3 {
		v.NotAdmitted = append(v.NotAdmitted, v.NotAdmitted[0])
	}
	s.send(tea.WindowSizeMsg{Width: 80, Height: heightOfOutside})
	s.shows(waits, refused+"telemetry: 2 other processes are not members; see sockeye status\n", "    3 empty")
	s.fits()
}

// TestWaits checks that a slot whose waiting room is open waits before its first packet does.
func TestWaits(t *testing.T) {
	f := sample(3)
	until := noon.Add(20 * time.Second)
	f.Services[0].Slots[3].WaitUntil = &until
	s := newScreen(t, 80, 24, f)
	s.press("end")
	s.cursorAt("3 waits ")
	s.press("enter")
	s.shows("slot          3 of telemetry, waits", "waiting room  0 datagrams, open until 12:00:20")
}

// TestReplayKeepsService checks that the shown service and its page stay while the recording gets a service before it, and
// loses it.
func TestReplayKeepsService(t *testing.T) {
	s := newScreen(t, 80, 24)
	s.replay = &replay{speed: 1}
	without, alone, both := sample(10), sample(10), sample(10)
	without.Services = nil
	alone.Services = alone.Services[:1]
	both.Services = []api.LiveService{{Name: "flows", Slots: []api.LiveSlot{{State: "ready", PID: 4711}}}, both.Services[0]}
	for _, f := range []*api.Frame{without, alone, both, without, both} {
		s.send(frameMsg{f})
	}
	s.press("1")
	s.shows("REPLAY 1/5", "no services")
	s.press("right")
	s.shows("REPLAY 2/5", "telemetry  ", "812 nf")
	s.press("right")
	s.shows("REPLAY 3/5", "telemetry (of 2)", "812 nf")
	s.press("enter", "right")
	s.shows("REPLAY 4/5", "no service telemetry", "there is no slot 0")
	s.press("right")
	s.shows("REPLAY 5/5", "slot          0 of telemetry", "812 nf")
	s.lacks("4711")
	s.press("q", "n")
	s.shows("flows (of 2)", "4711")
}

// TestReplayWaits checks the time between two frames.
func TestReplayWaits(t *testing.T) {
	s := newScreen(t, 80, 24)
	s.replay = &replay{}
	s.send(frameMsg{sample(1)})
	if step := s.replay.step; step != 1 || s.replay.wait() != mostWait {
		t.Errorf("step %d, wait %s", step, s.replay.wait())
	}
	for _, c := range []struct{ gap, want time.Duration }{{4 * time.Second, 4 * time.Second}, {time.Hour, mostWait}, {-time.Hour, 0}} {
		f := sample(1)
		f.Time = noon.Add(c.gap)
		s.replay.frames = append(s.replay.frames[:1], f)
		if got := s.replay.wait(); got != c.want {
			t.Errorf("after %s: %s, want %s", c.gap, got, c.want)
		}
		s.replay.speed = 1
		if got := s.replay.wait(); got != c.want/10 {
			t.Errorf("after %s at 10x: %s", c.gap, got)
		}
		s.replay.speed = 0
	}
}

func TestWrap(t *testing.T) {
	for want, width := range map[string]int{"move edge-router-1 now": 22, "move edge-router-1|now": 21, "move|edge-route|r-1 now": 10, "m|o|v|e|e|d|g|e|-|r|o|u|t|e|r|-|1|n|o|w": 1} {
		if got := strings.Join(wrap("move edge-router-1 now", width), "|"); got != want {
			t.Errorf("%d: %q, want %q", width, got, want)
		}
	}
}

func TestNumbers(t *testing.T) {
	for n, want := range map[float64]string{0: "0", -1: "0", 0.04: "0.0", 1: "1.0", 9.94: "9.9", 9.96: "10", 999.4: "999", 999.6: "1.0k", 12_345: "12k", 1.5e6: "1.5M", 1e20: "huge"} {
		if got := rate(n); got != want {
			t.Errorf("%v is %q, want %q", n, got, want)
		}
	}
	for n, want := range map[uint64]string{0: "0", 9999: "9999", 10_000: "10k"} {
		if got := count(n); got != want {
			t.Errorf("%d is %q, want %q", n, got, want)
		}
	}
	for width, want := range map[int]string{0: "漢字漢", 7: "漢字漢 ", 6: "漢字漢", 5: "漢字…", 4: "漢… ", 3: "漢…", 1: "…"} {
		if got := pad("漢字漢", width, false); got != want {
			t.Errorf("%d: %q, want %q", width, got, want)
		}
	}
}
