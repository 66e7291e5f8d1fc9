// SPDX-License-Identifier: Apache-2.0

package topcmd

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
)

// column is a column of a list.
type column[T any] struct {
	title string
	width int // at most; the last column takes the rest
	right bool
	cell  func(*T) string
	// compare orders rows by the column.
	compare func(a, b *T) int
}

// number returns a column of numbers, the largest first.
func number[T any, N cmp.Ordered](title string, width int, of func(*T) N, show func(N) string) column[T] {
	return column[T]{title, width, true, func(v *T) string { return show(of(v)) }, func(a, b *T) int { return cmp.Compare(of(b), of(a)) }}
}

// text returns a column of texts.
func text[T any](title string, width int, of func(*T) string) column[T] {
	return column[T]{title, width, false, of, func(a, b *T) int { return cmp.Compare(of(a), of(b)) }}
}

// ordinal returns a column of small numbers, the smallest first.
func ordinal[T any](title string, width int, of func(*T) int) column[T] {
	return column[T]{title, width, true, func(v *T) string { return strconv.Itoa(of(v)) }, func(a, b *T) int { return cmp.Compare(of(a), of(b)) }}
}

var (
	slotColumns = []column[api.LiveSlot]{
		ordinal("SLOT", 4, func(s *api.LiveSlot) int { return s.Slot }),
		text("STATE", 7, func(s *api.LiveSlot) string {
			if s.PID == 0 {
				return "empty"
			}
			if !s.Ready {
				return "filling"
			}
			return s.State
		}),
		number("DEVICES", 7, func(s *api.LiveSlot) int { return s.Devices }, strconv.Itoa),
		number("SESS", 5, func(s *api.LiveSlot) int { return s.Sessions }, strconv.Itoa),
		number("DGRAM/s", 8, func(s *api.LiveSlot) float64 { return s.Datagrams }, rate),
		number("BYTE/s", 7, func(s *api.LiveSlot) float64 { return s.Bytes }, rate),
		number("REF/s", 6, func(s *api.LiveSlot) float64 { return s.Refused }, rate),
		number("DROP/s", 6, func(s *api.LiveSlot) float64 { return s.Drops }, rate),
		number("QUEUE", 5, func(s *api.LiveSlot) float64 { return fill(s.Queued, s.QueueLimit) }, percent),
		number("0WIN", 4, func(s *api.LiveSlot) int { return s.ZeroWindows }, strconv.Itoa),
		text("MEMBER", 0, func(s *api.LiveSlot) string {
			if s.PID == 0 {
				return "-"
			}
			return fmt.Sprintf("%d %s", s.PID, s.Command)
		}),
	}
	deviceColumns = []column[api.LiveDevice]{
		number("DGRAM/s", 8, func(d *api.LiveDevice) float64 { return d.Datagrams }, rate),
		number("BYTE/s", 8, func(d *api.LiveDevice) float64 { return d.Bytes }, rate),
		number("REF/s", 7, func(d *api.LiveDevice) float64 { return d.Refused }, rate),
		ordinal("SLOT", 4, func(d *api.LiveDevice) int { return d.Slot }),
		number("SESS", 4, func(d *api.LiveDevice) int { return d.Sessions }, strconv.Itoa),
		{"ADDRESS", 39, false, func(d *api.LiveDevice) string { return d.Address.String() }, func(a, b *api.LiveDevice) int { return a.Address.Compare(b.Address) }},
		text("DEVICE", 0, func(d *api.LiveDevice) string {
			marks := d.Device
			if d.Pinned {
				marks += " pinned"
			}
			if d.Split {
				marks += " SPLIT"
			}
			return strings.TrimSpace(marks)
		}),
	}
	groupColumns = []column[api.LiveGroup]{
		text("KIND", 5, func(g *api.LiveGroup) string { return g.Kind }),
		number("RATE/s", 8, func(g *api.LiveGroup) float64 { return g.Rate }, rate),
		number("OPEN", 6, func(g *api.LiveGroup) uint64 { return g.Connections }, func(n uint64) string { return strconv.FormatUint(n, 10) }),
		number("P50", 8, func(g *api.LiveGroup) int64 { return g.Median }, latency),
		number("P99", 8, func(g *api.LiveGroup) int64 { return g.P99 }, latency),
		text("CGROUP", 20, func(g *api.LiveGroup) string { return g.Cgroup }),
		text("NAME", 0, func(g *api.LiveGroup) string { return g.Name }),
	}
	stuckColumns = []column[api.LiveSocket]{
		number("IDLE", 7, func(s *api.LiveSocket) float64 { return s.Since }, func(s float64) string {
			return (time.Duration(s*1000) * time.Millisecond).Round(100 * time.Millisecond).String()
		}),
		number("BYTES", 7, func(s *api.LiveSocket) uint64 { return s.Bytes }, func(n uint64) string { return rate(float64(n)) }),
		text("REASON", 11, func(s *api.LiveSocket) string { return s.Reason }),
		number("PID", 7, func(s *api.LiveSocket) int { return s.PID }, strconv.Itoa),
		text("REMOTE", 24, func(s *api.LiveSocket) string { return s.Remote.String() }),
		text("LOCAL", 0, func(s *api.LiveSocket) string { return s.Local.String() }),
	}
)

// rate returns a number with three digits and a unit, as in 12.3k.
func rate(n float64) string {
	units := []string{"", "k", "M", "G", "T"}
	for _, unit := range units {
		switch {
		case n == 0:
			return "0"
		case n < 9.95:
			return strconv.FormatFloat(n, 'f', 1, 64) + unit
		case n < 999.5:
			return strconv.FormatFloat(n, 'f', 0, 64) + unit
		}
		n /= 1000
	}
	return "huge"
}

func fill(used, limit uint64) float64 {
	if limit == 0 {
		return 0
	}
	return float64(used) / float64(limit)
}

func percent(share float64) string { return strconv.FormatFloat(100*share, 'f', 0, 64) + "%" }

func latency(ns int64) string {
	switch d := time.Duration(ns); {
	case d == 0:
		return "-"
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(10 * time.Microsecond).String()
	default:
		return d.Round(10 * time.Millisecond).String()
	}
}

// columns returns the titles of the current list.
func (m *model) columns() (titles []string) {
	add := func(title string) { titles = append(titles, title) }
	switch m.view {
	case slotsView:
		for _, c := range slotColumns {
			add(c.title)
		}
	case devicesView:
		for _, c := range deviceColumns {
			add(c.title)
		}
	case groupsView:
		for _, c := range groupColumns {
			add(c.title)
		}
	case stuckView:
		for _, c := range stuckColumns {
			add(c.title)
		}
	}
	return titles
}

// rows returns the number of rows of a list that fit on the screen.
func (m *model) rows() int { return max(1, m.height-5) }

// View returns the screen.
func (m *model) View() tea.View {
	v := tea.NewView(m.screen())
	v.AltScreen = true
	v.WindowTitle = "sockeye top"
	return v
}

// screen returns the lines of the screen, cut to its size.
func (m *model) screen() string {
	if m.width == 0 {
		return ""
	}
	lines := []string{m.summary(), m.tabs()}
	switch {
	case m.frame == nil && m.ended != nil:
		lines = append(lines, m.ended.Error())
	case m.frame == nil:
		lines = append(lines, "waiting for the agent")
	case m.device != "":
		lines = append(lines, m.page()...)
	case m.view == slotsView:
		lines = append(lines, table(m, slotsView, m.slots(), slotColumns)...)
	case m.view == devicesView:
		lines = append(lines, table(m, devicesView, m.devices(), deviceColumns)...)
	case m.view == groupsView:
		lines = append(lines, table(m, groupsView, m.groups(), groupColumns)...)
	default:
		lines = append(lines, table(m, stuckView, m.stuck(), stuckColumns)...)
	}
	for len(lines) < m.height-1 {
		lines = append(lines, "")
	}
	lines = append(lines[:max(0, min(len(lines), m.height-1))], m.bottom())
	for i, line := range lines {
		lines[i] = cut(line, m.width)
	}
	return strings.Join(lines, "\n")
}

func (m *model) summary() string {
	s := m.shown()
	if s == nil {
		return "sockeye top"
	}
	ready, datagrams := 0, 0.0
	for i := range s.Slots {
		if s.Slots[i].Ready {
			ready++
		}
		datagrams += s.Slots[i].Datagrams
	}
	words := []string{s.Name, fmt.Sprintf("%d of %d ready", ready, len(s.Slots)), command.Count(len(s.Devices)+s.Omitted, "device", "devices"),
		rate(datagrams) + " datagrams/s", rate(s.Refused) + " refused/s"}
	if s.Split > 0 {
		words = append(words, command.Count(s.Split, "SPLIT device", "SPLIT devices"))
	}
	if m.ended != nil {
		words = append(words, "ENDED: "+m.ended.Error())
	} else if m.paused {
		words = append(words, "PAUSED")
	}
	if m.replay {
		words = append(words, "replay of")
	}
	return strings.Join(append(words, m.frame.Time.Local().Format(time.TimeOnly)), "  ")
}

func (m *model) tabs() string {
	var words []string
	for v, name := range viewNames {
		word := fmt.Sprintf("%d %s", v+1, name)
		if view(v) == m.view {
			word = "[" + word + "]"
		}
		words = append(words, word)
	}
	if m.filter != "" || m.typing {
		words = append(words, "filter: "+m.filter)
	}
	return strings.Join(words, "  ")
}

func (m *model) bottom() string {
	switch {
	case m.prompt != nil:
		return m.prompt.text + " " + m.prompt.typed + "_   esc: cancel"
	case m.typing:
		return "type to filter   enter: keep   esc: clear"
	case m.status != "":
		return m.status
	}
	keys := "tab view  / filter  s sort  r reverse  enter device  d drain  m move  n service  space pause  q quit"
	if m.width < len(keys) {
		keys = "tab view / filter s sort enter device d drain m move space pause q quit"
	}
	return keys
}

// table returns the header and the visible rows of a list.
func table[T any](m *model, v view, list []T, columns []column[T]) []string {
	m.cursor[v] = max(0, min(m.cursor[v], len(list)-1))
	first := max(0, min(m.cursor[v]-m.rows()/2, len(list)-m.rows()))
	header := " "
	for i, c := range columns {
		title := c.title
		if i == m.order[v]%len(columns) {
			title += map[bool]string{false: "*", true: "^"}[m.reverse[v]]
		}
		header += pad(title, c.width, c.right) + " "
	}
	lines := []string{header}
	for i := first; i < min(first+m.rows(), len(list)); i++ {
		line := " "
		if i == m.cursor[v] {
			line = ">"
		}
		for _, c := range columns {
			line += pad(command.Printable(c.cell(&list[i])), c.width, c.right) + " "
		}
		lines = append(lines, line)
	}
	if len(list) == 0 {
		lines = append(lines, "  none")
	}
	return lines
}

// pad brings a text to a width; 0 leaves the text as it is.
func pad(s string, width int, right bool) string {
	n := len([]rune(s))
	switch {
	case width == 0 || n == width:
		return s
	case n > width:
		return cut(s, width)
	case right:
		return strings.Repeat(" ", width-n) + s
	}
	return s + strings.Repeat(" ", width-n)
}

// cut cuts a text to a width in columns.
func cut(s string, width int) string {
	r := []rune(s)
	if len(r) <= width {
		return s
	}
	if width < 2 {
		return string(r[:max(0, width)])
	}
	return string(r[:width-1]) + "…"
}

// page returns the page of a device.
func (m *model) page() []string {
	d := m.selectedDevice()
	if d == nil {
		return []string{m.device + " sends nothing now"}
	}
	lines := []string{
		fmt.Sprintf("device   %s %s", d.Address, d.Device),
		fmt.Sprintf("slot     %d", d.Slot),
		fmt.Sprintf("rates    %s datagrams/s, %s bytes/s, %s refused/s", rate(d.Datagrams), rate(d.Bytes), rate(d.Refused)),
		fmt.Sprintf("sessions %d", d.Sessions),
		"last     " + d.LastSeen.Local().Format(time.TimeOnly),
		"", "events",
	}
	if s := m.shown(); d.Slot < len(s.Slots) {
		v := s.Slots[d.Slot]
		lines[1] = fmt.Sprintf("slot     %d, %s, member %d %s", d.Slot, v.State, v.PID, command.Printable(v.Command))
	}
	for i := range m.events {
		e := &m.events[len(m.events)-1-i]
		lines = append(lines, "  "+e.Time.Local().Format(time.DateTime)+"  "+command.Printable(e.Text))
	}
	return lines
}
