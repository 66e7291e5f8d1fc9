// SPDX-License-Identifier: Apache-2.0

package topcmd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"time"

	tea "charm.land/bubbletea/v2"

	"sockeye/internal/api"
	"sockeye/internal/cli/command"
	"sockeye/internal/fault"
)

const (
	// retryInterval is the time between two attempts to connect to an agent.
	retryInterval = time.Second
	// requestTime is the timeout of a request of the screen.
	requestTime = 15 * time.Second
	// lastEvents is the number of events of a page, and replayEvents those of which a replay shows the older ones.
	lastEvents   = 10
	replayEvents = 200
)

// errEnded is the reason for the end of a stream that the agent has closed.
var errEnded = errors.New("the agent has ended")

// feed gets frames from the agent.
type feed struct {
	client   *api.Client
	replay   string        // duration of the replay; "": live
	retry    time.Duration // between two attempts to connect to an agent
	messages chan tea.Msg
}

// connect opens the stream and waits for its first frame. With rated, it waits for a frame with rates. The caller closes
// the stream.
func (f *feed) connect(ctx context.Context, rated bool) (*api.Stream, *api.Frame, error) {
	stream, err := f.open(ctx)
	if err != nil {
		return nil, nil, err
	}
	for {
		first := new(api.Frame)
		err := stream.Next(first)
		if err == nil && (first.Seconds > 0 || !rated) {
			return stream, first, nil
		}
		if err != nil {
			stream.Close()
		}
		switch {
		case errors.Is(err, io.EOF) && f.replay != "":
			return nil, nil, fault.WithHint(fmt.Errorf("the agent has recorded nothing in the last %s", f.replay), "the agent records its state every 10 s; see its log")
		case errors.Is(err, io.EOF):
			return nil, nil, errEnded
		case err != nil:
			return nil, nil, err
		}
	}
}

func (f *feed) open(ctx context.Context) (*api.Stream, error) {
	return f.client.Stream(ctx, "/v1/live", command.Query("replay", f.replay))
}

// run sends the frames of a stream, whose first one was read, until ctx is done. If the stream of live frames ends, run
// connects again.
func (f *feed) run(ctx context.Context, stream *api.Stream, first *api.Frame) {
	if !f.send(ctx, frameMsg{first}) {
		return
	}
	err := f.frames(ctx, stream)
	if f.replay != "" {
		if errors.Is(err, io.EOF) {
			err = nil
		}
		f.send(ctx, loadedMsg{err})
		return
	}
	for {
		if errors.Is(err, io.EOF) {
			err = errEnded
		}
		if !f.send(ctx, endedMsg{err}) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(f.retry):
		}
		if stream, err = f.open(ctx); err == nil {
			err = f.frames(ctx, stream)
			stream.Close()
		}
	}
}

// frames sends the frames of a stream until it ends, and returns the reason.
func (f *feed) frames(ctx context.Context, stream *api.Stream) error {
	for {
		frame := new(api.Frame)
		if err := stream.Next(frame); err != nil {
			return err
		}
		if !f.send(ctx, frameMsg{frame}) {
			return ctx.Err()
		}
	}
}

// send passes a message to the screen. It returns false if ctx is done.
func (f *feed) send(ctx context.Context, msg tea.Msg) bool {
	select {
	case f.messages <- msg:
		return true
	case <-ctx.Done():
		return false
	}
}

// actions returns the requests of the screen.
func (f *feed) actions(ctx context.Context) actions {
	change := func(path, what string, body any) tea.Cmd {
		return func() tea.Msg {
			ctx, cancel := context.WithTimeout(ctx, requestTime)
			defer cancel()
			var plan api.Plan
			if err := f.client.Post(ctx, path, body, &plan); err != nil {
				return doneMsg{err: err}
			}
			return doneMsg{text: what + ": " + describe(&plan)}
		}
	}
	return actions{
		next: func() tea.Msg {
			select {
			case msg := <-f.messages:
				return msg
			case <-ctx.Done():
				return nil
			}
		},
		events: func(p *page) tea.Cmd {
			last := lastEvents
			if f.replay != "" {
				last = replayEvents
			}
			q := url.Values{"service": {p.service}, "slot": {strconv.Itoa(p.slot)}, "last": {strconv.Itoa(last)}}
			if p.device.IsValid() {
				q = url.Values{"device": {p.device.String()}, "last": {strconv.Itoa(last)}}
			}
			return func() tea.Msg {
				list, err := f.events(ctx, q)
				return eventsMsg{p, list, err}
			}
		},
		slot: func(s api.SlotChange) tea.Cmd {
			return change("/v1/slot", fmt.Sprintf("slot %d is set to %s", *s.Slot, s.State), s)
		},
		move: func(d api.DeviceMove) tea.Cmd {
			what := d.Device + " is pinned to its slot no longer"
			if d.Slot != nil {
				what = fmt.Sprintf("%s is pinned to slot %d", d.Device, *d.Slot)
			}
			return change("/v1/move", what, d)
		},
	}
}

// events reads the events of a query.
func (f *feed) events(ctx context.Context, q url.Values) ([]api.Event, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	stream, err := f.client.Stream(ctx, "/v1/events", q)
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	var list []api.Event
	for {
		var e api.Event
		err := stream.Next(&e)
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return nil, err
		}
		list = append(list, e)
	}
}

// describe describes the effect of a change.
func describe(plan *api.Plan) string {
	if len(plan.Changes) == 0 {
		return "nothing changed"
	}
	c := &plan.Changes[0]
	if c.Effect == "" {
		return c.What
	}
	return c.What + ", " + c.Effect
}
