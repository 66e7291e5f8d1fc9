// SPDX-License-Identifier: Apache-2.0

package topcmd

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
	"sockeye/internal/format"
)

const (
	// staleTime is the time without a frame after which the screen says so.
	staleTime = 4 * time.Second
	// eventsInterval is the time between two requests for the events of a page.
	eventsInterval = 5 * time.Second
	// mostText is the maximum size of a typed line in bytes.
	mostText = 100
)

// Messages of the feed, and results of actions.
type (
	frameMsg  struct{ frame *api.Frame }
	endedMsg  struct{ err error } // the live stream has ended; the feed connects again
	loadedMsg struct{ err error } // the replay has all its frames
	eventsMsg struct {
		page *page
		list []api.Event
		err  error
	}
	doneMsg struct {
		text string
		err  error
	}
	tickMsg struct{}
)

// view is one of the lists.
type view int

const (
	slotsView view = iota
	devicesView
	groupsView
	stuckView
	views
)

var viewNames = [views]string{"slots", "devices", "groups", "stuck"}

// page is the page of a slot or of a device.
type page struct {
	service string
	slot    int        // unless device is set
	device  netip.Addr // zero: the page of a slot
	events  []api.Event
	problem error     // of the last request for events
	asked   time.Time // last request for events
}

// prompt is a question in the last lines. answer returns the next prompt, or the command of the confirmed change.
type prompt struct {
	text   string
	typed  string
	answer func(typed string) (*prompt, tea.Cmd)
}

// actions are the requests to the agent, as commands.
type actions struct {
	next   tea.Cmd // the next message of the feed
	events func(*page) tea.Cmd
	slot   func(api.SlotChange) tea.Cmd
	move   func(api.DeviceMove) tea.Cmd
}

// model is the state of the screen. Its methods do not block: requests are commands.
type model struct {
	width, height int
	colors        bool
	now           func() time.Time
	actions       actions

	frame   *api.Frame // shown; nil before the first one
	newest  *api.Frame // differs from frame while paused
	arrived time.Time  // arrival of newest
	paused  bool
	ended   error   // the reason why there is no stream; nil: there is one
	replay  *replay // nil: live
	service string  // name of the shown service; "": no frame has had a service

	view    view
	slots   list[api.LiveSlot]
	devices list[api.LiveDevice]
	groups  list[api.LiveGroup]
	stuck   list[api.LiveSocket]
	filled  bool // the list of the view has the rows of frame
	filter  string
	typing  bool // the filter is being typed

	page   *page // nil: the list
	prompt *prompt
	help   bool
	status string // result of the last key
	failed bool   // status is an error
}

func newModel(a actions) *model {
	return &model{
		now: time.Now, actions: a,
		slots:   list[api.LiveSlot]{columns: slotColumns, texts: slotTexts, mark: slotMark, same: func(a, b *api.LiveSlot) bool { return a.Slot == b.Slot }},
		devices: list[api.LiveDevice]{columns: deviceColumns, texts: deviceTexts, same: func(a, b *api.LiveDevice) bool { return a.Address == b.Address }, mark: deviceMark},
		groups: list[api.LiveGroup]{columns: groupColumns, texts: groupTexts, mark: groupMark, same: func(a, b *api.LiveGroup) bool {
			return a.Kind == b.Kind && a.Cgroup == b.Cgroup && a.Path == b.Path && a.Name == b.Name
		}},
		stuck: list[api.LiveSocket]{columns: stuckColumns, texts: stuckTexts, same: func(a, b *api.LiveSocket) bool { return a.Local == b.Local && a.Remote == b.Remote }},
	}
}

// Init implements tea.Model.
func (m *model) Init() tea.Cmd { return tea.Batch(m.actions.next, tick()) }

func tick() tea.Cmd { return tea.Tick(time.Second, func(time.Time) tea.Msg { return tickMsg{} }) }

// Update implements tea.Model.
func (m *model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	command := m.update(msg)
	m.fill()
	return m, command
}

func (m *model) update(msg tea.Msg) tea.Cmd {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case frameMsg:
		return tea.Batch(m.actions.next, m.handleFrame(msg.frame))
	case endedMsg:
		m.ended = msg.err
		return m.actions.next
	case loadedMsg:
		m.replay.loaded = true
		if msg.err != nil {
			m.say(msg.err, "")
		}
	case playMsg:
		return m.play(msg)
	case eventsMsg:
		if msg.page == m.page {
			m.page.events, m.page.problem = msg.list, msg.err
		}
	case doneMsg:
		m.say(msg.err, msg.text)
	case tickMsg:
		return tick() // for the age of the last frame
	case tea.PasteMsg:
		if m.typing {
			for _, r := range msg.Content {
				m.keyOfFilter(string(r))
			}
		}
	case tea.KeyPressMsg:
		return m.key(msg.String())
	}
	return nil
}

// handleFrame handles a new frame.
func (m *model) handleFrame(f *api.Frame) tea.Cmd {
	first := m.newest == nil
	m.newest, m.arrived, m.ended = f, m.now(), nil
	if first && len(f.Services) == 0 && len(f.Groups) > 0 {
		m.view = groupsView
	}
	if m.replay != nil {
		m.replay.frames = append(m.replay.frames, f)
		if first {
			m.show(f)
			return m.nextFrame()
		}
		return nil
	}
	if !m.paused {
		m.show(f)
	}
	return m.events(false)
}

// key handles a key.
func (m *model) key(key string) tea.Cmd {
	switch {
	case key == "ctrl+c":
		return tea.Quit
	case key == "ctrl+z":
		return tea.Suspend
	case m.prompt != nil:
		return m.keyOfPrompt(key)
	case m.typing:
		m.keyOfFilter(key)
		return nil
	case m.help:
		m.help = false
		return nil
	}
	m.status = ""
	if m.replay != nil {
		if command, ok := m.keyOfReplay(key); ok {
			return command
		}
	}
	switch key {
	case "?":
		m.help = true
	case "q", "esc":
		switch {
		case m.page != nil:
			m.page = nil
		case key == "q":
			return tea.Quit
		default:
			m.filter, m.filled = "", false
		}
	case "1", "2", "3", "4":
		m.turn(view(key[0] - '1'))
	case "tab":
		m.turn((m.view + 1) % views)
	case "shift+tab":
		m.turn((m.view + views - 1) % views)
	case "n":
		m.nextService()
	case "space", "p":
		if m.paused = !m.paused; !m.paused && m.newest != nil {
			m.show(m.newest)
		}
	case "/":
		m.typing, m.page = true, nil
	case "s":
		m.table().sortBy(1, m.width)
		m.filled = false
	case "S":
		m.table().sortBy(-1, m.width)
		m.filled = false
	case "r":
		m.table().flip()
		m.filled = false
	case "enter":
		return m.open()
	case "d":
		m.askDrain()
	case "m":
		m.askMove()
	default:
		m.keyOfCursor(key)
	}
	return nil
}

// show shows a frame. The first service that is shown stays selected: another frame may have others before it.
func (m *model) show(f *api.Frame) {
	m.frame, m.filled = f, false
	if m.service == "" && len(f.Services) > 0 {
		m.service = f.Services[0].Name
	}
}

// turn shows another list.
func (m *model) turn(v view) { m.view, m.page, m.filled = v, nil, false }

func (m *model) nextService() {
	if m.frame == nil || len(m.frame.Services) == 0 {
		return
	}
	i := slices.IndexFunc(m.frame.Services, func(s api.LiveService) bool { return s.Name == m.service })
	m.service = m.frame.Services[(i+1)%len(m.frame.Services)].Name
	m.page, m.filled = nil, false
}

func (m *model) keyOfFilter(key string) {
	switch key {
	case "enter":
		m.typing = false
	case "esc":
		m.typing, m.filter, m.filled = false, "", false
	case "up", "down", "pgup", "pgdown", "home", "end":
		m.keyOfCursor(key)
	default:
		m.filter, m.filled = edit(m.filter, key), false
	}
}

func (m *model) keyOfCursor(key string) {
	switch key {
	case "up", "k":
		m.table().move(-1)
	case "down", "j":
		m.table().move(1)
	case "pgup":
		m.table().move(-m.rows())
	case "pgdown":
		m.table().move(m.rows())
	case "home", "g":
		m.table().move(-1 << 30)
	case "end", "G":
		m.table().move(1 << 30)
	}
}

func (m *model) keyOfPrompt(key string) tea.Cmd {
	switch key {
	case "esc":
		m.prompt = nil
		m.say(nil, "nothing was changed")
	case "enter":
		p := m.prompt
		m.prompt, m.status = nil, ""
		var command tea.Cmd
		if m.prompt, command = p.answer(strings.TrimSpace(p.typed)); m.prompt == nil && command == nil && m.status == "" {
			m.say(nil, "nothing was changed")
		}
		return command
	default:
		m.prompt.typed = edit(m.prompt.typed, key)
	}
	return nil
}

// edit applies a key to a line of text.
func edit(text, key string) string {
	switch {
	case key == "backspace":
		r := []rune(text)
		return string(r[:max(0, len(r)-1)])
	case key == "ctrl+u":
		return ""
	case key == "space":
		key = " "
	case len([]rune(key)) != 1 || command.Printable(key) != key:
		return text // another key
	}
	if len(text)+len(key) > mostText {
		return text
	}
	return text + key
}

// open opens the page of the selected slot or device.
func (m *model) open() tea.Cmd {
	s := m.shown()
	if s == nil || m.page != nil {
		return nil
	}
	p := &page{service: s.Name}
	switch m.view {
	case slotsView:
		slot := m.slots.selected()
		if slot == nil {
			return nil
		}
		p.slot = slot.Slot
	case devicesView:
		d := m.devices.selected()
		if d == nil {
			return nil
		}
		p.device = d.Address
	default:
		return nil
	}
	m.page = p
	return m.events(true)
}

// events returns a command that asks for the events of the page, if that is due.
func (m *model) events(now bool) tea.Cmd {
	if m.page == nil || m.prompt != nil || !now && m.now().Sub(m.page.asked) < eventsInterval {
		return nil
	}
	m.page.asked = m.now()
	return m.actions.events(m.page)
}

// askDrain asks for the confirmation of another state of the selected slot.
func (m *model) askDrain() {
	s, slot := m.shown(), m.slots.selected()
	if m.page != nil {
		slot = m.slotOfPage()
	}
	if s == nil || slot == nil || m.view != slotsView || m.page != nil && m.page.device.IsValid() {
		return
	}
	if m.refuses() {
		return
	}
	number := slot.Slot
	change := api.SlotChange{Service: s.Name, Slot: &number, State: "drain"}
	effect := fmt.Sprintf("drain slot %d of %s: its %s to other slots", number, s.Name, format.Count(slot.Devices, "device moves", "devices move"))
	if slot.State != "ready" {
		change.State = "ready"
		effect = fmt.Sprintf("set slot %d of %s from %s to ready: its devices return", number, s.Name, slot.State)
	}
	m.prompt = &prompt{text: fmt.Sprintf("%s. Type %d to confirm:", effect, number), answer: func(typed string) (*prompt, tea.Cmd) {
		if typed != strconv.Itoa(number) {
			return nil, nil
		}
		return nil, m.actions.slot(change)
	}}
}

// askMove asks for the slot of the selected device, and for a confirmation.
func (m *model) askMove() {
	s, d := m.shown(), m.devices.selected()
	if m.page != nil {
		d = m.deviceOfPage()
	}
	if s == nil || d == nil || m.view != devicesView {
		return
	}
	if m.refuses() {
		return
	}
	name, slots := cmp.Or(d.Device, d.Address.String()), len(s.Slots)
	change := api.DeviceMove{Service: s.Name, Device: name}
	m.prompt = &prompt{text: fmt.Sprintf("move %s from slot %d to slot (a number, or home):", name, d.Slot), answer: func(to string) (*prompt, tea.Cmd) {
		effect := fmt.Sprintf("remove the pin of %s", name)
		if to != "home" {
			slot, err := strconv.Atoi(to)
			if err != nil || slot < 0 || slot >= slots {
				m.say(fmt.Errorf("%s has no slot %q; nothing was changed", change.Service, to), "")
				return nil, nil
			}
			change.Slot = &slot
			effect = fmt.Sprintf("pin %s to slot %d; its sessions elsewhere are closed", name, slot)
		}
		return &prompt{text: fmt.Sprintf("%s. Type %s to confirm:", effect, name), answer: func(typed string) (*prompt, tea.Cmd) {
			if typed != name {
				return nil, nil
			}
			return nil, m.actions.move(change)
		}}, nil
	}}
}

// refuses reports that a replay changes nothing.
func (m *model) refuses() bool {
	if m.replay != nil {
		m.say(nil, "a replay changes nothing")
	}
	return m.replay != nil
}

// say shows a result in the last line: an error, or a text.
func (m *model) say(err error, text string) {
	m.status, m.failed = text, err != nil
	if err != nil {
		m.status = fault.Message(err)
		if hint := fault.Hint(err); hint != "" {
			m.status += "; hint: " + hint
		}
	}
}

// slotOfPage returns the slot of the page in the shown frame, or nil.
func (m *model) slotOfPage() *api.LiveSlot {
	s := m.shown()
	if s == nil {
		return nil
	}
	return slotOf(s, m.page.slot)
}

// slotOf returns a slot of a service, or nil.
func slotOf(s *api.LiveService, number int) *api.LiveSlot {
	i := slices.IndexFunc(s.Slots, func(v api.LiveSlot) bool { return v.Slot == number })
	if i < 0 {
		return nil
	}
	return &s.Slots[i]
}

// deviceOfPage returns the device of the page in the shown frame, or nil.
func (m *model) deviceOfPage() *api.LiveDevice {
	s := m.shown()
	if s == nil {
		return nil
	}
	i := slices.IndexFunc(s.Devices, func(d api.LiveDevice) bool { return d.Address == m.page.device })
	if i < 0 {
		return nil
	}
	return &s.Devices[i]
}

// table returns the list of the view.
func (m *model) table() table {
	return [views]table{&m.slots, &m.devices, &m.groups, &m.stuck}[m.view]
}

// fill brings the list of the view up to date.
func (m *model) fill() {
	if m.filled || m.frame == nil {
		return
	}
	m.filled = true
	s := m.shown()
	if s == nil {
		s = &api.LiveService{}
	}
	switch m.view {
	case slotsView:
		m.slots.fill(s.Slots, m.filter)
	case devicesView:
		m.devices.fill(s.Devices, m.filter)
	case groupsView:
		m.groups.fill(m.frame.Groups, m.filter)
	default:
		m.stuck.fill(m.frame.Stuck, m.filter)
	}
}

// shown returns the shown service, or nil.
func (m *model) shown() *api.LiveService {
	if m.frame == nil {
		return nil
	}
	for i := range m.frame.Services {
		if s := &m.frame.Services[i]; s.Name == m.service {
			return s
		}
	}
	return nil
}
