// SPDX-License-Identifier: Apache-2.0

package topcmd

import (
	"fmt"
	"time"

	tea "charm.land/bubbletea/v2"

	"sockeye/internal/api"
)

// speeds are the speeds of a replay, relative to the time of the recording.
var speeds = []int{1, 10, 60, 300}

// mostWait is the maximum time between two frames at speed 1. A longer gap, during which no agent ran, is skipped.
const mostWait = 10 * time.Second

// replay is the position in recorded frames.
type replay struct {
	frames []*api.Frame
	loaded bool // there are no more frames
	at     int
	speed  int // index in speeds
	step   int // number of the newest playMsg
}

// playMsg shows the next frame, unless a key has changed the position since.
type playMsg int

// play shows the next frame.
func (m *model) play(step playMsg) tea.Cmd {
	r := m.replay
	if int(step) != r.step || m.paused {
		return nil
	}
	if r.at+1 < len(r.frames) {
		m.seek(r.at + 1)
	} else if r.loaded {
		m.paused = true
		m.say(nil, "end of the recording")
	}
	return m.nextFrame()
}

// keyOfReplay handles the keys of a replay. ok is false for other keys.
func (m *model) keyOfReplay(key string) (command tea.Cmd, ok bool) {
	r := m.replay
	switch key {
	case "space", "p":
		m.paused = !m.paused
		if !m.paused && r.loaded && r.at == len(r.frames)-1 {
			m.seek(0)
		}
	case "left", "h":
		m.paused = true
		m.seek(r.at - 1)
	case "right", "l":
		m.paused = true
		m.seek(r.at + 1)
	case "b":
		m.seek(0)
	case "e":
		m.seek(len(r.frames) - 1)
	case "+":
		r.speed = min(r.speed+1, len(speeds)-1)
	case "-":
		r.speed = max(r.speed-1, 0)
	default:
		return nil, false
	}
	return m.nextFrame(), true
}

// nextFrame returns a command that shows the next frame when its time has come.
func (m *model) nextFrame() tea.Cmd {
	r := m.replay
	r.step++
	if m.paused {
		return nil
	}
	step := playMsg(r.step)
	return tea.Tick(r.wait(), func(time.Time) tea.Msg { return step })
}

// wait returns the time until the next frame.
func (r *replay) wait() time.Duration {
	wait := mostWait
	if r.at+1 < len(r.frames) {
		wait = max(0, min(wait, r.frames[r.at+1].Time.Sub(r.frames[r.at].Time)))
	}
	return wait / time.Duration(speeds[r.speed])
}

// seek shows the frame at an index, or the nearest one.
func (m *model) seek(at int) {
	r := m.replay
	if len(r.frames) == 0 {
		return
	}
	r.at = max(0, min(at, len(r.frames)-1))
	m.show(r.frames[r.at])
}

// describe describes the position.
func (r *replay) describe() string {
	return fmt.Sprintf("REPLAY %d/%d at %dx", min(r.at+1, len(r.frames)), len(r.frames), speeds[r.speed])
}
