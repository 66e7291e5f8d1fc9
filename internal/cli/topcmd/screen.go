// SPDX-License-Identifier: Apache-2.0

package topcmd

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
	"sockeye/internal/format"
)

const (
	// mostOutside is the number of lines for processes that are not members.
	mostOutside = 3
	// heightOfOutside is the height of the screen from which on it has these lines.
	heightOfOutside = 20
)

// style is the appearance of a line.
type style int

const (
	plain style = iota
	title
	chosen
	warning
	alarm
)

// sequences begin a style: bold, inverse, yellow, red (console_codes(4)).
var sequences = map[style]string{title: "\x1b[1m", chosen: "\x1b[7m", warning: "\x1b[33m", alarm: "\x1b[31m"}

// line is a line of the screen. Lines are the only way to the terminal: the text may have any characters, render
// replaces those that a terminal interprets.
type line struct {
	text  string
	style style
}

func slotTexts(s *api.LiveSlot) []string {
	return []string{strconv.Itoa(s.Slot), stateOf(s), s.Command, strconv.Itoa(s.PID)}
}

func deviceTexts(d *api.LiveDevice) []string { return []string{d.Address.String(), nameOf(d)} }

func groupTexts(g *api.LiveGroup) []string { return []string{g.Kind, g.Cgroup, g.Name, g.Stage} }

func stuckTexts(s *api.LiveSocket) []string {
	return []string{s.Service, s.Remote.String(), s.Local.String(), s.Reason, strconv.Itoa(s.PID)}
}

// slotMark marks slots that lose data or have no member.
func slotMark(s *api.LiveSlot) style {
	switch {
	case s.Drops > 0 || s.ZeroWindows > 0 || s.Refused > 0:
		return alarm
	case stateOf(s) != "ready":
		return warning
	}
	return plain
}

func deviceMark(d *api.LiveDevice) style {
	if d.Split || d.Refused > 0 || d.Drops > 0 {
		return alarm
	}
	return plain
}

func groupMark(g *api.LiveGroup) style {
	if g.Problem != "" {
		return alarm
	}
	return plain
}

// lagColumn returns the column of the reader lag, which is shown if a member is traced.
func lagColumn() column[api.LiveSlot] {
	c := number("LAG", 7, func(s *api.LiveSlot) int64 { return orMinus(s.ReaderLag) }, age)
	c.used = func(rows []*api.LiveSlot) bool {
		for _, s := range rows {
			if s.ReaderLag != nil {
				return true
			}
		}
		return false
	}
	return c
}

// orMinus returns -1 for an unknown age.
func orMinus(ns *int64) int64 {
	if ns == nil {
		return -1
	}
	return *ns
}

// count returns a number, from 10,000 on as rate.
func count(n uint64) string {
	if n < 10_000 {
		return strconv.FormatUint(n, 10)
	}
	return rate(float64(n))
}

func fill(used, limit uint64) float64 {
	if limit == 0 {
		return 0
	}
	return float64(used) / float64(limit)
}

func percent(share float64) string { return strconv.FormatFloat(100*share, 'f', 0, 64) + "%" }

func latency(ns int64) string {
	if ns == 0 {
		return "-"
	}
	return command.Duration(time.Duration(ns))
}

func seconds(s float64) string { return command.Duration(time.Duration(s * float64(time.Second))) }

// View implements tea.Model.
func (m *model) View() tea.View {
	lines := m.screen()
	text := make([]string, len(lines))
	for i, l := range lines {
		text[i] = l.render(m.width, m.colors)
	}
	v := tea.NewView(strings.Join(text, "\n"))
	v.AltScreen = true
	return v
}

// render returns a line for the terminal.
func (l line) render(width int, colors bool) string {
	text := cut(command.Printable(l.text), width)
	begin := sequences[l.style]
	if !colors || begin == "" {
		return text
	}
	if l.style == chosen {
		text += strings.Repeat(" ", max(0, width-ansi.StringWidth(text)))
	}
	return begin + text + "\x1b[m"
}

var (
	slotColumns = []column[api.LiveSlot]{
		ordinal("SLOT", 4, func(s *api.LiveSlot) int { return s.Slot }),
		text("STATE", 7, stateOf),
		number("DEVS", 5, func(s *api.LiveSlot) int { return s.Devices }, strconv.Itoa),
		number("SESS", 5, func(s *api.LiveSlot) int { return s.Sessions }, strconv.Itoa),
		number("DGRAM/s", 7, func(s *api.LiveSlot) float64 { return s.Datagrams }, rate),
		number("BYTE/s", 6, func(s *api.LiveSlot) float64 { return s.Bytes }, rate),
		number("CONN/s", 6, func(s *api.LiveSlot) float64 { return s.Connections }, rate).from(120),
		number("REF/s", 5, func(s *api.LiveSlot) float64 { return s.Refused }, rate),
		number("DROP/s", 6, func(s *api.LiveSlot) float64 { return s.Drops }, rate),
		number("QUEUE", 5, func(s *api.LiveSlot) float64 { return fill(s.Queued, s.QueueLimit) }, percent),
		number("BACKLOG", 7, func(s *api.LiveSlot) uint64 { return s.Backlog }, count).from(120),
		number("UNREAD", 6, func(s *api.LiveSlot) uint64 { return s.Unread }, count).from(120),
		number("WAITING", 7, func(s *api.LiveSlot) uint64 { return s.Waiting }, count).from(130),
		number("0WIN", 4, func(s *api.LiveSlot) int { return s.ZeroWindows }, strconv.Itoa),
		lagColumn(),
		text("MEMBER", 0, memberOf),
	}
	deviceColumns = []column[api.LiveDevice]{
		number("DGRAM/s", 7, func(d *api.LiveDevice) float64 { return d.Datagrams }, rate),
		number("BYTE/s", 6, func(d *api.LiveDevice) float64 { return d.Bytes }, rate),
		number("REF/s", 5, func(d *api.LiveDevice) float64 { return d.Refused }, rate),
		ordinal("SLOT", 4, func(d *api.LiveDevice) int { return d.Slot }),
		number("SESS", 4, func(d *api.LiveDevice) int { return d.Sessions }, strconv.Itoa),
		{title: "ADDRESS", width: 26, cell: func(d *api.LiveDevice) string { return d.Address.String() },
			compare: func(a, b *api.LiveDevice) int { return a.Address.Compare(b.Address) }},
		text("DEVICE", 0, nameOf),
	}
	groupColumns = []column[api.LiveGroup]{
		text("KIND", 5, func(g *api.LiveGroup) string { return g.Kind }),
		number("RATE/s", 6, func(g *api.LiveGroup) float64 { return g.Rate }, rate),
		number("OPEN", 5, func(g *api.LiveGroup) uint64 { return g.Connections }, count),
		number("RETR/s", 6, func(g *api.LiveGroup) float64 { return g.Retransmits }, rate).from(100),
		text("STAGE", 10, func(g *api.LiveGroup) string { return command.OrDash(g.Stage) }).from(100),
		number("P50", 8, func(g *api.LiveGroup) int64 { return g.Median }, latency),
		number("P99", 8, func(g *api.LiveGroup) int64 { return g.P99 }, latency),
		number("OLDEST", 8, func(g *api.LiveGroup) int64 { return orMinus(g.Oldest) }, age),
		text("CGROUP", 16, func(g *api.LiveGroup) string { return command.Shorten(g.Cgroup, 16) }),
		text("NAME", 0, func(g *api.LiveGroup) string {
			if g.Problem != "" {
				return strings.TrimSpace(g.Name + " PROBLEM: " + g.Problem)
			}
			return g.Name
		}),
	}
	stuckColumns = []column[api.LiveSocket]{
		number("IDLE", 7, func(s *api.LiveSocket) float64 { return s.Since }, seconds),
		number("BYTES", 5, func(s *api.LiveSocket) uint64 { return s.Bytes }, count),
		text("REASON", 11, func(s *api.LiveSocket) string { return s.Reason }),
		number("PID", 7, func(s *api.LiveSocket) int { return s.PID }, strconv.Itoa),
		text("REMOTE", 21, func(s *api.LiveSocket) string { return s.Remote.String() }),
		text("LOCAL", 0, func(s *api.LiveSocket) string { return s.Local.String() }),
	}
)

// screen returns the lines of the screen: at most as many as it has. The last lines, with the question or the keys,
// take precedence.
func (m *model) screen() []line {
	if m.width <= 0 || m.height <= 0 {
		return nil
	}
	top, bottom := m.top(), m.bottom()
	bottom = bottom[max(0, len(bottom)-m.height):]
	top = top[:min(len(top), m.height-len(bottom))]
	height := m.height - len(top) - len(bottom)
	lines := append(top, m.body(height)...)
	lines = lines[:min(len(lines), m.height-len(bottom))]
	for len(lines) < m.height-len(bottom) {
		lines = append(lines, line{})
	}
	return append(lines, bottom...)
}

// rows returns the number of rows of a list that the screen has.
func (m *model) rows() int { return max(1, m.height-len(m.top())-len(m.bottom())-1) }

func (m *model) body(height int) []line {
	switch {
	case m.help:
		return m.keys()
	case m.frame == nil:
		return []line{{"waiting for the agent", plain}}
	case m.page != nil && m.page.device.IsValid():
		return m.deviceLines()
	case m.page != nil:
		return m.slotLines()
	}
	return m.table().lines(m.width, height, true)
}

// top returns the first lines: the service, the lists, and problems.
func (m *model) top() []line {
	lines := []line{m.summary(), m.tabs()}
	if m.ended != nil {
		lines = append(lines, line{"no agent, tried again each second: " + fault.Message(m.ended), alarm})
	} else if m.replay == nil && m.frame != nil && m.now().Sub(m.arrived) >= staleTime {
		lines = append(lines, line{fmt.Sprintf("the agent has sent nothing for %s", m.now().Sub(m.arrived).Round(time.Second)), alarm})
	}
	if m.frame != nil && m.frame.Problem != "" {
		lines = append(lines, line{m.frame.Problem, alarm})
	}
	s := m.shown()
	if s != nil && s.Problem != "" {
		lines = append(lines, line{s.Name + ": " + s.Problem, alarm})
	}
	if s == nil || m.view != slotsView || m.page != nil || m.height < heightOfOutside {
		return lines
	}
	outside := outsideLines(s)
	if more := len(outside) - mostOutside; more > 0 {
		outside = append(outside[:mostOutside], line{fmt.Sprintf("%s: %s not members; see sockeye status", s.Name, format.Count(more, "other process is", "other processes are")), warning})
	}
	return append(lines, outside...)
}

// outsideLines returns a line for each process that is not ready as a member, or refused.
func outsideLines(s *api.LiveService) (lines []line) {
	for i := range s.Waiting {
		lines = append(lines, line{command.WaitingLine(s.Name, &s.Waiting[i]), warning})
	}
	for i := range s.NotAdmitted {
		lines = append(lines, line{command.RefusedLine(s.Name, &s.NotAdmitted[i]), warning})
	}
	return lines
}

func (m *model) summary() line {
	var words []string
	look := plain
	if m.replay != nil {
		words = append(words, m.replay.describe())
	}
	if m.paused {
		words = append(words, "PAUSED")
	}
	if m.frame == nil {
		return line{strings.Join(append(words, "sockeye top"), "  "), look}
	}
	at := m.frame.Time.In(m.now().Location())
	if m.replay == nil || at.Format(time.DateOnly) == m.now().Format(time.DateOnly) {
		words = append(words, at.Format(time.TimeOnly))
	} else {
		words = append(words, at.Format(time.DateTime))
	}
	s := m.shown()
	switch {
	case s != nil:
		ready, datagrams := 0, 0.0
		for i := range s.Slots {
			if s.Slots[i].Ready {
				ready++
			}
			datagrams += s.Slots[i].Datagrams
		}
		name := s.Name
		if n := len(m.frame.Services); n > 1 {
			name += fmt.Sprintf(" (of %d)", n)
		}
		words = append(words, name, fmt.Sprintf("%d of %d ready", ready, len(s.Slots)))
		if s.Split > 0 {
			words = append(words, format.Count(s.Split, "SPLIT device", "SPLIT devices"))
			look = alarm
		}
		words = append(words, rate(datagrams)+" datagrams/s", rate(s.Refused)+" refused/s")
	case m.service != "":
		words = append(words, "no service "+m.service)
	default:
		words = append(words, "no services")
	}
	return line{strings.Join(words, "  "), look}
}

func (m *model) tabs() line {
	var sizes [views]int
	omitted := 0
	if m.frame != nil {
		if s := m.shown(); s != nil {
			sizes[slotsView], sizes[devicesView], omitted = len(s.Slots), len(s.Devices)+s.Omitted, s.Omitted
		}
		sizes[groupsView], sizes[stuckView] = len(m.frame.Groups), len(m.frame.Stuck)
	}
	var words []string
	for v, name := range viewNames {
		word := fmt.Sprintf("%d %s (%d)", v+1, name, sizes[v])
		if view(v) == m.view {
			word = "[" + word + "]"
		}
		words = append(words, word)
	}
	if m.filter != "" || m.typing {
		words = append(words, "filter: "+m.filter)
	} else {
		words = append(words, "sort: "+m.table().sorted())
	}
	if m.view == devicesView && omitted > 0 {
		words = append(words, fmt.Sprintf("%d omitted", omitted))
	}
	return line{strings.Join(words, "  "), title}
}

// bottom returns the last lines: a question, or the keys.
func (m *model) bottom() []line {
	switch {
	case m.prompt != nil:
		var lines []line
		for _, text := range wrap(command.Printable(m.prompt.text+" "+m.prompt.typed+"_"), m.width) {
			lines = append(lines, line{text, title})
		}
		return append(lines, line{"enter: confirm  esc: cancel", plain})
	case m.typing:
		return []line{{"type to filter  enter: keep  esc: clear", title}}
	case m.status != "" && m.failed:
		return []line{{m.status, alarm}}
	case m.status != "":
		return []line{{m.status, title}}
	case m.help:
		return []line{{"any key: back", plain}}
	}
	hints := []string{"? keys", "q quit"}
	switch {
	case m.page != nil && m.replay != nil:
		hints = []string{"? keys", "q back", "space play", "left/right step"}
	case m.page != nil && m.page.device.IsValid():
		hints = []string{"? keys", "q back", "m move", "space pause"}
	case m.page != nil:
		hints = []string{"? keys", "q back", "d drain or ready", "space pause"}
	case m.replay != nil:
		hints = append(hints, "space play", "left/right step", "+/- speed", "tab list", "/ filter", "s sort")
	default:
		hints = append(hints, "tab list", "/ filter", "s sort", "r reverse")
		switch m.view {
		case slotsView:
			hints = append(hints, "enter page", "d drain")
		case devicesView:
			hints = append(hints, "enter page", "m move")
		}
		hints = append(hints, "space pause", "n service")
	}
	text := hints[0]
	for _, hint := range hints[1:] {
		if len(text)+2+len(hint) > m.width {
			break
		}
		text += "  " + hint
	}
	return []line{{text, plain}}
}

// keys returns the lines of the help.
func (m *model) keys() []line {
	lines := []line{{"KEY              ACTION", title}}
	add := func(key, action string) { lines = append(lines, line{fmt.Sprintf("%-16s %s", key, action), plain}) }
	add("tab, 1-4", "another list")
	add("up, down, k, j", "move the cursor; also by pgup, pgdown, home, end, g, G")
	add("s, S", "sort by the next or previous column")
	add("r", "reverse the order")
	add("/", "filter by a text")
	add("enter", "page of the slot or the device, with its events")
	add("n", "next service")
	if m.replay != nil {
		add("space", "play or pause")
		add("left, right", "one frame back or forth")
		add("b, e", "begin or end of the recording")
		add("+, -", "faster or slower")
	} else {
		add("space", "pause or continue")
		add("d", "drain the slot, or make it ready; asks for its number")
		add("m", "move the device to a slot; asks for its name")
	}
	add("q, esc", "back; q in a list: quit")
	add("ctrl+z, ctrl+c", "suspend, quit")
	return lines
}

// slotLines returns the page of a slot.
func (m *model) slotLines() []line {
	s := m.slotOfPage()
	if s == nil {
		return []line{{fmt.Sprintf("there is no slot %d", m.page.slot), plain}}
	}
	lines := []line{
		{fmt.Sprintf("slot          %d of %s, %s", s.Slot, m.page.service, stateOf(s)), title},
		{"member        " + memberOf(s), plain},
		{"cgroup        " + command.OrDash(s.Cgroup), plain},
		{fmt.Sprintf("load          %s, %s", format.Count(s.Devices, "device", "devices"), format.Count(s.Sessions, "session", "sessions")), plain},
		{fmt.Sprintf("per second    %s datagrams, %s bytes, %s connections", rate(s.Datagrams), rate(s.Bytes), rate(s.Connections)), plain},
		{fmt.Sprintf("lost          %s refused/s, %s dropped/s", rate(s.Refused), rate(s.Drops)), plain},
		{fmt.Sprintf("queued        %s of %s, %s unread, backlog %d", command.Bytes(s.Queued), command.Bytes(s.QueueLimit), command.Bytes(s.Unread), s.Backlog), plain},
		{"waiting room  " + m.roomOf(s), plain},
		{fmt.Sprintf("zero windows  %d", s.ZeroWindows), plain},
	}
	if s.ReaderLag != nil {
		lines = append(lines, line{"reader lag    " + age(*s.ReaderLag), plain})
	}
	return append(lines, m.eventLines()...)
}

// age returns a time in nanoseconds; a negative one is unknown.
func age(ns int64) string {
	if ns < 0 {
		return "-"
	}
	return command.Duration(time.Duration(ns))
}

// roomOf describes the waiting room of a slot.
func (m *model) roomOf(s *api.LiveSlot) string {
	text := format.Count(s.Waiting, "datagram", "datagrams")
	if s.WaitUntil != nil {
		text += ", open until " + s.WaitUntil.In(m.now().Location()).Format(time.TimeOnly)
	}
	return text
}

// deviceLines returns the page of a device.
func (m *model) deviceLines() []line {
	d, s := m.deviceOfPage(), m.shown()
	if d == nil {
		return append([]line{{m.page.device.String() + " is not in the list: it has been silent for 10 minutes, or the list is too long", plain}}, m.eventLines()...)
	}
	look := title
	if d.Split {
		look = alarm
	}
	at := fmt.Sprintf("slot        %d", d.Slot)
	if v := slotOf(s, d.Slot); v != nil {
		at += fmt.Sprintf(", %s, member %s", stateOf(v), memberOf(v))
	}
	seen := "-"
	if !d.LastSeen.IsZero() {
		seen = d.LastSeen.In(m.now().Location()).Format(time.DateTime)
	}
	lines := []line{
		{fmt.Sprintf("device      %s %s", d.Address, nameOf(d)), look},
		{at, plain},
		{fmt.Sprintf("per second  %s datagrams, %s bytes, %s refused", rate(d.Datagrams), rate(d.Bytes), rate(d.Refused)), plain},
	}
	if d.Dropped != nil {
		dropped := line{fmt.Sprintf("dropped     %s/s at the member, %d since the start of the agent", rate(d.Drops), *d.Dropped), plain}
		if d.Drops > 0 {
			dropped.style = alarm
		}
		lines = append(lines, dropped)
	}
	lines = append(lines, line{fmt.Sprintf("sessions    %d", d.Sessions), plain}, line{"last seen   " + seen, plain})
	return append(lines, m.eventLines()...)
}

// stateOf returns the state of a slot, or of its member if the slot is ready.
func stateOf(s *api.LiveSlot) string {
	switch {
	case s.State != "ready", s.Ready:
		return s.State
	case s.Waiting > 0, s.WaitUntil != nil:
		return "waits"
	case s.PID == 0:
		return "empty"
	}
	return "unready"
}

func memberOf(s *api.LiveSlot) string {
	if s.PID == 0 {
		return "-"
	}
	return fmt.Sprintf("%d %s", s.PID, s.Command)
}

// nameOf returns the name of a device with its marks.
func nameOf(d *api.LiveDevice) string {
	name := d.Device
	if d.Pinned {
		name += " pinned"
	}
	if d.Split {
		name += " SPLIT"
	}
	return strings.TrimSpace(name)
}

// rate returns a number with at most three digits, and a decimal unit, as in 1.2k.
func rate(n float64) string {
	if n <= 0 {
		return "0"
	}
	for _, unit := range []string{"", "k", "M", "G", "T"} {
		switch {
		case n < 9.95:
			return strconv.FormatFloat(n, 'f', 1, 64) + unit
		case n < 999.5:
			return strconv.FormatFloat(n, 'f', 0, 64) + unit
		}
		n /= 1000
	}
	return "huge"
}

// eventLines returns the events of the page until the shown frame, the newest first.
func (m *model) eventLines() []line {
	lines := []line{{}, {"events", title}}
	if m.page.problem != nil {
		return append(lines, line{"  " + fault.Message(m.page.problem), alarm})
	}
	for i := len(m.page.events) - 1; i >= 0; i-- {
		e := &m.page.events[i]
		if m.replay != nil && e.Time.After(m.frame.Time) {
			continue
		}
		look := plain
		switch e.Level {
		case "warning":
			look = warning
		case "error":
			look = alarm
		}
		for j, text := range wrap(command.EventLine(e, m.now()), m.width-4) {
			indent := "  "
			if j > 0 {
				indent = "    "
			}
			lines = append(lines, line{indent + text, look})
		}
	}
	if len(lines) == 2 {
		lines = append(lines, line{"  none", plain})
	}
	return lines
}

// wrap splits a text into lines of a width, at spaces where possible, because names have hyphens.
func wrap(text string, width int) []string {
	var lines []string
	now := ""
	for i, word := range strings.Split(text, " ") {
		if i > 0 && ansi.StringWidth(now+" "+word) <= width {
			now += " " + word
			continue
		}
		if i > 0 {
			lines = append(lines, now)
		}
		parts := strings.Split(ansi.Hardwrap(word, max(1, width), true), "\n")
		lines, now = append(lines, parts[:len(parts)-1]...), parts[len(parts)-1]
	}
	return append(lines, now)
}
