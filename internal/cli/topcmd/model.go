// SPDX-License-Identifier: Apache-2.0

package topcmd

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
)

// frameMsg is a new frame, eventsMsg the events of a device, and doneMsg the result of a change.
type (
	frameMsg  api.Frame
	endedMsg  struct{ err error }
	eventsMsg struct {
		device string
		list   []api.Event
		err    error
	}
	doneMsg struct {
		text string
		err  error
	}
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

// prompt is a question in the last line. answer returns the next prompt, or the command of the confirmed change.
type prompt struct {
	text   string
	typed  string
	answer func(typed string) (*prompt, tea.Cmd)
}

// model is the state of the screen. Methods never block: changes and reads are commands.
type model struct {
	width, height int
	now           func() time.Time
	actions       actions

	frame   *api.Frame // shown
	newest  *api.Frame // while paused
	paused  bool
	ended   error // the stream has ended
	replay  bool
	service int

	view    view
	cursor  [views]int
	order   [views]int // column by which the list is sorted
	reverse [views]bool
	filter  string
	typing  bool // the filter is being typed

	device string // page of this address, or ""
	events []api.Event
	prompt *prompt
	status string // of the last change
}

// actions are what the screen can ask the agent for; nil functions are not possible in a replay.
type actions struct {
	next   tea.Cmd
	events func(device string) tea.Cmd
	drain  func(service string, slot int, state string) tea.Cmd
	move   func(service, device string, slot int) tea.Cmd
}

func (m *model) Init() tea.Cmd { return m.actions.next }

func (m *model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case frameMsg:
		f := api.Frame(msg)
		if m.newest = &f; !m.paused {
			m.frame = m.newest
		}
		return m, m.actions.next
	case endedMsg:
		m.ended = msg.err
	case eventsMsg:
		if msg.device == m.device {
			m.events = msg.list
			if msg.err != nil {
				m.status = msg.err.Error()
			}
		}
	case doneMsg:
		m.status = msg.text
		if msg.err != nil {
			m.status = msg.err.Error()
		}
	case tea.KeyPressMsg:
		return m, m.key(msg.String())
	}
	return m, nil
}

// key handles a key.
func (m *model) key(key string) tea.Cmd {
	if key == "ctrl+c" {
		return tea.Quit
	}
	if m.prompt != nil {
		return m.keyOfPrompt(key)
	}
	if m.typing {
		m.keyOfFilter(key)
		return nil
	}
	m.status = ""
	switch key {
	case "q":
		if m.device != "" {
			m.device = ""
			return nil
		}
		return tea.Quit
	case "esc":
		m.device, m.filter = "", ""
	case "1", "2", "3", "4":
		m.view, m.device = view(key[0]-'1'), ""
	case "tab":
		m.view, m.device = (m.view+1)%views, ""
	case "shift+tab":
		m.view, m.device = (m.view+views-1)%views, ""
	case "n":
		if m.frame != nil && len(m.frame.Services) > 0 {
			m.service = (m.service + 1) % len(m.frame.Services)
		}
	case "space", "p":
		if m.paused = !m.paused; !m.paused && m.newest != nil {
			m.frame = m.newest
		}
	case "/":
		m.typing, m.device = true, ""
	case "up", "k":
		m.cursor[m.view]--
	case "down", "j":
		m.cursor[m.view]++
	case "pgup":
		m.cursor[m.view] -= m.rows()
	case "pgdown":
		m.cursor[m.view] += m.rows()
	case "home":
		m.cursor[m.view] = 0
	case "end":
		m.cursor[m.view] = 1 << 30
	case "s":
		m.order[m.view] = (m.order[m.view] + 1) % len(m.columns())
	case "r":
		m.reverse[m.view] = !m.reverse[m.view]
	case "enter":
		if d := m.selectedDevice(); d != nil {
			m.device, m.events = d.Address.String(), nil
			if m.actions.events != nil {
				return m.actions.events(m.device)
			}
		}
	case "d", "m":
		return m.ask(key)
	}
	return nil
}

func (m *model) keyOfFilter(key string) {
	switch key {
	case "enter":
		m.typing = false
	case "esc":
		m.typing, m.filter = false, ""
	default:
		m.filter = edit(m.filter, key)
	}
}

func (m *model) keyOfPrompt(key string) tea.Cmd {
	switch key {
	case "esc":
		m.prompt, m.status = nil, "nothing was changed"
	case "enter":
		var command tea.Cmd
		if m.prompt, command = m.prompt.answer(m.prompt.typed); m.prompt == nil && command == nil {
			m.status = "nothing was changed"
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
	case key == "space":
		return text + " "
	case len([]rune(key)) == 1 && len(text) < 100:
		return text + command.Printable(key)
	}
	return text
}

// ask opens the prompt of a change of the selected slot or device. The name has to be typed.
func (m *model) ask(key string) tea.Cmd {
	s := m.shown()
	switch {
	case s == nil:
	case m.replay:
		m.status = "a replay changes nothing"
	case key == "d" && m.view == slotsView:
		slot := m.selectedSlot()
		if slot == nil {
			return nil
		}
		state := "drain"
		if slot.State != "ready" {
			state = "ready"
		}
		want, service, number := fmt.Sprintf("%s %d", state, slot.Slot), s.Name, slot.Slot
		m.prompt = &prompt{text: fmt.Sprintf("type %q to set slot %d of %s to %s:", want, number, service, state), answer: func(typed string) (*prompt, tea.Cmd) {
			if strings.TrimSpace(typed) != want {
				return nil, nil
			}
			return nil, m.actions.drain(service, number, state)
		}}
	case key == "m" && (m.view == devicesView || m.device != ""):
		d := m.selectedDevice()
		if d == nil {
			return nil
		}
		name, service := cmp.Or(d.Device, d.Address.String()), s.Name
		m.prompt = &prompt{text: fmt.Sprintf("move %s to slot:", name), answer: func(typed string) (*prompt, tea.Cmd) {
			slot, err := strconv.Atoi(strings.TrimSpace(typed))
			if err != nil || slot < 0 || slot >= len(s.Slots) {
				m.status = fmt.Sprintf("there is no slot %q", typed)
				return nil, nil
			}
			return &prompt{text: fmt.Sprintf("type %q to move it to slot %d; its connections are closed:", name, slot), answer: func(typed string) (*prompt, tea.Cmd) {
				if strings.TrimSpace(typed) != name {
					return nil, nil
				}
				return nil, m.actions.move(service, name, slot)
			}}, nil
		}}
	}
	return nil
}

// shown returns the shown service, or nil.
func (m *model) shown() *api.LiveService {
	if m.frame == nil || len(m.frame.Services) == 0 {
		return nil
	}
	return &m.frame.Services[m.service%len(m.frame.Services)]
}

func (m *model) selectedSlot() *api.LiveSlot {
	list := m.slots()
	if i := m.cursor[slotsView]; i >= 0 && i < len(list) {
		return &list[i]
	}
	return nil
}

func (m *model) selectedDevice() *api.LiveDevice {
	list := m.devices()
	if m.device != "" {
		i := slices.IndexFunc(list, func(d api.LiveDevice) bool { return d.Address.String() == m.device })
		if i < 0 {
			return nil
		}
		return &list[i]
	}
	if i := m.cursor[devicesView]; m.view == devicesView && i >= 0 && i < len(list) {
		return &list[i]
	}
	return nil
}

// matches reports whether a row has the typed filter in one of its texts.
func (m *model) matches(texts ...string) bool {
	return m.filter == "" || slices.ContainsFunc(texts, func(t string) bool { return strings.Contains(strings.ToLower(t), strings.ToLower(m.filter)) })
}

func (m *model) slots() []api.LiveSlot {
	s := m.shown()
	if s == nil {
		return nil
	}
	list := slices.DeleteFunc(slices.Clone(s.Slots), func(v api.LiveSlot) bool {
		return !m.matches(strconv.Itoa(v.Slot), v.State, v.Command, strconv.Itoa(v.PID))
	})
	arrange(m, slotsView, list, slotColumns)
	return list
}

func (m *model) devices() []api.LiveDevice {
	s := m.shown()
	if s == nil {
		return nil
	}
	list := slices.DeleteFunc(slices.Clone(s.Devices), func(d api.LiveDevice) bool { return !m.matches(d.Address.String(), d.Device) })
	arrange(m, devicesView, list, deviceColumns)
	return list
}

func (m *model) groups() []api.LiveGroup {
	if m.frame == nil {
		return nil
	}
	list := slices.DeleteFunc(slices.Clone(m.frame.Groups), func(g api.LiveGroup) bool { return !m.matches(g.Kind, g.Cgroup, g.Name) })
	arrange(m, groupsView, list, groupColumns)
	return list
}

func (m *model) stuck() []api.LiveSocket {
	if m.frame == nil {
		return nil
	}
	list := slices.DeleteFunc(slices.Clone(m.frame.Stuck), func(s api.LiveSocket) bool {
		return !m.matches(s.Service, s.Remote.String(), s.Local.String(), s.Reason)
	})
	arrange(m, stuckView, list, stuckColumns)
	return list
}

// arrange sorts a list by the chosen column; numbers descend, texts ascend.
func arrange[T any](m *model, v view, list []T, columns []column[T]) {
	c := columns[m.order[v]%len(columns)]
	slices.SortStableFunc(list, func(a, b T) int {
		order := c.compare(&a, &b)
		if m.reverse[v] {
			return -order
		}
		return order
	})
}
