// SPDX-License-Identifier: Apache-2.0

package topcmd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"

	"sockeye/internal/api"
	"sockeye/internal/fault"
)

// agent is a server on the socket of an agent. Each request to /v1/live takes the next answer.
type agent struct {
	*testing.T
	feed    *feed
	answers chan []any // frames; an api.Failure as the first value is an error
	asked   chan string
}

// newAgent starts a server, and returns it with a feed that reads from it.
func newAgent(t *testing.T, replay string) *agent {
	path := filepath.Join(t.TempDir(), "agent.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{T: t, feed: &feed{client: api.NewClient(path), replay: replay, retry: time.Millisecond, messages: make(chan tea.Msg)},
		answers: make(chan []any, 10), asked: make(chan string, 100)}
	server := &http.Server{Handler: a, ReadHeaderTimeout: time.Minute}
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return a
}

func (a *agent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	a.asked <- strings.TrimSpace(fmt.Sprintf("%s %s %s", r.Method, r.URL, body))
	var answer []any
	select {
	case answer = <-a.answers:
	case <-r.Context().Done():
		return
	}
	for i, v := range answer {
		if f, ok := v.(api.Failure); ok && i == 0 {
			w.WriteHeader(http.StatusBadRequest)
			v = f
		}
		if err := json.NewEncoder(w).Encode(v); err != nil {
			a.Error(err)
		}
	}
}

// next returns the next message of the feed.
func (a *agent) next() tea.Msg {
	a.Helper()
	select {
	case msg := <-a.feed.messages:
		return msg
	case <-time.After(time.Minute):
		a.Fatal("the feed sends nothing")
		return nil
	}
}

// at returns a frame of a second after noon.
func at(second int) *api.Frame {
	return &api.Frame{Time: noon.Add(time.Duration(second) * time.Second), Seconds: float64(second)}
}

// wants checks the time of the next frame.
func (a *agent) wants(second int) {
	a.Helper()
	f, ok := a.next().(frameMsg)
	if !ok || !f.frame.Time.Equal(at(second).Time) {
		a.Fatalf("got %v, want the frame of second %d", f, second)
	}
}

// TestFeed checks that the feed continues with the next agent, whatever the reason for the end of the one before.
func TestFeed(t *testing.T) {
	a := newAgent(t, "")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	a.answers <- []any{at(0), at(1), at(2)}
	a.answers <- []any{api.Failure{Error: "64 live views are open", Code: fault.CodeConflict}}
	a.answers <- []any{at(3)}
	a.answers <- []any{at(4), "cut short"}
	stream, first, err := a.feed.connect(ctx, true)
	if err != nil || first.Seconds != 1 {
		t.Fatalf("%v, %v: want the first frame with rates", first, err)
	}
	done := make(chan struct{})
	go func() { a.feed.run(ctx, stream, first); close(done) }()
	a.wants(1)
	a.wants(2)
	ends := func(want string) {
		t.Helper()
		if msg, ok := a.next().(endedMsg); !ok || !strings.Contains(msg.err.Error(), want) {
			t.Errorf("%v, want %q", msg, want)
		}
	}
	ends("the agent has ended")
	ends("64 live views are open")
	a.wants(3)
	ends("the agent has ended")
	a.wants(4)
	ends("read agent's answer")
	cancel()
	<-done
}

func TestFeedOfReplay(t *testing.T) {
	a := newAgent(t, "15m")
	a.answers <- []any{at(0), at(10)}
	stream, first, err := a.feed.connect(t.Context(), false)
	if err != nil {
		t.Fatal(err)
	}
	if got := <-a.asked; got != "GET /v1/live?replay=15m" {
		t.Error(got)
	}
	go a.feed.run(t.Context(), stream, first)
	a.wants(0)
	a.wants(10)
	if got := a.next(); got != (loadedMsg{}) {
		t.Errorf("%v", got)
	}
	a.answers <- nil
	if _, _, err := a.feed.connect(t.Context(), false); err == nil || fault.Message(err) != "the agent has recorded nothing in the last 15m" || fault.Hint(err) == "" {
		t.Error(err)
	}
}

// TestFeedFails checks the errors before the first frame.
func TestFeedFails(t *testing.T) {
	a := newAgent(t, "")
	a.answers <- []any{api.Failure{Error: "the agent has no GET /v1/live", Hint: "is it of another version?", Code: fault.CodeUsage}}
	if _, _, err := a.feed.connect(t.Context(), false); fault.Code(err) != fault.CodeUsage {
		t.Error(err)
	}
	a.answers <- nil
	if _, _, err := a.feed.connect(t.Context(), false); !errors.Is(err, errEnded) {
		t.Error(err)
	}
	a.feed.client = api.NewClient(filepath.Join(t.TempDir(), "none"))
	if _, _, err := a.feed.connect(t.Context(), false); !errors.Is(err, api.ErrNoAgent) {
		t.Error(err)
	}
}

// TestRequests checks the requests of pages and changes, and what the screen says about their answers.
func TestRequests(t *testing.T) {
	a := newAgent(t, "")
	act := a.feed.actions(t.Context())
	one := 1
	for _, c := range []struct {
		command tea.Cmd
		answer  []any
		asked   string
		want    string
	}{
		{act.slot(api.SlotChange{Service: "s", Slot: &one, State: "drain"}), []any{api.Plan{Changes: []api.Change{{What: "slot 1: ready -> drain", Effect: "3 devices move"}}}},
			`POST /v1/slot {"service":"s","slot":1,"state":"drain"}`, "slot 1 is set to drain: slot 1: ready -> drain, 3 devices move"},
		{act.slot(api.SlotChange{Service: "s", Slot: &one, State: "ready"}), []any{api.Plan{}},
			`POST /v1/slot {"service":"s","slot":1,"state":"ready"}`, "slot 1 is set to ready: nothing changed"},
		{act.move(api.DeviceMove{Service: "s", Device: "edge", Slot: &one}), []any{api.Plan{Changes: []api.Change{{What: "pin edge"}}}},
			`POST /v1/move {"service":"s","device":"edge","slot":1}`, "edge is pinned to slot 1: pin edge"},
		{act.move(api.DeviceMove{Service: "s", Device: "edge"}), []any{api.Failure{Error: "edge has no pin", Code: fault.CodeConflict}},
			`POST /v1/move {"service":"s","device":"edge","slot":null}`, "edge has no pin"},
	} {
		a.answers <- c.answer
		done := c.command().(doneMsg)
		got := done.text
		if done.err != nil {
			got = done.err.Error()
		}
		if asked := <-a.asked; asked != c.asked || got != c.want {
			t.Errorf("%s: %q, want\n%s: %q", asked, got, c.asked, c.want)
		}
	}
	for asked, p := range map[string]*page{
		"GET /v1/events?last=10&service=s&slot=1": {service: "s", slot: 1},
		"GET /v1/events?device=192.0.2.1&last=10": {service: "s", device: netip.MustParseAddr("192.0.2.1")},
	} {
		a.answers <- []any{api.Event{ID: 1}, api.Event{ID: 2}}
		got := act.events(p)().(eventsMsg)
		if now := <-a.asked; now != asked || got.page != p || got.err != nil || !slices.EqualFunc(got.list, []uint64{1, 2}, func(e api.Event, id uint64) bool { return e.ID == id }) {
			t.Errorf("%s: %v, want %s", now, got, asked)
		}
	}
	a.answers <- []any{api.Failure{Error: "no", Code: fault.CodeNotPermitted}}
	if got := act.events(&page{})().(eventsMsg); got.err == nil {
		t.Error("no error")
	}
}
